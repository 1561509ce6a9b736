# SPDX-License-Identifier: Apache-2.0
"""Chunks of any size by `ObjectKey`, with their metadata, over a `Cache` of heap memory.

    get    `hold` a chunk that is in memory; else `find` the tier that has it and `load` it
    put    `reserve` memory, fill it, then `publish` it: gets find it from then on, in place of the
           previous chunk, and it is written through to every tier

A put replaces a chunk, and `remove` removes it. Neither is undone by a load of the key: one in
flight is cancelled and leaves nothing in memory, and nothing is loaded from a tier that the chunk
is being removed from. A tier that does not store a put removes what it has under the key. If it
cannot do even that, because it is down, it keeps the previous chunk, and serves it once the tiers
above have lost theirs: a later removal would take what others have stored meanwhile.

A loaded chunk is promoted, in the background, to the tiers above the one that had it. The tiers are
told to keep what memory serves; what one has lost is written again.

Owned by the owner's thread; every call returns at once. `done` is called on that thread, once,
possibly before the call returns. Deadlines are of the owner's clock.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.pool import Entry, EntryState
from lmcache_redis.cache.writebehind import WriteBehind
from lmcache_redis.chunks.frame import parsed_metadata
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import RemoteMetadata
from lmcache_redis.chunks.names import ChunkForm, ChunkNames
from lmcache_redis.tiers import CallOutcome, Done, ExistsResult, FramesResult, WriteOutcome

# Smaller blocks come from the allocator, which has warm memory of their size.
LEAST_REUSED_BYTES = 64 << 10
DEFAULT_SPARE_BYTES = 128 << 20


class HeapMemory:
    """One block of memory per chunk, of exactly its size. A unit is a byte. Not thread-safe.

    The kernel zeroes each fresh page at its first touch, which takes longer than the copy into it.
    So freed blocks are kept as spares for later chunks of their size.

    spare_bytes: limit of all spares.
    """

    def __init__(self, spare_bytes: int = DEFAULT_SPARE_BYTES) -> None:
        self.capacity = sys.maxsize
        self.spare_limit_bytes = spare_bytes
        self.spare_bytes = 0
        self._spares: deque[npt.NDArray[np.uint8]] = deque()  # the last freed at the end

    def units(self, sizes: Sequence[int]) -> int:
        return sum(sizes)

    def take(self, units: int) -> memoryview:
        """See `PoolMemory`. A block is a view of its bytes."""
        for place in range(len(self._spares) - 1, -1, -1):
            if self._spares[place].nbytes == units:
                array = self._spares[place]
                del self._spares[place]
                self.spare_bytes -= units
                return array.data
        return np.empty(units, np.uint8).data

    def give_back(self, block: memoryview) -> None:
        if block.nbytes < LEAST_REUSED_BYTES:
            return
        assert isinstance(block.obj, np.ndarray)
        self._spares.append(block.obj)
        self.spare_bytes += block.nbytes
        while self.spare_bytes > self.spare_limit_bytes:
            self.spare_bytes -= self._spares.popleft().nbytes

    def views(self, block: memoryview, sizes: Sequence[int]) -> list[memoryview]:
        """See `PoolMemory`. The views are contiguous: one stripe per chunk gives one view."""
        ends = [*accumulate(sizes)]
        return [block[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def close(self) -> None:
        """Free all spares, and keep none from now on."""
        self.spare_limit_bytes = self.spare_bytes = 0
        self._spares.clear()


class HeldChunk(NamedTuple):
    """A pinned chunk in memory, or reserved memory to be filled.

    payload: one contiguous view of `metadata.length` bytes, writable if it was reserved. Do not use
    it after the chunk is released, published or abandoned.
    """

    entry: Entry
    metadata: RemoteMetadata
    payload: memoryview


class Found(NamedTuple):
    """A chunk in tier number `level`. form: how it is split into stripes there."""

    form: ChunkForm
    metadata: RemoteMetadata
    level: int


class Listing(NamedTuple):
    """why_not: why keys are missing: a tier did not answer, or there are too many; else empty."""

    why_not: str
    keys: list[ObjectKey]


class ObjectCache:
    """See the module.

    cache: over a `HeapMemory`, used by nothing else. stripe_bytes: the largest
    payload of a stripe that is written; stripes of any size are read. write_s: the timeout of a
    write, and again of the removal that follows a failed one.
    """

    def __init__(self, cache: Cache, names: ChunkNames, stripe_bytes: int, write_s: float) -> None:
        self.cache = cache
        self._write_s = write_s
        self._is_closed = False
        self._names = names
        self._new_form = lru_cache(1024)(partial(ChunkForm.of, names, slot_bytes=stripe_bytes))
        self._pool = cache.pool
        self._post = cache.owner.post
        self._tiers = cache.tiers

    @property
    def is_up(self) -> bool:
        """Whether the last tier is up, which keeps chunks longest. Memory alone always is."""
        return not self._tiers or self._tiers[-1].state.up

    # ------------------------------------------------------------------ get

    def hold(self, key: ObjectKey) -> HeldChunk | None:
        """The chunk if it is in memory, which counts as a use. The caller releases it."""
        entry = self._pool.get(self._names.chunk_key(key))
        if entry is None or entry.state is not EntryState.READY:
            return None
        if entry.refreshed_s < self.cache.refreshed_before_s:
            self.cache.keep([entry])
        return self._held(entry)

    def get(self, key: ObjectKey, deadline: float, done: Done[HeldChunk | None]) -> None:
        """`hold`, or `find` and `load`."""
        held = self.hold(key)
        if held is not None:
            done(held)
            return

        def load(found: Found | None) -> None:
            if found is None:
                done(None)
            else:
                self.load(key, found, deadline, done)

        self.find(key, deadline, load)

    def release(self, held: HeldChunk) -> None:
        """Unpin a chunk that `hold` or `load` returned."""
        self._pool.unpin(held.entry)

    def find(
        self, key: ObjectKey, deadline: float, done: Done[Found | None], first: int = 0
    ) -> None:
        """Find the chunk in the first tier, from number `first` on, that has it. Not in memory."""
        chunk_key = self._names.chunk_key(key)
        level = self._level_of(chunk_key, first)
        if level is None:
            done(None)
            return

        def described(result: FramesResult) -> None:
            frame = result.frames[0] if result.frames else None
            if (
                frame is not None
                and frame.fingerprint == self._names.fingerprint
                and frame.chunk_hash == key.chunk_hash
            ):
                sizes = frame.chunk_bytes, frame.stripe_payload_bytes, frame.metadata
                form = ChunkForm(self._names, key.model_name, key.kv_rank, *sizes)
                done(Found(form, parsed_metadata(frame.metadata), level))
            else:
                self.find(key, deadline, done, level + 1)

        self._tiers[level].describe(
            (chunk_key,), deadline, lambda result: self._post(partial(described, result))
        )

    def load(
        self, key: ObjectKey, found: Found, deadline: float, done: Done[HeldChunk | None]
    ) -> None:
        """Reads a chunk into memory, once for all callers. Each caller releases its `HeldChunk`.

        Tiers below are read by the same form if this one fails. None: a miss, or no room. If the
        chunk was replaced meanwhile, the result may be the new one: check its metadata.
        """
        chunk_key, level = self._names.chunk_key(key), found.level
        job = None
        entry = self._pool.get(chunk_key)
        is_removing = self.cache.queues[level].is_removing(chunk_key)
        if entry is None and not is_removing and not self._is_closed:
            job = self.cache.prepare_load(found.form, key.chunk_hash, level, deadline)
            if job is not None:
                entry = job.entry
                entry.refreshed_s = self.cache.owner.now()
        if entry is None or entry.state is EntryState.READY:
            done(None if entry is None else self._held(entry))
        else:
            self._pool.pin(entry)
            self._pool.watch(entry, partial(self._loaded, key, entry, done))
            if job is not None:
                self.cache.begin_loads((job,))

    def _loaded(self, key: ObjectKey, entry: Entry, done: Done[HeldChunk | None]) -> None:
        # If it is not READY, it may have been replaced by an entry that is.
        held = self._held(entry) if entry.state is EntryState.READY else self.hold(key)
        self._pool.unpin(entry)
        done(held)

    def _held(self, entry: Entry) -> HeldChunk:
        self._pool.pin(entry)
        (payload,) = self._pool.memory.views(entry.block, (entry.units,))
        return HeldChunk(entry, parsed_metadata(entry.form.metadata), payload.toreadonly())

    # ------------------------------------------------------------------ put

    def reserve(self, key: ObjectKey, metadata: RemoteMetadata) -> HeldChunk | None:
        """Memory for a chunk, which gets do not find yet; None if there is no room or no payload.

        The caller publishes or abandons it. Raises FormatError if the chunk has no encoding.
        """
        if not metadata.length:
            return None
        form = self._new_form(key.model_name, key.kv_rank, metadata)
        entry = self.cache.reserve(form, key.chunk_hash, is_hidden=True)
        if entry is None:
            return None
        (payload,) = self._pool.memory.views(entry.block, (entry.units,))
        return HeldChunk(entry, metadata, payload)

    def publish(self, key: ObjectKey, held: HeldChunk, written: Done[bool]) -> None:
        """Makes memory that was reserved for the key, and filled, its chunk; begins all writes.

        written: called when every tier has answered, with whether any of them keeps the chunk; if
        there is none, memory.
        """
        entry = held.entry
        chunk_key = entry.form.key(key.chunk_hash)
        self._supersede(chunk_key)
        self._pool.publish(entry, chunk_key)
        entry.refreshed_s = self.cache.owner.now()
        queues = self.cache.queues
        try:
            is_kept = not queues and entry.units <= self._pool.idle_limit
            add = _any_of(is_kept, len(queues), written)
            for queue in queues:
                written_to = partial(self._written, queue, entry, add)
                queue.write(entry, self._write_s, written_to)
        finally:
            self._pool.unpin(entry)

    def _written(
        self, queue: WriteBehind, entry: Entry, add: Done[bool], outcome: WriteOutcome
    ) -> None:
        # A DISCARDED entry was replaced or removed since: the next change of the key decides.
        if outcome is WriteOutcome.STORED or entry.state is EntryState.DISCARDED:
            add(True)
        elif self._is_closed:
            add(False)
        else:
            deadline_s = self.cache.owner.now() + self._write_s
            queue.remove(entry.key, deadline_s, lambda removed: add(False))

    def abandon(self, held: HeldChunk) -> None:
        """Frees reserved memory that will not be published."""
        self._pool.discard(held.entry)
        self._pool.unpin(held.entry)

    # ----------------------------------------------------------------- keys

    def contains(self, key: ObjectKey, deadline: float, done: Done[bool], first: int = 0) -> None:
        """Whether a load would most likely find the chunk. Does not count as a use."""
        chunk_key = self._names.chunk_key(key)
        entry, level = self._pool.get(chunk_key), self._level_of(chunk_key, first)
        if entry is not None and entry.state is EntryState.READY:
            done(True)
            return
        if level is None or self._tiers[level].lookup(chunk_key):
            done(level is not None)
            return

        def answer(result: ExistsResult) -> None:
            if result.outcome is CallOutcome.DONE and result.present[0]:
                done(True)
            else:
                self.contains(key, deadline, done, level + 1)

        self._tiers[level].exists(
            (chunk_key,), deadline, lambda result: self._post(partial(answer, result))
        )

    def remove(self, key: ObjectKey, deadline: float, done: Done[bool]) -> None:
        """Removes the chunk from memory at once, and from all tiers. done: whether there was one.

        Also False if it was not in memory and no tier answered in time: it may still be found then.
        """
        chunk_key = self._names.chunk_key(key)
        entry = self._pool.get(chunk_key)
        was_there = entry is not None and entry.state is EntryState.READY
        self._supersede(chunk_key)
        if entry is not None:
            self._pool.discard(entry)
        add = _any_of(was_there, len(self.cache.queues), done)
        for queue in self.cache.queues:
            queue.remove(chunk_key, deadline, lambda result: add(result.removed > 0))

    def _supersede(self, chunk_key: bytes) -> None:
        """Cancels a load of the key: it may bring the previous chunk."""
        entry = self._pool.get(chunk_key)
        if entry is not None and entry.state is EntryState.FILLING:
            self._pool.cancel(entry)

    def pooled_keys(self) -> set[bytes]:
        """What is in memory, for `listed`."""
        return {entry.key for entry in self._pool if entry.state is EntryState.READY}

    def listed(self, pooled: set[bytes], deadline: float, limit: int = sys.maxsize) -> Listing:
        """The keys of all chunks, in any order. Those put or removed meanwhile may be missing.

        On any thread: tiers wait for servers, and there may be many keys. limit: most keys that
        memory is taken for.
        """
        found, why_not = pooled, ""
        for tier, queue in zip(self._tiers, self.cache.queues, strict=True):
            outcome, keys = tier.keys(self._names.common, deadline, limit)
            found = found.union(key for key in keys if not queue.is_removing(key))
            if outcome is not CallOutcome.DONE:
                reason = "" if outcome is CallOutcome.OVER_LIMIT else tier.state.reason
                why_not = f"{outcome.value}{reason and f' ({reason})'}"
        if len(found) > limit:
            why_not = why_not or CallOutcome.OVER_LIMIT.value
        parsed = map(self._names.parse, found)
        return Listing(why_not, [key for key in parsed if key])

    def close(self, deadline_s: float) -> bool:
        """See `Cache.close`. Calls in flight end as if no tier had the chunk."""
        self._is_closed = True
        return self.cache.close(deadline_s)

    def _level_of(self, chunk_key: bytes, first: int) -> int | None:
        return None if self._is_closed else self.cache.level_of(chunk_key, first)


def _any_of(first: bool, answers: int, done: Done[bool]) -> Done[bool]:
    """Collects `answers` answers, then tells ``done`` whether any, or ``first``, is true."""
    results = [first]

    def add(result: bool) -> None:
        results.append(result)
        if len(results) > answers:
            done(any(results))

    if not answers:
        done(first)
    return add
