"""Jobs: work for the plane's threads. Each job is answered exactly once, whatever happens.

A job is a chunk in flight (`reading`, `writing`) or a question about keys (`control`). Its steps
are stripes, or the whole question. The last step decides the outcome, or the first that fails, or a
stop from any thread. The job is answered when no step is in flight: until then a socket may use its
slots. All jobs of a plane share one lock, which is taken once for all stripes of a call of a mover.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from lmcache_redis.resp.net.topology import Hop
from lmcache_redis.tiers import ReadOutcome, WriteOutcome

logger = logging.getLogger(__name__)

OutcomeT = TypeVar("OutcomeT", bound=enum.Enum)
TaskT = TypeVar("TaskT")
# A stripe: the job of its chunk, its index, and its last redirection, if any.
Task = tuple[Any, int, Hop | None]
# The longest wait without a look at the clock.
_LONGEST_WAIT_S = 3600.0


class Stop(enum.Enum):
    """Why a job may end before its work is done; every kind of outcome has these members."""

    TIMED_OUT = enum.auto()
    UNAVAILABLE = enum.auto()
    CANCELLED = enum.auto()


class Job(ABC, Generic[OutcomeT]):
    """Ends `good` after its steps, or with the first other outcome of a step or a stop.

    deadline: `time.monotonic()` seconds. nodes: each `Node` that it needs (None: one that is
    missing). in_flight: steps whose memory a socket may use. Fields change under the lock of
    `Jobs`.
    """

    __slots__ = (
        "answered",
        "created_at",
        "deadline",
        "in_flight",
        "nodes",
        "outcome",
        "steps_left",
    )
    good: ClassVar[enum.Enum]
    is_store: ClassVar[bool] = False

    def __init__(self, steps: int, deadline: float, created_at: float) -> None:
        self.deadline = deadline
        self.created_at = created_at
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

    @abstractmethod
    def answer(self, outcome: OutcomeT) -> None:
        """Tell the caller. Called once, outside the lock, on the thread that ended the job."""


JobT = TypeVar("JobT", bound=Job[Any])


class Jobs:
    """All jobs that are not answered, and their timekeeper. Thread-safe.

    started, closing, closed: the plane's life cycle. counts: of transfers that were answered, by
    outcome. moved_bytes: the payload of the chunks among them that were LOADED, and STORED.
    """

    def __init__(self) -> None:
        self.started = self.closing = self.closed = False
        self.lock = threading.Lock()
        self.counts: dict[enum.Enum, int] = dict.fromkeys((*ReadOutcome, *WriteOutcome), 0)
        self.moved_bytes: dict[enum.Enum, int] = {ReadOutcome.LOADED: 0, WriteOutcome.STORED: 0}
        # The transfers among them, by chunk.
        self.transfers: dict[Any, Job[Any]] = {}
        # Changed without a lock: each change is one operation of a set, in C.
        self._jobs: set[Job[Any]] = set()
        self._emptied = threading.Condition()
        self._waiting = 0
        self.timekeeper = Timekeeper(self._expire)

    def check_usable(self) -> None:
        """Raises RuntimeError unless the plane runs."""
        if not self.started or self.closed:
            raise RuntimeError("the Redis plane is not running")

    def enter(self, jobs: Collection[JobT]) -> Sequence[JobT]:
        """Register jobs: they will be answered. Returns those to queue, whose servers are up."""
        self._jobs.update(jobs)
        if cancelled := [job for job in jobs if job.answered]:
            self._jobs.difference_update(cancelled)
        refused = self.refuse(jobs)
        accepted = [job for job in jobs if job not in refused] if refused else list(jobs)
        if accepted:
            self.timekeeper.watch(min([job.deadline for job in accepted]))
        return accepted

    def refuse(self, jobs: Collection[Job[Any]]) -> Collection[Job[Any]]:
        """Answer the jobs whose servers are down, on the timekeeper's thread; return them.

        Call it again once the jobs are queued: a server may have gone down in the meantime.
        """
        if self.closing:
            reason, refused = Stop.CANCELLED, jobs
        else:
            nodes = {job.nodes for job in jobs}
            down = {node for some in nodes for node in some if node is None or not node.is_up}
            reason, refused = Stop.UNAVAILABLE, ()
            if down:
                refused = [job for job in jobs if not down.isdisjoint(job.nodes)]
        if refused:
            self.timekeeper.post(partial(self.stop, refused, reason))
        return refused

    def begin(self, job: Job[Any]) -> bool:
        """Begin a step. False: the job has ended or is late; the step must not be taken."""
        return bool(self.begin_all([(job,)]))

    def begin_all(self, tasks: Sequence[TaskT]) -> list[TaskT]:
        """Begin steps; return the tasks that may proceed. A task's first item is its job."""
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
            self.stop(late, Stop.TIMED_OUT)
        return begun

    def release(self, jobs: Iterable[Job[Any]]) -> None:
        """A step of each job is not in flight any more, and is to be taken again."""
        jobs = list(jobs)
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

    def stop(self, jobs: Collection[Job[Any]], reason: Stop | WriteOutcome) -> None:
        """End the jobs whose outcome is not decided. Answered once no step is in flight."""
        with self.lock:
            for job in jobs:
                if job.outcome is None:
                    job.outcome = type(job.good)[reason.name]
        self.conclude(jobs)

    def stop_all(
        self, reason: Stop, but: tuple[type[Job[Any]], ...] = (), node: object = None
    ) -> None:
        """Stop every job except those of some kinds, or every job that needs `node`."""
        some = [job for job in list(self._jobs) if node is None or node in job.nodes]
        self.stop([job for job in some if not isinstance(job, but)], reason)

    def conclude(self, jobs: Iterable[Job[Any]]) -> None:
        """Answer the jobs that have an outcome and no step in flight."""
        final: list[Job[Any]] = []
        with self.lock:
            for job in jobs:
                if job.outcome is not None and not job.in_flight and not job.answered:
                    job.answered = True
                    job.leave(self)
                    final.append(job)
        if not final:
            return
        for job in final:
            _answer(job)
        self._jobs.difference_update(final)
        if self._waiting and not self._jobs:
            with self._emptied:
                self._emptied.notify_all()

    def needs(self, node: object) -> bool:
        """Whether a job that is not answered needs the node."""
        return any(node in job.nodes for job in list(self._jobs))

    def count(self, kind: type[Job[Any]]) -> int:
        return sum(isinstance(job, kind) for job in list(self._jobs))

    def wait_empty(self, deadline: float) -> bool:
        """Wait until every job is answered; False if the deadline passes first."""
        with self._emptied:
            self._waiting += 1
            try:
                left_s = max(0.0, deadline - time.monotonic())
                return self._emptied.wait_for(lambda: not self._jobs, timeout=left_s)
            finally:
                self._waiting -= 1

    def _expire(self, now: float) -> float | None:
        """Stop the jobs past their deadlines; return the next deadline, if any."""
        jobs = list(self._jobs)
        self.stop([job for job in jobs if job.deadline <= now], Stop.TIMED_OUT)
        return min([job.deadline for job in jobs if job.deadline > now], default=None)


def _answer(job: Job[Any]) -> None:
    try:
        job.answer(job.outcome)
    except Exception:
        # A caller's bug must not end a thread that serves others.
        logger.exception("the callback of a Redis job failed")


class TaskQueue(Generic[TaskT]):
    """First in, first out; urgent tasks go first. Thread-safe.

    Each change is one operation of a deque, in C, and a thread waits on a lock of its own: a
    `threading.Condition` would add several hundredths of a millisecond to a scan of keys.
    """

    __slots__ = ("_ordinary", "_urgent", "_waiters", "closed")

    def __init__(self) -> None:
        self._ordinary: deque[TaskT] = deque()
        self._urgent: deque[TaskT] = deque()
        self._waiters: deque[threading.Lock] = deque()
        self.closed = False

    def put(self, tasks: Iterable[TaskT], urgent: bool = False) -> None:
        (self._urgent if urgent else self._ordinary).extend(tasks)
        if self.closed:
            self.close()
        self._wake_all()

    def take(self) -> TaskT | None:
        """Wait for the next task. None: the queue is closed."""
        while self.wait():
            # Another thread may take it first.
            task = _pop(self._urgent)
            if task is None:
                task = _pop(self._ordinary)
            if task is not None:
                return task
        return None

    def take_some(self, most: int) -> list[TaskT]:
        """Up to `most` tasks, without waiting."""
        some: list[TaskT] = []
        for tasks in (self._urgent, self._ordinary):
            with contextlib.suppress(IndexError):
                while len(some) < most:
                    some.append(tasks.popleft())
        return some

    def put_back(self, tasks: Sequence[TaskT]) -> None:
        """Return tasks that were taken: they precede all but the urgent ones."""
        self._ordinary.extendleft(reversed(tasks))
        self.put(())

    def wait(self) -> bool:
        """Wait until there is a task, which another thread may take first; False if closed."""
        while not self.closed:
            if self._urgent or self._ordinary:
                return True
            waiter = threading.Lock()
            waiter.acquire()
            # Enqueue, then look again: a task put before that did not wake this thread.
            self._waiters.append(waiter)
            if self.closed or self._urgent or self._ordinary:
                self._wake_all()
            waiter.acquire()
        return False

    def _wake_all(self) -> None:
        while (waiter := _pop(self._waiters)) is not None:
            waiter.release()

    def __len__(self) -> int:
        return len(self._urgent) + len(self._ordinary)

    def close(self) -> None:
        """Drop all tasks, also those put later, and wake all threads."""
        self.closed = True
        self._ordinary.clear()
        self._urgent.clear()
        self._wake_all()


def _pop(items: deque[TaskT]) -> TaskT | None:
    try:
        return items.popleft()
    except IndexError:
        return None


class Timekeeper:
    """A thread that ends late jobs, while other threads wait for the network.

    It also runs actions that must not run on the caller's thread. expire: called with the time;
    ends what is late and returns the next deadline, or None.
    """

    def __init__(self, expire: Callable[[float], float | None]) -> None:
        self._expire = expire
        self._changed = threading.Condition(threading.Lock())
        self._posts: deque[Callable[[], None]] = deque()
        self._wake_at = float("inf")
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="lmcr-time", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def watch(self, deadline: float) -> None:
        """Call `expire` when `deadline` passes."""
        with self._changed:
            if deadline < self._wake_at:
                self._wake_at = deadline
                self._changed.notify()

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` soon. Raises RuntimeError when closed."""
        with self._changed:
            if self._closed:
                raise RuntimeError("the Redis plane is closed")
            self._posts.append(action)
            self._changed.notify()

    def close(self, timeout_s: float) -> bool:
        """Run what was posted, then end the thread. False if it takes longer than `timeout_s`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        return joined(self._thread, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._posts and not self._closed:
                    left = self._wake_at - time.monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(min(left, _LONGEST_WAIT_S))
                posts, self._posts = self._posts, deque()
                if self._closed and not posts:
                    return
                late = self._wake_at <= time.monotonic()
                if late:
                    # A deadline that is set while `expire` runs is not lost.
                    self._wake_at = float("inf")
            for action in posts:
                action()
            if late:
                soonest = self._expire(time.monotonic())
                if soonest is not None:
                    self.watch(soonest)


def joined(thread: threading.Thread, timeout_s: float) -> bool:
    """Wait for the end of a thread, if it was started; False if it takes longer."""
    if thread.ident is not None:
        thread.join(timeout_s)
    return not thread.is_alive()
