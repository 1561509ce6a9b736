"""Stores: an engine's blocks are gathered into slots; Redis gets them later (`writes`).

sort     which of the chunks does the host pool hold already? Redis is not asked here: the engine's
         blocks would wait for its answer
gather   the others are copied into slots; what is read past the lease is thrown away
answer   the engine may reuse its blocks: all have been read, by a GPU before they are in slots
keep     each chunk, once it is in its slots, is READY and offered for writing. A GPU's large chunks
         are on their way before, stripe by stripe, and are seen by nobody until then
"""

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
from lmcache_redis.agent.writes import Writes
from lmcache_redis.errors import DeviceError
from lmcache_redis.hostpool import Entry

logger = logging.getLogger(__name__)

# Fewer have nothing to send before the last of them is there, which brings stripe 0 on its way.
_LEAST_EARLY_STRIPES = 3

_DROPS = {
    CopyOutcome.FAILED: ("drop_device_error", "blocks could not be read"),
    CopyOutcome.CANCELLED: ("drop_lease", "the agent was too slow to read the blocks"),
}


class StoreJob:
    """One store of one worker, from the question to the answer."""

    def __init__(
        self,
        core: Core,
        writes: Writes,
        session: Session,
        registration: Registration,
        hashes: Sequence[bytes],
        question: m.Store,
        reply: Reply,
    ) -> None:
        self._core = core
        self._writes = writes
        self._session = session
        self._registration = registration
        self._hashes = hashes
        self._question = question
        self._reply = reply
        self._pending: set[int] = set()  # chunks that are to be gathered and have not ended
        self._unread: set[int] = set()  # those whose blocks are still needed
        self._stored = 0
        self._already = 0

    def start(self) -> None:
        """Sorts out what the host pool has, and queues the rest to be gathered."""
        wanted: list[int] = []
        for chunk, chunk_hash in enumerate(self._hashes):
            entry = self._core.pool.get(self._key(chunk))
            if entry is None:
                wanted.append(chunk)
                continue
            self._already += 1
            if not entry.persisted and not self._core.fills.filling(entry):
                self._writes.offer(self._registration, chunk_hash, entry)
        # Only now: where a bug of ours ended this before, nothing would end it later.
        self._session.busy += 1
        if wanted:
            self._gather_all(wanted)
        else:
            self._answer_and_end()

    def _key(self, chunk: int) -> bytes:
        return self._registration.form.key(self._hashes[chunk])

    def _gather_all(self, wanted: list[int]) -> None:
        self._pending.update(wanted)
        self._unread.update(wanted)
        # Where a device hangs nobody takes what is queued for it, nor gives it up.
        self._core.timers.at(self._question.lease_ns / 1e9, self._core.copies.drop_late)
        a_call = self._registration.chunks_a_call
        begun = 0
        try:
            for first in range(0, len(wanted), a_call):
                self._gather(wanted[first : first + a_call])
                begun = first + a_call
        except Exception:
            # Our own bug. Those that were begun are waited for before the engine gets an answer.
            logger.exception("a store failed")
            for chunk in wanted[begun:]:
                self._one_less(chunk)

    def _gather(self, chunks: Sequence[int]) -> None:
        """Queues one call for as many of the chunks as there is room for."""
        entries: dict[int, Entry] = {}
        try:
            for chunk in chunks:
                entry = self._room_for(chunk)
                if entry is None:
                    self._one_less(chunk)
                else:
                    entries[chunk] = entry
            if entries:
                self._queue(entries)
        except BaseException:
            # Our own bug: slots that nobody fills would never be free again.
            for entry in entries.values():
                self._core.fills.end(entry, filled=False)
            raise

    def _room_for(self, chunk: int) -> Entry | None:
        """Slots for the chunk. None where there is no room, or the store names it twice."""
        if self._core.pool.get(self._key(chunk)) is not None:
            self._already += 1
            return None
        entry = self._core.fills.begin(self._key(chunk), self._registration.form.stripe_count)
        if entry is None:
            self._dropped("drop_pool_full", "the host pool was full")
        return entry

    def _queue(self, entries: Mapping[int, Entry]) -> None:
        form = self._registration.form
        block_ids: list[int] = []
        slots: list[memoryview] = []
        for chunk, entry in entries.items():
            first = chunk * form.blocks_per_chunk
            block_ids += self._question.block_ids[first : first + form.blocks_per_chunk]
            slots += self._core.slots_of(form, entry)
        self._core.copies.gather(
            self._registration.place,
            partial(self._copy, entries, block_ids, slots),
            partial(self._report, entries),
            self._question.lease_ns,
        )

    def _copy(
        self, entries: Mapping[int, Entry], block_ids: Sequence[int], slots: list[memoryview]
    ) -> CopyOutcome:
        # On a copy thread. What is read past the lease may be another request's.
        lease_ns = self._question.lease_ns
        read_in_time = False

        def read() -> None:
            nonlocal read_in_time
            read_in_time = time.monotonic_ns() <= lease_ns
            if read_in_time:
                self._core.post(partial(self._blocks_read, tuple(entries)))

        def filled(count: int) -> None:
            if read_in_time:
                self._core.post(partial(self._filled, entries, count))

        try:
            self._registration.device.gather(
                block_ids,
                slots,
                self._registration.form.stripe_payload_bytes,
                self._question.event,
                read,
                lease_ns,
                len(entries),
                filled if self._registration.form.stripe_count >= _LEAST_EARLY_STRIPES else None,
            )
        except DeviceError:
            if time.monotonic_ns() <= lease_ns:
                raise
            return CopyOutcome.CANCELLED
        in_time = read_in_time or time.monotonic_ns() <= lease_ns
        return CopyOutcome.DONE if in_time else CopyOutcome.CANCELLED

    def _filled(self, entries: Mapping[int, Entry], count: int) -> None:
        """So many slots of the call have their bytes: what is whole in them begins its way."""
        for chunk, entry in entries.items():
            slots = min(count, len(entry.slots) - 1)
            if slots <= 0:
                return
            self._writes.filled(self._registration, self._hashes[chunk], entry, slots)
            count -= len(entry.slots)

    def _report(self, entries: Mapping[int, Entry], outcome: CopyOutcome) -> None:
        for chunk, entry in entries.items():
            self._core.post(partial(self._gathered, chunk, entry, outcome))

    def _gathered(self, chunk: int, entry: Entry, outcome: CopyOutcome) -> None:
        self._core.pool.pin(entry)
        try:
            self._keep(chunk, entry, outcome)
        finally:
            # Whatever a bug of ours broke above: nobody waits for this chunk for ever.
            if self._core.fills.filling(entry):
                self._core.fills.end(entry, filled=False)
            self._writes.abandon(entry)
            self._core.pool.unpin(entry)
            self._one_less(chunk)

    def _keep(self, chunk: int, entry: Entry, outcome: CopyOutcome) -> None:
        form = self._registration.form
        if outcome is CopyOutcome.DONE:
            self._core.metrics.count("gathered_chunks")
            self._core.metrics.count("gathered_bytes", form.chunk_bytes)
        else:
            self._dropped(*_DROPS[outcome])
        if self._core.fills.end(entry, filled=outcome is CopyOutcome.DONE):
            self._stored += 1
            self._writes.offer(self._registration, self._hashes[chunk], entry)
            if self._core.disk is not None:
                self._core.disk.offer(form, self._hashes[chunk], entry)

    def _dropped(self, counter: str, reason: str) -> None:
        self._core.metrics.count(counter)
        self._session.tally.reasons.add(reason)

    def _one_less(self, chunk: int) -> None:
        """The chunk has come to its end, whatever that is; said twice it counts once."""
        if chunk not in self._pending:
            return
        self._pending.remove(chunk)
        try:
            self._blocks_read((chunk,))
        finally:
            if not self._pending:
                self._end()

    def _blocks_read(self, chunks: Sequence[int]) -> None:
        """The chunks' blocks are no longer needed. When none is, the engine is told."""
        if self._unread.isdisjoint(chunks):
            return
        self._unread.difference_update(chunks)
        if not self._unread:
            self._answer()

    def _answer_and_end(self) -> None:
        try:
            self._answer()
        finally:
            self._end()

    def _answer(self) -> None:
        # What is still on its way to its slots counts as stored: its blocks were read in time.
        stored = self._stored + len(self._pending)
        dropped = len(self._hashes) - stored - self._already
        self._reply(m.StoreResult(0, stored, self._already, dropped))

    def _end(self) -> None:
        """Every chunk has come to its end, and the engine has been told."""
        metrics, tally = self._core.metrics, self._session.tally
        metrics.count("stores")
        metrics.count("skipped_chunks", self._already)
        tally.stored += self._stored
        tally.dropped += len(self._hashes) - self._stored - self._already
        self._core.finish_part(self._session)
