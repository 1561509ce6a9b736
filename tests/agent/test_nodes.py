# SPDX-License-Identifier: Apache-2.0
"""Engines of several nodes: two agents that share a Redis, and one rank of an engine at each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.names import parse_stripe_key
from lmcache_redis.client import worker as client_worker
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer, stripe_keys

CHUNK = 64
BLOCKS = 12  # three chunks
HASHES = block_hashes("prompt", BLOCKS)
STORED, LOADED = range(BLOCKS), range(20, 20 + BLOCKS)
REMOTE_RANK = ObjectKey.ComputeKVRank(2, 1, 2, 1)


# On a busy machine neither agent gives up before the other process has had its turn.
PATIENT = {"lookup_deadline_s": 20.0, "op_timeout_s": 20.0}


@pytest.fixture
def agent(tmp_path: Path, redis_server: RedisServer) -> Iterator[AgentServer]:
    """The scheduler's agent, where rank 0 runs."""
    with AgentServer(tmp_path / "agent", redis_server.unix_url, **PATIENT) as server:
        yield server


@pytest.fixture
def other(tmp_path: Path, redis_server: RedisServer) -> Iterator[AgentServer]:
    """The agent of the other node, where rank 1 runs."""
    with AgentServer(tmp_path / "other", redis_server.unix_url, **PATIENT) as server:
        yield server


@pytest.fixture
def agents(agent: AgentServer, other: AgentServer) -> list[AgentServer]:
    return [agent, other]


def engine_at(agents: Sequence[AgentServer]) -> Engine:
    return Engine([agent.endpoint for agent in agents], world_size=2)


def store(engine: Engine, agents: Sequence[AgentServer]) -> list[dict[str, torch.Tensor]]:
    """Three chunks of random blocks; returns the engine's memory."""
    engine.randomize(STORED)
    engine.store("store", HASHES, STORED)
    for agent in agents:
        agent.wait_idle()
    return engine.snapshot()


def check_loaded(engine: Engine, rank: int, before: Sequence[dict[str, torch.Tensor]]) -> None:
    """The rank's blocks were loaded, and no others changed."""
    for name, tensor in engine.caches[rank].items():
        expected = before[rank][name].clone()
        expected[list(LOADED)] = expected[list(STORED)]
        assert torch.equal(tensor, expected)


def check_unpinned(agents: Sequence[AgentServer]) -> None:
    for agent in agents:
        wait_until(lambda agent=agent: agent.status()["sessions"] == 0, "ended sessions")
        assert agent.status()["pool"]["pinned_slots"] == 0
        assert "Traceback" not in agent.log


def remote_keys(redis_server: RedisServer, chunk: int) -> list[bytes]:
    """The Redis keys of rank 1's part of a chunk."""
    name = HASHES[4 * chunk + 3]
    with redis_server.client() as client:
        found = [(key, parse_stripe_key(key)[1]) for key in stripe_keys(client)]
    return [key for key, of in found if (of.chunk_hash, of.kv_rank) == (name, REMOTE_RANK)]


def failed_chunks(engine: Engine, request_id: str, rank: int) -> set[int]:
    """Retrieves with one rank; the chunks of which it reports that they failed."""
    op = engine.op(HASHES, LOADED)
    (retrieve,) = engine.workers[rank].begin_retrieves([request_id], [op])
    wait_until(lambda: retrieve.over or retrieve.given_up, "the end of a load")
    return {*retrieve.failed_chunks}


def test_each_agent_loads_the_part_of_its_rank(agents: list[AgentServer]) -> None:
    with engine_at(agents) as engine:
        before = store(engine, agents)
        for agent in agents:
            agent.restart()  # empty host pools: everything comes from Redis
        engine.wait_ready()
        assert not any(each["ready"] for each in agents[0].status()["engines"])
        assert engine.lookup("r", HASHES) == 3 * CHUNK
        assert all(each["ready"] for each in agents[0].status()["engines"])
        assert [agent.counter("loaded_chunks") for agent in agents] == [3, 0]
        assert engine.retrieve("r", HASHES, LOADED) == set()
        assert [agent.counter("loaded_chunks") for agent in agents] == [3, 3]
        for rank in range(2):
            check_loaded(engine, rank, before)
        engine.scheduler.end_session("r")
        check_unpinned(agents)

        # From the host pools, the second time.
        engine.scheduler.forget_lookup("r")
        assert engine.lookup("again", HASHES) == 3 * CHUNK
        assert engine.retrieve("again", HASHES, LOADED) == set()
        assert [agent.counter("loaded_chunks") for agent in agents] == [3, 3]

        # Another engine on the same nodes hits too.
        with engine_at(agents) as second:
            assert second.lookup("r", HASHES) == 3 * CHUNK
            assert second.retrieve("r", HASHES, LOADED) == set()
            for rank in range(2):
                for name, tensor in second.caches[rank].items():
                    stored = before[rank][name][list(STORED)]
                    assert torch.equal(tensor[list(LOADED)], stored)


def test_a_part_that_does_not_arrive_is_a_failed_chunk(
    agents: list[AgentServer], redis_server: RedisServer
) -> None:
    with engine_at(agents) as engine:
        store(engine, agents)
        agents[1].restart()
        engine.wait_ready()
        # It is lost after the lookup has found it: its chunk and those after it are not loaded.
        assert engine.lookup("r", HASHES) == 3 * CHUNK
        keys = remote_keys(redis_server, 1)
        assert redis_server.command("DEL", *keys) == len(keys) > 0
        assert engine.retrieve("r", HASHES, LOADED) == {*LOADED[4:]}
        engine.scheduler.end_session("r")
        # And a lookup that does not find it has a shorter prefix.
        assert engine.lookup("later", HASHES) == CHUNK
        assert engine.retrieve("later", HASHES[:4], LOADED[:4]) == set()
        engine.scheduler.end_session("later")
        check_unpinned(agents)


def test_a_small_pool_of_the_other_node_loads_in_pieces(
    agent: AgentServer, tmp_path: Path, redis_server: RedisServer
) -> None:
    small = AgentServer(tmp_path / "small", redis_server.unix_url, pool_bytes=5 * (64 << 10) + 4096)
    with small, engine_at([agent, small]) as engine:
        engine.randomize(STORED)
        for chunk in range(3):  # one after the other: there is room for two
            part = slice(4 * chunk, 4 * chunk + 4)
            engine.store(f"store {chunk}", HASHES[part], STORED[part])
            small.wait_idle()
        agent.wait_idle()
        assert engine.lookup("r", HASHES) == 3 * CHUNK
        assert engine.retrieve("r", HASHES, LOADED) == set()
        for caches in engine.caches:
            for tensor in caches.values():
                assert torch.equal(tensor[list(LOADED)], tensor[list(STORED)])
        engine.scheduler.end_session("r")
        check_unpinned([agent, small])


def test_an_agent_that_is_killed_while_it_loads(
    agents: list[AgentServer], redis_server: RedisServer
) -> None:
    other = agents[1]
    with engine_at(agents) as engine:
        before = store(engine, agents)
        other.restart()
        engine.wait_ready()
        assert engine.lookup("r", HASHES) == 3 * CHUNK
        redis_server.stop()  # its load is in flight
        op = engine.op(HASHES, LOADED)
        (retrieve,) = engine.workers[1].begin_retrieves(["r"], [op])
        wait_until(lambda: other.status()["queues"]["jobs"] == 1, "a load in flight")
        other.kill()
        wait_until(lambda: retrieve.over, "the end of the load")
        assert {*retrieve.failed_chunks} == {0, 1, 2}
        redis_server.cont()
        engine.scheduler.end_session("r")

        # Nothing hits, and nothing waits, while it is gone; its rank's stores are dropped.
        wait_until(lambda: engine.workers[1].place is None, "the end of its agent")
        assert engine.lookup("gone", HASHES) == 0
        engine.scheduler.end_session("gone")
        op = engine.op(block_hashes("new", BLOCKS), STORED)
        stored = [worker.begin_stores(["gone"], [op])[0] for worker in engine.workers]
        wait_until(lambda: all(each.over for each in stored), "the stores")
        assert [each.result.dropped for each in stored] == [0, 3]

        other.start()
        engine.wait_ready()
        assert engine.lookup("back", HASHES) == 3 * CHUNK
        assert engine.retrieve("back", HASHES, LOADED) == set()
        for rank in range(2):
            check_loaded(engine, rank, before)
        engine.scheduler.end_session("back")
        check_unpinned(agents)


def test_an_agent_that_freezes(agents: list[AgentServer]) -> None:
    other = agents[1]
    with engine_at(agents) as engine:
        before = store(engine, agents)
        assert engine.lookup("r", HASHES) == 3 * CHUNK
        other.stop()
        assert failed_chunks(engine, "r", 1) == {0, 1, 2}
        assert engine.workers[1].place is None
        engine.scheduler.end_session("r")
        assert engine.lookup("frozen", HASHES) == 0
        engine.scheduler.end_session("frozen")
        other.cont()
        engine.wait_ready()
        assert engine.lookup("back", HASHES) == 3 * CHUNK
        assert engine.retrieve("back", HASHES, LOADED) == set()
        for rank in range(2):
            check_loaded(engine, rank, before)
        engine.scheduler.end_session("back")
        check_unpinned(agents)


def test_a_hung_redis_fails_the_load_at_the_deadline(
    agents: list[AgentServer], redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_worker, "RETRIEVE_LEASE_S", 1.5)
    with engine_at(agents) as engine:
        store(engine, agents)
        agents[1].restart()
        engine.wait_ready()
        assert engine.lookup("r", HASHES) == 3 * CHUNK
        redis_server.stop()
        try:
            assert failed_chunks(engine, "r", 1) == {0, 1, 2}
            assert failed_chunks(engine, "r", 0) == set(), "it is in the host pool here"
        finally:
            redis_server.cont()
        engine.scheduler.end_session("r")
        check_unpinned(agents)


def test_the_own_agent_may_be_restarted(agents: list[AgentServer]) -> None:
    """Its ranks are not taken for those of another node until they have registered again."""
    with engine_at(agents) as engine:
        store(engine, agents)
        assert engine.lookup("r", HASHES) == 3 * CHUNK
        agents[0].restart()
        engine.wait_ready()
        remote = engine.scheduler.ranks.remote()
        assert {part.worker_id for part in remote} == {1}
        assert engine.lookup("again", HASHES) == 3 * CHUNK
        assert engine.retrieve("again", HASHES, LOADED) == set()


def test_a_clear_removes_the_parts_of_all_ranks_from_redis(
    agents: list[AgentServer], redis_server: RedisServer
) -> None:
    with engine_at(agents) as engine:
        store(engine, agents)
        assert engine.lookup("r", HASHES) == 3 * CHUNK
        assert len(stripe_keys(redis_server)) > 0
        engine.scheduler.clear()
        wait_until(lambda: len(stripe_keys(redis_server)) == 0, "an empty Redis")
