"""A thread with several connections, one task under way on each.

While the server works on what one connection asked, the thread moves the bytes of another: the
server is never idle, reads every value straight to where it stays, and queues no copies of
replies. One thread does that faster than several, which would wait for each other's GIL
(docs/data-plane.md has the measurement).

Servers answer in the order in which they were asked, so the thread waits for the connection that
it asked first.

Here it works a step at a time. Where the compiled part is there, `batches` has that do whatever
goes well, and leaves to this what does not, and TLS.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Generic, TypeVar, cast

from lmcache_redis.errors import ConfigError, RedisError
from lmcache_redis.resp.bulk import BulkConnection
from lmcache_redis.resp.connect import Connector
from lmcache_redis.resp.health import Health
from lmcache_redis.resp.jobs import Job
from lmcache_redis.resp.moving import Moved, Packed
from lmcache_redis.resp.queues import TaskQueue
from lmcache_redis.resp.routes import Hop
from lmcache_redis.resp.worker import Worker

# A job, the index of the stripe, and the redirection that it has followed, if any.
TaskT = TypeVar("TaskT", bound=tuple[Job[Any], int, Hop | None])
# Of these, the ones that are not parts of a bundle.
OneT = TypeVar("OneT", bound=tuple[Job[Any], int, Hop | None])

# A server without room for one more connection is asked for it again after that long.
_WIDEN_AGAIN_S = 1.0
# What was asked together may be late together: each is waited for at least that long.
_LEAST_PATIENCE_S = 0.05


class Lane(Generic[TaskT]):
    """A connection, the task that it works on, and since when (`time.monotonic()`).

    packed: the task as the compiled part needs it; None where that did not ask for it.
    """

    __slots__ = ("asked_at", "connection", "fileno", "packed", "task")

    def __init__(self, connection: BulkConnection) -> None:
        self.connection = connection
        self.fileno = connection.fileno
        self.task: TaskT | None = None
        self.packed: Packed | None = None
        self.asked_at = 0.0


class LaneWorker(Worker, ABC, Generic[TaskT, OneT]):
    """Takes tasks from a queue as long as it has a lane for them.

    Subclasses say how to `ask`, to `receive` and to `give_up`. It begins with one lane and opens
    others when more tasks wait than it has lanes, where it `may_widen`. Where it `must_renew` it
    closes all, once the replies that are under way have come, and begins anew.
    """

    def __init__(
        self,
        name: str,
        connector: Connector,
        health: Health,
        queue: TaskQueue[TaskT],
        connections: int,
        op_timeout_s: float,
    ) -> None:
        super().__init__(name, connector, health)
        self._queue = queue
        self._connections = connections
        self._op_timeout_s = op_timeout_s
        self._idle: list[Lane[TaskT]] = []
        self._busy: deque[Lane[TaskT]] = deque()
        # Taken from the queue, and not asked for yet.
        self._next: deque[TaskT] = deque()
        self._widen_at = 0.0

    # -------------------------------------------------- what subclasses say

    @abstractmethod
    def ask(self, lane: Lane[TaskT], task: OneT, begun: Moved | None = None) -> bool:
        """Send what the task needs. False: no reply will come, the task has been seen to.

        begun: a part of it was sent by `move_many`, and the task is `begun` already.
        """

    @abstractmethod
    def receive(self, lane: Lane[TaskT], task: OneT, begun: Moved | None = None) -> None:
        """Receive the reply to what was asked, and see to the task. begun: as in `ask`."""

    @abstractmethod
    def give_up(self, task: OneT) -> None:
        """The reply to the task will not be received: its connection was closed."""

    @abstractmethod
    def apart(self, task: TaskT, begun: bool) -> OneT:
        """The task, taken out of its bundle if it is part of one. begun: its step is."""

    @property
    def must_renew(self) -> bool:
        return False

    @property
    def may_widen(self) -> bool:
        return True

    def closed(self) -> None:
        """All connections were closed, and no task is under way."""

    def move_many(self) -> bool:
        """Ask and receive many at once, where there is a way. False: nothing was done."""
        return False

    # --------------------------------------------------------------- inside

    def patience(self, lane: Lane[TaskT]) -> float:
        """Until when to wait for the reply: the op time-out counts from when it was asked."""
        return max(lane.asked_at + self._op_timeout_s, time.monotonic() + _LEAST_PATIENCE_S)

    def serve(self, connection: BulkConnection) -> bool:
        self._idle.append(Lane(connection))
        self._widen_at = 0.0
        try:
            while self._idle or self._busy:
                if not self._busy and not self._next:
                    if not self._queue.wait():
                        return False
                    # One that died at rest must not cost what the others are about to do.
                    self._drop_dead()
                    if not self._idle:
                        return True
                if self._lanes < self._connections and self._waiting > len(self._idle):
                    self._widen()
                if not self.move_many():
                    self._ask_for_all()
                    if self._busy:
                        self._receive_first()
                if self.must_renew:
                    self._renew()
            return True
        finally:
            self._close_all()

    @property
    def _waiting(self) -> int:
        return len(self._next) + len(self._queue)

    def _take(self) -> TaskT | None:
        if self._next and not self._queue.is_urgent:
            return self._next.popleft()
        return self._queue.take(wait=False)

    def _take_some(self, most: int) -> list[TaskT]:
        """At most so many, in the order of `_take`."""
        if not self._next:
            return self._queue.take_some(most)
        some = self._queue.take_some(most, urgent=True)
        while self._next and len(some) < most:
            some.append(self._next.popleft())
        return some

    def _ask_for_all(self) -> None:
        """Give every idle lane a task, as far as there are any."""
        while self._idle and not self.must_renew:
            task = self._take()
            if task is None:
                return
            self._ask(self._idle.pop(), task)

    def _ask(self, lane: Lane[TaskT], task: TaskT, begun: Moved | None = None) -> None:
        # Busy first: whatever happens, somebody answers for the task.
        one = self._single_out(lane, task, begun)
        self._busy.append(lane)
        if self.ask(lane, one, begun):
            lane.asked_at = time.monotonic()
        else:
            self._busy.pop()
            self._put_back(lane)

    def _receive_first(self, begun: Moved | None = None) -> None:
        lane = self._busy[0]
        if lane.task is not None:
            self.receive(lane, self._single_out(lane, lane.task, begun), begun)
        self._busy.popleft()
        self._put_back(lane)

    def _single_out(self, lane: Lane[TaskT], task: TaskT, begun: Moved | None) -> OneT:
        one = self.apart(task, begun is not None)
        lane.task = cast(TaskT, one)
        return one

    def _put_back(self, lane: Lane[TaskT]) -> None:
        lane.task = lane.packed = None
        if lane.connection.is_open:
            self._idle.append(lane)

    @property
    def _lanes(self) -> int:
        return len(self._idle) + len(self._busy)

    def _widen(self) -> None:
        """Open a lane for each task that waits, as far as the server has room."""
        if not self.may_widen or not self._health.is_up or time.monotonic() < self._widen_at:
            return
        # Those that died unnoticed go first: no task shall begin on a new one and end there.
        self._drop_dead()
        while self._lanes < self._connections and self._waiting > len(self._idle):
            connection = self.make_connection()
            try:
                connection.open()
            except (RedisError, ConfigError) as error:
                # Those that are open tell whether the server is there at all.
                connection.close()
                if isinstance(error, RedisError):
                    self._health.note(error)
                self._widen_at = time.monotonic() + _WIDEN_AGAIN_S
                return
            self._idle.append(Lane(connection))

    def _drop_dead(self) -> None:
        for lane in self._idle:
            lane.connection.check_idle()
        alive = [lane for lane in self._idle if lane.connection.is_open]
        self.connections_lost += len(self._idle) - len(alive)
        self._idle = alive

    def _renew(self) -> None:
        """Receive what is under way and close all connections."""
        while self._busy:
            self._receive_first()
        self._close_all()

    def _close_all(self) -> None:
        busy, self._busy = self._busy, deque()
        idle, self._idle = self._idle, []
        for lane in (*busy, *idle):
            lane.connection.close()
        for lane in busy:
            if lane.task is not None:
                self.give_up(self.apart(lane.task, begun=False))
        self.closed()
