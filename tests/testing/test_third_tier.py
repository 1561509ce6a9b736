# SPDX-License-Identifier: Apache-2.0
"""A tier beside disk and Redis needs its own file, and one line of registration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.servers
def test_a_third_tier_is_counted_and_shown_by_its_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.testing.third_tier", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ok\n"


def test_it_is_small() -> None:
    lines = (Path(__file__).parent / "objects.py").read_text().splitlines()
    assert len(lines) <= 150
