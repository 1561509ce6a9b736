# SPDX-License-Identifier: Apache-2.0
"""Engines that nobody has named, with their scheduler and workers in any processes."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import zmq

from lmcache_redis.compat import multi_process_adapter as engines
from lmcache_redis.compat.multi_process_adapter import (
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
)
from tests.compat.adapters import (
    BLOCK,
    CHUNK,
    HASHES,
    MODEL,
    TOKENS,
    assert_moved,
    caches,
    copied,
    finished_retrieves,
    looked_up,
)
from tests.harness import AgentServer, wait_until

LAYOUTS = "workers with different layouts are registered"


def store(worker: LMCacheMPWorkerAdapter, request_id: str = "a") -> None:
    worker.submit_store_request(request_id, LoadStoreOp(list(range(8)), None, HASHES))
    wait_until(lambda: request_id in worker.get_finished({request_id})[0])


def load(worker: LMCacheMPWorkerAdapter, request_id: str) -> None:
    op = LoadStoreOp(list(range(20, 28)), None, HASHES)
    worker.submit_retrieve_request(request_id, op)
    finished_retrieves(worker, request_id)


def lookup(scheduler: LMCacheMPSchedulerAdapter, request_id: str) -> int:
    scheduler.maybe_submit_lookup_request(request_id, HASHES)
    return looked_up(scheduler, request_id)


def _run_worker(endpoint: str, pipe: Connection) -> None:
    """A worker's process: stores, and loads when it is told of a hit."""
    with zmq.Context() as context:
        worker = LMCacheMPWorkerAdapter(endpoint, context, MODEL, 1, 0, BLOCK)
        memory = caches()
        worker.register_kv_caches(memory)
        store(worker)
        pipe.send("stored")
        request_id = pipe.recv()
        before = copied(memory)
        load(worker, request_id)
        assert_moved(memory, before, {n: 20 + n for n in range(8)})
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
        with zmq.Context() as context:
            assert here.poll(60)
            assert here.recv() == "stored"
            scheduler = LMCacheMPSchedulerAdapter(agent.endpoint, context, MODEL, 1, 0, BLOCK)
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

    def __init__(self, agent: AgentServer, context: zmq.Context[Any]) -> None:
        self._at = (agent.endpoint, context)
        self._made: list[Any] = []

    def scheduler(self, model: str = MODEL, world: int = 1) -> LMCacheMPSchedulerAdapter:
        self._made.append(LMCacheMPSchedulerAdapter(*self._at, model, world, 0, BLOCK))
        return self._made[-1]

    def worker(
        self,
        model: str = MODEL,
        world: int = 1,
        rank: int = 0,
        *,
        block: int = BLOCK,
        identity: dict[str, str] | None = None,
        **named: Any,
    ) -> LMCacheMPWorkerAdapter:
        self._made.append(LMCacheMPWorkerAdapter(*self._at, model, world, rank, block, **named))
        self._made[-1].register_kv_caches(caches(block=block), identity=identity)
        return self._made[-1]

    def close(self) -> None:
        for each in self._made:
            each.shutdown()


@pytest.fixture
def elsewhere(agent: AgentServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    numbers = itertools.count()
    monkeypatch.delenv(engines.ENGINE_ID_VARIABLE, raising=False)
    monkeypatch.setattr(engines, "default_engine_id", lambda *_, **__: f"process {next(numbers)}")
    with zmq.Context() as context:
        made = Elsewhere(agent, context)
        yield made
        made.close()


def test_replicas_share_their_chunks(elsewhere: Elsewhere, agent: AgentServer) -> None:
    workers = [elsewhere.worker() for _ in range(2)]
    schedulers = [elsewhere.scheduler() for _ in range(2)]
    store(workers[0])
    for number in (0, 1):
        before = copied(dict(workers[number].kv_caches))
        assert lookup(schedulers[number], f"b{number}") == 2 * CHUNK
        load(workers[number], f"b{number}")
        if number == 0:
            pairs = {n: 20 + n for n in range(8)}
            assert_moved(dict(workers[0].kv_caches), before, pairs)
    for name, cache in workers[1].kv_caches.items():
        assert cache[:, 20:28].equal(workers[0].kv_caches[name][:, :8]), name
    assert LAYOUTS not in agent.log


def test_requests_of_replicas_with_one_id(elsewhere: Elsewhere, agent: AgentServer) -> None:
    """One may take the pins of the other, which then loads what it needs."""
    workers = [elsewhere.worker() for _ in range(2)]
    schedulers = [elsewhere.scheduler() for _ in range(2)]
    store(workers[0], "s")
    for scheduler in schedulers:
        assert lookup(scheduler, "0") == 2 * CHUNK
    schedulers[0].end_session("0")
    for worker in workers:
        load(worker, "0")
        assert worker.get_block_ids_with_load_errors() == set()
    schedulers[1].end_session("0")
    wait_until(lambda: agent.status()["pool"]["pinned_slots"] == 0, what="unpinned chunks")


def test_every_rank_is_needed(elsewhere: Elsewhere, agent: AgentServer) -> None:
    scheduler = elsewhere.scheduler(world=2)
    first = elsewhere.worker(world=2, rank=0)
    store(first)
    assert lookup(scheduler, "a") == 0
    assert [each["ready"] for each in agent.status()["engines"]] == [False]
    second = elsewhere.worker(world=2, rank=1)
    assert lookup(scheduler, "b") == 0
    store(second)
    assert lookup(scheduler, "c") == 2 * CHUNK
    assert [each["ready"] for each in agent.status()["engines"]] == [True, True]
    for worker in (first, second):
        load(worker, "c")
        assert worker.get_block_ids_with_load_errors() == set()


@pytest.mark.parametrize("by_tokens", [False, True])
def test_different_layouts_are_a_miss_that_is_told_once(
    elsewhere: Elsewhere, agent: AgentServer, by_tokens: bool
) -> None:
    scheduler, worker = elsewhere.scheduler(), elsewhere.worker()
    store(worker)
    assert lookup(scheduler, "a") == 2 * CHUNK
    other = elsewhere.worker(identity={"revision": "2"})
    names: dict[str, Any] = {"token_ids": TOKENS} if by_tokens else {"block_hashes": HASHES}
    for request_id in ("b", "c"):
        scheduler.maybe_submit_lookup_request(request_id, **names)
        assert looked_up(scheduler, request_id) == 0
    assert agent.log.count(LAYOUTS) == 1
    other.shutdown()
    assert lookup(scheduler, "d") == 2 * CHUNK


def test_a_store_by_tokens_beside_chunks_of_another_size(
    elsewhere: Elsewhere, agent: AgentServer
) -> None:
    elsewhere.worker(world=2, rank=0)
    worker = elsewhere.worker(world=2, rank=1, block=48)  # chunks of 96 tokens
    op = LoadStoreOp([0, 1], TOKENS, None, 0, 96)
    worker.submit_store_request("a", op)
    wait_until(lambda: "a" in worker.get_finished({"a"})[0])
    assert agent.counter("gathered_chunks") == 1


def test_workers_of_others_do_not_serve(elsewhere: Elsewhere) -> None:
    scheduler = elsewhere.scheduler()
    others: list[dict[str, Any]] = [{"model": "another"}, {"world": 2}, {"engine_id": "given"}]
    for other in others:
        store(elsewhere.worker(**other))
    assert lookup(scheduler, "a") == 0


def test_equal_ids_come_first(elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where processes are arranged as in vLLM, another engine's layout changes nothing."""
    elsewhere.worker(identity={"revision": "2"})
    monkeypatch.setattr(engines, "default_engine_id", lambda *_, **__: "one")
    scheduler, worker = elsewhere.scheduler(), elsewhere.worker()
    store(worker)
    assert lookup(scheduler, "a") == 2 * CHUNK


def test_a_hit_of_another_layout_is_not_loaded(elsewhere: Elsewhere, agent: AgentServer) -> None:
    """A lookup is answered for one engine's worker, then that of the scheduler's registers."""
    store(elsewhere.worker())
    assert lookup(elsewhere.scheduler(), "a") == 2 * CHUNK
    own = elsewhere.worker(identity={"revision": "2"})
    before = copied(dict(own.kv_caches))
    load(own, "a")
    assert own.get_block_ids_with_load_errors() == set(range(20, 28))
    assert_moved(dict(own.kv_caches), before, {})
    wait_until(lambda: agent.status()["pool"]["pinned_slots"] == 0, what="unpinned chunks")


def test_the_pins_go_with_the_scheduler(elsewhere: Elsewhere, agent: AgentServer) -> None:
    worker, scheduler = elsewhere.worker(), elsewhere.scheduler()
    store(worker)
    assert lookup(scheduler, "a") == 2 * CHUNK
    elsewhere.scheduler()  # another process's: it ends no session of the first
    assert agent.status()["pool"]["pinned_slots"] > 0
    scheduler.shutdown()
    wait_until(lambda: agent.status()["pool"]["pinned_slots"] == 0, what="unpinned chunks")
