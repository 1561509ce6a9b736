"""The table of docs/internals/data-plane.md says what is tested: each test it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "internals" / "data-plane.md"
# What the table has to have a row about, as it is written there.
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
    return text[text.index("\n## What it survives") :].split("\n## ")[1]


def rows() -> list[list[str]]:
    lines = [line for line in section().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def existing() -> set[str]:
    """Every test function beside this file, and of the fuzzer."""
    return {
        node.name
        for directory in ("resp", "fuzz")
        for path in (TESTS / directory).rglob("test_*.py")
        for node in ast.parse(path.read_text(), str(path)).body
        if isinstance(node, ast.FunctionDef)
    }


def test_every_row_names_tests_that_exist() -> None:
    known = existing()
    for row in rows():
        assert len(row) == 3, row
        named = re.findall(r"`(test_\w+)`", row[2])
        assert named, f"no test in the row about: {row[0]}"
        assert set(named) <= known, f"in the row about: {row[0]}"


def test_every_test_named_around_the_table_exists() -> None:
    assert set(re.findall(r"`(test_\w+)`", section())) <= existing()


def test_every_fault_has_a_row() -> None:
    described = [row[0] for row in rows()]
    for fault in FAULTS:
        assert any(fault in row for row in described), fault
