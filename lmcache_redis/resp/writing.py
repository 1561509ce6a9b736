"""Chunks from slots into Redis. Stripe 0 is stored last and makes the chunk visible.

While the last stripes of one chunk are acknowledged, those of the next are sent: waiting costs no
round trip. One thread sends all stripes of a chunk that go to one server.

A server that restarts loses what it acknowledged, and all its connections. So when a connection is
lost, nothing is sent until every reply in flight has arrived or is lost, too. Then the thread
replaces all its connections. Chunks of which a stripe was acknowledged on the old connections fail;
all other stripes are sent again. No connection is added while a chunk is half stored: the server
could have been restarted in the meantime.

A chunk that fails after something was sent leaves a partial write: stripes that no reader sees, or,
if it was to replace an older store, a mixture that readers refuse. It is removed once its last
stripe is answered, so that no stripe arrives after the removal; never later, when the chunk may
have been stored again.

A stripe to be sealed is encrypted into memory of the thread right before it is sent. Meanwhile the
kernel sends those before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from lmcache_redis.chunks.frame import HEADER_BYTES
from lmcache_redis.chunks.keys import stripe_key
from lmcache_redis.errors import (
    RedisError,
    RedisFull,
    RedisProtocolError,
    RedisReadOnly,
    RedisRedirect,
    RedisUnavailable,
)
from lmcache_redis.resp.bulk import (
    MOST_TASKS,
    SENT,
    End,
    Failure,
    Packed,
    add_short_checksums,
)
from lmcache_redis.resp.health import Server
from lmcache_redis.resp.jobs import Jobs, Task, TaskQueue
from lmcache_redis.resp.lanes import BulkWorker, Lane, Remove, Transfer
from lmcache_redis.resp.net.wire import end_of_command, set_prefix
from lmcache_redis.seal import SealKeys
from lmcache_redis.tiers import ChunkIO, WriteDone, WriteOutcome

# Chunks that have been stored are dropped from the set of acknowledged ones at this size.
_PRUNE_AT = 64
# Stripes that are sealed, then sent together: while the next are sealed, the kernel sends these.
_SEALED_TOGETHER = 4


class _Sealer:
    """Seals stripes into buffers of its own.

    A buffer stays as it is while the next `buffers - 2` are sealed, and as long as it is kept.
    """

    def __init__(self, keys: SealKeys, buffers: int) -> None:
        self._keys = keys
        self._buffers = deque([bytearray()] * buffers)
        self.kept: memoryview | None = None

    def seal(self, key: bytes, header: bytearray, payload: memoryview) -> memoryview:
        """Complete a bare header for the payload; return the ciphertext, which replaces it."""
        self._buffers.rotate(-1)
        if self.kept is not None and self._buffers[0] is self.kept.obj:
            self._buffers.rotate(-1)
        if len(self._buffers[0]) < payload.nbytes:
            self._buffers[0] = bytearray(payload.nbytes)
        return self._keys.seal(key, header, payload, memoryview(self._buffers[0]))


class Write(Transfer[WriteOutcome]):
    """One chunk being written. nodes: the node of each stripe."""

    __slots__ = ("_created_unix_ms", "_is_partial", "_outstanding", "_store_id", "_stripe_count")
    good = WriteOutcome.STORED
    is_store = True

    def __init__(
        self,
        chunk: ChunkIO,
        done: WriteDone,
        remove: Remove,
        now: float,
        store_id: bytes,
        created_unix_ms: int,
    ) -> None:
        super().__init__(chunk, done, remove, now)
        self._stripe_count = chunk.frame.stripe_count
        self._store_id = store_id
        self._created_unix_ms = created_unix_ms
        self._outstanding = 0
        self._is_partial = False

    def pack(self, index: int, ttl_s: int, sealer: _Sealer | None) -> Packed:
        """What a mover needs to store stripe `index`."""
        chunk = self.chunk
        key, payload = stripe_key(chunk.key, index), chunk.slots[index]
        is_sealed = sealer is not None
        header = bytearray(
            chunk.frame.bare_header(index, self._store_id, self._created_unix_ms, is_sealed)
        )
        if sealer is not None:
            payload = sealer.seal(key, header, payload)
        prefix = set_prefix(key, HEADER_BYTES + payload.nbytes, ttl_s)
        return prefix, add_short_checksums(header, payload), payload, end_of_command(ttl_s)

    def sent(self) -> None:
        """Under the lock: some of a stripe was sent: its slot is free, and it may be in Redis."""
        self.in_flight -= 1
        self._outstanding += 1
        self._is_partial = True

    def withdraw(self) -> None:
        """Under the lock: a stripe that was sent was refused, or will not be answered."""
        self._outstanding -= 1

    def acknowledged(self) -> None:
        """Under the lock: a stripe is stored. The last one before stripe 0 queues stripe 0."""
        self._outstanding -= 1
        self.advance()
        if self.steps_left == 0:
            self._is_partial = False
        elif self.steps_left == 1 and self.outcome is None:
            node: Any = self.nodes[0]
            node.put_writes(((self, 0, None),), urgent=True)

    def take_partial(self) -> bool:
        """Under the lock. True once: failed, perhaps partly in Redis, and no reply outstanding.

        The caller removes it at once, before the chunk can be stored again.
        """
        is_due = self.outcome is not None and self._is_partial and not self._outstanding
        self._is_partial &= not is_due
        return is_due

    def remove(self) -> None:
        self._remove(self.chunk_key, self._stripe_count)

    def leave(self, jobs: Jobs) -> None:
        super().leave(jobs)
        if self.take_partial():
            self._remove_stripes = self._stripe_count


class Writer(BulkWorker):
    """A thread with SET connections."""

    _is_load = False

    def __init__(self, name: str, server: Server, queue: TaskQueue[Task], connections: int) -> None:
        super().__init__(name, server, queue, connections)
        # Jobs of which a stripe was acknowledged on the open connections.
        self._acknowledged: set[Write] = set()
        # Stripes that were sent on lost connections.
        self._unanswered: list[Task] = []
        self._losing: WriteOutcome | None = None
        self._sealer: _Sealer | None = None
        if (keys := server.options.seal_keys) is not None:
            # One more for a stripe that was sent in part.
            self._sealer = _Sealer(keys, _SEALED_TOGETHER + 1)

    def _pack(self, task: Task) -> Packed:
        job, index, _ = task
        if self._sealer is not None:
            self._sealer.kept = self._busy[-1].packed[2] if self._is_sending else None
        packed: Packed = job.pack(index, self._server.options.ttl_s, self._sealer)
        return packed

    def _sent(self, jobs: Collection[Any]) -> None:
        # The kernel has the bytes, or will never get them: the slots are free either way.
        with self._jobs.lock:
            for job in jobs:
                job.sent()
        self._jobs.conclude(jobs)

    def _succeeded(self, done: Sequence[tuple[Task, bytes]]) -> None:
        jobs: list[Write] = [task[0] for task, _ in done]
        with self._jobs.lock:
            for job in jobs:
                job.acknowledged()
        if others := [job for job in jobs if job.outcome is not WriteOutcome.STORED]:
            # Before the answers: another of `jobs` may have stored the same chunk again.
            self._retire(others)
            self._acknowledged.update([job for job in others if job.outcome is None])
        self._jobs.conclude(jobs)
        if len(self._acknowledged) >= _PRUNE_AT:
            self._acknowledged = {job for job in self._acknowledged if job.outcome is None}

    def _failed(self, lane: Lane, task: Task, failure: Failure, error: RedisError | None) -> None:
        job: Write = task[0]
        assert error is not None, "a SET has no value"
        if failure[0] != End.LINE:
            self._lost(lane, task, error)
            return
        if isinstance(error, RedisRedirect) and self._server.redirect(task, error):
            with self._jobs.lock:
                job.withdraw()
            return
        if isinstance(error, (RedisUnavailable, RedisProtocolError)):
            # It would answer any request so, or does not speak Redis.
            if isinstance(error, RedisProtocolError):
                lane.connection.close()
            self._lose(lane, error)
            self._fail(job, WriteOutcome.UNAVAILABLE, was_sent=True)
            return
        full = isinstance(error, RedisFull)
        self._fail(job, WriteOutcome.FULL if full else WriteOutcome.REJECTED, was_sent=True)
        self._health.note(error)
        if isinstance(error, RedisReadOnly):
            self._server.is_replica()

    def _lost(self, lane: Lane, task: Task, error: RedisError) -> None:
        job: Write = task[0]
        if lane.packed is not SENT:
            self._sent((job,))
        self._lose(lane, error)
        if self._may_retry(job, lane.connection):
            with self._jobs.lock:
                job.withdraw()
            self._unanswered.append(task)
        else:
            self._fail(job, WriteOutcome[self._stop_for(error).name], was_sent=True)

    def _lose(self, lane: Lane, error: RedisError) -> None:
        """The connection is unusable, and the others are replaced with it."""
        self._judge(error, lane.connection)
        if self._losing is None:
            self._losing = WriteOutcome[self._stop_for(error).name]

    @property
    def _may_send(self) -> bool:
        return self._losing is None

    @property
    def _most_tasks(self) -> int:
        if self._sealer is None:
            return MOST_TASKS
        # Behind a stripe that was sent in part, few are sent: the others would be sealed again.
        return 1 if self._is_sending else _SEALED_TOGETHER

    @property
    def _may_widen(self) -> bool:
        return not self._busy and all(job.outcome is not None for job in self._acknowledged)

    def _all_closed(self) -> None:
        """Fail chunks that the old connections acknowledged in part; send other stripes again."""
        outcome, self._losing = self._losing, None
        acknowledged, self._acknowledged = self._acknowledged, set()
        unanswered, self._unanswered = self._unanswered, []
        for job in acknowledged:
            self._fail(job, outcome or WriteOutcome.UNAVAILABLE)
        self._queue.put([task for task in unanswered if task[0].outcome is None], urgent=True)

    def _fail(self, job: Write, outcome: WriteOutcome, was_sent: bool = False) -> None:
        with self._jobs.lock:
            if was_sent:
                job.withdraw()
            job.advance(outcome)
        self._jobs.conclude((job,))
        self._retire((job,))

    def _retire(self, jobs: Sequence[Write]) -> None:
        """Remove the partial writes of failed chunks whose replies have all arrived."""
        with self._jobs.lock:
            due = [job for job in jobs if job.take_partial()]
        for job in due:
            job.remove()
