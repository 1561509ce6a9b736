"""Chunks from slots into Redis: SETs pipelined on one connection, stripe 0 last.

A chunk can be seen once its stripe 0 is there, so that one is sent only after every other
stripe was acknowledged. Meanwhile the stripes of the next chunks are sent: waiting costs no
round trip. One chunk goes over one connection, so that losing the connection, and with it
perhaps the server's data, is known to concern every stripe of a chunk that is not visible
yet: such a chunk fails, unless nothing of it had been acknowledged; then it is sent again.

A chunk that fails after something of it was sent leaves remains: stripes nobody can see, or,
where it was to replace an older store, a mixture that readers refuse. They are handed to
`remove` once the last of them was answered, so that none comes after its removal.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable

from xxhash import xxh3_64_intdigest

from lmcache_redis.errors import (
    RedisError,
    RedisFull,
    RedisProtocolError,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.keys import stripe_key
from lmcache_redis.resp.bulk import BulkConnection, ConnectionState
from lmcache_redis.resp.connect import Connector
from lmcache_redis.resp.health import Health
from lmcache_redis.resp.jobs import Job, JobRegistry, Stop
from lmcache_redis.resp.outcomes import ChunkIO, WriteOutcome
from lmcache_redis.resp.queues import TaskQueue
from lmcache_redis.resp.wire import ErrorReply, Reply, error_of
from lmcache_redis.resp.worker import Worker
from lmcache_redis.stripe import HEADER_BYTES, STORE_ID_BYTES

WriteDone = Callable[[ChunkIO, WriteOutcome], None]
WriteSettled = Callable[[ChunkIO, WriteOutcome], None]
# Called with a chunk key and a stripe count.
Remove = Callable[[bytes, int], None]

_OK = b"OK"


class WriteJob(Job[WriteOutcome]):
    """One chunk on its way out; a step is a stripe. Its own fields belong to the writer."""

    __slots__ = (
        "_chunk",
        "_done",
        "_settled",
        "acknowledged",
        "created_unix_ms",
        "key",
        "next_index",
        "outstanding",
        "remains",
        "store_id",
        "stripe_count",
    )

    def __init__(
        self, chunk: ChunkIO, done: WriteDone, settled: WriteSettled, registry: JobRegistry
    ) -> None:
        self._chunk: ChunkIO | None = chunk
        self._done: WriteDone | None = done
        self._settled: WriteSettled | None = settled
        self.key = chunk.key
        self.stripe_count = chunk.frame.stripe_count
        self.store_id = os.urandom(STORE_ID_BYTES)
        self.created_unix_ms = int(time.time() * 1000)
        # Stripes 1, 2, ... and then, when all of them are acknowledged, 0.
        self.next_index = 1
        self.acknowledged = 0
        self.outstanding = 0
        self.remains = False
        super().__init__(self.stripe_count, WriteOutcome.STORED, chunk.deadline, registry)

    @property
    def chunk(self) -> ChunkIO:
        """Only between `begin` and the end of that step, when it cannot have been let go."""
        if self._chunk is None:
            raise RuntimeError("the chunk of a write was given back while a step used it")
        return self._chunk

    def _answer(self, outcome: WriteOutcome) -> None:
        chunk, done, settled = self._chunk, self._done, self._settled
        self._chunk = self._done = self._settled = None
        if chunk is None or done is None or settled is None:
            raise RuntimeError("a write is answered twice")
        settled(chunk, outcome)
        done(chunk, outcome)


class Writer(Worker):
    """One SET connection and its thread."""

    def __init__(
        self,
        name: str,
        connector: Connector,
        health: Health,
        queue: TaskQueue[WriteJob],
        max_outstanding_sets: int,
        op_timeout_s: float,
        remove: Remove,
    ) -> None:
        super().__init__(name, connector, health)
        self._queue = queue
        self._max_outstanding_sets = max_outstanding_sets
        self._op_timeout_s = op_timeout_s
        self._remove = remove
        self._header = memoryview(bytearray(HEADER_BYTES))
        # Stripes sent and not answered yet, in the order of their replies.
        self._outstanding: deque[tuple[WriteJob, int]] = deque()
        self._current: WriteJob | None = None
        self._ready: deque[WriteJob] = deque()
        self._again: deque[WriteJob] = deque()

    def serve(self, connection: BulkConnection) -> bool:
        try:
            while connection.state is ConnectionState.OPEN:
                if not self._step(connection):
                    return False
        except RedisError as error:
            self._judge(error, connection)
            connection.close()
            self._lost(connection, late=isinstance(error, RedisTimeout))
        except BaseException:
            connection.close()
            self._lost(connection, late=False)
            raise
        return True

    def _step(self, connection: BulkConnection) -> bool:
        """Send the stripe whose turn it is, or take replies. False: there is no more work."""
        if len(self._outstanding) < self._max_outstanding_sets:
            turn = self._next_turn()
            if turn is not None:
                self._send(connection, *turn)
                return True
            if not self._outstanding:
                return not self._queue.closed
        self._take_replies(connection)
        return True

    def _next_turn(self) -> tuple[WriteJob, int] | None:
        """The stripe to send next; waits for one only if no reply is to be waited for."""
        if self._ready:
            return self._ready.popleft(), 0
        job = self._current
        while job is None or job.ended or job.next_index >= job.stripe_count:
            if job is not None:
                self._retire(job)
            if self._again:
                job = self._again.popleft()
            else:
                job = self._queue.take(wait=not self._outstanding)
            self._current = job
            if job is None:
                return None
            if job.stripe_count == 1:
                self._current = None
                return job, 0
        index = job.next_index
        job.next_index += 1
        return job, index

    def _send(self, connection: BulkConnection, job: WriteJob, index: int) -> None:
        if not job.begin():
            self._retire(job)
            return
        chunk = job.chunk
        slot = chunk.slots[index]
        self._outstanding.append((job, index))
        job.outstanding += 1
        try:
            chunk.frame.pack_header_into(
                self._header, index, job.store_id, xxh3_64_intdigest(slot), job.created_unix_ms
            )
            job.remains = True
            connection.send_stripe(stripe_key(chunk.key, index), self._header, slot, job.deadline)
        except RedisTimeout:
            if not connection.is_open:
                raise
            # Its time was up before a byte of it was sent: the connection is as it was.
            self._outstanding.pop()
            job.outstanding -= 1
            job.stop(Stop.TIMED_OUT)
            self._retire(job)
        finally:
            # The kernel has the bytes, or never will: the slots are free either way.
            job.release()

    def _take_replies(self, connection: BulkConnection) -> None:
        replies = connection.receive_replies(time.monotonic() + self._op_timeout_s)
        for reply in replies:
            if not self._outstanding:
                connection.close()
                raise RedisProtocolError("more replies came than were asked for")
            job, index = self._outstanding.popleft()
            job.outstanding -= 1
            if reply == _OK:
                job.acknowledged += 1
                if job.acknowledged == job.stripe_count:
                    job.remains = False
                elif index and job.acknowledged == job.stripe_count - 1:
                    self._ready.append(job)
                job.advance()
            else:
                self._refused(connection, job, reply)
            if job.ended:
                self._retire(job)

    def _refused(self, connection: BulkConnection, job: WriteJob, reply: Reply) -> None:
        if not isinstance(reply, ErrorReply):
            job.advance(WriteOutcome.UNAVAILABLE)
            connection.close()
            raise RedisProtocolError("the reply to a SET is neither OK nor an error")
        error = error_of(reply)
        if isinstance(error, RedisFull):
            job.advance(WriteOutcome.FULL)
        elif isinstance(error, RedisUnavailable):
            job.advance(WriteOutcome.UNAVAILABLE)
            # It would say so to every other as well.
            raise error
        else:
            job.advance(WriteOutcome.REJECTED)
        self._health.note(error)

    def _retire(self, job: WriteJob) -> None:
        """Have the remains of a failed chunk removed, when no more can come of it."""
        if job.remains and job.ended and not job.outstanding:
            job.remains = False
            self._remove(job.key, job.stripe_count)

    def _lost(self, connection: BulkConnection, late: bool) -> None:
        """Send again, or give up, every chunk that the closed connection had a part in."""
        outcome = WriteOutcome.TIMED_OUT if late else WriteOutcome.UNAVAILABLE
        jobs = dict.fromkeys(job for job, _ in self._outstanding)
        jobs.update(dict.fromkeys(self._ready))
        if self._current is not None:
            jobs[self._current] = None
        self._outstanding.clear()
        self._ready.clear()
        self._current = None
        again: list[WriteJob] = []
        for job in jobs:
            job.outstanding = 0
            # What was acknowledged may be gone: such a chunk must not get its stripe 0.
            if job.acknowledged or not self._may_retry(job, connection):
                job.advance(outcome)
                self._retire(job)
            else:
                job.next_index = 1
                again.append(job)
        self._again.extendleft(reversed(again))
