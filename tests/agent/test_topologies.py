# SPDX-License-Identifier: Apache-2.0
"""The agent with a cluster and with Sentinel: the same path of a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from lmcache_redis.resp.routes import slot_of
from tests.agent.test_path_of_a_chunk import assert_blocks_equal
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer, stripe_keys
from tests.topologies import keys_on, running_cluster, running_sentinel

pytestmark = pytest.mark.servers


def test_chunks_come_back_from_a_cluster(tmp_path: Path) -> None:
    hashes = block_hashes("prompt", 32)
    with (
        running_cluster(tmp_path) as cluster,
        AgentServer(tmp_path / "agent", cluster.url, ttl_s=5000) as agent,
        Engine(agent.endpoint) as engine,
    ):
        wait_until(lambda: agent.status()["redis"]["up"])
        engine.randomize(range(32))
        engine.store("r1", hashes, range(32))
        agent.wait_idle()
        assert agent.counter("stored_chunks") == 8
        assert min(keys_on(cluster.nodes)) > 0
        agent.restart()
        engine.wait_ready()
        before = engine.snapshot()
        assert engine.lookup("r2", hashes) == 512
        assert engine.retrieve("r2", hashes, range(16, 48)) == set()
        assert_blocks_equal(engine, before, {n: 16 + n for n in range(32)})
        redis = agent.status()["redis"]
        assert redis["server"] == cluster.url
        assert cluster.nodes[0].command("CLIENT", "LIST").count(b"lmcache-redis:get") <= 2


def test_an_agent_follows_a_failover(tmp_path: Path) -> None:
    hashes = block_hashes("prompt", 8)
    with (
        running_sentinel(tmp_path, password="secret") as watched,
        AgentServer(tmp_path / "agent", watched.url) as agent,
        Engine(agent.endpoint) as engine,
    ):
        wait_until(lambda: agent.status()["redis"]["up"])
        engine.randomize(range(16))
        engine.store("r1", hashes, range(8))
        agent.wait_idle()
        old, new = watched.servers
        wait_until(lambda: len(stripe_keys(new)) == len(stripe_keys(old)))
        old.kill()
        wait_until(lambda: watched.master is new)
        wait_until(lambda: agent.status()["redis"]["up"], timeout_s=30)
        agent.restart()
        engine.wait_ready()
        assert engine.lookup("r2", hashes) == 128
        assert engine.retrieve("r2", hashes, range(8, 16)) == set()
        assert "secret" not in agent.log
        assert "secret" not in str(agent.status())


def calls(nodes: Sequence[RedisServer], command: str) -> int:
    """How often the servers have run a command."""
    return sum(
        int(node.command("INFO", "commandstats").get(f"cmdstat_{command}", {}).get("calls", 0))
        for node in nodes
    )


def test_what_an_agent_serves_while_a_slot_moves_stays_whole(tmp_path: Path) -> None:
    """Whether the chunk of that slot is there is not known: it is not written again."""
    hashes = block_hashes("prompt", 32)
    with (
        running_cluster(tmp_path) as cluster,
        AgentServer(tmp_path / "one", cluster.url) as one,
        AgentServer(tmp_path / "two", cluster.url) as two,
        Engine(one.endpoint) as first,
        Engine(two.endpoint) as second,
    ):
        for agent in (one, two):
            wait_until(partial(lambda agent: agent.status()["redis"]["up"], agent))
        first.randomize(range(32))
        first.store("r1", hashes, range(32))
        one.wait_idle()
        source, target = cluster.nodes[:2]
        with source.client() as client:
            key = stripe_keys(client)[0]
        every, written = sum(keys_on(cluster.nodes)), calls(cluster.nodes, "set")
        cluster.begin_move(slot_of(key), source, target)
        assert cluster.move_keys(slot_of(key), source, target, 100)
        assert first.lookup("r2", hashes) == 512
        first.scheduler.end_session("r2")
        wait_until(lambda: calls(cluster.nodes, "touch") >= every - 1)
        one.wait_idle()
        cluster.end_move(slot_of(key), source, target)
        assert calls(cluster.nodes, "set") == written
        assert one.counter("drop_redis_error") == 0
        assert second.lookup("r3", hashes) == 512
