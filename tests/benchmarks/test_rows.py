# SPDX-License-Identifier: Apache-2.0
"""Samples become rows of medians, with exactly the fields that are promised."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from benchmarks.plane.messages import MIB, Measured, Setting
from benchmarks.plane.rows import Case, Row, Samples, size_text
from lmcache_redis.config import DEFAULT_SLOT_BYTES

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


def test_the_fields() -> None:
    row = row_of(Case("ours", Setting(), "load", MIB, 1), (1.0, 1.0))
    assert set(asdict(row)) == FIELDS


def test_medians_not_means() -> None:
    case = Case("ours", Setting(), "load", 8 * MIB, 16)
    row = row_of(case, (0.1, 0.05), (9.0, 9.0), (0.05, 0.01))
    gigabytes = 128 * MIB / 1e9
    assert row.gb_per_s == pytest.approx(gigabytes / 0.1, abs=1e-3)
    assert row.cpu_s_per_gb == pytest.approx(0.05 / gigabytes, abs=1e-3)
    assert row.ms is None
    assert row.rounds == 3


def test_ours_stripes_and_checks() -> None:
    row = row_of(Case("ours", Setting(), "overwrite", 8 * MIB, 16), (1.0, 1.0))
    assert row.checksum
    assert row.default
    assert row.connections == Setting().connections
    assert row.threads == Setting().threads
    assert row.stripe_bytes is not None
    assert row.stripe_bytes <= DEFAULT_SLOT_BYTES
    load = row_of(Case("ours", Setting(), "load", 8 * MIB, 16), (1.0, 1.0))
    assert load.connections == Setting().connections
    assert load.threads == Setting().threads


def test_ours_without_checksums_says_so() -> None:
    row = row_of(Case("ours", Setting(checksums=False), "load", MIB, 1), (1.0, 1.0))
    assert (row.checksum, row.default) == (False, False)


def test_ours_set_otherwise_is_not_the_default() -> None:
    assert not row_of(Case("ours", Setting(8), "load", MIB, 1), (1.0, 1.0)).default


def test_a_peer_stores_whole_chunks_without_checksum() -> None:
    row = row_of(Case("lmcache", Setting(4), "steady", 8 * MIB, 16), (1.0, 1.0))
    assert (row.connections, row.checksum, row.default) == (4, False, False)
    assert (row.stripe_bytes, row.threads, row.how) == (8 * MIB, None, None)


def test_a_scan_has_ms_alone() -> None:
    row = row_of(Case("ours", Setting(), "scan", 70, 1000, "half"), (0.5e-3, 1.0))
    assert row.ms == 0.5
    assert (row.gb_per_s, row.cpu_s_per_gb, row.stripe_bytes) == (None, None, None)
    assert (row.cached, row.items, row.connections, row.checksum) == ("half", 1000, 1, False)


def test_cases_are_told_apart_and_keep_their_order() -> None:
    made = Samples()
    cases = [
        Case("ceiling", Setting(1, how=how), op, MIB, 1)
        for how in ("socket", "memcpy")
        for op in ("load", "overwrite")
    ]
    for _ in range(2):
        for case in cases:
            made.add(case, Measured(1.0, 1.0))
    assert [(row.how, row.op, row.rounds) for row in made.rows()] == [
        (case.setting.how, case.op, 2) for case in cases
    ]


def test_sizes_in_words() -> None:
    assert [size_text(n) for n in (256 << 10, MIB, 32 * MIB)] == ["256 KiB", "1 MiB", "32 MiB"]
