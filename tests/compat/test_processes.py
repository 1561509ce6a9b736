# SPDX-License-Identifier: Apache-2.0
"""Engines that nobody has named, with their scheduler and workers in any processes.

`tests/agent/test_peers.py` has which of them belong together.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_redis.compat import multi_process_adapter as engines
from lmcache_redis.compat.multi_process_adapter import (
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
)
from tests.compat.adapters import (
    BLOCK,
    CHUNK,
    TOKENS,
    assert_moved,
    caches,
    copied,
    load,
    lookup,
    op_of,
    scheduler_of,
    store,
    worker_of,
)
from tests.harness import AgentServer, wait_until

STORED, LOADED = op_of(range(8)), op_of(range(20, 28))
MOVED = {n: 20 + n for n in range(8)}
LAYOUTS = "workers with different layouts are registered"


def _run_worker(endpoint: str, pipe: Connection) -> None:
    """A worker's process: stores, and loads when it is told of a hit."""
    agent: Any = SimpleNamespace(endpoint=endpoint)
    worker, memory = worker_of(agent), caches()
    worker.register_kv_caches(memory)
    store(worker, "a", STORED)
    pipe.send("stored")
    request_id = pipe.recv()
    before = copied(memory)
    load(worker, request_id, LOADED)
    assert_moved(memory, before, MOVED)
    pipe.send("loaded")
    pipe.recv()
    worker.shutdown()


def test_a_single_worker_in_a_process_of_its_own(agent: AgentServer) -> None:
    """As vLLM's executors for several processes and for Ray run it."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_run_worker, args=(agent.endpoint, there), daemon=True)
    process.start()
    try:
        assert here.poll(60)
        assert here.recv() == "stored"
        scheduler = scheduler_of(agent)
        assert lookup(scheduler, "b") == 2 * CHUNK
        assert agent.status()["pool"]["pinned_slots"] > 0
        assert [each["ready"] for each in agent.status()["engines"]] == [True]
        here.send("b")
        assert here.poll(60)
        assert here.recv() == "loaded"
        wait_until(lambda: agent.status()["pool"]["pinned_slots"] == 0, what="used pins")
        scheduler.end_session("b")
        wait_until(lambda: agent.status()["sessions"] == 0, what="ended sessions")
        here.send("end")
        scheduler.shutdown()
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()


class Elsewhere:
    """Adapters that count as those of different processes."""

    def __init__(self, agent: AgentServer) -> None:
        self._agent = agent
        self._made: list[Any] = []

    def scheduler(self) -> LMCacheMPSchedulerAdapter:
        self._made.append(scheduler_of(self._agent))
        return self._made[-1]

    def worker(
        self, revision: str = "1", block: int = BLOCK, **named: Any
    ) -> LMCacheMPWorkerAdapter:
        self._made.append(worker_of(self._agent, block=block, **named))
        self._made[-1].register_kv_caches(caches(block=block), identity={"revision": revision})
        return self._made[-1]

    def close(self) -> None:
        for each in self._made:
            each.shutdown()


@pytest.fixture
def elsewhere(agent: AgentServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    numbers = itertools.count()
    monkeypatch.delenv(engines.ENGINE_ID_VARIABLE, raising=False)
    monkeypatch.setattr(engines, "default_engine_id", lambda *_, **__: f"process {next(numbers)}")
    made = Elsewhere(agent)
    yield made
    made.close()


def test_replicas_share_their_chunks(elsewhere: Elsewhere, agent: AgentServer) -> None:
    """Of requests with one id. One may take the other's pins, which then loads what it needs."""
    workers = [elsewhere.worker() for _ in range(2)]
    schedulers = [elsewhere.scheduler() for _ in range(2)]
    store(workers[0], "s", STORED)
    before = copied(workers[0].kv_caches)
    for scheduler in schedulers:
        assert lookup(scheduler, "0") == 2 * CHUNK
    schedulers[0].end_session("0")
    for worker in workers:
        load(worker, "0", LOADED)
        assert worker.get_block_ids_with_load_errors() == set()
    assert_moved(workers[0].kv_caches, before, MOVED)
    for name, cache in workers[1].kv_caches.items():
        assert cache[:, 20:28].equal(before[name][:, :8]), name
    assert LAYOUTS not in agent.log
    schedulers[1].end_session("0")
    wait_until(lambda: agent.status()["pool"]["pinned_slots"] == 0, what="unpinned chunks")


def test_different_layouts_are_a_miss_that_is_told_once(
    elsewhere: Elsewhere, agent: AgentServer
) -> None:
    scheduler, worker = elsewhere.scheduler(), elsewhere.worker()
    store(worker, "s", STORED)
    assert lookup(scheduler, "a") == 2 * CHUNK
    other = elsewhere.worker("2")
    assert lookup(scheduler, "b") == 0
    assert lookup(scheduler, "c", None, token_ids=TOKENS) == 0
    assert agent.log.count(LAYOUTS) == 1
    other.shutdown()
    assert lookup(scheduler, "d") == 2 * CHUNK


def test_a_store_by_tokens_beside_chunks_of_another_size(
    elsewhere: Elsewhere, agent: AgentServer
) -> None:
    elsewhere.worker(world=2, rank=0)
    worker = elsewhere.worker(world=2, rank=1, block=48)  # chunks of 96 tokens
    store(worker, "a", LoadStoreOp([0, 1], TOKENS, None, 0, 96))
    assert agent.counter("gathered_chunks") == 1


def test_a_hit_of_another_layout_is_not_loaded(elsewhere: Elsewhere, agent: AgentServer) -> None:
    """A lookup is answered for one engine's worker, then that of the scheduler's registers."""
    store(elsewhere.worker(), "s", STORED)
    assert lookup(elsewhere.scheduler(), "a") == 2 * CHUNK
    own = elsewhere.worker("2")
    before = copied(own.kv_caches)
    load(own, "a", LOADED)
    assert own.get_block_ids_with_load_errors() == set(range(20, 28))
    assert_moved(own.kv_caches, before, {})
    wait_until(lambda: agent.status()["pool"]["pinned_slots"] == 0, what="unpinned chunks")
