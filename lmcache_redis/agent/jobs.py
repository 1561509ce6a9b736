# SPDX-License-Identifier: Apache-2.0
"""Jobs that copy chunks between an engine's blocks and the host pool: stores and retrieves.

A job is split into device calls of one or more chunks. Every chunk of a job ends exactly once, even
after a bug of ours. The engine is answered when the last chunk has ended or, for a store, when the
last block has been read: an earlier answer would free blocks that are still in use. A retrieve
whose GPU is lost is never answered: the end of the agent's process frees the blocks.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from lmcache_redis import messages as m
from lmcache_redis.agent.agent import Agent
from lmcache_redis.agent.copies import CopyOutcome, Kind
from lmcache_redis.agent.peers import Registration, Reply
from lmcache_redis.agent.sessions import MAX_CHUNKS, HitLoad, Session
from lmcache_redis.agent.uses import ModelUse
from lmcache_redis.cache.lookup import PrefixLookup
from lmcache_redis.cache.parts import LookupRequest
from lmcache_redis.cache.pool import Entry, EntryState
from lmcache_redis.cache.threads import posting
from lmcache_redis.chunks.names import FULL_REACH
from lmcache_redis.device.calls import ChunkCopy, CopyCall
from lmcache_redis.errors import DeviceError, GpuLost

logger = logging.getLogger(__name__)

# A piece of a retrieve that is loaded while another is copied, and room for other requests.
_PIECES_IN_THE_POOL = 4

_DROPS = {
    CopyOutcome.FAILED: ("drop_device_error", "blocks could not be read"),
    CopyOutcome.LOST: ("drop_device_error", "the GPU is lost"),
    CopyOutcome.CANCELLED: ("drop_lease", "the agent was too slow to read the blocks"),
}


class CopyJob(ABC):
    """One store, retrieve or comparison of one worker, from the question to the answer.

    question: its names and blocks were checked. All but `_move` runs on the loop thread.
    """

    _kind: ClassVar[Kind] = "gather"
    _skip_blocks = 0  # the first blocks of the question, which are not written

    def __init__(
        self,
        agent: Agent,
        session: Session,
        registration: Registration,
        question: m.Store | m.Retrieve,
        reply: Reply,
    ) -> None:
        self._agent = agent
        self._cache = agent.cache
        self._session, self._registration = session, registration
        self._question, self._reply = question, reply
        self._hashes = question.hashes
        self._blocks_per_part = len(question.block_ids) // max(1, len(question.hashes))
        self._form = registration.forms[question.group]
        self._pending: set[int] = set()  # chunks that have not ended
        self._reasons: set[str] = set()  # why chunks were not copied
        self._now = agent.cache.owner.now
        self._started_s = self._now()

    @abstractmethod
    def start(self) -> None:
        """Decides what becomes of each chunk, and calls `_begin`."""

    @abstractmethod
    def _take(self, chunk: int) -> Entry | None:
        """The chunk's entry, with a pin for the device call; None if it cannot be copied."""

    @abstractmethod
    def _move(self, chunks: Sequence[int], call: CopyCall) -> bool:
        """Makes a call for these chunks; returns whether it was in time. Raises ``DeviceError``."""

    @abstractmethod
    def _ended(self, chunk: int, entry: Entry | None, outcome: CopyOutcome) -> None:
        """The chunk has ended: releases the pin of `_take`, if that took one."""

    @abstractmethod
    def _finish(self) -> None:
        """Every chunk has ended."""

    def _pinned(self) -> dict[int, Entry]:
        """The chunks in the host pool, each with the pin of the request's lookup or a new one."""
        found, pool = {}, self._cache.pool
        part = (self._registration.worker_id, self._question.group)
        for chunk, chunk_hash in enumerate(self._hashes):
            key, entry = self._form.key(chunk_hash), self._session.take(chunk_hash, part)
            is_gone = entry is not None and entry.state is EntryState.DISCARDED
            if entry is not None and (entry.key != key or is_gone):
                # A canary has found it wrong since, or its epoch was cleared. Or it was pinned for
                # a layout that the worker no longer has, or never had.
                pool.unpin(entry)
                entry = None
            if entry is None:
                # On another node than the scheduler's, no lookup pins anything.
                entry = pool.get(key)
                if entry is None or entry.state is not EntryState.READY:
                    continue
                pool.pin(entry)
            found[chunk] = entry
        return found

    def _begin(self, chunks: Collection[int]) -> None:
        """The job ends with the last of the chunks, for each of which `_begin_calls` is called."""
        self._session.busy += 1
        if not chunks:
            self._close()
            return
        self._pending.update(chunks)
        # The threads of a device that hangs never take another copy from its queue.
        self._cache.owner.at(self._question.lease_ns / 1e9, self._agent.copies.drop_late)

    def _begin_calls(self, chunks: Sequence[int]) -> None:
        per_call = max(1, -(-self._registration.device.call_bytes // self._form.chunk_bytes))
        for first in range(0, len(chunks), per_call):
            self._begin_call(chunks[first : first + per_call])

    def _begin_call(self, chunks: Sequence[int]) -> None:
        entries: dict[int, Entry] = {}
        try:
            for chunk in chunks:
                if (entry := self._take(chunk)) is not None:
                    entries[chunk] = entry
            if entries:
                self._submit(entries)
        except Exception:
            logger.exception("a call to a device failed")  # our own bug: only this call fails
            self._copied(entries, CopyOutcome.FAILED)
        for chunk in chunks:
            if chunk not in entries:
                self._end(chunk, None, CopyOutcome.FAILED)

    def _submit(self, entries: Mapping[int, Entry]) -> None:
        question, per_chunk = self._question, self._blocks_per_part
        copies = []
        for chunk, entry in entries.items():
            first = chunk * per_chunk
            block_ids = question.block_ids[first : first + per_chunk]
            skip_blocks = min(max(0, self._skip_blocks - first), per_chunk)
            copies.append(ChunkCopy(block_ids, self._cache.views(entry), skip_blocks))
        lease_ns = question.lease_ns
        call = CopyCall(copies, question.group, question.after, lease_ns)
        self._agent.copies.put(
            self._kind,
            self._registration.place,
            partial(self._copy, tuple(entries), call),
            posting(self._cache.owner, partial(self._copied, entries)),
            lease_ns,
        )

    def _copy(self, chunks: Sequence[int], call: CopyCall) -> CopyOutcome:
        # On a copy thread. After the lease expires the blocks may belong to another request.
        try:
            if self._move(chunks, call):
                return CopyOutcome.DONE
        except GpuLost:
            raise
        except DeviceError:
            if self._now() * 1e9 <= self._question.lease_ns:
                raise
        return CopyOutcome.CANCELLED

    def _copied(self, entries: Mapping[int, Entry], outcome: CopyOutcome) -> None:
        for chunk, entry in entries.items():
            self._end(chunk, entry, outcome)

    def _end(self, chunk: int, entry: Entry | None, outcome: CopyOutcome) -> None:
        self._pending.remove(chunk)
        try:
            self._ended(chunk, entry, outcome)
        except Exception:
            logger.exception("a chunk was lost")  # our own bug: only this chunk
        if not self._pending:
            self._close()

    @property
    def _tenant(self) -> str:
        return self._agent.peers.tenants.shown(self._question.tenant)

    def _uses(self) -> Sequence[ModelUse]:
        return self._agent.peers.uses_of(self._form.model_name, self._tenant)

    def _close(self) -> None:
        try:
            self._finish()
        finally:
            self._agent.sessions.finish(self._session)


class StoreJob(CopyJob):
    """Gathers blocks into slots, which the cache writes to its tiers later.

    1. Chunks in the host pool are skipped. Redis is not asked, because the engine's blocks would
       stay in use until it answers.
    2. The others are copied into slots. Bytes read after the lease expired are discarded.
    3. The answer frees the engine's blocks once all have been read. On a GPU this is before the
       bytes are in the slots.
    4. A chunk becomes READY when its bytes are in its slots, and is enqueued for the tiers, once
       enough requests have named it (`sights`).
    """

    _stored = _already = 0
    _unread: set[int]  # chunks whose blocks are still needed

    def start(self) -> None:
        if (sights := self._agent.sessions.sights) is not None:
            sights.see(self._session.key, self._form.model_name, self._hashes)
        wanted: list[int] = []
        tenants = self._agent.peers.tenants
        for chunk, chunk_hash in enumerate(self._hashes):
            key = self._form.key(chunk_hash)
            entry = self._cache.pool.get(key)
            if entry is None:
                if self._cache.clears.ended.has(key):
                    self._reasons.add("the engine has begun another epoch")
                else:
                    wanted.append(chunk)
                continue
            self._cache.pool.touch_all((entry.key,))
            self._already += 1
            if entry.state is EntryState.READY:
                entry.tenant = tenants.payer(entry.tenant, self._tenant)
                self._write_behind(entry)
                self._cache.pool.seen(None, (entry.key,))
        self._gather(wanted)

    def _gather(self, chunks: Sequence[int]) -> None:
        self._unread = set(chunks)
        if not chunks:
            self._answer()
        self._begin(chunks)
        self._begin_calls(chunks)

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
            entry.tenant = self._tenant
        return entry

    def _move(self, chunks: Sequence[int], call: CopyCall) -> bool:
        lease_ns = self._question.lease_ns
        read_in_time = False

        def on_blocks_read() -> None:
            nonlocal read_in_time
            read_in_time = self._now() * 1e9 <= lease_ns
            if read_in_time:
                self._cache.owner.post(partial(self._blocks_read, chunks))

        self._registration.device.gather(call, on_blocks_read)
        return read_in_time or self._now() * 1e9 <= lease_ns

    def _ended(self, chunk: int, entry: Entry | None, outcome: CopyOutcome) -> None:
        try:
            if entry is not None:
                try:
                    self._gathered(chunk, entry, outcome)
                finally:
                    # Even after a bug of ours above: lookups may be waiting for this entry.
                    self._cache.abandon(entry)
        finally:
            self._blocks_read((chunk,))

    def _gathered(self, chunk: int, entry: Entry, outcome: CopyOutcome) -> None:
        if outcome is not CopyOutcome.DONE:
            self._dropped(*_DROPS[outcome])
            return
        self._cache.metrics.count("gathered_chunks")
        self._cache.metrics.count("gathered_bytes", self._form.chunk_bytes)
        for use in self._uses():
            use.gathered_bytes += self._form.chunk_bytes
        if self._cache.publish(entry):
            self._stored += 1
            self._write_behind(entry)

    def _write_behind(self, entry: Entry) -> None:
        if self._holds_back(entry):
            return
        self._cache.write_behind(entry, self._registration.write_delay_s)
        if entry.is_over_limit and (why := self._agent.peers.tenants.why_not(entry.tenant)):
            self._reasons.add(why)

    def _holds_back(self, entry: Entry) -> bool:
        sights, was_held_back = self._agent.sessions.sights, entry.is_held_back
        if sights is None:
            return False
        seen = sights.count(self._form.model_name, entry.chunk_hash)
        entry.is_held_back = seen < sights.store_after
        if entry.is_held_back and not was_held_back:
            self._dropped("drop_admission", "only in the host pool for now (--store-after)")
        return entry.is_held_back

    def _dropped(self, counter: str, reason: str) -> None:
        self._cache.metrics.count(counter)
        self._reasons.add(reason)

    def _blocks_read(self, chunks: Sequence[int]) -> None:
        if self._unread:
            self._unread.difference_update(chunks)
            if not self._unread:
                self._answer()

    def _answer(self) -> None:
        # Pending chunks were read in time and are being copied to their slots: they count.
        stored = self._stored + len(self._pending)
        dropped = len(self._hashes) - stored - self._already
        self._reply(m.StoreResult(0, stored, self._already, dropped))
        self._cache.metrics.observe("store_seconds", self._now() - self._started_s)

    def _finish(self) -> None:
        self._cache.metrics.count("stores")
        self._cache.metrics.count("skipped_chunks", self._already)
        past = self._session.past
        past.stored += self._stored
        past.present += self._already
        past.dropped += len(self._hashes) - self._stored - self._already
        past.add_reasons(self._reasons)


class RetrieveJob(CopyJob):
    """Scatters chunks into blocks.

    A lookup has pinned the chunks, but not those at the end of a prefix that is larger than the
    host pool, nor any at the agent of another node than the scheduler's. This job loads these in
    pieces, each while the one before it is copied. It waits for room before all lookups, and holds
    no chunk that it does not copy, so the room that it frees is the room that it gets. The first
    chunk that does not arrive in time ends the loads: it and those after it are failed chunks.
    """

    _kind = "scatter"
    _question: m.Retrieve
    _load: HitLoad | None
    _lost = False  # the GPU: it may still write to the blocks
    _failed: list[int]
    _entries: dict[int, Entry]  # pinned, until their copies take over the pins
    _missing: list[int]  # chunks that are not in memory, and are not being loaded

    def start(self) -> None:
        layout = self._registration.device.layouts[self._question.group]
        self._skip_blocks = self._question.skip_first_n_tokens // layout.block_size_tokens
        self._load = self._session.load if self._hashes else None
        if self._load is not None:
            self._count_hit(self._load)
            self._load.begun(self._started_s)
        self._failed = []
        self._entries = self._pinned()
        self._missing = [each for each in range(len(self._hashes)) if each not in self._entries]
        self._begin(range(len(self._hashes)))
        self._begin_calls([*self._entries])
        self._load_piece()

    def _count_hit(self, load: HitLoad) -> None:
        """Counts the hit with its first retrieve, and once if a retrieve shows a local prefix."""
        # A window also skips what it does not reach.
        skips = self._form.reach == FULL_REACH and self._skip_blocks > 0
        is_local = bool(load.first_chunk or skips)
        self._cache.metrics.count("loaded_hits", not load.began_s)
        self._cache.metrics.count("local_hits", is_local and not load.is_local)
        load.is_local |= is_local

    def _load_piece(self) -> None:
        if not self._missing:
            return
        pool_units, chunk_units = self._cache.pool.capacity, self._cache.units(self._form)
        count = max(1, pool_units // _PIECES_IN_THE_POOL // chunk_units)
        piece, self._missing = self._missing[:count], self._missing[count:]

        def loaded(found: PrefixLookup) -> None:
            held = found.parts.take()
            self._entries.update((piece[index], entry) for (index, _), entry in held.items())
            self._reasons |= found.end.reasons
            self._begin_calls(piece)
            if self._failed:
                self._give_up()
            else:
                self._load_piece()

        lease_s = self._question.lease_ns / 1e9
        deadline_s = min(lease_s, self._now() + self._agent.config.lookup_deadline_s)
        form = replace(self._form, reach=FULL_REACH)
        hashes = [self._hashes[chunk] for chunk in piece]
        request = LookupRequest([form], hashes, deadline_s, urgent=True)
        lookup = PrefixLookup(self._cache, request, loaded)
        try:
            lookup.start()
        except Exception:
            logger.exception("chunks were not loaded")  # our own bug: only these fail
            lookup.cancel()
            self._missing += piece
            self._give_up()

    def _give_up(self) -> None:
        missing, self._missing = self._missing, []
        for chunk in missing:
            self._end(chunk, None, CopyOutcome.FAILED)

    def _take(self, chunk: int) -> Entry | None:
        return self._entries.pop(chunk, None)

    def _move(self, chunks: Sequence[int], call: CopyCall) -> bool:
        self._registration.device.scatter(call)
        return True

    def _ended(self, chunk: int, entry: Entry | None, outcome: CopyOutcome) -> None:
        if outcome is not CopyOutcome.DONE:
            self._failed.append(chunk)
        self._lost = self._lost or outcome is CopyOutcome.LOST
        if entry is not None:
            self._cache.pool.unpin(entry)

    def _finish(self) -> None:
        copied = len(self._hashes) - len(self._failed)
        took_s = self._now() - self._started_s
        metrics, nbytes = self._cache.metrics, copied * self._form.chunk_bytes
        metrics.count("retrieves")
        metrics.observe("retrieve_seconds", took_s)
        metrics.count("retrieves_failed", bool(self._failed))
        metrics.count("retrieved_chunks", copied)
        metrics.count("retrieved_bytes", nbytes)
        for use in self._uses():
            use.retrieved_bytes += nbytes
        self._count_saving()
        past = self._session.past
        past.loaded += copied
        past.failed += len(self._failed)
        past.load_s = max(past.load_s, took_s)
        past.add_reasons(self._reasons)
        if not self._lost:
            self._reply(m.RetrieveResult(0, tuple(sorted(self._failed))))

    def _count_saving(self) -> None:
        session, load = self._session, self._load
        if load is None or session.ended:  # the request was aborted
            return
        tokens = None
        if not self._failed and all(each in session.positions for each in self._hashes):
            chunks = [session.positions[each] for each in self._hashes]
            skipped_tokens = self._question.skip_first_n_tokens
            tokens = load.tokens_of(self._form.reach, chunks, skipped_tokens)
        saved = load.ended(self._registration.worker_id, tokens, self._now())
        if saved is not None:
            session.load = None
            peers, metrics = self._agent.peers, self._cache.metrics
            for use in self._uses():
                use.saved(*saved)
            metrics.count("saved_tokens", saved[0])
            metrics.count("saved_untimed_tokens", saved[0] if saved[1] is None else 0)
            metrics.raise_to("saved_prefill_seconds", peers.saved_prefill_s)
