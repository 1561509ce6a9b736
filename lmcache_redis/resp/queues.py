"""How work reaches the threads of a plane: a queue of tasks, and the timekeeper."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from lmcache_redis.resp.loops import LoopThread

logger = logging.getLogger(__name__)

TaskT = TypeVar("TaskT")
# The longest wait without a look at the clock.
_LONGEST_WAIT_S = 3600.0


class TaskQueue(Generic[TaskT]):
    """First in, first out; urgent tasks go first. Thread-safe.

    Each change is one operation of a deque, in C, and a thread waits on a lock of its own: a
    `threading.Condition` would add several hundredths of a millisecond to a scan of keys.
    """

    __slots__ = ("_ordinary", "_urgent", "_waiters", "closed")

    def __init__(self) -> None:
        self._ordinary: deque[TaskT] = deque()
        self._urgent: deque[TaskT] = deque()
        self._waiters: deque[threading.Lock] = deque()
        self.closed = False

    def put(self, tasks: Iterable[TaskT], urgent: bool = False) -> None:
        (self._urgent if urgent else self._ordinary).extend(tasks)
        if self.closed:
            self.close()
        self._wake_all()

    def take(self) -> TaskT | None:
        """Wait for the next task. None: the queue is closed."""
        while self.wait():
            # Another thread may take it first.
            task = _pop(self._urgent)
            if task is None:
                task = _pop(self._ordinary)
            if task is not None:
                return task
        return None

    def take_some(self, most: int) -> list[TaskT]:
        """Up to `most` tasks, without waiting."""
        some: list[TaskT] = []
        for tasks in (self._urgent, self._ordinary):
            with contextlib.suppress(IndexError):
                while len(some) < most:
                    some.append(tasks.popleft())
        return some

    def put_back(self, tasks: Sequence[TaskT]) -> None:
        """Return tasks that were taken: they precede all but the urgent ones."""
        self._ordinary.extendleft(reversed(tasks))
        self.put(())

    def wait(self) -> bool:
        """Wait until there is a task, which another thread may take first; False if closed."""
        while not self.closed:
            if self._urgent or self._ordinary:
                return True
            waiter = threading.Lock()
            waiter.acquire()
            # Enqueue, then look again: a task put before that did not wake this thread.
            self._waiters.append(waiter)
            if self.closed or self._urgent or self._ordinary:
                self._wake_all()
            waiter.acquire()
        return False

    def _wake_all(self) -> None:
        while (waiter := _pop(self._waiters)) is not None:
            waiter.release()

    def __len__(self) -> int:
        return len(self._urgent) + len(self._ordinary)

    def close(self) -> None:
        """Drop all tasks, also those put later, and wake all threads."""
        self.closed = True
        self._ordinary.clear()
        self._urgent.clear()
        self._wake_all()


def _pop(items: deque[TaskT]) -> TaskT | None:
    try:
        return items.popleft()
    except IndexError:
        return None


class Timekeeper:
    """A thread that ends late jobs, while other threads wait for the network.

    It also runs actions that must not run on the caller's thread. expire: called with the time;
    ends what is late and returns the next deadline, or None.
    """

    def __init__(self, expire: Callable[[float], float | None]) -> None:
        self._expire = expire
        self._lock = threading.Lock()
        # None wakes the thread.
        self._posts: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._wake_at = float("inf")
        self._closed = False
        self._thread = LoopThread("lmcr-time", self._step)

    def start(self) -> None:
        """Raises RuntimeError if the process may not have another thread."""
        self._thread.start()

    def watch(self, deadline: float) -> None:
        """Call `expire` when `deadline` passes."""
        with self._lock:
            if deadline < self._wake_at:
                self._wake_at = deadline
                self._posts.put(None)

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` soon. Raises RuntimeError when closed."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the Redis plane is closed")
            self._posts.put(action)

    def close(self, timeout_s: float) -> bool:
        """Run what was posted, then end the thread. False if it takes longer than `timeout_s`."""
        with self._lock:
            self._closed = True
            self._posts.put(None)
        return self._thread.join(timeout_s)

    def _step(self) -> bool:
        action = None
        with contextlib.suppress(Empty):
            left_s = max(0.0, self._wake_at - time.monotonic())
            action = self._posts.get(timeout=min(left_s, _LONGEST_WAIT_S))
        if action is not None:
            try:
                action()
            except Exception:
                # Of a caller, perhaps: those behind it must not wait.
                logger.exception("an action of the Redis plane failed")
        with self._lock:
            is_late = self._wake_at <= time.monotonic()
            if is_late:
                # A deadline that is set while `expire` runs is not lost.
                self._wake_at = float("inf")
        if is_late:
            soonest: float | None = time.monotonic()
            try:
                soonest = self._expire(time.monotonic())
            finally:
                # At once again if it failed.
                if soonest is not None:
                    self.watch(soonest)
        return not self._closed or not self._posts.empty()
