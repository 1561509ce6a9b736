# SPDX-License-Identifier: Apache-2.0
"""Servers and agents that are killed, stopped, full or faulty: misses in time, and recovery."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lmcache_redis import messages as m
from lmcache_redis.chunks.keys import hash_tag
from tests.agent.starts import Starts
from tests.agent.test_embedded import is_another
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer, stripe_keys

HASHES = block_hashes("prompt", 8)
LOOKUP_DEADLINE_S = 1.0
# Allowance for a busy machine: these tests detect hangs, not slowness.
SLACK_S = 30.0


@pytest.fixture
def stored(agent: AgentServer) -> Iterator[Engine]:
    """An engine whose two chunks are in Redis but not in the agent's host pool."""
    with Engine(agent.endpoint) as engine:
        engine.randomize(range(8))
        engine.store("r0", HASHES, range(8))
        agent.wait_idle()
        assert agent.counter("stored_chunks") == 2
        agent.restart()
        engine.wait_ready()
        yield engine


def keys_of(server: RedisServer) -> list[bytes]:
    with server.client() as client:
        return sorted(stripe_keys(client))


def test_redis_is_killed_between_store_and_lookup(
    agent: AgentServer, stored: Engine, redis_server: RedisServer
) -> None:
    redis_server.kill()
    started_s = time.monotonic()
    assert stored.lookup("r1", HASHES) == 0
    assert time.monotonic() - started_s < LOOKUP_DEADLINE_S + SLACK_S
    wait_until(lambda: not agent.status()["redis"]["up"], what="a server known to be down")
    assert stored.lookup("r2", HASHES) == 0
    stored.store("r3", HASHES, range(8))  # the host pool takes what Redis cannot
    assert stored.lookup("r4", HASHES) == 128
    redis_server.start()
    wait_until(lambda: agent.status()["redis"]["up"], "Redis back", 1.0 + SLACK_S)
    stored.store("r5", HASHES, range(8))  # known to the host pool, not yet to Redis
    wait_until(lambda: agent.counter("stored_chunks") == 2, what="the chunks in Redis")


def test_redis_is_stopped_during_a_lookup(
    agent: AgentServer, stored: Engine, redis_server: RedisServer
) -> None:
    redis_server.stop()
    started_s = time.monotonic()
    assert stored.lookup("r1", HASHES) == 0
    assert time.monotonic() - started_s < LOOKUP_DEADLINE_S + SLACK_S
    # The breaker is open: no further request waits for the stopped server.
    wait_until(lambda: not agent.status()["redis"]["up"], what="an open breaker")
    timed_out = agent.counter("lookups_timed_out")
    assert stored.lookup("r2", HASHES) == 0
    assert agent.counter("lookups_timed_out") == timed_out
    redis_server.cont()
    tries = iter(range(1000))
    wait_until(
        lambda: stored.lookup(f"again{next(tries)}", HASHES) == 128, "hits again", 1.0 + SLACK_S
    )


def test_redis_is_stopped_when_the_first_store_comes(
    agent: AgentServer, engine: Engine, redis_server: RedisServer
) -> None:
    """The engine's blocks are freed within the lease, and the chunks hit in the host pool."""
    engine.randomize(range(8))
    before = engine.snapshot()
    redis_server.stop()
    call = engine.workers[0].link.submit(
        m.Store,
        request_id="r1",
        hashes=(HASHES[3], HASHES[7]),
        block_ids=tuple(range(8)),
        lease_ns=time.monotonic_ns() + int(1.5e9),
    )
    assert call.wait(SLACK_S)
    assert call.answer == m.StoreResult(call.call_id, 2, 0, 0)
    assert engine.lookup("r2", HASHES) == 128
    assert engine.retrieve("r2", HASHES, range(20, 28)) == set()
    for name, tensor in engine.caches[0].items():
        assert torch.equal(tensor[20:28], before[0][name][:8])
    # Only when they are stored again: the writes have failed by then.
    wait_until(lambda: agent.counter("drop_redis_error") == 2, what="two counted drops")
    redis_server.cont()
    wait_until(lambda: agent.status()["redis"]["up"], "Redis back", 1.0 + SLACK_S)
    assert agent.counter("stored_chunks") == 0
    engine.store("r3", HASHES, range(8))
    wait_until(lambda: agent.counter("stored_chunks") == 2, what="the chunks in Redis")


def test_redis_is_full_and_evicts_nothing(
    agent: AgentServer, stored: Engine, redis_server: RedisServer
) -> None:
    redis_server.config_set("maxmemory-policy", "noeviction")
    redis_server.config_set("maxmemory", "1mb")
    other = block_hashes("other", 8)
    stored.store("r1", other, range(8))
    wait_until(lambda: agent.counter("drop_redis_full") == 2, what="two dropped chunks")
    assert "maxmemory" in agent.log
    redis_server.config_set("maxmemory", "0")
    assert stored.lookup("r2", HASHES) == 128
    assert stored.retrieve("r2", HASHES, range(20, 28)) == set()


@pytest.mark.parametrize("where", ["payload", "type"])
def test_a_damaged_value_is_a_miss(
    agent: AgentServer, stored: Engine, redis_server: RedisServer, where: str
) -> None:
    stripe = next(key for key in keys_of(redis_server) if hash_tag(HASHES[3]) in key)
    with redis_server.client() as client:
        value = bytearray(client.get(stripe))
        value[-100] ^= 1
        client.delete(stripe)
        if where == "type":
            client.rpush(stripe, b"not a string")
        else:
            client.set(stripe, bytes(value))
    before = stored.snapshot()
    assert stored.lookup("r1", HASHES) == 0
    assert stored.retrieve("r1", HASHES, range(20, 28)) >= set(range(20, 24))
    for name, tensor in stored.caches[0].items():
        assert torch.equal(tensor[20:24], before[0][name][20:24])  # never data in a block
    # On a busy machine the first lookup may reach its deadline before the value is verified.
    counter = "miss_foreign" if where == "type" else "miss_corrupt"
    wait_until(
        lambda: stored.lookup("r2", HASHES) == 0 and agent.counter(counter) > 0, what=counter
    )
    assert agent.terminate() == 0
    (line,) = [line for line in agent.log.splitlines() if "since the last such line" in line]
    assert "WARNING" in line
    assert counter in line


def test_the_agent_is_stopped_with_a_store_in_flight(agent: AgentServer, stored: Engine) -> None:
    """Blocks that were reused after the lease never reach the cache."""
    other = block_hashes("other", 4)
    agent.stop()
    stored.store("r1", other, range(10, 14))  # until the lease's end
    stored.randomize(range(10, 14))  # the engine reuses the blocks
    agent.cont()
    stored.wait_ready()
    agent.wait_idle()
    assert stored.lookup("r2", other) == 0


def test_an_agent_that_comes_later_is_picked_up(
    start: Starts, tmp_path: Path, redis_server: RedisServer
) -> None:
    agent = AgentServer(tmp_path / "agent", redis_server.unix_url)
    engine = start.engine(agent, wait=False)
    assert engine.lookup("r1", HASHES) == 0
    engine.store("r1", HASHES, range(8))
    with agent:
        engine.wait_ready(3.0 + SLACK_S)
        engine.store("r2", HASHES, range(8))
        assert engine.lookup("r3", HASHES) == 128


def test_a_chunk_size_is_rounded_up_to_whole_blocks(start: Starts) -> None:
    agent, engine = start(chunk_size_tokens=40)
    assert engine.scheduler.chunk_size_tokens() == 48
    assert agent.status()["engines"][0]["chunk_tokens"] == 48
    engine.store("r1", HASHES[:6], range(6))
    assert engine.lookup("r2", HASHES) == 96  # of 128 tokens: two chunks


def test_block_ids_out_of_bounds_touch_nothing(agent: AgentServer, stored: Engine) -> None:
    assert stored.lookup("r1", HASHES) == 128
    before = stored.snapshot()
    for block_ids in ([0, 1, 2, 48], [-1, 0, 1, 2]):
        assert stored.retrieve("bad", HASHES[:4], block_ids) == set(block_ids)
    for name, tensor in stored.caches[0].items():
        assert torch.equal(tensor, before[0][name])


def test_an_engine_is_ready_once_scheduler_and_workers_are_there(
    start: Starts, agent: AgentServer
) -> None:
    def states() -> list[bool]:
        return [engine["ready"] for engine in agent.status()["engines"]]

    with Engine(agent.endpoint, world_size=2) as engine:
        wait_until(lambda: states() == [True, True], what="a ready engine")
        engine.scheduler.shutdown()
        wait_until(lambda: states() == [False, False], what="an engine without its scheduler")
    engine = start.engine(agent, world_size=2)
    wait_until(lambda: states() == [True, True], what="a ready engine")
    engine.workers[0].shutdown()
    wait_until(lambda: states() == [False], what="an engine without one of its ranks")


def test_an_endpoint_in_use_is_one_sentence(agent: AgentServer, tmp_path: Path) -> None:
    second = AgentServer(tmp_path / "agent", None)
    second.log_path = tmp_path / "second.log"
    second.spawn()
    assert second.process.wait(20) == 1, "later it may start: no wrong setting"
    assert "another agent runs on this node" in second.log
    assert "Traceback" not in second.log
    assert agent.status()["pid"] == agent.pid


@pytest.mark.servers
def test_a_wrong_password_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer(tmp_path, password="right") as server:
        monkeypatch.setenv("LMCACHE_REDIS_PASSWORD", "wr0ng-secret")
        with AgentServer(tmp_path / "a", server.unix_url) as agent:
            report = agent.status()["redis"]
            assert not report["up"]
            assert "password" in report["reason"]
            assert "wr0ng-secret" not in agent.log + str(report)
        monkeypatch.setenv("LMCACHE_REDIS_PASSWORD", "right")
        with (
            AgentServer(tmp_path / "b", server.unix_url) as agent,
            Engine(agent.endpoint) as engine,
        ):
            engine.store("r1", HASHES, range(8))
            agent.wait_idle()
            assert agent.counter("stored_chunks") == 2


@pytest.mark.servers
def test_with_an_empty_url_the_agent_brings_its_own_redis(tmp_path: Path) -> None:
    agent = AgentServer(tmp_path / "agent", "", embedded_memory_bytes="64MiB")
    with agent, Engine(agent.endpoint) as engine:
        engine.randomize(range(8))
        engine.store("r1", HASHES, range(8))
        agent.wait_idle()
        assert agent.counter("stored_chunks") == 2
        (child,) = agent.children()
        server = Path(f"/proc/{child}")
        assert agent.terminate() == 0
        wait_until(lambda: not server.exists(), what="the end of the embedded Redis")


@pytest.mark.servers
def test_a_killed_embedded_redis_is_started_again(tmp_path: Path) -> None:
    """As the kernel does when memory runs out. Nothing but the chunks in Redis is lost."""
    agent = AgentServer(tmp_path / "agent", None, embedded_memory_bytes="64MiB")
    with agent, Engine(agent.endpoint) as engine:
        (first,) = agent.children()
        os.kill(first, signal.SIGKILL)
        url = agent.status()["redis"]["server"]
        wait_until(lambda: is_another(url, first), what="another server")
        assert "is started again, empty: killed by SIGKILL" in agent.log
        (second,) = agent.children()
        engine.randomize(range(8))

        def is_stored() -> bool:
            engine.store("r1", HASHES, range(8))
            return agent.counter("stored_chunks") == 2

        wait_until(is_stored, what="the chunks in Redis")
        # An end in order leaves nothing behind, and starts nothing.
        os.kill(second, signal.SIGKILL)
        assert agent.terminate() == 0
        assert "Traceback" not in agent.log
        assert not Path(f"/proc/{second}").exists()


@pytest.mark.servers
def test_a_server_that_comes_after_the_agent_is_one_sentence(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, unix=False)
    with AgentServer(tmp_path / "agent", server.url) as agent, Engine(agent.endpoint) as engine:
        report = agent.status()["redis"]
        assert not report["up"]
        assert "refuses connections" in report["reason"]
        assert engine.lookup("r1", HASHES) == 0
        engine.store("r1", HASHES, range(8))
        with server:
            wait_until(lambda: agent.status()["redis"]["up"], "Redis found", 1.0 + SLACK_S)
            engine.store("r2", HASHES, range(8))
            wait_until(lambda: agent.counter("stored_chunks") == 2, what="the chunks in Redis")
        assert "Traceback" not in agent.log
