# SPDX-License-Identifier: Apache-2.0
"""An agent and its engines free what they make without the garbage collector, faults included."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from msgspec.structs import replace

from lmcache_redis import messages as m
from lmcache_redis.agent.peers import Peers
from lmcache_redis.agent.sessions import Sessions
from lmcache_redis.client.control import ControlClient
from lmcache_redis.client.link import AgentCall
from lmcache_redis.errors import DeviceError
from lmcache_redis.transport import AgentSocket, decode_answer, encode
from tests.agent.here import AgentHere
from tests.cycles import left_by
from tests.harness import WAIT_S, Engine, block_hashes, wait_until
from tests.servers import RedisServer

# Requests in each of two rounds, asked in batches.
TIMES, BATCH = 100, 5
BLOCKS = range(8)  # two chunks
LEASE_S = 1.0
DEADLINE_S = 0.3


class Place:
    """An agent in this process, and an engine."""

    def __init__(self, directory: Path, redis: RedisServer, **options: Any) -> None:
        small = {"pool_bytes": 2 << 20}  # 16 chunks
        options = {"lookup_deadline_s": DEADLINE_S, "op_timeout_s": 0.2, **small, **options}
        self.here = AgentHere(directory / "agent", redis.unix_url, **options)
        self.here.__enter__()
        self.agent = self.here.agent
        # The threads of both share one lock, which a machine may hold up.
        self.engine = Engine(self.here.endpoint, agent_dead_after_s=WAIT_S)
        self.worker, self.scheduler = self.engine.workers[0].link, self.engine.scheduler.link
        self.lease_s = LEASE_S
        self._fill_history()

    def close(self) -> None:
        self.engine.close()
        self.here.__exit__()

    def _fill_history(self) -> None:
        """It is bounded, by thousands: what a test adds would count as left. So it is short."""
        history = self.agent.sessions.history
        history._most = 4
        self.look_up(some(0, "past"))
        self.end(some(0, "past"))
        wait_until(lambda: len(history) == 4, "a full history", WAIT_S)

    @property
    def device(self) -> Any:
        (registered,) = self.agent.peers.registered
        return registered.device

    def counter(self, name: str) -> float:
        return self.here.counter(name)

    def settle(self) -> None:
        """Until nothing is in flight, and no deadline is to pass."""
        seen: list[bool] = []

        def look() -> None:
            agent, heap = self.agent, self.agent.loop._heap
            # How long a cancelled timer stays depends on how fast everything is.
            heap[:] = [each for each in heap if each[2].action is not None]
            heapq.heapify(heap)
            work = len(agent.sessions) + agent.cache.backlog + agent.copies.backlog
            seen.append(not work and len(heap) < 10)

        def is_idle() -> bool:
            agent = self.agent
            agent.loop.post(look)
            return bool(seen) and seen[-1]

        wait_until(is_idle, "an idle agent", WAIT_S)

    def settle_writes(self) -> None:
        wait_until(lambda: not self.agent.cache.backlog, "chunks that are written", WAIT_S)

    def left_by(self, work: Callable[[int], object], times: int = TIMES // BATCH) -> list[str]:
        return left_by(work, times, self.settle)

    # What several requests ask, in one message.

    def names(self, requests: Sequence[str]) -> list[tuple[str, tuple[bytes, ...]]]:
        """Each with the chunks of its prompt, which is of its name up to a colon."""
        return [
            (name, tuple(self.engine.chunks(block_hashes(name.partition(":")[0], len(BLOCKS)))))
            for name in requests
        ]

    def look_up(self, requests: Sequence[str], **more: Any) -> None:
        ask(self.scheduler, [m.Lookup(0, *each, **more) for each in self.names(requests)])

    def store(self, requests: Sequence[str], kind: type[m.Store] = m.Store) -> None:
        ask(self.worker, [kind(0, *each, *self._blocks()) for each in self.names(requests)])

    def retrieve(self, requests: Sequence[str]) -> None:
        blocks, lease_ns = self._blocks()
        questions = [m.Retrieve(0, *each, blocks, 0, lease_ns) for each in self.names(requests)]
        ask(self.worker, questions)

    def end(self, requests: Sequence[str]) -> None:
        ask(self.scheduler, [m.EndSession(0, name) for name in requests])

    def _blocks(self) -> tuple[tuple[int, ...], int]:
        return tuple(BLOCKS), time.monotonic_ns() + int(self.lease_s * 1e9)


def ask(link: Any, questions: Sequence[m.Message]) -> list[AgentCall]:
    calls: list[AgentCall] = link.submit_all(questions)
    for call in calls:
        assert call.wait(WAIT_S)
        assert call.answer is not None
    return calls


def some(number: int, prompt: str = "") -> list[str]:
    """Names of requests: of one prompt, or each of its own."""
    return [
        f"{prompt}:{number * BATCH + n}" if prompt else f"p{number * BATCH + n}:"
        for n in range(BATCH)
    ]


@pytest.fixture
def make(tmp_path: Path, redis_server: RedisServer) -> Iterator[Callable[..., Place]]:
    made: list[Place] = []

    def make(**options: Any) -> Place:
        made.append(Place(tmp_path, redis_server, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def place(make: Callable[..., Place]) -> Place:
    return make()


def test_lookups(place: Place) -> None:
    """Hits and misses, of engines that compute at any rate; and some that are aborted."""
    place.store(["hit:"])

    def look_up(number: int) -> None:
        hits, misses = some(number, "hit"), some(number)
        place.look_up(hits + misses, token_s=number % 3 * 1e-6)
        place.scheduler.submit_all(
            [m.Lookup(0, *each, token_s=1e-6) for each in place.names(some(number, "aborted"))]
        )
        place.end([*hits, *misses, *some(number, "aborted")])

    assert place.left_by(look_up) == []
    assert place.counter("hit_chunks_host") >= 4 * TIMES
    missed = ("miss_absent", "miss_slower", "miss_redis_silent")  # before the first answer
    assert sum(map(place.counter, missed)) >= 4 * TIMES


@pytest.mark.parametrize("tier", ["redis", "disk"])
def test_chunks_are_stored_and_loaded(
    make: Callable[..., Place], tmp_path: Path, tier: str
) -> None:
    """The pool has few chunks, so that every request loads."""
    disk = {"disk_path": str(tmp_path / "disk"), "disk_size": 8 << 20} if tier == "disk" else {}
    place = make(lookup_deadline_s=5.0, **disk)

    def use(number: int) -> None:
        # Two rounds ago; since then the pool has lost it.
        stored, loaded = (some(each) for each in (number, max(0, number - 2)))
        place.store(stored)
        place.settle_writes()
        place.look_up(loaded)
        place.retrieve(loaded)
        place.end(loaded)

    assert place.left_by(use, 10) == []
    assert place.counter(f"hit_chunks_{tier}") > 40


def test_chunks_are_stored_and_retrieved(place: Place) -> None:
    place.lease_s = 3.0  # none may end on a busy machine
    place.store(["hit:"])

    def use(number: int) -> None:
        place.store(some(number))
        hits = some(number, "hit")
        place.look_up(hits)
        place.retrieve(hits)
        place.end(hits)

    assert place.left_by(use, 10) == []
    assert place.counter("retrieves_failed") == 0


def test_comparisons(place: Place) -> None:
    """Of every second chunk, which then differs, the cached part is removed."""

    def compare(number: int) -> None:
        place.store([f"p{number}:"])
        if number % 2:
            place.engine.randomize(BLOCKS)
        place.look_up([f"p{number}:"])
        place.store([f"p{number}:"], m.Compare)
        place.end([f"p{number}:"])
        place.agent.loop.post(place.agent.trust.restore)

    assert place.left_by(compare) == []
    assert place.counter("differing_chunks") >= 40


def _broken(error: Exception) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise type(error)(*error.args)

    return fail


@pytest.mark.parametrize("fault", ["refused", "a bug", "late"])
def test_copies_that_fail(place: Place, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    place.store(["hit:"])
    if fault == "late":
        monkeypatch.setattr(place, "_blocks", lambda: (tuple(BLOCKS), 1))
    else:
        error = DeviceError("refused") if fault == "refused" else ValueError("a bug")
        for call in ("gather", "scatter"):
            monkeypatch.setattr(type(place.device), call, _broken(error))

    def use(number: int) -> None:
        hits = some(number, "hit")
        place.look_up(hits)
        place.retrieve(hits)
        place.store(some(number))
        place.end(hits)

    assert place.left_by(use) == []
    assert place.counter("retrieves_failed") >= TIMES


def test_questions_that_are_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Malformed ones, of strangers, and those on which the agent's own bug comes to light."""
    stranger = AgentSocket(place.here.endpoint)
    wait_until(lambda: stranger.send([m.PREAMBLE, b"no message"]), "a connection")
    monkeypatch.setattr(Sessions, "open", _broken(ValueError("a bug")))

    def use(number: int) -> None:
        wrong = [m.ReleaseLocks(0, "r", (b"1", b"22"))] * BATCH
        for question in (*wrong, m.Lookup(0, "r", (b"1",))):
            (call,) = ask(place.scheduler, [question])
        assert isinstance(call.answer, m.Failure)
        blocks = m.Store(0, "r", (b"1",), (99,), 0)
        ask(place.worker, [blocks, replace(blocks, hashes=(b"1", b"22")), m.EndSession(0, "r")])
        for frames in ([m.PREAMBLE, b"no message"], [b"other"], [m.PREAMBLE] * 4):
            stranger.send(frames)
        while stranger.wait(0.0)[0]:
            assert [*stranger.received()]

    assert place.left_by(use) == []
    assert place.counter("wire_errors") >= 120
    stranger.close()


def test_a_greeting_that_fails_ends_no_agent(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peers, "add", _broken(ValueError("a bug")))
    stranger = AgentSocket(place.here.endpoint)
    hello = m.Hello(7, "e", "m", 1, None, "0")
    wait_until(lambda: stranger.send(encode(hello)), "a connection")
    try:
        wait_until(lambda: stranger.wait(0.1)[0], "an answer")
        (answer,) = map(decode_answer, stranger.received())
    finally:
        stranger.close()
    assert isinstance(answer, m.Failure)
    assert answer.call_id == 7
    place.look_up(["r:"])


def test_registrations(place: Place) -> None:
    """Those that succeed, and those whose memory cannot be mapped."""
    memory = place.engine.workers[0]._memory
    groups = memory.named(0, 1, 64)
    gone = tuple(replace(each, fd=1 << 20) for each in memory.storages)

    def register(number: int) -> None:
        (call,) = ask(place.worker, [m.RegisterKVCache(0, groups, gone)])
        assert isinstance(call.answer, m.Failure)
        (call,) = ask(place.worker, [m.RegisterKVCache(0, groups, memory.storages)])
        assert isinstance(call.answer, m.Done)

    assert place.left_by(register, 100) == []


def test_engines_and_tools_that_come_and_go(place: Place) -> None:
    """In the middle of a lookup; some schedulers come back as other engines."""

    def come_and_go(number: int) -> None:
        with Engine(place.here.endpoint, layers=1, num_blocks=8) as engine:
            engine.scheduler.begin_lookup("r", engine.chunks(block_hashes("p", 8)))
            if number % 2:
                engine.scheduler.link.rename("copy")
                link = engine.scheduler.link
                wait_until(lambda: link._greeting.engine_id.endswith("copy"), "a new name")
        control = ControlClient(place.here.endpoint, WAIT_S)
        control.ping()
        control.status()
        control.why("p")

    assert place.left_by(come_and_go, 20) == []


def test_redis_that_hangs(place: Place, redis_server: RedisServer) -> None:
    """Lookups end at their deadline; stores and loads time out."""
    redis_server.stop()

    def use(number: int) -> None:
        place.look_up(some(number))
        place.store(some(number))
        place.end(some(number))

    assert place.left_by(use, 10) == []
    assert place.counter("miss_redis_silent") + place.counter("miss_redis_error") >= TIMES


def test_redis_that_goes_and_comes(make: Callable[..., Place], redis_server: RedisServer) -> None:
    # How many are open otherwise depends on how fast they are.
    place = make(connections=1, network_threads=1)

    def use(number: int) -> None:
        place.store(some(number))
        place.look_up(some(number + 1))
        redis_server.kill()
        place.look_up(some(number))
        place.store(some(number + 2))
        redis_server.start()
        place.end([*some(number), *some(number + 1)])
        wait_until(lambda: place.here.plane.state.up, "Redis", WAIT_S)

    assert place.left_by(use, 4) == []
