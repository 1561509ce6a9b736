"""Many tasks of a thread with lanes in one call of the compiled part, without the GIL.

A batch is what the lanes at the head are busy with, and what waits. Its jobs have begun a step for
as long as the call takes, which is milliseconds: then each was done, or is under way on its lane,
or was not asked for. Where a lane met something else, the thread goes on with it in Python.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence

from lmcache_redis.resp import moving
from lmcache_redis.resp.bulk import BulkConnection
from lmcache_redis.resp.jobs import Stop
from lmcache_redis.resp.lanes import Lane, LaneWorker, OneT, TaskT
from lmcache_redis.resp.moving import Moved, Packed


class BatchWorker(LaneWorker[TaskT, OneT]):
    """A `LaneWorker` that leaves to the compiled part what goes well.

    Subclasses say what that needs, and what follows from what it did.
    """

    _compiled = False

    def serve(self, connection: BulkConnection) -> bool:
        self._compiled = moving.is_compiled() and connection.fileno >= 0
        return super().serve(connection)

    # -------------------------------------------------- what subclasses say

    @abstractmethod
    def pack(self, task: TaskT) -> Packed | None:
        """What the compiled part needs of it; None: this one is not for that."""

    @abstractmethod
    def move(
        self, fds: list[int], tasks: list[Packed], under_way: int, drain: bool, until: float
    ) -> Moved:
        """Have the compiled part ask and receive."""

    @abstractmethod
    def resume(self, task: TaskT) -> bool:
        """It was asked for. False: nobody waits for its reply any more."""

    @abstractmethod
    def suspend(self, task: TaskT) -> None:
        """It was asked for or resumed, and its reply has not come yet."""

    @abstractmethod
    def asked(self, tasks: Sequence[TaskT]) -> None:
        """Tasks of one job were asked for."""

    @abstractmethod
    def moved(self, tasks: Sequence[TaskT], results: Sequence[bytes]) -> None:
        """Tasks of one job were asked for, or resumed, and their replies are the best there are."""

    # --------------------------------------------------------------- inside

    def move_many(self) -> bool:
        """Have the compiled part do what it can. False: nothing, it is Python's turn."""
        if not self._compiled:
            return False
        resumed = self._resume_first()
        begun: list[tuple[TaskT, Packed]] = []
        try:
            if len(resumed) == len(self._busy):
                self._begin_next(begun)
            if not resumed and not begun:
                return False
            lanes = [lane for lane, _, _ in resumed] + (self._idle if begun else [])
            tasks = [packed for _, _, packed in resumed] + [packed for _, packed in begun]
            jobs = [task[0] for _, task, _ in resumed] + [task[0] for task, _ in begun]
            until = min([job.deadline for job in jobs] + [time.monotonic() + moving.SLICE_S])
            fds = [lane.fileno for lane in lanes]
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

    def _begin_next(self, begun: list[tuple[TaskT, Packed]]) -> None:
        """Begin tasks that wait and add them, as far as they are for the compiled part."""
        tasks = self._take_some(moving.MOST_TASKS)
        for number, task in enumerate(tasks):
            if not task[0].begin(task[1]):
                continue
            try:
                packed = self.pack(task)
            except BaseException:
                task[0].release()
                task[0].stop(Stop.UNAVAILABLE)
                self._next.extendleft(reversed(tasks[number + 1 :]))
                raise
            if packed is None:
                task[0].release()
                self._next.extendleft(reversed(tasks[number:]))
                return
            begun.append((task, packed))

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
            lanes[number].asked_at = now
            order.append((lanes[number], task, packed))
        for start, end in _runs([task for task, _ in begun[: len(result.lanes)]]):
            self.asked([task for task, _ in begun[start:end]])
        done = [task for _, task, _ in order[: len(result.done)]]
        for start, end in _runs(done):
            self.moved(done[start:end], result.done[start:end])
        under_way = order[len(done) :]
        for lane, task, packed in under_way:
            lane.task, lane.packed = task, packed
        others = list(self._busy)[len(resumed) :]
        self._busy = deque([lane for lane, _, _ in under_way] + others)
        free = dict.fromkeys((*lanes, *self._idle))
        self._idle = [lane for lane in free if lane not in self._busy]
        for lane in self._idle:
            lane.task = lane.packed = None

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
            task, lanes[result.lane].packed = stopped
            self._ask(lanes[result.lane], task, result)


def _runs(tasks: Sequence[TaskT]) -> Iterator[tuple[int, int]]:
    """Where tasks of one job begin and end that follow each other."""
    start = 0
    for end in range(1, len(tasks) + 1):
        if end == len(tasks) or tasks[end][0] is not tasks[start][0]:
            yield start, end
            start = end
