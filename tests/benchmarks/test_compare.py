# SPDX-License-Identifier: Apache-2.0
"""Which settings are compared, with what target, and what the tables say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_setting

from benchmarks.plane.compare import (
    Verdict,
    best,
    connection_table,
    median_table,
    move_target,
    ratio_table,
    scan_table,
    sealed_table,
    verdicts,
)
from benchmarks.plane.messages import MIB, Measured, Setting
from benchmarks.plane.rows import MOVES, Case, Samples
from tests.benchmarks.rows import SIZES, made_up_rows

ROWS = made_up_rows()
LOADS = [row for row in ROWS if (row.op, row.value_bytes) == ("load", 32 * MIB)]


def test_a_peer_is_taken_at_its_best() -> None:
    lmcache = [row for row in LOADS if row.client == "lmcache"]
    assert len(lmcache) == 2
    chosen = best(LOADS, "lmcache")
    assert chosen is not None
    assert chosen.gb_per_s == max(row.gb_per_s or 0.0 for row in lmcache)


def test_ours_is_taken_at_its_defaults() -> None:
    chosen = best(LOADS, "ours")
    assert chosen is not None
    assert chosen.default
    assert chosen.gb_per_s is not None
    assert chosen.gb_per_s < max(row.gb_per_s or 0.0 for row in LOADS if row.client == "ours")


def test_ours_without_a_default_is_taken_as_it_was_set_first() -> None:
    others = [replace(row, default=False) for row in LOADS]
    assert best(others, "ours") == next(row for row in others if row.client == "ours")


def test_the_best_scan_is_the_shortest() -> None:
    scans = [row for row in ROWS if (row.items, row.cached, row.client) == (1000, "all", "lmcache")]
    slower = replace(scans[0], ms=99.0)
    assert best([slower, *scans], "lmcache") == scans[0]


def test_a_client_that_is_missing_has_no_best() -> None:
    assert best([], "lmcache") is None
    assert best([], "ours") is None


@pytest.mark.parametrize(
    ("op", "mib", "client", "target"),
    [
        ("load", 32, "lmcache", 2.7),
        ("first-store", 32, "lmcache", 1.8),
        ("overwrite", 32, "lmcache", 1.8),
        ("steady", 32, "lmcache", 1.8),
        ("load", 8, "lmcache", None),
        ("load", 2, "lmcache", 1.0),
        ("steady", 0.25, "lmcache", 1.0),
        ("load", 32, "redis-py", 4.0),
        ("overwrite", 32, "redis-py", 4.0),
        ("load", 2, "redis-py", None),
        ("load", 32, "valkey-glide", None),
        ("load", 32, "ceiling", None),
    ],
)
def test_targets(op: str, mib: float, client: str, target: float | None) -> None:
    assert move_target(op, int(mib * MIB), client) == target


def test_met_or_not() -> None:
    ratio = Verdict("load 32 MiB", "lmcache", 2.7, 1.0, 2.7, 2.7)
    assert ratio.met is True
    assert replace(ratio, figure=2.69).met is False
    assert replace(ratio, target=None).met is None
    limit = Verdict("scan", "ours", 0.6, None, 0.6, 0.6)
    assert limit.met is True
    assert replace(limit, figure=0.61).met is False


def test_every_operation_and_size_is_compared_with_every_peer() -> None:
    found = verdicts(ROWS)
    moves = [verdict for verdict in found if not verdict.what.startswith("scan")]
    assert len(moves) == len(MOVES) * len(SIZES) * 4
    scans = [verdict for verdict in found if verdict.what.startswith("scan")]
    assert {verdict.target for verdict in scans if verdict.theirs is None} == {0.6, 6.0}
    lmcache = [v for v in scans if v.client == "lmcache" and "1,000," in v.what]
    assert [(v.figure, v.target, v.met) for v in lmcache] == [(24.0, 20.0, True)] * 3


def test_the_ceiling_is_the_bare_socket_and_not_memcpy() -> None:
    (verdict,) = [v for v in verdicts(LOADS) if v.client == "ceiling"]
    socket = max(row.gb_per_s or 0.0 for row in LOADS if row.how == "socket")
    assert verdict.theirs == socket


def test_ours_alone_has_no_comparison() -> None:
    assert verdicts([row for row in LOADS if row.client == "ours"]) == []


def test_tables_have_a_line_for_each_operation_and_size() -> None:
    medians = median_table(ROWS)
    assert len(medians) == len(MOVES) * len(SIZES)
    assert {"ours", "lmcache", "redis-py", "valkey-glide", "socket", "memcpy"} <= set(medians[0])
    assert {"ours CPU s/GB", "lmcache CPU s/GB", "redis-py CPU s/GB"} <= set(medians[0])
    assert "(4)" in next(line for line in medians if line["GB/s"] == "load")["ours"]
    assert len(scan_table(ROWS)) == 6
    connections = connection_table(ROWS)
    assert len(connections) == len(MOVES) * len(SIZES)
    # Unequal lines would be cut to the columns of the first.
    for table in (medians, connections, ratio_table(verdicts(ROWS))):
        assert len({tuple(line) for line in table}) == 1


def test_the_table_of_ratios_says_what_was_met() -> None:
    lines = {line["ours"]: line for line in ratio_table(verdicts(ROWS))}
    load = lines["load 32 MiB"]
    assert load["times lmcache"].endswith("(at least 2.7: NOT MET)")
    assert load["times redis-py"].endswith("(at least 4: met)")
    assert "(" not in load["times valkey-glide"]
    scan = lines["scan of 1,000, all cached"]
    assert scan["figure"] == "0.50 ms (at most 0.6: met)"
    assert scan["times lmcache"] == "24.00 (at least 20: met)"


def test_sealed_values_beside_the_same_plain_ones() -> None:
    samples = Samples()
    for op, seconds in (("load", 0.01), ("overwrite", 0.02)):
        for setting in (Setting(), Setting(2)):
            slower = seconds * (3 if setting == Setting() else 4)
            samples.add(Case("ours", setting, op, 32 * MIB, 8), Measured(seconds, 1.0))
            sealed = replace_setting(setting, sealed=True)
            samples.add(Case("ours", sealed, op, 32 * MIB, 8), Measured(slower, 2.0))
    table = sealed_table(samples.rows())
    assert [(line["ours"], line["connections"], line["sealed / plain"]) for line in table] == [
        ("load", 4, 0.33),
        ("load", 2, 0.25),
        ("overwrite", 4, 0.33),
        ("overwrite", 2, 0.25),
    ]
    assert sealed_table(ROWS) == []
