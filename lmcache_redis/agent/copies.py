"""The threads that copy between an engine's blocks and slots.

Each place (a GPU, or the CPU's memory) has threads of its own: work of different GPUs runs in
parallel, and what is queued for one keeps nobody waiting for another. No call to CUDA has a
deadline, so a GPU that hangs keeps the threads it has, and what these copy; what is queued behind
them is given up when its lease ends (`drop_late`), and the agent's end does not wait for them.

A request waits for a scatter and nobody for a gather, so each has threads of its own, and those
that gather out of the CPU's memory give way to the engine that computes there: at nice 10 they
get a tenth of a core that an engine wants, and all of one that it does not. Beside the engine
step that ends a prefill (where the stores begin) that is the difference between 45 ms and 60 to
100 ms (two cores, 256 MiB of blocks); a tenth of a core still reads blocks many times faster than
a prefill fills them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from lmcache_redis.errors import DeviceError

logger = logging.getLogger(__name__)

_GATHER_NICE = 10
# Where engines' memory is mapped, which may take seconds: no place of copies. As many threads as a
# machine has GPUs, so that they are mapped in parallel, and one that hangs keeps no other from it.
REGISTERING = "registering"
_REGISTERING_THREADS = 8
# The place of engines that compute on the cores of these threads.
CPU = "cpu"


class CopyOutcome(Enum):
    """How a copy ended."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


Copy = Callable[[], CopyOutcome]
Report = Callable[[CopyOutcome], None]


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

    def scatter(self, place: str, copy: Copy, report: Report, until_ns: int | None = None) -> None:
        """Queues a copy into an engine's blocks, or other work that an engine waits for.

        until_ns: monotonic; not begun by then, it is cancelled by the next `drop_late`.
        """
        self._lane(self._scatters, f"scatter-{place}", place, 0).put(copy, report, until_ns)

    def gather(self, place: str, copy: Copy, report: Report, until_ns: int | None = None) -> None:
        """Queues a copy out of an engine's blocks, or other work that nobody waits for.

        until_ns: as for `scatter`.
        """
        nice = _GATHER_NICE if place == CPU else 0
        self._lane(self._gathers, f"gather-{place}", place, nice).put(copy, report, until_ns)

    def drop_late(self) -> None:
        """Cancels what waits for a thread and has waited too long."""
        now_ns = time.monotonic_ns()
        for lane in self._lanes:
            lane.drop_late(now_ns)

    @property
    def backlog(self) -> int:
        """Copies that wait for a thread."""
        return sum(map(len, self._lanes))

    def close(self, timeout_s: float) -> bool:
        """Finishes the copies in progress, cancels the others, ends the threads.

        Returns whether all have ended. One that has not is in a call to a device which does not
        return: it still has its slots, and nothing may be taken from under it.
        """
        self._closed = True
        for lane in self._lanes:
            lane.stop()
        deadline_s = time.monotonic() + timeout_s
        ended = [lane.join(max(0.0, deadline_s - time.monotonic())) for lane in self._lanes]
        return all(ended)

    @property
    def _lanes(self) -> list[ThreadLane]:
        return [*self._scatters.values(), *self._gathers.values()]

    def _lane(self, lanes: dict[str, ThreadLane], name: str, place: str, nice: int) -> ThreadLane:
        lane = lanes.get(place)
        if lane is None:
            threads = _REGISTERING_THREADS if place == REGISTERING else self._threads
            lane = lanes[place] = ThreadLane(name, 0 if self._closed else threads, nice)
            if self._closed:
                lane.stop()
        return lane


class _Queued(NamedTuple):
    copy: Copy
    report: Report
    until_ns: int | None

    def is_late(self, now_ns: int) -> bool:
        return self.until_ns is not None and self.until_ns < now_ns


class ThreadLane:
    """A queue and the threads that serve it."""

    def __init__(self, name: str, threads: int, nice: int) -> None:
        self._nice = nice
        self._ready = threading.Condition()
        self._queue: deque[_Queued] = deque()
        self._stop = False
        self._threads = [
            threading.Thread(target=self._run, name=f"lmcache-redis-{name}-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, copy: Copy, report: Report, until_ns: int | None = None) -> None:
        with self._ready:
            if not self._stop:
                self._queue.append(_Queued(copy, report, until_ns))
                self._ready.notify()
                return
        report(CopyOutcome.CANCELLED)

    def drop_late(self, now_ns: int) -> None:
        """Cancels what is queued and should have begun before ``now_ns``."""
        with self._ready:
            late = [each for each in self._queue if each.is_late(now_ns)]
            self._queue = deque(each for each in self._queue if not each.is_late(now_ns))
        for each in late:
            each.report(CopyOutcome.CANCELLED)

    def stop(self) -> None:
        with self._ready:
            self._stop = True
            left = list(self._queue)
            self._queue.clear()
            self._ready.notify_all()
        for each in left:
            each.report(CopyOutcome.CANCELLED)

    def join(self, timeout_s: float) -> bool:
        """Waits so long in all. Returns whether all threads have ended."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        if self._nice:
            os.nice(self._nice)  # on Linux a thread's own, and anyone may be nicer
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._queue or self._stop)
                if self._stop:
                    return
                copy, report, _ = self._queue.popleft()
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
