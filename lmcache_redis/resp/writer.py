"""Chunks from slots into Redis: SETs pipelined on a connection of each server, stripe 0 last.

A chunk can be seen once its stripe 0 is there, so that one is sent only after every other
stripe was acknowledged. Meanwhile the stripes of the next chunks are sent: waiting costs no
round trip.

All stripes of a chunk that go to one server are a part. A server that is restarted loses what it
had acknowledged, and with it all its connections: so a chunk fails with a connection on which
anything of it was acknowledged, and once a connection was lost, what remains of a part goes only
over those that are older than its first stripe. If nothing of a part was acknowledged on any
connection, it is sent again.

A chunk that fails after something of it was sent leaves remains: stripes nobody can see, or,
where it was to replace an older store, a mixture that readers refuse. They are handed to
`remove` once the last of them was answered, so that none comes after its removal.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence

from xxhash import xxh3_64_intdigest

from lmcache_redis.errors import (
    RedisError,
    RedisFull,
    RedisProtocolError,
    RedisReadOnly,
    RedisRedirect,
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
from lmcache_redis.resp.routes import Hop
from lmcache_redis.resp.wire import ASKING_COMMAND, ErrorReply, Reply, error_of
from lmcache_redis.resp.worker import Worker
from lmcache_redis.stripe import HEADER_BYTES, STORE_ID_BYTES

WriteDone = Callable[[ChunkIO, WriteOutcome], None]
WriteSettled = Callable[[ChunkIO, WriteOutcome], None]
# Called with a chunk key and a stripe count.
Remove = Callable[[bytes, int], None]

_OK = b"OK"
# Parts of chunks that were stored meanwhile are forgotten when there are that many.
_PRUNE_AT = 64


class Losses:
    """When a SET connection of a server was lost last; shared by the server's writers."""

    __slots__ = ("last_at",)

    def __init__(self) -> None:
        self.last_at = -math.inf


class WritePart:
    """What one server gets of a chunk. Its fields are guarded by the job's lock."""

    __slots__ = ("acknowledged", "first_sent_at", "job", "outstanding", "queue")

    def __init__(self, job: WriteJob, queue: TaskQueue[WriteTask]) -> None:
        self.job = job
        self.queue = queue
        self.first_sent_at: float | None = None
        self.acknowledged = 0
        self.outstanding = 0


# A stripe to set: its part, its index, and the redirection it has followed, if any.
WriteTask = tuple[WritePart, int, Hop | None]
# Hands a task that was redirected to another node; False if there is none.
FollowWrite = Callable[[WriteTask, RedisRedirect], bool]


class WriteJob(Job[WriteOutcome]):
    """One chunk on its way out; a step is a stripe."""

    __slots__ = (
        "_acknowledged",
        "_chunk",
        "_done",
        "_first",
        "_parts",
        "_remains",
        "_settled",
        "created_unix_ms",
        "key",
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
        self.created_unix_ms = max(0, int(time.time() * 1000))
        self._parts: dict[TaskQueue[WriteTask], WritePart] = {}
        self._first: TaskQueue[WriteTask] | None = None
        self._acknowledged = 0
        self._remains = False
        super().__init__(self.stripe_count, WriteOutcome.STORED, chunk.deadline, registry)

    @property
    def chunk(self) -> ChunkIO:
        """Only between `begin` and the end of that step, when it cannot have been let go."""
        if self._chunk is None:
            raise RuntimeError("the chunk of a write was given back while a step used it")
        return self._chunk

    def submit(self, queues: Sequence[TaskQueue[WriteTask]]) -> None:
        """Begin. queues: for each stripe the queue of the server that gets it."""
        self._first = queues[0]
        if self.stripe_count == 1:
            self._submit_first()
            return
        tasks: dict[TaskQueue[WriteTask], list[WriteTask]] = {}
        for index in range(1, self.stripe_count):
            queue = queues[index]
            tasks.setdefault(queue, []).append((self.part(queue), index, None))
        for queue, of_queue in tasks.items():
            queue.put(of_queue)

    def part(self, queue: TaskQueue[WriteTask]) -> WritePart:
        """The part of the server with that queue."""
        with self._lock:
            return self._parts.setdefault(queue, WritePart(self, queue))

    def admit(self, part: WritePart, connected_at: float, lost_at: float) -> bool:
        """Whether a stripe may go over a connection of that age; it counts as sent then.

        lost_at: when a SET connection of that server was lost last.
        """
        with self._lock:
            if part.first_sent_at is None:
                part.first_sent_at = time.monotonic()
            if connected_at > part.first_sent_at and lost_at >= part.first_sent_at:
                return False
            part.outstanding += 1
            self._remains = True
            return True

    def withdraw(self, part: WritePart) -> None:
        """A stripe that counted as sent was not, or was refused."""
        with self._lock:
            part.outstanding -= 1

    def acknowledge(self, part: WritePart) -> None:
        """A stripe is stored. The last but stripe 0 brings that on its way."""
        with self._lock:
            part.outstanding -= 1
            part.acknowledged += 1
            self._acknowledged += 1
            if self._acknowledged == self.stripe_count:
                self._remains = False
            first_is_due = self._acknowledged == self.stripe_count - 1
        if first_is_due:
            self._submit_first()

    def may_restart(self, part: WritePart, lost: int) -> bool:
        """`lost` stripes will not be answered: whether sending them again makes a whole chunk."""
        with self._lock:
            part.outstanding -= lost
            # What was acknowledged may be gone with the server's memory.
            if part.acknowledged or part.outstanding:
                return False
            part.first_sent_at = None
            return True

    def take_remains(self) -> bool:
        """True once: the job failed, something of it may be in Redis, and no more will come."""
        with self._lock:
            if self._outcome is None or not self._remains:
                return False
            if any(part.outstanding for part in self._parts.values()):
                return False
            self._remains = False
            return True

    def _submit_first(self) -> None:
        if self._first is not None:
            self._first.put(((self.part(self._first), 0, None),), urgent=True)

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
        queue: TaskQueue[WriteTask],
        max_outstanding_sets: int,
        op_timeout_s: float,
        remove: Remove,
        follow: FollowWrite,
        stale: Callable[[RedisError], None],
        losses: Losses,
        ttl_s: int,
    ) -> None:
        super().__init__(name, connector, health)
        self._losses = losses
        self._ttl_s = ttl_s
        self._queue = queue
        self._max_outstanding_sets = max_outstanding_sets
        self._op_timeout_s = op_timeout_s
        self._remove = remove
        self._follow = follow
        self._stale = stale
        self._header = memoryview(bytearray(HEADER_BYTES))
        # Stripes sent and not answered yet, in the order of their replies.
        self._outstanding: deque[WriteTask] = deque()
        # Parts of which something was acknowledged on this connection.
        self._acknowledged: set[WritePart] = set()

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
            task = self._queue.take(wait=not self._outstanding)
            if task is not None:
                if task[2] is None or not task[2].asking or not self._outstanding:
                    self._send(connection, task)
                    return True
                # ASKING is for the next command alone: the replies before it come first.
                self._queue.put((task,), urgent=True)
            elif not self._outstanding:
                return not self._queue.closed
        self._take_replies(connection)
        return True

    def _send(self, connection: BulkConnection, task: WriteTask) -> None:
        part, index, hop = task
        job = part.job
        if not job.begin():
            self._retire(job)
            return
        if not job.admit(part, connection.opened_at, self._losses.last_at):
            job.end(WriteOutcome.UNAVAILABLE)
            self._retire(job)
            return
        chunk = job.chunk
        slot = chunk.slots[index]
        self._outstanding.append(task)
        try:
            if hop is not None and hop.asking:
                connection.call(ASKING_COMMAND, 1, job.deadline)
            chunk.frame.pack_header_into(
                self._header, index, job.store_id, xxh3_64_intdigest(slot), job.created_unix_ms
            )
            key = stripe_key(chunk.key, index)
            connection.send_stripe(key, self._header, slot, job.deadline, self._ttl_s)
        except RedisTimeout:
            if not connection.is_open:
                raise
            # Its time was up before a byte of it was sent: the connection is as it was.
            self._outstanding.pop()
            job.withdraw(part)
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
            task = self._outstanding.popleft()
            part, job = task[0], task[0].job
            if reply == _OK:
                self._note_acknowledged(part)
                job.acknowledge(part)
                job.advance()
            else:
                job.withdraw(part)
                self._refused(connection, task, reply)
            if job.ended:
                self._retire(job)

    def _note_acknowledged(self, part: WritePart) -> None:
        if len(self._acknowledged) >= _PRUNE_AT:
            self._acknowledged = {each for each in self._acknowledged if not each.job.ended}
        self._acknowledged.add(part)

    def _refused(self, connection: BulkConnection, task: WriteTask, reply: Reply) -> None:
        job = task[0].job
        if not isinstance(reply, ErrorReply):
            job.advance(WriteOutcome.UNAVAILABLE)
            connection.close()
            raise RedisProtocolError("the reply to a SET is neither OK nor an error")
        error = error_of(reply)
        if isinstance(error, RedisRedirect) and self._follow(task, error):
            return
        if isinstance(error, RedisFull):
            job.advance(WriteOutcome.FULL)
        elif isinstance(error, RedisUnavailable):
            job.advance(WriteOutcome.UNAVAILABLE)
            # It would say so to every other as well.
            raise error
        else:
            job.advance(WriteOutcome.REJECTED)
        self._health.note(error)
        if isinstance(error, RedisReadOnly):
            self._stale(error)

    def _retire(self, job: WriteJob) -> None:
        """Have the remains of a failed chunk removed, when no more can come of it."""
        if job.take_remains():
            self._remove(job.key, job.stripe_count)

    def _lost(self, connection: BulkConnection, late: bool) -> None:
        """Send again, or give up, every chunk that the closed connection had a part in."""
        self._losses.last_at = time.monotonic()
        outcome = WriteOutcome.TIMED_OUT if late else WriteOutcome.UNAVAILABLE
        lost: dict[WritePart, list[WriteTask]] = {}
        for task in self._outstanding:
            lost.setdefault(task[0], []).append(task)
        acknowledged, self._acknowledged = self._acknowledged, set()
        self._outstanding.clear()
        again: list[WriteTask] = []
        failed = [part for part in acknowledged if part not in lost]
        for part, tasks in lost.items():
            if part.job.may_restart(part, len(tasks)) and self._may_retry(part.job, connection):
                again += tasks
            else:
                failed.append(part)
        for part in failed:
            part.job.advance(outcome)
            self._retire(part.job)
        self._queue.put(again, urgent=True)
