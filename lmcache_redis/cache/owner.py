"""The thread that owns a cache: actions that other threads post to it, timers, and key locks.

`Owner` is what the cache needs. `OwnerLoop` implements it for a thread that polls, such as an
agent's loop. A few lines adapt an asyncio loop (``call_soon_threadsafe``, ``call_at``).
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

Action = Callable[[], None]


class Timer(Protocol):
    """A timer of an owner."""

    def cancel(self) -> None:
        """Do not run the action. Idempotent."""


class Owner(Protocol):
    """Runs actions on the owner's thread, one after the other. Logs an exception of an action."""

    def post(self, action: Action) -> None:
        """Run ``action`` soon, in the order of the posts. From any thread."""

    def at(self, due_s: float, action: Action) -> Timer:
        """Run ``action`` at ``due_s`` (`time.monotonic()`). From the owner's thread."""

    def after(self, delay_s: float, action: Action) -> Timer:
        """Run ``action`` in ``delay_s`` seconds. From the owner's thread."""


class _Timer:
    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        self.action = None


class OwnerLoop:
    """An `Owner` whose thread calls `run_posted` after it wakes and `run_due` before it waits.

    wake: called by `post`, on any thread.
    """

    def __init__(self, wake: Action) -> None:
        self._wake = wake
        self._posted: deque[Action] = deque()
        self._heap: list[tuple[float, int, _Timer]] = []
        self._order = itertools.count()

    def post(self, action: Action) -> None:
        self._posted.append(action)
        self._wake()

    def at(self, due_s: float, action: Action) -> Timer:
        timer = _Timer(action)
        heapq.heappush(self._heap, (due_s, next(self._order), timer))
        return timer

    def after(self, delay_s: float, action: Action) -> Timer:
        return self.at(time.monotonic() + delay_s, action)

    def run_posted(self) -> None:
        """Run the actions posted so far; those that they post wait for the next call."""
        for _ in range(len(self._posted)):
            _run(self._posted.popleft())

    def run_due(self) -> float:
        """Run the timers that are due; return the seconds until the next one, at most one."""
        while self._heap:
            due_s, _, timer = self._heap[0]
            if timer.action is not None and (left_s := due_s - time.monotonic()) > 0:
                return min(left_s, 1.0)
            heapq.heappop(self._heap)
            if timer.action is not None:
                _run(timer.action)
        return 1.0


def _run(action: Action) -> None:
    try:
        action()
    except Exception:
        logger.exception("an action of the loop failed")  # our own bug: only that action fails


class KeyLock:
    """Locks that serialise the changes of a key without blocking a thread.

    Owned by the owner's thread. Unlocked keys use no memory.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._held: dict[bytes, deque[Action] | None] = {}  # waiters of each; None: no waiters yet

    def try_acquire(self, key: bytes) -> bool:
        """Takes the lock if it is free."""
        if key in self._held:
            return False
        self._held[key] = None
        return True

    def wait(self, key: bytes, acquired: Action) -> None:
        """Waits for a lock that is held: posts ``acquired`` when the caller has it."""
        waiting = self._held[key]
        if waiting is None:
            waiting = self._held[key] = deque()
        waiting.append(acquired)

    def release(self, key: bytes) -> None:
        """Passes the lock to the longest waiter, or frees it."""
        waiting = self._held[key]
        if waiting:
            # Posted: if many waiters release at once, calling each from here would nest them.
            self._owner.post(waiting.popleft())
        else:
            del self._held[key]
