"""A chunk on its way out: which of its stripes were sent, and which are there.

A chunk can be seen once its stripe 0 is there, so that one is sent only after every other
stripe was acknowledged.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lmcache_redis.resp.jobs import Job, JobRegistry
from lmcache_redis.resp.outcomes import ChunkIO, WriteOutcome
from lmcache_redis.resp.queues import TaskQueue
from lmcache_redis.resp.routes import Hop

WriteDone = Callable[[ChunkIO, WriteOutcome], None]
# Called with a finished write's chunk, its outcome and whether remains of it are to be removed.
WriteSettled = Callable[[ChunkIO, WriteOutcome, bool], None]


class WriteJob(Job[WriteOutcome]):
    """One chunk on its way out; a step is a stripe."""

    __slots__ = (
        "_chunk",
        "_done",
        "_first",
        "_outstanding",
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
        self.created_unix_ms = max(0, int(time.time() * 1000))
        self._first: TaskQueue[WriteTask] | None = None
        self._outstanding = 0
        self._remains = False
        super().__init__(self.stripe_count, WriteOutcome.STORED, chunk.deadline, registry)

    @property
    def chunk(self) -> ChunkIO:
        """Only between `begin` and the end of that step, when it cannot have been let go."""
        if self._chunk is None:
            raise RuntimeError("the chunk of a write was given back while a step used it")
        return self._chunk

    def begin_at(self, first: TaskQueue[WriteTask]) -> range:
        """The stripes to be queued now. first: the queue for stripe 0, once its time has come."""
        self._first = first
        return range(1, self.stripe_count) if self.stripe_count > 1 else range(1)

    def sent(self) -> None:
        """A begun stripe was sent, or some of it: its slot is free, it may be in Redis."""
        with self._lock:
            self._in_flight -= 1
            self._outstanding += 1
            self._remains = True
            final = None if self._outcome is None else self._decide(None)
        self._conclude(final)

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
        if left == 1 and self._first is not None:
            self._first.put(((self, 0, None),), urgent=True)
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


# A stripe to set: the job of its chunk, its index, and the redirection it has followed, if any.
WriteTask = tuple[WriteJob, int, Hop | None]
