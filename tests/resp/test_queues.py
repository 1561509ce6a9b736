from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from lmcache_redis.resp.queues import TaskQueue, Timekeeper
from tests.resp.helpers import wait_until


def test_the_urgent_go_first() -> None:
    queue: TaskQueue[int] = TaskQueue()
    queue.put([1, 2])
    queue.put([3], urgent=True)
    assert queue.take_some(2) == [3, 1]
    queue.put([4], urgent=True)
    queue.put_back([3, 1])
    assert queue.take_some(5) == [4, 3, 1, 2]
    assert queue.take_some(5) == []
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


# --------------------------------------------------------------- the timekeeper


class Deadlines:
    """What a timekeeper watches. failures: how often looking them up fails first."""

    def __init__(self) -> None:
        self.left: list[float] = []
        self.failures = 0
        self.keeper = Timekeeper(self._expire)

    def _expire(self, now: float) -> float | None:
        if self.failures:
            self.failures -= 1
            raise MemoryError
        self.left = [each for each in self.left if each > now]
        return min(self.left, default=None)

    def add(self, *deadlines: float) -> None:
        self.left += deadlines
        for each in deadlines:
            self.keeper.watch(each)


@pytest.fixture
def deadlines() -> Iterator[Deadlines]:
    made = Deadlines()
    made.keeper.start()
    yield made
    assert made.keeper.close(10)


def test_posts_run_until_it_is_closed(deadlines: Deadlines) -> None:
    ran = threading.Event()
    deadlines.keeper.post(ran.set)
    assert ran.wait(10)
    deadlines.keeper.post(lambda: ran.clear())
    assert deadlines.keeper.close(10)
    assert not ran.is_set()
    with pytest.raises(RuntimeError):
        deadlines.keeper.post(ran.set)


def test_deadlines_are_kept_in_any_order(deadlines: Deadlines) -> None:
    now = time.monotonic()
    deadlines.add(now + 0.02, now + 0.01, now - 1.0, now + 0.03)
    wait_until(lambda: not deadlines.left)
    assert time.monotonic() >= now + 0.03


def test_an_exception_of_a_caller_ends_no_deadline(
    deadlines: Deadlines, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR):
        deadlines.keeper.post(fail)
        deadlines.add(time.monotonic() + 0.01)
        wait_until(lambda: not deadlines.left)
    assert "ZeroDivisionError" in caplog.text


def test_a_deadline_that_failed_is_tried_again(deadlines: Deadlines) -> None:
    deadlines.failures = 3
    deadlines.add(time.monotonic() + 0.01)
    wait_until(lambda: not deadlines.left)
