"""Work for the plane's threads, each piece answered exactly once whatever happens.

A job is a number of steps: a chunk's stripes, or one call. A thread brackets each step with
`begin` and `end`; `stop` ends the job early, from any thread. The answer is given when the
outcome is decided and no step is under way: until then a socket may use the job's slots.
With the answer the job lets go of chunk and callback, so that a queue which still holds the
job holds no slot.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

OutcomeT = TypeVar("OutcomeT", bound=enum.Enum)


class Stop(enum.Enum):
    """Why a job may end before its work is done; every kind of outcome has these members."""

    TIMED_OUT = enum.auto()
    UNAVAILABLE = enum.auto()
    CANCELLED = enum.auto()


class Job(Generic[OutcomeT]):
    """Ends `good` after `steps` steps, or with the first other outcome a step or stop brings.

    deadline: `time.monotonic()` seconds. It counts from `JobRegistry.add` on, and leaves the
    registry when it has been answered. nodes: the servers that it cannot do without (`node`).
    Subclasses define `_answer`.
    """

    __slots__ = (
        "_answered",
        "_good",
        "_in_flight",
        "_lock",
        "_outcome",
        "_registry",
        "_steps_left",
        "created_at",
        "deadline",
        "nodes",
    )

    def __init__(self, steps: int, good: OutcomeT, deadline: float, registry: JobRegistry) -> None:
        self.deadline = deadline
        self.created_at = time.monotonic()
        self.nodes: tuple[object, ...] = ()
        self._registry = registry
        self._good = good
        self._lock = threading.Lock()
        self._steps_left = steps
        self._in_flight = 0
        self._outcome: OutcomeT | None = None
        self._answered = False

    def begin(self, step: int = 0) -> bool:
        """False: the job has ended or is past its deadline; leave this step alone."""
        if self.deadline <= time.monotonic():
            self.stop(Stop.TIMED_OUT)
            return False
        with self._lock:
            if self._outcome is not None:
                return False
            self._in_flight += 1
            return True

    # These run for every stripe, with caches full of payload: the usual case is one frame.

    def release(self, steps: int = 1) -> None:
        """A begun step lets go of the slots: it is to be advanced, or begun again, later."""
        with self._lock:
            self._in_flight -= steps
            if self._outcome is None:
                return
            final = self._decide(None)
        self._conclude(final)

    def advance(self, outcome: OutcomeT | None = None) -> None:
        """A released step is over, well (None) or with the outcome that ends the job."""
        with self._lock:
            if outcome is None:
                self._steps_left -= 1
                if self._steps_left == 0:
                    outcome = self._good
                elif self._outcome is None:
                    return
            final = self._decide(outcome)
        self._conclude(final)

    def end(self, outcome: OutcomeT | None = None) -> None:
        """A begun step is over: `release` and `advance` at once."""
        with self._lock:
            self._in_flight -= 1
            if outcome is None:
                self._steps_left -= 1
                if self._steps_left == 0:
                    outcome = self._good
                elif self._outcome is None:
                    return
            final = self._decide(outcome)
        self._conclude(final)

    def stop(self, reason: Stop) -> None:
        """End the job unless its outcome is decided. Answered once no step is under way."""
        with self._lock:
            final = self._decide(type(self._good)[reason.name])
        self._conclude(final)

    @property
    def ended(self) -> bool:
        """Whether the outcome is decided."""
        return self._outcome is not None

    def _decide(self, outcome: OutcomeT | None) -> OutcomeT | None:
        """Under the lock: note an outcome; the one to answer with if that time has come."""
        if self._outcome is None:
            self._outcome = outcome
        if self._outcome is None or self._in_flight or self._answered:
            return None
        self._answered = True
        return self._outcome

    def _conclude(self, final: OutcomeT | None) -> None:
        if final is None:
            return
        self._tell(self._answer, final)
        self._registry.discard(self)

    @staticmethod
    def _tell(answer: Callable[..., None], *what: object) -> None:
        """Call a caller's callback: its bug must not end a thread that serves others."""
        try:
            answer(*what)
        except Exception:
            logger.exception("the callback of a Redis job failed")

    def _answer(self, outcome: OutcomeT) -> None:
        """Tell whoever waits. Called once, outside the lock, on the thread that ended the job."""
        raise AssertionError("a kind of job that answers nobody")


class JobRegistry:
    """Every job that is not answered yet. Thread-safe."""

    __slots__ = ("_changed", "_jobs", "_waiting")

    def __init__(self) -> None:
        # Changed without a lock: each change is one operation of a set, in C.
        self._jobs: set[Job[Any]] = set()
        self._changed = threading.Condition()
        self._waiting = 0

    def add(self, jobs: Iterable[Job[Any]]) -> None:
        self._jobs.update(jobs)

    def discard(self, job: Job[Any]) -> None:
        self._jobs.discard(job)
        if self._waiting and not self._jobs:
            with self._changed:
                self._changed.notify_all()

    def stop_all(
        self, reason: Stop, kind: type[Job[Any]] | None = None, node: object = None
    ) -> None:
        """Stop every job (of a kind; that needs a node)."""
        for job in self._snapshot():
            if (kind is None or isinstance(job, kind)) and (node is None or node in job.nodes):
                job.stop(reason)

    def needs(self, node: object) -> bool:
        """Whether a job that is not answered yet cannot do without the node."""
        return any(node in job.nodes for job in self._snapshot())

    def expire(self, now: float) -> float | None:
        """Stop jobs past their deadlines; the soonest deadline still to come, if any."""
        soonest: float | None = None
        for job in self._snapshot():
            if job.deadline <= now:
                job.stop(Stop.TIMED_OUT)
            elif soonest is None or job.deadline < soonest:
                soonest = job.deadline
        return soonest

    def wait_empty(self, deadline: float) -> bool:
        """Wait until every job is answered; False if that takes past the deadline."""
        with self._changed:
            self._waiting += 1
            try:
                left_s = max(0.0, deadline - time.monotonic())
                return self._changed.wait_for(lambda: not self._jobs, timeout=left_s)
            finally:
                self._waiting -= 1

    def count(self, kind: type[Job[Any]]) -> int:
        return sum(isinstance(job, kind) for job in self._snapshot())

    def _snapshot(self) -> list[Job[Any]]:
        return list(self._jobs)
