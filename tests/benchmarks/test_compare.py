# SPDX-License-Identifier: Apache-2.0
"""Samples become rows, rows are compared with targets, and tables and a plot say it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

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
from benchmarks.plane.peers import PEERS, settings_of
from benchmarks.plane.plot import write_plot
from benchmarks.plane.rows import MOVES, Case, Row, Samples, size_text

SIZES = (256 << 10, 2 * MIB, 8 * MIB, 32 * MIB)


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


def test_sizes_in_words() -> None:
    assert [size_text(n) for n in (256 << 10, MIB, 32 * MIB)] == ["256 KiB", "1 MiB", "32 MiB"]


# ------------------------------------------------------------------- targets


def made_up_rows() -> list[Row]:
    """Every client, operation and size; a client's time grows with its place in the list."""
    samples = Samples()
    settings = {"ours": [Setting(), Setting(8)]}
    settings |= {peer: settings_of(peer, (1, 4)) for peer in PEERS}
    for place, (client, ways) in enumerate(settings.items()):
        for setting in ways:
            seconds = (place + 1) / setting.connections
            for size in SIZES:
                for op in MOVES:
                    samples.add(Case(client, setting, op, size, 8), Measured(seconds, 1.0))
    for keys in (1_000, 10_000):
        for cached in ("none", "half", "all"):
            for client, ms in (("ours", 0.5), ("lmcache", 12.0), ("redis-py", 7.0)):
                case = Case(client, Setting(), "scan", 70, keys, cached)
                samples.add(case, Measured(ms * keys / 1e6, 1.0))
    return samples.rows()


ROWS = made_up_rows()
LOADS = [row for row in ROWS if (row.op, row.value_bytes) == ("load", 32 * MIB)]
SCANS = [row for row in ROWS if (row.items, row.cached) == (1000, "all")]


def test_a_peer_is_taken_at_its_best_and_ours_at_its_defaults() -> None:
    speeds = {
        client: [row.gb_per_s or 0.0 for row in LOADS if row.client == client]
        for client in ("lmcache", "ours")
    }
    theirs, ours = best(LOADS, "lmcache"), best(LOADS, "ours")
    assert theirs is not None
    assert theirs.gb_per_s == max(speeds["lmcache"]) > min(speeds["lmcache"])
    assert ours is not None
    assert ours.default
    assert (ours.gb_per_s or 0.0) < max(speeds["ours"])
    others = [replace(row, default=False) for row in LOADS]
    assert best(others, "ours") == next(row for row in others if row.client == "ours")
    (scan,) = (row for row in SCANS if row.client == "lmcache")
    assert best([replace(scan, ms=99.0), *SCANS], "lmcache") == scan, "the shortest"
    assert best([], "lmcache") is best([], "ours") is None


@pytest.mark.parametrize(
    ("op", "mib", "client", "target"),
    [
        ("load", 32, "lmcache", 2.7),
        ("first-store", 32, "lmcache", 1.8),
        ("load", 8, "lmcache", None),
        ("load", 2, "lmcache", 1.0),
        ("steady", 0.25, "lmcache", 1.0),
        ("overwrite", 32, "redis-py", 4.0),
        ("load", 2, "redis-py", None),
        ("load", 32, "valkey-glide", None),
    ],
)
def test_targets(op: str, mib: float, client: str, target: float | None) -> None:
    assert move_target(op, int(mib * MIB), client) == target


def test_met_or_not() -> None:
    ratio = Verdict("load 32 MiB", "lmcache", 2.7, 1.0, 2.7, 2.7)
    limit = Verdict("scan", "ours", 0.6, None, 0.6, 0.6)
    assert (ratio.met, limit.met) == (True, True)
    assert replace(ratio, figure=2.69).met is replace(limit, figure=0.61).met is False
    assert replace(ratio, target=None).met is None


def test_every_operation_and_size_is_compared_with_every_peer() -> None:
    found = verdicts(ROWS)
    moves = [verdict for verdict in found if not verdict.what.startswith("scan")]
    assert len(moves) == len(MOVES) * len(SIZES) * 4
    scans = [verdict for verdict in found if verdict.what.startswith("scan")]
    assert {verdict.target for verdict in scans if verdict.theirs is None} == {0.6, 6.0}
    lmcache = [v for v in scans if v.client == "lmcache" and "1,000," in v.what]
    assert [(v.figure, v.target, v.met) for v in lmcache] == [(24.0, 20.0, True)] * 3
    # The ceiling is the bare socket, and not memcpy.
    (ceiling,) = [v for v in verdicts(LOADS) if v.client == "ceiling"]
    assert ceiling.theirs == max(row.gb_per_s or 0.0 for row in LOADS if row.how == "socket")
    assert verdicts([row for row in LOADS if row.client == "ours"]) == []


def test_tables_have_a_line_for_each_operation_and_size() -> None:
    medians = median_table(ROWS)
    connections = connection_table(ROWS)
    assert len(medians) == len(connections) == len(MOVES) * len(SIZES)
    assert {"ours", "lmcache", "redis-py", "valkey-glide", "socket", "memcpy"} <= set(medians[0])
    assert {"ours CPU s/GB", "lmcache CPU s/GB", "redis-py CPU s/GB"} <= set(medians[0])
    assert "(4)" in next(line for line in medians if line["GB/s"] == "load")["ours"]
    assert len(scan_table(ROWS)) == 6
    ratios = ratio_table(verdicts(ROWS))
    # Unequal lines would be cut to the columns of the first.
    for table in (medians, connections, ratios):
        assert len({tuple(line) for line in table}) == 1
    lines = {line["ours"]: line for line in ratios}
    load, scan = lines["load 32 MiB"], lines["scan of 1,000, all cached"]
    assert load["times lmcache"].endswith("(at least 2.7: NOT MET)")
    assert load["times redis-py"].endswith("(at least 4: met)")
    assert "(" not in load["times valkey-glide"]
    assert scan["figure"] == "0.50 ms (at most 0.6: met)"


def test_sealed_values_beside_the_same_plain_ones() -> None:
    samples = Samples()
    for setting, times in ((Setting(), 3), (Setting(2), 4)):
        sealed = replace_setting(setting, sealed=True)
        samples.add(Case("ours", setting, "load", 32 * MIB, 8), Measured(0.01, 1.0))
        samples.add(Case("ours", sealed, "load", 32 * MIB, 8), Measured(0.01 * times, 2.0))
    table = sealed_table(samples.rows())
    assert [(line["connections"], line["sealed / plain"]) for line in table] == [
        (4, 0.33),
        (2, 0.25),
    ]
    assert sealed_table(ROWS) == []


def test_the_plot_is_a_png_whatever_was_left_out(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for number, rows in enumerate((ROWS, SCANS, LOADS)):
        path = write_plot(tmp_path / f"{number}" / "plot.png", rows, "a machine")
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
