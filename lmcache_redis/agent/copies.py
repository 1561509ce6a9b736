"""The threads that copy between an engine's blocks and slots.

Each place (a GPU, or the CPU's memory) has threads of its own: GPUs are copied in parallel, and
what is queued for one does not delay another. No call to CUDA has a deadline, so a GPU that hangs
keeps its threads and their slots. What is queued behind them is cancelled when its lease ends
(`drop_late`), and the agent stops without waiting for them.

A request waits for a scatter and none for a gather, so each has threads of its own. Gathers out of
the CPU's memory run at nice 10, beside an engine that computes there: they get a tenth of a core
that the engine wants, and all of one that it does not. At the end of a prefill, where stores begin,
the engine's step takes 45 ms instead of 60 to 100 ms (two cores, 256 MiB of blocks). A tenth of a
core still reads blocks many times faster than a prefill fills them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from enum import Enum
from functools import partial

from lmcache_redis.cache.threads import WorkerThreads
from lmcache_redis.errors import DeviceError

logger = logging.getLogger(__name__)

_GATHER_NICE = 10
# Not a place of copies, but of mapping engines' memory, which takes up to seconds. As many threads
# as a machine has GPUs: they are mapped in parallel, and one that hangs does not block the others.
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

    The loop thread alone calls these methods. Threads start with the first copy of their place.
    Each outcome is reported once, on the copying thread; a report must only enqueue.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._started: dict[str, WorkerThreads] = {}
        self._closed = False

    def scatter(self, place: str, copy: Copy, report: Report, until_ns: int | None = None) -> None:
        """Queues a copy into an engine's blocks, or other work that an engine waits for.

        until_ns: on CLOCK_MONOTONIC; a copy that has not begun by then is cancelled by the next
        `drop_late`.
        """
        self._put(f"scatter-{place}", place, 0, copy, report, until_ns)

    def gather(self, place: str, copy: Copy, report: Report, until_ns: int | None = None) -> None:
        """Queues a copy out of an engine's blocks, or other work that no engine waits for.

        until_ns: as for `scatter`.
        """
        nice = _GATHER_NICE if place == CPU else 0
        self._put(f"gather-{place}", place, nice, copy, report, until_ns)

    def drop_late(self) -> None:
        """Cancels queued copies that should have begun by now."""
        for threads in self._started.values():
            threads.drop_late()

    @property
    def backlog(self) -> int:
        """Copies that wait for a thread."""
        return sum(map(len, self._started.values()))

    def close(self, timeout_s: float) -> bool:
        """Finishes the copies in progress, cancels the others, ends the threads.

        Returns whether all have ended. A thread that has not is in a call to a device that does not
        return: its slots must stay mapped.
        """
        self._closed = True
        for threads in self._started.values():
            threads.stop()
        deadline_s = time.monotonic() + timeout_s
        ended = [
            threads.join(max(0.0, deadline_s - time.monotonic()))
            for threads in self._started.values()
        ]
        return all(ended)

    def _put(
        self, name: str, place: str, nice: int, copy: Copy, report: Report, until_ns: int | None
    ) -> None:
        threads = self._started.get(name)
        if threads is None:
            count = _REGISTERING_THREADS if place == REGISTERING else self._threads
            threads = self._started[name] = WorkerThreads(name, count, nice)
            if self._closed:
                threads.stop()
        until_s = math.inf if until_ns is None else until_ns / 1e9
        threads.put(partial(_run, copy, report), partial(report, CopyOutcome.CANCELLED), until_s)


def _run(copy: Copy, report: Report) -> None:
    outcome = CopyOutcome.FAILED
    try:
        outcome = copy()
    except DeviceError as error:
        logger.warning("a copy failed: %s", error)
    except Exception:
        logger.exception("a copy failed")  # our own bug: this copy alone
    finally:
        report(outcome)
