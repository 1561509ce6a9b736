"""Lookups: the first of a fresh agent waits for work in progress, until its deadline."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_redis import messages as m
from lmcache_redis.agent import registering
from lmcache_redis.agent.lookups import shared_rows, tier_letters
from lmcache_redis.agent.main import _prefault
from tests.agent.joining import HASHES, Joining
from tests.harness import AgentServer, Engine
from tests.servers import RedisServer


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


def test_the_host_pool_is_faulted_in_at_full_priority() -> None:
    """At a lower priority, on busy cores, it would keep the GIL from the loop for a second."""
    found: list[int] = []

    class Watched:
        def prefault(self, stop: threading.Event, **_: object) -> None:
            found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    with contextlib.ExitStack() as stack:
        _prefault(stack, Watched())  # type: ignore[arg-type]
    assert found == [os.getpriority(os.PRIO_PROCESS, 0)]


def test_a_worker_is_ready_for_each_agent_anew(
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


@pytest.fixture
def joining(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., Joining]]:
    made: list[Joining] = []

    def make(**options: float) -> Joining:
        made.append(Joining(**options))
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


def test_a_lookup_waits_for_workers_that_come_later(
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


def test_ranks_with_equal_bytes_share_their_rows() -> None:
    def group(name: bytes) -> Any:
        return SimpleNamespace(form=SimpleNamespace(stem=lambda nbytes: name + bytes([nbytes])))

    ranks: list[Any] = [
        SimpleNamespace(worker_id=0, groups=[group(b"full"), group(b"window")]),
        SimpleNamespace(worker_id=1, groups=[group(b"full"), group(b"other window")]),
    ]
    forms, users = shared_rows(ranks, 32)
    assert forms == [ranks[0].groups[0].form, ranks[0].groups[1].form, ranks[1].groups[1].form]
    assert users == [[(0, 0), (1, 0)], [(0, 1)], [(1, 1)]]


def test_tiers_of_an_answer() -> None:
    found: Any = SimpleNamespace(bound=4, levels=lambda: {1: 0, 3: 1, 7: 1})
    assert tier_letters(found, ("d", "r")) == "hdhr"
    found.levels = dict
    assert tier_letters(found, ("d", "r")) == "hhhh"
