"""Work for the plane's threads, each piece answered exactly once whatever happens.

A job is a chunk in flight (`reading`, `writing`) or a question about keys (`control`); its steps
are stripes, or the whole question. The outcome is decided by the last step, by the first that
fails, or by a stop from any thread. It is answered when no step is in flight, because until then a
socket may use the job's slots. All jobs of a plane share one lock: what a call of a mover did for
many stripes is accounted for at once.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from lmcache_redis.resp.outcomes import CallOutcome, ReadOutcome, WriteOutcome

logger = logging.getLogger(__name__)

OutcomeT = TypeVar("OutcomeT", bound=enum.Enum)
TaskT = TypeVar("TaskT")
# The longest wait without a look at the clock.
_LONGEST_WAIT_S = 3600.0


class Stop(enum.Enum):
    """Why a job may end before its work is done; every kind of outcome has these members."""

    TIMED_OUT = enum.auto()
    UNAVAILABLE = enum.auto()
    CANCELLED = enum.auto()


class ServerState(Protocol):
    """A server that jobs need."""

    @property
    def is_up(self) -> bool: ...


class Job(ABC, Generic[OutcomeT]):
    """Ends `good` after its steps, or with the first other outcome that a step or stop brings.

    deadline: `time.monotonic()` seconds. nodes: the servers that it cannot do without (None: one
    that is not there). in_flight: steps of which a socket may use the memory. Fields change under
    the lock of `Jobs`.
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
        self.nodes: tuple[ServerState | None, ...] = ()
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

    @abstractmethod
    def leave(self, jobs: Jobs) -> None:
        """Under the lock, before the answer: count the job and forget it."""

    @abstractmethod
    def answer(self, outcome: OutcomeT) -> None:
        """Tell the caller. Called once, outside the lock, on the thread that ended the job."""


JobT = TypeVar("JobT", bound=Job[Any])


class Jobs:
    """Every job that is not answered, the clock of their deadlines, and what they came to.

    started, closing, closed: how far the plane has come in its life. Thread-safe.
    """

    def __init__(self) -> None:
        self.started = self.closing = self.closed = False
        self.lock = threading.Lock()
        self.bytes_in = self.bytes_out = self.keys_scanned = self.keys_removed = 0
        self.reads = dict.fromkeys(ReadOutcome, 0)
        self.writes = dict.fromkeys(WriteOutcome, 0)
        self.calls = dict.fromkeys(CallOutcome, 0)
        # The transfers among them, by chunk.
        self.transfers: dict[Any, Job[Any]] = {}
        # Changed without a lock: each change is one operation of a set, in C.
        self._jobs: set[Job[Any]] = set()
        self._emptied = threading.Condition()
        self._waiting = 0
        self.removals = Removals(self.transfers)
        self.timekeeper = Timekeeper(self._expire)

    def check_usable(self) -> None:
        """Raises RuntimeError unless the plane runs."""
        if not self.started or self.closed:
            raise RuntimeError("the Redis plane is not running")

    def enter(self, jobs: Collection[JobT]) -> Sequence[JobT]:
        """From here on the jobs will be answered. Those that can be tried: queue these."""
        self._jobs.update(jobs)
        if cancelled := [job for job in jobs if job.answered]:
            self._jobs.difference_update(cancelled)
        refused = self.refuse(jobs)
        accepted = [job for job in jobs if job not in refused] if refused else list(jobs)
        if accepted:
            self.timekeeper.watch(min([job.deadline for job in accepted]))
        return accepted

    def refuse(self, jobs: Collection[Job[Any]]) -> Collection[Job[Any]]:
        """The jobs that cannot be tried: they are answered, on the timekeeper's thread.

        To be called again once they have been queued: the server may have gone meanwhile.
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
        """A step is in flight. False: the job has ended or is late; leave this step alone."""
        return bool(self.begin_all([(job,)]))

    def begin_all(self, tasks: Sequence[TaskT]) -> list[TaskT]:
        """The tasks, each beginning with its job, that are in flight from here on."""
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
        """A step of each is not in flight any more; it is not over."""
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

    def stop(self, jobs: Collection[Job[Any]], reason: Stop) -> None:
        """End the jobs whose outcome is not decided. Answered once no step is in flight."""
        with self.lock:
            for job in jobs:
                if job.outcome is None:
                    job.outcome = type(job.good)[reason.name]
        self.conclude(jobs)

    def stop_all(
        self, reason: Stop, but: tuple[type[Job[Any]], ...] = (), node: object = None
    ) -> None:
        """Stop every job (but of some kinds; that needs a node)."""
        self.stop(
            [
                job
                for job in list(self._jobs)
                if not isinstance(job, but) and (node is None or node in job.nodes)
            ],
            reason,
        )

    def conclude(self, jobs: Iterable[Job[Any]]) -> None:
        """Answer those jobs whose time for that has come."""
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
        """Whether a job that is not answered cannot do without the node."""
        return any(node in job.nodes for job in list(self._jobs))

    def count(self, kind: type[Job[Any]]) -> int:
        return sum(isinstance(job, kind) for job in list(self._jobs))

    def wait_empty(self, deadline: float) -> bool:
        """Wait until every job is answered; False if that takes past the deadline."""
        with self._emptied:
            self._waiting += 1
            try:
                left_s = max(0.0, deadline - time.monotonic())
                return self._emptied.wait_for(lambda: not self._jobs, timeout=left_s)
            finally:
                self._waiting -= 1

    def _expire(self, now: float) -> float | None:
        """Stop jobs past their deadlines; the soonest deadline still to come, if any."""
        jobs = list(self._jobs)
        self.stop([job for job in jobs if job.deadline <= now], Stop.TIMED_OUT)
        return min([job.deadline for job in jobs if job.deadline > now], default=None)


def _answer(job: Job[Any]) -> None:
    try:
        job.answer(job.outcome)
    except Exception:
        # A caller's bug must not end a thread that serves others.
        logger.exception("the callback of a Redis job failed")


class Removals:
    """The removals in flight, so that none takes a stripe of a later store. Thread-safe.

    Removals and stores of one chunk go over different connections: a store waits for the answers to
    the removals of its chunk, and a chunk that is being stored is not removed because of a failed
    read or an earlier store. transfers: `Jobs.transfers`; a store is added to it before
    `is_empty` and `wait`.
    """

    def __init__(self, transfers: Mapping[Any, Job[Any]]) -> None:
        self._transfers = transfers
        self._lock = threading.Lock()
        # By chunk key: how many removals, and the stores that wait for them.
        self._removals: dict[bytes, tuple[int, list[Callable[[], None]]]] = {}

    def begin(self, chunk_key: bytes, unless_stored: bool) -> bool:
        """Note a removal that is about to be queued; False: leave it, the chunk is being stored."""
        with self._lock:
            if unless_stored:
                transfers = list(self._transfers.items())
                if any(chunk.key == chunk_key and job.is_store for chunk, job in transfers):
                    return False
            count, waiting = self._removals.get(chunk_key, (0, []))
            self._removals[chunk_key] = count + 1, waiting
            return True

    def end(self, chunk_key: bytes) -> None:
        """A removal was answered, or will never be sent."""
        with self._lock:
            count, waiting = self._removals.pop(chunk_key)
            if count > 1:
                self._removals[chunk_key] = count - 1, waiting
                return
        for start in waiting:
            start()

    def is_empty(self) -> bool:
        """Whether no removal is in flight: stores that are in `transfers` need not wait."""
        with self._lock:
            return not self._removals

    def wait(self, chunk_key: bytes, start: Callable[[], None]) -> bool:
        """Call `start` when the removals of the chunk have ended; False: none is in flight."""
        with self._lock:
            if chunk_key not in self._removals:
                return False
            self._removals[chunk_key][1].append(start)
            return True


class TaskQueue(Generic[TaskT]):
    """First in, first out, but what is urgent goes first. Thread-safe.

    Each change is one operation of a deque, in C; a thread waits on a lock of its own. A
    `threading.Condition` would cost a scan of keys several hundredths of a millisecond.
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
        """The next task, once there is one. None: closed."""
        while self.wait():
            # Another thread may take what was waited for.
            for task in self.take_some(1):
                return task
        return None

    def take_some(self, most: int, urgent: bool = False) -> list[TaskT]:
        """The next tasks that are there, at most so many. urgent: only such."""
        some: list[TaskT] = []
        for tasks in (self._urgent,) if urgent else (self._urgent, self._ordinary):
            with contextlib.suppress(IndexError):
                while len(some) < most:
                    some.append(tasks.popleft())
        return some

    def wait(self) -> bool:
        """Wait until there is a task, which another thread may take first; False if closed."""
        while not self.closed:
            if self._urgent or self._ordinary:
                return True
            waiter = threading.Lock()
            waiter.acquire()
            # First in line, then another look: what is put in between wakes no other.
            self._waiters.append(waiter)
            if self.closed or self._urgent or self._ordinary:
                self._wake_all()
            waiter.acquire()
        return False

    def _wake_all(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._waiters.popleft().release()

    def __len__(self) -> int:
        """Tasks that wait."""
        return len(self._urgent) + len(self._ordinary)

    def close(self) -> None:
        """From now on there is no task. What is in the queue is dropped."""
        self.closed = True
        self._ordinary.clear()
        self._urgent.clear()
        self._wake_all()


class Timekeeper:
    """A thread that ends jobs whose time has passed, while others wait for the network.

    It also runs what must be answered at once but not on the caller's own thread.
    expire: given the time, ends what is late and says when to come again (None: nothing).
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
        """Be there when `deadline` passes."""
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
        """Run what was posted, then end. False if that takes longer than `timeout_s`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

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
                    # Deadlines that come in while expire runs are not overlooked.
                    self._wake_at = float("inf")
            for action in posts:
                action()
            if late:
                soonest = self._expire(time.monotonic())
                if soonest is not None:
                    self.watch(soonest)
