"""Chunks from slots into Redis. Stripe 0 is stored last and makes the chunk visible.

While the last stripes of one chunk are acknowledged, those of the next are sent: waiting costs no
round trip. One thread sends all stripes of a chunk that go to one server.

A server that restarts loses what it acknowledged, and all its connections. So when a connection is
lost, nothing is sent until every reply in flight has arrived or is lost, too. Then the thread
replaces all its connections. Chunks of which a stripe was acknowledged on the old connections fail;
all other stripes are sent again. No connection is added while a chunk is half stored: the server
could have been restarted in the meantime.

A chunk that fails after something was sent leaves a partial write: stripes that no reader sees, or,
if it was to replace an older store, a mixture that readers refuse (TORN). It stays until the chunk
is stored again, or the server evicts it: writers delete nothing.

A stripe to be sealed is encrypted into memory of the thread right before it is sent. Meanwhile the
kernel sends those before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from lmcache_redis.chunks.frame import HEADER_BYTES
from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.errors import (
    RedisClusterDown,
    RedisError,
    RedisProtocolError,
    RedisRedirect,
    RedisUnavailable,
)
from lmcache_redis.resp.bulk import (
    MOST_TASKS,
    SENT,
    End,
    Packed,
    StripeFailure,
    add_short_checksums,
)
from lmcache_redis.resp.jobs import ChunkJob, StripeTask
from lmcache_redis.resp.lanes import BulkWorker, Lane
from lmcache_redis.resp.net.wire import end_of_command, set_prefix
from lmcache_redis.resp.queues import TaskQueue
from lmcache_redis.resp.worker import DataServer
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


class Write(ChunkJob[WriteOutcome]):
    """One chunk being written. nodes: the node of each stripe."""

    __slots__ = ("_created_unix_ms", "_store_id")
    good = WriteOutcome.STORED

    def __init__(
        self, chunk: ChunkIO, done: WriteDone, now: float, store_id: bytes, created_unix_ms: int
    ) -> None:
        super().__init__(chunk, done, now)
        self._store_id = store_id
        self._created_unix_ms = created_unix_ms

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

    def acknowledged(self) -> None:
        """Under the lock: a stripe is stored. The last one before stripe 0 queues stripe 0."""
        self.advance()
        if self.steps_left == 1 and self.outcome is None:
            node: Any = self.nodes[0]
            node.put_writes(((self, 0, None),), urgent=True)


class _ServerRun:
    """What one run of a server's process has: it lasts until the first connection is lost.

    acknowledged: jobs of which it has a stripe. unanswered: stripes that were sent on lost
    connections. loss: the outcome of chunks that are half stored; None: nothing was lost.
    """

    __slots__ = ("acknowledged", "loss", "unanswered")

    def __init__(self) -> None:
        self.acknowledged: set[Write] = set()
        self.unanswered: list[StripeTask] = []
        self.loss: WriteOutcome | None = None

    def add(self, jobs: Sequence[Write]) -> None:
        """A stripe of each job was acknowledged."""
        self.acknowledged.update([job for job in jobs if job.outcome is None])
        if len(self.acknowledged) >= _PRUNE_AT:
            self.acknowledged = {job for job in self.acknowledged if job.outcome is None}

    @property
    def is_whole(self) -> bool:
        """Whether no chunk is half stored."""
        return all(job.outcome is not None for job in self.acknowledged)


class Writer(BulkWorker):
    """A thread with SET connections."""

    _is_load = False

    def __init__(
        self, name: str, server: DataServer, queue: TaskQueue[StripeTask], connections: int
    ) -> None:
        super().__init__(name, server, queue, connections)
        self._run = _ServerRun()
        self._sealer: _Sealer | None = None
        if (keys := server.options.seal_keys) is not None:
            # One more for a stripe that was sent in part.
            self._sealer = _Sealer(keys, _SEALED_TOGETHER + 1)

    def _pack(self, task: StripeTask) -> Packed:
        job, index, _ = task
        if self._sealer is not None:
            self._sealer.kept = self._lanes.busy[-1].packed[2] if self._lanes.is_sending else None
        packed: Packed = job.pack(index, self._server.options.ttl_s, self._sealer)
        return packed

    def _sent(self, jobs: Collection[Any]) -> None:
        # The kernel has the bytes, or will never get them: the slots are free either way.
        self._jobs.release(jobs)

    def _succeeded(self, done: Sequence[tuple[StripeTask, bytes]]) -> None:
        jobs: list[Write] = [task[0] for task, _ in done]
        with self._jobs.lock:
            for job in jobs:
                job.acknowledged()
        self._run.add(jobs)
        self._jobs.conclude(jobs)

    def _failed(
        self, lane: Lane, task: StripeTask, failure: StripeFailure, error: RedisError | None
    ) -> None:
        job: Write = task[0]
        assert error is not None, "a SET has no value"
        if failure[0] != End.LINE:
            self._lost(lane, task, error)
            return
        if isinstance(error, RedisRedirect) and self._server.redirect(task, error):
            return
        is_answer = isinstance(error, RedisClusterDown)
        if isinstance(error, (RedisUnavailable, RedisProtocolError)) and not is_answer:
            # It would answer any request so, or does not speak Redis.
            if isinstance(error, RedisProtocolError):
                lane.connection.close()
            self._lose(lane, error)
            self._fail(job, WriteOutcome.UNAVAILABLE)
            return
        self._fail(job, self._server.refuses_writes(error))

    def _lost(self, lane: Lane, task: StripeTask, error: RedisError) -> None:
        job: Write = task[0]
        if lane.packed is not SENT:
            self._sent((job,))
        self._lose(lane, error)
        if self._may_retry(job, lane.connection):
            self._run.unanswered.append(task)
        else:
            self._fail(job, WriteOutcome[self._stop_for(error).name])

    def _lose(self, lane: Lane, error: RedisError) -> None:
        """The connection is unusable, and the others are replaced with it."""
        self._judge(error, lane.connection)
        if self._run.loss is None:
            self._run.loss = WriteOutcome[self._stop_for(error).name]

    @property
    def _may_send(self) -> bool:
        return self._run.loss is None and super()._may_send

    def _begin_next(self, begun: list[StripeTask]) -> list[Lane]:
        refusal = self._server.write_state.refusal
        while refusal is not None and (tasks := self._queue.take_some(MOST_TASKS)):
            self._jobs.stop([task[0] for task in tasks], refusal)
        return super()._begin_next(begun)

    @property
    def _most_tasks(self) -> int:
        if self._sealer is None:
            return MOST_TASKS
        # Behind a stripe that was sent in part, few are sent: the others would be sealed again.
        return 1 if self._lanes.is_sending else _SEALED_TOGETHER

    @property
    def _may_widen(self) -> bool:
        return not self._lanes.busy and self._run.is_whole

    def _all_closed(self) -> None:
        """Fail chunks that the old connections acknowledged in part; send other stripes again."""
        run, self._run = self._run, _ServerRun()
        for job in run.acknowledged:
            self._fail(job, run.loss or WriteOutcome.UNAVAILABLE)
        self._queue.put([task for task in run.unanswered if task[0].outcome is None], urgent=True)

    def _fail(self, job: Write, outcome: WriteOutcome) -> None:
        with self._jobs.lock:
            job.advance(outcome)
        self._jobs.conclude((job,))
