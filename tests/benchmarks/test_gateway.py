# SPDX-License-Identifier: Apache-2.0
"""The gateway's benchmark, small: our own server always, LMCache's where it was fetched."""

from __future__ import annotations

import pytest

from benchmarks import ROOT
from benchmarks.fetch import find_server
from benchmarks.gateway import MIB, Plan, run

pytestmark = [pytest.mark.servers, pytest.mark.long]

PLAN = Plan(
    rounds=2,
    before=ROOT,
    clients=5,
    large_bytes=2 * MIB,
    many_bytes=64 << 10,
    many_chunks=8,
    many_gets=3,
)


def test_rows_of_every_operation() -> None:
    said: list[str] = []
    rows = run(PLAN, said.append)
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
