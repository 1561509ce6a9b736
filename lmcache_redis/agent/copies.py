"""The threads that copy between an engine's blocks and slots, one chunk at a time.

Each place (a GPU, or the CPU's memory) has threads of its own: work of different GPUs runs in
parallel, and what is queued for one keeps nobody waiting for another.

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


# Where engines' memory is mapped, which may take seconds: no place of copies.
REGISTERING = "registering"


class CopyThreads:
    """For each place ``threads`` threads that scatter and as many that gather.

    They are started when a place has its first copy, by the loop thread, which alone calls
    these methods. Each outcome is reported once, on the copying thread, to be handed on.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._scatters: dict[str, ThreadLane] = {}
        self._gathers: dict[str, ThreadLane] = {}
        self._closed = False

    def scatter(self, place: str, copy: Copy, report: Report) -> None:
        """Queues a copy into an engine's blocks, or other work that an engine waits for."""
        self._lane(self._scatters, f"scatter-{place}", place, 0).put(copy, report)

    def gather(self, place: str, copy: Copy, report: Report) -> None:
        """Queues a copy out of an engine's blocks, or other work that nobody waits for."""
        self._lane(self._gathers, f"gather-{place}", place, _GATHER_NICE).put(copy, report)

    @property
    def backlog(self) -> int:
        """Copies that wait for a thread."""
        return sum(map(len, self._lanes))

    def close(self, timeout_s: float) -> None:
        """Finishes the copies in progress, cancels the others, ends the threads."""
        self._closed = True
        for lane in self._lanes:
            lane.stop()
        for lane in self._lanes:
            lane.join(timeout_s)

    @property
    def _lanes(self) -> list[ThreadLane]:
        return [*self._scatters.values(), *self._gathers.values()]

    def _lane(self, lanes: dict[str, ThreadLane], name: str, place: str, nice: int) -> ThreadLane:
        lane = lanes.get(place)
        if lane is None:
            lane = lanes[place] = ThreadLane(name, 0 if self._closed else self._threads, nice)
            if self._closed:
                lane.stop()
        return lane


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
