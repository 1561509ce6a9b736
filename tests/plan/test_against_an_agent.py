# SPDX-License-Identifier: Apache-2.0
"""What `plan` says of a recording is what real agents do, with host pools of other sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.plan.example import example_lines
from lmcache_redis.plan.figures import Grid, PlanRow, Prices, plan_rows
from lmcache_redis.plan.pacing import Speeds
from lmcache_redis.plan.reading import read_trace
from lmcache_redis.plan.traces import Trace
from tests.harness import AgentServer, Engine, block_hashes
from tests.servers import RedisServer, wait_until

SLOT_BYTES = 64 << 10
BLOCKS_PER_CHUNK = 4
# In chunks; a chunk takes a slot.
POOLS = (60, 120, 300)
REQUESTS = 90
MOST_CHUNKS = 20


def prompts() -> Iterator[list[bytes]]:
    """The hashes of the blocks of each prompt, of an example's conversations, made smaller."""
    for line in example_lines(REQUESTS, seed=3):
        ids = json.loads(line)["hash_ids"][:MOST_CHUNKS]
        chain, hashes = "", []
        for each in ids:
            chain += f"/{each}"
            hashes += block_hashes(chain, BLOCKS_PER_CHUNK)
        yield hashes


def run(engine: Engine, agent: AgentServer) -> None:
    """Each request loads what is found, stores the rest, and ends. The next follows its writes."""
    for number, hashes in enumerate(prompts()):
        request_id, blocks = f"request {number}", range(len(hashes))
        found = engine.lookup(request_id, hashes) // engine.block_size_tokens
        if found:
            failed = engine.retrieve(request_id, hashes[:found], blocks[:found])
            assert not failed
        if found < len(hashes):
            engine.store(request_id, hashes[found:], blocks[found:])
        engine.scheduler.end_session(request_id)
        if found < len(hashes):
            wait_until(lambda: not any(agent.status()["queues"].values()), "the writes")


def serve(directory: Path, url: str, chunks: int, **more: Any) -> dict[str, float]:
    """The hit rates of an agent with a host pool of so many chunks."""
    options = {
        "pool_bytes": chunks * SLOT_BYTES,
        "slot_bytes": SLOT_BYTES,
        "compress": "off",
        **more,
    }
    with (
        AgentServer(directory, url, **options) as agent,
        Engine(agent.endpoint, layers=1, num_blocks=MOST_CHUNKS * BLOCKS_PER_CHUNK) as engine,
    ):
        run(engine, agent)
        wait_until(lambda: not any(agent.status()["queues"].values()), "the writes")
        counters = agent.counters()
        assert agent.terminate() == 0  # what is queued for the file is written
    assert counters["records_dropped"] == 0
    asked = counters["lookup_chunks"]
    pool, redis = counters["hit_chunks_host"] / asked, counters["hit_chunks_redis"] / asked
    rates = {"hit_rate": pool + redis, "hit_rate_pool": pool, "hit_rate_redis": redis}
    return rates | {"stored_bytes": counters["stored_bytes"]}


def planned(trace: Trace, store_after: int = 1) -> list[PlanRow]:
    """For each size of the host pool, with a Redis that has all."""
    pools = [n * SLOT_BYTES for n in POOLS]
    grid = Grid([1], [64], pools, [0], [1 << 30], store_after=[store_after])
    speeds = Speeds(token_s=1.0, link_bytes_per_s=1e12)  # everything is worth loading
    return plan_rows(trace, grid, speeds, Prices())


@pytest.mark.servers
def test_hit_rates_are_within_two_points(tmp_path: Path) -> None:
    """Recorded by the smallest host pool. Each request's writes have ended before the next one."""
    recorded = tmp_path / "recorded.jsonl"
    with RedisServer(tmp_path) as redis:
        url = redis.unix_url

        def serve_apart(chunks: int, store_after: int = 1) -> dict[str, float]:
            more: dict[str, Any] = {"record": recorded} if chunks == POOLS[0] else {}
            if store_after > 1:
                more = {"store_after": store_after}
            name = f"{chunks}-{store_after}"
            return serve(tmp_path / name, url, chunks, key_prefix=f"{name}:", **more)

        with ThreadPoolExecutor() as threads:
            runs = [*threads.map(serve_apart, [*POOLS, POOLS[0]], [1, 1, 1, 2])]
    *found, later = runs
    trace = read_trace([recorded], 512, 0)
    rows = [*planned(trace), planned(trace, 2)[0]]
    for row, real in zip(rows, runs, strict=True):
        assert row.stored_bytes == pytest.approx(real["stored_bytes"], rel=0.02)
        assert row.hit_rate == pytest.approx(real["hit_rate"], abs=0.02)
        assert row.hit_rate_pool == pytest.approx(real["hit_rate_pool"], abs=0.02)
        assert row.hit_rate_redis == pytest.approx(real["hit_rate_redis"], abs=0.02)
    # The sizes differ by more than is allowed, and the recording knows what was measured.
    pools = [real["hit_rate_pool"] for real in found]
    assert pools[0] + 0.05 < pools[1] < pools[2] - 0.05
    assert found[0]["hit_rate_redis"] > 0.3
    assert trace.measured is not None
    names = ("hit_rate", "hit_rate_pool", "hit_rate_redis")
    measured = {name: trace.measured[name] for name in names}
    assert measured == pytest.approx({name: found[0][name] for name in names})
    # Storing later writes less, and loses hits of Redis.
    assert later["stored_bytes"] < 0.9 * found[0]["stored_bytes"]
    assert later["hit_rate_redis"] < found[0]["hit_rate_redis"] - 0.05
