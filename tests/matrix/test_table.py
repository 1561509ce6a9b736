# SPDX-License-Identifier: Apache-2.0
"""The tables of the matrix: the newest row of each cell, and notes for sentences."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

import pytest

from tests.matrix.cells import Result
from tests.matrix.table import BEGIN, END, PYTHONS, VERSIONS, add_python, main


def test_the_newest_rows_are_between_the_markers(tmp_path: Path) -> None:
    rows, page = tmp_path / "rows", tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    on = {"asked_tokens": 1000, "host_tokens": 900, "redis_tokens": 870}
    for result in (
        Result("0.32.0", "Llama", "Redis 7.0.15", wrong="an older row"),
        Result("0.32.0", "Llama", "Redis 7.0.15", **on),
        Result("0.32.0", "Llama", "Valkey 8.0.1", wrong="other|tokens"),
        Result("0.32.0", "Llama, PP 2", "Redis 7.0.15", vllm_alone="KeyError: 'x|y'"),
        Result("0.9.0", "Llama", "Redis 7.0.15", off="a reason"),
        Result("0.9.0", "Gemma-3", "Redis 7.0.15", off="a reason"),
    ):
        result.append_to(rows)
    main(rows, page)
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\nRun on ")
    assert text.endswith(f"{END}\nafter\n")
    assert "At least 87 % of the prompts' tokens hit." in text
    assert "| models | cached | cache off | vLLM alone fails | not as they should |" in text
    assert "| Llama | 0.32.0 | 0.9.0 |  |  |" in text
    assert "| Gemma-3 |  | 0.9.0 |  | 0.32.0 not run |" in text
    assert "| Llama, PP 2 |  |  | 0.32.0 | 0.9.0 not run |" in text
    assert "cached on Valkey 8.0.1 too: Llama **fails** (note 1)." in text
    assert "\n1. other\\|tokens\n" in text


def test_versions_with_equal_cells_are_a_range(tmp_path: Path) -> None:
    rows, page = tmp_path / "rows", tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    for minor in (8, 9, 10, 11):
        for model, off in (("Llama", ""), ("Gemma-3", "x" if minor == 9 else "")):
            row = Result(f"0.{minor}.0", model, "Redis 7.0.15", off, 8, 8, 4)
            row.append_to(rows)
    main(rows, page)
    text = page.read_text()
    assert "| Llama | 0.8.0 to 0.11.0 |  |  |" in text
    assert "| Gemma-3 | 0.8.0, 0.10.0, 0.11.0 | 0.9.0 |  |" in text


def test_rows_without_engines_have_a_table_of_their_own(tmp_path: Path) -> None:
    rows, page = tmp_path / "rows", tmp_path / "page.md"
    page.write_text(f"{VERSIONS[0]}\n{VERSIONS[1]}\nbetween\n{BEGIN}\nold\n{END}\n")
    for result in (
        Result("0.9.0", "settings", "", wrong="2 without a verdict"),
        Result("0.10.0, its Python over 0.9.0", "settings", "", passed=1001),
        Result("0.10.0, its Python over 0.9.0", "scheduler", "", passed=7),
        Result("0.9.0", "of 0.8.0", "", passed=2304),
    ):
        result.append_to(rows)
    main(rows, page)
    text = page.read_text()
    assert text.endswith(f"{VERSIONS[1]}\nbetween\n{BEGIN}\nold\n{END}\n")
    assert (
        "| 0.10.0, its Python over 0.9.0 | 1,001 | 7 |\n"
        "| 0.9.0 | **fails**: 2 without a verdict | not run |\n"
        "\nTokens hit across versions, and sizes: 0.9.0 of 0.8.0: 2,304.\n"
    ) in text


def test_a_python_has_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.32.0")
    log, page = tmp_path / "log", tmp_path / "page.md"
    page.write_text(f"a\n{PYTHONS[0]}| Python |\n| --- |\n{PYTHONS[1]}\nb\n")
    for version, servers in ("3.12.1", "7 passed"), ("3.9.2", "8 passed"), ("3.12.4", "9 failed"):
        monkeypatch.setattr(platform, "python_version", lambda version=version: version)
        log.write_text(
            f"== test session ==\n== {servers} in 3.21s ==\n=== 3 passed in 65.4s (0:01:05) ===\n"
        )
        add_python(log, page)
    text = page.read_text()
    assert (
        "| 3.9.2 | 0.32.0 | 8 passed | 3 passed |\n| 3.12.4 | 0.32.0 | 9 failed | 3 passed |\n"
        in text
    )
    assert "3.12.1" not in text
    assert text.startswith("a\n")
    assert text.endswith(f"{PYTHONS[1]}\nb\n")
