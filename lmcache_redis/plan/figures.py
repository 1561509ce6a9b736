"""The rows of a plan: what a cache of some sizes would have saved, moved and cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lmcache_redis.plan.distances import Ints
from lmcache_redis.plan.pacing import Loads, Speeds, decide
from lmcache_redis.plan.simulate import TIERS, Capacity, Curve, Prefixes, Replay, Router
from lmcache_redis.plan.traces import Trace

_GIB = 1 << 30
_MONTH_S = 30.4 * 86_400
# The link's peak is that of the busiest of so many parts of the trace, each a second at least.
_PARTS = 200


@dataclass(frozen=True)
class Prices:
    """In dollars: of memory (host pools and Redis), of disk, and of a replica's GPUs."""

    gib_month: float = 3.0
    disk_gib_month: float = 0.1
    gpu_hour: float = 2.5


@dataclass(frozen=True)
class Grid:
    """What is tried, each with each. Bytes of pool, disk and engine are those of a replica."""

    replicas: Sequence[int]
    chunk_tokens: Sequence[int]
    policies: Sequence[str]
    pool_bytes: Sequence[int]
    disk_bytes: Sequence[int]
    redis_bytes: Sequence[int]
    engine_bytes: int = 0
    router: Router = "round-robin"


class PlanRow(NamedTuple):
    """One configuration, and what it does.

    hit_rate: of the prompt tokens that the engine's own cache did not have, those loaded; also by
    tier. slower_tokens: found, and not loaded because computing them was faster. gpu_s_saved: to
    compute the hits. prefill_s_saved: that less the time for which free engines waited for loads.
    first_token_s_saved: of an average request. busy_share: of the time, replicas still compute
    prompts; above 1 there are too few. link_*: of the link to Redis, loads and stores. None: the
    trace has no times.
    """

    replicas: int
    chunk_size_tokens: int
    policy: str
    pool_bytes: int
    disk_bytes: int
    redis_bytes: int
    engine_bytes: int
    requests: int
    prompt_tokens: int
    asked_tokens: int
    hit_tokens: int
    hit_rate: float
    hit_rate_pool: float
    hit_rate_disk: float
    hit_rate_redis: float
    slower_tokens: int
    gpu_s_saved: float
    prefill_s_saved: float
    first_token_s_saved: float
    busy_share: float | None
    link_bytes_per_s: float | None
    link_peak_bytes_per_s: float | None
    link_peak_share: float | None
    usd_per_month: float
    usd_saved_per_month: float | None


class NamedCurve(NamedTuple):
    """name: what sets it apart from the other curves."""

    name: str
    curve: Curve


class Figures(NamedTuple):
    """All that was found."""

    rows: list[PlanRow]
    curves: list[NamedCurve]


def plan_rows(trace: Trace, grid: Grid, speeds: Speeds, prices: Prices) -> Figures:
    """Every row of the grid. Raises ``ConfigError`` for chunks or policies that cannot be."""
    rows, curves = [], []
    for chunk_tokens in grid.chunk_tokens:
        chunked = trace.in_chunks(chunk_tokens)
        for replicas in grid.replicas:
            replay = Replay(chunked, replicas, grid.router)
            if replicas == grid.replicas[0]:
                curves.append(NamedCurve(f"chunks of {chunk_tokens} tokens", replay.curve()))
            for sizes in _capacities(grid):
                found = replay.find(sizes)
                loads = decide(replay, found, speeds)
                rows.append(_row(replay, sizes, found, loads, speeds, prices))
    return Figures(rows, curves)


def _capacities(grid: Grid) -> Iterator[Capacity]:
    for policy in grid.policies:
        for redis_bytes in grid.redis_bytes:
            for disk_bytes in grid.disk_bytes:
                for pool_bytes in grid.pool_bytes:
                    yield Capacity(pool_bytes, disk_bytes, redis_bytes, grid.engine_bytes, policy)


def _row(
    replay: Replay,
    sizes: Capacity,
    found: Prefixes,
    loads: Loads,
    speeds: Speeds,
    prices: Prices,
) -> PlanRow:
    trace = replay.trace
    chunk_tokens = trace.layouts[0].block_tokens
    asked_tokens = int(trace.tokens.sum() - found.begin.sum() * chunk_tokens)
    hits = np.maximum(0, loads.end - found.begin)
    hit_tokens = int(hits.sum()) * chunk_tokens
    by_tier = [n * chunk_tokens / max(1, asked_tokens) for n in _by_tier(trace, found, loads.end)]
    not_loaded = np.maximum(0, found.end - np.maximum(loads.end, found.begin))
    gpu_s = hit_tokens * speeds.token_s
    prefill_s = gpu_s - float(loads.wait_s.sum())
    mean, peak = _link(trace, found, loads)
    dollars = (
        (sizes.pool_bytes * replay.replicas + sizes.redis_bytes) * prices.gib_month
        + sizes.disk_bytes * replay.replicas * prices.disk_gib_month
    ) / _GIB
    per_month = _MONTH_S / trace.duration_s if trace.has_times and trace.duration_s else None
    return PlanRow(
        replicas=replay.replicas,
        chunk_size_tokens=chunk_tokens,
        policy=sizes.policy,
        pool_bytes=sizes.pool_bytes,
        disk_bytes=sizes.disk_bytes,
        redis_bytes=sizes.redis_bytes,
        engine_bytes=sizes.engine_bytes,
        requests=len(trace),
        prompt_tokens=int(trace.tokens.sum()),
        asked_tokens=asked_tokens,
        hit_tokens=hit_tokens,
        hit_rate=hit_tokens / max(1, asked_tokens),
        hit_rate_pool=by_tier[0],
        hit_rate_disk=by_tier[1],
        hit_rate_redis=by_tier[2],
        slower_tokens=int(not_loaded.sum()) * chunk_tokens,
        gpu_s_saved=gpu_s,
        prefill_s_saved=prefill_s,
        first_token_s_saved=prefill_s / max(1, int((trace.tokens > 0).sum())),
        busy_share=_busy(replay, asked_tokens - hit_tokens, speeds),
        link_bytes_per_s=mean,
        link_peak_bytes_per_s=peak,
        link_peak_share=None if peak is None else peak / speeds.link_bytes_per_s,
        usd_per_month=dollars,
        usd_saved_per_month=per_month and per_month * gpu_s * prices.gpu_hour / 3600,
    )


def _busy(replay: Replay, tokens: int, speeds: Speeds) -> float | None:
    trace = replay.trace
    if not trace.has_times or not trace.duration_s:
        return None
    return tokens * speeds.token_s / (trace.duration_s * replay.replicas)


def _by_tier(trace: Trace, found: Prefixes, end: Ints) -> list[int]:
    """Chunks that were used, by tier."""
    begins = trace.starts[:-1]
    counts = []
    for tier in range(len(TIERS)):
        before = np.concatenate([[0], np.cumsum(found.places == tier)])
        used = before[begins + np.maximum(end, found.begin)] - before[begins + found.begin]
        counts.append(int(used.sum()))
    return counts


def _link(trace: Trace, found: Prefixes, loads: Loads) -> tuple[float | None, float | None]:
    """Bytes a second between agents and Redis: on average, and in the busiest part."""
    if not trace.has_times or not trace.duration_s:
        return None, None
    request = trace.request_of
    nbytes = np.array([each.nbytes for each in trace.layouts])[trace.layout]
    stored = np.bincount(request[found.written], minlength=len(trace)) * nbytes
    moved = loads.redis_bytes + stored
    part_s = max(1.0, trace.duration_s / _PARTS)
    parts = ((trace.times_s - trace.times_s[0]) // part_s).astype(np.int64)
    peak = float(np.bincount(parts, weights=moved).max()) / part_s
    return float(moved.sum()) / trace.duration_s, peak


def enough(rows: Sequence[PlanRow], share: float = 0.95) -> PlanRow | None:
    """The cheapest row whose hit rate is at least that share of the best one's."""
    best = max((row.hit_rate for row in rows), default=0.0)
    near = [row for row in rows if row.hit_rate >= share * best]
    return min(near, key=lambda row: row.usd_per_month) if best else None
