"""A chunk on its way out, and small ones together: which stripes were sent, and which are there.

A chunk can be seen once its stripe 0 is there, so that one is sent only after every other
stripe was acknowledged. A stripe is queued when its slot is filled: of a chunk that is still on its
way to the host the first are sent while the last are being copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lmcache_redis.keys import stripe_key
from lmcache_redis.resp.bundles import Bundle, Single
from lmcache_redis.resp.jobs import JobRegistry, Stop
from lmcache_redis.resp.moving import LEAST_PAYLOAD_BYTES, Packed
from lmcache_redis.resp.outcomes import ChunkIO, WriteOutcome
from lmcache_redis.resp.queues import TaskQueue
from lmcache_redis.resp.routes import Hop
from lmcache_redis.resp.wire import end_of_command, set_prefix
from lmcache_redis.stripe import HEADER_BYTES

WriteDone = Callable[[ChunkIO, WriteOutcome], None]
# Called with a finished write's chunk, its outcome and whether remains of it are to be removed.
WriteSettled = Callable[[ChunkIO, WriteOutcome, bool], None]
# Called with chunks of a bundle: nothing of them is to be removed now.
WritesSettled = Callable[[Sequence[ChunkIO], WriteOutcome], None]


class WriteJob(Single[WriteOutcome]):
    """One chunk on its way out; a step is a stripe."""

    __slots__ = (
        "_chunk",
        "_done",
        "_filled",
        "_outstanding",
        "_queues",
        "_remains",
        "_settled",
        "created_unix_ms",
        "key",
        "store_id",
        "stripe_count",
    )

    def __init__(
        self,
        chunk: ChunkIO,
        done: WriteDone,
        settled: WriteSettled,
        registry: JobRegistry,
        store_id: bytes,
    ) -> None:
        self._chunk: ChunkIO | None = chunk
        self._done: WriteDone | None = done
        self._settled: WriteSettled | None = settled
        self.key = chunk.key
        self.stripe_count = chunk.frame.stripe_count
        self.store_id = store_id
        self.created_unix_ms = _unix_ms()
        self._queues: Sequence[TaskQueue[AnyWrite]] = ()
        self._filled = 0
        self._outstanding = 0
        self._remains = False
        super().__init__(self.stripe_count, WriteOutcome.STORED, chunk.deadline, registry)

    @property
    def chunk(self) -> ChunkIO:
        """Only between `begin` and the end of that step, when it cannot have been let go."""
        if self._chunk is None:
            raise RuntimeError("the chunk of a write was given back while a step used it")
        return self._chunk

    def has(self, chunk: ChunkIO) -> bool:
        """See `Single.has`."""
        return self._chunk is chunk

    def begin_at(self, queues: Sequence[TaskQueue[AnyWrite]]) -> None:
        """Where each stripe is to be queued, before any is (`fill`)."""
        self._queues = queues

    def fill(self, filled: int) -> dict[TaskQueue[AnyWrite], list[AnyWrite]]:
        """The first ``filled`` slots have their bytes: what may be queued now, and where."""
        if not self._queues:
            return {}  # it was not admitted, and is being answered
        with self._lock:
            before, self._filled = self._filled, max(self._filled, filled)
        # Stripe 0 goes when all others are there, for which they had to be filled: `acknowledge`.
        first = 0 if self.stripe_count == 1 else 1
        tasks: dict[TaskQueue[AnyWrite], list[AnyWrite]] = {}
        for index in range(max(first, before), self._filled):
            tasks.setdefault(self._queues[index], []).append((self, index, None))
        return tasks

    def pack(self, index: int, ttl_s: int) -> Packed | None:
        """A stripe for the compiled part, if it is for that; where `chunk` may be asked for."""
        return _packed(self.chunk, index, self.store_id, self.created_unix_ms, ttl_s)

    def sent(self) -> None:
        """A begun stripe was sent, or some of it: its slot is free, it may be in Redis."""
        with self._lock:
            self._in_flight -= 1
            self._outstanding += 1
            self._remains = True
            final = None if self._outcome is None else self._decide(None)
        self._conclude(final)

    def goes_on(self) -> None:
        """A stripe had been sent before this job was: it is to be answered."""
        self._outstanding += 1
        self._remains = True

    def withdraw(self) -> None:
        """A stripe that counted as sent was not, was refused, or will not be answered."""
        with self._lock:
            self._outstanding -= 1

    def acknowledge(self) -> None:
        """A stripe is stored: `advance`. The last but stripe 0 brings that on its way."""
        with self._lock:
            self._outstanding -= 1
            self._steps_left -= 1
            left = self._steps_left
            if left == 0:
                self._remains = False
                final = self._decide(self._good)
            else:
                final = None if self._outcome is None else self._decide(None)
        if left == 1:
            self._queues[0].put(((self, 0, None),), urgent=True)
        self._conclude(final)

    def take_remains(self) -> bool:
        """True once: the job failed, something of it may be in Redis, and no more will come."""
        with self._lock:
            if self._outcome is None or not self._remains or self._outstanding:
                return False
            self._remains = False
            return True

    def _answer(self, outcome: WriteOutcome) -> None:
        chunk, done, settled = self._chunk, self._done, self._settled
        self._chunk = self._done = self._settled = None
        if chunk is None or done is None or settled is None:
            raise RuntimeError("a write is answered twice")
        settled(chunk, outcome, self.take_remains())
        done(chunk, outcome)


class WriteBundle(Bundle[WriteOutcome, WriteJob]):
    """Chunks of one stripe each on their way out, of one store id: they are different chunks."""

    __slots__ = (
        "_created_unix_ms",
        "_done",
        "_outstanding",
        "_settled",
        "_settled_all",
        "_store_id",
    )

    def __init__(
        self,
        chunks: Sequence[ChunkIO],
        done: WriteDone,
        settled: WriteSettled,
        settled_all: WritesSettled,
        registry: JobRegistry,
        store_id: bytes,
    ) -> None:
        super().__init__(chunks, WriteOutcome.STORED, registry)
        self._done = done
        self._settled = settled
        self._settled_all = settled_all
        self._store_id = store_id
        self._created_unix_ms = _unix_ms()
        # Steps that were sent and not answered.
        self._outstanding: set[int] = set()

    def tasks(self) -> list[AnyWrite]:
        """The chunks in order."""
        return [(self, step, None) for step in range(len(self._all))]

    def pack(self, step: int, ttl_s: int) -> Packed | None:
        """A chunk for the compiled part, if it is for that; its step has begun."""
        return _packed(self.chunk(step), 0, self._store_id, self._created_unix_ms, ttl_s)

    def sent_all(self, steps: Sequence[int]) -> None:
        """Begun steps were sent: their slots are free, they may be in Redis."""
        self._outstanding.update(steps)
        self.release(len(steps))

    def acknowledge_all(self, steps: Sequence[int]) -> None:
        """Chunks are stored, whole: also where nobody waits for one any more it may stay."""
        self._outstanding.difference_update(steps)
        self.end_well(steps, begun=False)

    def single(self, step: int, begun: bool) -> WriteJob:
        """See `Bundle.single`. What was sent is not under way, as far as its slot goes."""
        return super().single(step, begun and step not in self._outstanding)

    def _make_single(self, chunk: ChunkIO, step: int) -> WriteJob:
        job = WriteJob(chunk, self._done, self._settled, self._registry, self._store_id)
        job.created_unix_ms = self._created_unix_ms
        return self._as_sent(job, step)

    def _make_ended(self, step: int) -> WriteJob:
        job = WriteJob(self.answered(step), _nobody, _nobody, self._registry, self._store_id)
        job = self._as_sent(job, step)
        job.stop(Stop.CANCELLED)
        return job

    def _as_sent(self, job: WriteJob, step: int) -> WriteJob:
        if step in self._outstanding:
            job.goes_on()
        return job

    def _settle(self, chunks: Sequence[ChunkIO], outcome: WriteOutcome) -> None:
        self._settled_all(chunks, outcome)
        for chunk in chunks:
            self._tell(self._done, chunk, outcome)


def _packed(
    chunk: ChunkIO, index: int, store_id: bytes, created_unix_ms: int, ttl_s: int
) -> Packed | None:
    payload = chunk.slots[index]
    if payload.nbytes < LEAST_PAYLOAD_BYTES:
        return None
    prefix = set_prefix(stripe_key(chunk.key, index), HEADER_BYTES + payload.nbytes, ttl_s)
    header = chunk.frame.unsealed_header(index, store_id, created_unix_ms)
    return prefix, bytearray(header), payload, end_of_command(ttl_s)


def _unix_ms() -> int:
    unix_ms = max(0, int(time.time() * 1000))
    return unix_ms


def _nobody(*_: object) -> None:
    """Told what nobody waits for."""


# A stripe to set: the job of its chunk, its index, and the redirection it has followed, if any.
WriteTask = tuple[WriteJob, int, Hop | None]
# Or a chunk of a bundle, and its step.
AnyWrite = WriteTask | tuple[WriteBundle, int, None]
