# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of an agent and of the gateway, small: every case has its row and its fields."""

from __future__ import annotations

import pytest

from benchmarks import ROOT, lookups, recovery
from benchmarks.fetch import find_server
from benchmarks.gateway import MIB, Plan, run

pytestmark = [pytest.mark.servers, pytest.mark.long]


def test_rows_of_lookups() -> None:
    rows = lookups.run(rounds=3, pool_bytes=256 << 20)
    asked = ["pool", "none", "redis", "redis-large"]
    cases = [f"lookup-{each}" for each in asked]
    cases += ["start", "memory-idle", "memory-busy"]
    assert [row["case"] for row in rows] == cases
    for row in rows:
        assert set(row) == {"case", "ms", "p99_ms", "mib"}
        assert (row["mib"] is None) == (row["ms"] is not None)
        assert (row["p99_ms"] is None) == (not row["case"].startswith("lookup"))
        assert all(value is None or value > 0 for value in row.values() if value != row["case"])


def test_rows_of_recovery() -> None:
    said: list[str] = []
    rows = recovery.run(1, said.append)
    assert [row["case"] for row in rows] == list(recovery.ASKED_S)
    for row in rows:
        assert set(row) == {"case", "median_s", "max_s", "asked_s", "rounds"}
        assert 0 < row["median_s"] == row["max_s"]
    assert said == ["round 1 of 1"]


def test_rows_of_the_gateway() -> None:
    """Our own server always, LMCache's where it was fetched."""
    plan = Plan(
        rounds=2,
        before=ROOT,
        clients=5,
        large_bytes=2 * MIB,
        many_bytes=64 << 10,
        many_chunks=8,
        many_gets=3,
    )
    said: list[str] = []
    rows = run(plan, said.append)
    servers = ["ours", "before", "lmcache"][: 3 if find_server() is not None else 2]
    assert [(row["op"], row["server"]) for row in rows] == [
        (op, server) for op in ("put", "get", "get, many") for server in servers
    ]
    for row in rows:
        assert row["gb_per_s"] > 0
        assert row["peak_rss_mib"] > 1
        assert row["rounds"] == 2
        assert (row["p99_ms"] is not None) == (row["op"] == "get, many")
        if row["server"] == "ours":
            assert row["ours_times"] == pytest.approx(1.0)
    assert any("left out" in line for line in said) == (len(servers) == 2)
