# SPDX-License-Identifier: Apache-2.0
"""What Redis lost is written again: nothing that is believed of it lasts."""

from __future__ import annotations

import itertools

import pytest

from tests.agent.starts import Starts
from tests.agent.test_nodes import CHUNK, HASHES, PATIENT, STORED, engine_at, store
from tests.harness import AgentServer, Engine, wait_until
from tests.servers import RedisServer, stripe_keys

CHUNKS = 3
_NUMBERS = itertools.count()


def size_of(redis: RedisServer) -> int:
    with redis.client() as client:
        return len(stripe_keys(client))


def ask(engine: Engine) -> int:
    """A lookup of the prompt, whose request then ends."""
    request_id = f"request {next(_NUMBERS)}"
    found = engine.lookup(request_id, HASHES)
    engine.scheduler.end_session(request_id)
    return found


def test_two_nodes_hit_again_after_one_store(start: Starts, redis_server: RedisServer) -> None:
    """The chunks stay in both host pools; each agent needs those of the other from Redis."""
    agents = [start.agent(name, **PATIENT) for name in "ab"]
    engine = start.enter(engine_at(agents))
    store(engine, agents)
    assert ask(engine) == CHUNKS * CHUNK
    redis_server.command("FLUSHALL")
    assert ask(engine) == 0
    engine.store("again", HASHES, STORED)
    for agent in agents:
        agent.wait_idle()
    assert ask(engine) == CHUNKS * CHUNK


@pytest.mark.parametrize("lost", ["all", "a chunk", "a stripe"])
def test_redis_gets_back_what_the_pool_serves(
    agent: AgentServer, engine: Engine, redis_server: RedisServer, lost: str
) -> None:
    """It evicts what is not read: the chunks that are always in the host pool."""
    engine.store("store", HASHES, STORED)
    agent.wait_idle()
    before = size_of(redis_server)
    with redis_server.client() as client:
        keys = sorted(stripe_keys(client))
    stripes = len(keys) // CHUNKS
    assert stripes > 1
    # The keys of a chunk differ in the last byte: the index of the stripe.
    first, last = {"all": (0, len(keys)), "a chunk": (0, stripes), "a stripe": (1, 2)}[lost]
    redis_server.command("DEL", *keys[first:last])
    assert ask(engine) == CHUNKS * CHUNK
    wait_until(lambda: size_of(redis_server) == before)
    agent.wait_idle()
    assert agent.counter("loaded_chunks") == 0
    assert agent.counter("stored_chunks") == CHUNKS + (CHUNKS if lost == "all" else 1)


def test_what_the_pool_serves_counts_as_used_in_redis(
    agent: AgentServer, engine: Engine, redis_server: RedisServer
) -> None:
    """Else `allkeys-lru` evicts the hottest chunks first."""
    engine.store("store", HASHES, STORED)
    agent.wait_idle()
    with redis_server.client() as client:
        keys = stripe_keys(client)

        def idle_s() -> list[int]:
            return [client.object("idletime", key) for key in keys]

        wait_until(lambda: min(idle_s()) >= 2)
        assert ask(engine) == CHUNKS * CHUNK
        wait_until(lambda: max(idle_s()) < 2)
    assert agent.counter("loaded_chunks") == 0


def test_a_chunk_is_looked_at_again_once_in_a_while(
    start: Starts, redis_server: RedisServer
) -> None:
    """Here, after a quarter of two seconds."""
    agent, engine = start(ttl_s=2)
    engine.store("store", HASHES, STORED)
    agent.wait_idle()
    stored = agent.counter("stored_chunks")
    for number in range(2):
        redis_server.command("FLUSHALL")

        def is_back(number: int = number) -> bool:
            assert ask(engine) == CHUNKS * CHUNK
            return agent.counter("stored_chunks") >= stored + (number + 1) * CHUNKS

        wait_until(is_back)
