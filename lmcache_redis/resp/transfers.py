"""Chunks in flight: what their stripes are packed as, and what follows from the end of each.

**From Redis into slots.** Stripes are taken from one queue in chunk order, so that the stripes of a
chunk arrive over all connections at once. One GET is outstanding on each: a server that has to
queue copies of values is slower. A chunk is LOADED if all its stripes are good and of one store. A
reader deletes nothing: whoever computes the chunk that it missed stores it again.

A value counts only if its header is exactly the expected one and its payload has the checksum that
the header names. A wrong value that is ours beyond doubt, because it has a damaged header with our
magic and version, is CORRUPT. Any other is FOREIGN: another type, another magic or version, another
layout or chunk, cut into stripes otherwise, no header at all. A reader with keys expects sealed
values, one without keys plain ones. A payload is opened in its slot, by the thread that received
it, while the kernel receives others.

**From slots into Redis.** Stripe 0 is stored last and makes the chunk visible. While the last
stripes of one chunk are acknowledged, those of the next are sent: waiting costs no round trip. One
thread sends all stripes of a chunk that go to one server.

A server that restarts loses what it acknowledged, and all its connections. So when a connection is
lost, nothing is sent until every reply in flight has arrived or is lost, too. Then the thread
replaces all its connections. Chunks of which a stripe was acknowledged on the old connections fail.
No connection is added while a chunk is half stored: the server could have been restarted in the
meantime.

A chunk that fails after something was sent leaves a partial write: stripes that no reader sees, or,
if it was to replace an older store, a mixture that readers refuse (TORN). It stays until the chunk
is stored again, or the server evicts it: writers delete nothing. A stripe to be sealed is encrypted
into memory of the thread right before it is sent. Meanwhile the kernel sends those before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from lmcache_redis.chunks.frame import (
    HEADER_BYTES,
    MAGIC,
    STORE_ID,
    ChunkFrame,
    Verdict,
    add_checksums,
)
from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.errors import (
    RedisClusterDown,
    RedisError,
    RedisProtocolError,
    RedisRedirect,
    RedisTimeout,
    RedisUnavailable,
    RedisWriteRefused,
)
from lmcache_redis.resp.bulk import (
    MOST_TASKS,
    SHORT_BYTES,
    End,
    Packed,
    StripeFailure,
)
from lmcache_redis.resp.health import DataServer, stop_for
from lmcache_redis.resp.jobs import ChunkJob, StripeTask, TaskQueue
from lmcache_redis.resp.lanes import SEALED_TOGETHER, BulkWorker, Lane
from lmcache_redis.resp.net.wire import end_of_command, get_command, set_prefix, value_head
from lmcache_redis.seal import Opened, SealKeys
from lmcache_redis.tiers import (
    CallOutcome,
    ChunkIO,
    Operation,
    ReadDone,
    ReadOutcome,
    WriteDone,
    WriteOutcome,
)

_UNANSWERED = (ReadOutcome.TIMED_OUT, ReadOutcome.UNAVAILABLE, ReadOutcome.CANCELLED)
_OPENED = {
    Opened.OK: None,
    Opened.UNKNOWN_KEY: ReadOutcome.NOT_OPENED,
    Opened.FORGED: ReadOutcome.CORRUPT,
}


def verify(
    frame: ChunkFrame,
    index: int,
    failure: StripeFailure,
    payload: memoryview,
    is_sealed: bool = False,
) -> ReadOutcome | bytes | None:
    """Judge what was found for stripe `index` of a chunk; None if the failure is not the value's.

    Bytes if the stripe is good: the id of its store. is_sealed: whether the value must be sealed; a
    mover that found the expected header has not failed.
    """
    end, _, data = failure
    if end == End.NOTHING:
        return ReadOutcome.INCOMPLETE
    if end == End.LINE and data.startswith(b"-WRONGTYPE"):
        return ReadOutcome.FOREIGN
    if end not in (End.MISMATCH, End.OTHER_LENGTH):
        return None
    check = frame.check_header(data, index, is_sealed)
    if check.ok and end == End.MISMATCH and not is_sealed:
        # The native extension cannot hash short payloads.
        if xxh3_64_intdigest(payload) == check.checksum:
            return check.store_id
        return ReadOutcome.CORRUPT
    if check.verdict in (Verdict.NOT_SEALED, Verdict.SEALED):
        return ReadOutcome.NOT_OPENED
    # A header cut short before the version is CORRUPT_HEADER, too: the magic decides.
    if check.ok or (check.verdict is Verdict.CORRUPT_HEADER and data[: len(MAGIC)] == MAGIC):
        return ReadOutcome.CORRUPT
    return ReadOutcome.FOREIGN


def place(
    chunk: ChunkIO, index: int, value: object, seal_keys: SealKeys | None
) -> ReadOutcome | bytes:
    """Judge a whole value that was received apart for stripe `index`, and bring it to its slot."""
    if not isinstance(value, bytes):
        return ReadOutcome.INCOMPLETE
    header, slot, end = value[:HEADER_BYTES], chunk.slots[index], End.OTHER_LENGTH
    if len(value) == HEADER_BYTES + slot.nbytes:
        end, slot[:] = End.MISMATCH, value[HEADER_BYTES:]
        if seal_keys is not None and chunk.frame.check_header(header, index, True).ok:
            opened = _OPENED[seal_keys.open(stripe_key(chunk.key, index), header, slot)]
            return opened or header[STORE_ID]
    found = verify(chunk.frame, index, (end, 0, header), slot, seal_keys is not None)
    return found or ReadOutcome.FOREIGN


class Read(ChunkJob[ReadOutcome]):
    """One chunk being read."""

    __slots__ = ("_store_id",)
    good = ReadOutcome.LOADED
    operation = Operation.LOAD

    def __init__(self, chunk: ChunkIO, done: ReadDone) -> None:
        super().__init__(chunk, done)
        self._store_id = b""

    @property
    def has_verdict(self) -> bool:
        return self.outcome not in _UNANSWERED

    def ended(self, index: int, found: ReadOutcome | bytes) -> None:
        """Under the lock: stripe `index` was in flight, and is good (its store id) or not."""
        self.in_flight -= 1
        if isinstance(found, bytes):
            self._store_id = self._store_id or found
            self.advance(None if found == self._store_id else ReadOutcome.TORN)
        elif found is ReadOutcome.INCOMPLETE and index == 0:
            # Of several servers another may say first that a later stripe is missing.
            self.advance(ReadOutcome.MISSING)
        else:
            self.advance(found)


class Reader(BulkWorker):
    """A thread with GET connections."""

    _is_load = True
    _operation = Operation.LOAD

    def _pack(self, task: StripeTask) -> Packed:
        job, index = task
        options = self._server.options
        # A server that takes no writes takes no GETEX either.
        refreshes = options.ttl_refresh and self._server.refusal is None
        chunk: ChunkIO = job.chunk
        payload = chunk.slots[index]
        header = chunk.frame.bare_header(index, is_sealed=self._seal_keys is not None)
        expected = value_head(HEADER_BYTES + payload.nbytes) + header
        ttl_s = options.ttl_s if refreshes else 0
        return get_command(stripe_key(chunk.key, index), ttl_s), expected, payload, b""

    def _succeeded(self, done: Sequence[tuple[StripeTask, bytes]]) -> None:
        if self._seal_keys is None:
            with self._jobs.lock:
                for (job, index), store_id in done:
                    job.ended(index, store_id)
            self._jobs.conclude([job for (job, _), _ in done])
            return
        # The headers are the expected ones; the payloads are in their slots, still sealed.
        for (job, index), header in done:
            chunk: ChunkIO = job.chunk
            key, payload = stripe_key(chunk.key, index), chunk.slots[index]
            outcome = _OPENED[self._seal_keys.open(key, header, payload)]
            with self._jobs.lock:
                job.ended(index, outcome or header[STORE_ID])
            self._jobs.conclude((job,))

    def _failed(
        self, lane: Lane, task: StripeTask, failure: StripeFailure, error: RedisError | None
    ) -> None:
        job, index = task
        frame, slot = job.chunk.frame, job.chunk.slots[index]
        found = verify(frame, index, failure, slot, self._seal_keys is not None)
        if found is not None:
            with self._jobs.lock:
                job.ended(index, found)
            self._jobs.conclude((job,))
        elif isinstance(error, RedisRedirect) and self._server.redirected(task, error):
            pass
        elif error is not None:
            self._lost(lane, task, error)

    def _lost(self, lane: Lane, task: StripeTask, error: RedisError) -> None:
        job = task[0]
        self._jobs.release((job,))
        if isinstance(error, RedisWriteRefused) and self._server.options.ttl_refresh:
            # It refuses the GETEX: a GET follows.
            self._server.refuses_writes(error)
            self._queue.put((task,), urgent=True)
            return
        self._server.judge(error, lane.connection, Operation.LOAD)
        self._jobs.stop((job,), stop_for(error))


# ------------------------------------------------------------------- writing


class Write(ChunkJob[WriteOutcome]):
    """One chunk being written. nodes: the node of each stripe."""

    __slots__ = ("created_unix_ms", "store_id")
    good = WriteOutcome.STORED
    operation = Operation.STORE

    def __init__(
        self, chunk: ChunkIO, done: WriteDone, store_id: bytes, created_unix_ms: int
    ) -> None:
        super().__init__(chunk, done)
        self.store_id = store_id
        self.created_unix_ms = created_unix_ms

    def acknowledged(self) -> bool:
        """Under the lock: a stripe is stored. Whether it is the turn of stripe 0."""
        self.in_flight -= 1
        self.advance()
        return self.steps_left == 1 and self.outcome is None

    def put_first(self) -> None:
        """Queue stripe 0, which makes the chunk visible."""
        self.nodes[0].put_writes(((self, 0),), urgent=True)


class Writer(BulkWorker):
    """A thread with SET connections."""

    _is_load = False
    _operation = Operation.STORE

    def __init__(
        self, name: str, server: DataServer, queue: TaskQueue[StripeTask], connections: int
    ) -> None:
        super().__init__(name, server, queue, connections)
        # Jobs of which the server has a stripe, until the first connection is lost; and why those
        # fail then. None: nothing was lost.
        self._acknowledged: set[Write] = set()
        self._loss: CallOutcome | None = None
        # Ciphertexts of the stripes of a call. All are sent before the next are sealed.
        self._rooms = deque([bytearray()] * SEALED_TOGETHER)

    def _pack(self, task: StripeTask) -> Packed:
        job, index = task
        chunk: ChunkIO = job.chunk
        key, payload = stripe_key(chunk.key, index), chunk.slots[index]
        keys = self._seal_keys
        header = bytearray(
            chunk.frame.bare_header(index, job.store_id, job.created_unix_ms, keys is not None)
        )
        if keys is not None:
            self._rooms.rotate()
            if len(self._rooms[0]) < payload.nbytes:
                self._rooms[0] = bytearray(payload.nbytes)
            payload = keys.seal(key, header, payload, memoryview(self._rooms[0]))
        ttl_s = self._server.options.ttl_s
        prefix = set_prefix(key, HEADER_BYTES + payload.nbytes, ttl_s)
        if payload.nbytes <= SHORT_BYTES:
            add_checksums(header, xxh3_64_intdigest(payload))
        return prefix, header, payload, end_of_command(ttl_s)

    def _succeeded(self, done: Sequence[tuple[StripeTask, bytes]]) -> None:
        jobs: list[Write] = [task[0] for task, _ in done]
        with self._jobs.lock:
            due = [job for job in jobs if job.acknowledged()]
        # Without the lock: a server's threads may start here, or fail to.
        for job in due:
            job.put_first()
        self._jobs.conclude(jobs)
        self._acknowledged.update(jobs)
        self._acknowledged = {job for job in self._acknowledged if job.outcome is None}

    def _failed(
        self, lane: Lane, task: StripeTask, failure: StripeFailure, error: RedisError | None
    ) -> None:
        job: Write = task[0]
        assert error is not None, "a SET has no value"
        if isinstance(error, RedisProtocolError):
            lane.connection.close()
        is_lost = isinstance(error, (RedisTimeout, RedisUnavailable, RedisProtocolError))
        if is_lost and not isinstance(error, RedisClusterDown):
            # Or the server would answer any request so.
            self._lost(lane, task, error)
            return
        if isinstance(error, RedisRedirect) and self._server.redirected(task, error):
            return
        self._jobs.release((job,))
        self._jobs.stop((job,), self._server.refuses_writes(error))

    def _lost(self, lane: Lane, task: StripeTask, error: RedisError) -> None:
        """The connection is unusable, and the others are replaced with it."""
        job: Write = task[0]
        self._jobs.release((job,))
        self._server.judge(error, lane.connection, Operation.STORE)
        if self._loss is None:
            self._loss = stop_for(error)
        self._jobs.stop((job,), stop_for(error))

    @property
    def _may_send(self) -> bool:
        return self._loss is None

    def _begin_next(self) -> list[StripeTask]:
        refusal = self._server.refusal
        while refusal is not None and (tasks := self._queue.take_some(MOST_TASKS)):
            self._jobs.stop([task[0] for task in tasks], refusal)
        return super()._begin_next()

    @property
    def _may_widen(self) -> bool:
        """No chunk is half stored."""
        return not self._busy and all(job.outcome is not None for job in self._acknowledged)

    def _close_all(self) -> None:
        """Also fail chunks that the connections acknowledged in part."""
        super()._close_all()
        acknowledged, loss = self._acknowledged, self._loss
        self._acknowledged, self._loss = set(), None
        self._jobs.stop(acknowledged, loss or CallOutcome.UNAVAILABLE)
