from __future__ import annotations

import enum
import logging
import threading
import time

import pytest

from lmcache_redis.resp.jobs import Job, JobRegistry, Stop
from lmcache_redis.resp.queues import TaskQueue, Timekeeper
from tests.resp.helpers import wait_until


class Outcome(enum.Enum):
    GOOD = 1
    BAD = 2
    TIMED_OUT = 3
    UNAVAILABLE = 4
    CANCELLED = 5


class Sample(Job[Outcome]):
    __slots__ = ("answers",)

    def __init__(self, registry: JobRegistry, steps: int = 2, within_s: float = 60.0) -> None:
        self.answers: list[Outcome] = []
        super().__init__(steps, Outcome.GOOD, time.monotonic() + within_s, registry)
        registry.add((self,))

    def _answer(self, outcome: Outcome) -> None:
        self.answers.append(outcome)


@pytest.fixture
def registry() -> JobRegistry:
    return JobRegistry()


def test_good_when_every_step_went_well(registry: JobRegistry) -> None:
    job = Sample(registry)
    assert job.begin()
    assert job.begin()
    job.end()
    assert job.answers == []
    job.end()
    assert job.answers == [Outcome.GOOD]
    assert registry.wait_empty(0)


def test_an_answer_waits_for_steps_under_way(registry: JobRegistry) -> None:
    job = Sample(registry)
    assert job.begin()
    job.stop(Stop.CANCELLED)
    assert job.answers == []
    assert not job.begin()
    assert not registry.wait_empty(0)
    job.end()
    assert job.answers == [Outcome.CANCELLED]


def test_the_first_bad_outcome_stands(registry: JobRegistry) -> None:
    job = Sample(registry)
    assert job.begin()
    assert job.begin()
    job.end(Outcome.BAD)
    job.stop(Stop.TIMED_OUT)
    job.end(Outcome.UNAVAILABLE)
    assert job.answers == [Outcome.BAD]


def test_released_steps_are_advanced_later(registry: JobRegistry) -> None:
    job = Sample(registry)
    for _ in range(2):
        assert job.begin()
        job.release()
    job.advance()
    job.advance()
    job.advance(Outcome.BAD)
    assert job.answers == [Outcome.GOOD]


def test_a_step_may_be_begun_again(registry: JobRegistry) -> None:
    job = Sample(registry, steps=1)
    assert job.begin()
    job.release()
    assert job.begin()
    job.end()
    assert job.answers == [Outcome.GOOD]


def test_a_late_job_is_not_begun(registry: JobRegistry) -> None:
    job = Sample(registry, within_s=-1.0)
    assert not job.begin()
    assert job.answers == [Outcome.TIMED_OUT]


def test_one_answer_whoever_comes_first(registry: JobRegistry) -> None:
    for _ in range(200):
        job = Sample(registry, steps=1)
        assert job.begin()
        barrier = threading.Barrier(3)

        def meddle(action: object, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            action()  # type: ignore[operator]

        threads = [
            threading.Thread(target=meddle, args=(action,))
            for action in (job.end, lambda job=job: job.stop(Stop.TIMED_OUT))
        ]
        for thread in threads:
            thread.start()
        barrier.wait()
        registry.stop_all(Stop.UNAVAILABLE)
        for thread in threads:
            thread.join()
        assert len(job.answers) == 1


def test_a_failing_callback_harms_nobody(
    registry: JobRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Sample):
        __slots__ = ()

        def _answer(self, outcome: Outcome) -> None:
            raise ZeroDivisionError

    job = Failing(registry)
    with caplog.at_level(logging.ERROR):
        job.stop(Stop.CANCELLED)
    assert "callback" in caplog.text
    assert registry.wait_empty(0)


def test_expiry_stops_the_late_and_names_the_next(registry: JobRegistry) -> None:
    late = Sample(registry, within_s=-1.0)
    soon, later = Sample(registry, within_s=5.0), Sample(registry, within_s=9.0)
    assert registry.expire(time.monotonic()) == soon.deadline
    assert late.answers == [Outcome.TIMED_OUT]
    assert registry.expire(later.deadline) is None
    assert registry.count(Sample) == 0


def test_the_urgent_go_first() -> None:
    queue: TaskQueue[int] = TaskQueue()
    queue.put([1, 2])
    queue.put([3], urgent=True)
    assert [queue.take(wait=False) for _ in range(4)] == [3, 1, 2, None]
    queue.put([4])
    queue.close()
    assert queue.take() is None
    assert queue.closed


def test_a_waiting_thread_gets_a_task_and_the_end() -> None:
    queue: TaskQueue[int] = TaskQueue()
    got: list[int | None] = []

    def consume() -> None:
        while (task := queue.take()) is not None:
            got.append(task)
        got.append(None)

    thread = threading.Thread(target=consume)
    thread.start()
    queue.put([1])
    wait_until(lambda: got == [1])
    queue.close()
    thread.join()
    assert got == [1, None]


def test_the_timekeeper_comes_in_time_and_runs_posts(registry: JobRegistry) -> None:
    keeper = Timekeeper(registry.expire)
    keeper.start()
    first, second = Sample(registry, within_s=0.01), Sample(registry, within_s=0.03)
    for job in (second, first):
        keeper.watch(job.deadline)
    wait_until(lambda: first.answers and second.answers)
    assert time.monotonic() >= second.deadline
    ran = threading.Event()
    keeper.post(ran.set)
    assert ran.wait(10)
    assert keeper.close(10)
    with pytest.raises(RuntimeError):
        keeper.post(ran.set)
