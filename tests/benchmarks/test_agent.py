# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of an agent, small: every case has its row and its fields."""

from __future__ import annotations

import pytest

from benchmarks import lookups, recovery

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
