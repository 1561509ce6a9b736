# SPDX-License-Identifier: Apache-2.0
"""Worker threads, the hang detector, and the loop of an owner."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial

import pytest

from lmcache_redis.cache.threads import HangDetector, OneTimer, OwnerLoop, WorkerThreads
from tests.harness import wait_until


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Calls hang until this is set."""
    event = threading.Event()
    yield event
    event.set()


# ------------------------------------------------------------------ worker threads


def test_tasks_run_in_their_order_and_an_error_ends_no_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    threads = WorkerThreads("test", 1)
    ran: list[int] = []

    def run(number: int) -> None:
        if number == 1:
            raise AssertionError("a bug")
        ran.append(number)

    for number in range(4):
        threads.put(partial(run, number), dropped=lambda: ran.append(-1))
    wait_until(lambda: len(ran) == 3)
    assert ran == [0, 2, 3]
    assert "a bug" in caplog.text
    threads.stop()
    assert threads.join(10)


def test_threads_start_with_the_first_task() -> None:
    before = threading.active_count()
    threads = WorkerThreads("test", 3)
    assert threading.active_count() <= before
    threads.stop()
    assert threads.join(0)
    dropped: list[int] = []
    threads.put(lambda: None, partial(dropped.append, 1))
    assert dropped == [1]
    assert threading.active_count() <= before


def test_a_thread_that_cannot_be_started_costs_one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is then not done later, too: its memory may be in use again."""
    start, refused = threading.Thread.start, iter([True, False, True])

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("lmcache-redis-test") and next(refused, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    threads, ran = WorkerThreads("test", 2), list[int]()
    with pytest.raises(RuntimeError):
        threads.put(partial(ran.append, 0), partial(ran.append, -1))
    for number in (1, 2):  # on the first thread, and on one of two
        threads.put(partial(ran.append, number), partial(ran.append, -1))
    wait_until(lambda: len(ran) == 2)
    threads.stop()
    assert threads.join(10)
    assert sorted(ran) == [1, 2]


def test_a_stop_drops_what_waits_and_not_what_runs(release: threading.Event) -> None:
    threads = WorkerThreads("test", 1)
    ended: list[str] = []

    def hang() -> None:
        release.wait(30)
        ended.append("ran")

    threads.put(hang, partial(ended.append, "dropped the first"))
    threads.put(hang, partial(ended.append, "dropped"))
    wait_until(lambda: len(threads) == 1)
    threads.stop()
    assert ended == ["dropped"]
    assert not threads.join(0.05)
    release.set()
    assert threads.join(10)
    assert ended == ["dropped", "ran"]


def test_what_is_late_is_dropped(release: threading.Event) -> None:
    threads = WorkerThreads("test", 1)
    ended: list[str] = []
    threads.put(lambda: bool(release.wait(30)), lambda: None)
    wait_until(lambda: not len(threads))
    now_s = time.monotonic()
    threads.put(lambda: None, partial(ended.append, "late"), until_s=now_s)
    threads.put(partial(ended.append, "in time"), lambda: None, until_s=now_s + 60)
    threads.put(partial(ended.append, "whenever"), lambda: None)
    wait_until(lambda: time.monotonic() > now_s)
    threads.drop(time.monotonic())
    assert ended == ["late"]
    release.set()
    wait_until(lambda: len(ended) == 3)
    assert ended == ["late", "in time", "whenever"]
    threads.stop()
    assert threads.join(10)


def test_what_has_run_is_kept_no_longer() -> None:
    """It holds slots, and the next task may come much later."""

    class Task:
        def __call__(self) -> None:
            pass

    threads, task = WorkerThreads("test", 1), Task()
    kept = weakref.ref(task)
    threads.put(task, lambda: None)
    del task
    wait_until(lambda: kept() is None)
    threads.stop()
    assert threads.join(10)


def test_a_drain_waits_for_what_is_queued(release: threading.Event) -> None:
    threads, ran = WorkerThreads("test", 1), list[int]()
    threads.put(partial(release.wait, 30), lambda: None)
    threads.put(partial(ran.append, 1), lambda: None)
    threading.Timer(0.05, release.set).start()
    threads.drain(30)
    assert ran == [1]
    threads.stop()
    assert threads.join(10)


def test_a_low_priority_is_for_the_worker_threads_only() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    threads = WorkerThreads("test", 1, nice=7)
    found: list[int] = []
    threads.put(lambda: found.append(os.nice(0)), lambda: None)
    wait_until(lambda: found)
    assert found == [min(before + 7, 19)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    threads.stop()
    assert threads.join(10)


# ------------------------------------------------------------------ the detector


class Watched:
    """A detector, and a record of its callbacks."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.detector = HangDetector("test", self._hang)
        self.threads: list[threading.Thread] = []

    def _hang(self) -> None:
        assert self.detector.reason
        self.calls.append("hang")

    def begin(self, release: threading.Event, limit_s: float = 0.1) -> None:
        """Makes a call, on another thread, that returns when the event is set."""
        begun = threading.Event()

        def call() -> bool:
            begun.set()
            return release.wait(30)

        run = partial(self.detector.run, call, "a read", limit_s)
        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()
        assert begun.wait(30)


@pytest.fixture
def watched(release: threading.Event) -> Iterator[Watched]:
    watched = Watched()
    yield watched
    release.set()
    for thread in watched.threads:
        thread.join(30)
    assert watched.detector.close(30)


def test_what_fails_when_a_call_hangs_does_not_end_the_watch(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        watched.calls.append("hang")
        raise ValueError("a bug")

    monkeypatch.setattr(watched.detector, "_on_hang", fail)
    for number in (1, 2):
        release = threading.Event()
        watched.begin(release)
        wait_until(lambda: len(watched.calls) == number)  # noqa: B023
        release.set()
        wait_until(lambda: not watched.detector.reason)
    assert "a bug" in caplog.text


def test_calls_give_their_results_and_errors(watched: Watched) -> None:
    assert watched.detector.run(lambda: 7, "a read", 60) == 7
    with pytest.raises(LookupError):
        watched.detector.run(lambda: {}["key"], "a read", 60)
    assert watched.detector.reason == ""
    assert watched.calls == []


def test_no_call_is_begun_until_all_have_returned(
    watched: Watched, release: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    other = threading.Event()
    watched.begin(other, limit_s=60)
    watched.begin(release)
    wait_until(lambda: watched.detector.reason)
    assert watched.detector.reason == "a read has not returned within 0.1 s"
    assert watched.detector.run(lambda: 1, "a read", 60) is None
    release.set()
    watched.threads[1].join(30)
    assert watched.detector.run(lambda: 1, "a read", 60) is None, "one is still in flight"
    assert watched.calls == ["hang"]
    other.set()
    wait_until(lambda: not watched.detector.reason)
    assert watched.detector.run(lambda: 1, "a read", 60) == 1
    assert watched.calls == ["hang"]
    assert caplog.text.count("the test is down: a read has not returned") == 1
    assert caplog.text.count("the test is back") == 1


def test_a_shorter_limit_is_not_behind_a_longer_one(
    watched: Watched, release: threading.Event
) -> None:
    watched.begin(release, limit_s=600)
    watched.begin(release, limit_s=0.05)
    wait_until(lambda: watched.detector.reason)


@pytest.mark.parametrize("limit_s", [60, 0.02])
def test_close_waits_so_long_and_begins_no_call(release: threading.Event, limit_s: float) -> None:
    watched = Watched()
    watched.begin(release, limit_s)
    assert not watched.detector.close(0.1)
    assert watched.detector.run(lambda: 1, "a read", 60) is None


def test_close_does_not_wait_for_what_hangs(release: threading.Event) -> None:
    watched = Watched()
    watched.begin(release, 0.02)
    assert not watched.detector.close(600)
    assert watched.calls == ["hang"]


def test_close_waits_for_the_last_call(release: threading.Event) -> None:
    watched = Watched()
    watched.begin(release, 60)
    threading.Timer(0.05, release.set).start()
    assert watched.detector.close(60)
    assert watched.detector.close(0)


# ------------------------------------------------------------------ the owner's loop


def test_timers_run_in_order_and_only_when_due() -> None:
    now = 1000.0
    loop, ran = OwnerLoop(lambda: None, lambda: now), []
    loop.at(now - 1, lambda: ran.append("second"))
    loop.at(now - 2, lambda: ran.append("first"))
    cancelled = loop.at(now - 3, lambda: ran.append("never"))
    later = loop.after(100, lambda: ran.append("later"))
    cancelled.cancel()
    assert loop.run_due() == 1.0
    assert ran == ["first", "second"]
    later.cancel()
    loop.at(now + 0.5, lambda: None)
    assert loop.run_due() == pytest.approx(0.5)


def test_an_action_that_fails_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    woken: list[bool] = []
    loop, ran = OwnerLoop(lambda: woken.append(True)), []

    def bug() -> None:
        raise RuntimeError("a bug")

    for put in (loop.post, lambda action: loop.after(0, action)):
        put(bug)
        put(lambda: ran.append(True))
    loop.post(lambda: loop.post(lambda: ran.append(True)))
    loop.run_posted()
    loop.run_due()
    assert ran == [True, True], "what an action posts waits for the next turn"
    loop.run_posted()
    assert len(ran) == 3
    assert len(woken) == 4
    assert caplog.text.count("RuntimeError: a bug") == 2


def test_what_runs_again_and_again_survives_its_bugs() -> None:
    now = 1000.0
    loop, ran = OwnerLoop(lambda: None, lambda: now), []

    def bug() -> None:
        ran.append(now)
        raise RuntimeError("a bug")

    loop.every(10, bug)
    first = now
    for passed in (0, 9, 10, 19, 20):
        now = first + passed
        loop.run_due()
    assert ran == [first + 10, first + 20]


def test_one_timer_is_set_earlier_and_not_later() -> None:
    clock, ran = [0.0], list[float]()
    loop = OwnerLoop(lambda: None, lambda: clock[0])
    timer = OneTimer(loop, lambda: ran.append(clock[0]))
    timer.fire_in(5.0)
    timer.fire_by(9.0)
    timer.fire_by(3.0)
    for clock[0] in (2.0, 3.0, 5.0, 9.0):
        loop.run_due()
    assert ran == [3.0]
    timer.fire_in(2.0)
    clock[0] = 11.0
    loop.run_due()
    assert ran == [3.0, 11.0], "it is set again and again"
