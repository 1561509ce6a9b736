# SPDX-License-Identifier: Apache-2.0
"""The threads of a cache: its owner, workers for blocking calls, and a detector of calls that hang.

The owner runs what other threads post to it, and timers; it never waits for I/O. `OwnerLoop` is one
for a thread that polls, such as an agent's loop; a few lines adapt an asyncio loop.

A worker in a system call cannot be interrupted. If a call hangs, for example on a network file
system whose server is gone, all that can be done is to start no other call until it returns.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from lmcache_redis.processes import NamedThread

logger = logging.getLogger(__name__)

T = TypeVar("T")
Action = Callable[[], None]


class Timer(Protocol):
    def cancel(self) -> None:
        """Do not run the action. Idempotent."""


class Owner(Protocol):
    """Runs actions on the owner's thread, one after the other. Logs an exception of an action.

    now: the clock of all that the owner does, in seconds: `time.monotonic`, or a simulated one.
    """

    now: Callable[[], float]

    def post(self, action: Action) -> None:
        """Run ``action`` soon, in the order of the posts. From any thread."""

    def at(self, due_s: float, action: Action) -> Timer:
        """Run ``action`` at ``due_s`` of `now`. From the owner's thread."""


def posting(owner: Owner, action: Callable[..., None]) -> Callable[..., None]:
    """What may be called on any thread: the owner runs ``action`` soon, with its arguments."""
    return lambda *told: owner.post(partial(action, *told))


class _LoopTimer:
    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        self.action = None


class OwnerLoop:
    """An `Owner` whose thread calls `run_posted` after ``wake`` and `run_due` before it waits."""

    def __init__(self, wake: Action, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._wake = wake
        self._posted: deque[Action] = deque()
        self._heap: list[tuple[float, int, _LoopTimer]] = []
        self._order = itertools.count()

    def post(self, action: Action) -> None:
        self._posted.append(action)
        self._wake()

    def at(self, due_s: float, action: Action) -> Timer:
        timer = _LoopTimer(action)
        heapq.heappush(self._heap, (due_s, next(self._order), timer))
        return timer

    def after(self, delay_s: float, action: Action) -> Timer:
        return self.at(self.now() + delay_s, action)

    def every(self, pause_s: float, action: Action) -> None:
        """Run ``action`` again and again, with that pause before each time."""

        def run() -> None:
            self.after(pause_s, run)
            action()

        self.after(pause_s, run)

    def run_posted(self) -> None:
        """Run the actions posted so far; those that they post wait for the next call."""
        for _ in range(len(self._posted)):
            _run(self._posted.popleft())

    def run_due(self) -> float:
        """Run the timers that are due; return the seconds until the next one, at most one."""
        while self._heap:
            due_s, _, timer = self._heap[0]
            if timer.action is not None and (left_s := due_s - self.now()) > 0:
                return min(left_s, 1.0)
            heapq.heappop(self._heap)
            # Whoever keeps the timer may be what the action is of.
            action, timer.action = timer.action, None
            if action is not None:
                _run(action)
        return 1.0


def _run(action: Action) -> None:
    try:
        action()
    except Exception:
        logger.exception("an action failed")  # our own bug: only that action fails


class OneTimer:
    """A timer that is set again and again. Owned by the owner's thread."""

    def __init__(self, owner: Owner, action: Action) -> None:
        self._owner = owner
        self._action = action
        self._due_s = math.inf
        self._timer: Timer | None = None

    def fire_by(self, due_s: float) -> None:
        """Run the action at that time, or earlier if it is set so."""
        if due_s < self._due_s:
            if self._timer is not None:
                self._timer.cancel()
            self._due_s, self._timer = due_s, self._owner.at(due_s, self._fire)

    def fire_in(self, delay_s: float) -> None:
        self.fire_by(self._owner.now() + delay_s)

    def _fire(self) -> None:
        self._due_s, self._timer = math.inf, None
        self._action()


class _Task(NamedTuple):
    run: Callable[[], object]
    dropped: Action
    until_s: float


class WorkerThreads:
    """Threads with a queue of tasks, each called once: ``run`` or ``dropped``. nice: `nice(2)`."""

    def __init__(self, name: str, threads: int, nice: int = 0) -> None:
        self._nice = nice
        self._changed = threading.Condition()
        self._queue: deque[_Task] = deque()
        self._stopped = False
        self._threads = [
            NamedThread(f"lmcache-redis-{name}-{n}", self._serve) for n in range(threads)
        ]

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, run: Callable[[], object], dropped: Action, until_s: float = math.inf) -> None:
        """Enqueue a task. An exception of ``run`` is logged. until_s: see `drop`.

        Raises RuntimeError, and enqueues nothing, if the process may not have a thread.
        """
        with self._changed:
            if not self._stopped:
                self._start()
                self._queue.append(_Task(run, dropped, until_s))
                self._changed.notify()
                return
        dropped()

    def _start(self) -> None:
        """Those that have not been started. Raises RuntimeError if there can be none."""
        for thread in self._threads:
            if thread.ident is None:
                try:
                    thread.start()
                except RuntimeError:  # the process may not have more of them now
                    if self._threads[0].ident is None:
                        raise
                    return

    def drop(self, until_s: float = math.inf) -> None:
        """Drop the queued tasks whose ``until_s`` is no later; by default, all of them."""
        with self._changed:
            tasks, self._queue = self._queue, deque()
            self._queue.extend(task for task in tasks if task.until_s > until_s)
        for task in tasks:
            if task.until_s <= until_s:
                task.dropped()

    def drain(self, timeout_s: float) -> None:
        """Wait until no task that is queued now is still queued, or until the timeout."""
        if self._queue:
            reached = threading.Event()
            self.put(reached.set, reached.set)
            reached.wait(timeout_s)

    def stop(self) -> None:
        """Drop the queued tasks; each thread ends after the task it is running. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self.drop()

    def join(self, timeout_s: float) -> bool:
        """After `stop`, wait for the threads; return whether all have ended."""
        deadline_s = time.monotonic() + timeout_s
        started = [thread for thread in self._threads if thread.ident is not None]
        for thread in started:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in started)

    def _serve(self) -> None:
        if self._nice:
            with contextlib.suppress(OSError):  # a sandbox forbids it
                os.nice(self._nice)  # per thread on Linux; raising it needs no privilege
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopped)
                if not self._queue:
                    return
                task = self._queue.popleft()
            try:
                task.run()
            except Exception:
                logger.exception("a task failed")  # our own bug: only that task fails
            del task  # it holds views of slots


class HangDetector:
    """Makes calls that may never return. Thread-safe; a thread of its own watches them.

    Once a call has been in flight for longer than its limit, `reason` says so and no call is
    started until all calls in flight have returned.

    what: the name of the called system in log lines. on_hang: called on the detector's thread.
    """

    def __init__(self, what: str, on_hang: Action) -> None:
        self._what = what
        self._on_hang = on_hang
        self._changed = threading.Condition()
        self._calls: dict[object, tuple[float, str]] = {}  # those in flight, their limits
        self._wake_s = math.inf  # not later than any of these
        self._closed = False
        self.reason = ""
        self.since_s = time.monotonic()  # when the present state began
        NamedThread("lmcache-redis-watch", self._watch).start()

    def run(self, call: Callable[[], T], what: str, limit_s: float) -> T | None:
        """Make a call on this thread. None: not made, because another hangs or after `close`."""
        me, due_s = object(), time.monotonic() + limit_s
        with self._changed:
            if self.reason or self._closed:
                return None
            self._calls[me] = due_s, f"{what} has not returned within {limit_s:g} s"
            if due_s < self._wake_s:
                self._changed.notify_all()
        try:
            return call()
        finally:
            self._returned(me)

    def close(self, timeout_s: float) -> bool:
        """Start no more calls; whether those in flight return in time, or at once if one hangs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.reason or not self._calls, timeout_s)
            return not self._calls

    def _returned(self, me: object) -> None:
        with self._changed:
            del self._calls[me]
            if self._calls or not (self.reason or self._closed):
                return
            self._changed.notify_all()
            if self.reason:
                now_s = time.monotonic()
                logger.warning("the %s is back after %.1f s", self._what, now_s - self.since_s)
                self.reason, self.since_s = "", now_s

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._closed and not self._calls:
                    return
                now_s = time.monotonic()
                self._wake_s, reason = min(self._calls.values(), default=(math.inf, ""))
                if self.reason or self._wake_s > now_s:
                    left_s = None if self.reason or not reason else self._wake_s - now_s
                    self._changed.wait(left_s)
                    continue
                self.reason, self.since_s = reason, now_s
                logger.warning("the %s is down: %s", self._what, self.reason)
                self._changed.notify_all()
            _run(self._on_hang)
