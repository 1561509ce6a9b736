# SPDX-License-Identifier: Apache-2.0
"""LMCache's own client, where there is one: installed, or as scripts/setup unpacks it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fetch import find_server
from tests.compat.gateway.serving import DictTier, Serving

pytestmark = pytest.mark.servers

ROOT = Path(__file__).parents[3]
FOLDER = find_server()


@pytest.mark.skipif(FOLDER is None, reason="needs LMCache's wheel, which scripts/setup fetches")
def test_it_finds_what_it_expects(backend: DictTier) -> None:
    with Serving(backend, buffer_bytes=128 << 20) as serving:
        words = [str(serving.port), str(FOLDER)]
        done = subprocess.run(
            [sys.executable, "-m", "tests.compat.gateway.lmcache_client", *words],
            cwd=ROOT, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.strip().endswith("messages, 12 chunks")
        stats = serving.stats()
        assert (stats["puts_stored"], stats["gets_hit"], stats["malformed_requests"]) == (12, 12, 0)
        assert stats["requests_exist"] == stats["requests_get"] == 24
