# SPDX-License-Identifier: Apache-2.0
"""An agent tells from where the chunks of a hit come."""

from __future__ import annotations

from pathlib import Path

from lmcache_redis.client.control import ControlClient
from tests.agent.test_disk import agent_with_disk
from tests.harness import Engine, block_hashes
from tests.servers import RedisServer

HASHES = block_hashes("prompt", 12)
CHUNK = 64


def test_the_tiers_of_a_hit(tmp_path: Path, redis_server: RedisServer) -> None:
    with (
        agent_with_disk(tmp_path, redis_server) as agent,
        Engine(agent.endpoint) as engine,
    ):
        engine.store("r1", HASHES, range(12))
        agent.wait_idle()
        assert engine.lookup("hit", HASHES) == 3 * CHUNK
        assert engine.scheduler.hit_tiers("hit") == ["host"] * 3
        assert engine.lookup("miss", block_hashes("other", 12)) == 0
        assert engine.scheduler.hit_tiers("miss") == []

        agent.restart()
        engine.wait_ready()
        assert engine.lookup("again", HASHES[:4]) == CHUNK
        assert engine.scheduler.hit_tiers("again") == ["disk"]
        # One file is gone: Redis has the chunk.
        assert agent.terminate() == 0
        files = sorted((tmp_path / "disk").rglob("*.lmcr"))
        assert len(files) == 3
        files[0].unlink()
        agent.start()
        engine.wait_ready()
        assert engine.lookup("mixed", HASHES) == 3 * CHUNK
        assert sorted(engine.scheduler.hit_tiers("mixed")) == ["disk", "disk", "redis"]
        from_redis = engine.scheduler.hit_tiers("mixed").index("redis")
        # From a later chunk on.
        assert engine.lookup("rest", HASHES, first_chunk=1) == 3 * CHUNK
        assert engine.scheduler.hit_tiers("rest") == ["host", "host"]
        assert agent.counter("hit_chunks_redis") == 1
        assert 0 <= from_redis < 3
        assert agent.counter("wire_errors") == 0


def test_why_finds_another_layout_on_disk(tmp_path: Path, redis_server: RedisServer) -> None:
    with (
        agent_with_disk(tmp_path, redis_server) as agent,
        Engine(agent.endpoint) as engine,
    ):
        engine.store("r1", HASHES, range(12))
        agent.wait_idle()
        agent.restart()
        engine.wait_ready()
        layouts = [each["layout"] for each in agent.status()["engines"]]
        with redis_server.client() as client:
            client.flushall()
        with Engine(agent.endpoint, identity={"revision": "two"}) as other:
            assert other.lookup("other", HASHES) == 0
            (request,) = ControlClient(agent.endpoint, 10).why("other", 1)["requests"]
            miss = request["lookup"]["first_miss"]
            assert (miss["reason"], miss["other_layouts"]) == ("absent", layouts)
