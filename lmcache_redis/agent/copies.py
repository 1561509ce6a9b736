"""The threads that copy between an engine's blocks and slots, one chunk at a time.

Scatters go before gathers: a request waits for a scatter, nobody for a gather.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from enum import Enum

from lmcache_redis.errors import DeviceError

logger = logging.getLogger(__name__)


class CopyOutcome(Enum):
    """How a copy ended."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


Copy = Callable[[], CopyOutcome]
Report = Callable[[CopyOutcome], None]


class CopyThreads:
    """``threads`` threads that run copies and report each outcome exactly once.

    Reports are called on the copying thread and only hand the outcome on.
    """

    def __init__(self, threads: int) -> None:
        self._ready = threading.Condition()
        self._scatters: deque[tuple[Copy, Report]] = deque()
        self._gathers: deque[tuple[Copy, Report]] = deque()
        self._stop = False
        self._threads = [
            threading.Thread(target=self._run, name=f"lmcache-redis-copy-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def scatter(self, copy: Copy, report: Report) -> None:
        """Queues a copy into an engine's blocks."""
        self._put(self._scatters, copy, report)

    def gather(self, copy: Copy, report: Report) -> None:
        """Queues a copy out of an engine's blocks, or any other slow work on its memory."""
        self._put(self._gathers, copy, report)

    @property
    def backlog(self) -> int:
        """Copies that wait for a thread."""
        return len(self._scatters) + len(self._gathers)

    def close(self, timeout_s: float) -> None:
        """Finishes the copies in progress, cancels the others, ends the threads."""
        with self._ready:
            self._stop = True
            left = [*self._scatters, *self._gathers]
            self._scatters.clear()
            self._gathers.clear()
            self._ready.notify_all()
        for _, report in left:
            report(CopyOutcome.CANCELLED)
        for thread in self._threads:
            thread.join(timeout_s)

    def _put(self, queue: deque[tuple[Copy, Report]], copy: Copy, report: Report) -> None:
        with self._ready:
            if not self._stop:
                queue.append((copy, report))
                self._ready.notify()
                return
        report(CopyOutcome.CANCELLED)

    def _run(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._scatters or self._gathers or self._stop)
                if self._stop:
                    return
                copy, report = (self._scatters or self._gathers).popleft()
            outcome = CopyOutcome.FAILED
            try:
                outcome = copy()
            except DeviceError as error:
                logger.warning("a copy failed: %s", error)
            except Exception:
                logger.exception("a copy failed")  # our own bug: this copy is lost, not the agent
            finally:
                report(outcome)
            del copy, report  # they hold views of slots
