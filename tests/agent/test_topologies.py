"""The agent with a cluster and with Sentinel: the same path of a chunk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.test_path_of_a_chunk import assert_blocks_equal
from tests.harness import AgentServer, Engine, block_hashes, wait_until
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
        wait_until(lambda: new.command("DBSIZE") == old.command("DBSIZE"))
        old.kill()
        wait_until(lambda: watched.master is new)
        wait_until(lambda: agent.status()["redis"]["up"], timeout_s=30)
        agent.restart()
        engine.wait_ready()
        assert engine.lookup("r2", hashes) == 128
        assert engine.retrieve("r2", hashes, range(8, 16)) == set()
        assert "secret" not in agent.log
        assert "secret" not in str(agent.status())
