"""Chunks of one stripe each, on their way together: one job as long as all goes well.

Small chunks come by the hundred, and a job for each would take as long as a third of its bytes'
way. A bundle has one deadline, one lock and one place in the registry; each chunk is a step, and
is answered when that has ended. It is for the compiled part (`batches`): where that does not go on,
a thread takes the chunk out (`single`) and goes on with a job of its own, as if it had been one
from the start. So here is only what goes well, and `stop`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from lmcache_redis.resp.jobs import Job, JobRegistry, OutcomeT, Stop
from lmcache_redis.resp.outcomes import ChunkIO

# Chunks whose deadlines are no further apart share the first of these.
TOGETHER_S = 0.01


class Single(Job[OutcomeT], ABC):
    """The job of one chunk."""

    __slots__ = ()

    @abstractmethod
    def has(self, chunk: ChunkIO) -> bool:
        """Whether this is its chunk, and not answered."""


SingleT = TypeVar("SingleT", bound=Single[Any])


def can_be_bundled(chunks: Sequence[ChunkIO]) -> bool:
    """Whether these are several, of one stripe each, and due at one time."""
    if len(chunks) < 2:
        return False
    first = chunks[0].deadline
    return all(
        chunk.frame.stripe_count == 1 and abs(chunk.deadline - first) <= TOGETHER_S
        for chunk in chunks
    )


class Bundle(Job[OutcomeT], ABC, Generic[OutcomeT, SingleT]):
    """See the module. The steps are numbered as the chunks are.

    Subclasses say how to `_settle` a chunk, and how to make a job for one alone.
    """

    __slots__ = ("_all", "_chunks", "_doomed", "_singles")

    def __init__(self, chunks: Sequence[ChunkIO], good: OutcomeT, registry: JobRegistry) -> None:
        deadline = min(chunk.deadline for chunk in chunks)
        super().__init__(len(chunks), good, deadline, registry)
        # What each is, for as long as replies may come; and those that wait for an answer.
        self._all = [(chunk.key, chunk.frame) for chunk in chunks]
        self._chunks: list[ChunkIO | None] = list(chunks)
        self._singles: list[SingleT] = []
        self._doomed: list[int] = []

    @property
    def key(self) -> bytes:
        """The first of the chunk keys."""
        return self._all[0][0]

    # -------------------------------------------------- what subclasses say

    @abstractmethod
    def _make_single(self, chunk: ChunkIO, step: int) -> SingleT:
        """A job for this chunk alone; nobody knows it yet."""

    @abstractmethod
    def _make_ended(self, step: int) -> SingleT:
        """A job for a chunk that was answered, for a reply that nobody waits for."""

    @abstractmethod
    def _settle(self, chunks: Sequence[ChunkIO], outcome: OutcomeT) -> None:
        """Tell whoever waits for the chunks."""

    # ------------------------------------------------------------ the steps

    def chunk(self, step: int) -> ChunkIO:
        """Only while the step has begun, when it cannot have been let go."""
        chunk = self._chunks[step]
        if chunk is None:
            raise RuntimeError("a chunk was given back while a step used it")
        return chunk

    def answered(self, step: int) -> ChunkIO:
        """A chunk that was answered, without its slots."""
        key, frame = self._all[step]
        return ChunkIO(key, frame, (), self.deadline)

    def begin(self, step: int = 0) -> bool:
        """See `Job.begin`. Also False where this chunk was answered."""
        if self.deadline <= time.monotonic():
            self.stop(Stop.TIMED_OUT)
            return False
        with self._lock:
            if self._outcome is not None or self._chunks[step] is None:
                return False
            self._in_flight += 1
            return True

    def release(self, steps: int = 1) -> None:
        """See `Job.release`."""
        super().release(steps)
        if self._doomed:
            self._cancel_doomed()

    def end_well(self, steps: Sequence[int], begun: bool) -> None:
        """Steps are over: answer those of their chunks that were not. begun: they still are."""
        chunks: list[ChunkIO] = []
        with self._lock:
            if begun:
                self._in_flight -= len(steps)
            for step in steps:
                chunk = self._chunks[step]
                if chunk is not None:
                    self._chunks[step] = None
                    chunks.append(chunk)
            self._steps_left -= len(chunks)
            over = self._outcome is not None or not self._steps_left
            final = self._decide(self._good) if over else None
        self._settle(chunks, self._good)
        if final is not None:
            self._conclude(final)
        if self._doomed:
            self._cancel_doomed()

    def single(self, step: int, begun: bool) -> SingleT:
        """The chunk in a job of its own, ended if it was answered. begun: the step is."""
        chunk = self._chunks[step]
        if chunk is None:
            return self._make_ended(step)
        job = self._make_single(chunk, step)
        job.created_at, job.nodes = self.created_at, self.nodes
        # Known before this one lets go of the chunk: at any moment there is one to be stopped. It
        # answers nobody as long as a step of it seems to be under way.
        job._in_flight = 1
        self._registry.add((job,))
        with self._lock:
            self._in_flight -= begun
            taken = self._take(step) is not None
            if taken:
                self._singles.append(job)
            stopped = self._outcome
            final = self._decide(None if self._steps_left else self._good)
        self._conclude(final)
        if not taken:
            self._registry.discard(job)
            return self._make_ended(step)
        if stopped is not None:
            job.stop(Stop[stopped.name])
        elif step in self._doomed:
            job.stop(Stop.CANCELLED)
        if not begun:
            job.release()
        return job

    # --------------------------------------------------------------- its end

    def stop(self, reason: Stop) -> None:
        """See `Job.stop`. Those that were taken out as well: whoever stops may know only this."""
        super().stop(reason)
        for job in tuple(self._singles):
            job.stop(reason)

    def cancel(self, chunk: ChunkIO) -> None:
        """End one chunk early, once no step is under way."""
        with self._lock:
            step = next((n for n, each in enumerate(self._chunks) if each is chunk), None)
            singles = [job for job in self._singles if job.has(chunk)]
            if step is not None:
                self._doomed.append(step)
        self._cancel_doomed()
        for job in singles:
            job.stop(Stop.CANCELLED)

    def _cancel_doomed(self) -> None:
        with self._lock:
            if self._in_flight or self._outcome is not None:
                return
            chunks = [chunk for step in self._doomed if (chunk := self._take(step)) is not None]
            self._doomed.clear()
            final = self._decide(None if self._steps_left else self._good)
        self._settle(chunks, type(self._good)[Stop.CANCELLED.name])
        self._conclude(final)

    def _take(self, step: int) -> ChunkIO | None:
        """Under the lock: the chunk, for somebody else to answer; None if it is not here."""
        chunk, self._chunks[step] = self._chunks[step], None
        if chunk is not None:
            self._steps_left -= 1
        return chunk

    def _answer(self, outcome: OutcomeT) -> None:
        with self._lock:
            chunks = [chunk for chunk in self._chunks if chunk is not None]
            self._chunks = [None] * len(self._chunks)
        self._settle(chunks, outcome)
