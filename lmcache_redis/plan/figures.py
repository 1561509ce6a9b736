# SPDX-License-Identifier: Apache-2.0
"""The rows of a plan: what a cache of some sizes would have saved, moved and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from lmcache_redis.plan.pacing import Loads, Speeds, decide
from lmcache_redis.plan.simulate import TIERS, Capacity, Prefixes, Replay
from lmcache_redis.plan.traces import Trace

_GIB = 1 << 30
_MONTH_S = 30.4 * 86_400
# How many parts of the trace the link's peak is looked for in; each is a second at least.
_PARTS = 200


@dataclass(frozen=True)
class Prices:
    """In dollars: of memory (host pools and Redis), of disk, and of a replica's GPUs."""

    gib_month: float = 3.0
    disk_gib_month: float = 0.1
    gpu_hour: float = 2.5


@dataclass(frozen=True)
class Grid:
    """What is tried, each with each. Bytes of pool, disk and engine are those of a replica.

    redis_ratio: as of a `Capacity`.
    """

    replicas: Sequence[int]
    chunk_tokens: Sequence[int]
    pool_bytes: Sequence[int]
    disk_bytes: Sequence[int]
    redis_bytes: Sequence[int]
    engine_bytes: int = 0
    redis_ratio: float = 1.0
    store_after: Sequence[int] = (1,)


class PlanRow(NamedTuple):
    """One configuration, and what it does.

    hit_rate: of the prompt tokens that the engine's own cache did not have, those loaded; also by
    tier. slower_tokens: found, and not loaded because computing them was faster. stored_bytes: to
    Redis, as they lie there. gpu_s_saved: to compute the hits. prefill_s_saved: that less the time
    for which free engines waited for loads. first_token_s_saved: of an average request. busy_share:
    of the time, replicas still compute prompts; above 1 there are too few. link_*: of the link to
    Redis, loads and stores. None: the trace has no times.
    """

    replicas: int
    chunk_size_tokens: int
    pool_bytes: int
    disk_bytes: int
    redis_bytes: int
    engine_bytes: int
    redis_ratio: float
    store_after: int
    requests: int
    prompt_tokens: int
    asked_tokens: int
    hit_tokens: int
    hit_rate: float
    hit_rate_pool: float
    hit_rate_disk: float
    hit_rate_redis: float
    slower_tokens: int
    stored_bytes: int
    gpu_s_saved: float
    prefill_s_saved: float
    first_token_s_saved: float
    busy_share: float | None
    link_bytes_per_s: float | None
    link_peak_bytes_per_s: float | None
    link_peak_share: float | None
    usd_per_month: float
    usd_saved_per_month: float | None

    @property
    def usd_net_per_month(self) -> float | None:
        """GPU time saved, less the cache."""
        saved = self.usd_saved_per_month
        return None if saved is None else saved - self.usd_per_month


def plan_rows(trace: Trace, grid: Grid, speeds: Speeds, prices: Prices) -> list[PlanRow]:
    """Every row of the grid. Raises ``ConfigError`` for chunks that cannot be."""
    rows = []
    for chunk_tokens, replicas in product(grid.chunk_tokens, grid.replicas):
        replay = Replay(trace.in_chunks(chunk_tokens), replicas)
        tiers = grid.store_after, grid.redis_bytes, grid.disk_bytes, grid.pool_bytes
        for store_after, redis, disk, pool in product(*tiers):
            sizes = Capacity(pool, disk, redis, grid.engine_bytes, grid.redis_ratio)
            rows.append(_row(replay, sizes, store_after, speeds, prices))
    return rows


def _row(
    replay: Replay, sizes: Capacity, store_after: int, speeds: Speeds, prices: Prices
) -> PlanRow:
    trace, found = replay.trace, replay.find(sizes, store_after)
    # In plain bytes.
    plain_per_s = speeds.link_bytes_per_s * sizes.redis_ratio
    loads = decide(replay, found, replace(speeds, link_bytes_per_s=plain_per_s))
    chunk_tokens = trace.layout.block_tokens
    asked_tokens = int(trace.tokens.sum() - found.begin.sum() * chunk_tokens)
    hit_tokens = int((loads.end - found.begin).sum()) * chunk_tokens
    request, within = trace.request_of, trace.within
    is_hit = (found.begin[request] <= within) & (within < loads.end[request])
    by_tier = np.bincount(found.places[is_hit], minlength=len(TIERS)) * chunk_tokens
    rates = (by_tier / max(1, asked_tokens)).tolist()
    gpu_s = hit_tokens * speeds.token_s
    prefill_s = gpu_s - float(loads.wait_s.sum())
    dollars = (
        (sizes.pool_bytes * replay.replicas + sizes.redis_bytes) * prices.gib_month
        + sizes.disk_bytes * replay.replicas * prices.disk_gib_month
    ) / _GIB
    busy = mean = peak = gpu_dollars = None
    if trace.duration_s:
        busy_s = (asked_tokens - hit_tokens) * speeds.token_s
        busy = busy_s / (trace.duration_s * replay.replicas)
        mean, peak = (each / sizes.redis_ratio for each in _link(trace, found, loads))
        gpu_dollars = _MONTH_S / trace.duration_s * gpu_s * prices.gpu_hour / 3600
    return PlanRow(
        replicas=replay.replicas,
        chunk_size_tokens=chunk_tokens,
        **asdict(sizes),
        store_after=store_after,
        requests=len(trace),
        prompt_tokens=int(trace.tokens.sum()),
        asked_tokens=asked_tokens,
        hit_tokens=hit_tokens,
        hit_rate=hit_tokens / max(1, asked_tokens),
        hit_rate_pool=rates[0],
        hit_rate_disk=rates[1],
        hit_rate_redis=rates[2],
        slower_tokens=int((found.end - loads.end).sum()) * chunk_tokens,
        stored_bytes=int(found.written.sum() * trace.layout.nbytes / sizes.redis_ratio),
        gpu_s_saved=gpu_s,
        prefill_s_saved=prefill_s,
        first_token_s_saved=prefill_s / max(1, int((trace.tokens > 0).sum())),
        busy_share=busy,
        link_bytes_per_s=mean,
        link_peak_bytes_per_s=peak,
        link_peak_share=peak and peak / speeds.link_bytes_per_s,
        usd_per_month=dollars,
        usd_saved_per_month=gpu_dollars,
    )


def stored_less(
    trace: Trace, rows: Sequence[PlanRow], speeds: Speeds, prices: Prices
) -> tuple[PlanRow, PlanRow] | None:
    """The best row with a Redis, and the same with chunks stored after two requests; None:
    there is no such row, or rows with several numbers of requests.
    """
    row = best_row([each for each in rows if each.redis_bytes])
    if row is None or any(each.store_after > 1 for each in rows):
        return None
    sizes = Capacity(*(getattr(row, each.name) for each in fields(Capacity)))
    replay = Replay(trace.in_chunks(row.chunk_size_tokens), row.replicas)
    return row, _row(replay, sizes, 2, speeds, prices)


def _link(trace: Trace, found: Prefixes, loads: Loads) -> tuple[float, float]:
    """Plain bytes a second between agents and Redis: on average, and in the busiest part."""
    stored = np.bincount(trace.request_of[found.written], minlength=len(trace))
    moved = loads.redis_bytes + stored * trace.layout.nbytes
    part_s = max(1.0, trace.duration_s / _PARTS)
    parts = ((trace.times_s - trace.times_s[0]) // part_s).astype(np.int64)
    peak = float(np.bincount(parts, weights=moved).max()) / part_s
    return float(moved.sum()) / trace.duration_s, peak


def best_row(rows: Sequence[PlanRow], share: float = 0.95) -> PlanRow | None:
    """What nets the most dollars; without times in the trace, what costs least of the rows with at
    least that share of the highest hit rate. None if no row hits."""
    highest = max((row.hit_rate for row in rows), default=0.0)
    if not highest:
        return None
    known = [row for row in rows if row.usd_net_per_month is not None]
    if known:
        return max(known, key=lambda row: (row.usd_net_per_month or 0.0, -row.usd_per_month))
    near = [row for row in rows if row.hit_rate >= share * highest]
    return min(near, key=lambda row: row.usd_per_month)
