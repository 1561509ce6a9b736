"""Chunks from slots into Redis: a SET on each connection (`lanes`), stripe 0 last.

While the last stripes of one chunk are acknowledged those of the next are sent: waiting costs no
round trip. All stripes of a chunk that go to one server go over connections of one thread.

A server that is restarted loses what it had acknowledged, and with it all its connections. So
when a connection is lost, nothing is sent until every reply that is under way has come or is lost
too; then the thread opens all its connections anew, and chunks of which anything was acknowledged
on the old ones fail. What was sent of others is sent again. No other connection is opened while
the thread has a chunk half stored: it could be one to a server that was restarted meanwhile.

A chunk that fails after something of it was sent leaves remains: stripes nobody can see, or,
where it was to replace an older store, a mixture that readers refuse. They are handed to
`remove` once the chunk has failed and the last of them was answered, so that none comes after its
removal; never later, when the chunk may have been stored anew.
"""

from __future__ import annotations

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
from lmcache_redis.resp.batches import BatchWorker
from lmcache_redis.resp.bulk import BulkConnection
from lmcache_redis.resp.connect import Connector
from lmcache_redis.resp.health import Health
from lmcache_redis.resp.jobs import Stop
from lmcache_redis.resp.lanes import Lane
from lmcache_redis.resp.moving import SENT, Moved, Packed, store
from lmcache_redis.resp.outcomes import WriteOutcome
from lmcache_redis.resp.queues import TaskQueue
from lmcache_redis.resp.wire import (
    ASKING_COMMAND,
    ErrorReply,
    Reply,
    error_of,
)
from lmcache_redis.resp.writejob import AnyWrite, WriteBundle, WriteJob, WriteTask
from lmcache_redis.stripe import HEADER_BYTES

# Called with a chunk key and a stripe count.
Remove = Callable[[bytes, int], None]
# Hands a task that was redirected to another node; False if there is none.
FollowWrite = Callable[[WriteTask, RedisRedirect], bool]

_OK = b"OK"
# Chunks that were stored meanwhile are forgotten when there are that many.
_PRUNE_AT = 64


class Writer(BatchWorker[AnyWrite, WriteTask]):
    """A thread with SET connections."""

    def __init__(
        self,
        name: str,
        connector: Connector,
        health: Health,
        queue: TaskQueue[AnyWrite],
        connections: int,
        op_timeout_s: float,
        remove: Remove,
        follow: FollowWrite,
        stale: Callable[[RedisError], None],
        ttl_s: int,
    ) -> None:
        super().__init__(name, connector, health, queue, connections, op_timeout_s)
        self._ttl_s = ttl_s
        self._remove = remove
        self._follow = follow
        self._stale = stale
        self._header = memoryview(bytearray(HEADER_BYTES))
        # Jobs of which something was acknowledged on the connections that are open.
        self._acknowledged: set[WriteJob] = set()
        # What was sent on connections that were lost.
        self._lost: list[WriteTask] = []
        self._losing: WriteOutcome | None = None

    # --------------------------------------------------------------- lanes

    def ask(self, lane: Lane[AnyWrite], task: WriteTask, begun: Moved | None = None) -> bool:
        """Send a stripe."""
        job = task[0]
        if begun is None and not job.begin():
            return False
        failed: RedisError | None = None
        try:
            if begun is not None and lane.packed is not None:
                lane.connection.send_rest(lane.packed, begun, job.deadline)
            else:
                self._send(lane.connection, task)
        except RedisError as error:
            failed = error
        except BaseException:
            job.sent()
            raise
        if isinstance(failed, RedisTimeout) and lane.connection.is_open:
            # Its time was up before a byte of it was sent: the connection is as it was.
            job.release()
            job.stop(Stop.TIMED_OUT)
            self._retire(job)
            return False
        # The kernel has the bytes, or never will: the slot is free either way.
        job.sent()
        if failed is not None:
            self._lose(lane, failed, task)
            return False
        return True

    def receive(self, lane: Lane[AnyWrite], task: WriteTask, begun: Moved | None = None) -> None:
        """Receive what the server says to a stripe."""
        job = task[0]
        try:
            reply = lane.connection.receive_reply(self.patience(lane), begun)
        except RedisError as error:
            self._lose(lane, error, task)
            return
        if reply == _OK:
            self._acknowledge(job)
            return
        job.withdraw()
        self._refused(lane, task, reply)
        if job.ended:
            self._retire(job)

    def give_up(self, task: WriteTask) -> None:
        task[0].withdraw()
        self._fail(task[0], WriteOutcome.UNAVAILABLE)

    @property
    def must_renew(self) -> bool:
        return self._losing is not None

    @property
    def may_widen(self) -> bool:
        return not self._busy and all(job.ended for job in self._acknowledged)

    def closed(self) -> None:
        """Give up what the old connections had a part in, and send again what they had not."""
        outcome, self._losing = self._losing, None
        acknowledged, self._acknowledged = self._acknowledged, set()
        lost, self._lost = self._lost, []
        for job in acknowledged:
            self._fail(job, outcome or WriteOutcome.UNAVAILABLE)
        self._queue.put([task for task in lost if not task[0].ended], urgent=True)

    # Many at once.

    def pack(self, task: AnyWrite) -> Packed | None:
        job, index, hop = task
        return None if hop is not None and hop.asking else job.pack(index, self._ttl_s)

    def move(
        self, fds: list[int], tasks: list[Packed], under_way: int, drain: bool, until: float
    ) -> Moved:
        return store(fds, [SENT] * under_way + tasks[under_way:], under_way, drain, until)

    def resume(self, task: AnyWrite) -> bool:
        """Its slot is not needed for the reply."""
        return True

    def suspend(self, task: AnyWrite) -> None:
        """So nothing was begun."""

    def asked(self, tasks: Sequence[AnyWrite]) -> None:
        job = tasks[0][0]
        if isinstance(job, WriteBundle):
            job.sent_all([step for _, step, _ in tasks])
            return
        for _ in tasks:
            job.sent()

    def moved(self, tasks: Sequence[AnyWrite], results: Sequence[bytes]) -> None:
        job = tasks[0][0]
        if isinstance(job, WriteBundle):
            job.acknowledge_all([step for _, step, _ in tasks])
            return
        for _ in tasks:
            self._acknowledge(job)

    def apart(self, task: AnyWrite, begun: bool) -> WriteTask:
        job, index, hop = task
        if isinstance(job, WriteJob):
            return job, index, hop
        return job.single(index, begun), 0, hop

    # -------------------------------------------------------------- inside

    def _send(self, connection: BulkConnection, task: WriteTask) -> None:
        job, index, hop = task
        chunk = job.chunk
        slot = chunk.slots[index]
        if hop is not None and hop.asking:
            connection.call(ASKING_COMMAND, 1, job.deadline)
        chunk.frame.pack_header_into(
            self._header, index, job.store_id, xxh3_64_intdigest(slot), job.created_unix_ms
        )
        key = stripe_key(chunk.key, index)
        connection.send_stripe(key, self._header, slot, job.deadline, self._ttl_s)

    def _acknowledge(self, job: WriteJob) -> None:
        job.acknowledge()
        if job.ended:
            self._retire(job)
        else:
            self._note_acknowledged(job)

    def _note_acknowledged(self, job: WriteJob) -> None:
        if len(self._acknowledged) >= _PRUNE_AT:
            self._acknowledged = {each for each in self._acknowledged if not each.ended}
        self._acknowledged.add(job)

    def _refused(self, lane: Lane[AnyWrite], task: WriteTask, reply: Reply) -> None:
        job = task[0]
        if not isinstance(reply, ErrorReply):
            job.advance(WriteOutcome.UNAVAILABLE)
            lane.connection.close()
            self._lose(lane, RedisProtocolError("the reply to a SET is neither OK nor an error"))
            return
        error = error_of(reply)
        if isinstance(error, RedisRedirect) and self._follow(task, error):
            return
        if isinstance(error, RedisUnavailable):
            job.advance(WriteOutcome.UNAVAILABLE)
            # It would say so to every other as well.
            self._lose(lane, error)
            return
        full = isinstance(error, RedisFull)
        job.advance(WriteOutcome.FULL if full else WriteOutcome.REJECTED)
        self._health.note(error)
        if isinstance(error, RedisReadOnly):
            self._stale(error)

    def _lose(self, lane: Lane[AnyWrite], error: RedisError, task: WriteTask | None = None) -> None:
        """The connection is of no more use. task: what was sent on it and not answered."""
        self._judge(error, lane.connection)
        late = isinstance(error, RedisTimeout)
        outcome = WriteOutcome.TIMED_OUT if late else WriteOutcome.UNAVAILABLE
        if self._losing is None:
            self._losing = outcome
        if task is None:
            return
        task[0].withdraw()
        if self._may_retry(task[0], lane.connection):
            self._lost.append(task)
        else:
            self._fail(task[0], outcome)

    def _fail(self, job: WriteJob, outcome: WriteOutcome) -> None:
        job.advance(outcome)
        self._retire(job)

    def _retire(self, job: WriteJob) -> None:
        """Have the remains of a failed chunk removed, when no more can come of it."""
        if job.take_remains():
            self._remove(job.key, job.stripe_count)
