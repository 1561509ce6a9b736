"""Writing behind: when chunks begin their way to Redis, and what they hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_redis.agent.timers import Timers
from lmcache_redis.agent.writes import Writes
from lmcache_redis.hostpool import Entry, HostPool
from lmcache_redis.keys import stripe_key
from lmcache_redis.metrics import Metrics
from lmcache_redis.resp.outcomes import CallOutcome, ExistsResult, WriteOutcome
from tests.agent.played import CHUNK_BYTES, HASHES, Device, Played


class Plane:
    """Plays a data plane: keeps what it is asked, and answers what the test lets it answer."""

    state = SimpleNamespace(up=True)

    def __init__(self) -> None:
        self.asked: list[tuple[Sequence[bytes], Callable[[ExistsResult], None]]] = []
        self.written: list[Any] = []
        self.done: Callable[[Any, WriteOutcome], None] | None = None

    def exists(
        self, keys: Sequence[bytes], deadline_s: float, done: Callable[[ExistsResult], None]
    ) -> None:
        assert time.monotonic() < deadline_s
        self.asked.append((keys, done))

    def write_all(self, ios: Sequence[Any], done: Callable[[Any, WriteOutcome], None]) -> None:
        self.written += ios
        self.done = done


class Queue:
    """A queue to such a plane, with every chunk of `HASHES` offered."""

    def __init__(self) -> None:
        self.plane, self.played = Plane(), Played(Device())
        core = self.played.core
        core.plane = self.plane
        core.config = SimpleNamespace(write_queue_limit_bytes=1000, op_timeout_s=10.0)
        core.chunk_io = lambda form, chunk_hash, entry, deadline_s: SimpleNamespace(
            key=entry.key, tag=entry, frame=SimpleNamespace(chunk_bytes=form.chunk_bytes)
        )
        self.writes = Writes(core)
        self.entries = self.played.hold(*HASHES)

    def offer(self) -> None:
        for name, entry in zip(HASHES, self.entries, strict=True):
            self.writes.offer(self.played.registration, name, entry)
        self.played.timers.run_due()

    def answer(self, result: ExistsResult) -> None:
        _, done = self.plane.asked.pop()
        done(result)
        self.played.run(lambda: not self.played.posted)

    def end(self, outcome: WriteOutcome) -> None:
        for io in self.plane.written:
            assert self.plane.done is not None
            self.plane.done(io, outcome)
        self.played.run(lambda: not len(self.writes))
        assert self.writes.queued_bytes == 0
        self.played.close()

    def written(self) -> list[Entry]:
        return [io.tag for io in self.plane.written]


def test_redis_is_asked_once_about_all_chunks_that_are_due_together() -> None:
    queue = Queue()
    queue.offer()
    assert [keys for keys, _ in queue.plane.asked] == [[stripe_key(name, 0) for name in HASHES]]
    assert queue.written() == []
    queue.answer(ExistsResult(CallOutcome.DONE, [True, False, True, False, False]))
    has, lacks = queue.entries[0:3:2], [queue.entries[n] for n in (1, 3, 4)]
    assert queue.written() == lacks
    assert [entry.persisted for entry in has] == [True, True]
    assert queue.writes.queued_bytes == 3 * CHUNK_BYTES
    queue.end(WriteOutcome.STORED)
    found = queue.played.metrics.snapshot()
    assert (found["stored_chunks"], found["skipped_chunks"]) == (3, 2)
    queue.offer()  # known to be there: not asked again
    assert (len(queue.writes), queue.plane.asked) == (0, [])


@pytest.mark.parametrize("outcome", [CallOutcome.TIMED_OUT, CallOutcome.UNAVAILABLE])
def test_where_redis_does_not_say_what_it_has_the_write_decides(outcome: CallOutcome) -> None:
    queue = Queue()
    queue.offer()
    queue.answer(ExistsResult(outcome))
    assert queue.written() == queue.entries
    queue.end(WriteOutcome.UNAVAILABLE)
    assert queue.played.metrics.snapshot()["drop_redis_error"] == len(HASHES)
    assert all(queue.played.pool.get(name) is not None for name in HASHES)
    queue.offer()  # the next store does so
    assert len(queue.plane.asked) == 1


def test_chunks_that_redis_was_asked_about_when_the_agent_stopped_are_counted() -> None:
    queue = Queue()
    queue.offer()
    queue.answer(ExistsResult(CallOutcome.CANCELLED))
    assert queue.written() == []
    queue.end(WriteOutcome.CANCELLED)
    assert queue.played.metrics.snapshot()["drop_shutdown"] == len(HASHES)


def test_a_chunk_that_is_discarded_while_redis_is_asked_is_not_written() -> None:
    queue = Queue()
    queue.offer()
    queue.played.pool.discard(queue.entries[0])
    queue.answer(ExistsResult(CallOutcome.DONE, [False] * len(HASHES)))
    assert queue.written() == queue.entries[1:]
    queue.end(WriteOutcome.STORED)


@pytest.mark.parametrize("on_host_cores", [True, False])
def test_chunks_wait_only_where_the_engine_computes_on_the_same_cores(on_host_cores: bool) -> None:
    queue = Queue()
    queue.played.registration.device.on_host_cores = on_host_cores
    queue.offer()
    assert len(queue.plane.asked) == (0 if on_host_cores else 1)
    queue.writes.begin_all()
    assert [len(keys) for keys, _ in queue.plane.asked] == [len(HASHES)]
    queue.answer(ExistsResult(CallOutcome.DONE, [True] * len(HASHES)))
    queue.end(WriteOutcome.STORED)


@pytest.mark.parametrize("broken", ["exists", "write_all"])
def test_a_write_that_cannot_begin_gives_back_what_it_held(broken: str) -> None:
    pool, timers, metrics = HostPool(2), Timers(), Metrics()
    entry = pool.reserve(b"key", 1)
    assert entry is not None
    pool.publish(entry)

    def bug(*_: object) -> None:
        raise RuntimeError("a bug")

    def answer_no(keys: Sequence[bytes], deadline_s: float, done: Any) -> None:
        done(ExistsResult(CallOutcome.DONE, [False]))

    posted: list[Callable[[], None]] = []
    plane = SimpleNamespace(state=SimpleNamespace(up=True), exists=answer_no, write_all=bug)
    setattr(plane, broken, bug)

    core = SimpleNamespace(
        pool=pool,
        timers=timers,
        metrics=metrics,
        config=SimpleNamespace(write_queue_limit_bytes=100, op_timeout_s=10.0),
        plane=plane,
        post=posted.append,
        chunk_io=lambda form, chunk_hash, entry, deadline_s: SimpleNamespace(
            key=entry.key, tag=entry, frame=SimpleNamespace(chunk_bytes=form.chunk_bytes)
        ),
    )
    writes = Writes(core)  # type: ignore[arg-type]
    registration = SimpleNamespace(
        form=SimpleNamespace(chunk_bytes=60), device=SimpleNamespace(on_host_cores=True)
    )
    writes.offer(registration, b"h", entry)  # type: ignore[arg-type]
    assert (len(writes), writes.queued_bytes, entry.pins) == (1, 60, 2)

    def begin() -> None:
        writes.begin_all()
        posted.pop()()

    with pytest.raises(RuntimeError, match="a bug"):
        begin()
    assert (len(writes), writes.queued_bytes, entry.pins) == (0, 0, 1)
    assert metrics.snapshot()["drop_redis_error"] == 1
