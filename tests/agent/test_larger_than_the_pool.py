# SPDX-License-Identifier: Apache-2.0
"""Prompts whose chunks do not fit into the host pool: the engine's retrieve loads the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from lmcache_redis.chunks.names import parse_stripe_key
from lmcache_redis.client.worker import RetrieveTransfer
from tests.agent.starts import Starts
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer, stripe_keys

CHUNK = 64
CHUNKS = 8
BLOCKS = 4 * CHUNKS
HASHES = block_hashes("prompt", BLOCKS)
# A chunk of the harness's engine has 96 KiB: two slots.
POOL_BYTES = 6 * (64 << 10) + 4096


@pytest.fixture
def agent(tmp_path: Path, redis_server: RedisServer) -> Iterator[AgentServer]:
    """Its pool has room for three chunks."""
    with AgentServer(
        tmp_path / "agent", redis_server.unix_url, pool_bytes=POOL_BYTES, lookup_deadline_s=20.0
    ) as server:
        yield server


def store(engine: Engine, agent: AgentServer, hashes: Sequence[bytes], blocks: range) -> None:
    """Chunk by chunk, as the steps of a long prefill do; then the pool is empty."""
    engine.randomize(blocks)
    for first in range(0, BLOCKS, 4):
        part = slice(first, first + 4)
        engine.store(f"store {first}", hashes[part], blocks[part])
        agent.wait_idle()


def start_again(engine: Engine, agent: AgentServer) -> None:
    agent.restart()
    engine.wait_ready()


def retrieve(
    engine: Engine, request_id: str, hashes: Sequence[bytes], blocks: range
) -> RetrieveTransfer:
    op = engine.op(hashes, blocks)
    return engine.workers[0].begin_retrieves([request_id], [op])[0]


def check_unpinned(agent: AgentServer) -> None:
    wait_until(lambda: agent.status()["sessions"] == 0, "ended sessions")
    assert agent.status()["pool"]["pinned_slots"] == 0
    assert "Traceback" not in agent.log


def test_the_whole_prompt_is_loaded(start: Starts, agent: AgentServer) -> None:
    engine = start.engine(agent, num_blocks=2 * BLOCKS + 1)
    store(engine, agent, HASHES, range(BLOCKS))
    start_again(engine, agent)
    assert engine.lookup("r", HASHES) == CHUNKS * CHUNK
    assert agent.counter("loaded_chunks") == 3, "the others have no room yet"
    assert agent.counter("hit_chunks_redis") == CHUNKS
    assert engine.retrieve("r", HASHES, range(BLOCKS, 2 * BLOCKS)) == set()
    for tensor in engine.caches[0].values():
        assert torch.equal(tensor[:BLOCKS], tensor[BLOCKS : 2 * BLOCKS])
    assert agent.counter("loaded_chunks") == CHUNKS
    assert agent.counter("miss_pool_full") == 0
    engine.scheduler.end_session("r")
    check_unpinned(agent)

    # Again, with the end of the prompt in the pool.
    assert engine.lookup("again", HASHES) == CHUNKS * CHUNK
    engine.randomize(range(BLOCKS, 2 * BLOCKS))
    assert engine.retrieve("again", HASHES, range(BLOCKS, 2 * BLOCKS)) == set()
    for tensor in engine.caches[0].values():
        assert torch.equal(tensor[:BLOCKS], tensor[BLOCKS : 2 * BLOCKS])
    engine.scheduler.end_session("again")
    check_unpinned(agent)


def test_a_lost_chunk_fails_with_those_after_it(
    start: Starts, agent: AgentServer, redis_server: RedisServer
) -> None:
    engine = start.engine(agent, num_blocks=2 * BLOCKS + 1)
    store(engine, agent, HASHES, range(BLOCKS))
    start_again(engine, agent)
    assert engine.lookup("r", HASHES) == CHUNKS * CHUNK
    with redis_server.client() as client:
        lost = HASHES[4 * 5 + 3]
        keys = [k for k in stripe_keys(client) if parse_stripe_key(k)[1].chunk_hash == lost]
        assert client.delete(*keys) == len(keys) > 0
    failed = engine.retrieve("r", HASHES, range(BLOCKS, 2 * BLOCKS))
    assert failed == {*range(BLOCKS + 4 * 5, 2 * BLOCKS)}
    for tensor in engine.caches[0].values():
        loaded = 4 * 5
        assert torch.equal(tensor[:loaded], tensor[BLOCKS : BLOCKS + loaded])
        assert not tensor[BLOCKS + loaded :].any(), "nothing was written to what failed"
    engine.scheduler.end_session("r")
    check_unpinned(agent)


def test_two_such_prompts_at_once_take_turns(start: Starts, agent: AgentServer) -> None:
    """Neither holds what the other waits for."""
    another = block_hashes("another", BLOCKS)
    engine = start.engine(agent, num_blocks=4 * BLOCKS + 1)
    parts = [range(n * BLOCKS, (n + 1) * BLOCKS) for n in range(4)]
    store(engine, agent, HASHES, parts[0])
    store(engine, agent, another, parts[1])
    start_again(engine, agent)
    assert engine.lookup("a", HASHES) == CHUNKS * CHUNK
    engine.scheduler.begin_lookup("b", engine.chunks(another))
    loads = [retrieve(engine, "a", HASHES, parts[2])]
    assert engine.lookup("b", another) == CHUNKS * CHUNK
    loads.append(retrieve(engine, "b", another, parts[3]))
    wait_until(lambda: all(load.call.done for load in loads), "both loads")
    assert not any(load.failed_chunks for load in loads)
    assert agent.counter("miss_pool_full") == 0
    for tensor in engine.caches[0].values():
        assert torch.equal(tensor[: 2 * BLOCKS], tensor[2 * BLOCKS : 4 * BLOCKS])
    for request_id in "ab":
        engine.scheduler.end_session(request_id)
    check_unpinned(agent)


def test_an_engine_that_leaves_ends_the_loads(agent: AgentServer) -> None:
    engine = Engine(agent.endpoint, num_blocks=2 * BLOCKS + 1)
    with engine:
        store(engine, agent, HASHES, range(BLOCKS))
        start_again(engine, agent)
        assert engine.lookup("r", HASHES) == CHUNKS * CHUNK
        retrieve(engine, "r", HASHES, range(BLOCKS, 2 * BLOCKS))
    check_unpinned(agent)
