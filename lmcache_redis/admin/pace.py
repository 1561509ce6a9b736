"""Keeps a rate: so many keys or bytes a second."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """At most ``per_second`` of something (keys, bytes), counted from the beginning of any step."""

    def __init__(
        self,
        per_second: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.per_second = per_second
        self._clock = clock
        self._sleep = sleep
        self._began_s = self._due_s = clock()

    def begin(self) -> None:
        """Waits until the next step may begin."""
        now_s = self._clock()
        if self._due_s > now_s:
            self._sleep(self._due_s - now_s)
        # Time lost to a delay is not made up for.
        self._began_s = max(now_s, self._due_s)

    def ended(self, count: float) -> None:
        """The step has ended, and so many were moved in it."""
        self._due_s = self._began_s + count / self.per_second
