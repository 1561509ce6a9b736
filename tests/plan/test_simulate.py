# SPDX-License-Identifier: Apache-2.0
"""The arrays of `Replay` and `decide` against plain simulations, one chunk after the other."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.cache.pacing import prefix_worth_loading
from lmcache_redis.chunks.names import FULL_REACH, Reach
from lmcache_redis.errors import ConfigError
from lmcache_redis.plan.example import example_lines
from lmcache_redis.plan.figures import Grid, Prices, best_row, plan_rows
from lmcache_redis.plan.pacing import Speeds, decide
from lmcache_redis.plan.reading import read_trace
from lmcache_redis.plan.simulate import NEVER, NOWHERE, Capacity, Replay, stack_distances
from lmcache_redis.plan.traces import BlockLayout, Trace, TraceColumns, prefix_numbers

CHUNK_BYTES = 100


def trace_of(*requests: str, reach: Reach = FULL_REACH, every_s: float = 1.0) -> Trace:
    """A request for each word, whose letters are blocks of 10 tokens."""
    columns, known = TraceColumns(), dict[tuple[int, int | str], int]()
    for number, word in enumerate(requests):
        blocks = prefix_numbers(known, word)
        columns.add(number * every_s, blocks, asked=len(word))
    return columns.trace(BlockLayout(10, CHUNK_BYTES, {reach: CHUNK_BYTES}))


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path: Path = tmp_path_factory.mktemp("plan") / "example.jsonl"
    path.write_text("\n".join(example_lines(400)))
    return read_trace([path], 512, CHUNK_BYTES)


class Lru:
    """A cache as everyone would write it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.kept: OrderedDict[int, int] = OrderedDict()

    def __contains__(self, name: int) -> bool:
        return name in self.kept

    def use(self, name: int, nbytes: int) -> None:
        self.used += nbytes - self.kept.pop(name, 0)
        self.kept[name] = nbytes
        while self.used > self.capacity:
            self.used -= self.kept.popitem(last=False)[1]


@given(st.lists(st.integers(0, 12), max_size=80), st.integers(1, 200))
def test_a_distance_is_the_size_of_a_cache_that_hits(names: list[int], capacity: int) -> None:
    cache, last = Lru(capacity), dict[int, int]()
    distances = stack_distances(np.array(names, np.int64)).tolist()
    for index, (name, needed) in enumerate(zip(names, distances, strict=True)):
        used = {*names[last[name] : index]} if name in last else set()
        assert needed == (len(used) or NEVER)
        last[name] = index
        assert (name in cache) == (needed <= capacity)
        cache.use(name, 1)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(("chunk_tokens", "store_after"), [(512, 1), (1024, 1), (512, 2), (512, 3)])
def test_prefixes_are_those_of_caches_one_by_one(
    example: Trace, replicas: int, chunk_tokens: int, store_after: int
) -> None:
    trace = example.in_chunks(chunk_tokens)
    nbytes = trace.layout.nbytes
    replay = Replay(trace, replicas)
    sizes = Capacity(60 * nbytes, 150 * nbytes, 400 * nbytes, 20 * nbytes)
    found = replay.find(sizes, store_after)
    seen: list[Counter[int]] = [Counter() for _ in range(replicas)]
    stored: set[int] = set()
    engines, pools, disks = (
        [Lru(size) for _ in range(replicas)]
        for size in (sizes.engine_bytes, sizes.pool_bytes, sizes.disk_bytes)
    )
    redis = Lru(sizes.redis_bytes)
    for request in range(len(trace)):
        at = int(replay.replica_of[request])
        tiers = (pools[at], disks[at], redis)
        begin, end = int(trace.starts[request]), int(trace.starts[request + 1])
        leads = [True, True]  # of the engine, of all
        lengths = [0, 0]
        for chunk in range(begin, end):
            name = int(trace.ids[chunk])
            place = next((n for n, tier in enumerate(tiers) if name in tier), NOWHERE)
            assert found.places[chunk] == place
            seen[at][name] += 1
            if seen[at][name] >= store_after:
                stored.add(name)
            assert found.written[chunk] == (name in stored and name not in redis)
            here = name in engines[at], name in engines[at] or place != NOWHERE
            leads = [led and has for led, has in zip(leads, here, strict=True)]
            lengths = [n + led for n, led in zip(lengths, leads, strict=True)]
            for cache in (*(tiers if name in stored else tiers[:1]), engines[at]):
                cache.use(name, nbytes)
        for name in trace.ids[begin:end][::-1].tolist():
            for cache in (*(tiers if name in stored else tiers[:1]), engines[at]):
                cache.use(name, nbytes)
        assert [found.begin[request], found.end[request]] == lengths
    assert replicas == 1 or len({*replay.replica_of.tolist()}) == replicas


def test_enough_bytes_have_all_but_a_few_of_the_hits(example: Trace) -> None:
    replay = Replay(example)
    most, found = (
        int(replay.find(Capacity(size)).end.sum()) for size in (NEVER - 1, replay.enough_bytes())
    )
    assert 0.9 * most < found < most
    assert Replay(trace_of("abc", "xyz")).enough_bytes() == 0


def test_larger_chunks_find_whole_chunks_only() -> None:
    trace = trace_of("abcde", "abcxy", "abcde").in_chunks(20)
    assert np.diff(trace.starts).tolist() == [2, 2, 2]
    assert Replay(trace).find(Capacity(10_000)).end.tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="--chunk-size-tokens 25"):
        trace_of("abc").in_chunks(25)


def test_chunks_are_counted_from_the_beginning_of_the_prompt() -> None:
    """A lookup may ask for what is behind the engine's own blocks; what was generated is no hit."""
    columns = TraceColumns()
    columns.add(50.0, range(11, 20), asked=5, first=1)  # blocks 1 to 9 of a prompt
    columns.add(55.0, range(10, 20), asked=10)  # all of it
    columns.add(60.0, range(20, 26), asked=6, first=6)
    columns.add(65.0, [10, 11, 30], asked=2)  # another block 2, which was generated
    trace = columns.trace(BlockLayout(10, CHUNK_BYTES, {FULL_REACH: CHUNK_BYTES})).in_chunks(30)
    # Chunks end with the blocks 2, 5 and 8: the second, the fifth and the eighth that are named.
    assert np.diff(trace.starts).tolist() == [3, 3, 2, 1]
    assert trace.asked.tolist() == [2, 3, 2, 0]
    assert trace.first.tolist() == [0, 0, 2, 0]
    assert trace.ids[:3].tolist() == trace.ids[3:6].tolist()
    assert len({*trace.ids.tolist()}) == 6
    assert trace.layout.block_tokens == 30
    assert trace.duration_s == 15.0


# ---------------------------------------------------------------- pacing


def _load_s(
    places: Sequence[int], busy_s: Mapping[int, float], nbytes: int, speeds: Speeds
) -> float:
    """Until disk (1) and Redis (2), which are busy for so long, have given these chunks."""
    waits_s = [0.0]
    for tier, per_s, latency_s in (
        (1, speeds.disk_bytes_per_s, 0.0),
        (2, speeds.link_bytes_per_s, speeds.latency_s),
    ):
        if chunks := places.count(tier):
            waits_s.append(latency_s + max(0.0, busy_s[tier]) + chunks * nbytes / per_s)
    return max(waits_s)


@pytest.mark.parametrize(("gbit", "replicas"), [(0.5, 1), (5, 1), (50, 1), (5, 2), (20, 2)])
def test_loads_are_those_of_the_rule_for_every_length(
    example: Trace, gbit: float, replicas: int
) -> None:
    """Each engine and each disk is a queue, and so is the link to Redis, for all of them."""
    # Bytes as of a real model. The trace in a tenth of its time: the queues are not empty.
    layout = BlockLayout(512, 64 << 20, {FULL_REACH: 64 << 20})
    trace = Trace(**{**vars(example), "layout": layout, "times_s": example.times_s / 10})
    replay = Replay(trace, replicas)
    pool, disk, redis, engine = (n * layout.nbytes for n in (40, 150, 10_000, 10))
    found = replay.find(Capacity(pool, disk, redis, engine))
    speeds = Speeds(1e-4, gbit * 1e9 / 8, disk_bytes_per_s=gbit * 2e8, latency_s=0.002)
    loads = decide(replay, found, speeds)
    engine_s, link_s = [0.0] * replicas, 0.0
    disk_s = [0.0] * replicas
    chunk_s = 512 * speeds.token_s
    ends = zip(trace.times_s.tolist(), found.begin.tolist(), found.end.tolist(), strict=True)
    for request, (now_s, begin, end) in enumerate(ends):
        at, asked = int(replay.replica_of[request]), int(trace.asked[request])
        start, free_s = int(trace.starts[request]), max(0.0, engine_s[at] - now_s)
        places, lengths = found.places[start + begin : start + end].tolist(), range(begin, end + 1)
        busy_s = {1: disk_s[at] - now_s, 2: link_s - now_s}
        load_s = {n: _load_s(places[: n - begin], busy_s, layout.nbytes, speeds) for n in lengths}
        best = prefix_worth_loading(load_s.items(), asked, chunk_s, free_s)
        got = int(loads.end[request])
        if not any(places):  # all of it is in the pool
            best = end
        first_token_s = [
            max(load_s[length], free_s) + (asked - length) * chunk_s for length in (best, got)
        ]
        assert first_token_s[1] == pytest.approx(first_token_s[0])
        assert loads.wait_s[request] == pytest.approx(max(0.0, load_s[got] - free_s))
        of_disk, of_redis = (places[: got - begin].count(n) * layout.nbytes for n in (1, 2))
        assert loads.redis_bytes[request] == of_redis
        if of_redis:
            link_s = max(link_s, now_s) + of_redis / speeds.link_bytes_per_s
        if of_disk:
            disk_s[at] = max(disk_s[at], now_s) + of_disk / speeds.disk_bytes_per_s
        if asked > got:
            engine_s[at] = max(engine_s[at], now_s) + (asked - got) * chunk_s
    assert loads.redis_bytes.sum() > 0 or gbit < 1
    assert found.begin.any(), "engines have something themselves"
    assert max(disk_s) > 0 or gbit < 1


def test_of_a_window_only_its_chunks_are_loaded() -> None:
    reach = Reach("window", 15)
    trace = trace_of("abcdef", "uvwxyz", "abcdef", reach=reach, every_s=1000.0)
    replay = Replay(trace)
    found = replay.find(Capacity(CHUNK_BYTES, 0, 10_000))
    loads = decide(replay, found, Speeds(1.0, 1e6))
    assert loads.end.tolist() == [0, 0, 6]
    assert loads.redis_bytes.tolist() == [0, 0, 2 * CHUNK_BYTES]  # of 60 tokens the last 14


# --------------------------------------------------------------- figures


def test_rows_of_two_replicas_are_of_both_of_them() -> None:
    """Each has a pool, a disk and an engine. What was generated is stored, and asked by nobody."""
    columns, known = TraceColumns(), dict[tuple[int, int | str], int]()
    for number, word in enumerate(["abcd", "efgh", "abcd", "efgh", "xy"]):
        asked = 0 if word == "xy" else 4
        columns.add(1000.0 + 100 * number, prefix_numbers(known, word), asked=asked)
    trace = columns.trace(BlockLayout(10, CHUNK_BYTES, {FULL_REACH: CHUNK_BYTES}))
    grid = Grid([2], [10], [2 * CHUNK_BYTES], [3 * CHUNK_BYTES], [10_000])
    prices = Prices(gib_month=float(1 << 30), disk_gib_month=0.5 * (1 << 30), gpu_hour=3600.0)
    fast = Speeds(1.0, 1000.0, disk_bytes_per_s=100.0, latency_s=0.5)
    (row,) = plan_rows(trace, grid, fast, prices)
    assert (row.replicas, row.requests, row.prompt_tokens, row.asked_tokens) == (2, 5, 160, 160)
    assert (row.hit_tokens, row.slower_tokens) == (80, 0)
    rates = row.hit_rate_pool, row.hit_rate_disk, row.hit_rate_redis
    assert rates == pytest.approx((40 / 160, 20 / 160, 20 / 160))
    # Of each prompt that comes again: a chunk from the disk in 1 s, one from Redis in 0.6 s.
    assert row.prefill_s_saved == pytest.approx(80 - 2 * 1.0)
    assert row.first_token_s_saved == pytest.approx((80 - 2 * 1.0) / 4)
    assert row.busy_share == pytest.approx(80 / (400 * 2))
    assert row.stored_bytes == 10 * CHUNK_BYTES
    # In one of 200 parts of the time a prompt is stored; loads are of a chunk.
    assert row.link_bytes_per_s == pytest.approx(12 * CHUNK_BYTES / 400)
    assert row.link_peak_bytes_per_s == pytest.approx(4 * CHUNK_BYTES / 2)
    assert row.link_peak_share == pytest.approx(0.2)
    assert row.usd_per_month == pytest.approx(2 * 200 + 10_000 + 2 * 300 * 0.5)
    assert row.usd_saved_per_month == pytest.approx(80 * 30.4 * 86_400 / 400)
    assert row.usd_net_per_month == row.usd_saved_per_month - row.usd_per_month
    slow = Speeds(1.0, 1.0, disk_bytes_per_s=1.0)  # 100 s a chunk, which takes 10 s to compute
    (row,) = plan_rows(trace, grid, slow, prices)
    assert (row.hit_tokens, row.slower_tokens) == (40, 40)
    assert (row.hit_rate_pool, row.hit_rate_disk, row.hit_rate_redis) == (0.25, 0, 0)


def test_the_best_row_is_by_dollars_or_else_by_hit_rate() -> None:
    trace = trace_of("abcd", "efgh", "abcd", every_s=100.0)
    grid = Grid([1], [10], [4 * CHUNK_BYTES], [0], [0, 10_000])
    prices = Prices(gib_month=float(1 << 30), gpu_hour=3600.0)
    small, large = plan_rows(trace, grid, Speeds(1.0, 1000.0, latency_s=0.0), prices)
    assert best_row([small]) is None, "it saves nothing"
    worth = small._replace(hit_rate=0.1, usd_saved_per_month=1e6)
    assert best_row([worth, large]) is worth
    untimed = [row._replace(usd_saved_per_month=None, hit_rate=0.4) for row in (small, large)]
    assert best_row(untimed) is untimed[0]
    # Too far from the highest rate.
    untimed[0] = untimed[0]._replace(hit_rate=0.37)
    assert best_row(untimed) is untimed[1]


def test_what_the_engine_has_is_not_asked_for() -> None:
    grid = Grid([1], [10], [10_000], [0], [0], engine_bytes=5 * CHUNK_BYTES)
    (row,) = plan_rows(trace_of("ab", "abcd", "x", "abcd"), grid, Speeds(1.0, 1e9), Prices())
    # The second prompt finds ab there, and the fourth all.
    assert row.prompt_tokens == 110
    assert row.asked_tokens == 110 - 20 - 40
    assert row.hit_tokens == 0
