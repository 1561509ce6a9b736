# SPDX-License-Identifier: Apache-2.0
"""What callers of LMCache's adapters do, over a real agent and Redis, with bytes compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq

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
    NO_CONTEXT,
    TOKENS,
    Pair,
    assert_moved,
    caches,
    copied,
    finished_retrieves,
    load,
    looked_up,
    lookup,
    op_of,
    scheduler_of,
    store,
    worker_of,
)
from tests.harness import AgentServer, block_hashes, wait_until
from tests.servers import RedisServer


@pytest.fixture
def pair(agent: AgentServer) -> Iterator[Pair]:
    pair = Pair(agent)
    yield pair
    pair.close()


@pytest.fixture
def worker(agent: AgentServer) -> Iterator[LMCacheMPWorkerAdapter]:
    worker = worker_of(agent)
    yield worker
    worker.shutdown()


def every_documented_call(server_url: str, device: str, new_event: Callable[[], Any]) -> None:
    """Every call that the page documents, as a caller of the originals makes it."""
    context = zmq.Context()
    arguments: dict[str, Any] = {
        "server_url": server_url,
        "context": context,
        "model_name": MODEL,
        "world_size": 1,
        "kv_rank": 0,
        "vllm_block_size": BLOCK,
    }
    scheduler = LMCacheMPSchedulerAdapter(**arguments)
    worker = LMCacheMPWorkerAdapter(**arguments)
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

    assert worker.shutdown() is True
    scheduler.shutdown()
    context.term()


def test_every_documented_call(agent: AgentServer) -> None:
    every_documented_call(agent.endpoint, "cpu", lambda: None)
    assert agent.status()["engines"] == [], "the memory is unmapped when the worker has ended"
    wait_until(lambda: agent.status()["sessions"] == 0, what="ended sessions")


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
    def test_the_chunk_size_is_known_at_once(self, agent: AgentServer) -> None:
        """In whole blocks."""
        context = zmq.Context()
        scheduler = LMCacheMPSchedulerAdapter(agent.endpoint, context, MODEL, 2, 1, 48)
        assert (scheduler.num_blocks_per_chunk(), scheduler.blocks_in_chunk) == (2, 2)
        assert scheduler.chunk_size == 96
        assert (scheduler.model_name, scheduler.world_size, scheduler.worker_id) == (MODEL, 2, 1)
        context.term()  # ends at once, although the adapter is open
        assert scheduler.link.online
        scheduler.shutdown()

    def test_without_an_agent(self, tmp_path: Path) -> None:
        nowhere: Any = SimpleNamespace(endpoint=f"ipc://{tmp_path}/no.sock")
        told = f"lmcache-redis agent --endpoint {nowhere.endpoint}"
        with pytest.raises(AgentUnreachable, match=told):
            worker_of(nowhere, timeout_s=0.3)

    def test_an_agent_that_cannot_be_used(self, tmp_path: Path) -> None:
        """Nobody waits for one."""
        tmp_path.chmod(0o777)
        refusing: Any = SimpleNamespace(endpoint=f"ipc://{tmp_path}/a.sock")
        with pytest.raises(AgentUnreachable, match="others can write to"):
            scheduler_of(refusing, timeout_s=1e6)

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
        self, changes: dict[str, Any], error: type[Exception], reason: str
    ) -> None:
        right = {"server_url": "ipc:///nowhere/agent.sock", "context": NO_CONTEXT,
                 "model_name": MODEL, "world_size": 1, "kv_rank": 0,
                 "vllm_block_size": BLOCK}  # fmt: skip
        with pytest.raises(error, match=reason):
            LMCacheMPWorkerAdapter(**right | changes)


class TestEngineId:
    def test_all_in_one_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(adapters, "parent_process", lambda: None)
        name = adapters.default_engine_id
        (of_all,) = {name(MODEL, n, is_worker=of) for n in (1, 2) for of in (False, True)}
        assert of_all.startswith(f"{os.getpid()}-")
        assert name("other", 1, is_worker=False) != of_all

    def test_workers_that_the_scheduler_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As in vLLM: several workers are children; a single one runs beside the scheduler."""
        parent = SimpleNamespace(pid=os.getppid())
        monkeypatch.setattr(adapters, "parent_process", lambda: parent)
        name = adapters.default_engine_id
        assert name(MODEL, 2, is_worker=True).startswith(f"{os.getppid()}-")
        assert name(MODEL, 2, is_worker=False).startswith(f"{os.getpid()}-")
        assert name(MODEL, 1, is_worker=True) == name(MODEL, 1, is_worker=False)

    def test_the_variable_decides(
        self, agent: AgentServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def named(engine_id: str | None) -> tuple[str, bool]:
            scheduler = scheduler_of(agent, engine_id=engine_id)
            scheduler.shutdown()
            return scheduler.link._hello.engine_id, scheduler.link._hello.unnamed

        monkeypatch.setenv(adapters.ENGINE_ID_VARIABLE, "engine 7")
        assert named(None) == ("engine 7", False)
        assert named("8") == ("8", False)
        monkeypatch.delenv(adapters.ENGINE_ID_VARIABLE)
        assert named(None) == (adapters.default_engine_id(MODEL, 1, is_worker=False), True)


class TestNamesakes:
    """Several live workers of one engine and rank."""

    @pytest.mark.parametrize(("name", "schedulers"), [("engine 7", 2), (None, 1)])
    def test_both_store_and_load(
        self,
        agent: AgentServer,
        name: str | None,
        schedulers: int,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Tensor parallel ranks of an MLA model, which vLLM 0.17.0 makes rank 0 of a world of 1.

        Or two engines of one model in one process, or of one name.
        """
        pairs = [Pair(agent, engine_id=name) for _ in range(2)]
        if schedulers == 1:
            pairs[1].scheduler.shutdown()
            pairs[1].scheduler = pairs[0].scheduler
        hashes = [block_hashes(f"worker {n}", 4) for n in range(2)]
        for n, pair in enumerate(pairs):
            store(pair.worker, f"a{n}", op_of(range(4), hashes[n]))
        assert agent.counter("gathered_chunks") == 2
        for n, pair in enumerate(pairs):
            for number in range(2):
                assert lookup(pair.scheduler, f"b{n}{number}", hashes[number]) == CHUNK
        # Each request is loaded by both, as by the ranks of one engine.
        for n, pair in enumerate(pairs):
            for number, source in enumerate(pairs):
                before = copied(pair.caches)
                load(pair.worker, f"b{n}{number}", op_of(range(8, 12), hashes[number]))
                assert pair.worker.get_block_ids_with_load_errors() == set()
                for layer, tensor in pair.caches.items():
                    before[layer][:, 8:12] = source.caches[layer][:, :4]
                    assert torch.equal(tensor, before[layer])
        assert len(agent.status()["engines"]) == 2
        assert "lost the agent" not in caplog.text
        for pair in pairs:
            pair.close()


class TestRegistration:
    def test_blocks_are_counted(self, worker: LMCacheMPWorkerAdapter) -> None:
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

    def test_tensors_that_do_not_say_enough(self, worker: LMCacheMPWorkerAdapter) -> None:
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

    def test_an_agent_that_refuses_the_memory(self, tmp_path: Path, server: RedisServer) -> None:
        small = {"pool_bytes": 4 << 20, "slot_bytes": 1 << 20}
        with AgentServer(tmp_path / "agent", server.unix_url, **small) as agent:
            worker = worker_of(agent)
            with pytest.raises(DeviceError, match="does not fit the host pool"):
                worker.register_kv_caches({"a": torch.zeros(8, BLOCK, 1 << 15)})
            worker.register_kv_caches(caches())
            assert worker.ready
            worker.shutdown()

    def test_an_agent_that_does_not_answer(
        self, agent: AgentServer, worker: LMCacheMPWorkerAdapter
    ) -> None:
        worker._timeout_s = 0.5
        agent.stop()
        with pytest.raises(
            DeviceError, match=r"has not mapped the KV cache of worker 0 within 0.5 s"
        ):
            worker.register_kv_caches(caches())
        agent.cont()
        wait_until(lambda: worker.ready)


class TestLookups:
    def test_one_is_in_flight_for_a_request(self, pair: Pair) -> None:
        store(pair.worker, "a", op_of(range(8)))
        assert lookup(pair.scheduler, "b") == 2 * CHUNK
        assert lookup(pair.scheduler, "b", HASHES[:4]) == 2 * CHUNK  # ignored
        pair.scheduler.cleanup_lookup_result("b")
        assert lookup(pair.scheduler, "b", HASHES[:4]) == CHUNK
        pair.scheduler.end_session("b")
        with pytest.raises(ValueError, match="request 'b' has no lookup"):
            pair.scheduler.check_lookup_result("b")

    def test_a_salt_keeps_equal_tokens_apart(self, pair: Pair) -> None:
        salts: list[str | bytes] = ["", "tenant", b"lora 7"]
        tokens, names = TOKENS[:CHUNK], ["a", "b", "c"]
        ops = [LoadStoreOp(range(4 * n, 4 * n + 4), tokens, None, 0, CHUNK) for n in range(3)]
        for name, op, salt in zip(names, ops, salts, strict=True):
            of = {"token_ids": tokens, "cache_salt": salt}
            assert lookup(pair.scheduler, f"before {name}", None, **of) == 0
            store(pair.worker, name, op, cache_salt=salt)
            assert lookup(pair.scheduler, f"after {name}", None, **of) == CHUNK
        before = copied(pair.caches)
        ids = [f"after {name}" for name in names]
        loads = [LoadStoreOp(range(b, b + 4), tokens, None, 0, CHUNK) for b in (20, 24, 28)]
        pair.worker.batched_submit_retrieve_requests(ids, loads, None, cache_salts=salts)
        finished_retrieves(pair.worker, *ids)
        assert_moved(pair.caches, before, {n: 20 + n for n in range(12)})

    def test_wrong_arguments(self, pair: Pair) -> None:
        """`test_load_store` has all of them."""
        scheduler = pair.scheduler
        with pytest.raises(TypeError, match="pass token ids as token_ids"):
            scheduler.maybe_submit_lookup_request("a", TOKENS)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="block hashes cover the salt"):
            scheduler.maybe_submit_lookup_request("a", HASHES, cache_salt="s")


class TestFinished:
    """Which requests are reported, and when."""

    def test_a_store_waits_for_the_engine(self, pair: Pair) -> None:
        pair.worker.submit_store_request("a", op_of(range(4), HASHES[:4]), None)
        (begun,) = pair.worker._requests.stores["a"]
        wait_until(lambda: begun.call.done)
        assert pair.worker.get_finished(set()) == (set(), set())
        assert pair.worker.get_finished({"a"}) == ({"a"}, set())

    def test_the_engine_waits_for_a_store(self, pair: Pair, agent: AgentServer) -> None:
        agent.stop()  # the store stays in flight, until its lease ends
        pair.worker.submit_store_request("a", op_of(range(4), HASHES[:4]), None)
        assert pair.worker.get_finished({"a"}) == (set(), set())
        agent.cont()
        wait_until(lambda: pair.worker.get_finished(set()) == ({"a"}, set()))

    def test_a_request_is_reported_once(self, pair: Pair, agent: AgentServer) -> None:
        """With all its stores, one for each piece of its prefill, and although ids are repeated."""
        for first in (0, 4):
            op = op_of(range(first, first + 4), HASHES[first : first + 4])
            pair.worker.submit_store_request("a", op, None)
        assert len(pair.worker._requests.stores["a"]) == 2
        wait_until(lambda: agent.counter("stores") == 2)
        reported = []
        wait_until(
            lambda: reported.extend(pair.worker.get_finished(["a", "b"])[0]) or "a" in reported
        )
        for _ in range(3):
            assert pair.worker.get_finished({"a", "b"}) == (set(), set())
        assert sorted(reported) == ["a", "b"]
        pair.worker.get_finished(set())
        assert pair.worker.get_finished({"b"}) == ({"b"}, set()), "another one with its id"

    def test_a_store_that_the_agent_refuses_is_logged(
        self, pair: Pair, caplog: pytest.LogCaptureFixture
    ) -> None:
        requests: dict[Any, LoadStoreOp] = {
            "blocks": LoadStoreOp([0, 1, 2, BLOCKS], None, HASHES[:4]),
            7: LoadStoreOp([0, 1, 2, 3], None, HASHES[:4]),
        }
        for request_id, op in requests.items():
            store(pair.worker, request_id, op)
            assert f"request {request_id} was not stored: " in caplog.text

    def test_what_is_no_operation_starts_nothing(self, pair: Pair) -> None:
        wrong: Any
        for wrong in ([0, 1, 2, 3], None):
            with pytest.raises(AttributeError):
                pair.worker.batched_submit_store_requests(["a", "b"], [op_of(range(8)), wrong])
        assert pair.worker._requests.stores == {}


class TestPartialChunks:
    """Operations need not end where a chunk ends: what is left of one is left out."""

    @pytest.mark.parametrize("by_tokens", [False, True])
    def test_whole_chunks_are_stored_and_loaded(
        self, pair: Pair, by_tokens: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        def op(blocks: range) -> LoadStoreOp:
            if by_tokens:
                return LoadStoreOp(blocks, TOKENS, None, 0, 90)
            return op_of(blocks, HASHES[:6])

        store(pair.worker, "a", op(range(6)))
        assert "was not stored" not in caplog.text
        hashes, tokens = (None, TOKENS[:90]) if by_tokens else (HASHES[:6], None)
        assert lookup(pair.scheduler, "b", hashes, token_ids=tokens) == CHUNK
        before = copied(pair.caches)
        load(pair.worker, "b", op(range(20, 26)))
        assert_moved(pair.caches, before, {n: 20 + n for n in range(4)})
        # An engine must not compute with blocks that it asked for and that were left out.
        assert pair.worker.get_block_ids_with_load_errors() == {24, 25}
        assert "request b: 2 blocks were not loaded" in caplog.text

    def test_tokens_that_begin_within_a_chunk(self, pair: Pair) -> None:
        store(pair.worker, "a", LoadStoreOp(range(8), TOKENS, None, 0, 2 * CHUNK))
        before = copied(pair.caches)
        load(pair.worker, "b", LoadStoreOp(range(20, 26), TOKENS, None, 32, 2 * CHUNK))
        assert_moved(pair.caches, before, {4 + n: 22 + n for n in range(4)})
        assert pair.worker.get_block_ids_with_load_errors() == {20, 21}

    def test_less_than_a_chunk(self, pair: Pair, agent: AgentServer, caplog: Any) -> None:
        for op in (
            op_of(range(3), HASHES[:3]),
            LoadStoreOp([0, 1, 2], TOKENS, None, 0, 3 * BLOCK),
            LoadStoreOp([0, 1, 2, 3], TOKENS),  # as in the original, no tokens are named
        ):
            store(pair.worker, "a", op)
        assert "was not stored" not in caplog.text
        assert agent.counter("gathered_chunks") == 0


class TestBatches:
    def test_lists_of_different_lengths_start_nothing(self, pair: Pair) -> None:
        for submit in (
            pair.worker.batched_submit_store_requests,
            pair.worker.batched_submit_retrieve_requests,
        ):
            with pytest.raises(ValueError, match="2 request ids, 1 operations"):
                submit(["a", "b"], [op_of(range(8))], None)
            submit([], [], None)
        assert pair.worker.get_finished({"a"}) == ({"a"}, set())

    def test_the_stream_waits_for_the_event_once(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """For a batch, which is one message (`tests/client/test_worker.py`).

        With memory that passes for a GPU's; the agent, which has none, refuses the tickets.
        """
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
        ops = [op_of(range(4), block_hashes(str(n), 4)) for n in range(3)]
        for submit in (
            pair.worker.batched_submit_store_requests,
            pair.worker.batched_submit_retrieve_requests,
        ):
            queued.clear()
            submit(["a", "b", "c"], ops, event)
            assert queued == ["event on 5", "signal on 5"]
        with pytest.raises(ValueError, match="the KV cache is on a GPU"):
            pair.worker.submit_store_request("d", ops[0], None)

    def test_in_cpu_memory_the_engine_waits_for_the_event(
        self, pair: Pair, agent: AgentServer
    ) -> None:
        waited: list[str] = []
        op = op_of(range(4), HASHES[:4])
        # The second is as vLLM's placeholder for torch.Event.
        for method in ("wait", "record"):
            event: Any = SimpleNamespace(synchronize=lambda: waited.append("stored"))
            setattr(event, method, None)
            pair.worker.submit_store_request(method, op, event)
        assert waited == ["stored"] * 2
        wait_until(lambda: agent.counter("gathered_chunks") == 1)
        with pytest.raises(TypeError, match=r"an event is a torch.cuda.Event, not bytes"):
            pair.worker.submit_retrieve_request("b", op, b"e" * 64)  # type: ignore[arg-type]
