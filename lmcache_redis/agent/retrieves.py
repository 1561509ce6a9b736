"""Retrieves: pinned chunks are scattered into an engine's blocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from lmcache_redis import messages as m
from lmcache_redis.agent.copies import CopyOutcome
from lmcache_redis.agent.copyjob import CopyJob
from lmcache_redis.cache.pool import Entry, EntryState

logger = logging.getLogger(__name__)


class RetrieveJob(CopyJob):
    """One retrieve of one worker, from the question to the answer."""

    _skip_blocks = 0
    _started_s = 0.0
    _failed: list[int]

    def start(self, skip_first_n_tokens: int) -> None:
        """Queues the copies; answers when the last has ended."""
        block_tokens = self._registration.device.layout.block_size_tokens
        self._skip_blocks = skip_first_n_tokens // block_tokens
        self._started_s = time.monotonic()
        self._failed = []
        self._queue = self._copies.scatter
        self._begin(range(len(self._hashes)))

    def _take(self, chunk: int) -> Entry | None:
        """With the session's pin, or a new one."""
        chunk_hash, pool = self._hashes[chunk], self._cache.pool
        entry = self._session.take((self._registration.worker_id, chunk_hash))
        if entry is None:
            entry = pool.get(self._form.key(chunk_hash))
            if entry is None or entry.state is not EntryState.READY:
                return None
            pool.pin(entry)
        return entry

    def _move(
        self, chunks: Sequence[int], block_ids: Sequence[int], slots: Sequence[memoryview]
    ) -> bool:
        per_chunk = self._registration.blocks_per_chunk
        skip = sum(min(max(0, self._skip_blocks - c * per_chunk), per_chunk) for c in chunks)
        self._registration.device.scatter(
            block_ids,
            slots,
            self._form.stripe_payload_bytes,
            skip,
            self._question.event,
            self._question.lease_ns,
            len(chunks),
        )
        return True

    def _release(self, chunk: int, entry: Entry, outcome: CopyOutcome | None) -> None:
        self._cache.pool.unpin(entry)

    def _ended(self, chunk: int, outcome: CopyOutcome) -> None:
        if outcome is not CopyOutcome.DONE:
            self._failed.append(chunk)

    def _finish(self) -> None:
        copied = len(self._hashes) - len(self._failed)
        self._metrics.count("retrieves")
        self._metrics.count("retrieves_failed", bool(self._failed))
        self._metrics.count("retrieved_chunks", copied)
        self._metrics.count("retrieved_bytes", copied * self._form.chunk_bytes)
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
            self._sessions.finish(self._session)
