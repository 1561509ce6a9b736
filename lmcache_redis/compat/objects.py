"""Chunks of any size by `ObjectKey`, with their metadata, over a `Cache` of heap memory.

    get    `hold` a chunk that is in memory; else `find` the tier that has it and `load` it
    put    `reserve` memory, fill it, then `publish` it: gets find it from then on, in place of the
           previous chunk, and it is written through to every tier

A put replaces a chunk, and `remove` removes it. Neither is undone by a load of the key: one in
flight is cancelled and leaves nothing in memory, and nothing is loaded from a tier that the chunk
is being removed from. A tier that does not store a put removes what it has under the key. If it
cannot do even that, because it is down, it keeps the previous chunk, and serves it once the tiers
above have lost theirs.

A loaded chunk is promoted, in the background, to the tiers above the one that had it. The tiers are
told to keep what memory serves; what one has lost is written again.

Owned by the owner's thread; every call returns at once. `done` is called on that thread, once,
possibly before the call returns. Deadlines are `time.monotonic()` seconds.
"""

from __future__ import annotations

import sys
import time
from functools import lru_cache, partial
from typing import NamedTuple

from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.pool import Entry, EntryState
from lmcache_redis.cache.threads import WorkerThreads
from lmcache_redis.cache.writebehind import WriteBehind
from lmcache_redis.chunks.frame import parsed_metadata
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import RemoteMetadata
from lmcache_redis.chunks.names import ChunkForm, ChunkNames
from lmcache_redis.errors import FormatError
from lmcache_redis.tiers import (
    CallOutcome,
    Done,
    ExistsResult,
    FramesResult,
    WriteOutcome,
)


class Held(NamedTuple):
    """A pinned chunk in memory, or reserved memory to be filled.

    payload: one contiguous view of `metadata.length` bytes, writable if it was reserved. Do not use
    it after the chunk is released, published or abandoned.
    """

    entry: Entry
    metadata: RemoteMetadata
    payload: memoryview


class Places(NamedTuple):
    """Where to look for a chunk: in memory, and in the tiers from number `first` to `end` - 1."""

    memory: bool = True
    first: int = 0
    end: int | None = None


EVERYWHERE = Places()


class Found(NamedTuple):
    """A chunk in tier number `level`. form: how it is split into stripes there."""

    form: ChunkForm
    metadata: RemoteMetadata
    level: int


class Listing(NamedTuple):
    """is_complete: every tier answered in time, and there are no more than the limit."""

    is_complete: bool
    keys: list[ObjectKey]


class ObjectCache:
    """See the module.

    cache: over a `HeapMemory`, used by nothing else. stripe_bytes: the largest
    payload of a stripe that is written; stripes of any size are read. write_s: the timeout of a
    write, and again of the removal that follows a failed one.
    """

    def __init__(
        self, cache: Cache, names: ChunkNames, stripe_bytes: int, write_s: float = 5.0
    ) -> None:
        self.cache = cache
        self._write_s = write_s
        self._is_closed = False
        self._names = names
        self._new_form = lru_cache(1024)(partial(ChunkForm.of, names, slot_bytes=stripe_bytes))
        self._pool = cache.pool
        self._finds: dict[bytes, list[Done[Found | None]]] = {}
        self._post = cache.owner.post
        self._tiers = cache.tiers
        self._lists = WorkerThreads("list", 1)

    @property
    def is_up(self) -> bool:
        """Whether the last tier is up, which keeps chunks longest. Memory alone always is."""
        tiers = self.cache.tiers
        return not tiers or tiers[-1].state.up

    # ------------------------------------------------------------------ get

    def hold(self, key: ObjectKey) -> Held | None:
        """The chunk if it is in memory, which counts as a use. The caller releases it."""
        entry = self._pool.get(self._names.chunk_key(key))
        if entry is None or entry.state is not EntryState.READY:
            return None
        if entry.refreshed_s < self.cache.refreshed_before_s:
            self.cache.keep([(_form_of(entry), key.chunk_hash, entry)])
        return self._held(entry)

    def get(
        self, key: ObjectKey, deadline: float, done: Done[Held | None], places: Places = EVERYWHERE
    ) -> None:
        """`hold`, or `find` and `load` from the first tier that delivers the chunk."""
        held = self.hold(key) if places.memory else None
        if held is not None:
            done(held)
            return

        def answer(found: Found | None) -> None:
            if found is None:
                done(None)
            else:
                self.load(key, found, deadline, partial(loaded, found))

        def loaded(found: Found, held: Held | None) -> None:
            if held is None:
                self.get(key, deadline, done, places._replace(first=found.level + 1))
            else:
                done(held)

        self.find(key, deadline, answer, places)

    def release(self, held: Held) -> None:
        """Unpin a chunk that `hold` or `load` returned."""
        self._pool.unpin(held.entry)

    def find(
        self, key: ObjectKey, deadline: float, done: Done[Found | None], places: Places = EVERYWHERE
    ) -> None:
        """Find the chunk in the first tier of the places that has it. Does not look in memory.

        Equal questions everywhere are one, so that all of them load the chunk together.
        """
        chunk_key = self._names.chunk_key(key)
        if places != EVERYWHERE:
            self._find(key, chunk_key, deadline, done, places)
        elif chunk_key in self._finds:
            self._finds[chunk_key].append(done)
        else:
            waiting = self._finds[chunk_key] = [done]

            def answer(found: Found | None) -> None:
                if self._finds.get(chunk_key) is waiting:
                    del self._finds[chunk_key]
                for each in waiting:
                    each(found)

            self._find(key, chunk_key, deadline, answer, places)

    def _find(
        self,
        key: ObjectKey,
        chunk_key: bytes,
        deadline: float,
        done: Done[Found | None],
        places: Places,
    ) -> None:
        level = self._level_of(chunk_key, places)
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
                self._find(key, chunk_key, deadline, done, places._replace(first=level + 1))

        self._tiers[level].describe(
            (chunk_key,), deadline, lambda result: self._post(partial(described, result))
        )

    def load(self, key: ObjectKey, found: Found, deadline: float, done: Done[Held | None]) -> None:
        """Reads a chunk into memory, once for all callers. Each caller releases its `Held`.

        None: a miss, or no room; the tiers below may have the chunk. If the chunk was replaced
        meanwhile, the result may be the new one: check its metadata.
        """
        chunk_key = self._names.chunk_key(key)
        job = None
        entry = self._pool.get(chunk_key)
        is_removing = self.cache.queues[found.level].is_removing(chunk_key)
        if entry is None and not is_removing and not self._is_closed:
            job = self.cache.prepare_load(
                found.form, chunk_key, key.chunk_hash, found.level, deadline
            )
            if job is not None:
                entry = job.entry
                entry.tag, entry.refreshed_s = found.form, time.monotonic()
        if entry is None or entry.state is EntryState.READY:
            done(None if entry is None else self._held(entry))
        else:
            self._pool.pin(entry)
            self._pool.watch(entry, partial(self._loaded, key, entry, done))
            if job is not None:
                self.cache.begin_loads((job,))

    def _loaded(self, key: ObjectKey, entry: Entry, done: Done[Held | None]) -> None:
        # If it is not READY, it may have been replaced by an entry that is.
        held = self._held(entry) if entry.state is EntryState.READY else self.hold(key)
        self._pool.unpin(entry)
        done(held)

    def _held(self, entry: Entry) -> Held:
        self._pool.pin(entry)
        (payload,) = self._pool.memory.views(entry.block, entry.units, entry.units)
        return Held(entry, parsed_metadata(_form_of(entry).metadata), payload.toreadonly())

    # ------------------------------------------------------------------ put

    def reserve(self, metadata: RemoteMetadata) -> Held | None:
        """Memory for a chunk, which gets do not find yet; None if there is no room or no payload.

        The caller publishes or abandons it.
        """
        if not metadata.length:
            return None
        entry = self._pool.reserve(None, metadata.length)
        if entry is None:
            return None
        (payload,) = self._pool.memory.views(entry.block, entry.units, entry.units)
        return Held(entry, metadata, payload)

    def publish(self, key: ObjectKey, held: Held, written: Done[bool]) -> None:
        """Makes reserved and filled memory the key's chunk, and writes it to every tier.

        written: called when every tier has answered, with whether any of them, or memory, keeps the
        chunk. Raises FormatError if the chunk has no encoding: then the memory is freed.
        """
        entry = held.entry
        try:
            form = self._new_form(key.model_name, key.kv_rank, held.metadata)
        except FormatError:
            self.abandon(held)
            raise
        chunk_key = form.key(key.chunk_hash)
        self._supersede(chunk_key)
        self._pool.publish(entry, chunk_key)
        entry.tag, entry.refreshed_s = form, time.monotonic()
        queues = self.cache.queues
        try:
            add = _any_of(entry.units <= self._pool.idle_limit, len(queues), written)
            for queue in queues:
                written_to = partial(self._written, queue, entry, add)
                queue.write((form, key.chunk_hash, entry), self._write_s, written_to)
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
            queue.remove(entry.key, time.monotonic() + self._write_s, lambda removed: add(False))

    def abandon(self, held: Held) -> None:
        """Frees reserved memory that will not be published."""
        self._pool.discard(held.entry)
        self._pool.unpin(held.entry)

    # ----------------------------------------------------------------- keys

    def contains(
        self, key: ObjectKey, deadline: float, done: Done[bool], places: Places = EVERYWHERE
    ) -> None:
        """Whether a load would most likely find the chunk. Does not count as a use."""
        chunk_key = self._names.chunk_key(key)
        entry = self._pool.peek(chunk_key) if places.memory else None
        level = self._level_of(chunk_key, places)
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
                self.contains(key, deadline, done, Places(False, level + 1, places.end))

        self._tiers[level].exists(
            (chunk_key,), deadline, lambda result: self._post(partial(answer, result))
        )

    def remove(self, key: ObjectKey, deadline: float, done: Done[bool]) -> None:
        """Removes the chunk from memory at once, and from all tiers. done: whether there was one.

        Also False if it was not in memory and no tier answered in time: it may still exist then.
        """
        chunk_key = self._names.chunk_key(key)
        entry = self._pool.peek(chunk_key)
        was_there = entry is not None and entry.state is EntryState.READY
        self._supersede(chunk_key)
        if entry is not None:
            self._pool.discard(entry)
        add = _any_of(was_there, len(self.cache.queues), done)
        for queue in self.cache.queues:
            queue.remove(chunk_key, deadline, lambda result: add(result.removed > 0))

    def _supersede(self, chunk_key: bytes) -> None:
        """Detaches finds and cancels a load of the key: they may bring the previous chunk."""
        self._finds.pop(chunk_key, None)
        entry = self._pool.peek(chunk_key)
        if entry is not None and entry.state is EntryState.FILLING:
            self._pool.cancel(entry)

    def keys(self, deadline: float, done: Done[Listing], limit: int = sys.maxsize) -> None:
        """The keys of all chunks, in any order. Those put or removed meanwhile may be missing.

        limit: most keys that memory is taken for.
        """
        found = dict.fromkeys(e.key for e in self._pool if e.state is EntryState.READY)

        def collect() -> None:
            """On a thread: tiers wait for servers, and there may be many keys."""
            is_complete = True
            for tier in self._tiers:
                outcome, keys = tier.keys(self._names.common, deadline, limit)
                found.update(dict.fromkeys(keys))
                is_complete = is_complete and outcome is CallOutcome.DONE
            parsed = map(self._names.parse, found)
            result = Listing(is_complete and len(found) <= limit, [key for key in parsed if key])
            self._post(partial(done, result))

        self._lists.put(collect, dropped=lambda: self._post(partial(done, Listing(False, []))))

    def close(self, deadline_s: float) -> bool:
        """See `Cache.close`. Calls in flight end as if no tier had the chunk."""
        self._is_closed = True
        self._lists.stop()
        return self.cache.close(deadline_s)

    def _level_of(self, chunk_key: bytes, places: Places) -> int | None:
        if self._is_closed:
            return None
        return self.cache.level_of(chunk_key, places.first, places.end)


def _form_of(entry: Entry) -> ChunkForm:
    assert isinstance(entry.tag, ChunkForm)
    return entry.tag


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
