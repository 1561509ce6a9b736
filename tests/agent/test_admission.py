# SPDX-License-Identifier: Apache-2.0
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
from tests.harness import AgentServer, Engine, block_hashes, wait_until

HASHES = block_hashes("prompt", 8)


@contextmanager
def crowd(endpoint: str, count: int) -> Iterator[None]:
    """Connections that never say anything."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        for _ in range(count):
            dealer = context.socket(zmq.DEALER)
            stack.callback(dealer.close, 0)
            dealer.connect(endpoint)
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


class Door:
    """A bound socket whose process has few descriptors free, if the test says so."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.free, self.limit = 1 << 20, 1024
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind(f"ipc://{path}")
        self.admission = transport.Admission(self.router, f"ipc://{path}")
        monkeypatch.setattr(transport, "free_descriptors", lambda: self.free)
        monkeypatch.setattr(resource, "getrlimit", lambda _: (self.limit, self.limit))

    def is_open_with(self, free: int) -> bool:
        self.free = free
        self.admission.check()
        assert self.path.exists() == self.admission.is_open
        return self.admission.is_open

    def close(self) -> None:
        self.admission.close()
        assert self.path.exists()
        self.router.close(linger=0)
        self.context.term()


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    door = Door(tmp_path / "agent.sock", monkeypatch)
    yield door
    door.close()


@pytest.mark.parametrize(
    ("limit", "reserve"), [(100, 25), (256, 64), (512, 64), (1024, 128), (1 << 20, 1024)]
)
def test_the_way_is_shut_before_the_last_descriptor(door: Door, limit: int, reserve: int) -> None:
    """And open again when a quarter more are free: not at once."""
    door.limit = limit
    for _ in range(2):
        assert door.is_open_with(reserve)
        assert not door.is_open_with(reserve - 1)
        assert not door.is_open_with(reserve + reserve // 4 - 1)
        assert door.is_open_with(reserve + reserve // 4)
    assert not door.is_open_with(0)
    # That the end opens it again is seen as the fixture ends.


def test_another_agents_socket_is_not_replaced(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    for times in (1, 2):
        assert not door.is_open_with(0)
        door.path.write_text("another agent's")
        for _ in range(3):
            door.free = 1024
            door.admission.check()
        assert not door.admission.is_open
        assert door.path.read_text() == "another agent's"
        assert caplog.text.count("cannot be opened again") == times, "each is told once"
        door.path.unlink()
        assert door.is_open_with(1024)


def test_a_socket_that_cannot_be_renamed_stays(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    away = door.path.rename(door.path.with_suffix(".away"))
    door.free = 0
    door.admission.check()
    assert door.admission.is_open
    assert "cannot be renamed" in caplog.text
    away.rename(door.path)


def test_connections_wake_the_loop_once(door: Door) -> None:
    with door.context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"ipc://{door.path}")
        assert door.admission.accepted.poll(10_000)
        door.admission.check()
        assert not door.admission.accepted.poll(0)
