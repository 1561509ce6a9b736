# SPDX-License-Identifier: Apache-2.0
"""What Redis evicts and expires is told to schedulers, and what was missed is found again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_redis.chunks.keys import hash_tag
from lmcache_redis.chunks.names import parse_stripe_key
from tests.agent.test_watching import HASHES, NAMES, Watcher, watched
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer, stripe_keys


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path, args=("--notify-keyspace-events", "Egex")) as server:
        yield server


@pytest.fixture
def agent(tmp_path: Path, server: RedisServer) -> Iterator[AgentServer]:
    with AgentServer(tmp_path / "agent", server.unix_url) as agent:
        yield agent


def subscribers(server: RedisServer) -> int:
    clients = server.client().client_list()
    return sum(each["name"] == "lmcache-redis:removals" and each["sub"] == "3" for each in clients)


def stored(engine: Engine, server: RedisServer) -> Watcher:
    """A watcher of chunks that are in Redis and in the host pool, with a subscription."""
    watcher = watched(engine)
    wait_until(lambda: subscribers(server) == 1, what="a subscription")
    engine.store("r1", HASHES, range(12))
    watcher.wait(0, "redis", NAMES)
    return watcher


def keys_of(server: RedisServer, name: bytes) -> list[bytes]:
    return [key for key in stripe_keys(server.client()) if hash_tag(name) in key]


def test_expired_and_deleted_chunks_are_told(agent: AgentServer, server: RedisServer) -> None:
    with Engine(agent.endpoint) as engine:
        watcher = stored(engine, server)
        client = server.client()
        # Of one stripe, the chunk is gone: it cannot be loaded.
        client.pexpire(keys_of(server, NAMES[0])[-1], 1)
        watcher.wait(0, "redis", NAMES[1:])
        client.unlink(*keys_of(server, NAMES[1]))
        watcher.wait(0, "redis", NAMES[2:])
        # Another program's keys are nobody's business.
        client.set("lmcr2:", "x", px=1)
        client.set("other", "x", px=1)
        # Deleted and there again, as when a shard gives it to another: that is no removal.
        values = {key: client.get(key) for key in keys_of(server, NAMES[2])}
        client.pipeline().delete(*values).mset(values).execute()
        watcher.hear_nothing()
        # The pool still has them; what it wrote of them is no longer believed to be in Redis.
        watcher.wait(0, "host", NAMES)
        engine.store("r2", HASHES, range(12))
        watcher.wait(0, "redis", NAMES)
        assert agent.status()["redis"]["removals_untold"] == ""
    wait_until(lambda: subscribers(server) == 0, what="the end of the subscription")


def test_evicted_chunks_are_told(agent: AgentServer, server: RedisServer) -> None:
    with Engine(agent.endpoint) as engine:
        watcher = stored(engine, server)
        stripes = len(keys_of(server, NAMES[0]))
        server.config_set("maxmemory-policy", "allkeys-lru")
        used = server.client().info("memory")["used_memory"]
        server.config_set("maxmemory", str(used - 100_000))
        for number in range(20):
            engine.store(f"e{number}", block_hashes(f"other {number}", 12), range(12))
            agent.wait_idle()
        assert server.client().info("stats")["evicted_keys"] > 10

        def as_in_redis() -> bool:
            watcher.poll()
            found = stripe_keys(server.client())
            left = Counter(parse_stripe_key(key)[1].chunk_hash for key in found)
            whole = {name for name, count in left.items() if count == stripes}
            return watcher.there[0, "redis"] == whole

        wait_until(as_in_redis, what="what Redis has left")


@pytest.mark.parametrize("how", ["the server ends", "the connection is cut"])
def test_what_was_missed_is_found_again(agent: AgentServer, server: RedisServer, how: str) -> None:
    with Engine(agent.endpoint) as engine:
        watcher = stored(engine, server)
        if how == "the server ends":
            server.client().save()
            server.shutdown()
            server.start()  # with what was saved
            server.client().unlink(*keys_of(server, NAMES[0]))
        else:
            client = server.client()
            lost = keys_of(server, NAMES[0])
            cut = client.pipeline()
            cut.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            cut.unlink(*lost)
            cut.execute()
        watcher.wait(0, "redis", NAMES[1:])
        wait_until(lambda: subscribers(server) == 1, what="the next subscription")


def test_a_server_that_does_not_tell_is_named(agent: AgentServer, server: RedisServer) -> None:
    server.config_set("notify-keyspace-events", "KEg")
    with Engine(agent.endpoint) as engine:
        watcher = watched(engine)
        engine.store("r1", HASHES, range(12))
        watcher.wait(0, "redis", NAMES)
        wait_until(lambda: agent.status()["redis"]["removals_untold"], what="the reason")
        why = agent.status()["redis"]["removals_untold"]
        assert "its notify-keyspace-events is 'gKE'" in why
        assert "set it to Egex" in why
        assert why in agent.log
        assert subscribers(server) == 0


@pytest.mark.servers
def test_a_user_that_may_not_subscribe_is_told(tmp_path: Path, server: RedisServer) -> None:
    server.command("ACL", "SETUSER", "kv", "on", ">pw", "~*", "+@all", "-subscribe")
    url = f"redis://kv:pw@127.0.0.1:{server.port}"
    with AgentServer(tmp_path / "agent", url) as agent, Engine(agent.endpoint) as engine:
        watcher = watched(engine)
        engine.store("r1", HASHES, range(12))
        watcher.wait(0, "redis", NAMES)
        wait_until(lambda: agent.status()["redis"]["removals_untold"], what="the reason")
        assert "NOPERM" in agent.status()["redis"]["removals_untold"]
        assert agent.status()["redis"]["up"]
