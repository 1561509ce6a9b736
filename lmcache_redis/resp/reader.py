"""Chunks from Redis into slots: a stripe on each connection (`lanes`).

Stripes are taken from one queue, in chunk order, so that a chunk's arrive over all connections at
once. One GET is outstanding on each: a server that has to queue copies of values is slower.
`verify` judges each stripe; a chunk is LOADED when all are good and of one store. What remains of
one that is not is removed where it is ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lmcache_redis.errors import RedisError, RedisRedirect, RedisTimeout, RedisUnavailable
from lmcache_redis.resp.batches import BatchWorker
from lmcache_redis.resp.bulk import BulkConnection
from lmcache_redis.resp.connect import Connector
from lmcache_redis.resp.health import Health
from lmcache_redis.resp.jobs import Stop
from lmcache_redis.resp.lanes import Lane
from lmcache_redis.resp.moving import Moved, Packed, load
from lmcache_redis.resp.outcomes import ReadOutcome
from lmcache_redis.resp.queues import TaskQueue
from lmcache_redis.resp.readjob import AnyRead, ReadJob, ReadTask
from lmcache_redis.resp.verify import Verified, verify
from lmcache_redis.resp.wire import ASKING_COMMAND

# The rest of a stripe that is under way comes within this time, or is not worth the wait.
_SKIP_WITHIN_S = 0.1
_UNAVAILABLE = Verified(ReadOutcome.UNAVAILABLE)

# Hands a task that was redirected to another node; False if there is none.
FollowRead = Callable[[ReadTask, RedisRedirect], bool]


class Reader(BatchWorker[AnyRead, ReadTask]):
    """A thread with GET connections."""

    def __init__(
        self,
        name: str,
        connector: Connector,
        health: Health,
        queue: TaskQueue[AnyRead],
        connections: int,
        op_timeout_s: float,
        follow: FollowRead,
        checksums: bool,
    ) -> None:
        super().__init__(name, connector, health, queue, connections, op_timeout_s)
        self._follow = follow
        self._checksums = checksums
        # Where replies go that nobody waits for any more.
        self._scratch = memoryview(b"")

    def ask(self, lane: Lane[AnyRead], task: ReadTask, begun: Moved | None = None) -> bool:
        job, index, hop = task
        connection = lane.connection
        if begun is not None:
            job.release()
        elif job.ended:
            return False
        try:
            if begun is not None and lane.packed is not None:
                connection.send_rest(lane.packed[:1], begun, job.deadline)
                return True
            if hop is not None and hop.asking:
                connection.call(ASKING_COMMAND, 1, job.deadline)
            connection.ask_stripe(job.command(index), job.deadline)
        except RedisError as error:
            self._failed(connection, task, error)
            return False
        return True

    def receive(self, lane: Lane[AnyRead], task: ReadTask, begun: Moved | None = None) -> None:
        """Receive one stripe into its slot."""
        job, index, _ = task
        connection = lane.connection
        # Only now: until its reply is received, a job that is late is answered without it.
        if begun is None and not job.begin():
            self._skip(connection, task)
            return
        chunk = job.chunk
        slot = chunk.slots[index]
        try:
            deadline = min(job.deadline, self.patience(lane))
            found = connection.receive_stripe(slot, deadline, begun)
            verified = verify(chunk.frame, index, found, connection.header, slot, self._checksums)
        except RedisError as error:
            job.release()
            self._failed(connection, task, error)
        except BaseException:
            job.end_stripe(index, _UNAVAILABLE)
            raise
        else:
            job.end_stripe(index, verified)

    def give_up(self, task: ReadTask) -> None:
        task[0].stop(Stop.UNAVAILABLE)

    # Many at once.

    def pack(self, task: AnyRead) -> Packed | None:
        job, index, hop = task
        return None if hop is not None and hop.asking else job.pack(index)

    def move(
        self, fds: list[int], tasks: list[Packed], under_way: int, drain: bool, until: float
    ) -> Moved:
        return load(fds, tasks, under_way, drain, until, self._checksums)

    def resume(self, task: AnyRead) -> bool:
        return task[0].begin(task[1])

    def suspend(self, task: AnyRead) -> None:
        task[0].release()

    def asked(self, tasks: Sequence[AnyRead]) -> None:
        """They stay begun until they were received or are to be suspended."""

    def moved(self, tasks: Sequence[AnyRead], results: Sequence[bytes]) -> None:
        tasks[0][0].moved([index for _, index, _ in tasks], results)

    def apart(self, task: AnyRead, begun: bool) -> ReadTask:
        job, index, hop = task
        return (job, index, hop) if isinstance(job, ReadJob) else (job.single(index, begun), 0, hop)

    def _failed(self, connection: BulkConnection, task: ReadTask, error: RedisError) -> None:
        """See to a task, whose job holds no slot for it, after what its connection raised."""
        job = task[0]
        if isinstance(error, RedisRedirect):
            if not self._follow(task, error):
                self._health.note(error)
                job.stop(Stop.UNAVAILABLE)
            return
        self._judge(error, connection)
        if isinstance(error, RedisUnavailable) and self._may_retry(job, connection):
            self._queue.put((task,), urgent=True)
            return
        job.stop(Stop.TIMED_OUT if isinstance(error, RedisTimeout) else Stop.UNAVAILABLE)

    def _skip(self, connection: BulkConnection, task: ReadTask) -> None:
        """Receive what nobody waits for, if it comes at once: that saves the connection."""
        job, index, _ = task
        if not self._health.is_up:
            connection.close()
            return
        nbytes = job.frame.payload_bytes(index)
        if self._scratch.nbytes < nbytes:
            self._scratch = memoryview(bytearray(nbytes))
        try:
            connection.receive_stripe(self._scratch[:nbytes], time.monotonic() + _SKIP_WITHIN_S)
        except RedisTimeout:
            # Nobody was kept waiting: the server is not suspected.
            pass
        except RedisError as error:
            self._judge(error, connection)
