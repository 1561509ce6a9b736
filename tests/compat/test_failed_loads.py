# SPDX-License-Identifier: Apache-2.0
"""Engines whose caller asks which loads failed, and engines whose caller does not.

A small engine plays both, over a real agent and Redis: the KV of a token is computed from that of
the token before it, in whatever block that is, so all that is computed behind a block that was not
loaded is wrong too. The connector of vLLM 0.17.0 never asks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from lmcache_redis import messages as m
from lmcache_redis.client import link as link_module
from lmcache_redis.compat.load_store import LoadErrorsNotTaken, LoadStoreOp
from lmcache_redis.compat.multi_process_adapter import (
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
)
from tests.compat.adapters import BLOCK, BLOCKS, CHUNK, MODEL, looked_up
from tests.harness import AgentServer, wait_until
from tests.servers import RedisServer

GARBAGE = -1.0
NO_CONTEXT: Any = None


@dataclass
class Request:
    request_id: str
    tokens: Sequence[int]
    blocks: list[int] = field(default_factory=list)


class SmallEngine:
    """One request at a time. asks: whether it asks which blocks were not loaded, as vLLM does."""

    def __init__(self, agent: AgentServer, *, asks: bool) -> None:
        self.asks = asks
        self.scheduler = LMCacheMPSchedulerAdapter(agent.endpoint, NO_CONTEXT, MODEL, 1, 0, BLOCK)
        self.worker = LMCacheMPWorkerAdapter(agent.endpoint, NO_CONTEXT, MODEL, 1, 0, BLOCK)
        self.kv = torch.full((BLOCKS, BLOCK, 4), GARBAGE)
        self.worker.register_kv_caches({"layer": self.kv}, num_blocks=BLOCKS)
        self.numbers = itertools.count()
        self.failed_loads = 0

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    def serve(
        self,
        tokens: Sequence[int],
        before_load: Callable[[], Any] = lambda: None,
        during_load: Callable[[], Any] = lambda: None,
    ) -> bool:
        """One request, from its lookup to the end of its stores; whether its KV is right."""
        request = Request(f"request {next(self.numbers)}", tokens)
        self.scheduler.maybe_submit_lookup_request(request.request_id, token_ids=list(tokens))
        hit = looked_up(self.scheduler, request.request_id)
        self.scheduler.cleanup_lookup_result(request.request_id)
        request.blocks = list(range(len(tokens) // BLOCK))
        self.kv[request.blocks] = GARBAGE
        computed = hit
        if hit:
            before_load()
            op = LoadStoreOp(request.blocks[: hit // BLOCK], list(tokens), None, 0, hit)
            self.worker.batched_submit_retrieve_requests([request.request_id], [op], None)
            during_load()
            failed = self.loaded(request.request_id)
            if failed:
                computed = min(request.blocks.index(block) for block in failed) * BLOCK
        self.compute(request, computed)
        first = -(-hit // CHUNK) * CHUNK  # as vLLM's connector: the hit is not stored again
        end = len(tokens) // CHUNK * CHUNK
        if first < end:
            blocks = request.blocks[first // BLOCK : end // BLOCK]
            op = LoadStoreOp(blocks, list(tokens), None, first, end)
            self.worker.batched_submit_store_requests([request.request_id], [op], None)
        self.step({request.request_id})
        self.scheduler.end_session(request.request_id)
        return torch.equal(self.kv[request.blocks], right_kv(tokens)[: len(request.blocks)])

    def loaded(self, request_id: str) -> set[int]:
        """Steps until the load is reported; the blocks that the engine knows to have failed."""
        failed: set[int] = set()

        def stepped() -> bool:
            _, received = self.worker.get_finished(set())
            if self.asks:
                failed.update(self.worker.get_block_ids_with_load_errors())
            return request_id in received

        wait_until(stepped, "a load")
        self.failed_loads += bool(failed)
        return failed

    def step(self, finished: set[str]) -> None:
        """Steps until the stores of finished requests are reported."""
        sent: set[str] = set()
        wait_until(lambda: sent.update(self.worker.get_finished(finished)[0]) or sent == finished)
        if self.asks:
            assert not self.worker.get_block_ids_with_load_errors()
        self.worker.get_finished(set())

    def compute(self, request: Request, first: int) -> None:
        """The KV of the tokens from ``first`` on, from that before it, whatever that is."""
        flat = self.kv.view(-1, 4)
        for position in range(first, len(request.blocks) * BLOCK):
            at = request.blocks[position // BLOCK] * BLOCK + position % BLOCK
            before = request.blocks[(position - 1) // BLOCK] * BLOCK + (position - 1) % BLOCK
            last = flat[before, 0] if position else torch.tensor(0.0)
            flat[at] = next_kv(last, request.tokens[position])


def next_kv(last: torch.Tensor, token: int) -> torch.Tensor:
    return (last * 31 + token) % 1009  # exact in float32


def right_kv(tokens: Sequence[int]) -> torch.Tensor:
    kv, last = [], torch.tensor(0.0)
    for token in tokens:
        last = next_kv(last, token)
        kv.append(last.expand(4))
    return torch.stack(kv)[: len(tokens) // BLOCK * BLOCK].view(-1, BLOCK, 4)


def prompt(number: int, chunks: int) -> list[int]:
    """Prompts with one number share their beginnings."""
    return [(number * 7919 + n * 104729) % 5000 for n in range(chunks * CHUNK)]


@pytest.mark.servers
@pytest.mark.parametrize(
    ("asks", "kill"), [(False, True), (True, False)], ids=["never asks, killed", "asks, terminated"]
)
def test_an_agent_restarted_between_a_lookup_and_its_load(
    agent: AgentServer, asks: bool, kill: bool
) -> None:
    """The new agent loads from Redis what the old one had promised."""
    engine = SmallEngine(agent, asks=asks)
    for number in range(4):
        assert engine.serve(prompt(number, 2))

    def end() -> None:
        agent.wait_idle()
        (agent.kill if kill else agent.terminate)()

    def end_and_restart() -> None:
        end()
        agent.restart()

    # A load is begun while there is no agent, or as soon as the next one answers.
    assert engine.serve(prompt(0, 3), end, agent.restart)
    assert engine.serve(prompt(1, 3), end_and_restart)
    assert engine.serve(prompt(2, 3), end, agent.restart)
    assert engine.serve(prompt(3, 3), end_and_restart)
    assert engine.failed_loads == 0
    # What was stored behind the loads is right for others.
    other = SmallEngine(agent, asks=True)
    engine.close()
    for number in range(4):
        assert other.serve(prompt(number, 4))
    other.close()


def lose_what_was_found(server: RedisServer, agent: AgentServer) -> None:
    """The chunks of a hit are nowhere any more, not even in the agent that comes next."""
    agent.wait_idle()
    agent.kill()
    with server.client() as client:
        client.flushall()
    agent.restart()


@pytest.mark.servers
class TestLoadsThatFailAllTheSame:
    def test_a_caller_that_asks_goes_on(self, agent: AgentServer, server: RedisServer) -> None:
        engine = SmallEngine(agent, asks=True)
        assert engine.serve(prompt(1, 2))
        assert engine.serve(prompt(1, 3), lambda: lose_what_was_found(server, agent))
        assert engine.failed_loads == 1
        agent.wait_idle()
        assert engine.serve(prompt(1, 4))
        engine.close()

    def test_a_caller_that_never_asks_is_ended(
        self, agent: AgentServer, server: RedisServer
    ) -> None:
        """Before an answer, and nothing that it computed is stored."""
        engine = SmallEngine(agent, asks=False)
        assert engine.serve(prompt(1, 2))
        with pytest.raises(LoadErrorsNotTaken, match="8 blocks of requests request 1 were not"):
            engine.serve(prompt(1, 3), lambda: lose_what_was_found(server, agent))
        with pytest.raises(LoadErrorsNotTaken, match="call get_block_ids_with_load_errors after"):
            engine.worker.get_finished(set())
        agent.wait_idle()
        assert agent.counter("gathered_chunks") == 0
        # A caller that begins to ask goes on.
        assert engine.worker.get_block_ids_with_load_errors() == set(range(8))
        assert "request 1" in engine.worker.get_finished({"request 1"})[0]
        engine.asks = True
        assert engine.serve(prompt(1, 3))
        engine.close()

    def test_other_requests_are_not_stored_either(
        self, agent: AgentServer, server: RedisServer
    ) -> None:
        """They may have found the failed blocks in the engine's own prefix cache."""
        engine = SmallEngine(agent, asks=False)
        assert engine.serve(prompt(1, 2))
        tokens = prompt(1, 3)
        engine.scheduler.maybe_submit_lookup_request("a", token_ids=tokens)
        assert looked_up(engine.scheduler, "a") == 2 * CHUNK
        lose_what_was_found(server, agent)
        load = LoadStoreOp(list(range(8)), tokens, None, 0, 2 * CHUNK)
        engine.worker.submit_retrieve_request("a", load)
        engine.loaded("a")
        store = LoadStoreOp(list(range(8, 12)), tokens, None, 2 * CHUNK, 3 * CHUNK)
        engine.worker.submit_store_request("b", store)
        engine.worker.batched_submit_store_requests(["a", "c"], [store, store], NO_CONTEXT)
        assert engine.worker.get_block_ids_with_load_errors() == set(range(8))
        engine.step({"a", "b", "c"})
        agent.wait_idle()
        assert agent.counter("gathered_chunks") == 0
        engine.worker.submit_store_request("d", store)
        engine.step({"d"})
        assert agent.counter("gathered_chunks") == 1
        engine.close()

    @pytest.mark.parametrize("name", ["engine 7", None], ids=["named", "unnamed"])
    def test_other_workers_are_not_stored_either(
        self, agent: AgentServer, name: str | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Ranks of tensor parallelism compute with what another one has not loaded."""
        one, other = (
            LMCacheMPWorkerAdapter(
                agent.endpoint, NO_CONTEXT, MODEL, 2, rank, BLOCK, engine_id=name
            )
            for rank in range(2)
        )
        for worker in (one, other):
            worker.register_kv_caches({"layer": torch.rand(BLOCKS, BLOCK, 4)}, num_blocks=BLOCKS)
        tokens = prompt(1, 1)
        op = LoadStoreOp([0, 1, 2, 3], tokens, None, 0, CHUNK)

        def store(request_id: str) -> None:
            other.submit_store_request(request_id, op)
            wait_until(lambda: request_id in other.get_finished({request_id})[0])

        def fail_to_load(request_id: str) -> None:
            one.submit_retrieve_request(request_id, op)
            wait_until(lambda: request_id in one.get_finished(set())[1])

        fail_to_load("a")
        store("a")
        assert "request a was not stored: a load of this engine has failed" in caplog.text
        assert agent.counter("gathered_chunks") == 0
        agent.restart()
        wait_until(lambda: one.ready and other.ready, "both workers")
        store("b")
        assert agent.counter("gathered_chunks") == 0
        assert one.get_block_ids_with_load_errors() == {0, 1, 2, 3}
        store("c")
        assert agent.counter("gathered_chunks") == 1
        fail_to_load("d")
        one.shutdown()  # as the end of its process
        op = LoadStoreOp([4, 5, 6, 7], prompt(2, 1), None, 0, CHUNK)
        store("d")
        assert agent.counter("gathered_chunks") == 2
        other.shutdown()

    def test_without_an_agent_a_load_ends_with_its_lease(
        self, agent: AgentServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lmcache_redis.client.worker.RETRIEVE_LEASE_S", 0.5)
        engine = SmallEngine(agent, asks=True)
        assert engine.serve(prompt(1, 2))
        assert engine.serve(prompt(1, 3), agent.end)
        assert engine.failed_loads == 1
        engine.close()

    def test_what_an_agent_refuses_is_not_tried_again(self, agent: AgentServer) -> None:
        engine = SmallEngine(agent, asks=True)
        wrong = LoadStoreOp([0, 1, 2, BLOCKS], prompt(1, 1), None, 0, CHUNK)
        began_s = time.monotonic()
        engine.worker.submit_retrieve_request("a", wrong)
        assert engine.loaded("a") == {0, 1, 2, BLOCKS}
        assert time.monotonic() - began_s < 5.0  # the lease
        engine.close()


def restart_with_chunks(agent: AgentServer, chunk_size_tokens: int) -> None:
    agent._settings["chunk_size_tokens"] = chunk_size_tokens
    agent.restart()


@pytest.mark.servers
def test_an_agent_with_other_chunks_counts_as_lost(
    agent: AgentServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The originals read the chunk size once, and so do their callers."""
    monkeypatch.setattr(link_module, "_REFUSED_TICK_S", 0.05)
    engine = SmallEngine(agent, asks=True)
    assert engine.serve(prompt(1, 2))
    welcomes: list[m.Welcome] = []
    on_welcome = engine.scheduler._welcomed
    engine.scheduler.link._on_welcome = lambda each: welcomes.append(each) or on_welcome(each)
    agent.wait_idle()
    restart_with_chunks(agent, 128)
    for link in (engine.scheduler.link, engine.worker.link):
        wait_until(lambda link=link: link.refusal is not None, "a refusal")
        assert link.refusal.endswith(
            "it has chunks of 128 tokens (8 blocks of 16), and this adapter was made with chunks "
            "of 4 blocks: restart the engine, or the agent with --chunk-size-tokens 64"
        )
    wait_until(lambda: len(welcomes) > 3, "further HELLOs")
    assert engine.scheduler.chunk_size == CHUNK
    assert engine.scheduler.num_blocks_per_chunk() == engine.worker.blocks_in_chunk == 4
    assert engine.serve(prompt(1, 2))
    assert agent.counter("lookups") == agent.counter("stores") == 0
    assert len([each for each in caplog.messages if "has chunks of 128" in each]) == 2
    restart_with_chunks(agent, 60)  # rounded up to whole blocks, these are the same chunks
    wait_until(lambda: engine.scheduler.link.online and engine.worker.ready, "both adapters")
    assert engine.serve(prompt(1, 2))
    assert agent.counter("hit_chunks_redis") == 2
    engine.close()
