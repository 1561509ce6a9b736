# SPDX-License-Identifier: Apache-2.0
"""The host pool: which chunk holds which memory, in units of the memory, such as slots.

Owned by the cache's owner thread. Copies and sockets use memoryviews that the owner handed them,
while the entry stays pinned.

An entry's life::

    reserve ──▶ FILLING ──publish──▶ READY ──evicted / replaced / discard / clear──▶ DISCARDED
                   └──────────────────discard / clear────────────────────────────────────┘

A FILLING entry is in the index unless it was reserved without a key: then `publish` gives it one
and discards the entry that the key had. A DISCARDED entry has left the index; its memory becomes
free when its last pin is released, never before.

One filling serves all requests for a chunk: two equal prompts load it once, and a lookup may wait
for a chunk that a store is gathering. Whoever waits pins the entry and watches it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lmcache_redis.cache.arena import PoolMemory
from lmcache_redis.chunks.names import ChunkForm


class EntryState(Enum):
    FILLING = "filling"
    READY = "ready"
    DISCARDED = "discarded"


@dataclass(slots=True, eq=False, repr=False)
class Entry:
    """One chunk in the pool. Only `HostPool` changes the first five attributes.

    Attributes:
        block: of the pool's memory, ``units`` large.
        refreshed_s: when the tiers were last told to keep it, by the owner's clock.
        position: its number in the prompt that it was stored for. tenant: of that request.
        is_held_back: it is not to be written to the tiers. is_over_limit: not to one of them.
        watchers: told how the filling ends; None: it has ended.
        cancel: ends the filling early; None if it cannot be cancelled, or has been.
        form, chunk_hash: of the chunk; whoever reserves the entry sets them.
    """

    key: bytes
    block: Any
    units: int
    pins: int = 1
    state: EntryState = EntryState.FILLING
    refreshed_s: float = 0.0
    position: int = 0
    tenant: str = ""
    is_held_back: bool = False
    is_over_limit: bool = False
    watchers: list[Callable[[], None]] | None = field(default_factory=list)
    cancel: Callable[[], None] | None = None
    form: ChunkForm = field(init=False)
    chunk_hash: bytes = field(init=False)

    def __repr__(self) -> str:
        return f"Entry({self.key.hex()}, {self.state.value}, units={self.units}, pins={self.pins})"


Change = Callable[[bytes, "int | None", bool], None]


class HostPool:
    """Which chunk holds which memory: pins, least-recently-used eviction, hard limits.

    The release of its last pin makes an entry the most recently used. Misuse raises RuntimeError
    and changes nothing: it is a bug of the caller.

    idle_limit: the units that unpinned READY entries may hold together; None: all of the memory.

    Attributes:
        free, idle: units; idle ones are of READY entries without pins.
        on_room: called when the last pin of an entry is released.
        on_change: called with a key, a place (None: the pool; n: tier n) and whether the chunk is
            there: when that changes in the pool, and when it turns out of a tier (`seen`).
    """

    def __init__(self, memory: PoolMemory, idle_limit: int | None = None) -> None:
        self.memory = memory
        self.capacity = memory.capacity
        self.idle_limit = self.capacity if idle_limit is None else idle_limit
        self.on_room: Callable[[], None] = lambda: None
        self.on_evicted: Callable[[], None] = lambda: None
        self.on_change: Change | None = None
        self.free = self.capacity
        self._index: dict[bytes, Entry] = {}
        self._idle: OrderedDict[bytes, Entry] = OrderedDict()  # READY, unpinned; oldest first
        self.idle = 0
        self._outside: set[Entry] = set()  # pinned: DISCARDED, or FILLING without a key

    @property
    def used(self) -> int:
        return self.capacity - self.free

    @property
    def pinned(self) -> int:
        return self.used - self.idle

    def __len__(self) -> int:
        """Entries in the index, including FILLING ones."""
        return len(self._index)

    def __contains__(self, key: bytes) -> bool:
        """Whether the key is in the index. Does not count as a use."""
        return key in self._index

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._index.values())

    def touch_all(self, keys: Iterable[bytes]) -> None:
        """Each becomes the most recently used in turn, if it has no pins."""
        idle = self._idle
        for key in keys:
            if key in idle:
                idle.move_to_end(key)

    def touch_least(self, key: bytes) -> None:
        """It becomes the least recently used, if it has no pins."""
        if key in self._idle:
            self._idle.move_to_end(key, last=False)

    def get(self, key: bytes) -> Entry | None:
        """The entry of a key, FILLING or READY, or None. Does not count as a use."""
        return self._index.get(key)

    def reserve(self, key: bytes | None, units: int) -> Entry | None:
        """A new FILLING entry with one pin; None, and nothing evicted, if there is no room.

        key: None: the entry is not in the index until `publish` gives it a key.
        """
        if units <= 0:
            raise RuntimeError(f"an entry has at least one unit, not {units}")
        if key in self._index:
            raise RuntimeError(f"reserved twice: {self._index[key]!r}")
        if units > self.free + self.idle:
            return None
        while self.free < units:
            self._evict()
        try:
            block = self.memory.take(units)
        except MemoryError:
            return None
        self.free -= units
        if key is None:
            entry = Entry(b"", block, units)
            self._outside.add(entry)
        else:
            entry = self._index[key] = Entry(key, block, units)
        return entry

    def publish(self, entry: Entry, key: bytes | None = None) -> bool:
        """Make a FILLING entry READY; the pin stays. False if it was discarded meanwhile.

        key: for an entry that has none; the entry that has this key in the index is discarded.
        """
        if entry.state is EntryState.DISCARDED and entry.pins > 0:
            return False
        if entry.state is not EntryState.FILLING or (key is None) == (entry in self._outside):
            raise RuntimeError(f"published in the wrong state: {entry!r}")
        if key is not None:
            if key in self._index:
                self.discard(self._index[key])
            self._outside.remove(entry)
            entry.key = key
            self._index[key] = entry
        entry.state = EntryState.READY
        self.seen(None, (entry.key,))
        return True

    def end(self, entry: Entry, *, is_filled: bool) -> bool:
        """End the filling; whether the entry is READY now, and not DISCARDED.

        Releases the filler's pin after the watchers ran, which may add theirs.
        """
        watchers, entry.watchers, entry.cancel = entry.watchers, None, None
        if watchers is None:
            raise RuntimeError(f"ended twice: {entry!r}")
        if not (is_ready := is_filled and self.publish(entry)):
            self.discard(entry)
        try:
            for watcher in watchers:
                watcher()
        finally:
            self.unpin(entry)
        return is_ready

    def watch(self, entry: Entry, watcher: Callable[[], None]) -> None:
        """Have ``watcher`` called when the filling of ``entry`` ends. It must not have ended."""
        if entry.watchers is None:
            raise RuntimeError(f"watched after its filling ended: {entry!r}")
        entry.watchers.append(watcher)

    def unwatch(self, entry: Entry, watcher: Callable[[], None]) -> None:
        """Forget the watcher. After the last one the filling is cancelled, if that is possible.

        The entry then leaves the index: whoever wants the chunk meanwhile loads it anew.
        """
        if not entry.watchers or watcher not in entry.watchers:
            return
        entry.watchers.remove(watcher)
        if not entry.watchers and entry.cancel is not None:
            self.cancel(entry)
            self.discard(entry)

    def cancel(self, entry: Entry) -> None:
        """Cancel the filling if that is possible; the watchers are told when it ends."""
        cancel, entry.cancel = entry.cancel, None
        if cancel is not None:
            cancel()

    def discard(self, entry: Entry) -> None:
        """Take an entry out of the index. Its memory is free after its last pin. Idempotent."""
        if entry.state is EntryState.DISCARDED:
            return
        was_ready = entry.state is EntryState.READY
        entry.state = EntryState.DISCARDED
        if entry in self._outside:
            return
        del self._index[entry.key]
        if was_ready:
            self.seen(None, (entry.key,), there=False)
        if entry.pins > 0:
            self._outside.add(entry)
            return
        del self._idle[entry.key]
        self.idle -= entry.units
        self._give_back(entry)

    def seen(self, place: int | None, keys: Iterable[bytes], there: bool = True) -> None:
        """Whether a place has these chunks; see `on_change`."""
        if self.on_change is not None:
            for key in keys:
                self.on_change(key, place, there)

    def pin(self, entry: Entry) -> None:
        """Add a pin. A DISCARDED entry can be pinned only while it has one."""
        if entry.pins == 0:
            if entry.state is not EntryState.READY:
                raise RuntimeError(f"pinned after it left the pool: {entry!r}")
            del self._idle[entry.key]
            self.idle -= entry.units
        entry.pins += 1

    def hold(self, key: bytes) -> Entry | None:
        """Pin the entry of a key for a lookup, if there is one."""
        entry = self._index.get(key)
        if entry is None:
            return None
        if entry.pins == 0:
            del self._idle[key]
            self.idle -= entry.units
        entry.pins += 1
        return entry

    def unpin(self, entry: Entry) -> None:
        """Release a pin. The last one makes a READY entry evictable and frees a DISCARDED one."""
        if entry.pins <= 0:
            raise RuntimeError(f"unpinned below zero: {entry!r}")
        if entry.pins == 1 and entry.state is EntryState.FILLING:
            raise RuntimeError(f"unpinned while filling, not published or discarded: {entry!r}")
        entry.pins -= 1
        if entry.pins > 0:
            return
        self.on_room()
        if entry.state is EntryState.READY:
            self._idle[entry.key] = entry
            self.idle += entry.units
            if entry.units > self.idle_limit:
                self.discard(entry)
            while self.idle > self.idle_limit:
                self._evict()
        else:
            self._outside.remove(entry)
            self._give_back(entry)

    def clear(self) -> None:
        """Empty the index; pinned entries keep their memory until unpinned."""
        for entry in list(self._index.values()):
            self.discard(entry)

    def _evict(self) -> None:
        self.discard(next(iter(self._idle.values())))  # the least recently used
        self.on_evicted()

    def _give_back(self, entry: Entry) -> None:
        self.free += entry.units
        self.memory.give_back(entry.block)
