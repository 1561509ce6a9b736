"""Chunks from Redis into slots: a stripe on each connection (`lanes`).

Stripes are taken from one queue, in chunk order, so that a chunk's arrive over all connections at
once. One GET is outstanding on each: a server that has to queue copies of values is slower.
`verify` judges each stripe; a chunk is LOADED when all are good and of one store. What remains of
one that is not is removed where it is ours.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

from lmcache_redis.errors import RedisError, RedisRedirect, RedisTimeout, RedisUnavailable
from lmcache_redis.keys import stripe_key
from lmcache_redis.resp.batches import BatchWorker
from lmcache_redis.resp.bulk import BulkConnection
from lmcache_redis.resp.connect import Connector
from lmcache_redis.resp.health import Health
from lmcache_redis.resp.jobs import Job, JobRegistry, Stop
from lmcache_redis.resp.lanes import Lane
from lmcache_redis.resp.moving import LEAST_PAYLOAD_BYTES, Moved, Packed, load
from lmcache_redis.resp.outcomes import ChunkIO, ReadOutcome
from lmcache_redis.resp.queues import TaskQueue
from lmcache_redis.resp.routes import Hop
from lmcache_redis.resp.verify import Verified, verify
from lmcache_redis.resp.wire import ASKING_COMMAND, end_of_command, get_command_without_end
from lmcache_redis.stripe import HEADER_BYTES

ReadDone = Callable[[ChunkIO, ReadOutcome], None]
# Called with a finished read's chunk, its outcome and how many stripes are to be removed.
ReadSettled = Callable[[ChunkIO, ReadOutcome, int], None]


class ReadJob(Job[ReadOutcome]):
    """One chunk on its way in; a step is a stripe."""

    __slots__ = (
        "_chunk",
        "_command_end",
        "_command_head",
        "_done",
        "_first_is_there",
        "_hole",
        "_remove_stripes",
        "_settled",
        "_store_id",
        "frame",
        "key",
    )

    def __init__(
        self,
        chunk: ChunkIO,
        done: ReadDone,
        settled: ReadSettled,
        registry: JobRegistry,
        refresh_ttl_s: int = 0,
    ) -> None:
        self._chunk: ChunkIO | None = chunk
        self._done: ReadDone | None = done
        self._settled: ReadSettled | None = settled
        self.key = chunk.key
        self.frame = chunk.frame
        # All GETs of the chunk but for the index of the stripe, with which the key ends.
        key = stripe_key(chunk.key, 0)
        self._command_head = get_command_without_end(key, _INDEX_BYTES, refresh_ttl_s)
        self._command_end = end_of_command(refresh_ttl_s)
        self._store_id = b""
        self._first_is_there = False
        self._hole = 0  # stripes to remove if there is a stripe 0 beside a missing one
        self._remove_stripes = 0
        super().__init__(chunk.frame.stripe_count, ReadOutcome.LOADED, chunk.deadline, registry)

    @property
    def chunk(self) -> ChunkIO:
        """Only between `begin` and the end of that step, when it cannot have been let go."""
        if self._chunk is None:
            raise RuntimeError("the chunk of a read was given back while a step used it")
        return self._chunk

    def command(self, index: int) -> bytes:
        """The packed GET of a stripe."""
        return self._command_head + _INDEX.pack(index) + self._command_end

    def tasks(self) -> list[ReadTask]:
        """The stripes in order."""
        return [(self, index, None) for index in range(self.frame.stripe_count)]

    def end_stripe(self, index: int, verified: Verified) -> None:
        """Stripe `index` is in its slot, or is not: see `verified`."""
        outcome, store_id, remove_stripes = verified
        if outcome is None and store_id == self._store_id and index:
            self.end()
            return
        with self._lock:
            if outcome is None and not self._store_id:
                self._store_id = store_id
            elif outcome is None and store_id != self._store_id:
                outcome = ReadOutcome.TORN
                remove_stripes = self.chunk.frame.stripe_count
            elif outcome is ReadOutcome.INCOMPLETE:
                outcome, remove_stripes = self._one_is_missing(index, remove_stripes)
            if index == 0 and outcome is not ReadOutcome.MISSING:
                self._first_is_there = True
                if outcome is None and self._hole:
                    outcome, remove_stripes = ReadOutcome.INCOMPLETE, self._hole
            self._remove_stripes = max(self._remove_stripes, remove_stripes)
        self.end(outcome)

    def _one_is_missing(self, index: int, remove_stripes: int) -> tuple[ReadOutcome | None, int]:
        """Only beside a stripe 0 is it a hole: without one, a store may be under way."""
        if index == 0:
            return ReadOutcome.MISSING, 0
        if self._first_is_there:
            return ReadOutcome.INCOMPLETE, remove_stripes
        self._hole = remove_stripes
        return None, 0

    def _answer(self, outcome: ReadOutcome) -> None:
        chunk, done, settled = self._chunk, self._done, self._settled
        self._chunk = self._done = self._settled = None
        if chunk is None or done is None or settled is None:
            raise RuntimeError("a read is answered twice")
        settled(chunk, outcome, self._remove_stripes)
        done(chunk, outcome)


_INDEX_BYTES = 2
_INDEX = struct.Struct(">H")
# The rest of a stripe that is under way comes within this time, or is not worth the wait.
_SKIP_WITHIN_S = 0.1
_UNAVAILABLE = Verified(ReadOutcome.UNAVAILABLE)

# A stripe to get: the job of its chunk, its index, and the redirection it has followed, if any.
ReadTask = tuple[ReadJob, int, Hop | None]
# Hands a task that was redirected to another node; False if there is none.
FollowRead = Callable[[ReadTask, RedisRedirect], bool]


class Reader(BatchWorker[ReadTask]):
    """A thread with GET connections."""

    def __init__(
        self,
        name: str,
        connector: Connector,
        health: Health,
        queue: TaskQueue[ReadTask],
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

    def ask(self, lane: Lane[ReadTask], task: ReadTask, begun: Moved | None = None) -> bool:
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

    def receive(self, lane: Lane[ReadTask], task: ReadTask, begun: Moved | None = None) -> None:
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

    def pack(self, task: ReadTask) -> Packed | None:
        job, index, hop = task
        payload = job.chunk.slots[index]
        if payload.nbytes < LEAST_PAYLOAD_BYTES or (hop is not None and hop.asking):
            return None
        head = b"$%d\r\n" % (HEADER_BYTES + payload.nbytes)
        return job.command(index), head + job.frame.unsealed_header(index), payload, b""

    def move(
        self, fds: list[int], tasks: list[Packed], under_way: int, drain: bool, until: float
    ) -> Moved:
        return load(fds, tasks, under_way, drain, until, self._checksums)

    def resume(self, task: ReadTask) -> bool:
        return task[0].begin()

    def suspend(self, task: ReadTask) -> None:
        task[0].release()

    def asked(self, task: ReadTask) -> None:
        """It stays begun until it was received or is to be suspended."""

    def moved(self, task: ReadTask, result: bytes) -> None:
        job, index, _ = task
        job.end_stripe(index, Verified(None, result))

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
