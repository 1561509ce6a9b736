"""Stores: blocks of an engine are copied into the host pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

from lmcache_redis import messages as m
from lmcache_redis.agent.agent import Agent
from lmcache_redis.agent.copies import CopyOutcome
from lmcache_redis.agent.jobs import CopyJob, CopyRequest, because
from lmcache_redis.agent.sessions import MAX_CHUNKS
from lmcache_redis.cache.pool import Entry, EntryState
from lmcache_redis.device.calls import CopyCall

logger = logging.getLogger(__name__)

# The step after a store produces the request's first token. If the engine computes on the agent's
# cores, writes to the tiers start after that step.
_FIRST_TOKEN_FIRST_S = 0.1

_DROPS = {
    CopyOutcome.FAILED: ("drop_device_error", "blocks could not be read"),
    CopyOutcome.LOST: ("drop_device_error", "the GPU is lost"),
    CopyOutcome.CANCELLED: ("drop_lease", "the agent was too slow to read the blocks"),
}


class StoreJob(CopyJob):
    """Gathers blocks into slots, which the cache writes to its tiers later.

    1. Chunks in the host pool are skipped. Redis is not asked, because the engine's blocks would
       stay in use until it answers.
    2. The others are copied into slots. Bytes read after the lease expired are discarded.
    3. The answer frees the engine's blocks once all have been read. On a GPU this is before the
       bytes are in the slots.
    4. A chunk becomes READY when its bytes are in its slots, and is enqueued for the tiers.
    """

    def __init__(self, agent: Agent, request: CopyRequest) -> None:
        super().__init__(agent, request)
        self._stored = self._already = 0
        self._unread: set[int] = set()  # chunks whose blocks are still needed

    def start(self) -> None:
        """Skips the chunks that the host pool has and queues the others."""
        wanted: list[int] = []
        for chunk, chunk_hash in enumerate(self._hashes):
            entry = self._cache.pool.get(self._form.key(chunk_hash))
            if entry is None:
                wanted.append(chunk)
                continue
            self._already += 1
            if entry.state is EntryState.READY:
                self._write_behind(chunk, entry)
                self._cache.pool.report_again(entry)
        self._unread = set(wanted)
        if not wanted:
            self._answer()
        self._begin(wanted)

    def _take(self, chunk: int) -> Entry | None:
        """Slots for the chunk; None if there is no room or the chunk is already in the pool."""
        chunk_hash = self._hashes[chunk]
        if self._form.key(chunk_hash) in self._cache.pool:
            self._already += 1
            return None
        entry = self._cache.reserve(self._form, chunk_hash)
        if entry is None:
            self._dropped("drop_pool_full", "the host pool was full")
        else:
            # What no lookup has named was generated after its prompt.
            entry.position = self._session.positions.get(chunk_hash, MAX_CHUNKS)
        return entry

    def _move(self, chunks: Sequence[int], call: CopyCall) -> bool:
        lease_ns = self._question.lease_ns
        read_in_time = False

        def on_blocks_read() -> None:
            nonlocal read_in_time
            read_in_time = time.monotonic_ns() <= lease_ns
            if read_in_time:
                self._cache.owner.post(partial(self._blocks_read, chunks))

        self._registration.device.gather(call, on_blocks_read)
        return read_in_time or time.monotonic_ns() <= lease_ns

    def _release(self, chunk: int, entry: Entry, outcome: CopyOutcome) -> None:
        try:
            if outcome is not CopyOutcome.DONE:
                self._dropped(*_DROPS[outcome])
                return
            self._cache.metrics.count("gathered_chunks")
            self._cache.metrics.count("gathered_bytes", self._form.chunk_bytes)
            self._use.gathered_bytes += self._form.chunk_bytes
            if self._cache.publish(entry):
                self._stored += 1
                self._write_behind(chunk, entry)
        finally:
            # Even after a bug of ours above: lookups may be waiting for this entry.
            self._cache.abandon(entry)

    def _write_behind(self, chunk: int, entry: Entry) -> None:
        delay_s = _FIRST_TOKEN_FIRST_S if self._registration.device.on_host_cores else 0.0
        self._cache.write_behind(self._form, self._hashes[chunk], entry, delay_s)

    def _dropped(self, counter: str, reason: str) -> None:
        self._cache.metrics.count(counter)
        self._reasons.add(reason)

    def _ended(self, chunk: int, outcome: CopyOutcome) -> None:
        self._blocks_read((chunk,))

    def _blocks_read(self, chunks: Sequence[int]) -> None:
        """The blocks of these chunks are no longer needed. Answers when no more are."""
        if not self._unread.isdisjoint(chunks):
            self._unread.difference_update(chunks)
            if not self._unread:
                self._answer()

    def _answer(self) -> None:
        # Pending chunks were read in time and are being copied to their slots: they count.
        stored = self._stored + len(self._pending)
        dropped = len(self._hashes) - stored - self._already
        self._reply(m.StoreResult(0, stored, self._already, dropped))
        self._cache.metrics.observe("store_seconds", time.monotonic() - self._started_s)

    def _finish(self) -> None:
        self._cache.metrics.count("stores")
        self._cache.metrics.count("skipped_chunks", self._already)
        past = self._past
        past.stored += self._stored
        past.present += self._already
        past.dropped += len(self._hashes) - self._stored - self._already
        past.add_reasons(self._reasons)
        logger.debug(
            "request %s: %d of %d chunks stored, %d were in the host pool%s",
            self._question.request_id, self._stored, len(self._hashes), self._already,
            because(self._reasons),
        )  # fmt: skip
