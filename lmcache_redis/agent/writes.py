"""Writing behind: chunks of the host pool go to Redis when the engine has long gone on.

Where the engine computes on the agent's cores, a chunk waits a moment in the queue first: the
engine step that follows a prefill gives the request its first token, and should not share its
cores with the way to Redis. Where a GPU computes, it goes at once, and a large one stripe by
stripe, while the GPU still copies the others to the host. The queue is bounded in bytes. What
does not fit, or what Redis does not take, stays in the host pool unpersisted and is counted; the
next store of the chunk offers it again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from lmcache_redis.agent.core import Core
from lmcache_redis.agent.registration import Registration
from lmcache_redis.hostpool import Entry, EntryState
from lmcache_redis.resp.outcomes import ChunkIO, WriteOutcome

logger = logging.getLogger(__name__)

# How long a chunk may wait in the queue and be written, in total.
_WRITE_DEADLINE_S = 30.0
_FIRST_TOKEN_FIRST_S = 0.1  # on the cores of an engine
# What a prefill stored within this time goes to Redis together.
_TOGETHER_S = 0.005

_DROPS = {
    WriteOutcome.FULL: "drop_redis_full",
    WriteOutcome.TIMED_OUT: "drop_redis_error",
    WriteOutcome.UNAVAILABLE: "drop_redis_error",
    WriteOutcome.REJECTED: "drop_redis_error",
    WriteOutcome.CANCELLED: "drop_shutdown",
}


class Writes:
    """The queue between the host pool and Redis."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._writing: dict[Entry, ChunkIO] = {}
        # Of those, the ones not given to Redis yet, and when they may be.
        self._waiting: dict[Entry, tuple[ChunkIO, float]] = {}
        # And those begun before their chunk was complete, as long as it is not. None: it failed.
        self._filling: dict[Entry, ChunkIO | None] = {}
        self._complained_of: WriteOutcome | None = None
        self.queued_bytes = 0

    def __len__(self) -> int:
        return len(self._writing)

    def offer(self, registration: Registration, chunk_hash: bytes, entry: Entry) -> None:
        """Queues a READY entry, unless it is queued, the queue is full or Redis is down."""
        begun = self._filling.pop(entry, None)
        if begun is not None:
            self._core.plane.filled(begun, len(begun.slots))
        if entry in self._writing:
            return
        counter = self._reason_against(registration)
        if counter is not None:
            self._core.metrics.count(counter)
            return
        io = self._take(registration, chunk_hash, entry)
        wait_s = _FIRST_TOKEN_FIRST_S if registration.device.on_host_cores else 0.0
        self._waiting[entry] = (io, time.monotonic() + wait_s)
        self._core.timers.after(wait_s, self._begin_due)

    def filled(
        self, registration: Registration, chunk_hash: bytes, entry: Entry, slots: int
    ) -> None:
        """The first ``slots`` slots of a FILLING entry, not all, may be sent.

        Nobody sees the chunk in Redis before it is READY and offered; where that will not be, it
        is to be abandoned. What cannot be sent now, or fails, is decided and counted then.
        """
        if entry not in self._filling:
            if self._reason_against(registration) is not None:
                return
            io = self._take(registration, chunk_hash, entry)
            self._filling[entry] = io
            with self._given_back_after_a_bug([io]):
                self._core.plane.write_filling(io, self._done)
        begun = self._filling[entry]
        if begun is not None:
            self._core.plane.filled(begun, slots)

    def abandon(self, entry: Entry) -> None:
        """The entry will not be READY: what was sent of it is removed."""
        begun = self._filling.pop(entry, None)
        if begun is not None:
            self._core.plane.cancel(begun)

    def cancel(self, entry: Entry) -> None:
        """A discarded entry need not be written any more."""
        io = self._writing.get(entry)
        if io is None:
            return
        if self._waiting.pop(entry, None) is not None:
            self._written(io, WriteOutcome.CANCELLED)
        else:
            self._core.plane.cancel(io)

    def _reason_against(self, registration: Registration) -> str | None:
        """The counter of why no chunk can be written now; None: it can."""
        if not self._core.plane.state.up:
            return "drop_redis_error"
        queued_bytes = self.queued_bytes + registration.form.chunk_bytes
        if queued_bytes > self._core.config.write_queue_limit_bytes:
            return "drop_queue_full"
        return None

    def _take(self, registration: Registration, chunk_hash: bytes, entry: Entry) -> ChunkIO:
        """Pins the entry and makes room in the queue, until `_written`."""
        form = registration.form
        io = self._core.chunk_io(form, chunk_hash, entry, time.monotonic() + _WRITE_DEADLINE_S)
        self._core.pool.pin(entry)
        self._writing[entry] = io
        self.queued_bytes += form.chunk_bytes
        return io

    def begin_all(self) -> None:
        """Lets nothing wait any longer: the agent stops."""
        self._begin(list(self._waiting))

    def _begin_due(self) -> None:
        by_s = time.monotonic() + _TOGETHER_S
        self._begin([entry for entry, (_, due_s) in self._waiting.items() if due_s <= by_s])

    def _begin(self, entries: list[Entry]) -> None:
        ios = [self._waiting.pop(entry)[0] for entry in entries]
        with self._given_back_after_a_bug(ios):
            self._core.plane.write_all(ios, self._done)

    @contextmanager
    def _given_back_after_a_bug(self, ios: Sequence[ChunkIO]) -> Iterator[None]:
        """Our own bug, which the loop logs: pins and room in the queue come back all the same."""
        try:
            yield
        except Exception:
            for io in ios:
                self._written(io, WriteOutcome.UNAVAILABLE)
            raise

    def _done(self, io: ChunkIO, outcome: WriteOutcome) -> None:
        # On a thread of the plane.
        self._core.post(partial(self._written, io, outcome))

    def _written(self, io: ChunkIO, outcome: WriteOutcome) -> None:
        entry = io.tag
        assert isinstance(entry, Entry)
        del self._writing[entry]
        self.queued_bytes -= io.frame.chunk_bytes
        if outcome is WriteOutcome.STORED:
            entry.persisted = True
            self._core.metrics.count("stored_chunks")
            self._core.metrics.count("stored_bytes", io.frame.chunk_bytes)
            self._complained_of = None
        elif entry in self._filling:
            self._filling[entry] = None
        elif entry.state is not EntryState.DISCARDED:
            self._core.metrics.count(_DROPS[outcome])
            if self._complained_of is not outcome:
                self._complained_of = outcome
                logger.warning(
                    "chunks are not written to Redis: %s (they are counted; this is said once)",
                    outcome.value,
                )
        self._core.pool.unpin(entry)
