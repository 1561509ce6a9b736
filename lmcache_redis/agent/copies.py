# SPDX-License-Identifier: Apache-2.0
"""The threads that copy between an engine's blocks and slots.

Each place (a GPU, or the CPU's memory) has its own threads, so GPUs are copied in parallel and do
not delay each other. CUDA calls have no deadline: a GPU that hangs keeps its threads and the slots
of their copies. Copies queued behind them are cancelled when their lease expires (`drop_late`), and
the agent stops without waiting for them. A GPU that is lost (`CopyThreads.lose`) ends the agent,
because the driver refuses its process everything that follows.

A request waits for its scatters but not for its gathers, so each kind has its own threads. Gathers
from CPU memory run at nice 10, because the engine computes on the same cores: they get about a
tenth of a core that the engine uses, and all of an idle one. At the end of a prefill, where stores
begin, the engine's step then takes 45 ms instead of 60 to 100 ms (two cores, 256 MiB of blocks). A
tenth of a core still reads blocks many times faster than a prefill fills them.

Engines' memory is closed by other threads (`closing`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Literal

from lmcache_redis.agent.closing import ClosingThreads
from lmcache_redis.cache.threads import WorkerThreads
from lmcache_redis.device.calls import DeviceContext
from lmcache_redis.errors import DeviceError, GpuLost

logger = logging.getLogger(__name__)

_GATHER_NICE = 10
# The threads of this place copy nothing: they map engines' memory, which may take seconds. One
# thread per GPU of a large machine: GPUs are mapped in parallel, and a hung one blocks no other.
REGISTERING = "registering"
_REGISTERING_THREADS = 8
# The place of engines that compute on the same cores as these threads.
CPU = "cpu"


class CopyOutcome(Enum):
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"  # the GPU is lost, and may touch the blocks until this process has ended


Kind = Literal["scatter", "gather"]  # into an engine's blocks, or out of them
Copy = Callable[[], CopyOutcome]
Report = Callable[[CopyOutcome], None]


class CopyThreads:
    """For each place, ``threads`` threads that scatter and as many that gather.

    Owned by the loop thread. Threads start with the first copy of their place. Each outcome is
    reported once, by the thread that copied or cancelled; a report must only enqueue.

    wake: called on any thread when `lost` is set.

    Attributes:
        closing: the closes of engines' memory, begun by `close_memory`.
    """

    def __init__(self, threads: int, wake: Callable[[], None] = lambda: None) -> None:
        self.lost: GpuLost | None = None
        self.closing = ClosingThreads()
        self._threads = threads
        self._wake = wake
        self._losing = threading.Lock()
        self._started: dict[str, WorkerThreads] = {}
        self._closed = False

    def put(
        self, kind: Kind, place: str, copy: Copy, report: Report, until_ns: float = math.inf
    ) -> None:
        """Queues a copy, or other work. An engine waits for its scatters, not for its gathers.

        until_ns: on CLOCK_MONOTONIC; if the copy has not started by then, the next `drop_late`
        cancels it.
        """
        name = f"{kind}-{place}"
        threads = self._started.get(name)
        if threads is None:
            count = _REGISTERING_THREADS if place == REGISTERING else self._threads
            nice = _GATHER_NICE if kind == "gather" and place == CPU else 0
            threads = self._started[name] = WorkerThreads(name, count, nice)
            if self._closed:
                threads.stop()
        run = partial(self._run, copy, report)
        threads.put(run, partial(report, CopyOutcome.CANCELLED), until_ns / 1e9)

    def close_memory(self, what: str, device: DeviceContext, report: Report) -> None:
        """Ends the calls of a device, and closes it. what: is closed, for people."""

        def close() -> CopyOutcome:
            device.close()
            return CopyOutcome.DONE

        if self._closed:
            report(CopyOutcome.CANCELLED)
        else:
            run = partial(self._run, close, report, f"closing the memory of {what}")
            self.closing.start(what, device.end_calls, lambda: run() is CopyOutcome.DONE)

    def drop_late(self) -> None:
        """Cancels queued copies whose ``until_ns`` has passed."""
        now_s = time.monotonic()
        for threads in self._started.values():
            threads.drop(now_s)

    def lose(self, error: GpuLost) -> None:
        """A GPU is lost, which is said once: the agent has to end. From any thread."""
        with self._losing:
            is_first, self.lost = self.lost is None, self.lost or error
        if is_first:
            logger.error(
                "a GPU is lost, so this agent ends, and the next one can use it again: %s", error
            )
            self._wake()

    @property
    def backlog(self) -> int:
        return sum(map(len, self._started.values()))

    def close(self, timeout_s: float) -> bool:
        """Finishes copies and closes in flight, cancels queued copies and ends the threads.

        Returns whether all threads have ended. One that has not is blocked in a device call: its
        slots must stay mapped.
        """
        self._closed = True
        for threads in self._started.values():
            threads.stop()
        deadline_s = time.monotonic() + timeout_s
        ended = [
            threads.join(max(0.0, deadline_s - time.monotonic()))
            for threads in self._started.values()
        ]
        ended.append(self.closing.join(max(0.0, deadline_s - time.monotonic())))
        return all(ended)

    def _run(self, copy: Copy, report: Report, what: str = "a copy") -> CopyOutcome:
        outcome = CopyOutcome.FAILED
        try:
            outcome = copy()
        except GpuLost as error:
            outcome = CopyOutcome.LOST
            self.lose(error)
        except DeviceError as error:
            logger.warning("%s failed: %s", what, error)
        except Exception:
            logger.exception("%s failed", what)  # our own bug: only this copy fails
        finally:
            report(outcome)
        return outcome
