"""An agent that runs out of file descriptors goes on serving those whom it knows."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq

from lmcache_redis import transport
from lmcache_redis.processes import free_descriptors
from tests.harness import AgentServer, Engine, block_hashes, wait_until

pytestmark = pytest.mark.servers
HASHES = block_hashes("prompt", 8)


@contextmanager
def crowd(endpoint: str, count: int) -> Iterator[None]:
    """Connections that never say anything."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        for _ in range(count):
            dealer, monitor = transport.connect_watched_dealer(context, endpoint)
            stack.callback(dealer.close, 0)
            stack.callback(monitor.close, 0)
            stack.callback(dealer.disable_monitor)
            time.sleep(0.002)
        yield


def limit_descriptors(agent: AgentServer, spare: int) -> None:
    used = len(os.listdir(f"/proc/{agent.pid}/fd"))
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (used + spare, used + spare))


def test_a_crowd_ends_neither_the_agent_nor_an_engine(agent: AgentServer) -> None:
    path = Path(agent.endpoint.removeprefix("ipc://"))
    with Engine(agent.endpoint) as engine:
        engine.store("r0", HASHES, range(8))
        limit_descriptors(agent, 120)
        with crowd(agent.endpoint, 300):
            wait_until(lambda: "too few file descriptors" in agent.log, "a refusal")
            assert not path.exists()
            for turn in range(3):
                assert engine.lookup(f"r{turn}", HASHES) == 128
                engine.scheduler.end_session(f"r{turn}")
            assert engine.workers[0].ready
            assert agent.running
        wait_until(path.exists, "an agent that listens again")
        with Engine(agent.endpoint) as another:
            assert another.lookup("r", HASHES) == 128
        assert engine.workers[0].ready
        assert "unregistered worker 0 of engine" not in agent.log.split("too few file")[0]


def test_the_limit_is_raised_at_the_start(agent: AgentServer) -> None:
    soft, hard = resource.prlimit(agent.pid, resource.RLIMIT_NOFILE)
    assert soft == hard


def test_free_descriptors_are_counted(tmp_path: Path) -> None:
    before = free_descriptors()
    with (tmp_path / "file").open("w"):
        assert free_descriptors() == before - 1
    assert free_descriptors() == before
