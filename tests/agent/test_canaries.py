# SPDX-License-Identifier: Apache-2.0
"""Canaries at a real agent: what agrees, what differs, and what follows from it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lmcache_redis import messages as m
from lmcache_redis.client.control import ControlClient
from tests.agent.starts import Starts
from tests.agent.test_clears import hashes_in
from tests.agent.test_history import explained
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer

HASHES = block_hashes("prompt", 8)
CHUNKS = HASHES[3::4]
EPOCH = b"epoch..1"
TOKENS = 128
BLOCKS = range(8)

_requests = itertools.count()


@pytest.fixture
def engine(agent: AgentServer) -> Iterator[Engine]:
    with Engine(agent.endpoint) as engine:
        engine.randomize(range(engine.num_blocks))
        engine.store("first", HASHES, BLOCKS)
        yield engine


def canary(
    engine: Engine,
    agent: AgentServer,
    hashes: Sequence[bytes] = HASHES,
    blocks: Sequence[int] = BLOCKS,
) -> dict[str, int]:
    """A lookup of a canary, and the comparison with what is in blocks. What it has counted."""
    before = agent.counters()
    request_id = f"canary {next(_requests)}"
    engine.lookup(request_id, hashes)
    assert engine.scheduler.pinned_tokens(request_id) == len(hashes) * 16
    for first in range(0, len(hashes), 4):  # a step computes one chunk
        engine.compare(request_id, hashes[first : first + 4], blocks[first : first + 4])
    wait_until(lambda: not agent.status()["queues"]["jobs"], what="the end of a comparison")
    engine.scheduler.forget_lookup(request_id)
    engine.scheduler.end_session(request_id)
    after = agent.counters()
    kinds = ("compared", "differing", "uncompared", "gathered")
    found = {each: after[f"{each}_chunks"] - before[f"{each}_chunks"] for each in kinds}
    assert explained(agent, request_id)["parts"]["compared"] == found["compared"]
    return found


def counts(compared: int, differing: int = 0, uncompared: int = 0) -> dict[str, int]:
    found = {"compared": compared, "differing": differing, "uncompared": uncompared}
    return found | {"gathered": 0}


def hit(engine: Engine, hashes: Sequence[bytes] = HASHES) -> int:
    return engine.lookup(f"asks {next(_requests)}", hashes)


def test_the_engine_is_told_how_many_hits_are_compared(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    url = redis_server.unix_url
    with (
        AgentServer(tmp_path / "one", url, canary_every=None) as agent,
        AgentServer(tmp_path / "other", url, canary_every=7) as other,
        Engine([agent.endpoint]) as one,
        Engine([other.endpoint]) as two,
    ):
        assert (one.scheduler.canary_every, two.scheduler.canary_every) == (1000, 7)
        assert other.status()["canaries"] == {"every": 7, "distrusted": []}


def test_what_only_rounding_changed_agrees(start: Starts, agent: AgentServer) -> None:
    dtype = torch.bfloat16
    engine = start.engine(agent, dtype=dtype)
    engine.randomize(BLOCKS)
    engine.store("first", HASHES, BLOCKS)
    assert canary(engine, agent) == counts(2)
    for tensor in engine.caches[0].values():
        tensor[:8] = (tensor[:8].float() * (1 + torch.randn(tensor[:8].shape) / 50)).to(dtype)
    assert canary(engine, agent) == counts(2)
    agent.wait_idle()
    assert agent.status()["pool"]["pinned_slots"] == 0
    assert hit(engine) == TOKENS
    assert "ERROR" not in agent.log


def test_a_part_without_numbers_is_not_compared(start: Starts, agent: AgentServer) -> None:
    engine = start.engine(agent, dtype=torch.uint8)
    engine.store("first", HASHES, BLOCKS)
    for tensor in engine.caches[0].values():
        tensor.fill_(9)
    assert canary(engine, agent) == counts(0, uncompared=2)
    assert hit(engine) == TOKENS


@pytest.mark.parametrize("fault", ["no values", "shifted by one", "one block"])
def test_other_kv_than_was_cached_is_found(
    engine: Engine, agent: AgentServer, redis_server: RedisServer, fault: str
) -> None:
    agent.wait_idle()
    blocks = [*BLOCKS]
    if fault == "no values":
        for tensor in engine.caches[0].values():
            tensor[:8] = math.nan
    elif fault == "one block":
        blocks[6] = 20
    else:
        blocks = [*range(1, 9)]
    differing = 1 if fault == "one block" else 2
    assert canary(engine, agent, blocks=blocks) == counts(2, differing)
    lines = [line for line in agent.log.splitlines() if "ERROR" in line]
    (layout,) = agent.status()["canaries"]["distrusted"]
    assert len(lines) == 1
    for word in (
        "test/model",
        layout["layout"][:16],
        "group 0",
        "block",
        "segment",
        "lmcache-redis",
    ):
        assert word in lines[0]
    if fault == "one block":
        assert CHUNKS[1].hex()[:16] in lines[0]
        assert "block 2 of" in lines[0]
    # The chunks that differ are gone, and written anew by the next store.
    wait_until(lambda: len(hashes_in(redis_server)) == 2 - differing, what="removed chunks")
    engine.store("second", HASHES, blocks)
    wait_until(lambda: hashes_in(redis_server) == set(CHUNKS), what="chunks stored again")
    assert canary(engine, agent, blocks=blocks) == counts(2)


def test_nothing_of_a_distrusted_layout_is_loaded(
    start: Starts, engine: Engine, agent: AgentServer
) -> None:
    other = start.engine(agent, layers=2)
    other.store("other", HASHES, BLOCKS)
    engine.store("epoch", [EPOCH + each for each in HASHES], BLOCKS)
    assert engine.lookup("before", HASHES) == TOKENS
    canary(engine, agent, blocks=range(1, 9))
    # Neither what was promised before, nor what is found now; another layout or epoch is.
    assert engine.retrieve("before", HASHES, BLOCKS) == set(BLOCKS)
    engine.store("again", HASHES, BLOCKS)
    assert hit(engine) == 0
    assert hit(other) == hit(engine, [EPOCH + each for each in HASHES]) == TOKENS
    assert other.retrieve("asks other", HASHES, BLOCKS) == set()
    # Behind what the engine has, nothing is compared.
    assert engine.lookup("rest", HASHES, first_chunk=1) == 0
    assert engine.scheduler.pinned_tokens("rest") == 0


def test_a_tenant_that_names_media_turns_off_nothing(engine: Engine, agent: AgentServer) -> None:
    """Two images under one name, and a salt: nobody else's chunks."""
    for number in range(3):
        attack = block_hashes(f"salted {number}", 8)
        engine.store("one image", attack, BLOCKS)
        engine.lookup("another image", attack)
        assert engine.lookup("promised", attack) == TOKENS
        # Only the last chunk of the two differs, and only its name covers the image.
        blocks = [*range(4), *range(8, 12)]
        engine.compare("another image", attack, blocks, client_named=1)
        wait_until(lambda n=number: agent.counter("differing_chunks") == n + 1, what="a difference")
        engine.scheduler.end_session("another image")
        # What another lookup has pinned is not loaded either.
        assert engine.retrieve("promised", attack, range(16, 24)) == {*range(20, 24)}
        engine.scheduler.end_session("promised")
        assert agent.status()["canaries"]["distrusted"] == []
        assert hit(engine) == TOKENS
        # Of the name itself nothing wrong is left.
        assert engine.lookup("again", attack) == TOKENS // 2
        engine.scheduler.end_session("again")
    lines = [line for line in agent.log.splitlines() if "given two media one name" in line]
    assert (len(lines), "ERROR" in agent.log) == (1, False)
    # What differs before the image does not depend on it.
    attack = block_hashes("salted", 8)
    engine.store("text", attack, BLOCKS)
    engine.lookup("other text", attack)
    engine.compare("other text", attack, range(1, 9), client_named=1)
    wait_until(lambda: agent.status()["canaries"]["distrusted"], what="a distrusted layout")
    assert hit(engine) == 0


def test_enough_canaries_in_a_row_bring_the_loads_back(start: Starts) -> None:
    """Which are a hundred else."""
    agent, engine = start(constants={"lmcache_redis.agent.peers.CANARIES_AGAIN": 5})
    engine.randomize(range(engine.num_blocks))
    engine.store("first", HASHES, BLOCKS)
    canary(engine, agent, blocks=range(1, 9))
    engine.store("again", HASHES, BLOCKS)
    for _ in range(3):
        canary(engine, agent)
    canary(engine, agent, blocks=range(1, 9))
    engine.store("and again", HASHES, BLOCKS)
    for number in range(5):
        assert hit(engine) == 0
        assert agent.status()["canaries"]["distrusted"][0]["agreed"] == number
        assert canary(engine, agent) == counts(2)
    assert hit(engine) == TOKENS
    assert agent.log.count("is loaded again") == 1


def test_an_operator_brings_the_loads_back(engine: Engine, agent: AgentServer) -> None:
    canary(engine, agent, HASHES[:4], range(1, 5))
    engine.store("again", HASHES, BLOCKS)
    assert hit(engine) == 0
    assert agent.status()["canaries"]["distrusted"][0]["agreed"] == 0
    assert ControlClient(agent.endpoint).trust() == 1
    assert ControlClient(agent.endpoint).trust() == 0
    assert hit(engine) == TOKENS


def test_a_comparison_after_its_lease_is_none(engine: Engine, agent: AgentServer) -> None:
    engine.lookup("late", HASHES)
    names = tuple(CHUNKS)
    call = engine.workers[0].link.submit(
        m.Compare, request_id="late", hashes=names, block_ids=tuple(range(1, 9)), lease_ns=1
    )
    assert call.wait(10)
    assert call.answer == m.StoreResult(call.answer.call_id, 0, 2, 0)
    wait_until(lambda: agent.counter("uncompared_chunks") == 2, what="what was not compared")
    assert agent.counter("compared_chunks") == 0
    assert hit(engine) == TOKENS


def test_what_is_no_longer_in_the_pool_is_not_compared(engine: Engine, agent: AgentServer) -> None:
    engine.compare("no lookup", block_hashes("another prompt", 4), range(1, 5))
    wait_until(lambda: agent.counter("uncompared_chunks") == 1, what="what was not compared")
    assert agent.counter("compared_chunks") == 0


def test_each_replica_compares_every_chunk(engine: Engine, agent: AgentServer) -> None:
    """They share the chunks of a store: equal bytes. Whether they are equal is the question."""
    worker = engine.workers[0]
    for number in (0, 1):
        groups = [replace(each, replica=(number, 2)) for each in worker._memory.groups]
        worker._memory = replace(worker._memory, groups=groups)
        assert canary(engine, agent) == counts(2)


def test_every_rank_and_every_agent_compares(start: Starts, agent: AgentServer) -> None:
    second = start.agent("second")
    engine = start.enter(Engine([agent.endpoint, second.endpoint], world_size=2))
    engine.randomize(range(engine.num_blocks))
    engine.store("first", HASHES, BLOCKS)
    agent.wait_idle()
    second.wait_idle()
    assert engine.lookup("canary", HASHES) == TOKENS
    for tensor in engine.caches[1].values():
        tensor[:8].copy_(tensor[8:16].clone())
    engine.compare("canary", HASHES, BLOCKS)
    wait_until(lambda: second.counter("differing_chunks") == 2, what="a difference on rank 1")
    assert agent.counter("compared_chunks") == 2
    assert agent.counter("differing_chunks") == 0
    # The scheduler's agent does not know. The other one loads nothing.
    assert engine.retrieve("next", HASHES, BLOCKS) == set(BLOCKS)
    assert second.counter("retrieved_chunks") == 0
