"""What the threads of a plane have in common: they go on after any exception, and back off."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

# After an exception. Threads and memory may be short for a moment.
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


class Backoff:
    """Pauses that double from `first_s` to `longest_s`. Jitter: a fleet does not act at once."""

    __slots__ = ("_failures", "_first_s", "_longest_s")

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = max(first_s, longest_s)
        self._failures = 0

    def next_s(self) -> float:
        """Seconds to wait after another failure."""
        nominal = min(self._first_s * 2.0**self._failures, self._longest_s)
        self._failures = min(self._failures + 1, 64)
        return jittered(nominal)

    def reset(self) -> None:
        self._failures = 0


def jittered(seconds: float) -> float:
    """Between half of `seconds` and all of it."""
    return seconds * random.uniform(0.5, 1.0)


class LoopThread:
    """A daemon thread that calls `step` until it returns False.

    An exception of `step` is a bug, or the process lacks memory or threads for a moment. It is
    logged, once in a row of them, and `step` is called again after a pause.
    """

    def __init__(self, name: str, step: Callable[[], bool]) -> None:
        self._step = step
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._is_noted = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Raises RuntimeError if the process may not have another thread."""
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread, if it was started; False if it takes longer."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._goes_on():
            pass

    def _goes_on(self) -> bool:
        try:
            goes_on = self._step()
        except Exception:
            if not self._is_noted:
                self._is_noted = True
                with contextlib.suppress(Exception):
                    logger.exception("internal error in a Redis plane thread")
            time.sleep(self._backoff.next_s())
            return True
        self._backoff.reset()
        self._is_noted = False
        return goes_on
