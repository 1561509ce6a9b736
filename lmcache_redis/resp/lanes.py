"""Stripes on several connections of a thread at once.

While the server works on the request of one connection, the thread moves the bytes of another: the
server is never idle, reads every value straight to where it stays, and queues no copies of replies.
One thread is faster than several, which would wait for each other's GIL (docs/data-plane.md has the
measurement). Replies arrive in the order of the requests, so the thread waits for the connection
that it asked first.

A stripe is in flight from its request to its end. If its job ends earlier (late, cancelled), the
rest of the reply is received into memory of the thread, and the slot is free. `reading` and
`writing` say what follows from the end of a stripe.
"""

from __future__ import annotations

import errno
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lmcache_redis.errors import ConfigError, RedisError, RedisTimeout, RedisUnavailable
from lmcache_redis.resp.bulk import (
    MOST_TASKS,
    QUIET_MS,
    SENT,
    SLICE_S,
    Call,
    End,
    Failure,
    Handle,
    Moved,
    Mover,
    Packed,
    error_in,
    mover_for,
)
from lmcache_redis.resp.health import Server, Worker
from lmcache_redis.resp.jobs import Job, Jobs, OutcomeT, Stop, Task, TaskQueue
from lmcache_redis.resp.net.connection import Connection
from lmcache_redis.resp.net.wire import ASKING_COMMAND
from lmcache_redis.tiers import ChunkIO

# The pause before the next attempt, if the server has no room for another connection.
_WIDEN_AGAIN_S = 1.0
# Requests sent together may be late together: each reply has at least this time.
_LEAST_PATIENCE_S = 0.05


# Called with a chunk key and a stripe count.
Remove = Callable[[bytes, int], None]


class Transfer(Job[OutcomeT]):
    """A chunk in flight; a step is a stripe. done: called with the chunk and the outcome."""

    __slots__ = ("_done", "_remove", "_remove_stripes", "chunk", "chunk_key")

    def __init__(
        self, chunk: ChunkIO, done: Callable[[ChunkIO, OutcomeT], None], remove: Remove, now: float
    ) -> None:
        super().__init__(chunk.frame.stripe_count, chunk.deadline, now)
        self.chunk = chunk
        self.chunk_key = chunk.key
        self._done = done
        self._remove = remove
        self._remove_stripes = 0  # how many to remove before the answer

    def leave(self, jobs: Jobs) -> None:
        jobs.transfers.pop(self.chunk, None)
        outcome: Any = self.outcome
        jobs.counts[outcome] += 1
        if outcome is self.good:
            jobs.moved_bytes[outcome] += self.chunk.frame.chunk_bytes

    def answer(self, outcome: OutcomeT) -> None:
        chunk = self.chunk
        del self.chunk  # a queue may still hold the job, but must not hold a slot
        try:
            # Before the callback, which may store the chunk again.
            if self._remove_stripes:
                self._remove(self.chunk_key, self._remove_stripes)
        finally:
            self._done(chunk, outcome)


@dataclass(slots=True, eq=False)
class Lane:
    """A connection, and the stripe in flight on it.

    task: None if there is none, or if its job has ended and the rest of its reply is dropped.
    until: when the connection is closed unless the reply has arrived (`time.monotonic()`).
    """

    connection: Connection
    handle: Handle
    task: Task | None = None
    packed: Packed = SENT
    until: float = 0.0


class BulkWorker(Worker):
    """Moves the stripes of a queue on up to `connections` connections.

    It begins with one, and opens more when more stripes wait than it has connections.
    """

    _is_load: ClassVar[bool]
    # Whether the mover hashes what it loads.
    _checksums = True

    def __init__(self, name: str, server: Server, queue: TaskQueue[Task], connections: int) -> None:
        super().__init__(name, server)
        self._queue = queue
        self._connections = connections
        self._op_timeout_s = server.options.op_timeout_s
        self._mover: Mover
        self._idle: list[Lane] = []
        # In the order of the requests.
        self._busy: deque[Lane] = deque()
        # Whether the last of these was sent in part.
        self._is_sending = False
        self._widen_at = 0.0

    # ------------------------------------------------------ what subclasses say

    @abstractmethod
    def _pack(self, task: Task) -> Packed:
        """What a mover needs to move a stripe."""

    @abstractmethod
    def _succeeded(self, done: Sequence[tuple[Task, bytes]]) -> None:
        """Stripes that ended well, with their store ids."""

    @abstractmethod
    def _failed(self, lane: Lane, task: Task, failure: Failure, error: RedisError | None) -> None:
        """A stripe that failed. Its connection is closed if it is out of step.

        error: of the connection or the server; None if the failure is about the value.
        """

    @abstractmethod
    def _lost(self, lane: Lane, task: Task, error: RedisError) -> None:
        """A stripe whose connection was closed."""

    @property
    def _may_send(self) -> bool:
        return True

    @property
    def _may_widen(self) -> bool:
        return True

    @property
    def _most_tasks(self) -> int:
        """How many stripes that wait are packed for one call; those not sent are packed again."""
        return MOST_TASKS

    def _sent(self, jobs: Collection[Any]) -> None:
        """A stripe of each job was sent from its slot."""

    def _release_ended(self, now: float) -> None:
        """Free the slots of stripes in flight whose jobs have ended."""

    def _all_closed(self) -> None:
        """All connections were closed, and no stripe is in flight."""

    def serve(self, connection: Connection) -> bool:
        self._mover = mover_for(connection.stream)
        self._add_lane(connection)
        self._widen_at = 0.0
        try:
            while self._idle or self._busy:
                if not self._busy and not self._may_send:
                    return True
                if not self._busy:
                    if not self._queue.wait():
                        return False
                    # A connection that died at rest must not cost the others their next stripes.
                    self._drop_dead()
                    if not self._idle:
                        return True
                if self._may_send and len(self._queue) > len(self._idle):
                    self._widen()
                self._move()
                self._end_late()
            return True
        finally:
            self._close_all()

    def _add_lane(self, connection: Connection) -> None:
        self._idle.append(Lane(connection, self._mover.handle(connection.stream)))

    def _move(self) -> None:
        """Call the mover with the stripes in flight and those that wait."""
        begun: list[Task] = []
        try:
            idle = self._begin_next(begun) if self._may_send else []
            if not self._busy and not begun:
                return
            packed = [self._pack(task) for task in begun]
            lanes = [*self._busy, *idle]
            now = time.monotonic()
            jobs = [lane.task[0] for lane in self._busy if lane.task and lane.packed is not SENT]
            jobs += [task[0] for task in begun]
            transfer = self._mover.load if self._is_load else self._mover.store
            moved = transfer(
                Call(
                    [lane.handle for lane in lanes],
                    [lane.packed for lane in self._busy] + packed,
                    len(self._busy),
                    self._is_sending,
                    not begun or not len(self._queue),
                    min([now + SLICE_S, *[job.deadline for job in jobs]]),
                    self._checksums,
                    QUIET_MS if len(begun) < len(idle) else int(SLICE_S * 1e3),
                )
            )
        except BaseException:
            # A bug. `_close_all` answers those in flight.
            jobs = [task[0] for task in begun]
            self._jobs.stop(jobs, Stop.UNAVAILABLE)
            self._jobs.release(jobs)
            raise
        self._account(lanes, begun, packed, moved, now)

    def _begin_next(self, begun: list[Task]) -> list[Lane]:
        """Append stripes that wait to `begun`; return the lanes that they may use."""
        tasks = self._queue.take_some(self._most_tasks)
        asking = next((n for n, (_, _, hop) in enumerate(tasks) if hop and hop.asking), None)
        if asking is not None:
            # That one alone, on a lane that has sent ASKING; or those before it.
            most = asking or min(1, len(self._idle))
            self._queue.put_back(tasks[most:])
            tasks = tasks[:most]
        begun += self._jobs.begin_all(tasks)
        if asking == 0 and begun:
            return self._ask_first(begun)
        return self._idle

    def _ask_first(self, begun: list[Task]) -> list[Lane]:
        """Send ASKING, which a stripe that follows an ASK needs, on a lane; return that lane."""
        lane, task = self._idle[0], begun[0]
        try:
            lane.connection.call(ASKING_COMMAND, 1, task[0].deadline)
        except RedisError as error:
            begun.clear()
            self._jobs.release((task[0],))
            if not lane.connection.is_open:
                self._idle.remove(lane)
            self._judge(error, lane.connection)
            self._jobs.stop((task[0],), self._stop_for(error))
        return [lane]

    def _account(
        self,
        lanes: Sequence[Lane],
        begun: Sequence[Task],
        packed: Sequence[Packed],
        moved: Moved,
        now: float,
    ) -> None:
        """Process what was sent, what ended, and what was not sent."""
        in_flight: list[tuple[Lane, Task | None]] = [(lane, lane.task) for lane in self._busy]
        until = now + self._op_timeout_s
        for number, task, some in zip(moved.lanes, begun, packed, strict=False):
            lane = lanes[number]
            lane.task, lane.packed, lane.until = task, some, until
            in_flight.append((lane, task))
        left = begun[len(moved.lanes) :]
        if left:
            self._jobs.release([task[0] for task in left])
            self._queue.put_back(left)

        # The stripe that was sent in part before is sent now, or is still the last.
        sent = in_flight[len(self._busy) - self._is_sending :]
        self._is_sending = moved.sending == errno.EAGAIN
        if self._is_sending:
            sent.pop()
        if sent and not self._is_load:
            self._sent([task[0] for _, task in sent if task is not None])
            half_sent = in_flight[-1][0] if self._is_sending else None
            for lane, _ in sent:
                if lane is not half_sent:
                    lane.packed = SENT

        ended, in_flight = in_flight[: len(moved.done)], in_flight[len(moved.done) :]
        self._busy = deque([lane for lane, _ in in_flight])
        busy = set(self._busy)
        free = dict.fromkeys([*self._idle, *[lane for lane, _ in ended]])
        self._idle = [lane for lane in free if lane not in busy]

        good = [
            (task, result)
            for (_, task), result in zip(ended, moved.done, strict=True)
            if task is not None and isinstance(result, bytes)
        ]
        if good:
            self._succeeded(good)
        if moved.done and not isinstance(moved.done[-1], bytes):
            self._see_to(*ended[-1], moved.done[-1])
        if moved.sending and not self._is_sending:
            lane = self._busy[-1]
            self._give_up(lane, lane.connection.stream.lost(moved.sending))

    def _see_to(self, lane: Lane, task: Task | None, failure: Failure) -> None:
        error = error_in(failure, lane.connection.stream)
        if failure[0] >= End.OTHER_LENGTH:
            lane.connection.close()
        if task is not None:
            self._failed(lane, task, failure, error)
        elif error is not None:
            self._judge(error, lane.connection)
        if not lane.connection.is_open and lane in self._idle:
            self._idle.remove(lane)

    def _end_late(self) -> None:
        """Free the slots of ended jobs, and close connections whose replies are overdue."""
        if not self._busy:
            return
        now = time.monotonic()
        self._release_ended(now)
        last = self._busy[-1]
        if self._is_sending and last.task is not None and last.task[0].deadline <= now:
            self._give_up(last, self._late)
        if self._busy and self._busy[0].until <= now:
            self._give_up(self._busy[0], self._late)
            if self._busy:
                self._busy[0].until = max(self._busy[0].until, now + _LEAST_PATIENCE_S)

    def _give_up(self, lane: Lane, error: RedisError) -> None:
        """Close a connection that has a stripe in flight."""
        if lane is self._busy[-1]:
            self._is_sending = False
        self._busy.remove(lane)
        lane.connection.close()
        if lane.task is not None:
            self._lost(lane, lane.task, error)
        else:
            self.connections_lost += 1

    @property
    def _late(self) -> RedisTimeout:
        return RedisTimeout(
            f"Redis at {self._server.connector.endpoint.where} did not answer in time"
        )

    @property
    def _lanes(self) -> int:
        return len(self._idle) + len(self._busy)

    def _widen(self) -> None:
        """Open a connection for each stripe that waits, up to the limit."""
        if self._lanes >= self._connections or not self._may_widen or not self._health.is_up:
            return
        if time.monotonic() < self._widen_at:
            return
        # First drop those that died unnoticed: a stripe lost on a new connection is not retried.
        self._drop_dead()
        # The stripes in flight have deadlines to keep.
        jobs = [lane.task[0] for lane in self._busy if lane.task]
        deadline = min([job.deadline for job in jobs], default=float("inf"))
        while self._lanes < self._connections and len(self._queue) > len(self._idle):
            connection = self._new_connection()
            try:
                connection.open(deadline)
            except (RedisError, ConfigError) as error:
                # The open connections show whether the server is up.
                connection.close()
                if isinstance(error, RedisError):
                    self._health.note(error)
                self._widen_at = time.monotonic() + _WIDEN_AGAIN_S
                return
            self._add_lane(connection)

    def _drop_dead(self) -> None:
        for lane in self._idle:
            lane.connection.check_idle()
        alive = [lane for lane in self._idle if lane.connection.is_open]
        self.connections_lost += len(self._idle) - len(alive)
        self._idle = alive

    def _close_all(self) -> None:
        busy, self._busy = self._busy, deque()
        idle, self._idle = self._idle, []
        self._is_sending = False
        for lane in (*busy, *idle):
            lane.connection.close()
        for lane in busy:
            if lane.task is not None:
                self._lost(lane, lane.task, RedisUnavailable("the connection was closed"))
        self._all_closed()
