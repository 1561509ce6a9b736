# SPDX-License-Identifier: Apache-2.0
"""What survival.md says is tested: each test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
PAGE = Path(__file__).parent / "survival.md"


def test_every_fault_and_report_names_tests_that_exist() -> None:
    existing = {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^ *def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    faults, reports = PAGE.read_text().split("\n## ")[1:]
    items = faults.split("\n- ")[1:]
    rows = [line for line in reports.splitlines() if line.startswith("| ")][2:]
    assert len(items) >= 15
    assert len(rows) >= 20
    for said in (*items, *rows):
        named = re.findall(r"`(test_\w+)`", said)
        assert named, f"no test of: {said}"
        assert set(named) <= existing, f"of: {said}"
