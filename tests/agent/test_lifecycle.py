# SPDX-License-Identifier: Apache-2.0
"""Engines that fall silent, leave or come back: when the agent keeps their memory mapped.

With CPU memory, which an agent maps as it opens a GPU's: the kind of memory makes no difference to
which peers are forgotten, and when.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from lmcache_redis import messages as m
from lmcache_redis.agent import service
from lmcache_redis.client.link import AgentLink
from lmcache_redis.client.registering import CacheGroup
from lmcache_redis.client.worker import WorkerClient
from tests.agent.here import AgentHere
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer

HASHES = block_hashes("prompt", 8)


@pytest.fixture
def agent(tmp_path: Path, redis_server: RedisServer) -> Iterator[AgentServer]:
    """An agent with a heartbeat timeout of two seconds."""
    url, constants = redis_server.unix_url, {"lmcache_redis.agent.service.HEARTBEAT_TIMEOUT_S": 2.0}
    with AgentServer(tmp_path / "agent", url, constants) as server:
        yield server


def _run_engine(endpoint: str, ready: Event, go_on: Event, again: Event, stay: Event) -> None:
    with Engine(endpoint) as engine:
        engine.randomize(range(8))
        engine.store("r1", HASHES, range(8))
        ready.set()
        go_on.wait()
        # It may still believe that it is registered, until the agent answers otherwise.
        for number in itertools.count(2):
            engine.wait_ready()
            if engine.lookup(f"r{number}", HASHES) == 128:
                break
            time.sleep(0.05)
        failed = engine.retrieve(f"r{number}", HASHES, range(20, 28))
        if not failed and engine.lookup("held", HASHES) == 128:
            again.set()
        stay.wait()


class OtherEngine:
    """An engine in another process, which can be signalled."""

    def __init__(self, endpoint: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.ready, self.go_on, self.again, self.stay = (spawn.Event() for _ in range(4))
        events = (self.ready, self.go_on, self.again, self.stay)
        self.process = spawn.Process(target=_run_engine, args=(endpoint, *events))

    def send(self, signum: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signum)


@contextmanager
def other_engine(agent: AgentServer) -> Iterator[OtherEngine]:
    """Killed at the end."""
    engine = OtherEngine(agent.endpoint)
    engine.process.start()
    try:
        assert engine.ready.wait(60)
        yield engine
    finally:
        engine.send(signal.SIGKILL)
        engine.process.join()


def mapped(agent: AgentServer) -> int:
    """How much memory of engines the agent has mapped, in ranges."""
    return Path(f"/proc/{agent.pid}/maps").read_text().count("/dev/shm/torch")


def test_a_silent_engine_registers_again_when_it_goes_on(
    agent: AgentServer, engine: Engine
) -> None:
    """Another one, which only waits, is not silent. One that is killed is forgotten, too."""
    own = mapped(agent)
    assert own
    with other_engine(agent) as other:
        assert len(agent.status()["engines"]) == 2
        both = mapped(agent)
        assert both > own
        other.send(signal.SIGSTOP)
        wait_until(lambda: len(agent.status()["engines"]) == 1, what="a forgotten engine")
        wait_until(lambda: mapped(agent) == own, what="unmapped memory")
        assert "it has been silent for" in agent.log
        wait_until(lambda: agent.counter("heartbeat_losses") == 2, what="scheduler and worker")
        other.send(signal.SIGCONT)
        other.go_on.set()
        assert other.again.wait(60), "it does not hit again"
        assert mapped(agent) == both
        assert agent.status()["pool"]["pinned_slots"] > 0
    wait_until(lambda: len(agent.status()["engines"]) == 1, what="a forgotten engine")
    wait_until(lambda: mapped(agent) == own, what="unmapped memory")
    wait_until(lambda: not agent.status()["pool"]["pinned_slots"], what="unpinned slots")
    assert agent.counter("heartbeat_losses") == 4
    assert engine.workers[0].ready


def test_who_does_not_listen_finds_nobody_silent(
    tmp_path: Path,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An agent and an engine without the GIL, for longer than each waits for the other."""
    monkeypatch.setattr(service, "HEARTBEAT_TIMEOUT_S", 2.0)
    with (
        AgentHere(tmp_path / "agent", redis_server.unix_url) as here,
        Engine(here.endpoint, agent_dead_after_s=2.0),
    ):
        ctypes.PyDLL(None).usleep(3_000_000)  # keeps it
        time.sleep(1.0)
        assert here.counter("heartbeat_losses") == 0
    assert "lost the agent" not in caplog.text


def test_an_engine_that_unregisters_and_ends_is_no_loss(
    agent: AgentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM ends its processes before they have said GOODBYE."""
    send = AgentLink._send

    def without_goodbye(link: AgentLink, message: m.Message) -> bool:
        return not isinstance(message, m.Goodbye) and send(link, message)

    monkeypatch.setattr(AgentLink, "_send", without_goodbye)
    with Engine(agent.endpoint):
        pass
    time.sleep(3)  # longer than the agent's timeout
    assert agent.counter("heartbeat_losses") == 0
    with Engine(agent.endpoint):
        monkeypatch.setattr(WorkerClient, "unregister", lambda *_: True)
    wait_until(lambda: agent.counter("heartbeat_losses") == 2, what="two losses")


def test_a_sleeping_engine_is_unmapped_and_hits_awake(agent: AgentServer) -> None:
    """What it had is given back when it leaves, too."""
    with Engine(agent.endpoint) as engine:
        engine.store("r1", HASHES, range(8))
        agent.wait_idle()
        (worker,), (caches,) = engine.workers, engine.caches
        assert worker.unregister(60.0)
        assert not mapped(agent)
        agent.restart()  # the next agent does not map it either
        wait_until(lambda: worker.link.online, what="the next agent")
        assert not worker.ready
        assert not mapped(agent)

        group = CacheGroup(caches, "float32", engine.block_size_tokens)
        worker.register_groups([group], num_blocks=engine.num_blocks, identity={"rank": "0"})
        engine.wait_ready()
        assert mapped(agent)
        assert engine.lookup("r2", HASHES) == 8 * engine.block_size_tokens
        assert not engine.retrieve("r2", HASHES, range(8))
    wait_until(lambda: not agent.status()["engines"], what="a forgotten engine")
    wait_until(lambda: not mapped(agent), what="unmapped memory")
