"""What of a found prefix is worth loading: the agent's own rule, with rates that are given.

The rule is `cache.pacing.prefix_worth_loading`, for an engine that is a queue (`Computing`) and
links that are queues too: that of Redis is shared by all replicas, a disk is a replica's own.
Within a run of chunks from one tier, loading and computing take time in proportion, so that only
the ends of runs, and the length that is loaded when the engine becomes free, can be best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmcache_redis.cache.pacing import Computing, PrefixNeeds, prefix_worth_loading
from lmcache_redis.plan.distances import Ints
from lmcache_redis.plan.simulate import NOWHERE, Prefixes, Replay
from lmcache_redis.plan.traces import BlockLayout

_POOL, _DISK, _REDIS = range(NOWHERE)


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
    """For each request: the prefix that is used, and the bytes of its loads.

    wait_s: for which its engine was free and waited for them.
    """

    end: Ints
    wait_s: npt.NDArray[np.float64]
    disk_bytes: npt.NDArray[np.float64]
    redis_bytes: npt.NDArray[np.float64]


class _Queue:
    """A link that moves one load after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_s = 0.0

    def seconds(self, nbytes: float, now_s: float) -> float:
        return max(0.0, self.free_s - now_s) + nbytes / self.bytes_per_s

    def add(self, nbytes: float, now_s: float) -> None:
        self.free_s = max(self.free_s, now_s) + nbytes / self.bytes_per_s


def decide(replay: Replay, found: Prefixes, speeds: Speeds) -> Loads:
    """How much of each prefix is loaded, request by request."""
    trace = replay.trace
    count, begins = len(trace), trace.starts[:-1]
    end = found.end.copy()
    wait_s, moved = np.zeros(count), np.zeros((NOWHERE, count))
    engines = [Computing() for _ in range(replay.replicas)]
    for engine in engines:
        engine.token_s = speeds.token_s
    disks = [_Queue(speeds.disk_bytes_per_s) for _ in engines]
    link = _Queue(speeds.link_bytes_per_s)
    loaders = [_Loader(layout) for layout in trace.layouts]
    # Where the tier changes from a chunk to the next.
    changes = np.flatnonzero(np.diff(found.places)) + 1
    first_change = np.searchsorted(changes, begins + found.begin, side="right")
    last_change = np.searchsorted(changes, begins + found.end, side="left")
    has_loads = _any_load(found, begins)
    rows = zip(
        trace.times_s.tolist(), replay.replica_of.tolist(), trace.layout.tolist(),
        trace.asked.tolist(), found.begin.tolist(), found.end.tolist(), has_loads.tolist(),
        strict=True,
    )  # fmt: skip
    for request, (now_s, replica, layout, asked, begin, length, loads) in enumerate(rows):
        engine, loader = engines[replica], loaders[layout]
        if loads:
            start = int(begins[request])
            at = changes[first_change[request] : last_change[request]] - start
            ends = [*at.tolist(), length]
            tiers = found.places[start + np.array([begin, *at.tolist()])].tolist()
            queues = (None, disks[replica], link)
            runs = loader.runs(begin, ends, tiers)
            chunk_s = loader.chunk_tokens * speeds.token_s
            free_in_s = engine.free_in_s(now_s)
            length, took_s, nbytes = _best(
                runs, begin, asked, chunk_s, free_in_s, queues, now_s, speeds
            )
            end[request], wait_s[request] = length, max(0.0, took_s - free_in_s)
            moved[:, request] = nbytes
            for tier in (_DISK, _REDIS):
                if nbytes[tier]:
                    queues[tier].add(nbytes[tier], now_s)  # type: ignore[union-attr]
        if asked > length:
            engine.add((asked - length) * loader.chunk_tokens, now_s)
    return Loads(end, wait_s, moved[_DISK], moved[_REDIS])


def _any_load(found: Prefixes, begins: Ints) -> npt.NDArray[np.bool_]:
    """Whether a chunk of the prefix is in a tier that it has to be loaded from."""
    outside = np.concatenate([[0], np.cumsum((found.places == _DISK) | (found.places == _REDIS))])
    ends = begins + np.maximum(found.end, found.begin)
    return np.asarray(outside[ends] > outside[begins + found.begin], bool)


# Length of the prefix, its tier, and the bytes to load from each tier for the prefix up to there.
_Run = tuple[int, int, tuple[float, ...]]


class _Loader:
    """The bytes that prefixes of one layout need."""

    def __init__(self, layout: BlockLayout) -> None:
        self.chunk_tokens = layout.block_tokens
        self._rows = layout.rows
        self._needs = PrefixNeeds([row.reach for row in layout.rows], 0, self.chunk_tokens)

    def runs(self, begin: int, ends: list[int], tiers: list[int]) -> list[_Run]:
        """The tiers' runs of chunks, of which the first starts at ``begin``."""
        runs: list[_Run] = []
        if not self._needs.bounded:
            per_chunk = sum(row.nbytes for row in self._rows)
            total, before = [0.0] * NOWHERE, begin
            for length, tier in zip(ends, tiers, strict=True):
                total[tier] += (length - before) * per_chunk
                before = length
                runs.append((length, tier, tuple(total)))
            return runs
        for index, length in enumerate(ends):
            total = [0.0] * NOWHERE
            for row, sized in enumerate(self._rows):
                before, first = begin, self._needs.first(row, length)
                for stop, tier in zip(ends[: index + 1], tiers, strict=False):
                    total[tier] += max(0, stop - max(before, first)) * sized.nbytes
                    before = stop
            runs.append((length, tiers[index], tuple(total)))
        return runs


def _best(
    runs: list[_Run],
    begin: int,
    asked: int,
    chunk_s: float,
    free_in_s: float,
    queues: tuple[_Queue | None, ...],
    now_s: float,
    speeds: Speeds,
) -> tuple[int, float, tuple[float, ...]]:
    """The length worth loading, with the seconds and the bytes of its loads."""
    none: tuple[float, ...] = (0.0,) * NOWHERE
    options: dict[int, tuple[float, tuple[float, ...]]] = {begin: (0.0, none)}
    before, before_bytes = begin, none
    for length, tier, nbytes in runs:
        took_s = _seconds(nbytes, queues, now_s, speeds)
        # What is loaded just when the engine becomes free. A load waits for those before it.
        begun_s = _seconds(before_bytes, queues, now_s, speeds, tier)
        if tier != _POOL and begun_s < free_in_s < took_s:
            chunks = length - before
            whole = int((free_in_s - begun_s) / (took_s - begun_s) * chunks)
            for more in range(whole, min(whole + 2, chunks)):
                part = zip(before_bytes, nbytes, strict=True)
                between = tuple(b + more / chunks * (n - b) for b, n in part)
                middle_s = _seconds(between, queues, now_s, speeds)
                options.setdefault(before + more, (middle_s, between))
        options[length] = took_s, nbytes
        before, before_bytes = length, nbytes
    times = [(length, took_s) for length, (took_s, _) in sorted(options.items())]
    best = prefix_worth_loading(times, asked, chunk_s, free_in_s)
    return (best, *options[best])


def _seconds(
    nbytes: tuple[float, ...],
    queues: tuple[_Queue | None, ...],
    now_s: float,
    speeds: Speeds,
    also: int = _POOL,
) -> float:
    """Until so many bytes are loaded. also: a tier that is waited for even if none are its own."""
    took_s = 0.0
    for tier in (_DISK, _REDIS):
        queue = queues[tier]
        if queue is not None and (nbytes[tier] or tier == also):
            wait_s = speeds.latency_s if tier == _REDIS else 0.0
            took_s = max(took_s, wait_s + queue.seconds(nbytes[tier], now_s))
    return took_s
