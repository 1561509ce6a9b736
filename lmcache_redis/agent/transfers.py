"""Stores and retrieves: the jobs that copy chunks between an engine's blocks and the host pool.

A job is split into device calls of one or more chunks. Every chunk of a job ends exactly once, even
after a bug of ours. The engine is answered when the last chunk has ended or, for a store, when the
last block has been read: an earlier answer would free blocks that are still in use.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from lmcache_redis import messages as m
from lmcache_redis.agent.agent import Agent
from lmcache_redis.agent.copies import CopyOutcome
from lmcache_redis.agent.peers import MAX_CHUNKS, Registration, Session
from lmcache_redis.cache.lookup import PrefixLookup
from lmcache_redis.cache.pool import Entry, EntryState
from lmcache_redis.chunks.names import FULL_REACH
from lmcache_redis.errors import DeviceError

logger = logging.getLogger(__name__)

Reply = Callable[[m.Answer], None]

# The step after a store produces the request's first token. If the engine computes on the agent's
# cores, writes to the tiers start after that step.
_FIRST_TOKEN_FIRST_S = 0.1
# A piece that is loaded while another is copied, and room for other requests.
_PIECES_IN_THE_POOL = 4

_DROPS = {
    CopyOutcome.FAILED: ("drop_device_error", "blocks could not be read"),
    CopyOutcome.CANCELLED: ("drop_lease", "the agent was too slow to read the blocks"),
}


def because(reasons: Collection[str]) -> str:
    """The end of a log line that says why less was done than asked for."""
    return f", because {', '.join(sorted(reasons))}" if reasons else ""


class CopyJob(ABC):
    """One store, retrieve or comparison of one worker, from the question to the answer."""

    def __init__(
        self,
        agent: Agent,
        session: Session,
        registration: Registration,
        hashes: Sequence[bytes],
        question: m.Store | m.Retrieve,
        reply: Reply,
    ) -> None:
        self._cache = agent.cache
        self._config = agent.config
        self._copies = agent.copies
        self._sessions = agent.sessions
        self._metrics = agent.cache.metrics
        self._session = session
        self._registration = registration
        self._group = registration.groups[question.group]
        self._form = self._group.form
        self._use = agent.peers.use_of(self._form.model_name)
        self._hashes = hashes
        self._question = question
        self._reply = reply
        self._queue = agent.copies.gather
        self._pending: set[int] = set()  # chunks that have not ended
        self._reasons: set[str] = set()  # why chunks were not copied
        self._started_s = time.monotonic()

    def _pinned(self, chunk: int) -> Entry | None:
        """The chunk in the host pool, with the pin of the request's lookup or a new one."""
        chunk_hash, pool = self._hashes[chunk], self._cache.pool
        key = self._form.key(chunk_hash)
        entry = self._session.take((self._registration.worker_id, self._question.group, chunk_hash))
        if entry is not None and entry.key != key:
            # Pinned for a layout that the worker no longer has, or never had.
            pool.unpin(entry)
            entry = None
        if entry is None:
            # On another node than the scheduler's, no lookup pins anything.
            entry = pool.get(key)
            if entry is None or entry.state is not EntryState.READY:
                return None
            pool.pin(entry)
        return entry

    # How jobs differ. All but `_move` run on the loop thread.

    @abstractmethod
    def start(self) -> None:
        """Decides what becomes of each chunk, and calls `_begin`."""

    @abstractmethod
    def _take(self, chunk: int) -> Entry | None:
        """The chunk's entry, with a pin for the device call; None if it cannot be copied."""

    @abstractmethod
    def _move(
        self, chunks: Sequence[int], block_ids: Sequence[int], slots: Sequence[memoryview]
    ) -> bool:
        """Copies the chunks of a call; returns whether it was in time. Raises ``DeviceError``."""

    @abstractmethod
    def _release(self, chunk: int, entry: Entry, outcome: CopyOutcome) -> None:
        """The chunk's call has ended: releases the pin of `_take`."""

    @abstractmethod
    def _ended(self, chunk: int, outcome: CopyOutcome) -> None:
        """The chunk has ended."""

    @abstractmethod
    def _finish(self) -> None:
        """Every chunk has ended."""

    def _begin(self, chunks: Sequence[int], later: Sequence[int] = ()) -> None:
        """Queues calls for the chunks; the job ends with the last of them and of ``later``."""
        self._session.busy += 1
        if not chunks and not later:
            self._finish()
            return
        self._pending.update(chunks, later)
        # The threads of a device that hangs never take another copy from its queue.
        self._cache.owner.at(self._question.lease_ns / 1e9, self._copies.drop_late)
        self._begin_calls(chunks)

    def _begin_calls(self, chunks: Sequence[int]) -> None:
        per_call = max(1, self._registration.device.call_bytes // self._form.chunk_bytes)
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
                self._end(chunk, CopyOutcome.FAILED)

    def _submit(self, entries: Mapping[int, Entry]) -> None:
        per_chunk = self._group.blocks_per_part
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
        # On a copy thread. After the lease expires the blocks may belong to another request.
        try:
            if self._move(chunks, block_ids, slots):
                return CopyOutcome.DONE
        except DeviceError:
            if time.monotonic_ns() <= self._question.lease_ns:
                raise
        return CopyOutcome.CANCELLED

    def _copied(self, entries: Mapping[int, Entry], outcome: CopyOutcome) -> None:
        for chunk, entry in entries.items():
            try:
                self._release(chunk, entry, outcome)
            except Exception:
                logger.exception("a chunk was lost")  # our own bug: only this chunk
            self._end(chunk, outcome)

    def _end(self, chunk: int, outcome: CopyOutcome) -> None:
        self._pending.remove(chunk)
        try:
            self._ended(chunk, outcome)
        finally:
            if not self._pending:
                self._finish()


class StoreJob(CopyJob):
    """Gathers blocks into slots, which the cache writes to its tiers later.

    1. Chunks in the host pool are skipped. Redis is not asked, because the engine's blocks would
       stay in use until it answers.
    2. The others are copied into slots. Bytes read after the lease expired are discarded.
    3. The answer frees the engine's blocks once all have been read. On a GPU this is before the
       bytes are in the slots.
    4. A chunk becomes READY when its bytes are in its slots, and is enqueued for the tiers.
    """

    _stored = 0
    _already = 0

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
        self._unread = set(wanted)  # chunks whose blocks are still needed
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
            block_ids, slots, self._form.stripe_payload_bytes, self._question.event,
            on_blocks_read, lease_ns, len(chunks), self._question.group,
        )  # fmt: skip
        return read_in_time or time.monotonic_ns() <= lease_ns

    def _release(self, chunk: int, entry: Entry, outcome: CopyOutcome) -> None:
        try:
            if outcome is not CopyOutcome.DONE:
                self._dropped(*_DROPS[outcome])
                return
            self._metrics.count("gathered_chunks")
            self._metrics.count("gathered_bytes", self._form.chunk_bytes)
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
        self._metrics.count(counter)
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
        self._metrics.observe("store_seconds", time.monotonic() - self._started_s)

    def _finish(self) -> None:
        self._metrics.count("stores")
        self._metrics.count("skipped_chunks", self._already)
        logger.debug(
            "request %s: %d of %d chunks stored, %d were in the host pool%s",
            self._question.request_id, self._stored, len(self._hashes), self._already,
            because(self._reasons),
        )  # fmt: skip
        self._sessions.finish(self._session)


class RetrieveJob(CopyJob):
    """Scatters chunks into blocks.

    A lookup has pinned the chunks, but not those at the end of a prefix that is larger than the
    host pool, nor any at the agent of another node than the scheduler's. This job loads these in
    pieces, each while the one before it is copied. It waits for room before all lookups, and holds
    no chunk that it does not copy, so the room that it frees is the room that it gets. The first
    chunk that does not arrive in time ends the loads: it and those after it are failed chunks.
    """

    def start(self) -> None:
        """Queues the copies of the chunks in memory, and begins to load the others."""
        assert isinstance(self._question, m.Retrieve)
        layout = self._registration.device.layouts[self._question.group]
        self._skip_blocks = self._question.skip_first_n_tokens // layout.block_size_tokens
        self._failed: list[int] = []
        self._entries: dict[int, Entry] = {}  # pinned, until their copies take over the pins
        self._queue = self._copies.scatter
        # Chunks that are not in memory, and are not being loaded.
        self._missing = [chunk for chunk in range(len(self._hashes)) if not self._hold(chunk)]
        self._begin([*self._entries], self._missing)
        self._load_piece()

    def _hold(self, chunk: int) -> bool:
        """Whether the chunk is in memory, and pinned now."""
        if (entry := self._pinned(chunk)) is None:
            return False
        self._entries[chunk] = entry
        return True

    def _load_piece(self) -> None:
        """Loads the next missing chunks and queues their copies; then continues."""
        if not self._missing:
            return
        pool_units, chunk_units = self._cache.pool.capacity, self._cache.units(self._form)
        count = max(1, pool_units // _PIECES_IN_THE_POOL // chunk_units)
        piece, self._missing = self._missing[:count], self._missing[count:]

        def loaded(found: PrefixLookup) -> None:
            held = found.take()
            self._entries.update((piece[index], entry) for (index, _), entry in held.items())
            self._reasons |= found.reasons
            self._begin_calls(piece)
            if self._failed:
                self._give_up()
            else:
                self._load_piece()

        lease_s = self._question.lease_ns / 1e9
        deadline_s = min(lease_s, time.monotonic() + self._config.lookup_deadline_s)
        form = replace(self._form, reach=FULL_REACH)
        hashes = [self._hashes[chunk] for chunk in piece]
        lookup = PrefixLookup(self._cache, [form], hashes, deadline_s, loaded, urgent=True)
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
            self._end(chunk, CopyOutcome.FAILED)

    def _take(self, chunk: int) -> Entry | None:
        return self._entries.pop(chunk, None)

    def _move(
        self, chunks: Sequence[int], block_ids: Sequence[int], slots: Sequence[memoryview]
    ) -> bool:
        per_chunk = self._group.blocks_per_part
        skip = sum(min(max(0, self._skip_blocks - c * per_chunk), per_chunk) for c in chunks)
        self._registration.device.scatter(
            block_ids, slots, self._form.stripe_payload_bytes, skip, self._question.event,
            self._question.lease_ns, len(chunks), self._question.group,
        )  # fmt: skip
        return True

    def _release(self, chunk: int, entry: Entry, outcome: CopyOutcome) -> None:
        self._cache.pool.unpin(entry)

    def _ended(self, chunk: int, outcome: CopyOutcome) -> None:
        if outcome is not CopyOutcome.DONE:
            self._failed.append(chunk)

    def _finish(self) -> None:
        copied = len(self._hashes) - len(self._failed)
        took_s = time.monotonic() - self._started_s
        self._metrics.count("retrieves")
        self._metrics.observe("retrieve_seconds", took_s)
        self._metrics.count("retrieves_failed", bool(self._failed))
        self._metrics.count("retrieved_chunks", copied)
        self._metrics.count("retrieved_bytes", copied * self._form.chunk_bytes)
        self._use.retrieved_bytes += copied * self._form.chunk_bytes
        logger.debug(
            "request %s: %d of %d chunks copied into blocks in %.1f ms%s",
            self._question.request_id, copied, len(self._hashes), took_s * 1e3,
            because(self._reasons),
        )  # fmt: skip
        try:
            self._reply(m.RetrieveResult(0, tuple(sorted(self._failed))))
        finally:
            self._sessions.finish(self._session)
