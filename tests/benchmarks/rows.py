# SPDX-License-Identifier: Apache-2.0
"""Rows as a run would give them, for tests of what is made of rows."""

from __future__ import annotations

from benchmarks.plane.messages import MIB, Measured, Setting
from benchmarks.plane.peers import PEERS, settings_of
from benchmarks.plane.rows import MOVES, Case, Row, Samples

SIZES = (256 << 10, 2 * MIB, 8 * MIB, 32 * MIB)


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
