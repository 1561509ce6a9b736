# SPDX-License-Identifier: Apache-2.0
"""The disk tier of an agent: chunks are loaded from files, whatever the state of Redis."""

from __future__ import annotations

from pathlib import Path

from lmcache_redis.client.control import ControlClient
from tests.agent.starts import Starts
from tests.agent.test_path_of_a_chunk import assert_blocks_equal
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer, stripe_keys

HASHES = block_hashes("prompt", 32)
TOKENS = 512
CHUNKS = 8


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*.lmcr") if path.is_file())


def agent_with_disk(tmp_path: Path, redis: RedisServer, **options: object) -> AgentServer:
    return AgentServer(
        tmp_path / "agent",
        redis.unix_url,
        disk_path=tmp_path / "disk",
        **{"disk_size": "64MiB"} | options,
    )


def store_and_wait(agent: AgentServer, engine: Engine) -> None:
    engine.randomize(range(32))
    for attempt in range(3):  # a busy machine may take longer than a store's lease
        engine.store(f"r{attempt}", HASHES, range(32))
        agent.wait_idle()
        if agent.counter("disk_stored_chunks") == CHUNKS:
            break
    assert agent.counter("disk_stored_chunks") == CHUNKS


def check_hit(engine: Engine, request_id: str = "r2") -> None:
    before = engine.snapshot()
    assert engine.lookup(request_id, HASHES) == TOKENS
    assert engine.retrieve(request_id, HASHES, range(16, 48)) == set()
    assert_blocks_equal(engine, before, {n: 16 + n for n in range(32)})


def test_chunks_come_back_from_disk_without_redis(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    with agent_with_disk(tmp_path, redis_server) as agent, Engine(agent.endpoint) as engine:
        store_and_wait(agent, engine)
        assert len(files(tmp_path / "disk")) == CHUNKS
        agent.terminate()
        redis_server.kill()
        agent.start()
        engine.wait_ready()
        check_hit(engine)
        assert agent.counter("hit_chunks_disk") == CHUNKS
        assert agent.counter("hit_chunks_redis") == 0
        status = agent.status()["disk"]
        assert status["directory"] == str(tmp_path / "disk")
        assert 0 < status["used_bytes"] <= status["limit_bytes"] == 64 << 20
        assert agent.terminate() == 0
        assert f"hit_chunks_disk {CHUNKS}" in agent.log


def test_a_damaged_file_costs_a_read_from_redis(tmp_path: Path, redis_server: RedisServer) -> None:
    with agent_with_disk(tmp_path, redis_server) as agent, Engine(agent.endpoint) as engine:
        store_and_wait(agent, engine)
        agent.terminate()
        for path in files(tmp_path / "disk")[:3]:
            damaged = bytearray(path.read_bytes())
            damaged[-1] ^= 1
            path.write_bytes(damaged)
        agent.start()
        engine.wait_ready()
        check_hit(engine)
        assert agent.counter("miss_disk") == agent.counter("hit_chunks_redis") == 3
        assert agent.counter("hit_chunks_disk") == CHUNKS - 3
        # Chunks loaded from Redis are written to disk again.
        wait_until(lambda: agent.counter("disk_stored_chunks") == 3)
        assert len(files(tmp_path / "disk")) == CHUNKS
        agent.restart()
        engine.wait_ready()
        assert engine.lookup("r3", HASHES) == TOKENS
        assert agent.counter("hit_chunks_disk") == CHUNKS


def test_clear_takes_the_files_as_well(tmp_path: Path, redis_server: RedisServer) -> None:
    with agent_with_disk(tmp_path, redis_server) as agent, Engine(agent.endpoint) as engine:
        store_and_wait(agent, engine)
        engine.scheduler.clear()
        wait_until(lambda: not files(tmp_path / "disk"))
        wait_until(lambda: len(stripe_keys(redis_server)) == 0, what="a cleared Redis")
        assert engine.lookup("r2", HASHES) == 0


def test_a_directory_that_another_agent_uses(tmp_path: Path, redis_server: RedisServer) -> None:
    with agent_with_disk(tmp_path, redis_server):
        second = AgentServer(
            tmp_path / "second", redis_server.unix_url, disk_path=tmp_path / "disk"
        ).spawn()
        assert second.process.wait(20) != 0
        assert str(tmp_path / "disk") in second.log
        assert "Traceback" not in second.log


def test_what_waits_for_the_disk_is_written_at_the_end(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    with agent_with_disk(tmp_path, redis_server) as agent, Engine(agent.endpoint) as engine:
        engine.randomize(range(32))
        engine.store("r1", HASHES, range(32))
        agent.terminate()
        assert len(files(tmp_path / "disk")) == CHUNKS


def test_why_finds_another_layout_on_disk(
    start: Starts, tmp_path: Path, redis_server: RedisServer
) -> None:
    agent = start.enter(agent_with_disk(tmp_path, redis_server))
    engine = start.engine(agent)
    store_and_wait(agent, engine)
    agent.restart()
    engine.wait_ready()
    layouts = [each["layout"] for each in agent.status()["engines"]]
    redis_server.command("FLUSHALL")
    other = start.engine(agent, identity={"revision": "two"})
    assert other.lookup("other", HASHES) == 0
    (request,) = ControlClient(agent.endpoint, 10).why("other", 1)["requests"]
    miss = request["lookup"]["first_miss"]
    assert (miss["reason"], miss["other_layouts"]) == ("absent", layouts)
