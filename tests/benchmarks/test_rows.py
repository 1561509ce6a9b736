# SPDX-License-Identifier: Apache-2.0
"""Samples become rows of medians, with exactly the fields that are promised."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.plane.messages import MIB, Measured, Setting
from benchmarks.plane.rows import Case, Row, Samples, size_text

FIELDS = {
    *("client", "op", "value_bytes", "items", "connections", "checksum"),
    *("gb_per_s", "ms", "cpu_s_per_gb", "rounds"),
    *("cached", "how", "default", "stripe_bytes", "threads", "sealed"),
}


def row_of(case: Case, *samples: tuple[float, float]) -> Row:
    made = Samples()
    for elapsed_s, cpu_s in samples:
        made.add(case, Measured(elapsed_s, cpu_s))
    (row,) = made.rows()
    return row


def test_medians_not_means() -> None:
    case = Case("ours", Setting(), "load", 8 * MIB, 16)
    row = row_of(case, (0.1, 0.05), (9.0, 9.0), (0.05, 0.01))
    assert set(asdict(row)) == FIELDS
    gigabytes = 128 * MIB / 1e9
    assert row.gb_per_s == pytest.approx(gigabytes / 0.1, abs=1e-3)
    assert row.cpu_s_per_gb == pytest.approx(0.05 / gigabytes, abs=1e-3)
    assert (row.ms, row.rounds) == (None, 3)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            Case("ours", Setting(5), "overwrite", 8 * MIB, 16),
            {"checksum": True, "default": False, "connections": 5},
        ),
        (Case("ours", Setting(5), "load", 8 * MIB, 16), {"connections": 5}),
        (Case("ours", Setting(), "load", MIB, 1), {"checksum": True, "default": True}),
        (
            Case("ours", Setting(checksums=False), "load", MIB, 1),
            {"checksum": False, "default": False},
        ),
        (
            Case("lmcache", Setting(4), "steady", 8 * MIB, 16),
            {"connections": 4, "checksum": False, "default": False}
            | {"stripe_bytes": 8 * MIB, "threads": None, "how": None},
        ),
        (
            Case("ours", Setting(), "scan", 70, 1000, "half"),
            {"ms": 1e3, "gb_per_s": None, "cpu_s_per_gb": None, "stripe_bytes": None}
            | {"cached": "half", "items": 1000, "connections": 1, "checksum": False},
        ),
    ],
)
def test_a_row_says_how_its_client_was_set(case: Case, expected: dict[str, Any]) -> None:
    row = asdict(row_of(case, (1.0, 1.0)))
    assert {name: row[name] for name in expected} == expected


def test_cases_are_told_apart_and_keep_their_order() -> None:
    made = Samples()
    cases = [
        Case("ceiling", Setting(1, how=how), op, MIB, 1)
        for how in ("socket", "memcpy")
        for op in ("load", "overwrite")
    ]
    for case in 2 * cases:
        made.add(case, Measured(1.0, 1.0))
    assert [(row.how, row.op, row.rounds) for row in made.rows()] == [
        (case.setting.how, case.op, 2) for case in cases
    ]


def test_sizes_in_words() -> None:
    assert [size_text(n) for n in (256 << 10, MIB, 32 * MIB)] == ["256 KiB", "1 MiB", "32 MiB"]
