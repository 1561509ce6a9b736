# SPDX-License-Identifier: Apache-2.0
"""Closing engines' memory, each on a thread of its own: the driver may never return from it.

It was seen to hang for ever over the memory of a worker that had died (LMCache #4676). Nothing else
waits for such a thread. The memory stays taken until this process ends, so the agent ends once it
is idle, or a minute later (`Service`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from lmcache_redis.processes import NamedThread

logger = logging.getLogger(__name__)

_LIMIT_S = 10.0


@dataclass(eq=False)
class _Close:
    what: str
    asked_s: float = math.inf  # when the driver was; before that, calls in progress end
    has_failed: bool = False
    is_said: bool = False


class ClosingThreads:
    """All but `start` and `overdue`, which are the loop thread's, is thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closes: list[_Close] = []  # that have not returned, or failed
        self._waiting: list[threading.Thread] = []  # to be started

    def start(self, what: str, end_calls: Callable[[], None], close: Callable[[], bool]) -> None:
        """Calls one after the other. what: is closed, for people. close: whether it is, then;
        raises nothing.
        """
        each = _Close(what)
        self._closes.append(each)
        self._waiting.append(
            NamedThread("lmcache-redis-close", self._run, (each, end_calls, close))
        )
        self._start_waiting()

    def overdue(self, now_s: float) -> str:
        """What is not closed in time, which is said once; empty: nothing."""
        self._start_waiting()
        with self._changed:
            late = [
                each for each in self._closes if each.has_failed or now_s - each.asked_s > _LIMIT_S
            ]
            for each in late:
                if not each.is_said:
                    silent = f"the driver has not returned within {_LIMIT_S:g} s"
                    logger.error(
                        "the memory of %s cannot be closed: %s. The GPU keeps it until this agent "
                        "ends, which it does once it is idle",
                        each.what, "the driver refused" if each.has_failed else silent,
                    )  # fmt: skip
                each.is_said = True
            return ", ".join(each.what for each in late)

    def join(self, timeout_s: float) -> bool:
        """Whether all return in time. What is said to be overdue is not waited for."""
        with self._changed:
            self._changed.wait_for(
                lambda: all(each.is_said or each.has_failed for each in self._closes), timeout_s
            )
            return all(each.has_failed for each in self._closes)

    def _start_waiting(self) -> None:
        while self._waiting:
            try:
                self._waiting[0].start()
            except RuntimeError:  # the process may have no more threads now: tried again
                return
            self._waiting.pop(0)

    def _run(self, each: _Close, end_calls: Callable[[], None], close: Callable[[], bool]) -> None:
        end_calls()
        each.asked_s = time.monotonic()
        is_closed = close()
        with self._changed:
            if is_closed:
                self._closes.remove(each)
            each.has_failed = not is_closed
            self._changed.notify_all()
        if each.is_said and is_closed:
            logger.warning("the memory of %s is closed after all", each.what)
