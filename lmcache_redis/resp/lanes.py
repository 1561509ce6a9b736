"""A thread with several connections, one task under way on each.

While the server works on what one connection asked, the thread moves the bytes of another: the
server is never idle, reads every value straight to where it stays, and queues no copies of
replies. One thread does that faster than several, which would wait for each other's GIL
(docs/data-plane.md has the measurement).

Servers answer in the order in which they were asked, so the thread waits for the connection that
it asked first.

Where the compiled part is there (`moving`), it does whatever goes well, many tasks in one call and
without the GIL. Everything else, and TLS, is done here, a step at a time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from lmcache_redis.errors import ConfigError, RedisError
from lmcache_redis.resp import moving
from lmcache_redis.resp.bulk import BulkConnection
from lmcache_redis.resp.connect import Connector
from lmcache_redis.resp.health import Health
from lmcache_redis.resp.jobs import Job, Stop
from lmcache_redis.resp.moving import Moved, Packed
from lmcache_redis.resp.queues import TaskQueue
from lmcache_redis.resp.routes import Hop
from lmcache_redis.resp.worker import Worker

# A job, the index of the stripe, and the redirection that it has followed, if any.
TaskT = TypeVar("TaskT", bound=tuple[Job[Any], int, Hop | None])

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


class LaneWorker(Worker, Generic[TaskT]):
    """Takes tasks from a queue as long as it has a lane for them.

    Subclasses say how to `ask`, to `receive` and to `give_up`, and what it means that the compiled
    part did so. It begins with one lane and opens others when more tasks wait than it has lanes,
    where it `may_widen`. Where it `must_renew` it closes all, once the replies that are under way
    have come, and begins anew.
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
        self._compiled = False
        self._widen_at = 0.0

    # -------------------------------------------------- what subclasses say

    def ask(self, lane: Lane[TaskT], task: TaskT) -> bool:
        """Send what the task needs. False: no reply will come, the task has been seen to."""
        raise NotImplementedError

    def receive(self, lane: Lane[TaskT], task: TaskT) -> None:
        """Receive the reply to what was asked, and see to the task."""
        raise NotImplementedError

    def give_up(self, task: TaskT) -> None:
        """The reply to the task will not be received: its connection was closed."""
        raise NotImplementedError

    @property
    def must_renew(self) -> bool:
        return False

    @property
    def may_widen(self) -> bool:
        return True

    def closed(self) -> None:
        """All connections were closed, and no task is under way."""

    # Of tasks whose job has begun a step:

    def pack(self, task: TaskT) -> Packed | None:
        """What the compiled part needs of it; None: this one is not for that."""
        raise NotImplementedError

    def move(
        self, fds: list[int], tasks: list[Packed], under_way: int, drain: bool, until: float
    ) -> Moved:
        """Have the compiled part ask and receive."""
        raise NotImplementedError

    def resume(self, task: TaskT) -> bool:
        """It was asked for. False: nobody waits for its reply any more."""
        raise NotImplementedError

    def suspend(self, task: TaskT) -> None:
        """It was asked for or resumed, and its reply has not come yet."""
        raise NotImplementedError

    def asked(self, task: TaskT) -> None:
        """It was asked for."""
        raise NotImplementedError

    def moved(self, task: TaskT, result: bytes) -> None:
        """It was asked for, or resumed, and its reply is the best there is."""
        raise NotImplementedError

    def go_on_asking(self, lane: Lane[TaskT], task: TaskT, packed: Packed, begun: Moved) -> bool:
        """`ask`, of which a part was done."""
        raise NotImplementedError

    def go_on_receiving(self, lane: Lane[TaskT], task: TaskT, begun: Moved) -> None:
        """`receive`, of which a part was done."""
        raise NotImplementedError

    # --------------------------------------------------------------- inside

    def patience(self, lane: Lane[TaskT]) -> float:
        """Until when to wait for the reply: the op time-out counts from when it was asked."""
        return max(lane.asked_at + self._op_timeout_s, time.monotonic() + _LEAST_PATIENCE_S)

    def serve(self, connection: BulkConnection) -> bool:
        self._compiled = moving.is_compiled() and connection.fileno >= 0
        self._idle.append(Lane(connection))
        self._widen_at = 0.0
        try:
            while self._idle or self._busy:
                if not self._busy and not self._next and not self._queue.wait():
                    return False
                if self._lanes < self._connections and self._waiting > len(self._idle):
                    self._widen()
                if not (self._compiled and self._move()):
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

    def _ask_for_all(self) -> None:
        """Give every idle lane a task, as far as there are any."""
        while self._idle and not self.must_renew:
            task = self._take()
            if task is None:
                return
            self._ask(self._idle.pop(), task)

    def _ask(
        self,
        lane: Lane[TaskT],
        task: TaskT,
        packed: Packed | None = None,
        begun: Moved | None = None,
    ) -> None:
        # Busy first: whatever happens, somebody answers for the task.
        lane.task, lane.packed = task, packed
        self._busy.append(lane)
        if begun is None or packed is None:
            asked = self.ask(lane, task)
        else:
            asked = self.go_on_asking(lane, task, packed, begun)
        if asked:
            lane.asked_at = time.monotonic()
        else:
            self._busy.pop()
            self._put_back(lane)

    def _receive_first(self, begun: Moved | None = None) -> None:
        lane = self._busy[0]
        if lane.task is not None:
            if begun is None:
                self.receive(lane, lane.task)
            else:
                self.go_on_receiving(lane, lane.task, begun)
        self._busy.popleft()
        self._put_back(lane)

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
        for lane in self._idle:
            lane.connection.check_idle()
        self._idle = [lane for lane in self._idle if lane.connection.is_open]
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
                self.give_up(lane.task)
        self.closed()

    # ----------------------------------------------------- many at once, where all goes well

    def _move(self) -> bool:
        """Have the compiled part do what it can. False: nothing, it is Python's turn."""
        resumed = self._resume_first()
        begun: list[tuple[TaskT, Packed]] = []
        if len(resumed) == len(self._busy):
            begun = self._begin_next()
        if not resumed and not begun:
            return False
        lanes = [lane for lane, _, _ in resumed] + (self._idle if begun else [])
        tasks = [packed for _, _, packed in resumed] + [packed for _, packed in begun]
        jobs = [task[0] for _, task, _ in resumed] + [task[0] for task, _ in begun]
        until = min([job.deadline for job in jobs] + [time.monotonic() + moving.SLICE_S])
        fds = [lane.fileno for lane in lanes]
        try:
            result = self.move(fds, tasks, len(resumed), not self._waiting, until)
        except BaseException:
            # A bug: whoever waits is told, here and in `_close_all`.
            for _, task, _ in resumed:
                self.suspend(task)
            for task, _ in begun:
                task[0].release()
                task[0].stop(Stop.UNAVAILABLE)
            raise
        self._account(resumed, begun, lanes, result)
        return bool(result.done or result.lanes or result.why > moving.Why.QUIET)

    def _resume_first(self) -> list[tuple[Lane[TaskT], TaskT, Packed]]:
        """The lanes at the head that the compiled part asked on, resumed."""
        resumed: list[tuple[Lane[TaskT], TaskT, Packed]] = []
        for lane in self._busy:
            if lane.packed is None or lane.task is None or not self.resume(lane.task):
                break
            resumed.append((lane, lane.task, lane.packed))
        return resumed

    def _begin_next(self) -> list[tuple[TaskT, Packed]]:
        """Tasks that wait, begun, as far as they are for the compiled part."""
        begun: list[tuple[TaskT, Packed]] = []
        while len(begun) < moving.MOST_TASKS and (task := self._take()) is not None:
            if not task[0].begin():
                continue
            packed = self.pack(task)
            if packed is None:
                task[0].release()
                self._next.appendleft(task)
                break
            begun.append((task, packed))
        return begun

    def _account(
        self,
        resumed: Sequence[tuple[Lane[TaskT], TaskT, Packed]],
        begun: Sequence[tuple[TaskT, Packed]],
        lanes: Sequence[Lane[TaskT]],
        result: Moved,
    ) -> None:
        """See to what was done, what is under way, and what was not asked for."""
        now = time.monotonic()
        # In the order of asking; a lane may have had several tasks, one after the other.
        order = list(resumed)
        for number, (task, packed) in zip(result.lanes, begun, strict=False):
            self.asked(task)
            lanes[number].asked_at = now
            order.append((lanes[number], task, packed))
        for (_, task, _), each in zip(order, result.done, strict=False):
            self.moved(task, each)
        under_way = order[len(result.done) :]
        for lane, task, packed in under_way:
            lane.task, lane.packed = task, packed
        others = list(self._busy)[len(resumed) :]
        self._busy = deque([lane for lane, _, _ in under_way] + others)
        free = dict.fromkeys((*lanes, *self._idle))
        self._idle = [lane for lane in free if lane not in self._busy]

        left = list(begun[len(result.lanes) :])
        stopped = left.pop(0) if result.why in moving.OF_SENDING else None
        for task, _ in left:
            task[0].release()
        self._next.extendleft(task for task, _ in reversed(left))
        first_is_stopped = result.why in moving.OF_REPLY
        for _, task, _ in under_way[first_is_stopped:]:
            self.suspend(task)
        if first_is_stopped:
            self._receive_first(result)
        if stopped is not None:
            self._idle.remove(lanes[result.lane])
            self._ask(lanes[result.lane], *stopped, result)
