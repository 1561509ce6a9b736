"""Stores: an engine's blocks are gathered into slots, which the cache writes to its tiers later.

sort     which of the chunks does the host pool hold already? Redis is not asked here: the engine's
         blocks would wait for its answer
gather   the others are copied into slots; what is read past the lease is thrown away
answer   the engine may reuse its blocks: all have been read, by a GPU before they are in slots
keep     each chunk, once it is in its slots, is READY and written behind
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from lmcache_redis import messages as m
from lmcache_redis.agent.copies import CopyOutcome
from lmcache_redis.agent.copyjob import CopyJob
from lmcache_redis.cache.pool import Entry

# Where the engine computes on the agent's cores, its next step gives the request its first token
# and should not share them with the way to a tier.
_FIRST_TOKEN_FIRST_S = 0.1

_DROPS = {
    CopyOutcome.FAILED: ("drop_device_error", "blocks could not be read"),
    CopyOutcome.CANCELLED: ("drop_lease", "the agent was too slow to read the blocks"),
}


class StoreJob(CopyJob):
    """One store of one worker, from the question to the answer."""

    _unread: set[int]  # chunks whose blocks are still needed
    _stored = 0
    _already = 0

    def start(self) -> None:
        """Sorts out what the host pool has, and queues the rest to be gathered."""
        wanted: list[int] = []
        for chunk, chunk_hash in enumerate(self._hashes):
            entry = self._cache.pool.get(self._form.key(chunk_hash))
            if entry is None:
                wanted.append(chunk)
                continue
            self._already += 1
            if not self._cache.inflight.filling(entry):
                self._write_behind(chunk, entry)
        self._unread = set(wanted)
        if not wanted:
            self._answer()
        self._begin(wanted)

    def _take(self, chunk: int) -> Entry | None:
        """Slots for the chunk. None where there is no room, or the store names it twice."""
        chunk_hash = self._hashes[chunk]
        if self._form.key(chunk_hash) in self._cache.pool:
            self._already += 1
            return None
        entry = self._cache.reserve(self._form, chunk_hash)
        if entry is None:
            self._dropped("drop_pool_full", "the host pool was full")
        return entry

    def _move(
        self, chunks: Sequence[int], block_ids: Sequence[int], slots: Sequence[memoryview]
    ) -> bool:
        lease_ns = self._question.lease_ns
        read_in_time = False

        def on_blocks_read() -> None:
            nonlocal read_in_time
            read_in_time = time.monotonic_ns() <= lease_ns
            if read_in_time:
                self._cache.owner.post(partial(self._blocks_read, chunks))

        self._registration.device.gather(
            block_ids,
            slots,
            self._form.stripe_payload_bytes,
            self._question.event,
            on_blocks_read,
            lease_ns,
            len(chunks),
        )
        return read_in_time or time.monotonic_ns() <= lease_ns

    def _release(self, chunk: int, entry: Entry, outcome: CopyOutcome | None) -> None:
        try:
            if outcome is CopyOutcome.DONE:
                self._keep(chunk, entry)
            elif outcome is not None:
                self._dropped(*_DROPS[outcome])
        finally:
            # Whatever a bug of ours broke above: no lookup waits for this chunk for ever.
            self._cache.abandon(entry)

    def _keep(self, chunk: int, entry: Entry) -> None:
        self._metrics.count("gathered_chunks")
        self._metrics.count("gathered_bytes", self._form.chunk_bytes)
        if self._cache.publish(entry):
            self._stored += 1
            self._write_behind(chunk, entry)

    def _write_behind(self, chunk: int, entry: Entry) -> None:
        delay_s = _FIRST_TOKEN_FIRST_S if self._registration.device.on_host_cores else 0.0
        self._cache.write_behind(self._form, self._hashes[chunk], entry, delay_s)

    def _dropped(self, counter: str, reason: str) -> None:
        self._metrics.count(counter)
        self._session.tally.reasons.add(reason)

    def _ended(self, chunk: int, outcome: CopyOutcome) -> None:
        self._blocks_read((chunk,))

    def _blocks_read(self, chunks: Sequence[int]) -> None:
        """The chunks' blocks are no longer needed. When none is, the engine is told."""
        if not self._unread.isdisjoint(chunks):
            self._unread.difference_update(chunks)
            if not self._unread:
                self._answer()

    def _answer(self) -> None:
        # A chunk whose blocks were read in time, and that is not in its slots yet, is stored too.
        stored = self._stored + len(self._pending)
        dropped = len(self._hashes) - stored - self._already
        self._reply(m.StoreResult(0, stored, self._already, dropped))

    def _finish(self) -> None:
        tally = self._session.tally
        self._metrics.count("stores")
        self._metrics.count("skipped_chunks", self._already)
        tally.stored += self._stored
        tally.dropped += len(self._hashes) - self._stored - self._already
        self._sessions.finish(self._session)
