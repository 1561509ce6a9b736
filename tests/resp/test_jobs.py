# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_redis.resp import jobs as jobs_module
from lmcache_redis.resp.jobs import Job, Jobs, LoopThread, TaskQueue, backoff_s
from lmcache_redis.resp.transfers import Read
from lmcache_redis.tiers import CallOutcome, ChunkIO, ReadOutcome
from tests.resp.helpers import Chunk, wait_until


class Outcome(enum.Enum):
    GOOD = 1
    BAD = 2
    TIMED_OUT = 3
    UNAVAILABLE = 4
    CANCELLED = 5


class Sample(Job[Outcome]):
    __slots__ = ("answers", "jobs")
    good = Outcome.GOOD

    def __init__(self, jobs: Jobs, steps: int = 2, within_s: float = 60.0) -> None:
        super().__init__(steps, time.monotonic() + within_s)
        self.answers: list[Outcome] = []
        self.jobs = jobs
        self.nodes = (UP,)
        jobs.enter((self,))

    def leave(self, jobs: Jobs) -> None:
        assert jobs is self.jobs

    def answer(self, outcome: Outcome) -> None:
        self.answers.append(outcome)


class Up:
    is_up = True


UP = Up()


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    made = Jobs()
    made.timekeeper.start()
    yield made
    assert made.close(10)


def test_good_when_every_step_went_well(jobs: Jobs) -> None:
    job = Sample(jobs)
    assert jobs.begin_all([(job,)])
    assert jobs.begin_all([(job,)])
    jobs.end(job)
    assert job.answers == []
    jobs.end(job)
    assert job.answers == [Outcome.GOOD]
    assert not jobs._jobs


def test_an_answer_waits_for_steps_in_flight(jobs: Jobs) -> None:
    job = Sample(jobs)
    assert jobs.begin_all([(job,)])
    jobs.stop((job,), CallOutcome.CANCELLED)
    assert job.answers == []
    assert not jobs.begin_all([(job,)])
    assert jobs._jobs
    jobs.end(job)
    assert job.answers == [Outcome.CANCELLED]


def test_the_first_bad_outcome_stands(jobs: Jobs) -> None:
    job = Sample(jobs)
    assert jobs.begin_all([(job,)])
    assert jobs.begin_all([(job,)])
    jobs.end(job, Outcome.BAD)
    jobs.stop((job,), CallOutcome.TIMED_OUT)
    jobs.end(job, Outcome.UNAVAILABLE)
    assert job.answers == [Outcome.BAD]


def test_a_step_may_be_begun_again(jobs: Jobs) -> None:
    job = Sample(jobs, steps=1)
    assert jobs.begin_all([(job,)])
    jobs.release((job,))
    assert jobs.begin_all([(job,)])
    jobs.end(job)
    assert job.answers == [Outcome.GOOD]


def test_of_many_only_those_begin_that_have_not_ended(jobs: Jobs) -> None:
    late, ended, good = Sample(jobs, within_s=-1.0), Sample(jobs), Sample(jobs, steps=2)
    jobs.stop((ended,), CallOutcome.CANCELLED)
    assert jobs.begin_all([(late, 0), (good, 1), (ended, 2), (good, 3)]) == [(good, 1), (good, 3)]
    assert late.answers == [Outcome.TIMED_OUT]
    jobs.end(good)
    jobs.end(good)
    assert good.answers == [Outcome.GOOD]


def test_one_answer_whoever_comes_first(jobs: Jobs) -> None:
    for _ in range(200):
        job = Sample(jobs, steps=1)
        assert jobs.begin_all([(job,)])
        barrier = threading.Barrier(3)

        def meddle(action: object, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            action()  # type: ignore[operator]

        threads = [
            threading.Thread(target=meddle, args=(action,))
            for action in (
                lambda job=job: jobs.end(job),
                lambda job=job: jobs.stop((job,), CallOutcome.TIMED_OUT),
            )
        ]
        for thread in threads:
            thread.start()
        barrier.wait()
        jobs.stop_all(CallOutcome.UNAVAILABLE)
        for thread in threads:
            thread.join()
        assert len(job.answers) == 1


def test_a_stop_of_all_names_a_node_or_spares_a_kind(jobs: Jobs) -> None:
    class Spared(Sample):
        __slots__ = ()

    node = Up()
    here, elsewhere, spared = Sample(jobs), Sample(jobs), Spared(jobs)
    here.nodes = (UP, node)
    jobs.stop_all(CallOutcome.UNAVAILABLE, node=node)
    assert (here.answers, elsewhere.answers) == ([Outcome.UNAVAILABLE], [])
    jobs.stop_all(CallOutcome.CANCELLED, but=Spared)
    assert (elsewhere.answers, spared.answers) == ([Outcome.CANCELLED], [])
    jobs.stop_all(CallOutcome.CANCELLED)
    assert spared.answers == [Outcome.CANCELLED]


def test_a_transfer_that_has_ended_is_counted_and_forgotten(jobs: Jobs) -> None:
    ended: list[tuple[ChunkIO, ReadOutcome]] = []
    for outcome in (None, ReadOutcome.TORN):
        chunk = Chunk(1, 300, 300).io()
        job = Read(chunk, lambda *end: ended.append(end))
        jobs.transfers[chunk] = job
        assert jobs.begin_all([(job,)])
        jobs.end(job, outcome)
        assert ended.pop() == (chunk, outcome or ReadOutcome.LOADED)
        assert jobs.transfers == {}
        assert not hasattr(job, "chunk"), "a queue may still hold the job"
    assert jobs.counts[ReadOutcome.LOADED] == jobs.counts[ReadOutcome.TORN] == 1
    assert jobs.moved_bytes[ReadOutcome.LOADED] == 300


def test_a_failing_callback_harms_no_other(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Sample):
        __slots__ = ()

        def answer(self, outcome: Outcome) -> None:
            raise ZeroDivisionError

    failing, good = Failing(jobs), Sample(jobs)
    with caplog.at_level(logging.ERROR):
        jobs.stop((failing, good), CallOutcome.CANCELLED)
    assert "callback" in caplog.text
    assert good.answers == [Outcome.CANCELLED]
    assert not jobs._jobs


def test_the_late_are_stopped_in_time(jobs: Jobs) -> None:
    late = Sample(jobs, within_s=-1.0)
    second, first = Sample(jobs, within_s=0.03), Sample(jobs, within_s=0.01)
    wait_until(lambda: late.answers and first.answers and second.answers)
    assert time.monotonic() >= second.deadline
    assert not jobs._jobs


def test_what_cannot_be_tried_is_answered(jobs: Jobs) -> None:
    class Down:
        is_up = False

    job = Sample(jobs)
    job.nodes = (UP, Down())
    assert jobs.refuse((job,)) == [job]
    wait_until(lambda: job.answers == [Outcome.UNAVAILABLE])
    jobs.closing = True
    other = Sample(jobs)
    wait_until(lambda: other.answers == [Outcome.CANCELLED])


# ------------------------------------------------------------------- queues


def test_the_urgent_go_first() -> None:
    queue: TaskQueue[int] = TaskQueue()
    queue.put([1, 2])
    queue.put([3], urgent=True)
    assert queue.take_some(2) == [3, 1]
    queue.put([4], urgent=True)
    queue.put([3, 1], urgent=True)
    assert queue.take_some(5) == [4, 3, 1, 2]
    assert queue.take_some(5) == []
    queue.put([4])
    queue.close()
    assert not queue.wait()
    assert len(queue) == 0


# --------------------------------------------------------------- the timekeeper


def test_posts_run_until_it_is_closed() -> None:
    jobs, ran = Jobs(), threading.Event()
    jobs.timekeeper.start()
    jobs.post(ran.set)
    assert ran.wait(10)
    jobs.post(lambda: ran.clear())
    assert jobs.close(10)
    assert not ran.is_set()
    with pytest.raises(RuntimeError):
        jobs.post(ran.set)


def test_an_exception_of_a_caller_ends_no_deadline(
    jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR):
        jobs.post(fail)
        late = Sample(jobs, within_s=0.01)
        wait_until(lambda: late.answers)
    assert "ZeroDivisionError" in caplog.text


def test_a_deadline_that_failed_is_tried_again(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [1, 2, 3]
    stop = jobs.stop

    def fail_first(*given: Any) -> None:
        if failures:
            failures.pop()
            raise MemoryError
        stop(*given)

    monkeypatch.setattr(jobs, "stop", fail_first)
    late = Sample(jobs, within_s=0.01)
    wait_until(lambda: late.answers)
    assert not failures


# ------------------------------------------------------------------- threads


def test_pauses_double_up_to_the_longest_with_jitter() -> None:
    for failures, nominal in enumerate((0.1, 0.2, 0.4, 0.8, 1.0, 1.0)):
        assert nominal / 2 <= backoff_s(failures, 0.1, 1.0) <= nominal
    assert 1.0 <= backoff_s(10_000, 2.0, 1.0) <= 2.0
    assert len({backoff_s(0, 0.1, 1.0) for _ in range(20)}) == 20


def test_a_thread_goes_on_after_exceptions_and_notes_them_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(jobs_module.time, "sleep", pauses.append)
    steps = [MemoryError(), RuntimeError("can't start new thread"), True, ValueError(), False]

    def step() -> bool:
        result = steps.pop(0)
        if isinstance(result, Exception):
            raise result
        return bool(result)

    thread = LoopThread("lmcr-test", step)
    assert thread.ends_within(0.0)
    with caplog.at_level(logging.ERROR):
        thread.start()
        assert thread.ends_within(10)
    assert steps == []
    assert len(pauses) == 3
    assert pauses[2] <= pauses[0] * 2
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [
        MemoryError,
        ValueError,
    ]
