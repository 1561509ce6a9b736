# SPDX-License-Identifier: Apache-2.0
"""A clear removes the chunks of one epoch of one layout from the pool and, if it can, the tiers."""

from __future__ import annotations

from lmcache_redis.chunks.names import parse_stripe_key
from tests.agent.starts import Starts
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer, stripe_keys

HASHES = block_hashes("prompt", 8)
EPOCH = b"epoch..1"
ADAPTER = b"adapter digest.."
OF_EPOCH = [EPOCH + each for each in HASHES]
OF_ADAPTER = [ADAPTER + each for each in HASHES]
OF_BOTH = [EPOCH + ADAPTER + each for each in HASHES]
TOKENS = 128


def hashes_in(server: RedisServer) -> set[bytes]:
    with server.client() as client:
        return {parse_stripe_key(key)[1].chunk_hash for key in stripe_keys(client)}


def test_a_clear_removes_one_epoch_of_one_layout(
    start: Starts, agent: AgentServer, redis_server: RedisServer
) -> None:
    engine = start.engine(agent)
    other = start.engine(agent, layers=2)
    for number, hashes in enumerate((HASHES, OF_EPOCH, OF_ADAPTER, OF_BOTH)):
        engine.store(f"r{number}", hashes, range(8))
    other.store("r", HASHES, range(8))
    agent.wait_idle()

    engine.scheduler.clear(b"")
    wait_until(lambda: agent.counter("clears") == 1, what="a clear of the host pool")
    wait_until(lambda: not hashes_in(redis_server) & set(OF_ADAPTER), what="a cleared Redis")
    assert engine.lookup("c1", HASHES) == engine.lookup("c2", OF_ADAPTER) == 0
    assert engine.lookup("c3", OF_EPOCH) == engine.lookup("c4", OF_BOTH) == TOKENS
    assert other.lookup("c", HASHES) == TOKENS

    engine.scheduler.clear(EPOCH)
    wait_until(lambda: hashes_in(redis_server) <= set(HASHES), what="the other layout's alone")
    assert engine.lookup("d3", OF_EPOCH) == engine.lookup("d4", OF_BOTH) == 0
    assert other.lookup("d", HASHES) == TOKENS

    other.scheduler.clear()
    wait_until(lambda: not hashes_in(redis_server), what="an empty Redis")


def test_a_write_that_was_queued_before_a_clear_never_arrives(
    agent: AgentServer, engine: Engine, redis_server: RedisServer
) -> None:
    redis_server.stop()
    engine.store("r", HASHES, range(8))
    assert agent.status()["queues"]["writes"] == 2
    engine.scheduler.clear(b"")
    wait_until(lambda: agent.counter("clears") == 1, what="a clear of the host pool")
    redis_server.cont()
    agent.wait_idle()
    wait_until(lambda: agent.status()["redis"]["up"], what="Redis back")
    engine.store("s", OF_EPOCH, range(8))
    wait_until(lambda: set(OF_EPOCH[3::4]) <= hashes_in(redis_server), what="what came later")
    # If the clear had done nothing, the write, which was queued first, would be done by now.
    wait_until(lambda: hashes_in(redis_server) == set(OF_EPOCH[3::4]), what="and nothing else")


def test_a_clear_does_not_wait_for_redis(
    agent: AgentServer, engine: Engine, redis_server: RedisServer
) -> None:
    engine.store("r", HASHES, range(8))
    agent.wait_idle()
    redis_server.kill()
    engine.scheduler.clear(b"")
    wait_until(lambda: agent.counter("clears") == 1, what="a clear of the host pool")
    assert engine.lookup("s", HASHES) == 0
    wait_until(lambda: agent.counter("clears_failed") == 1, what="a clear that Redis missed")
    assert "stay in Redis" in agent.log


def test_a_store_that_comes_after_its_epoch_has_ended_is_dropped(
    agent: AgentServer, engine: Engine, redis_server: RedisServer
) -> None:
    """Workers have connections of their own: a clear may overtake them."""
    engine.store("r", OF_BOTH, range(8))
    engine.scheduler.clear(EPOCH)
    wait_until(lambda: agent.counter("clears") == 1, what="a clear of the host pool")
    for number, hashes in enumerate((OF_EPOCH, OF_BOTH, HASHES)):
        engine.store(f"s{number}", hashes, range(8))
    agent.wait_idle()
    wait_until(lambda: hashes_in(redis_server) == set(HASHES[3::4]), what="the others")
    assert engine.lookup("l1", OF_EPOCH) == engine.lookup("l2", OF_BOTH) == 0
    assert engine.lookup("l3", HASHES) == TOKENS


def test_an_epoch_of_workers_that_sleep_is_cleared(
    start: Starts, agent: AgentServer, redis_server: RedisServer
) -> None:
    """They are registered with no agent then (`unregister_kv_caches`)."""
    engine = start.engine(agent)
    engine.store("r", OF_EPOCH, range(8))
    agent.wait_idle()
    engine.scheduler.ranks.reported({0: engine.workers[0].place})
    assert engine.workers[0].unregister(5.0)
    engine.scheduler.ranks.reported({0: None})
    engine.scheduler.clear(EPOCH)
    wait_until(lambda: not hashes_in(redis_server), what="an empty Redis")


def test_an_epoch_that_ends_without_an_agent_is_cleared_later(
    agent: AgentServer, engine: Engine, redis_server: RedisServer
) -> None:
    engine.store("r", OF_EPOCH, range(8))
    agent.wait_idle()
    agent.kill()
    wait_until(lambda: not engine.scheduler.link.online, what="the loss of the agent")
    engine.scheduler.clear(EPOCH)
    agent.start()
    engine.wait_ready()
    assert engine.lookup("l", OF_EPOCH) == TOKENS
    engine.scheduler.clear(b"epoch..2")
    wait_until(lambda: not hashes_in(redis_server), what="an empty Redis")
