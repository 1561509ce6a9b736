"""A chunk on its way out: which of its stripes each server has been sent, and has.

A chunk can be seen once its stripe 0 is there, so that one is sent only after every other
stripe was acknowledged.

All stripes of a chunk that go to one server are a part. A server that is restarted loses what it
had acknowledged, and with it all its connections: so a chunk fails with a connection on which
anything of it was acknowledged, and once a connection was lost, what remains of a part goes only
over those that are older than its first stripe. If nothing of a part was acknowledged on any
connection, it is sent again.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence

from lmcache_redis.resp.jobs import Job, JobRegistry
from lmcache_redis.resp.outcomes import ChunkIO, WriteOutcome
from lmcache_redis.resp.queues import TaskQueue
from lmcache_redis.resp.routes import Hop
from lmcache_redis.stripe import STORE_ID_BYTES

WriteDone = Callable[[ChunkIO, WriteOutcome], None]
WriteSettled = Callable[[ChunkIO, WriteOutcome], None]


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
