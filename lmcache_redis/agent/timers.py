"""Deadlines of the agent's loop."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable


class Timer:
    """Something to be done at ``due_s`` (monotonic), unless cancelled before."""

    __slots__ = ("action", "due_s")

    def __init__(self, due_s: float, action: Callable[[], None]) -> None:
        self.due_s = due_s
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Makes sure that it is never done."""
        self.action = None


class Timers:
    """A heap of timers, owned by one thread."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def at(self, due_s: float, action: Callable[[], None]) -> Timer:
        """Plans ``action`` for ``due_s``."""
        timer = Timer(due_s, action)
        heapq.heappush(self._heap, (due_s, next(self._order), timer))
        return timer

    def after(self, delay_s: float, action: Callable[[], None]) -> Timer:
        """Plans ``action`` for ``delay_s`` from now."""
        return self.at(time.monotonic() + delay_s, action)

    def run_due(self) -> float:
        """Does what is due; returns seconds until the next timer, one second at most."""
        while self._heap:
            due_s, _, timer = self._heap[0]
            if timer.action is None:
                heapq.heappop(self._heap)
                continue
            left_s = due_s - time.monotonic()
            if left_s > 0:
                return min(left_s, 1.0)
            heapq.heappop(self._heap)
            timer.action()
        return 1.0
