"""`Replay`: the requests of a trace against caches of given sizes.

Each request looks for its chunks in order, and then uses them from the last to the first, as agents
do: a cache that is full loses the ends of prompts. Those in a tier are touched, the others computed
and stored. Tiers contain one another, as the agent's do: what is loaded is in the host pool then,
what is computed is written to all, and tiers are told what the pool serves. So a chunk is in a tier
exactly if a cache of that size and policy, used by all requests, has it. The host pool, the disk
and the engine's own cache see the requests of their replica, Redis those of all.

A hit is a leading chunk that some tier has; of several the nearest serves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from lmcache_redis.plan.distances import NEVER, POLICIES, Bools, Ints, hits_of, stack_distances
from lmcache_redis.plan.traces import Trace

Router = Literal["round-robin", "prefix"]
ROUTERS: tuple[Router, ...] = ("round-robin", "prefix")
LRU = "lru"

TIERS = ("pool", "disk", "redis")
NOWHERE = len(TIERS)
_Places = npt.NDArray[np.int8]


@dataclass(frozen=True)
class Capacity:
    """Bytes of each tier: of pool, disk and the engine's own cache those of one replica."""

    pool_bytes: int
    disk_bytes: int = 0
    redis_bytes: int = 0
    engine_bytes: int = 0
    policy: str = LRU


@dataclass(frozen=True)
class Prefixes:
    """What was found for each request.

    begin: the chunks before it are in the engine. end: those before it are in the engine or a
    tier. places: of each chunk of the trace, the nearest tier, an index into `TIERS`. written: the
    chunks that are stored in Redis anew.
    """

    begin: Ints
    end: Ints
    places: _Places
    written: Bools


@dataclass(frozen=True)
class Curve:
    """The share of the tokens asked for that are hits, by bytes of one LRU cache: steps."""

    sizes_bytes: list[int]
    hit_rates: list[float]

    def enough_bytes(self, share: float = 0.99) -> int:
        """The smallest size that has at least that share of the highest hit rate."""
        wanted = share * self.hit_rates[-1]
        return next(
            size
            for size, rate in zip(self.sizes_bytes, self.hit_rates, strict=True)
            if rate >= wanted
        )


@dataclass
class Replay:
    """One trace in chunks of one size, spread over replicas. Keeps the passes it has made."""

    trace: Trace
    replicas: int = 1
    router: Router = "round-robin"
    replica_of: Ints = field(init=False)
    _streams: dict[str, _Accesses] = field(init=False)

    def __post_init__(self) -> None:
        trace = self.trace
        self.replica_of = spread(trace, self.replicas, self.router)
        layout_of = trace.layout[trace.request_of]
        pool = np.array([each.pool_bytes for each in trace.layouts])[layout_of]
        redis = np.array([each.nbytes for each in trace.layouts])[layout_of]
        replica = self.replica_of[trace.request_of]
        shared = _Accesses(trace.ids, redis, np.zeros_like(replica), trace.request_of)
        is_same = self.replicas == 1 and bool((pool == redis).all())
        own = shared if is_same else _Accesses(trace.ids, pool, replica, trace.request_of)
        self._streams = {"own": own, "shared": shared}

    def find(self, sizes: Capacity) -> Prefixes:
        """Which prefix of each request is where. Raises ``ConfigError``, see `hits_of`."""
        trace, policy = self.trace, sizes.policy
        own, shared = self._streams["own"], self._streams["shared"]
        in_redis = shared.hits(policy, sizes.redis_bytes)
        places = np.full(len(trace.ids), NOWHERE, np.int8)
        places[in_redis] = TIERS.index("redis")
        places[own.hits(policy, sizes.disk_bytes)] = TIERS.index("disk")
        places[own.hits(policy, sizes.pool_bytes)] = TIERS.index("pool")
        in_engine = own.hits(LRU, sizes.engine_bytes)
        begin = self._leading(in_engine)
        end = self._leading(in_engine | (places != NOWHERE))
        written = ~in_redis if sizes.redis_bytes else np.zeros(len(trace.ids), bool)
        return Prefixes(begin, end, places, written)

    def _leading(self, has: Bools) -> Ints:
        """How many leading chunks of each request's prompt there are."""
        trace = self.trace
        gaps = np.append(np.flatnonzero(~has), len(has))
        first = gaps[np.searchsorted(gaps, trace.starts[:-1])]
        return np.minimum(first - trace.starts[:-1], trace.asked)

    def curve(self, points: int = 120) -> Curve:
        """Hit rate by the size of one LRU cache that all replicas share. From one pass."""
        trace = self.trace
        request = trace.request_of
        within = np.arange(len(trace.ids)) - trace.starts[request]
        is_asked = within < trace.asked[request]
        tokens = np.array([each.block_tokens for each in trace.layouts])[trace.layout]
        needed = _running_max(self._streams["shared"].distances, trace.starts)[is_asked]
        order = np.argsort(needed)
        gained = np.cumsum(tokens[request[is_asked]][order])
        needed, total = needed[order], int(trace.tokens.sum())
        reuses = int(np.searchsorted(needed, NEVER))
        if not reuses or not total:
            return Curve([0], [0.0])
        at = np.linspace(0, reuses - 1, points).astype(int)
        at = np.unique(np.searchsorted(needed, needed[at], side="right") - 1)
        return Curve([0, *needed[at].tolist()], [0.0, *(gained[at] / total).tolist()])


@dataclass
class _Accesses:
    """Accesses to the caches of each replica."""

    ids: Ints
    weights: Ints
    replica: Ints
    request: Ints
    _distances: Ints | None = field(default=None, init=False)
    _hits: dict[tuple[str, int], Bools] = field(default_factory=dict, init=False)

    @property
    def distances(self) -> Ints:
        """Of each access, when its request begins."""
        if self._distances is None:
            at = np.arange(len(self.ids))
            # One replica after the other; of a request the questions, then the uses, backwards.
            questions_then_uses = np.concatenate([at, at[::-1]])
            is_use = np.repeat([False, True], len(at))
            request = self.request[questions_then_uses]
            order = np.lexsort((is_use, request, self.replica[questions_then_uses]))
            both, is_question = questions_then_uses[order], ~is_use[order]
            apart = self.ids + self.replica * (int(self.ids.max(initial=0)) + 1)
            self._distances = np.empty(len(at), np.int64)
            found = stack_distances(apart[both], self.weights[both])
            self._distances[both[is_question]] = found[is_question]
        return self._distances

    def hits(self, policy: str, capacity_bytes: int) -> Bools:
        if capacity_bytes <= 0:
            return np.zeros(len(self.ids), bool)
        if policy == LRU:
            return self.distances <= capacity_bytes
        key = policy, capacity_bytes
        if key not in self._hits:
            found = np.zeros(len(self.ids), bool)
            for replica in np.unique(self.replica):
                at = np.flatnonzero(self.replica == replica)
                found[at] = hits_of(policy, self.ids[at], self.weights[at], capacity_bytes)
            self._hits[key] = found
        return self._hits[key]


def _running_max(values: Ints, starts: Ints) -> Ints:
    """The largest value so far in each request."""
    counts = np.diff(starts)
    request = np.repeat(np.arange(len(counts)), counts)
    # Ranks of the values fit beside the number of the request.
    unique, rank = np.unique(values, return_inverse=True)
    keyed = np.maximum.accumulate(request * len(unique) + rank.reshape(-1))
    needed: Ints = unique[keyed - request * len(unique)]
    return needed


def spread(trace: Trace, replicas: int, router: Router) -> Ints:
    """The replica of each request.

    A router by prefix sends a prompt where at least half of it was sent before, else to the replica
    with the fewest tokens so far.
    """
    count = len(trace)
    if router == "round-robin" or replicas == 1:
        return np.arange(count) % replicas
    last_at: dict[int, int] = {}
    load, chosen = [0] * replicas, np.zeros(count, np.int64)
    ids, starts, asked = trace.ids.tolist(), trace.starts.tolist(), trace.asked.tolist()
    for request, tokens in enumerate(trace.tokens.tolist()):
        begin, length = starts[request], asked[request]
        middle = ids[begin + (length - 1) // 2] if length else -1
        replica = last_at.get(middle, -1)
        if replica < 0:
            replica = load.index(min(load))
        load[replica] += tokens
        chosen[request] = replica
        for name in ids[begin : starts[request + 1]]:
            last_at[name] = replica
    return chosen


def known_policies() -> Mapping[str, str]:
    """What may be asked for, and who simulates it."""
    return {LRU: "built in"} | {name: f"libCacheSim's {of}" for name, of in POLICIES.items()}
