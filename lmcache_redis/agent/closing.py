"""Closing engines' memory, each on a thread of its own: the driver may never return from it.

It was seen to hang for ever over the memory of a worker that had died (LMCache #4676). Nothing else
waits for such a thread. The memory stays taken until this process ends, so the agent ends once it
is idle (`Service`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_LIMIT_S = 10.0

Action = Callable[[], None]


@dataclass(eq=False)
class _Close:
    what: str
    asked_s: float = math.inf  # when the driver was; before that, calls in progress end
    is_said: bool = False


class ClosingThreads:
    """All but `start` and `overdue`, which are the loop thread's, is thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closes: list[_Close] = []  # that have not returned

    def start(self, what: str, end_calls: Action, close: Action) -> None:
        """Calls one after the other. what: is closed, for people. close: raises nothing."""
        each = _Close(what)
        self._closes.append(each)
        name = "lmcache-redis-close"
        thread = threading.Thread(
            target=self._run, args=(each, end_calls, close), name=name, daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the process may have no more threads: as if it did not return
            each.asked_s = -math.inf

    def overdue(self, now_s: float) -> str:
        """What the driver does not close in time, which is said once; empty: nothing."""
        with self._changed:
            late = [each for each in self._closes if now_s - each.asked_s > _LIMIT_S]
            for each in late:
                if not each.is_said:
                    logger.error(
                        "the memory of %s cannot be closed: the driver has not returned within "
                        "%g s. The GPU keeps it until this agent ends, which it does once it is "
                        "idle", each.what, _LIMIT_S,
                    )  # fmt: skip
                each.is_said = True
            return ", ".join(each.what for each in late)

    def join(self, timeout_s: float) -> bool:
        """Whether all return in time. What is said to be overdue is not waited for."""
        with self._changed:
            self._changed.wait_for(lambda: all(each.is_said for each in self._closes), timeout_s)
            return not self._closes

    def _run(self, each: _Close, end_calls: Action, close: Action) -> None:
        try:
            end_calls()
            each.asked_s = time.monotonic()
            close()
        finally:
            with self._changed:
                self._closes.remove(each)
                self._changed.notify_all()
            if each.is_said:
                logger.warning("the memory of %s is closed after all", each.what)
