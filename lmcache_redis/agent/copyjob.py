"""What stores and retrieves have in common: calls to a device, each for several chunks.

Every chunk of a job comes to its end once, and the engine is answered when the last has: after a
bug of ours too, for an answer before that would give blocks back that are still in use.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lmcache_redis import messages as m
from lmcache_redis.agent.copies import CopyOutcome, CopyThreads
from lmcache_redis.agent.registration import Registration
from lmcache_redis.agent.sessions import Session, Sessions
from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.pool import Entry
from lmcache_redis.errors import DeviceError

logger = logging.getLogger(__name__)

Reply = Callable[[m.Answer], None]


@dataclass(frozen=True, slots=True)
class Jobs:
    """What every job uses: the cache, whose owner is the agent's loop; threads; sessions."""

    cache: Cache
    copies: CopyThreads
    sessions: Sessions


class CopyJob(ABC):
    """One store or retrieve of one worker, from the question to the answer."""

    def __init__(
        self,
        jobs: Jobs,
        session: Session,
        registration: Registration,
        hashes: Sequence[bytes],
        question: m.Store | m.Retrieve,
        reply: Reply,
    ) -> None:
        self._cache = jobs.cache
        self._copies = jobs.copies
        self._sessions = jobs.sessions
        self._metrics = jobs.cache.metrics
        self._session = session
        self._registration = registration
        self._form = registration.form
        self._hashes = hashes
        self._question = question
        self._reply = reply
        self._queue = jobs.copies.gather
        self._pending: set[int] = set()  # chunks that have not come to their end

    # What a kind of job does with a chunk. All but `_move` on the loop thread.

    @abstractmethod
    def _take(self, chunk: int) -> Entry | None:
        """The chunk's entry, with a pin that is the call's; None: it cannot be copied."""

    @abstractmethod
    def _move(
        self, chunks: Sequence[int], block_ids: Sequence[int], slots: Sequence[memoryview]
    ) -> bool:
        """Copies the chunks of a call; whether that was in time. Raises ``DeviceError``."""

    @abstractmethod
    def _release(self, chunk: int, entry: Entry, outcome: CopyOutcome | None) -> None:
        """Gives back the call's pin. None: the call was not queued."""

    @abstractmethod
    def _ended(self, chunk: int, outcome: CopyOutcome) -> None:
        """The chunk has come to its end."""

    @abstractmethod
    def _finish(self) -> None:
        """Every chunk has."""

    def _begin(self, chunks: Sequence[int]) -> None:
        """Queues calls for the chunks; the job ends with the last of them."""
        self._session.busy += 1
        if not chunks:
            self._finish()
            return
        self._pending.update(chunks)
        # A device that hangs takes nothing from its queue, and would never give it up.
        self._cache.owner.at(self._question.lease_ns / 1e9, self._copies.drop_late)
        a_call = self._registration.chunks_a_call
        for first in range(0, len(chunks), a_call):
            self._begin_call(chunks[first : first + a_call])

    def _begin_call(self, chunks: Sequence[int]) -> None:
        entries: dict[int, Entry] = {}
        try:
            for chunk in chunks:
                entry = self._take(chunk)
                if entry is not None:
                    entries[chunk] = entry
            if entries:
                self._submit(entries)
        except Exception:
            logger.exception("a call to a device failed")  # our own bug: this call alone
            for chunk, entry in entries.items():
                self._release(chunk, entry, None)
            entries.clear()
        for chunk in chunks:
            if chunk not in entries:
                self._end(chunk, CopyOutcome.FAILED)

    def _submit(self, entries: Mapping[int, Entry]) -> None:
        per_chunk = self._registration.blocks_per_chunk
        block_ids: list[int] = []
        slots: list[memoryview] = []
        for chunk, entry in entries.items():
            block_ids += self._question.block_ids[chunk * per_chunk : (chunk + 1) * per_chunk]
            slots += self._cache.views(self._form, entry)
        self._queue(
            self._registration.place,
            partial(self._copy, tuple(entries), block_ids, slots),
            lambda outcome: self._cache.owner.post(partial(self._copied, entries, outcome)),
            self._question.lease_ns,
        )

    def _copy(
        self, chunks: Sequence[int], block_ids: Sequence[int], slots: Sequence[memoryview]
    ) -> CopyOutcome:
        # On a copy thread. Past the lease the blocks are another request's.
        try:
            in_time = self._move(chunks, block_ids, slots)
        except DeviceError:
            if time.monotonic_ns() <= self._question.lease_ns:
                raise
            in_time = False
        return CopyOutcome.DONE if in_time else CopyOutcome.CANCELLED

    def _copied(self, entries: Mapping[int, Entry], outcome: CopyOutcome) -> None:
        for chunk, entry in entries.items():
            try:
                self._release(chunk, entry, outcome)
            except Exception:
                logger.exception("a chunk was lost")  # our own bug: that chunk alone
            self._end(chunk, outcome)

    def _end(self, chunk: int, outcome: CopyOutcome) -> None:
        self._pending.remove(chunk)
        try:
            self._ended(chunk, outcome)
        finally:
            if not self._pending:
                self._finish()
