# SPDX-License-Identifier: Apache-2.0
"""Jobs, and how they reach the threads of a plane. Each job is answered exactly once.

A job is a chunk in flight (`transfers`) or a question about keys (`control`). Its steps are
stripes, or the whole question. The last step decides the outcome, or the first that fails, or a
stop from any thread. The job is answered when no step is in flight: until then a socket may use its
slots. All jobs of a plane share one lock, which is taken once for all stripes of a call of a mover.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, Generic, TypeVar

from lmcache_redis.processes import NamedThread, check_not_forked, name_in_kernel
from lmcache_redis.tiers import CallOutcome, ChunkIO, Operation, ReadOutcome, WriteOutcome

logger = logging.getLogger(__name__)

OutcomeT = TypeVar("OutcomeT", bound=enum.Enum)
TaskT = TypeVar("TaskT")
# After an exception in a thread. Threads and memory may be short for a moment.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
# How often `wait_for` looks.
_LOOK_EVERY_S = 0.002


# A stripe: the job of its chunk, and its index.
StripeTask = tuple[Any, int]


class Job(ABC, Generic[OutcomeT]):
    """Ends `good` after its steps, or with the first other outcome of a step or a stop.

    deadline: `time.monotonic()` seconds. nodes: each `DataNode` that it needs (None: one that is
    missing). in_flight: steps whose memory a socket may use. Fields change under the lock of
    `Jobs`.
    """

    __slots__ = (
        "answered",
        "deadline",
        "in_flight",
        "nodes",
        "outcome",
        "steps_left",
    )
    good: ClassVar[enum.Enum]
    operation: ClassVar[Operation]

    def __init__(self, steps: int, deadline: float) -> None:
        self.deadline = deadline
        self.nodes: tuple[Any, ...] = ()
        self.steps_left = steps
        self.in_flight = 0
        self.outcome: OutcomeT | None = None
        self.answered = False

    def advance(self, outcome: OutcomeT | None = None) -> None:
        """Under the lock: a step is over, well (None) or with the outcome that ends the job."""
        if outcome is None:
            self.steps_left -= 1
            if self.steps_left:
                return
            outcome = self.good  # type: ignore[assignment]
        if self.outcome is None:
            self.outcome = outcome

    def leave(self, jobs: Jobs) -> None:
        """Under the lock, before the answer."""

    def tell_servers(self) -> None:
        """As `leave`: whether operations of this kind work."""
        nodes = set(self.nodes)
        nodes.discard(None)
        if self.outcome is self.good or (len(nodes) == 1 and self.has_verdict):
            for node in nodes:
                node.health.failures.worked(self.operation)
        elif len(nodes) == 1 and self.outcome is type(self.good)["TIMED_OUT"]:
            nodes.pop().health.failures.late(self.operation)

    @property
    def has_verdict(self) -> bool:
        """Whether its server answered, and not with an error."""
        return self.outcome is self.good

    @abstractmethod
    def answer(self, outcome: OutcomeT) -> None:
        """Tell the caller. Called once, outside the lock, on the thread that ended the job."""


JobT = TypeVar("JobT", bound=Job[Any])


class ChunkJob(Job[OutcomeT]):
    """A chunk in flight; a step is a stripe. done: called with the chunk and the outcome.

    nodes: the node of each stripe, by `routes`. redirected: stripes that were, once.
    """

    __slots__ = ("_done", "chunk", "chunk_key", "redirected", "routes")

    def __init__(self, chunk: ChunkIO, done: Callable[[ChunkIO, OutcomeT], None]) -> None:
        super().__init__(chunk.frame.stripe_count, chunk.deadline)
        self.chunk = chunk
        self.chunk_key = chunk.key
        self.routes: Any = None
        self.redirected: Collection[int] = ()
        self._done = done

    def leave(self, jobs: Jobs) -> None:
        self.tell_servers()
        jobs.transfers.pop(self.chunk, None)
        outcome: Any = self.outcome
        jobs.counts[outcome] += 1
        if outcome is self.good:
            jobs.moved_bytes[outcome] += self.chunk.frame.chunk_bytes

    def answer(self, outcome: OutcomeT) -> None:
        chunk = self.chunk
        del self.chunk  # a queue may still hold the job, but must not hold a slot
        self._done(chunk, outcome)


class Jobs:
    """All jobs that are not answered. Thread-safe.

    The timekeeper, a thread without a connection, ends late jobs while other threads wait for the
    network. It also runs actions that must not run on the caller's thread.

    started, closing, closed: the plane's life cycle. counts: of transfers that were answered, by
    outcome, and what `count` counts. moved_bytes: the payload of the chunks among them that were
    LOADED, and STORED.
    """

    def __init__(self) -> None:
        self.started = self.closing = self.closed = False
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.counts: Counter[enum.Enum | str] = Counter()
        self.moved_bytes: dict[enum.Enum, int] = {ReadOutcome.LOADED: 0, WriteOutcome.STORED: 0}
        # The transfers among them, by chunk.
        self.transfers: dict[Any, Job[Any]] = {}
        # Changed without a lock: each change is one operation of a set, in C.
        self._jobs: set[Job[Any]] = set()
        self.timekeeper = LoopThread("lmcr-time", self._step)
        # What it is to do; None wakes it.
        self._posts: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._wake_at = inf

    def check_own(self) -> None:
        """Raises RuntimeError in a process that was forked since: a lock may be held there."""
        check_not_forked("the Redis plane", self.pid)

    def check_usable(self) -> None:
        """Raises RuntimeError unless the plane runs, in this process."""
        self.check_own()
        if not self.started or self.closed:
            raise RuntimeError("the Redis plane is not running")

    def count(self, what: str, number: int = 1) -> None:
        with self.lock:
            self.counts[what] += number

    def enter(self, jobs: Collection[JobT], chunks: Iterable[ChunkIO] = ()) -> Sequence[JobT]:
        """Register jobs: they will be answered. Returns those to queue, whose servers are up.

        chunks: of transfers, which can be cancelled from now on.
        """
        self._jobs.update(jobs)
        self.transfers.update(zip(chunks, jobs, strict=False))
        refused = self.refuse(jobs)
        accepted = [job for job in jobs if job not in refused] if refused else list(jobs)
        if accepted:
            self._wake(min([job.deadline for job in accepted]))
        return accepted

    def refuse(self, jobs: Collection[Job[Any]]) -> Collection[Job[Any]]:
        """Answer the jobs whose servers are down, on the timekeeper's thread; return them.

        Call it again once the jobs are queued: a server may have gone down in the meantime.
        """
        if self.closing:
            reason, refused = CallOutcome.CANCELLED, jobs
        else:
            nodes = {job.nodes for job in jobs}
            down = {node for some in nodes for node in some if node is None or not node.is_up}
            reason, refused = CallOutcome.UNAVAILABLE, ()
            if down:
                refused = [job for job in jobs if not down.isdisjoint(job.nodes)]
        if refused:
            self.post(partial(self.stop, refused, reason))
        return refused

    def begin_all(self, tasks: Sequence[TaskT]) -> list[TaskT]:
        """Begin steps; return the tasks that may proceed. A task's first item is its job.

        The others have ended, or are late.
        """
        now = time.monotonic()
        begun: list[TaskT] = []
        late: list[Job[Any]] = []
        with self.lock:
            for task in tasks:
                job: Job[Any] = task[0]  # type: ignore[index]
                if job.outcome is not None:
                    continue
                if job.deadline <= now:
                    late.append(job)
                    continue
                job.in_flight += 1
                begun.append(task)
        if late:
            self.stop(late, CallOutcome.TIMED_OUT)
        return begun

    def release(self, jobs: Collection[Job[Any]]) -> None:
        """A step of each job is not in flight any more, and is to be taken again."""
        with self.lock:
            for job in jobs:
                job.in_flight -= 1
        self.conclude(jobs)

    def end(self, job: Job[OutcomeT], outcome: OutcomeT | None = None) -> None:
        """A step that was in flight is over."""
        with self.lock:
            job.in_flight -= 1
            job.advance(outcome)
        self.conclude((job,))

    def stop(self, jobs: Collection[Job[Any]], reason: CallOutcome | WriteOutcome) -> None:
        """End the jobs whose outcome is not decided. Answered once no step is in flight.

        reason: TIMED_OUT, UNAVAILABLE or CANCELLED, which every kind of outcome has; writes may
        have any other of theirs.
        """
        with self.lock:
            for job in jobs:
                if job.outcome is None:
                    job.outcome = type(job.good)[reason.name]
        self.conclude(jobs)

    def stop_all(
        self, reason: CallOutcome, but: type[Job[Any]] | None = None, node: object = None
    ) -> None:
        """Stop every job except those of a kind, or every job that needs `node`."""
        some = [job for job in list(self._jobs) if node is None or node in job.nodes]
        self.stop([job for job in some if but is None or not isinstance(job, but)], reason)

    def any_needs(self, node: object) -> bool:
        """Looks at all of them."""
        return any(node in job.nodes for job in list(self._jobs))

    def conclude(self, jobs: Iterable[Job[Any]]) -> None:
        """Answer the jobs that have an outcome and no step in flight."""
        final: list[Job[Any]] = []
        with self.lock:
            for job in jobs:
                if job.outcome is not None and not job.in_flight and not job.answered:
                    job.answered = True
                    job.leave(self)
                    final.append(job)
        for job in final:
            _answer(job)
        self._jobs.difference_update(final)

    def wait_empty(self, deadline: float) -> None:
        """Wait until every job is answered."""
        wait_for(lambda: not self._jobs, deadline)

    def post(self, action: Callable[[], None]) -> None:
        """Have the timekeeper run `action` soon. Raises RuntimeError when closed."""
        with self.lock:
            if self.closed:
                raise RuntimeError("the Redis plane is closed")
            self._posts.put(action)

    def close(self, timeout_s: float) -> bool:
        """Run what was posted, then end the timekeeper. False if it takes longer."""
        with self.lock:
            self.closed = True
            self._posts.put(None)
        return self.timekeeper.ends_within(timeout_s)

    def _wake(self, deadline: float) -> None:
        """Wake the timekeeper when `deadline` passes."""
        with self.lock:
            if deadline < self._wake_at:
                self._wake_at = deadline
                self._posts.put(None)

    def _step(self) -> bool:
        action = None
        with contextlib.suppress(Empty):
            left_s = min(max(0.0, self._wake_at - time.monotonic()), threading.TIMEOUT_MAX)
            action = self._posts.get(timeout=left_s)
        if action is not None:
            try:
                action()
            except Exception:
                # The error may be a caller's: later actions must still run.
                logger.exception("an action of the Redis plane failed")
        now = time.monotonic()
        if self._wake_at <= now:
            # A deadline that is set from now on is not lost.
            self._wake_at = inf
            soonest = now  # at once again, if it fails
            try:
                jobs = list(self._jobs)
                self.stop([job for job in jobs if job.deadline <= now], CallOutcome.TIMED_OUT)
                soonest = min([job.deadline for job in jobs if job.deadline > now], default=inf)
            finally:
                self._wake(soonest)
        return not self.closed or not self._posts.empty()


def _answer(job: Job[Any]) -> None:
    try:
        job.answer(job.outcome)
    except Exception:
        # A caller's bug must not end a thread that serves others.
        logger.exception("the callback of a Redis job failed")


def wait_for(
    condition: Callable[[], object], deadline: float, every_s: float = _LOOK_EVERY_S
) -> None:
    """Wait until the condition holds, or the deadline has passed."""
    while not condition() and time.monotonic() < deadline:
        time.sleep(every_s)


# ------------------------------------------------------------------- threads


class TaskQueue(Generic[TaskT]):
    """First in, first out; urgent tasks go first. Thread-safe."""

    __slots__ = ("_changed", "_ordinary", "_urgent", "closed")

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._ordinary: deque[TaskT] = deque()
        self._urgent: deque[TaskT] = deque()
        self.closed = False

    def put(self, tasks: Iterable[TaskT], urgent: bool = False) -> None:
        """Dropped if the queue is closed."""
        with self._changed:
            if not self.closed:
                (self._urgent if urgent else self._ordinary).extend(tasks)
                self._changed.notify_all()

    def take_some(self, most: int) -> list[TaskT]:
        """Up to `most` tasks, without waiting."""
        with self._changed:
            urgent = min(most, len(self._urgent))
            ordinary = min(most - urgent, len(self._ordinary))
            some = [self._urgent.popleft() for _ in range(urgent)]
            return some + [self._ordinary.popleft() for _ in range(ordinary)]

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until there is a task, which another thread may take first; False if closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or len(self), timeout_s)
            return not self.closed

    def __len__(self) -> int:
        return len(self._urgent) + len(self._ordinary)

    def close(self) -> None:
        """Drop all tasks, also those put later, and wake all threads."""
        with self._changed:
            self.closed = True
            self._ordinary.clear()
            self._urgent.clear()
            self._changed.notify_all()


def jittered(seconds: float) -> float:
    """Between half of `seconds` and all of it: a fleet does not act at once."""
    return seconds * random.uniform(0.5, 1.0)


def backoff_s(failures: int, first_s: float, longest_s: float) -> float:
    """The pause after some failures in a row: doubles with each, and has jitter."""
    return jittered(min(first_s * 2.0 ** min(failures, 64), max(first_s, longest_s)))


class LoopThread(NamedThread):
    """A daemon thread that calls `step` until it returns False.

    An exception of `step` is a bug, or the process lacks memory or threads for a moment. It is
    logged, once in a row of them, and `step` is called again after a pause.
    """

    def __init__(self, name: str, step: Callable[[], bool]) -> None:
        super().__init__(name)
        self._step = step
        self._failures = 0

    def ends_within(self, timeout_s: float) -> bool:
        """Wait for the end of the thread, if it was started; False if it takes longer."""
        if self.ident is not None:
            self.join(timeout_s)
        return not self.is_alive()

    def run(self) -> None:
        name_in_kernel(self.name)
        while self._goes_on():
            pass

    def _goes_on(self) -> bool:
        try:
            goes_on = self._step()
            self._failures = 0
            return goes_on
        except Exception:
            if not self._failures:
                with contextlib.suppress(Exception):
                    logger.exception("internal error in a Redis plane thread")
            time.sleep(backoff_s(self._failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))
            self._failures += 1
            return True
