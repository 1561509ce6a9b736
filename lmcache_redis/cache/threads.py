"""Threads for work that blocks: a queue that they serve, and a detector of calls that hang.

A thread in a system call cannot be called back. All that can be done about a call that hangs, on a
network file system whose server is gone, is to begin no other until it returns.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
Action = Callable[[], None]


def nothing() -> None:
    """An action that does nothing."""


class _Task(NamedTuple):
    run: Action
    dropped: Action
    until_s: float


class WorkerThreads:
    """A queue and the threads that serve it, which are started with the first task.

    Of each task, exactly one of ``run`` and ``dropped`` is called. nice: as of `nice(2)`.
    """

    def __init__(self, name: str, threads: int, nice: int = 0) -> None:
        self._nice = nice
        self._changed = threading.Condition()
        self._queue: OrderedDict[Hashable, _Task] = OrderedDict()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"lmcache-redis-{name}-{n}", daemon=True)
            for n in range(threads)
        ]

    def __len__(self) -> int:
        """Tasks that wait for a thread."""
        return len(self._queue)

    def put(
        self,
        run: Action,
        dropped: Action,
        until_s: float = math.inf,
        name: Hashable | None = None,
    ) -> None:
        """Run a task on a thread, after those before it; an error that it raises is logged.

        until_s: see `drop_late`. name: for `cancel`; no other task in the queue has it.
        """
        with self._changed:
            if not self._stopped:
                self._queue[name or object()] = _Task(run, dropped, until_s)
                for thread in self._threads:
                    if thread.ident is None:
                        thread.start()
                self._changed.notify()
                return
        dropped()

    def cancel(self, name: Hashable) -> None:
        """Drop a task if it waits."""
        with self._changed:
            task = self._queue.pop(name, None)
        if task is not None:
            task.dropped()

    def drop_late(self) -> None:
        """Drop the tasks that wait and should have begun by now (`time.monotonic()`)."""
        self.drop(time.monotonic())

    def drop(self, until_s: float = math.inf) -> None:
        """Drop the tasks that wait and should have begun by then; without a time, all of them."""
        with self._changed:
            late = [name for name, task in self._queue.items() if task.until_s <= until_s]
            tasks = [self._queue.pop(name) for name in late]
        for task in tasks:
            task.dropped()

    def drain(self, timeout_s: float) -> None:
        """Wait until no task waits that was put before, or so long."""
        if self._queue:
            reached = threading.Event()
            self.put(reached.set, reached.set)
            reached.wait(timeout_s)

    def stop(self) -> None:
        """Drop what waits; the threads end with the tasks that they are in. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self.drop()

    def join(self, timeout_s: float) -> bool:
        """Wait so long in all, after `stop`; whether all threads have ended."""
        deadline_s = time.monotonic() + timeout_s
        started = [thread for thread in self._threads if thread.ident is not None]
        for thread in started:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in started)

    def _serve(self) -> None:
        if self._nice:
            os.nice(self._nice)  # on Linux a thread's own, and anyone may be nicer
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopped)
                if not self._queue:
                    return
                _, task = self._queue.popitem(last=False)
            try:
                task.run()
            except Exception:
                logger.exception("a task failed")  # our own bug: that task alone
            del task  # it holds views of slots


class _Call(NamedTuple):
    what: str
    limit_s: float
    due_s: float
    stuck: Action


class HangDetector:
    """Calls that may never return. Thread-safe; a thread of its own watches them.

    Once a call has been in flight for longer than its limit, `reason` says so and no other is
    begun, until all that are in flight have returned.

    what: what is called, in log lines. on_hang: called when a call is overdue; it must only
    enqueue. on_return: when the last call has returned, gives what is to be done before others are
    begun, one after the other, and None when that is all. Both are called under a lock.
    """

    def __init__(self, what: str, on_hang: Action, on_return: Callable[[], Action | None]) -> None:
        self._what = what
        self._on_hang = on_hang
        self._on_return = on_return
        self._changed = threading.Condition()
        self._calls: dict[object, _Call] = {}
        self._next_look_s = math.inf
        self._closed = False
        self.reason = ""
        self.since_s = time.monotonic()  # when it began to be as it is
        self._thread = threading.Thread(target=self._watch, name="lmcache-redis-watch", daemon=True)
        self._thread.start()

    def run(
        self,
        call: Callable[[], T],
        what: str,
        limit_s: float,
        stuck: Action = nothing,
    ) -> T | None:
        """Make a call on this thread. None: it was not made, as another hangs, or after `close`.

        stuck: called where this or another call hangs, before the call returns; must only enqueue.
        """
        me = object()
        with self._changed:
            if self.reason or self._closed:
                return None
            due_s = time.monotonic() + limit_s
            self._calls[me] = _Call(what, limit_s, due_s, stuck)
            if due_s < self._next_look_s:
                self._changed.notify_all()
        try:
            return call()
        finally:
            self._returned(me)

    def is_hung(self) -> bool:
        """Whether no call is begun; if so, `on_return` is still to be asked after this."""
        with self._changed:
            return bool(self.reason)

    def close(self, timeout_s: float) -> bool:
        """Begin no call any more, and wait for those in flight; whether all have returned.

        Where one hangs it does not wait.
        """
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self.reason or not self._calls, timeout_s)
            ended = not self.reason and not self._calls
            self._next_look_s = -math.inf
            self._changed.notify_all()
        self._thread.join()
        return ended

    def _returned(self, me: object) -> None:
        with self._changed:
            del self._calls[me]
            if self._closed:
                self._changed.notify_all()
            action = self._next_action()
        while action is not None:
            action()
            with self._changed:
                action = self._next_action()

    def _next_action(self) -> Action | None:
        """None: calls are begun again, or some are in flight."""
        if self._calls or not self.reason:
            return None
        action = self._on_return()
        if action is None:
            now_s = time.monotonic()
            logger.warning("the %s is back after %.1f s", self._what, now_s - self.since_s)
            self.reason, self.since_s = "", now_s
        return action

    def _watch(self) -> None:
        with self._changed:
            while self._next_look_s > -math.inf:
                calls = [] if self.reason else self._calls.values()
                first = min(calls, key=lambda call: call.due_s, default=None)
                self._next_look_s = math.inf if first is None else first.due_s
                left_s = self._next_look_s - time.monotonic()
                if first is None or left_s > 0:
                    self._changed.wait(None if left_s == math.inf else left_s)
                    continue
                self.since_s = time.monotonic()
                self.reason = f"{first.what} has not returned within {first.limit_s:g} s"
                logger.warning("the %s is down: %s", self._what, self.reason)
                for call in self._calls.values():
                    call.stuck()
                self._on_hang()
                self._changed.notify_all()
