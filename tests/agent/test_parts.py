"""The agent's parts by themselves: timers, copies, fills, sessions."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

import pytest

from lmcache_redis import messages as m
from lmcache_redis.agent.copies import CopyOutcome, CopyThreads
from lmcache_redis.agent.fills import Fills
from lmcache_redis.agent.sessions import Sessions, Tally
from lmcache_redis.agent.stores import StoreJob
from lmcache_redis.agent.timers import Timers
from lmcache_redis.agent.writes import Writes
from lmcache_redis.errors import DeviceError
from lmcache_redis.hostpool import EntryState, HostPool
from lmcache_redis.metrics import Metrics


def test_timers_run_in_order_and_only_when_due() -> None:
    timers, ran = Timers(), []
    now = time.monotonic()
    timers.at(now - 1, lambda: ran.append("second"))
    timers.at(now - 2, lambda: ran.append("first"))
    cancelled = timers.at(now - 3, lambda: ran.append("never"))
    later = timers.after(100, lambda: ran.append("later"))
    cancelled.cancel()
    assert timers.run_due() == 1.0
    assert ran == ["first", "second"]
    later.cancel()
    timers.at(time.monotonic() + 0.5, lambda: None)
    assert 0 < timers.run_due() <= 0.5


def test_every_copy_is_reported_once_whatever_it_does() -> None:
    copies = CopyThreads(1)
    outcomes: dict[str, CopyOutcome] = {}
    reported = threading.Event()

    def report(name: str, last: bool = False) -> object:
        def told(outcome: CopyOutcome) -> None:
            assert name not in outcomes
            outcomes[name] = outcome
            if last:
                reported.set()

        return told

    def fails() -> CopyOutcome:
        raise DeviceError("bounds")

    def breaks() -> CopyOutcome:
        raise ZeroDivisionError

    copies.scatter("cpu", fails, report("fails"))  # type: ignore[arg-type]
    copies.scatter("cpu", breaks, report("breaks"))  # type: ignore[arg-type]
    copies.scatter("cpu", lambda: CopyOutcome.DONE, report("done", last=True))  # type: ignore[arg-type]
    assert reported.wait(10)
    copies.close(10)
    copies.scatter("cpu", lambda: CopyOutcome.DONE, report("late"))  # type: ignore[arg-type]
    assert outcomes == {
        "fails": CopyOutcome.FAILED,
        "breaks": CopyOutcome.FAILED,
        "done": CopyOutcome.DONE,
        "late": CopyOutcome.CANCELLED,
    }


def test_a_scatter_never_waits_for_gathers_and_the_rest_is_cancelled() -> None:
    copies = CopyThreads(1)
    running, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    def wait() -> CopyOutcome:
        running.set()
        go_on.wait(10)
        return CopyOutcome.DONE

    def named(name: str) -> CopyOutcome:
        order.append(name)
        return CopyOutcome.DONE

    copies.gather("cpu", wait, lambda outcome: None)
    assert running.wait(10)
    copies.gather("cpu", lambda: named("gather"), lambda outcome: ended.set())
    scattered = threading.Event()
    copies.scatter("cpu", lambda: named("scatter"), lambda outcome: scattered.set())
    assert scattered.wait(10)
    assert copies.backlog == 1
    go_on.set()
    assert ended.wait(10)
    assert order == ["scatter", "gather"]
    running.clear()
    go_on.clear()
    copies.gather("cpu", wait, lambda outcome: None)
    assert running.wait(10)
    cancelled: list[CopyOutcome] = []
    copies.gather("cpu", lambda: named("never"), cancelled.append)
    go_on.set()
    copies.close(10)
    assert cancelled in ([CopyOutcome.CANCELLED], [CopyOutcome.DONE])
    assert ("never" in order) == (cancelled == [CopyOutcome.DONE])


def test_places_do_not_wait_for_each_other() -> None:
    copies = CopyThreads(1)
    running, go_on, there = threading.Event(), threading.Event(), threading.Event()

    def wait() -> CopyOutcome:
        running.set()
        go_on.wait(10)
        return CopyOutcome.DONE

    outcomes: list[CopyOutcome] = []
    copies.scatter("GPU-1", wait, outcomes.append)
    assert running.wait(10)
    copies.scatter("GPU-1", lambda: CopyOutcome.DONE, outcomes.append)
    copies.scatter("GPU-2", lambda: CopyOutcome.DONE, lambda outcome: there.set())
    assert there.wait(10), "one GPU waited for the other"
    assert outcomes == []
    go_on.set()
    copies.close(10)
    assert len(outcomes) == 2
    copies.gather("GPU-3", lambda: CopyOutcome.DONE, outcomes.append)
    assert outcomes[-1] is CopyOutcome.CANCELLED


def test_only_gathers_give_way_to_the_engine() -> None:
    copies = CopyThreads(1)
    nice: dict[str, int] = {}

    def look(name: str) -> CopyOutcome:
        nice[name] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return CopyOutcome.DONE

    done = [threading.Event(), threading.Event()]
    copies.scatter("cpu", lambda: look("scatter"), lambda outcome: done[0].set())
    copies.gather("cpu", lambda: look("gather"), lambda outcome: done[1].set())
    assert all(event.wait(10) for event in done)
    copies.close(10)
    here = os.getpriority(os.PRIO_PROCESS, 0)
    assert nice == {"scatter": here, "gather": min(here + 10, 19)}


def test_a_fill_tells_all_watchers_and_keeps_their_pins() -> None:
    pool = HostPool(4)
    fills = Fills(pool)
    entry = fills.begin(b"key", 2)
    assert entry is not None
    assert fills.begin(b"other", 3) is None
    told: list[tuple[str, bool]] = []
    for name in "ab":
        pool.pin(entry)
        fills.watch(entry, lambda ready, name=name: told.append((name, ready)))  # type: ignore[misc]
    assert fills.end(entry, filled=True)
    assert told == [("a", True), ("b", True)]
    assert pool.pinned_slots == 2
    pool.unpin(entry)
    pool.unpin(entry)
    assert pool.pinned_slots == 0
    assert pool.used_slots == 2
    pool.audit()


def test_a_fill_that_fails_leaves_the_pool_when_the_last_pin_goes() -> None:
    pool = HostPool(4)
    fills = Fills(pool)
    entry = fills.begin(b"key", 2)
    assert entry is not None
    pool.pin(entry)
    fills.watch(entry, lambda ready: pool.unpin(entry))
    assert not fills.end(entry, filled=False)
    assert pool.free_slots == 4
    assert b"key" not in pool
    pool.audit()


def test_a_fill_that_nobody_watches_any_more_is_cancelled() -> None:
    pool = HostPool(4)
    fills = Fills(pool)
    entry = fills.begin(b"key", 2)
    assert entry is not None
    cancelled: list[bool] = []
    fills.on_abandoned(entry, lambda: cancelled.append(True))
    watchers = [lambda ready: None, lambda ready: None]
    for watcher in watchers:
        fills.watch(entry, watcher)
    fills.unwatch(entry, watchers[0])
    assert not cancelled
    fills.unwatch(entry, watchers[1])
    fills.unwatch(entry, watchers[1])
    assert cancelled == [True]
    fills.end(entry, filled=False)
    pool.audit()


def test_sessions_give_every_pin_back_once() -> None:
    pool = HostPool(8)
    sessions = Sessions(pool, timeout_s=10)
    session = sessions.open(("engine", "request"), now_s=0.0)
    entries = []
    for number in range(3):
        entry = pool.reserve(bytes([number]), 2)
        assert entry is not None
        pool.publish(entry)
        session.hold((0, bytes([number])), entry)
        entries.append(entry)
    pool.pin(entries[0])
    session.hold((0, b"\0"), entries[0])  # a second lookup found it again
    assert entries[0].pins == 1
    taken = session.take((0, b"\1"))
    assert taken is entries[1]
    assert session.take((0, b"\1")) is None
    assert session.release(b"\0") == 1
    assert session.release(b"\0") == 0
    assert sessions.expired(5.0) == []
    assert sessions.expired(11.0) == [session]
    session.busy = 1
    assert sessions.expired(11.0) == []
    sessions.end(session)
    assert len(sessions) == 1  # a copy is still in progress
    session.busy = 0
    sessions.settle(session)
    assert len(sessions) == 0
    assert pool.pinned_slots == 2  # what was taken
    pool.unpin(entries[1])
    assert pool.pinned_slots == 0
    pool.audit()


def test_a_session_cancels_its_lookup_when_it_ends() -> None:
    sessions = Sessions(HostPool(1), timeout_s=10)
    session = sessions.open(("engine", "request"), now_s=0.0)
    cancelled: list[bool] = []
    session.cancel_lookup = lambda: cancelled.append(True)
    sessions.end(session)
    assert cancelled == [True]
    assert len(sessions) == 0


def test_a_write_that_cannot_begin_gives_back_what_it_held() -> None:
    pool, timers, metrics = HostPool(2), Timers(), Metrics()
    entry = pool.reserve(b"key", 1)
    assert entry is not None
    pool.publish(entry)

    def write_all(ios: object, done: object) -> None:
        raise RuntimeError("a bug")

    core = SimpleNamespace(
        pool=pool,
        timers=timers,
        metrics=metrics,
        config=SimpleNamespace(write_queue_limit_bytes=100),
        plane=SimpleNamespace(state=SimpleNamespace(up=True), write_all=write_all),
        chunk_io=lambda form, chunk_hash, entry, deadline_s: SimpleNamespace(
            tag=entry, frame=SimpleNamespace(chunk_bytes=form.chunk_bytes)
        ),
    )
    writes = Writes(core)  # type: ignore[arg-type]
    writes.offer(SimpleNamespace(chunk_bytes=60), b"h", entry)  # type: ignore[arg-type]
    assert (len(writes), writes.queued_bytes, entry.pins) == (1, 60, 2)
    with pytest.raises(RuntimeError, match="a bug"):
        writes.begin_all()
    assert (len(writes), writes.queued_bytes, entry.pins) == (0, 0, 1)
    assert metrics.snapshot()["drop_redis_error"] == 1


@pytest.mark.parametrize("breaks", ["before the chunk is kept", "after it"])
def test_a_store_of_which_a_step_breaks_is_answered(breaks: str) -> None:
    """What the broken step held comes back, and the session is no longer busy."""
    pool = HostPool(2)
    fills = Fills(pool)
    broken, good = fills.begin(b"broken", 1), fills.begin(b"good", 1)
    assert broken is not None
    assert good is not None
    session = SimpleNamespace(busy=1, tally=Tally())
    answers: list[object] = []

    def bug(*_: object) -> None:
        raise RuntimeError("a bug")

    def finish_part(of: SimpleNamespace) -> None:
        of.busy -= 1

    metrics = SimpleNamespace(count=bug)
    core = SimpleNamespace(
        pool=pool, fills=fills, metrics=metrics, disk=None, finish_part=finish_part
    )
    job = StoreJob(
        core,  # type: ignore[arg-type]
        SimpleNamespace(offer=bug),  # type: ignore[arg-type]
        session,  # type: ignore[arg-type]
        SimpleNamespace(form=SimpleNamespace(chunk_bytes=60)),  # type: ignore[arg-type]
        [b"broken", b"good"],
        SimpleNamespace(),  # type: ignore[arg-type]
        answers.append,
    )
    job._left = 2
    job._unread = {0, 1}
    if breaks == "after it":
        metrics.count = Metrics().count
    with pytest.raises(RuntimeError, match="a bug"):
        job._gathered(0, broken, CopyOutcome.DONE)
    metrics.count = Metrics().count
    assert (session.busy, answers) == (1, [])
    job._gathered(1, good, CopyOutcome.FAILED)
    kept = breaks == "after it"
    assert answers == [m.StoreResult(0, int(kept), 0, 2 - kept)]
    assert session.busy == 0
    assert pool.pinned_slots == 0
    assert (broken.state is EntryState.READY) == kept
    pool.audit()


class StagedDevice:
    """A device that has read the blocks before it has filled the slots."""

    def __init__(self) -> None:
        self.is_read, self.go_on = threading.Event(), threading.Event()

    def gather(
        self,
        block_ids: object,
        slots: object,
        stripe_bytes: int,
        event: object,
        read: object,
        until_ns: int,
    ) -> None:
        self.is_read.wait(10)
        read()  # type: ignore[operator]
        self.go_on.wait(10)


@pytest.mark.parametrize("lease_s", [10.0, 0.05])
def test_the_engine_has_its_blocks_back_when_they_were_read(lease_s: float) -> None:
    """And not when the slots are full; what was read past the lease is thrown away."""
    pool, metrics, posted = HostPool(1), Metrics(), []
    device, copies, session = StagedDevice(), CopyThreads(1), SimpleNamespace(busy=0, tally=Tally())
    answers: list[object] = []

    def finish_part(of: SimpleNamespace) -> None:
        of.busy -= 1

    def run_posted(until: object) -> None:
        deadline = time.monotonic() + 10
        while not until():  # type: ignore[operator]
            assert time.monotonic() < deadline
            while posted:
                posted.pop(0)()
            time.sleep(0.001)

    form = SimpleNamespace(
        key=lambda chunk_hash: chunk_hash,
        stripe_count=1,
        stripe_payload_bytes=64,
        chunk_bytes=64,
        blocks_per_chunk=1,
    )
    core = SimpleNamespace(
        pool=pool,
        fills=Fills(pool),
        metrics=metrics,
        copies=copies,
        disk=None,
        config=SimpleNamespace(op_timeout_s=1.0),
        plane=SimpleNamespace(
            exists=lambda keys, deadline_s, done: done(SimpleNamespace(present=[False]))
        ),
        post=posted.append,
        slots_of=lambda form, entry: [],
        finish_part=finish_part,
    )
    job = StoreJob(
        core,  # type: ignore[arg-type]
        SimpleNamespace(offer=lambda *_: None),  # type: ignore[arg-type]
        session,  # type: ignore[arg-type]
        SimpleNamespace(form=form, device=device, place="GPU-0"),  # type: ignore[arg-type]
        [b"chunk"],
        SimpleNamespace(  # type: ignore[arg-type]
            lease_ns=time.monotonic_ns() + int(lease_s * 1e9), block_ids=(0,), event=None
        ),
        answers.append,
    )
    job.start()
    run_posted(lambda: pool.get(b"chunk") is not None)
    in_time = lease_s > 1
    if not in_time:
        time.sleep(lease_s)
    assert answers == []
    device.is_read.set()
    if in_time:
        run_posted(lambda: answers)
        assert answers == [m.StoreResult(0, 1, 0, 0)]
        assert session.busy == 1
        entry = pool.get(b"chunk")
        assert entry is not None
        assert entry.state is EntryState.FILLING
    device.go_on.set()
    run_posted(lambda: session.busy == 0)
    assert answers == [m.StoreResult(0, int(in_time), 0, int(not in_time))]
    assert (session.tally.stored, session.tally.dropped) == (int(in_time), int(not in_time))
    assert (pool.get(b"chunk") is not None) == in_time
    assert pool.pinned_slots == 0
    copies.close(10)
    pool.audit()
