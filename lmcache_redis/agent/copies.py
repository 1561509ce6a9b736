"""The threads that copy between an engine's blocks and slots.

Each place (a GPU, or the CPU's memory) has threads of its own: work of different GPUs runs in
parallel, and what is queued for one does not delay another. No call to CUDA has a
deadline, so a GPU that hangs keeps the threads it has, and what these copy; what is queued behind
them is cancelled when its lease ends (`drop_late`), and the agent's end does not wait for them.

A request waits for a scatter and none for a gather, so each has threads of its own, and those
that gather out of the CPU's memory give way to the engine that computes there: at nice 10 they
get a tenth of a core that an engine wants, and all of one that it does not. Beside the engine
step that ends a prefill (where the stores begin) that is the difference between 45 ms and 60 to
100 ms (two cores, 256 MiB of blocks); a tenth of a core still reads blocks many times faster than
a prefill fills them.
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
        self._scatters: dict[str, WorkerThreads] = {}
        self._gathers: dict[str, WorkerThreads] = {}
        self._closed = False

    def scatter(self, place: str, copy: Copy, report: Report, until_ns: int | None = None) -> None:
        """Queues a copy into an engine's blocks, or other work that an engine waits for.

        until_ns: monotonic; not begun by then, it is cancelled by the next `drop_late`.
        """
        _put(self._at(place, self._scatters, f"scatter-{place}", 0), copy, report, until_ns)

    def gather(self, place: str, copy: Copy, report: Report, until_ns: int | None = None) -> None:
        """Queues a copy out of an engine's blocks, or other work that no engine waits for.

        until_ns: as for `scatter`.
        """
        nice = _GATHER_NICE if place == CPU else 0
        _put(self._at(place, self._gathers, f"gather-{place}", nice), copy, report, until_ns)

    def drop_late(self) -> None:
        """Cancels what waits for a thread and has waited too long."""
        for threads in self._all:
            threads.drop_late()

    @property
    def backlog(self) -> int:
        """Copies that wait for a thread."""
        return sum(map(len, self._all))

    def close(self, timeout_s: float) -> bool:
        """Finishes the copies in progress, cancels the others, ends the threads.

        Returns whether all have ended. One that has not is in a call to a device which does not
        return: it still has its slots, and nothing may be taken from under it.
        """
        self._closed = True
        for threads in self._all:
            threads.stop()
        deadline_s = time.monotonic() + timeout_s
        ended = [each.join(max(0.0, deadline_s - time.monotonic())) for each in self._all]
        return all(ended)

    @property
    def _all(self) -> list[WorkerThreads]:
        return [*self._scatters.values(), *self._gathers.values()]

    def _at(
        self, place: str, started: dict[str, WorkerThreads], name: str, nice: int
    ) -> WorkerThreads:
        if place not in started:
            count = _REGISTERING_THREADS if place == REGISTERING else self._threads
            started[place] = WorkerThreads(name, count, nice)
            if self._closed:
                started[place].stop()
        return started[place]


def _put(threads: WorkerThreads, copy: Copy, report: Report, until_ns: int | None) -> None:
    until_s = math.inf if until_ns is None else until_ns / 1e9
    threads.put(partial(_run, copy, report), partial(report, CopyOutcome.CANCELLED), until_s)


def _run(copy: Copy, report: Report) -> None:
    outcome = CopyOutcome.FAILED
    try:
        outcome = copy()
    except DeviceError as error:
        logger.warning("a copy failed: %s", error)
    except Exception:
        logger.exception("a copy failed")  # our own bug: this copy is lost, not the agent
    finally:
        report(outcome)
