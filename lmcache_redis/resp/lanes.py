# SPDX-License-Identifier: Apache-2.0
"""Stripes on several connections of a thread at once.

While the server works on the request of one connection, the thread moves the bytes of another: the
server is never idle, reads every value straight to where it stays, and queues no copies of replies.
One thread is faster than several, which would wait for each other's GIL
(docs/internals/decisions.md has the measurement). Replies arrive in the order of the requests, so
the thread waits for the connection that it asked first.

A stripe is in flight, and uses its slot, from its request to its end. A connection whose stripe is
in flight at the deadline of its job is closed. `transfers` says what follows from the end of one.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_redis import native
from lmcache_redis.errors import (
    ConfigError,
    RedisError,
    RedisProtocolError,
    RedisRedirect,
    RedisUnavailable,
)
from lmcache_redis.resp.bulk import (
    MOST_TASKS,
    QUIET_MS,
    SLICE_S,
    End,
    Handle,
    MoveCall,
    Moved,
    PythonMover,
    Request,
    StripeFailure,
    error_in,
)
from lmcache_redis.resp.codecs import Found
from lmcache_redis.resp.health import DataServer
from lmcache_redis.resp.jobs import LoopThread, StripeTask, TaskQueue, jittered
from lmcache_redis.resp.net.connection import Connection
from lmcache_redis.resp.transfers import Transfers
from lmcache_redis.tiers import CallOutcome

# The pause before the next attempt, if the server has no room for another connection.
_WIDEN_AGAIN_S = 1.0
# What an idle lane has.
_NO_TASK: StripeTask = (None, 0)
_NO_REQUEST: Request = (b"", b"", memoryview(b""), b"")


class NativeMover:
    """`moves.c`."""

    _moves: Any = native.moves

    def handle(self, connection: Connection) -> Handle:
        return connection.plain_fileno, bytearray(self._moves.PROGRESS_BYTES)

    def move(self, call: MoveCall, is_load: bool) -> Moved:
        move = self._moves.load if is_load else self._moves.store
        return Moved(*move(*call))


Mover = NativeMover | PythonMover


@dataclass(slots=True, eq=False)
class Lane:
    """A connection, and the stripe in flight on it.

    until: when the connection is closed unless the reply has arrived (`time.monotonic()`).
    """

    connection: Connection
    handle: Handle
    task: StripeTask = _NO_TASK
    request: Request = _NO_REQUEST
    until: float = 0.0

    def rest(self) -> None:
        """Nothing is in flight: its stripe and the memory of it are let go."""
        self.task, self.request = _NO_TASK, _NO_REQUEST


class BulkWorker:
    """A thread that moves the stripes of a queue on up to `connections` connections.

    It connects before it takes work, so an unreachable server delays no job. It begins with one
    connection, and opens more when more stripes wait than it has.
    """

    def __init__(
        self,
        name: str,
        server: DataServer,
        queue: TaskQueue[StripeTask],
        connections: int,
        transfers: Transfers,
    ) -> None:
        self.thread = LoopThread(f"lmcr-{name}", self._step)
        self._name = name
        self._server = server
        self._jobs = server.jobs
        self._queue = queue
        self._most = connections
        self._mover: Mover
        self._idle: list[Lane] = []
        self._busy: list[Lane] = []  # in the order of the requests
        self._is_sending = False  # the last of these was sent in part
        self._widen_at = 0.0  # when more may be opened
        self._transfers = transfers

    def _step(self) -> bool:
        if not self._server.health.wait_up():
            return False
        tried_at = time.monotonic()
        try:
            connection = self._server.open(self._name)
        except (RedisError, ConfigError) as error:
            self._server.health.down(error, tried_at)
            return True
        with contextlib.closing(connection):
            return self.serve(connection)

    def serve(self, connection: Connection) -> bool:
        """Work until all connections are closed; False if the queue is."""
        is_native = native.moves is not None and connection.plain_fileno >= 0
        self._mover = NativeMover() if is_native else PythonMover()
        self._widen_at = 0.0
        self._add_lane(connection)
        try:
            while self._idle or self._busy:
                if not self._busy:
                    if self._transfers.may_send and not self._queue.wait():
                        return False
                    # A connection that died at rest must not cost the others their next stripes.
                    self._drop_dead()
                    if not self._idle or not self._transfers.may_send:
                        return True
                if self._transfers.may_send and self._wants_more:
                    self._widen()
                self._move()
                self._end_late()
            return True
        finally:
            self._close_all()

    def _add_lane(self, connection: Connection) -> None:
        self._idle.append(Lane(connection, self._mover.handle(connection)))

    def _move(self) -> None:
        """Call the mover with the stripes in flight and those that wait."""
        if not self._busy and not self._idle:
            return  # the last one died while more were opened
        begun, idle = (self._begin_next(), self._idle) if self._transfers.may_send else ([], [])
        if not self._busy and not begun:
            return
        try:
            requests = [self._transfers.pack(task) for task in begun]
            lanes = [*self._busy, *idle]
            now = time.monotonic()
            deadlines = [lane.task[0].deadline for lane in lanes[: len(self._busy)]]
            deadlines += [task[0].deadline for task in begun]
            call = MoveCall(
                [lane.handle for lane in lanes],
                [lane.request for lane in self._busy] + requests,
                len(self._busy),
                self._is_sending,
                not len(self._queue) or not (begun or self._is_sending),
                min([now + SLICE_S, *deadlines]),
                # What is sealed is verified as it is opened.
                self._server.options.verify_checksums and not self._transfers.codec.is_sealed,
                QUIET_MS if len(begun) < len(idle) else int(SLICE_S * 1e3),
            )
            moved = self._mover.move(call, self._transfers.is_load)
        except BaseException:
            # A bug. `_close_all` answers those in flight.
            jobs = [task[0] for task in begun]
            self._jobs.stop(jobs, CallOutcome.UNAVAILABLE)
            self._jobs.release(jobs)
            raise
        self._account(lanes, begun, requests, moved, now)

    def _begin_next(self) -> list[StripeTask]:
        """Stripes that waited, and are in flight now."""
        most = self._transfers.codec.together
        refusal = self._transfers.refusal
        while refusal is not None and (tasks := self._queue.take_some(MOST_TASKS)):
            self._jobs.stop([task[0] for task in tasks], refusal)
        if self._is_sending and most < MOST_TASKS:
            most = 0  # the memory of one that was packed and sent in part is still needed
        elif most < MOST_TASKS and not self._transfers.is_load:
            # What gets no lane is packed again: only one is, for the next lane that is free.
            most = min(most, max(1, len(self._idle)))
        return self._jobs.begin_all(self._queue.take_some(most))

    def _account(
        self,
        lanes: Sequence[Lane],
        begun: Sequence[StripeTask],
        requests: Sequence[Request],
        moved: Moved,
        now: float,
    ) -> None:
        """Process what was sent, what ended, and what was not sent."""
        in_flight = [(lane, lane.task) for lane in self._busy]
        until = now + self._server.options.op_timeout_s
        for number, task, some in zip(moved.lanes, begun, requests, strict=False):
            lane = lanes[number]
            lane.task, lane.request, lane.until = task, some, until
            in_flight.append((lane, task))
        left = begun[len(moved.lanes) :]
        if left:
            self._jobs.release([task[0] for task in left])
            self._queue.put(left, urgent=True)

        self._is_sending = moved.sending == errno.EAGAIN
        ended, in_flight = in_flight[: len(moved.done)], in_flight[len(moved.done) :]
        free = dict.fromkeys([*self._idle, *[lane for lane, _ in ended]])
        self._busy = [lane for lane, _ in in_flight]
        busy = set(self._busy)
        self._idle = [lane for lane in free if lane not in busy]
        for lane, _ in ended:
            if lane not in busy:
                lane.rest()

        good = [
            (task, result)
            for (_, task), result in zip(ended, moved.done, strict=True)
            if isinstance(result, bytes)
        ]
        for found in self._transfers.unpacked(good):
            self._end(found)
        if moved.done and not isinstance(moved.done[-1], bytes):
            self._see_to(*ended[-1], moved.done[-1])
        if moved.sending and not self._is_sending:
            lane = self._busy[-1]
            self._give_up(lane, lane.connection.lost(moved.sending))

    def _end(self, found: Sequence[tuple[StripeTask, Found]]) -> None:
        """Stripes that were in flight, and what was found for each."""
        jobs = [task[0] for task, _ in found]
        with self._jobs.lock:
            due = [job for (job, index), each in found if job.ended(index, each)]
        # Without the lock: a server's threads may start here, or fail to.
        for job in due:
            job.put_first()
        self._jobs.conclude(jobs)
        self._transfers.ended(jobs)

    def _see_to(self, lane: Lane, task: StripeTask, failure: StripeFailure) -> None:
        """A stripe failed. Its connection is closed if it is out of step."""
        error = error_in(failure, lane.connection)
        if failure[0] >= End.OTHER_LENGTH or isinstance(error, RedisProtocolError):
            lane.connection.close()
        found = self._transfers.judge(task, failure)
        if found is not None:
            self._end(((task, found),))
        elif error is not None:
            is_followed = isinstance(error, RedisRedirect) and self._server.redirected(task, error)
            if not is_followed:
                self._fail(lane, task, error)
        if not lane.connection.is_open and lane in self._idle:
            self._idle.remove(lane)

    def _fail(self, lane: Lane, task: StripeTask, error: RedisError) -> None:
        """An error in place of a stripe, or of its connection."""
        job = task[0]
        self._jobs.release((job,))
        outcome = self._transfers.failed(error, lane.connection)
        if outcome is None:
            self._queue.put((task,), urgent=True)
        else:
            self._jobs.stop((job,), outcome)

    def _end_late(self) -> None:
        """Close connections whose replies are overdue, or whose jobs are."""
        now = time.monotonic()
        for lane in [each for each in self._busy if each.task[0].deadline <= now]:
            self._give_up(lane, lane.connection.late())
        # One at a time: what has arrived on the others is received first.
        if self._busy and (first := self._busy[0]).until <= now:
            self._give_up(first, first.connection.late())

    def _give_up(self, lane: Lane, error: RedisError) -> None:
        """Close a connection that has a stripe in flight."""
        if lane is self._busy[-1]:
            self._is_sending = False
        self._busy.remove(lane)
        lane.connection.close()
        self._fail(lane, lane.task, error)

    @property
    def _wants_more(self) -> bool:
        """Whether stripes wait for another connection."""
        idle = len(self._idle)
        return len(self._queue) > idle and len(self._busy) + idle < self._most

    @property
    def _may_widen(self) -> bool:
        # A chunk of which a stripe is in flight may become half stored.
        is_whole = self._transfers.may_widen and (self._transfers.is_load or not self._busy)
        return is_whole and self._server.health.is_up

    def _widen(self) -> None:
        """Open a connection for each stripe that waits, up to the limit."""
        if time.monotonic() < self._widen_at or not self._may_widen:
            return
        # First drop those that died unnoticed: they would cost their next stripes.
        self._drop_dead()
        # The stripes in flight have deadlines to keep.
        deadline = min([lane.task[0].deadline for lane in self._busy], default=float("inf"))
        while self._wants_more:
            try:
                connection = self._server.open(self._name, deadline)
            except (RedisError, ConfigError) as error:
                # The open connections show whether the server is up.
                if isinstance(error, RedisError):
                    self._server.health.note(error, self._transfers.operation)
                self._widen_at = time.monotonic() + jittered(_WIDEN_AGAIN_S)
                return
            self._add_lane(connection)

    def _drop_dead(self) -> None:
        """Drop idle lanes whose connections the server has closed."""
        for lane in self._idle:
            lane.connection.check_idle()
        idle, self._idle = self._idle, [lane for lane in self._idle if lane.connection.is_open]
        if dead := len(idle) - len(self._idle):
            self._jobs.count("connections_lost", dead)

    def _close_all(self) -> None:
        busy, idle = self._busy, self._idle
        self._busy, self._idle, self._is_sending = [], [], False
        for lane in (*busy, *idle):
            lane.connection.close()
        for lane in busy:
            self._fail(lane, lane.task, RedisUnavailable("the connection was closed"))
        self._jobs.stop(*self._transfers.closed())
