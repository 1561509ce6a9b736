# SPDX-License-Identifier: Apache-2.0
"""`Replay`: the requests of a trace against caches of given sizes.

Each request looks for its chunks in order, and then uses them from the last to the first, as agents
do: a cache that is full loses the ends of prompts. Those in a tier are touched, the others computed
and stored. Tiers contain one another, as the agent's do: what is loaded is in the host pool then,
what is computed is written to all, and tiers are told what the pool serves. So a chunk is in a tier
exactly if an LRU cache of that size, used by all requests, has it. The host pool, the disk and the
engine's own cache see the requests of their replica, Redis those of all.

With ``store_after`` N a chunk is in disk and Redis only from the Nth request of one replica on that
names it: uses before do not reach them.

LRU keeps what was used last, so a cache of some size holds all that a smaller one does. One pass
gives, for each access, the number of different chunks used since the last access to the same one
(Mattson et al., 1970): a cache of at least that number of chunks hits.

A hit is a leading chunk that some tier has; of several the nearest serves it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmcache_redis.plan.traces import Ints, Trace

Bools = npt.NDArray[np.bool_]

TIERS = ("pool", "disk", "redis")
NOWHERE = len(TIERS)
NEVER = np.iinfo(np.int64).max  # the distance of a first access


@dataclass(frozen=True)
class Capacity:
    """Bytes of each tier: of pool, disk and the engine's own cache those of one replica.

    redis_ratio: of plain bytes to those that are stored in Redis and sent.
    """

    pool_bytes: int
    disk_bytes: int = 0
    redis_bytes: int = 0
    engine_bytes: int = 0
    redis_ratio: float = 1.0


@dataclass(frozen=True)
class Prefixes:
    """What was found for each request.

    begin: the chunks before it are in the engine. end: those before it are in the engine or a
    tier. places: of each chunk of the trace, the nearest tier, an index into `TIERS`. written: the
    chunks that are stored in Redis anew.
    """

    begin: Ints
    end: Ints
    places: npt.NDArray[np.int8]
    written: Bools


class Replay:
    """One trace in chunks of one size, whose requests go to the replicas in turns."""

    def __init__(self, trace: Trace, replicas: int = 1) -> None:
        self.trace = trace
        self.replicas = replicas
        self.replica_of = np.arange(len(trace)) % replicas
        # Of each chunk when its request begins: in what all share, and in what its replica has.
        self._shared = _distances(trace, np.zeros(len(trace), np.int64))
        self._own = self._shared if replicas == 1 else _distances(trace, self.replica_of)
        everything = np.ones(len(trace.ids), bool)
        # Both in tiers behind the pools, by the requests after which a chunk is stored.
        self._stored = {1: (self._shared, self._own, everything)}
        replica = self.replica_of[trace.request_of]
        self._seen = _times_seen(trace.ids * replicas + replica)

    def find(self, sizes: Capacity, store_after: int = 1) -> Prefixes:
        """Which prefix of each request is where. store_after: as the agent's."""
        layout = self.trace.layout
        shared, own, stored = self._stored_after(store_after)
        in_redis = shared <= int(sizes.redis_bytes * sizes.redis_ratio) // layout.nbytes
        places = np.full(len(self.trace.ids), NOWHERE, np.int8)
        places[in_redis] = TIERS.index("redis")
        places[own <= sizes.disk_bytes // layout.pool_bytes] = TIERS.index("disk")
        places[self._own <= sizes.pool_bytes // layout.pool_bytes] = TIERS.index("pool")
        in_engine = self._own <= sizes.engine_bytes // layout.pool_bytes
        begin = self._leading(in_engine)
        end = self._leading(in_engine | (places != NOWHERE))
        return Prefixes(begin, end, places, stored & ~in_redis & bool(sizes.redis_bytes))

    def _stored_after(self, store_after: int) -> tuple[Ints, Ints, Bools]:
        """The distances in tiers behind the pools, and of which accesses the chunk is stored."""
        if store_after not in self._stored:
            stored = self._seen >= store_after
            if self.replicas > 1:  # what one has stored, all load, and keep on disk
                first = np.full(int(self.trace.ids.max(initial=0)) + 1, len(stored))
                np.minimum.at(first, self.trace.ids[stored], np.flatnonzero(stored))
                stored = np.arange(len(stored)) >= first[self.trace.ids]
            shared = _distances(self.trace, np.zeros(len(self.trace), np.int64), stored)
            own = shared
            if self.replicas > 1:
                own = _distances(self.trace, self.replica_of, stored)
            self._stored[store_after] = shared, own, stored
        return self._stored[store_after]

    def _leading(self, has: Bools) -> Ints:
        """How many leading chunks of each request's prompt there are."""
        trace = self.trace
        gaps = np.append(np.flatnonzero(~has), len(has))
        first = gaps[np.searchsorted(gaps, trace.starts[:-1])]
        return np.minimum(first - trace.starts[:-1], trace.asked)

    def enough_bytes(self, share: float = 0.99) -> int:
        """The size of one cache of all replicas that has this share of all chunks used again."""
        again = self._shared[self._shared < NEVER]
        return int(np.quantile(again, share) * self.trace.layout.nbytes) if len(again) else 0


def _distances(trace: Trace, replica_of: Ints, reaches: Bools | None = None) -> Ints:
    """Of each access to the caches of its request's replica, when the request begins.

    reaches: the accesses that reach the caches, if not all do; the others are never hits.
    """
    at, replica = np.arange(len(trace.ids)), replica_of[trace.request_of]
    if reaches is not None:
        at = at[reaches]
    # One replica after the other; of a request the questions, then the uses, backwards.
    questions_then_uses = np.concatenate([at, at[::-1]])
    is_use = np.repeat([False, True], len(at))
    request = trace.request_of[questions_then_uses]
    order = np.lexsort((is_use, request, replica[questions_then_uses]))
    both, is_question = questions_then_uses[order], ~is_use[order]
    apart = trace.ids + replica * (int(trace.ids.max(initial=0)) + 1)
    found = stack_distances(apart[both])
    distances = np.full(len(trace.ids), NEVER, np.int64)
    distances[both[is_question]] = found[is_question]
    return distances


def stack_distances(ids: Ints) -> Ints:
    """For each access the chunks of an LRU cache that hits; `NEVER` for the first of a chunk.

    O(n log n).
    """
    before = _previous_access(ids)
    distances = np.full(len(ids), NEVER, np.int64)
    again = np.flatnonzero(before >= 0)
    if not len(again):
        return distances
    # Of the accesses j between p = before[i] and i, those that are the first of their chunk there:
    # before[j] < p. All j <= p are such, so they are counted too, and subtracted.
    of_first = np.cumsum(before < 0)
    earlier = before[again]
    rank = np.empty(len(again), np.int64)
    rank[np.argsort(earlier)] = np.arange(len(again))
    distances[again] = of_first[again] + _smaller_before(rank) - earlier
    return distances


def _times_seen(ids: Ints) -> Ints:
    """How many accesses to the same chunk there have been with this one."""
    order = np.argsort(ids, kind="stable")
    same = np.append(False, ids[order[1:]] == ids[order[:-1]])[: len(ids)]
    at = np.arange(len(ids))
    seen = np.empty(len(ids), np.int64)
    seen[order] = at - np.maximum.accumulate(np.where(same, 0, at)) + 1
    return seen


def _previous_access(ids: Ints) -> Ints:
    """The index of the last access to the same chunk; -1 for the first."""
    order = np.argsort(ids, kind="stable")
    same = ids[order[1:]] == ids[order[:-1]]
    before = np.full(len(ids), -1, np.int64)
    before[order[1:][same]] = order[:-1][same]
    return before


def _smaller_before(ranks: Ints) -> Ints:
    """For each element the number of smaller ones that stand before it.

    ranks: a permutation of 0 to n - 1. A radix sort from the highest bit down, stable: elements
    with equal higher bits stand together, and half of them have the bit. Those that have not, and
    stand before one that has, are smaller.
    """
    bits = max(1, (len(ranks) - 1).bit_length())
    values, found = np.arange(1 << bits), np.zeros(1 << bits, np.int64)
    values[: len(ranks)] = ranks
    for bit in reversed(range(bits)):
        half = 1 << bit
        has = (values & half).astype(bool)
        without_bit = (~has).reshape(-1, 2 * half).cumsum(axis=1).reshape(-1)
        found += np.where(has, without_bit, 0)
        for column in (values, found):
            without, with_bit = column[~has], column[has]
            halves = column.reshape(-1, 2 * half)
            halves[:, :half] = without.reshape(-1, half)
            halves[:, half:] = with_bit.reshape(-1, half)
    return found[ranks]  # sorted by now
