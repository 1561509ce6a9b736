"""The first lookup of a fresh agent waits for work in progress, until its deadline."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_redis import messages as m
from lmcache_redis.agent import registering
from lmcache_redis.agent.agent import Agent
from lmcache_redis.agent.handlers import Handlers
from lmcache_redis.agent.main import _prefault
from lmcache_redis.agent.peers import Peer
from lmcache_redis.agent.registering import form_of
from lmcache_redis.cache.memory import Arena
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.config import AgentConfig
from lmcache_redis.device.handles import SharedMemoryHandle
from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.errors import DeviceError
from lmcache_redis.processes import process_start_time
from tests.cache.played import run_until
from tests.harness import AgentServer, Engine, block_hashes
from tests.servers import RedisServer

HASHES = block_hashes("prompt", 8)
LAYOUT = KVLayout((), "uint8", "cpu", 16, 64, (Segment(0, 0, 1000, 1000),))
CHUNK_SIZE_TOKENS = 64
LONG_AGO_S = 60.0


def test_a_lookup_waits_until_redis_was_asked_for_the_first_time(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """An agent serves after its timeout for the first probe, although Redis may only be slow."""
    patient = {"op_timeout_s": 60, "lookup_deadline_s": 30}
    with (
        AgentServer(tmp_path / "agent", redis_server.unix_url, **patient) as agent,
        Engine(agent.endpoint) as engine,
    ):
        engine.store("r0", HASHES, range(8))
        agent.wait_idle()
        redis_server.stop()
        agent.restart()
        engine.wait_ready()
        assert "not been asked yet" in agent.status()["redis"]["reason"]
        engine.scheduler.begin_lookup("r1", engine.chunks(HASHES))
        assert engine.scheduler.hit_tokens("r1", wait_s=0.3) is None
        redis_server.cont()
        assert engine.lookup("r1", HASHES) == 128


def test_the_host_pool_is_faulted_in_at_the_priority_of_the_agent() -> None:
    """At a lower priority, on busy cores, it would keep the GIL from the loop for a second."""
    found: list[int] = []

    class Watched:
        def prefault(self, stop: threading.Event, **_: object) -> None:
            found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    with contextlib.ExitStack() as stack:
        _prefault(stack, Watched())  # type: ignore[arg-type]
    assert found == [os.getpriority(os.PRIO_PROCESS, 0)]


def test_a_worker_is_not_ready_for_the_next_agent_because_it_was_for_the_last(
    agent: AgentServer,
) -> None:
    with Engine(agent.endpoint) as engine:
        worker = engine.workers[0]
        register, seen = worker.link._on_welcome, []

        def welcomed(welcome: m.Welcome) -> None:
            seen.append((worker.link.online, worker.ready))
            assert register is not None
            register(welcome)

        worker.link._on_welcome = welcomed
        agent.restart()
        engine.wait_ready()
        assert seen == [(True, False)]


class Joining:
    """An agent's handlers and an engine of two workers, whose memory the test maps."""

    def __init__(self, redis: RedisServer, lookup_deadline_s: float = 30.0) -> None:
        config = AgentConfig(
            redis_url=redis.url,
            chunk_size_tokens=CHUNK_SIZE_TOKENS,
            slot_bytes=4096,
            lookup_deadline_s=lookup_deadline_s,
        )
        self.arena = Arena(16 * 4096, 4096)
        never = {"cancel": None, "clear": None, "close": None}
        plane: Any = SimpleNamespace(state=SimpleNamespace(probed=True), **never)
        self.agent = Agent.of(config, self.arena, plane)
        self.loop, self.peers = self.agent.loop, self.agent.peers
        self.handlers = Handlers(self.agent)
        self.answers: list[m.Answer] = []
        self.map_memory = threading.Event()
        self.broken = False

    def open_device(self, layouts: Sequence[KVLayout], *_: object) -> Any:
        assert self.map_memory.wait(30)
        if self.broken:
            raise DeviceError("this memory cannot be mapped")
        return SimpleNamespace(layouts=layouts, close=lambda: None)

    def join(self, worker_id: int | None, ago_s: float = LONG_AGO_S, unnamed: bool = False) -> Peer:
        """A peer whose HELLO came that many seconds ago."""
        now_s = time.monotonic()
        engine_id = f"process of {worker_id}" if unnamed else "engine"
        hello = m.Hello(1, engine_id, "model", 2, worker_id, "0", unnamed)
        peer = Peer(f"peer {worker_id}".encode(), hello, now_s, now_s - ago_s)
        self.peers.add(peer)
        return peer

    def register(self, peer: Peer) -> None:
        worker_id = peer.hello.worker_id
        assert worker_id is not None
        question = m.RegisterKVCache(
            1,
            (
                m.KVGroup(
                    ObjectKey.ComputeKVRank(2, worker_id, 2, worker_id),
                    LAYOUT,
                    LAYOUT.fingerprint(CHUNK_SIZE_TOKENS),
                ),
            ),
            (SharedMemoryHandle(os.getpid(), process_start_time(os.getpid()), 0, 0, 0, 64000),),
        )
        self.handlers.answer(peer, question, lambda answer: None)

    def hold_a_chunk(self) -> None:
        """Puts each rank's part of a chunk into the host pool."""
        for worker_id in range(2):
            kv_rank = ObjectKey.ComputeKVRank(2, worker_id, 2, worker_id)
            form = form_of(LAYOUT, "model", kv_rank, CHUNK_SIZE_TOKENS, self.agent.config)
            entry = self.agent.cache.reserve(form, HASHES[3])
            assert entry is not None
            assert self.agent.cache.publish(entry)

    def look_up(self, scheduler: Peer) -> None:
        question = m.Lookup(2, "r", (HASHES[3],))
        self.handlers.answer(scheduler, question, self.answers.append)

    def run(self, until: Callable[[], object]) -> None:
        run_until(self.loop, until)

    def close(self) -> None:
        self.map_memory.set()
        assert self.agent.copies.close(10)
        self.loop.run_posted()
        for peer in self.peers:
            self.handlers.forget(peer, "the test ends")
        assert self.agent.cache.pool.pinned == 0
        self.agent.wakeup.close()
        self.arena.close()


@pytest.fixture
def joining(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Joining]]:
    made: list[Joining] = []

    def make(**options: float) -> Joining:
        made.append(Joining(redis_server, **options))
        monkeypatch.setattr(registering, "open_device", made[-1].open_device)
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("unnamed", [False, True])
def test_a_lookup_waits_for_registrations_in_progress(
    joining: Callable[..., Joining], unnamed: bool
) -> None:
    here = joining()
    scheduler, *workers = (here.join(each, unnamed=unnamed) for each in (None, 0, 1))
    for worker in workers:
        here.register(worker)
    here.hold_a_chunk()
    here.look_up(scheduler)
    here.loop.run_due()
    assert here.answers == []
    here.map_memory.set()
    here.run(lambda: here.answers)
    assert here.answers == [m.LookupResult(0, 1, "h")]


def test_a_lookup_waits_for_workers_that_come_after_their_scheduler(
    joining: Callable[..., Joining],
) -> None:
    here = joining()
    here.map_memory.set()
    scheduler = here.join(None, ago_s=-30)  # its HELLO counts as recent for another half minute
    here.hold_a_chunk()
    here.look_up(scheduler)
    for worker_id in range(2):
        here.loop.run_due()
        assert here.answers == []
        here.register(here.join(worker_id))
    here.run(lambda: here.answers)
    assert here.answers == [m.LookupResult(0, 1, "h")]


@pytest.mark.parametrize("why", ["no worker comes", "one was refused"])
def test_a_lookup_does_not_wait_for_a_worker_that_will_not_come(
    joining: Callable[..., Joining], why: str
) -> None:
    here = joining()
    scheduler = here.join(None)
    if why == "one was refused":
        here.broken = True
        here.map_memory.set()
        worker = here.join(0)
        here.register(worker)
        here.run(lambda: not worker.mapping)
    here.look_up(scheduler)
    assert here.answers == [m.LookupResult(0, 0)]


def test_a_lookup_waits_until_its_deadline_and_no_longer(joining: Callable[..., Joining]) -> None:
    here = joining(lookup_deadline_s=0.05)
    scheduler = here.join(None)
    for worker_id in range(2):
        here.register(here.join(worker_id))
    here.look_up(scheduler)
    here.run(lambda: here.answers)
    assert here.answers == [m.LookupResult(0, 0)]


def test_a_lookup_that_waits_is_cancelled_with_its_session(joining: Callable[..., Joining]) -> None:
    here = joining()
    scheduler = here.join(None)
    for worker_id in range(2):
        here.register(here.join(worker_id))
    here.hold_a_chunk()
    here.look_up(scheduler)
    here.handlers.answer(scheduler, m.EndSession(3, "r"), lambda answer: None)
    here.map_memory.set()
    here.run(lambda: here.peers.complete(scheduler) or not any(p.mapping for p in here.peers))
    here.loop.run_due()
    assert here.answers == []
    assert not len(here.agent.sessions)
