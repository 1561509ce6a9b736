# SPDX-License-Identifier: Apache-2.0
"""What of a found prefix is worth loading: the agent's own rule, with rates that are given.

The rule is `cache.pacing.prefix_worth_loading`, for engines and links that are queues: the link of
Redis is shared by all replicas, a disk is a replica's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmcache_redis.cache.pacing import PrefixNeeds, prefix_worth_loading
from lmcache_redis.plan.simulate import TIERS, Prefixes, Replay
from lmcache_redis.plan.traces import BlockLayout, Floats, Ints

_POOL, _DISK, _REDIS = range(len(TIERS))


@dataclass(frozen=True)
class Speeds:
    """token_s: in which an engine computes a token. Bytes a second: of the link to Redis, which all
    replicas share, and of each replica's disk. latency_s: of a question to Redis.
    """

    token_s: float
    link_bytes_per_s: float
    disk_bytes_per_s: float = 2e9
    latency_s: float = 0.001


@dataclass(frozen=True)
class Loads:
    """For each request: the prefix that is used, and the bytes that it loads from Redis.

    wait_s: for which its engine was free and waited for loads.
    """

    end: Ints
    wait_s: Floats
    redis_bytes: Floats


@dataclass
class _Queue:
    """Does one thing after the other: loads, in bytes, or what is computed, in tokens."""

    per_second: float
    latency_s: float = 0.0
    free_s: float = 0.0

    def seconds(self, nbytes: Floats, now_s: float) -> Floats:
        """Seconds until each of these numbers of bytes would be loaded."""
        begins_s = self.latency_s + max(0.0, self.free_s - now_s)
        return np.where(nbytes > 0, begins_s + nbytes / self.per_second, 0.0)

    def add(self, amount: float, now_s: float) -> None:
        if amount:
            self.free_s = max(self.free_s, now_s) + amount / self.per_second


class _PrefixBytes:
    """What prefixes of at most this number of chunks need."""

    def __init__(self, layout: BlockLayout, most: int) -> None:
        needs = PrefixNeeds([*layout.part_bytes], 0, layout.block_tokens)
        self._sizes = [*layout.part_bytes.values()]
        self._firsts = [
            np.array([needs.first(row, length) for length in range(most + 1)])
            for row in range(len(self._sizes))
        ]

    def of(self, has: npt.NDArray[np.bool_], begin: int) -> Floats:
        """The bytes of each prefix from ``begin`` chunks on. has: the chunks that are counted."""
        before = np.concatenate([[0], np.cumsum(has)])
        nbytes = np.zeros(len(before))
        for size, firsts in zip(self._sizes, self._firsts, strict=True):
            first = np.maximum(0, firsts[begin : begin + len(before)] - begin)
            nbytes += (before - before[first]) * size
        return nbytes


def decide(replay: Replay, found: Prefixes, speeds: Speeds) -> Loads:
    """How much of each prefix is loaded, request by request."""
    trace = replay.trace
    end = found.end.copy()
    wait_s, redis_bytes = np.zeros(len(trace)), np.zeros(len(trace))
    engines = [_Queue(1 / speeds.token_s) for _ in range(replay.replicas)]
    disks = [_Queue(speeds.disk_bytes_per_s) for _ in engines]
    redis = _Queue(speeds.link_bytes_per_s, speeds.latency_s)
    needs = _PrefixBytes(trace.layout, int(end.max(initial=0)))
    chunk_s = trace.layout.block_tokens * speeds.token_s
    rows = zip(
        trace.times_s.tolist(), replay.replica_of.tolist(), trace.starts.tolist(),
        trace.asked.tolist(), found.begin.tolist(), found.end.tolist(),
        strict=False,
    )  # fmt: skip
    for request, (now_s, replica, start, asked, begin, length) in enumerate(rows):
        engine = engines[replica]
        places = found.places[start + begin : start + length]
        if (places != _POOL).any():
            disk = disks[replica]
            of_disk, of_redis = (needs.of(places == tier, begin) for tier in (_DISK, _REDIS))
            load_s = np.maximum(disk.seconds(of_disk, now_s), redis.seconds(of_redis, now_s))
            free_in_s = max(0.0, engine.free_s - now_s)
            times = zip(range(begin, length + 1), load_s.tolist(), strict=True)
            length = prefix_worth_loading(times, asked, chunk_s, free_in_s)
            at = length - begin
            end[request], wait_s[request] = length, max(0.0, float(load_s[at]) - free_in_s)
            redis_bytes[request] = of_redis[at]
            disk.add(float(of_disk[at]), now_s)
            redis.add(float(of_redis[at]), now_s)
        engine.add((asked - length) * trace.layout.block_tokens, now_s)
    return Loads(end, wait_s, redis_bytes)
