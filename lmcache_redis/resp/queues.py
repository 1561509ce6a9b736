"""How jobs reach threads: a queue with a fast lane, and a keeper of deadlines."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

TaskT = TypeVar("TaskT")

# Nobody waits longer without a look at the clock.
_LONGEST_WAIT_S = 3600.0


class TaskQueue(Generic[TaskT]):
    """First in, first out, in two lanes: whatever is urgent goes first. Thread-safe.

    Each change is one operation of a deque, in C; who waits does so on a lock of its own. A
    `threading.Condition` would cost a scan of keys several hundredths of a millisecond.
    """

    __slots__ = ("_closed", "_ordinary", "_urgent", "_waiters")

    def __init__(self) -> None:
        self._ordinary: deque[TaskT] = deque()
        self._urgent: deque[TaskT] = deque()
        self._waiters: deque[threading.Lock] = deque()
        self._closed = False

    def put(self, tasks: Iterable[TaskT], urgent: bool = False) -> None:
        (self._urgent if urgent else self._ordinary).extend(tasks)
        if self._closed:
            self.close()
        self._wake_all()

    def take(self, wait: bool = True) -> TaskT | None:
        """The next task. None: closed, or nothing there and not to be waited for."""
        task = self._pop()
        # Somebody else may take what was waited for.
        while task is None and wait and self.wait():
            task = self._pop()
        return task

    def take_some(self, most: int, urgent: bool = False) -> list[TaskT]:
        """The next tasks that are there, at most so many. urgent: only such."""
        some: list[TaskT] = []
        for tasks in (self._urgent,) if urgent else (self._urgent, self._ordinary):
            with contextlib.suppress(IndexError):
                while len(some) < most:
                    some.append(tasks.popleft())
        return some

    def _pop(self) -> TaskT | None:
        try:
            return (self._urgent or self._ordinary).popleft()
        except IndexError:
            return None

    def wait(self) -> bool:
        """Wait until there is a task, which another thread may take first; False if closed."""
        while not self._closed:
            if self._urgent or self._ordinary:
                return True
            waiter = threading.Lock()
            waiter.acquire()
            # First in line, then another look: what is put in between wakes nobody else.
            self._waiters.append(waiter)
            if self._closed or self._urgent or self._ordinary:
                self._wake_all()
            waiter.acquire()
        return False

    def _wake_all(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._waiters.popleft().release()

    @property
    def is_urgent(self) -> bool:
        """Whether the next task is an urgent one."""
        return bool(self._urgent)

    def __len__(self) -> int:
        """Tasks that wait."""
        return len(self._urgent) + len(self._ordinary)

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """From now on `take` gives None. What is in the queue is dropped."""
        self._closed = True
        self._ordinary.clear()
        self._urgent.clear()
        self._wake_all()


class Timekeeper:
    """A thread that ends jobs whose time has passed, while others wait for the network.

    It also runs what must be answered at once but not on the caller's own thread.
    expire: given the time, ends what is late and says when to come again (None: nothing).
    """

    def __init__(self, expire: Callable[[float], float | None]) -> None:
        self._expire = expire
        self._changed = threading.Condition(threading.Lock())
        self._posts: deque[Callable[[], None]] = deque()
        self._wake_at = float("inf")
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="lmcr-time", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def watch(self, deadline: float) -> None:
        """Be there when `deadline` passes."""
        with self._changed:
            if deadline < self._wake_at:
                self._wake_at = deadline
                self._changed.notify()

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` soon. Raises RuntimeError when closed."""
        with self._changed:
            if self._closed:
                raise RuntimeError("the Redis plane is closed")
            self._posts.append(action)
            self._changed.notify()

    def close(self, timeout_s: float) -> bool:
        """Run what was posted, then end. False if that takes longer than `timeout_s`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._posts and not self._closed:
                    left = self._wake_at - time.monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(min(left, _LONGEST_WAIT_S))
                posts, self._posts = self._posts, deque()
                if self._closed and not posts:
                    return
                late = self._wake_at <= time.monotonic()
                if late:
                    # Deadlines that come in while expire runs are not overlooked.
                    self._wake_at = float("inf")
            for action in posts:
                action()
            if late:
                soonest = self._expire(time.monotonic())
                if soonest is not None:
                    self.watch(soonest)
