"""The threads that copy between an engine's blocks and slots, one chunk at a time.

A request waits for a scatter and nobody for a gather, so each has threads of its own, and those
that gather give way: at nice 10 they get a tenth of a core that an engine wants, and all of one
that it does not. Beside the engine step that ends a prefill (where the stores begin) that is the
difference between 45 ms and 60 to 100 ms (two cores, 256 MiB of blocks); a tenth of a core still
reads blocks many times faster than a prefill fills them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from enum import Enum

from lmcache_redis.errors import DeviceError

logger = logging.getLogger(__name__)

_GATHER_NICE = 10


class CopyOutcome(Enum):
    """How a copy ended."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


Copy = Callable[[], CopyOutcome]
Report = Callable[[CopyOutcome], None]


class CopyThreads:
    """``threads`` threads that scatter and as many that gather; each outcome is reported once.

    Reports are called on the copying thread and only hand the outcome on.
    """

    def __init__(self, threads: int) -> None:
        self._scatters = ThreadLane("scatter", threads, nice=0)
        self._gathers = ThreadLane("gather", threads, nice=_GATHER_NICE)

    def scatter(self, copy: Copy, report: Report) -> None:
        """Queues a copy into an engine's blocks, or other work that an engine waits for."""
        self._scatters.put(copy, report)

    def gather(self, copy: Copy, report: Report) -> None:
        """Queues a copy out of an engine's blocks, or other work that nobody waits for."""
        self._gathers.put(copy, report)

    @property
    def backlog(self) -> int:
        """Copies that wait for a thread."""
        return len(self._scatters) + len(self._gathers)

    def close(self, timeout_s: float) -> None:
        """Finishes the copies in progress, cancels the others, ends the threads."""
        lanes = (self._scatters, self._gathers)
        for lane in lanes:
            lane.stop()
        for lane in lanes:
            lane.join(timeout_s)


class ThreadLane:
    """A queue and the threads that serve it."""

    def __init__(self, name: str, threads: int, nice: int) -> None:
        self._nice = nice
        self._ready = threading.Condition()
        self._queue: deque[tuple[Copy, Report]] = deque()
        self._stop = False
        self._threads = [
            threading.Thread(target=self._run, name=f"lmcache-redis-{name}-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, copy: Copy, report: Report) -> None:
        with self._ready:
            if not self._stop:
                self._queue.append((copy, report))
                self._ready.notify()
                return
        report(CopyOutcome.CANCELLED)

    def stop(self) -> None:
        with self._ready:
            self._stop = True
            left = list(self._queue)
            self._queue.clear()
            self._ready.notify_all()
        for _, report in left:
            report(CopyOutcome.CANCELLED)

    def join(self, timeout_s: float) -> None:
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        if self._nice:
            os.nice(self._nice)  # on Linux a thread's own, and anyone may be nicer
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._queue or self._stop)
                if self._stop:
                    return
                copy, report = self._queue.popleft()
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
