"""LMCache's own client, where there is one: installed, or unpacked in $LMCACHE_WHEEL."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gateway.serving import DictBackend, Serving

ROOT = Path(__file__).parents[2]
FOLDER = os.environ.get("LMCACHE_WHEEL")


@pytest.mark.skipif(
    FOLDER is None and importlib.util.find_spec("lmcache") is None,
    reason="needs lmcache, installed or as an unpacked wheel that $LMCACHE_WHEEL names",
)
def test_it_finds_what_it_expects(backend: DictBackend) -> None:
    with Serving(backend, buffer_bytes=64 << 20, max_payload_bytes=32 << 20) as serving:
        words = [str(serving.port), *([FOLDER] if FOLDER else [])]
        done = subprocess.run(
            [sys.executable, "-m", "tests.gateway.lmcache_client", *words],
            cwd=ROOT, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.strip().endswith("messages, 12 chunks")
        stats = serving.stats()
        assert (stats["stored"], stats["hits"], stats["malformed"]) == (12, 12, 0)
        assert stats["exists"] == stats["gets"] == 24
