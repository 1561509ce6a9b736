"""Retrieves: pinned chunks are scattered into an engine's blocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
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
        self._left = 0
        self._failed: list[int] = []

    def start(self) -> None:
        """Queues one copy a chunk; answers when the last has ended."""
        form = self._registration.form
        skip = self._question.skip_first_n_tokens // form.block_size_tokens
        per_chunk = form.blocks_per_chunk
        self._session.busy += 1
        self._left = len(self._hashes)
        for chunk, chunk_hash in enumerate(self._hashes):
            entry = self._pinned(chunk_hash)
            if entry is None:
                self._copied(chunk, None, CopyOutcome.FAILED)
                continue
            first = chunk * per_chunk
            copy = partial(
                self._copy,
                self._question.block_ids[first : first + per_chunk],
                self._core.slots_of(form, entry),
                min(max(0, skip - first), per_chunk),
            )
            report = partial(self._report, chunk, entry)
            self._core.copies.scatter(self._registration.place, copy, report)
        if not self._hashes:
            self._answer()

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
        self, block_ids: Sequence[int], slots: list[memoryview], skip_blocks: int
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
            )
        except DeviceError:
            if time.monotonic_ns() <= lease_ns:
                raise
            return CopyOutcome.CANCELLED
        return CopyOutcome.DONE

    def _report(self, chunk: int, entry: Entry, outcome: CopyOutcome) -> None:
        self._core.post(partial(self._copied, chunk, entry, outcome))

    def _copied(self, chunk: int, entry: Entry | None, outcome: CopyOutcome) -> None:
        if entry is not None:
            self._core.pool.unpin(entry)
        if outcome is not CopyOutcome.DONE:
            self._failed.append(chunk)
        self._left -= 1
        if self._left == 0:
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
