"""How fast our client loads from a server as it is, in this process and without peers."""

from __future__ import annotations

import contextlib
import statistics

from lmcache_redis.bench.plane.messages import Setting
from lmcache_redis.bench.plane.peers.ours import OurClient
from lmcache_redis.bench.plane.values import Arena
from lmcache_redis.bench.plane.worker import measure


def load_gb_per_s(url: str, chunk_bytes: int, moved_bytes: int, rounds: int) -> float:
    """The median rate. Nothing is flushed: each round stores new chunks and loads them.

    chunk_bytes: a multiple of the page size.
    """
    rates = []
    setting = Setting()
    values = Arena(moved_bytes).values(chunk_bytes, moved_bytes // chunk_bytes, setting.slot_bytes)
    with contextlib.closing(OurClient(url, setting)) as client:
        for number in range(rounds):
            client.prepare(f"round-{number}", values)
            client.store(fresh=True)
            values.wipe()
            rates.append(values.gigabytes / measure(client.load).elapsed_s)
            values.check()
    return statistics.median(rates)
