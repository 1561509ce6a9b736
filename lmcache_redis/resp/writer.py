"""Chunks from slots into Redis: SETs pipelined on a connection of each server, stripe 0 last.

`parts` decides what may be sent and what is sent again. While the last stripes of one chunk are
acknowledged those of the next are sent: waiting costs no round trip.

A chunk that fails after something of it was sent leaves remains: stripes nobody can see, or,
where it was to replace an older store, a mixture that readers refuse. They are handed to
`remove` once the last of them was answered, so that none comes after its removal.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

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
from lmcache_redis.resp.jobs import Stop
from lmcache_redis.resp.outcomes import WriteOutcome
from lmcache_redis.resp.parts import Losses, WriteJob, WritePart, WriteTask
from lmcache_redis.resp.queues import TaskQueue
from lmcache_redis.resp.wire import ASKING_COMMAND, ErrorReply, Reply, error_of
from lmcache_redis.resp.worker import Worker
from lmcache_redis.stripe import HEADER_BYTES

# Called with a chunk key and a stripe count.
Remove = Callable[[bytes, int], None]
# Hands a task that was redirected to another node; False if there is none.
FollowWrite = Callable[[WriteTask, RedisRedirect], bool]

_OK = b"OK"
# Parts of chunks that were stored meanwhile are forgotten when there are that many.
_PRUNE_AT = 64


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
