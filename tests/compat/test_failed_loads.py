# SPDX-License-Identifier: Apache-2.0
"""Engines whose caller asks which loads failed, and engines whose caller does not.

A small engine plays both, over a real agent and Redis: the KV of a token is computed from that of
the token before it, in whatever block that is, so all that is computed behind a block that was not
loaded is wrong too. The connector of vLLM 0.17.0 never asks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from lmcache_redis import messages as m
from lmcache_redis.client import link as link_module
from lmcache_redis.compat.load_store import LoadErrorsNotTaken, LoadStoreOp
from tests.compat.adapters import (
    BLOCK,
    BLOCKS,
    CHUNK,
    load,
    lookup,
    scheduler_of,
    store,
    worker_of,
)
from tests.harness import AgentServer, wait_until
from tests.servers import RedisServer

pytestmark = pytest.mark.servers

GARBAGE = -1.0


class SmallEngine:
    """One request at a time. asks: whether it asks which blocks were not loaded, as vLLM does."""

    def __init__(self, agent: AgentServer) -> None:
        self.asks = True
        self.scheduler, self.worker = scheduler_of(agent), worker_of(agent)
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
        name, blocks = f"request {next(self.numbers)}", range(len(tokens) // BLOCK)
        computed = hit = lookup(self.scheduler, name, None, token_ids=list(tokens))
        self.scheduler.cleanup_lookup_result(name)
        self.kv[list(blocks)] = GARBAGE
        if hit:
            before_load()
            op = LoadStoreOp(blocks[: hit // BLOCK], tokens, None, 0, hit)
            self.worker.submit_retrieve_request(name, op)
            during_load()
            failed = self.loaded(name)
            if failed:
                computed = min(failed) * BLOCK
        self.compute(tokens, computed)
        first = -(-hit // CHUNK) * CHUNK  # as vLLM's connector: the hit is not stored again
        end = len(tokens) // CHUNK * CHUNK
        if first < end:
            op = LoadStoreOp(blocks[first // BLOCK : end // BLOCK], tokens, None, first, end)
            self.worker.submit_store_request(name, op)
        self.step({name})
        self.scheduler.end_session(name)
        return torch.equal(self.kv[list(blocks)], right_kv(tokens)[: len(blocks)])

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

    def compute(self, tokens: Sequence[int], first: int) -> None:
        """The KV of the tokens from ``first`` on, from that before it, whatever that is."""
        flat = self.kv.view(-1, 4)
        for position in range(first, len(tokens) // BLOCK * BLOCK):
            last = flat[position - 1, 0] if position else torch.tensor(0.0)
            flat[position] = next_kv(last, tokens[position])


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


def prompt_op(number: int, blocks: range) -> LoadStoreOp:
    """One chunk of a prompt."""
    return LoadStoreOp(list(blocks), prompt(number, 1), None, 0, CHUNK)


@pytest.fixture
def engine(agent: AgentServer) -> Iterator[SmallEngine]:
    """It asks, unless the test changes that."""
    engine = SmallEngine(agent)
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("asks", "kill"), [(False, True), (True, False)], ids=["never asks, killed", "asks, terminated"]
)
def test_an_agent_restarted_between_a_lookup_and_its_load(
    agent: AgentServer, engine: SmallEngine, asks: bool, kill: bool
) -> None:
    """The new agent loads from Redis what the old one had promised."""
    engine.asks = asks
    for number in range(2):
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
    assert engine.failed_loads == 0
    # What was stored behind the loads is right for others.
    other = SmallEngine(agent)
    for number in range(2):
        assert other.serve(prompt(number, 4))
    other.close()


def lose_what_was_found(server: RedisServer, agent: AgentServer) -> None:
    """The chunks of a hit are nowhere any more, not even in the agent that comes next."""
    agent.wait_idle()
    agent.kill()
    with server.client() as client:
        client.flushall()
    agent.restart()


class TestLoadsThatFailAllTheSame:
    def test_a_caller_that_asks_goes_on(
        self, agent: AgentServer, server: RedisServer, engine: SmallEngine
    ) -> None:
        assert engine.serve(prompt(1, 2))
        assert engine.serve(prompt(1, 3), lambda: lose_what_was_found(server, agent))
        assert engine.failed_loads == 1
        agent.wait_idle()
        assert engine.serve(prompt(1, 4))

    def test_a_caller_that_never_asks_is_ended(
        self, agent: AgentServer, server: RedisServer, engine: SmallEngine
    ) -> None:
        """Before an answer, and nothing that it computed is stored."""
        engine.asks = False
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

    def test_other_requests_are_not_stored_either(
        self, agent: AgentServer, engine: SmallEngine
    ) -> None:
        """They may have found the failed blocks in the engine's own prefix cache."""
        engine.asks = False
        engine.worker.submit_retrieve_request("a", prompt_op(1, range(4)))  # it is nowhere
        engine.loaded("a")
        other = prompt_op(2, range(8, 12))
        engine.worker.submit_store_request("b", other)
        engine.worker.batched_submit_store_requests(["a", "c"], [other, other])
        assert engine.worker.get_block_ids_with_load_errors() == set(range(4))
        engine.step({"a", "b", "c"})
        agent.wait_idle()
        assert agent.counter("gathered_chunks") == 0
        store(engine.worker, "d", other)
        assert agent.counter("gathered_chunks") == 1

    @pytest.mark.parametrize("name", ["engine 7", None], ids=["named", "unnamed"])
    def test_other_workers_are_not_stored_either(
        self, agent: AgentServer, name: str | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Ranks of tensor parallelism compute with what another one has not loaded."""
        one, other = (worker_of(agent, world=2, rank=rank, engine_id=name) for rank in range(2))
        for worker in (one, other):
            worker.register_kv_caches({"layer": torch.rand(BLOCKS, BLOCK, 4)}, num_blocks=BLOCKS)
        op = prompt_op(1, range(4))
        load(one, "a", op)
        store(other, "a", op)
        assert "request a was not stored: a load of this engine has failed" in caplog.text
        assert agent.counter("gathered_chunks") == 0
        agent.restart()
        wait_until(lambda: one.ready and other.ready, "both workers")
        store(other, "b", op)
        assert agent.counter("gathered_chunks") == 0
        assert one.get_block_ids_with_load_errors() == {0, 1, 2, 3}
        store(other, "c", op)
        assert agent.counter("gathered_chunks") == 1
        load(one, "d", op)
        one.shutdown()  # as the end of its process
        store(other, "d", prompt_op(2, range(4, 8)))
        assert agent.counter("gathered_chunks") == 2
        other.shutdown()

    def test_without_an_agent_a_load_ends_with_its_lease(
        self, agent: AgentServer, engine: SmallEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lmcache_redis.client.worker.RETRIEVE_LEASE_S", 0.5)
        assert engine.serve(prompt(1, 2))
        assert engine.serve(prompt(1, 3), agent.end)
        assert engine.failed_loads == 1

    def test_what_an_agent_refuses_is_not_tried_again(self, engine: SmallEngine) -> None:
        began_s = time.monotonic()
        wrong = LoadStoreOp([0, 1, 2, BLOCKS], prompt(1, 1), None, 0, CHUNK)
        engine.worker.submit_retrieve_request("a", wrong)
        assert engine.loaded("a") == {0, 1, 2, BLOCKS}
        assert time.monotonic() - began_s < 5.0  # the lease


def restart_with_chunks(agent: AgentServer, chunk_size_tokens: int) -> None:
    agent._settings["chunk_size_tokens"] = chunk_size_tokens
    agent.restart()


def test_an_agent_with_other_chunks_counts_as_lost(
    agent: AgentServer,
    engine: SmallEngine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The originals read the chunk size once, and so do their callers."""
    monkeypatch.setattr(link_module, "_REFUSED_TICK_S", 0.05)
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
