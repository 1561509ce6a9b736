# SPDX-License-Identifier: Apache-2.0
"""What survival.md says is tested: each test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
PAGE = Path(__file__).parent / "survival.md"
# What the list has to have an item about, as it is written there.
FAULTS = (
    "killed in the middle of loads",
    "killed in the middle of stores",
    "SIGSTOP",
    "restarted empty",
    "started after us",
    "maxclients",
    "noeviction",
    "single stripes evicted",
    "LOADING",
    "BUSY",
    "cut after any number of bytes",
    "garbage in place of a reply",
    "another type",
    "longer or shorter",
    "corrupted in the header",
    "corrupted in the payload",
    "checksum",
    "two writers",
    "clock jumps",
)


def section() -> str:
    text = PAGE.read_text()
    return text[text.index("\n## Faults") :].split("\n## ")[1]


def items() -> list[tuple[str, str]]:
    """Each fault, and what is said of it, with the names of its tests."""
    text = section().partition("\n- ")[2].rstrip()
    parts = (item.partition(": ") for item in text.split("\n- "))
    return [(" ".join(fault.split()), said) for fault, _, said in parts]


def existing(*directories: str) -> set[str]:
    """Every test function in them."""
    return {
        name
        for directory in directories
        for path in (TESTS / directory).rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }


def test_every_item_names_tests_that_exist() -> None:
    known = existing("resp", "fuzz")
    assert len(items()) >= 15
    for fault, said in items():
        named = re.findall(r"`(test_\w+)`", said)
        assert named, f"no test of: {fault}"
        assert set(named) <= known, f"of: {fault}"


def test_every_fault_has_an_item() -> None:
    for fault in FAULTS:
        assert any(fault in described for described, _ in items()), fault


def test_every_report_names_tests_that_exist() -> None:
    table = PAGE.read_text().partition("\n## What users of others have met")[2]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 20
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, f"no test of: {row}"
        assert set(named) <= existing(""), row
