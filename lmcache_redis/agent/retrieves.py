"""Retrieves: pinned chunks are scattered into an engine's blocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial

from lmcache_redis import messages as m
from lmcache_redis.agent.copies import CopyOutcome
from lmcache_redis.agent.core import Core, Reply
from lmcache_redis.agent.registration import Registration
from lmcache_redis.agent.sessions import Session
from lmcache_redis.errors import DeviceError
from lmcache_redis.hostpool import Entry, EntryState

logger = logging.getLogger(__name__)


class RetrieveJob:
    """One retrieve of one worker, from the question to the answer."""

    def __init__(
        self,
        core: Core,
        session: Session,
        registration: Registration,
        hashes: Sequence[bytes],
        question: m.Retrieve,
        reply: Reply,
    ) -> None:
        self._core = core
        self._session = session
        self._registration = registration
        self._hashes = hashes
        self._question = question
        self._reply = reply
        self._started_s = time.monotonic()
        self._pending = set(range(len(hashes)))  # chunks that have not come to their end
        self._failed: list[int] = []

    def start(self) -> None:
        """Queues the copies; answers when the last has ended.

        After a bug of ours too: an answer before that would give blocks back which are written to.
        """
        self._session.busy += 1
        if not self._hashes:
            self._answer()
            return
        # Where a device hangs nobody takes what is queued for it, nor gives it up.
        self._core.timers.at(self._question.lease_ns / 1e9, self._core.copies.drop_late)
        chunks = range(len(self._hashes))
        a_call = self._registration.chunks_a_call
        begun = 0
        try:
            for first in range(0, len(chunks), a_call):
                self._scatter(chunks[first : first + a_call])
                begun = first + a_call
        except Exception:
            logger.exception("a retrieve failed")  # our own bug: that of it which was not begun
            for chunk in chunks[begun:]:
                self._ended(chunk, CopyOutcome.FAILED)

    def _scatter(self, chunks: Sequence[int]) -> None:
        """Queues one call for those of the chunks that are there."""
        entries: dict[int, Entry] = {}
        try:
            for chunk in chunks:
                entry = self._pinned(self._hashes[chunk])
                if entry is None:
                    self._ended(chunk, CopyOutcome.FAILED)
                else:
                    entries[chunk] = entry
            if entries:
                self._queue(entries)
        except BaseException:
            for entry in entries.values():
                self._core.pool.unpin(entry)
            raise

    def _queue(self, entries: Mapping[int, Entry]) -> None:
        form = self._registration.form
        skip = self._question.skip_first_n_tokens // form.block_size_tokens
        per_chunk = form.blocks_per_chunk
        block_ids: list[int] = []
        slots: list[memoryview] = []
        skip_blocks = 0
        for chunk, entry in entries.items():
            first = chunk * per_chunk
            block_ids += self._question.block_ids[first : first + per_chunk]
            slots += self._core.slots_of(form, entry)
            skip_blocks += min(max(0, skip - first), per_chunk)
        self._core.copies.scatter(
            self._registration.place,
            partial(self._copy, len(entries), block_ids, slots, skip_blocks),
            lambda outcome: self._core.post(partial(self._copied, entries, outcome)),
            self._question.lease_ns,
        )

    def _pinned(self, chunk_hash: bytes) -> Entry | None:
        """The chunk's entry with a pin that is ours: the session's, or a new one."""
        entry = self._session.take((self._registration.worker_id, chunk_hash))
        if entry is not None:
            return entry
        entry = self._core.pool.get(self._registration.form.key(chunk_hash))
        if entry is None or entry.state is not EntryState.READY:
            return None
        self._core.pool.pin(entry)
        return entry

    def _copy(
        self, chunks: int, block_ids: Sequence[int], slots: list[memoryview], skip_blocks: int
    ) -> CopyOutcome:
        # On a copy thread. Past the lease the blocks are somebody else's.
        lease_ns = self._question.lease_ns
        try:
            self._registration.device.scatter(
                block_ids,
                slots,
                self._registration.form.stripe_payload_bytes,
                skip_blocks,
                self._question.event,
                lease_ns,
                chunks,
            )
        except DeviceError:
            if time.monotonic_ns() <= lease_ns:
                raise
            return CopyOutcome.CANCELLED
        return CopyOutcome.DONE

    def _copied(self, entries: Mapping[int, Entry], outcome: CopyOutcome) -> None:
        for chunk, entry in entries.items():
            self._core.pool.unpin(entry)
            self._ended(chunk, outcome)

    def _ended(self, chunk: int, outcome: CopyOutcome) -> None:
        """The chunk has come to its end; said twice it counts once."""
        if chunk not in self._pending:
            return
        self._pending.remove(chunk)
        if outcome is not CopyOutcome.DONE:
            self._failed.append(chunk)
        if not self._pending:
            self._answer()

    def _answer(self) -> None:
        metrics = self._core.metrics
        copied = len(self._hashes) - len(self._failed)
        metrics.count("retrieves")
        metrics.count("retrieves_failed", bool(self._failed))
        metrics.count("retrieved_chunks", copied)
        metrics.count("retrieved_bytes", copied * self._registration.form.chunk_bytes)
        logger.debug(
            "request %s: %d of %d chunks copied into blocks in %.1f ms",
            self._question.request_id,
            copied,
            len(self._hashes),
            (time.monotonic() - self._started_s) * 1e3,
        )
        if self._failed:
            self._session.tally.reasons.add(f"{len(self._failed)} chunks could not be copied")
        try:
            self._reply(m.RetrieveResult(0, tuple(sorted(self._failed))))
        finally:
            self._core.finish_part(self._session)
