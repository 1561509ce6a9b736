# SPDX-License-Identifier: Apache-2.0
"""A disk that does not answer: Redis is asked instead until it does.

Files are replaced by FIFOs: opening one for reading blocks until it is opened for writing, as on
an NFS server that is gone.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch

from tests.agent.test_disk import CHUNKS, HASHES, TOKENS, agent_with_disk, check_hit, files
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer

OTHERS = block_hashes("another", 32)


class Hang:
    """FIFOs in place of files; opening one hangs until `end`.

    It begins when the agent has found Redis: before, no lookup would ask the disk.
    """

    def __init__(self, agent: AgentServer, paths: list[Path]) -> None:
        self._paths = paths
        wait_until(lambda: agent.status()["redis"]["up"])
        for path in paths:
            path.unlink()
            os.mkfifo(path)

    def end(self) -> None:
        """Hung calls continue and find nothing; later calls do not hang."""
        for path in self._paths:
            with contextlib.suppress(OSError):  # nothing hangs
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            path.unlink(missing_ok=True)
        self._paths = []


def fill(engine: Engine) -> None:
    """With KV that is the same each time."""
    torch.manual_seed(7)
    engine.randomize(range(32))


def stored(tmp_path: Path, redis: RedisServer, **options: object) -> AgentServer:
    """An agent with 16 chunks of two prompts on disk and in Redis, but not in its pool."""
    agent = agent_with_disk(tmp_path, redis, **options)
    with agent, Engine(agent.endpoint) as engine:
        fill(engine)
        engine.store("r1", HASHES, range(32))
        engine.store("r2", OTHERS, range(32))
        agent.wait_idle()
        assert agent.terminate() == 0
    assert len(files(tmp_path / "disk")) == 2 * CHUNKS
    return agent


def test_a_hung_read_is_asked_of_redis(tmp_path: Path, redis_server: RedisServer) -> None:
    """Two reads hang and fourteen are queued: the lookup has every chunk before its deadline.

    None keeps a slot for longer than its request.
    """
    options = {"lookup_deadline_s": 4, "log_level": "info"}
    with stored(tmp_path, redis_server, **options) as agent, Engine(agent.endpoint) as engine:
        hang = Hang(agent, files(tmp_path / "disk"))
        fill(engine)
        check_hit(engine, "r3")
        assert agent.counter("lookups_timed_out") == 0
        assert agent.counter("hit_chunks_redis") == agent.counter("miss_disk") == CHUNKS
        status = agent.status()["disk"]
        assert not status["up"]
        assert "a read has not returned" in status["reason"]
        engine.scheduler.end_session("r3")
        wait_until(lambda: agent.status()["pool"]["pinned_slots"] == 0)
        assert not agent.status()["disk"]["up"]

        # While it is down, nothing is found or written, and each drop is counted.
        assert agent.counter("drop_disk") == CHUNKS
        assert engine.lookup("r4", OTHERS) == TOKENS
        assert agent.counter("hit_chunks_redis") == 2 * CHUNKS
        assert agent.counter("miss_disk") == CHUNKS, "a lookup waited for the disk again"
        engine.store("r5", block_hashes("third", 32), range(32))
        agent.wait_idle()
        assert agent.counter("drop_disk") == 3 * CHUNKS
        assert agent.counter("disk_stored_chunks") == 0

        hang.end()
        wait_until(lambda: agent.status()["disk"]["up"])
        assert agent.status()["disk"]["reason"] == ""
        engine.store("r6", block_hashes("fourth", 32), range(32))
        wait_until(lambda: agent.counter("disk_stored_chunks") == CHUNKS)
        assert agent.log.count("the disk tier is down") == 1
        assert agent.log.count("the disk tier is back") == 1
        engine.scheduler.end_session("r4")
        wait_until(lambda: agent.status()["pool"]["pinned_slots"] == 0)
        assert "Traceback" not in agent.log


def test_a_second_lookup_joins_and_falls_over_as_well(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """Two lookups of one prompt wait for the same read; Redis is read once for both."""
    with (
        stored(tmp_path, redis_server, lookup_deadline_s=4) as agent,
        Engine(agent.endpoint) as engine,
    ):
        hang = Hang(agent, files(tmp_path / "disk"))
        for request_id in ("r3", "r4"):
            engine.scheduler.begin_lookup(request_id, engine.chunks(HASHES))
        for request_id in ("r3", "r4"):
            assert engine.lookup(request_id, HASHES) == TOKENS
        assert agent.counter("loaded_chunks") == CHUNKS
        assert agent.counter("lookups_timed_out") == 0
        hang.end()


@pytest.mark.parametrize("lookup_deadline_s", [0.5, 600])
def test_the_agent_stops_though_the_disk_hangs(
    tmp_path: Path, redis_server: RedisServer, lookup_deadline_s: float
) -> None:
    """Whether the tier is known to be down or not. `terminate` waits for seconds only."""
    with (
        stored(
            tmp_path, redis_server, lookup_deadline_s=lookup_deadline_s, shutdown_deadline_s=1.0
        ) as agent,
        Engine(agent.endpoint) as engine,
    ):
        hang = Hang(agent, files(tmp_path / "disk"))
        engine.scheduler.begin_lookup("r3", engine.chunks(HASHES))
        if lookup_deadline_s < 1:
            wait_until(lambda: not agent.status()["disk"]["up"])
        else:
            wait_until(lambda: agent.status()["sessions"] == 1)
        assert agent.terminate() == 0
        assert "stopped" in agent.log
        assert "Traceback" not in agent.log
        hang.end()
