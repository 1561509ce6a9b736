# SPDX-License-Identifier: Apache-2.0
"""What callers of LMCache's adapters do, over a real agent and Redis, with bytes compared."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import zmq

from lmcache_redis import messages as m
from lmcache_redis import transport
from lmcache_redis.client.control import AgentUnreachable
from lmcache_redis.compat import multi_process_adapter as adapters
from lmcache_redis.compat.multi_process_adapter import (
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
)
from lmcache_redis.config import ConfigError
from lmcache_redis.device import export
from lmcache_redis.errors import DeviceError
from tests.compat.adapters import (
    BLOCK,
    BLOCKS,
    CHUNK,
    HASHES,
    MODEL,
    TOKENS,
    Pair,
    assert_moved,
    caches,
    copied,
    finished_retrieves,
    looked_up,
)
from tests.harness import AgentServer, block_hashes, wait_until
from tests.servers import RedisServer


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def pair(agent: AgentServer, context: zmq.Context[Any]) -> Iterator[Pair]:
    pair = Pair(agent, context)
    yield pair
    pair.worker.shutdown()
    pair.scheduler.shutdown()


def every_documented_call(server_url: str, device: str, new_event: Callable[[], Any]) -> None:
    """Every call that the page documents, as a caller of the originals makes it."""
    context = zmq.Context()
    scheduler = LMCacheMPSchedulerAdapter(
        server_url=server_url,
        context=context,
        model_name=MODEL,
        world_size=1,
        kv_rank=0,
        vllm_block_size=BLOCK,
    )
    worker = LMCacheMPWorkerAdapter(
        server_url=server_url,
        context=context,
        model_name=MODEL,
        world_size=1,
        kv_rank=0,
        vllm_block_size=BLOCK,
    )
    assert scheduler.num_blocks_per_chunk() == worker.num_blocks_per_chunk() == CHUNK // BLOCK
    kv_caches = caches(device)
    worker.register_kv_caches(kv_caches)

    # A prompt that is not cached is computed and stored, by hashes and by tokens.
    scheduler.maybe_submit_lookup_request("a", block_hashes=HASHES)
    scheduler.maybe_submit_lookup_request("b", token_ids=TOKENS)
    assert looked_up(scheduler, "a") == looked_up(scheduler, "b") == 0
    scheduler.cleanup_lookup_result("a")
    scheduler.cleanup_lookup_result("b")
    by_hashes = LoadStoreOp(block_ids=list(range(8)), block_hashes=HASHES)
    by_tokens = LoadStoreOp(list(range(8, 16)), TOKENS, None, 0, 2 * CHUNK)
    assert len(by_hashes) == len(by_tokens) == 8
    worker.submit_store_request("a", by_hashes, new_event())
    worker.batched_submit_store_requests(["b"], [by_tokens], new_event())
    stored: set[str] = set()
    wait_until(lambda: stored.update(worker.get_finished({"a", "b"})[0]) or stored == {"a", "b"})
    assert worker.get_finished(set()) == (set(), set())
    scheduler.end_session("a")
    scheduler.end_session("b")

    # The next request with a prompt loads it.
    scheduler.maybe_submit_lookup_request("c", HASHES)
    scheduler.maybe_submit_lookup_request("d", None, TOKENS)
    assert looked_up(scheduler, "c") == looked_up(scheduler, "d") == 2 * CHUNK
    before = copied(kv_caches)
    first = LoadStoreOp(list(range(20, 24)), None, HASHES[:4])
    second = LoadStoreOp(list(range(24, 28)), None, HASHES[4:])
    worker.submit_retrieve_request("c", first, new_event())
    finished_retrieves(worker, "c")
    tokens = LoadStoreOp(list(range(30, 38)), TOKENS, start=0, end=2 * CHUNK)
    worker.batched_submit_retrieve_requests(["c", "d"], [second, tokens], new_event())
    finished_retrieves(worker, "c", "d")
    assert_moved(
        kv_caches, before, {n: 20 + n for n in range(8)} | {8 + n: 30 + n for n in range(8)}
    )
    scheduler.end_session("c")
    scheduler.end_session("d")

    worker.shutdown()
    scheduler.shutdown()
    context.term()


def test_every_documented_call(agent: AgentServer) -> None:
    every_documented_call(agent.endpoint, "cpu", lambda: None)
    wait_until(lambda: agent.status()["sessions"] == 0, what="ended sessions")
    wait_until(lambda: agent.status()["engines"] == [], what="unmapped memory")


@pytest.mark.cuda
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no NVIDIA GPU: torch.cuda.is_available() is False"
)
def test_every_documented_call_on_a_gpu(agent: AgentServer) -> None:
    def recorded() -> torch.cuda.Event:
        event = torch.cuda.Event(interprocess=True)
        event.record()
        return event

    every_documented_call(agent.endpoint, "cuda", recorded)


class TestConstruction:
    def test_the_chunk_size_is_known_at_once(
        self, agent: AgentServer, context: zmq.Context[Any]
    ) -> None:
        scheduler = LMCacheMPSchedulerAdapter(agent.endpoint, context, MODEL, 2, 1, BLOCK)
        assert (scheduler.num_blocks_per_chunk(), scheduler.blocks_in_chunk) == (4, 4)
        assert scheduler.chunk_size == CHUNK
        assert (scheduler.model_name, scheduler.world_size, scheduler.worker_id) == (MODEL, 2, 1)
        context.term()  # ends at once, although the adapter is open
        assert scheduler.link.online
        scheduler.shutdown()

    def test_chunks_are_rounded_up_to_whole_blocks(
        self, agent: AgentServer, context: zmq.Context[Any]
    ) -> None:
        scheduler = LMCacheMPSchedulerAdapter(agent.endpoint, context, MODEL, 1, 0, 48)
        assert (scheduler.num_blocks_per_chunk(), scheduler.chunk_size) == (2, 96)
        scheduler.shutdown()

    @pytest.mark.parametrize("adapter", [LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter])
    def test_without_an_agent(
        self, adapter: Any, tmp_path: Path, context: zmq.Context[Any]
    ) -> None:
        endpoint = f"ipc://{tmp_path}/no.sock"
        with pytest.raises(AgentUnreachable, match=f"lmcache-redis agent --endpoint {endpoint}"):
            adapter(endpoint, context, MODEL, 1, 0, BLOCK, timeout_s=0.3)

    def test_an_agent_that_cannot_be_used(self, tmp_path: Path, context: zmq.Context[Any]) -> None:
        tmp_path.chmod(0o777)
        began_s = time.monotonic()
        with pytest.raises(AgentUnreachable, match="others can write to"):
            LMCacheMPSchedulerAdapter(f"ipc://{tmp_path}/a.sock", context, MODEL, 1, 0, BLOCK)
        assert time.monotonic() - began_s < adapters.TIMEOUT_S / 2

    @pytest.mark.parametrize("adapter", [LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter])
    @pytest.mark.parametrize(
        ("changes", "error", "reason"),
        [
            ({"server_url": "tcp://localhost:5555"}, ConfigError, "tcp:// is not served"),
            ({"server_url": "localhost:5555"}, ConfigError, "write ipc://PATH"),
            ({"world_size": "1"}, ValueError, "world_size is an int, not str"),
            ({"world_size": 0}, ValueError, "world_size is 0"),
            ({"world_size": 256}, ValueError, "world_size is 256, outside 1 to 255"),
            ({"kv_rank": 1}, ValueError, "kv_rank is 1, outside 0 to 0"),
            ({"kv_rank": -1}, ValueError, "kv_rank is -1"),
            ({"vllm_block_size": 0}, ValueError, "vllm_block_size is 0"),
        ],
    )
    def test_wrong_arguments(
        self,
        adapter: Any,
        changes: dict[str, Any],
        error: type[Exception],
        reason: str,
        context: zmq.Context[Any],
    ) -> None:
        right: dict[str, Any] = {
            "server_url": "ipc:///nowhere/agent.sock",
            "context": context,
            "model_name": MODEL,
            "world_size": 1,
            "kv_rank": 0,
            "vllm_block_size": BLOCK,
        }
        with pytest.raises(error, match=reason):
            adapter(**right | changes)


class TestEngineId:
    def test_all_in_one_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(adapters, "parent_process", lambda: None)
        ids = {
            adapters.default_engine_id(MODEL, world_size, is_worker=is_worker)
            for world_size in (1, 2)
            for is_worker in (False, True)
        }
        assert len(ids) == 1
        assert f"{os.getpid()}-" in ids.pop()
        other = adapters.default_engine_id("other", 1, is_worker=False)
        assert other not in ids

    def test_workers_that_the_scheduler_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As in vLLM: several workers are children; a single one runs beside the scheduler."""
        parent = SimpleNamespace(pid=os.getppid())
        monkeypatch.setattr(adapters, "parent_process", lambda: parent)
        name = adapters.default_engine_id
        assert name(MODEL, 2, is_worker=True).startswith(f"{os.getppid()}-")
        assert name(MODEL, 2, is_worker=False).startswith(f"{os.getpid()}-")
        assert name(MODEL, 1, is_worker=True) == name(MODEL, 1, is_worker=False)

    def test_the_variable_decides(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LMCACHE_REDIS_ENGINE_ID", "engine 7")
        monkeypatch.setattr(adapters, "default_engine_id", lambda *_, **__: "made up")

        class Client:
            def __init__(self, **named: Any) -> None:
                self.named = named["engine_id"], named["unnamed"]
                self.link = SimpleNamespace(
                    online=True,
                    wait_for=lambda *_: True,
                    welcome=SimpleNamespace(chunk_size_tokens=CHUNK),
                )

        class Adapter(adapters.AdapterOfEngine, Client):  # type: ignore[misc]
            pass

        def named(engine_id: str | None) -> Any:
            one = Adapter(
                "ipc:///tmp/a", cast("Any", None), MODEL, 1, 0, BLOCK, engine_id=engine_id
            )
            return one.named

        assert named(None) == ("engine 7", False)
        assert named("8") == ("8", False)
        monkeypatch.delenv("LMCACHE_REDIS_ENGINE_ID")
        assert named(None) == ("made up", True)


class TestNamesakes:
    """Several live workers of one engine and rank."""

    @pytest.mark.parametrize(("name", "schedulers"), [("engine 7", 2), (None, 1)])
    def test_both_store_and_load(
        self,
        agent: AgentServer,
        context: zmq.Context[Any],
        name: str | None,
        schedulers: int,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Tensor parallel ranks of an MLA model, which vLLM 0.17.0 makes rank 0 of a world of 1.

        Or two engines of one model in one process, or of one name.
        """
        made = [
            LMCacheMPSchedulerAdapter(agent.endpoint, context, MODEL, 1, 0, BLOCK, engine_id=name)
            for _ in range(schedulers)
        ]
        workers = [
            LMCacheMPWorkerAdapter(agent.endpoint, context, MODEL, 1, 0, BLOCK, engine_id=name)
            for _ in range(2)
        ]
        memory = [caches(), caches()]
        for worker, each in zip(workers, memory, strict=True):
            worker.register_kv_caches(each)
        hashes = [block_hashes(f"worker {n}", 4) for n in range(2)]
        for n, worker in enumerate(workers):
            worker.submit_store_request(f"a{n}", LoadStoreOp(range(4), None, hashes[n]))
            wait_until(lambda worker=worker, n=n: f"a{n}" in worker.get_finished({f"a{n}"})[0])
        assert agent.counter("gathered_chunks") == 2
        for n, scheduler in enumerate(made * (2 // schedulers)):
            for number in range(2):
                scheduler.maybe_submit_lookup_request(f"b{n}{number}", hashes[number])
                assert looked_up(scheduler, f"b{n}{number}") == CHUNK
        # Each request is loaded by both, as by the ranks of one engine.
        for n, (worker, each) in enumerate(zip(workers, memory, strict=True)):
            for number, source in enumerate(memory):
                before = copied(each)
                op = LoadStoreOp(range(8, 12), None, hashes[number])
                worker.submit_retrieve_request(f"b{n}{number}", op)
                finished_retrieves(worker, f"b{n}{number}")
                assert worker.get_block_ids_with_load_errors() == set()
                for layer, tensor in each.items():
                    expected = before[layer].clone()
                    expected[:, 8:12] = source[layer][:, :4]
                    assert torch.equal(tensor, expected)
        assert len(agent.status()["engines"]) == 2
        assert "lost the agent" not in caplog.text
        for each in (*workers, *made):
            each.shutdown()


class TestRegistration:
    def test_blocks_are_counted(self, agent: AgentServer, context: zmq.Context[Any]) -> None:
        worker = LMCacheMPWorkerAdapter(agent.endpoint, context, MODEL, 1, 0, BLOCK)
        for shape in (
            (2, BLOCKS, BLOCK, 2, 8),  # K and V outside
            (BLOCKS, 2, BLOCK, 2, 8),  # inside
            (BLOCKS, BLOCK, 72),  # latent attention
            (2, BLOCKS, BLOCK * 16),
        ):
            worker.register_kv_caches({"a": torch.zeros(shape), "b": torch.zeros(shape)})
            assert worker.ready  # the agent has mapped the memory when the call returns
            (layout,) = worker._memory.layouts
            assert (layout.num_blocks, layout.dtype) == (BLOCKS, "float32")
        worker.shutdown()

    def test_tensors_that_do_not_say_enough(
        self, agent: AgentServer, context: zmq.Context[Any]
    ) -> None:
        worker = LMCacheMPWorkerAdapter(agent.endpoint, context, MODEL, 1, 0, BLOCK)
        one = torch.zeros(8, BLOCK, 4)
        wrong: list[tuple[Any, type[Exception], str]] = [
            ({}, ValueError, "KV caches with \\[\\] blocks"),
            ({"a": torch.zeros(2, BLOCK, 8)}, ValueError, r"shape \[2, 16, 8\]: pass num_blocks"),
            ({"a": torch.zeros(2, 8)}, ValueError, "pass num_blocks"),
            ({"a": torch.zeros(8)}, ValueError, "pass num_blocks"),
            ({"a": torch.zeros(1, 8, 8)}, ValueError, "pass num_blocks"),
            ({"a": one, "b": torch.zeros(9, 4)}, ValueError, "KV caches with .8, 9. blocks"),
            ({"a": one, "b": one.to(torch.uint8)}, ValueError, "float32 and uint8: pass"),
            ({"a": torch.zeros(2, 8, 8)}, DeviceError, "more than one dimension"),
        ]
        for tensors, error, reason in wrong:
            with pytest.raises(error, match=reason):
                worker.register_kv_caches(tensors)
            assert worker.kv_caches == {}
        said = {"a": torch.zeros(2, BLOCK, 8), "b": torch.zeros(2, BLOCK, 8, dtype=torch.uint8)}
        worker.register_kv_caches(said, num_blocks=2, dtype="float32")
        assert worker.ready
        assert worker.kv_caches is said
        worker.shutdown()

    def test_an_agent_that_refuses_the_memory(
        self, tmp_path: Path, server: RedisServer, context: zmq.Context[Any]
    ) -> None:
        small = {"pool_bytes": 4 << 20, "slot_bytes": 1 << 20}
        with AgentServer(tmp_path / "agent", server.unix_url, **small) as agent:
            worker = LMCacheMPWorkerAdapter(agent.endpoint, context, MODEL, 1, 0, BLOCK)
            with pytest.raises(DeviceError, match="does not fit the host pool"):
                worker.register_kv_caches({"a": torch.zeros(8, BLOCK, 1 << 15)})
            worker.register_kv_caches(caches())
            assert worker.ready
            worker.shutdown()

    def test_an_agent_that_does_not_answer(
        self, agent: AgentServer, context: zmq.Context[Any]
    ) -> None:
        worker = LMCacheMPWorkerAdapter(agent.endpoint, context, MODEL, 1, 0, BLOCK, timeout_s=2.0)
        agent.stop()
        with pytest.raises(
            DeviceError, match=r"has not mapped the KV cache of worker 0 within 2 s"
        ):
            worker.register_kv_caches(caches())
        agent.cont()
        wait_until(lambda: worker.ready)
        worker.shutdown()

    def test_a_hit_of_other_weights_is_not_loaded(self, pair: Pair) -> None:
        pair.store("a", HASHES, range(8))
        assert pair.lookup("b", block_hashes=HASHES) == 2 * CHUNK
        pair.worker.register_kv_caches(pair.caches, identity={"revision": "2"})
        before = copied(pair.caches)
        pair.worker.submit_retrieve_request("b", LoadStoreOp(list(range(8, 16)), None, HASHES))
        finished_retrieves(pair.worker, "b")
        assert_moved(pair.caches, before, {})
        assert pair.worker.get_block_ids_with_load_errors() == set(range(8, 16))


class TestLookups:
    def test_one_is_in_flight_for_a_request(self, pair: Pair) -> None:
        pair.store("a", HASHES, range(8))
        assert pair.lookup("b", block_hashes=HASHES) == 2 * CHUNK
        assert pair.lookup("b", block_hashes=HASHES[:4]) == 2 * CHUNK  # ignored
        pair.scheduler.cleanup_lookup_result("b")
        assert pair.lookup("b", block_hashes=HASHES[:4]) == CHUNK

    def test_only_whole_chunks(self, pair: Pair) -> None:
        pair.store("a", HASHES[:4], range(4))
        assert pair.lookup("b", block_hashes=HASHES[:7]) == CHUNK
        assert pair.lookup("c", block_hashes=HASHES[:3]) == 0
        assert pair.lookup("d", token_ids=TOKENS[: CHUNK - 1]) == 0

    def test_a_salt_keeps_equal_tokens_apart(self, pair: Pair) -> None:
        salts: list[str | bytes] = ["", "tenant", b"lora 7"]
        tokens, names = TOKENS[:CHUNK], ["a", "b", "c"]
        ops = [LoadStoreOp(range(4 * n, 4 * n + 4), tokens, None, 0, CHUNK) for n in range(3)]
        for name, op, salt in zip(names, ops, salts, strict=True):
            assert pair.lookup(f"before {name}", token_ids=tokens, cache_salt=salt) == 0
            pair.worker.submit_store_request(name, op, None, cache_salt=salt)
            wait_until(lambda name=name: name in pair.worker.get_finished({name})[0])
            assert pair.lookup(f"after {name}", token_ids=tokens, cache_salt=salt) == CHUNK
        before = copied(pair.caches)
        ids = [f"after {name}" for name in names]
        loads = [LoadStoreOp(range(b, b + 4), tokens, None, 0, CHUNK) for b in (20, 24, 28)]
        pair.worker.batched_submit_retrieve_requests(ids, loads, None, cache_salts=salts)
        finished_retrieves(pair.worker, *ids)
        assert_moved(pair.caches, before, {n: 20 + n for n in range(12)})

    def test_wrong_arguments(self, pair: Pair) -> None:
        scheduler = pair.scheduler
        with pytest.raises(ValueError, match="exactly one"):
            scheduler.maybe_submit_lookup_request("a")
        with pytest.raises(ValueError, match="exactly one"):
            scheduler.maybe_submit_lookup_request("a", HASHES, TOKENS)
        with pytest.raises(TypeError, match="pass token ids as token_ids"):
            scheduler.maybe_submit_lookup_request("a", TOKENS)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="block hashes cover the salt"):
            scheduler.maybe_submit_lookup_request("a", HASHES, cache_salt="s")
        with pytest.raises(ValueError, match="request 'a' has no lookup"):
            scheduler.check_lookup_result("a")

    def test_an_ended_session_is_forgotten(self, pair: Pair, agent: AgentServer) -> None:
        pair.store("a", HASHES, range(8))
        assert pair.lookup("b", block_hashes=HASHES) == 2 * CHUNK
        assert agent.status()["pool"]["pinned_slots"] > 0
        pair.scheduler.end_session("b")
        wait_until(lambda: agent.status()["pool"]["pinned_slots"] == 0, what="unpinned chunks")
        with pytest.raises(ValueError, match="no lookup"):
            pair.scheduler.check_lookup_result("b")

    def test_a_lost_agent_is_a_miss_until_it_is_back(self, pair: Pair, agent: AgentServer) -> None:
        pair.store("a", HASHES, range(8))
        agent.wait_idle()
        agent.kill()
        wait_until(lambda: not pair.scheduler.link.online, what="a noticed loss")
        assert pair.lookup("b", block_hashes=HASHES) == 0
        assert pair.scheduler.num_blocks_per_chunk() == 4
        agent.restart()
        wait_until(lambda: pair.scheduler.link.online and pair.worker.ready)
        assert pair.lookup("c", block_hashes=HASHES) == 2 * CHUNK


class TestFinished:
    """Which requests are reported, and when."""

    def test_a_store_waits_for_the_engine(self, pair: Pair) -> None:
        op = LoadStoreOp(list(range(4)), None, HASHES[:4])
        pair.worker.submit_store_request("a", op, None)
        (store,) = pair.worker._requests.stores["a"]
        wait_until(lambda: store.call.done)
        assert pair.worker.get_finished(set()) == (set(), set())
        assert pair.worker.get_finished({"a"}) == ({"a"}, set())

    def test_the_engine_waits_for_a_store(self, pair: Pair, agent: AgentServer) -> None:
        agent.stop()  # the store stays in flight, until its lease ends
        op = LoadStoreOp(list(range(4)), None, HASHES[:4])
        pair.worker.submit_store_request("a", op, None)
        assert pair.worker.get_finished({"a"}) == (set(), set())
        agent.cont()
        wait_until(lambda: pair.worker.get_finished(set()) == ({"a"}, set()))

    def test_repeated_ids_are_reported_once(self, pair: Pair) -> None:
        pair.worker.submit_store_request("a", LoadStoreOp([0, 1, 2, 3], None, HASHES[:4]), None)
        reported = []
        wait_until(
            lambda: reported.extend(pair.worker.get_finished(["a", "b"])[0]) or "a" in reported
        )
        for _ in range(3):
            assert pair.worker.get_finished({"a", "b"}) == (set(), set())
        assert sorted(reported) == ["a", "b"]

    def test_several_stores_of_a_request_are_one(self, pair: Pair, agent: AgentServer) -> None:
        """Prefill in pieces: a step stores the chunks that it has computed."""
        for first in (0, 4):
            op = LoadStoreOp(list(range(first, first + 4)), None, HASHES[first : first + 4])
            pair.worker.submit_store_request("a", op, None)
        wait_until(lambda: agent.counter("stores") == 2)
        wait_until(lambda: pair.worker.get_finished({"a"}) == ({"a"}, set()))
        assert pair.worker.get_finished({"a"}) == (set(), set())

    def test_blocks_that_were_not_loaded(
        self, pair: Pair, caplog: pytest.LogCaptureFixture
    ) -> None:
        pair.store("a", HASHES[:4], range(4))
        before = copied(pair.caches)
        op = LoadStoreOp(list(range(8, 16)), None, HASHES)  # the second chunk is nowhere
        pair.worker.submit_retrieve_request("b", op, None)
        finished_retrieves(pair.worker, "b")
        assert_moved(pair.caches, before, {n: 8 + n for n in range(4)})
        assert pair.worker.get_block_ids_with_load_errors() == set(range(12, 16))
        assert "request b: 4 blocks were not loaded" in caplog.text

    def test_a_store_that_the_agent_refuses_is_logged(
        self, pair: Pair, caplog: pytest.LogCaptureFixture
    ) -> None:
        requests: dict[Any, LoadStoreOp] = {
            "blocks": LoadStoreOp([0, 1, 2, BLOCKS], None, HASHES[:4]),
            7: LoadStoreOp([0, 1, 2, 3], None, HASHES[:4]),
        }
        for request_id, op in requests.items():
            pair.worker.submit_store_request(request_id, op, None)
            wait_until(lambda name=request_id: name in pair.worker.get_finished({name})[0])
            assert f"request {request_id} was not stored: " in caplog.text

    def test_a_lookup_that_the_agent_refuses_is_logged(
        self, pair: Pair, caplog: pytest.LogCaptureFixture
    ) -> None:
        hashes = [b"h" * n for n in range(1, 9)]  # a chunk's name has one length
        assert pair.lookup("a", block_hashes=hashes) == 0
        assert "the lookup of request a failed: " in caplog.text

    def test_what_is_no_operation_starts_nothing(self, pair: Pair) -> None:
        op = LoadStoreOp(list(range(4)), None, HASHES[:4])
        wrong: Any
        for wrong in ([0, 1, 2, 3], None):
            with pytest.raises(AttributeError):
                pair.worker.batched_submit_store_requests(["a", "b"], [op, wrong], None)
        assert pair.worker._requests.stores == {}


class TestPartialChunks:
    """Operations need not end where a chunk ends: what is left of one is left out."""

    @pytest.mark.parametrize("by_tokens", [False, True])
    def test_whole_chunks_are_stored_and_loaded(
        self, pair: Pair, by_tokens: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        def op(first_block: int) -> LoadStoreOp:
            blocks = list(range(first_block, first_block + 6))
            if by_tokens:
                return LoadStoreOp(blocks, TOKENS, None, 0, 90)
            return LoadStoreOp(blocks, None, HASHES[:6])

        pair.worker.submit_store_request("a", op(0), None)
        wait_until(lambda: "a" in pair.worker.get_finished({"a"})[0])
        assert "was not stored" not in caplog.text
        names = {"token_ids": TOKENS[:90]} if by_tokens else {"block_hashes": HASHES[:6]}
        assert pair.lookup("b", **names) == CHUNK
        before = copied(pair.caches)
        pair.worker.submit_retrieve_request("b", op(20), None)
        finished_retrieves(pair.worker, "b")
        assert_moved(pair.caches, before, {n: 20 + n for n in range(4)})
        # An engine must not compute with blocks that it asked for and that were left out.
        assert pair.worker.get_block_ids_with_load_errors() == {24, 25}
        assert "request b: 2 blocks were not loaded" in caplog.text

    def test_tokens_that_begin_within_a_chunk(self, pair: Pair, agent: AgentServer) -> None:
        whole = LoadStoreOp(list(range(8)), TOKENS, None, 0, 2 * CHUNK)
        pair.worker.submit_store_request("a", whole, None)
        wait_until(lambda: "a" in pair.worker.get_finished({"a"})[0])
        assert pair.lookup("b", token_ids=TOKENS) == 2 * CHUNK
        before = copied(pair.caches)
        op = LoadStoreOp(list(range(20, 26)), TOKENS, None, 32, 2 * CHUNK)
        pair.worker.submit_retrieve_request("b", op, None)
        finished_retrieves(pair.worker, "b")
        assert_moved(pair.caches, before, {4 + n: 22 + n for n in range(4)})
        assert pair.worker.get_block_ids_with_load_errors() == {20, 21}

    def test_less_than_a_chunk(self, pair: Pair, agent: AgentServer, caplog: Any) -> None:
        for op in (
            LoadStoreOp([0, 1, 2], None, HASHES[:3]),
            LoadStoreOp([0, 1, 2], TOKENS, None, 0, 3 * BLOCK),
            LoadStoreOp([0, 1, 2, 3], TOKENS),  # as in the original, no tokens are named
        ):
            pair.worker.submit_store_request("a", op, None)
            wait_until(lambda: "a" in pair.worker.get_finished({"a"})[0])
            pair.worker.get_finished(set())
        assert "was not stored" not in caplog.text
        assert agent.counter("gathered_chunks") == 0


class TestBatches:
    def counted(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """How many stores and retrieves each message has that the worker sends."""
        sent: list[int] = []
        send = pair.worker.link._socket.send

        def counting(frames: list[bytes]) -> bool:
            questions = [transport.decode_question(each) for each in transport.split(frames)]
            if isinstance(questions[0], (m.Store, m.Retrieve)):
                sent.append(len(questions))
            return send(frames)

        monkeypatch.setattr(pair.worker.link._socket, "send", counting)
        return sent

    def test_a_batch_is_one_message(
        self, pair: Pair, agent: AgentServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = ["a", "b", "c"]
        stores = [
            LoadStoreOp(list(range(4 * n, 4 * n + 4)), None, block_hashes(name, 4))
            for n, name in enumerate(names)
        ]
        loads = [
            LoadStoreOp(list(range(20 + 4 * n, 24 + 4 * n)), None, block_hashes(name, 4))
            for n, name in enumerate(names)
        ]
        sent = self.counted(pair, monkeypatch)
        pair.worker.batched_submit_store_requests(names, stores, None)
        stored: set[str] = set()
        wait_until(
            lambda: stored.update(pair.worker.get_finished(set(names))[0]) or stored == set(names)
        )
        for name in names:
            assert pair.lookup(f"load {name}", block_hashes=block_hashes(name, 4)) == CHUNK
        before = copied(pair.caches)
        ids = [f"load {name}" for name in names]
        pair.worker.batched_submit_retrieve_requests(ids, loads, None)
        finished_retrieves(pair.worker, *ids)
        assert sent == [3, 3]
        assert_moved(pair.caches, before, {n: 20 + n for n in range(12)})
        agent.wait_idle()
        assert agent.status()["pool"]["pinned_slots"] == 0  # each request gave back its pins

    def test_lists_of_different_lengths_start_nothing(self, pair: Pair) -> None:
        op = LoadStoreOp(list(range(4)), None, HASHES[:4])
        for submit in (
            pair.worker.batched_submit_store_requests,
            pair.worker.batched_submit_retrieve_requests,
        ):
            with pytest.raises(ValueError, match="2 request ids, 1 operations"):
                submit(["a", "b"], [op], None)
            submit([], [], None)
        assert pair.worker.get_finished({"a"}) == ({"a"}, set())

    def test_the_stream_waits_for_the_event_once(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With memory that passes for a GPU's; the agent, which has none, refuses the tickets."""
        queued: list[str] = []
        stream = SimpleNamespace(cuda_stream=5)

        def record(number: int) -> int:
            queued.append(f"signal on {number}")
            return 9

        monkeypatch.setattr(export, "current_stream", lambda gpu: {3: stream}[gpu])
        signals = SimpleNamespace(gpu=3, record=record)
        memory = replace(pair.worker._memory, signals=signals)  # type: ignore[arg-type]
        monkeypatch.setattr(pair.worker, "_memory", memory)
        event: Any = SimpleNamespace(
            wait=lambda on: queued.append(f"event on {on.cuda_stream}"), synchronize=None
        )
        ops = [LoadStoreOp(list(range(4)), None, block_hashes(str(n), 4)) for n in range(3)]
        pair.worker.batched_submit_store_requests(["a", "b", "c"], ops, event)
        assert queued == ["event on 5", "signal on 5"]
        with pytest.raises(ValueError, match="the KV cache is on a GPU"):
            pair.worker.submit_store_request("d", ops[0], None)

    def test_in_cpu_memory_the_engine_waits_for_the_event(
        self, pair: Pair, agent: AgentServer
    ) -> None:
        waited: list[str] = []
        op = LoadStoreOp(list(range(4)), None, HASHES[:4])
        # The second is as vLLM's placeholder for torch.Event.
        for method in ("wait", "record"):
            event: Any = SimpleNamespace(synchronize=lambda: waited.append("stored"))
            setattr(event, method, None)
            pair.worker.submit_store_request(method, op, event)
        assert waited == ["stored"] * 2
        wait_until(lambda: agent.counter("gathered_chunks") == 1)
        with pytest.raises(TypeError, match=r"an event is a torch.cuda.Event, not bytes"):
            pair.worker.submit_retrieve_request("b", op, b"e" * 64)  # type: ignore[arg-type]


class TestShutdown:
    def test_the_memory_is_unmapped_when_it_returns(
        self, agent: AgentServer, context: zmq.Context[Any]
    ) -> None:
        worker = LMCacheMPWorkerAdapter(agent.endpoint, context, MODEL, 1, 0, BLOCK)
        worker.register_kv_caches(caches())
        assert len(agent.status()["engines"]) == 1
        assert worker.shutdown() is True
        assert agent.status()["engines"] == []
