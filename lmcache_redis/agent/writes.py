"""Writing behind: chunks of the host pool go to Redis when the engine has long gone on.

Where the engine computes on the agent's cores, a chunk waits a moment in the queue first: the
engine step that follows a prefill gives the request its first token, and should not share its
cores with the way to Redis. Where a GPU computes, it goes at once, and a large one stripe by
stripe, while the GPU still copies the others to the host. The queue is bounded in bytes. What
does not fit, or what Redis does not take, stays in the host pool unpersisted and is counted; the
next store of the chunk offers it again.

    waiting   until its time has come; then Redis is asked, at once about all whose time it is,
              which of them it has: those are not sent again
    writing   whole, or as far as it is filled. Where Redis did not answer, the write finds out why
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
from lmcache_redis.keys import stripe_key
from lmcache_redis.resp.outcomes import CallOutcome, ChunkIO, ExistsResult, WriteOutcome

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
        # Of those, the ones that Redis was not asked about yet, and when it may be.
        self._waiting: dict[Entry, tuple[ChunkIO, float]] = {}
        # Slots that may be sent, of those taken before their chunk was complete and as long as it
        # is not. None: nothing more is sent before.
        self._filling: dict[Entry, int | None] = {}
        self._complained_of: WriteOutcome | None = None
        self.queued_bytes = 0

    def __len__(self) -> int:
        return len(self._writing)

    def offer(self, registration: Registration, chunk_hash: bytes, entry: Entry) -> None:
        """Queues a READY entry, unless it is queued, the queue is full or Redis is down."""
        begun_early = self._filling.pop(entry, None) is not None
        if entry in self._writing:
            if begun_early:
                self._core.plane.filled(self._writing[entry], len(entry.slots))
            return
        if entry.persisted:
            return
        counter = self._reason_against(registration)
        if counter is not None:
            self._core.metrics.count(counter)
            return
        wait_s = _FIRST_TOKEN_FIRST_S if registration.device.on_host_cores else 0.0
        self._take(registration, chunk_hash, entry, wait_s)

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
            self._take(registration, chunk_hash, entry, 0.0)
        elif self._filling[entry] is None:
            return
        else:
            self._core.plane.filled(self._writing[entry], slots)
        self._filling[entry] = slots

    def abandon(self, entry: Entry) -> None:
        """The entry will not be READY: what was sent of it is removed."""
        if self._filling.pop(entry, None) is not None:
            self._core.plane.cancel(self._writing[entry])

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

    def _take(
        self, registration: Registration, chunk_hash: bytes, entry: Entry, wait_s: float
    ) -> None:
        """Pins the entry and makes room in the queue, until `_release`."""
        form, now_s = registration.form, time.monotonic()
        io = self._core.chunk_io(form, chunk_hash, entry, now_s + _WRITE_DEADLINE_S)
        self._core.pool.pin(entry)
        self._writing[entry] = io
        self.queued_bytes += form.chunk_bytes
        self._waiting[entry] = (io, now_s + wait_s)
        self._core.timers.after(wait_s, self._begin_due)

    def begin_all(self) -> None:
        """Lets nothing wait any longer: the agent stops."""
        self._begin(list(self._waiting))

    def _begin_due(self) -> None:
        by_s = time.monotonic() + _TOGETHER_S
        self._begin([entry for entry, (_, due_s) in self._waiting.items() if due_s <= by_s])

    def _begin(self, entries: list[Entry]) -> None:
        """Asks Redis which of them it has."""
        if not entries:
            return
        ios = [self._waiting.pop(entry)[0] for entry in entries]
        with self._given_back_after_a_bug(ios):
            self._core.plane.exists(
                [stripe_key(io.key, 0) for io in ios],
                time.monotonic() + self._core.config.op_timeout_s,
                lambda result: self._core.post(partial(self._asked, ios, result)),
            )

    def _asked(self, ios: Sequence[ChunkIO], result: ExistsResult) -> None:
        whole: list[ChunkIO] = []
        early: list[ChunkIO] = []
        in_redis = result.present or [False] * len(ios)
        for io, present in zip(ios, in_redis, strict=True):
            entry = _entry_of(io)
            if present:
                self._skip(io)
            elif result.outcome is CallOutcome.CANCELLED or entry.state is EntryState.DISCARDED:
                self._written(io, WriteOutcome.CANCELLED)
            else:
                (early if entry in self._filling else whole).append(io)
        with self._given_back_after_a_bug(early), self._given_back_after_a_bug(whole):
            while early:
                self._core.plane.write_filling(early[0], self._done)
                io = early.pop(0)
                self._core.plane.filled(io, self._filling[_entry_of(io)] or 0)
            self._core.plane.write_all(whole, self._done)

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

    def _skip(self, io: ChunkIO) -> None:
        """Redis has the chunk."""
        entry = self._release(io)
        entry.persisted = True
        self._core.metrics.count("skipped_chunks")
        if entry in self._filling:
            self._filling[entry] = None

    def _written(self, io: ChunkIO, outcome: WriteOutcome) -> None:
        entry = self._release(io)
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

    def _release(self, io: ChunkIO) -> Entry:
        """The plane has done with the entry: gives back what `_take` took."""
        entry = _entry_of(io)
        del self._writing[entry]
        self.queued_bytes -= io.frame.chunk_bytes
        self._core.pool.unpin(entry)
        return entry


def _entry_of(io: ChunkIO) -> Entry:
    assert isinstance(io.tag, Entry)
    return io.tag
