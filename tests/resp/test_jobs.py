from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Iterator

import pytest

from lmcache_redis.resp.jobs import Job, Jobs, Stop
from tests.resp.helpers import wait_until


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
        now = time.monotonic()
        super().__init__(steps, now + within_s, now)
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
    assert made.timekeeper.close(10)


def test_good_when_every_step_went_well(jobs: Jobs) -> None:
    job = Sample(jobs)
    assert jobs.begin(job)
    assert jobs.begin(job)
    jobs.end(job)
    assert job.answers == []
    jobs.end(job)
    assert job.answers == [Outcome.GOOD]
    assert jobs.wait_empty(0)


def test_an_answer_waits_for_steps_in_flight(jobs: Jobs) -> None:
    job = Sample(jobs)
    assert jobs.begin(job)
    jobs.stop((job,), Stop.CANCELLED)
    assert job.answers == []
    assert not jobs.begin(job)
    assert not jobs.wait_empty(0)
    jobs.end(job)
    assert job.answers == [Outcome.CANCELLED]


def test_the_first_bad_outcome_stands(jobs: Jobs) -> None:
    job = Sample(jobs)
    assert jobs.begin(job)
    assert jobs.begin(job)
    jobs.end(job, Outcome.BAD)
    jobs.stop((job,), Stop.TIMED_OUT)
    jobs.end(job, Outcome.UNAVAILABLE)
    assert job.answers == [Outcome.BAD]


def test_a_step_may_be_begun_again(jobs: Jobs) -> None:
    job = Sample(jobs, steps=1)
    assert jobs.begin(job)
    jobs.release((job,))
    assert jobs.begin(job)
    jobs.end(job)
    assert job.answers == [Outcome.GOOD]


def test_of_many_only_those_begin_that_have_not_ended(jobs: Jobs) -> None:
    late, ended, good = Sample(jobs, within_s=-1.0), Sample(jobs), Sample(jobs, steps=2)
    jobs.stop((ended,), Stop.CANCELLED)
    assert jobs.begin_all([(late, 0), (good, 1), (ended, 2), (good, 3)]) == [(good, 1), (good, 3)]
    assert late.answers == [Outcome.TIMED_OUT]
    jobs.end(good)
    jobs.end(good)
    assert good.answers == [Outcome.GOOD]


def test_one_answer_whoever_comes_first(jobs: Jobs) -> None:
    for _ in range(200):
        job = Sample(jobs, steps=1)
        assert jobs.begin(job)
        barrier = threading.Barrier(3)

        def meddle(action: object, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            action()  # type: ignore[operator]

        threads = [
            threading.Thread(target=meddle, args=(action,))
            for action in (
                lambda job=job: jobs.end(job),
                lambda job=job: jobs.stop((job,), Stop.TIMED_OUT),
            )
        ]
        for thread in threads:
            thread.start()
        barrier.wait()
        jobs.stop_all(Stop.UNAVAILABLE)
        for thread in threads:
            thread.join()
        assert len(job.answers) == 1


def test_a_failing_callback_harms_no_other(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Sample):
        __slots__ = ()

        def answer(self, outcome: Outcome) -> None:
            raise ZeroDivisionError

    failing, good = Failing(jobs), Sample(jobs)
    with caplog.at_level(logging.ERROR):
        jobs.stop((failing, good), Stop.CANCELLED)
    assert "callback" in caplog.text
    assert good.answers == [Outcome.CANCELLED]
    assert jobs.wait_empty(0)


def test_the_late_are_stopped_in_time(jobs: Jobs) -> None:
    late = Sample(jobs, within_s=-1.0)
    second, first = Sample(jobs, within_s=0.03), Sample(jobs, within_s=0.01)
    wait_until(lambda: late.answers and first.answers and second.answers)
    assert time.monotonic() >= second.deadline
    assert jobs.wait_empty(0)


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
