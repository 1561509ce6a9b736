"""The host pool: the index that decides which chunk holds which memory.

It counts in units of its memory: slots of an `Arena`, bytes of a `HeapMemory`. Not thread-safe: the
cache's owner thread owns it. Copies and sockets work on the memoryviews that the owner handed them,
and the entry stays pinned meanwhile.

An entry's life::

    reserve ──▶ FILLING ──publish──▶ READY ──evicted / replaced / discard / clear──▶ DISCARDED
                   └──────────────────discard / clear────────────────────────────────────┘

A FILLING entry is in the index unless it was reserved without a key: then `publish` gives it one,
and discards the entry that the key had. A DISCARDED entry has left the index; its memory becomes
free when its last pin goes, never before. The pool never holds more than ``capacity`` units,
whatever is asked of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from typing import Any, Protocol


class Memory(Protocol):
    """Where a pool keeps payloads. A unit is as small as the memory can give."""

    @property
    def capacity(self) -> int:
        """Units of all blocks together."""

    def units(self, chunk_bytes: int, stripe_bytes: int) -> int:
        """What a chunk takes that is cut into stripes of that size."""

    def take(self, units: int) -> Any:
        """A block of memory, with anything in it. Raises MemoryError.

        The pool asks for no more than `capacity` units at a time.
        """

    def give_back(self, block: Any) -> None:
        """The block's views are not used any more."""

    def views(self, block: Any, chunk_bytes: int, stripe_bytes: int) -> list[memoryview]:
        """The chunk's stripes in a block of its units, each as a writable view of its bytes."""


class EntryState(Enum):
    """Where an entry stands; see the module's picture."""

    FILLING = "filling"
    READY = "ready"
    DISCARDED = "discarded"


class Entry:
    """One chunk in the pool. Only `HostPool` changes it, but for the notes of the cache.

    Attributes:
        block: what the pool's memory gave for it.
        units: how much that is.
        pins: holders; an entry with pins is never evicted and its memory is never reused.
        stored_in: a note. Bit n is set where the chunk is known to be in tier n of the cache.
        tag: a note of the one that reserved it.
    """

    __slots__ = ("block", "key", "pins", "state", "stored_in", "tag", "units")

    def __init__(self, key: bytes, block: Any, units: int) -> None:
        self.key = key
        self.block = block
        self.units = units
        self.pins = 1
        self.state = EntryState.FILLING
        self.stored_in = 0
        self.tag: object = None

    def __repr__(self) -> str:
        return f"Entry({self.key.hex()}, {self.state.value}, units={self.units}, pins={self.pins})"


class HostPool:
    """Which chunk holds which memory: pins, least-recently-used eviction, hard limits.

    idle_limit: units that READY entries without pins may keep together; None: all of the memory.

    An entry is used, and so most recent, when it is got, and when its last pin goes.
    Misuse (unpin without pin, publish twice, reserve a key that is there) raises
    RuntimeError and changes nothing: it is a bug of the caller.
    """

    def __init__(self, memory: Memory, idle_limit: int | None = None) -> None:
        self.memory = memory
        self.capacity = memory.capacity
        self.idle_limit = self.capacity if idle_limit is None else idle_limit
        self.evictions = 0
        self._free = self.capacity
        self._index: dict[bytes, Entry] = {}
        self._idle: OrderedDict[bytes, Entry] = OrderedDict()  # READY, unpinned; oldest first
        self._idle_units = 0
        self._outside: set[Entry] = set()  # pinned: DISCARDED, or FILLING without a key

    @property
    def free(self) -> int:
        return self._free

    @property
    def used(self) -> int:
        return self.capacity - self._free

    @property
    def idle(self) -> int:
        """Units of READY entries without pins."""
        return self._idle_units

    @property
    def pinned(self) -> int:
        return self.used - self._idle_units

    def __len__(self) -> int:
        """Entries in the index, FILLING ones included."""
        return len(self._index)

    def __contains__(self, key: bytes) -> bool:
        """Whether the key is in the index; asking is not using."""
        return key in self._index

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._index.values())

    def get(self, key: bytes) -> Entry | None:
        """The entry of a key, FILLING or READY, or None. A READY one becomes most recent."""
        entry = self._index.get(key)
        if entry is not None and entry.pins == 0:
            self._idle.move_to_end(key)
        return entry

    def peek(self, key: bytes) -> Entry | None:
        """The entry of a key, FILLING or READY, or None, left where it is in the order."""
        return self._index.get(key)

    def reserve(self, key: bytes | None, units: int) -> Entry | None:
        """A new FILLING entry with one pin, or None if that cannot be.

        key: None: outside of the index, until `publish` gives it a key. Evicts as many of the
        least recently used unpinned READY entries as it needs; where even all of them would not
        do, it evicts none.
        """
        if units <= 0:
            raise RuntimeError(f"an entry of {units} units")
        if key in self._index:
            raise RuntimeError(f"reserved twice: {self._index[key]!r}")
        if units > self._free + self._idle_units:
            return None
        while self._free < units:
            self._evict()
        try:
            block = self.memory.take(units)
        except MemoryError:
            return None
        self._free -= units
        if key is None:
            entry = Entry(b"", block, units)
            self._outside.add(entry)
        else:
            entry = self._index[key] = Entry(key, block, units)
        return entry

    def publish(self, entry: Entry, key: bytes | None = None) -> bool:
        """FILLING to READY; the pin stays. False if it was discarded while it was filled.

        key: of an entry that has none. An entry that is there under the key is discarded.
        """
        if entry.state is EntryState.DISCARDED and entry.pins > 0:
            return False
        if entry.state is not EntryState.FILLING or (key is None) == (entry in self._outside):
            raise RuntimeError(f"published in the wrong state: {entry!r}")
        if key is not None:
            replaced = self._index.get(key)
            if replaced is not None:
                self.discard(replaced)
            self._outside.remove(entry)
            entry.key = key
            self._index[key] = entry
        entry.state = EntryState.READY
        return True

    def discard(self, entry: Entry) -> None:
        """Take it out of the index now; its memory becomes free with its last pin.

        Discarding again is allowed: two who find the same fault need not agree who is first.
        """
        if entry.state is EntryState.DISCARDED:
            return
        entry.state = EntryState.DISCARDED
        if entry in self._outside:
            return
        del self._index[entry.key]
        if entry.pins > 0:
            self._outside.add(entry)
            return
        del self._idle[entry.key]
        self._idle_units -= entry.units
        self._give_back(entry)

    def pin(self, entry: Entry) -> None:
        """One more holder. A DISCARDED entry may be pinned by those who hold it already."""
        if entry.pins == 0:
            if entry.state is not EntryState.READY:
                raise RuntimeError(f"pinned after it had left: {entry!r}")
            del self._idle[entry.key]
            self._idle_units -= entry.units
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        """One holder less. The last one makes a READY entry evictable, a DISCARDED one free."""
        if entry.pins <= 0:
            raise RuntimeError(f"unpinned below zero: {entry!r}")
        if entry.pins == 1 and entry.state is EntryState.FILLING:
            raise RuntimeError(f"left half filled, neither published nor discarded: {entry!r}")
        entry.pins -= 1
        if entry.pins > 0:
            return
        if entry.state is EntryState.READY:
            self._idle[entry.key] = entry
            self._idle_units += entry.units
            if entry.units > self.idle_limit:
                self.discard(entry)
            while self._idle_units > self.idle_limit:
                self._evict()
        else:
            self._outside.remove(entry)
            self._give_back(entry)

    def clear(self) -> int:
        """Empty the index; entries with pins keep their memory until unpinned.

        Returns how many entries left the index.
        """
        entries = list(self._index.values())
        for entry in entries:
            self.discard(entry)
        return len(entries)

    def _evict(self) -> None:
        """The least recently used of those that may go."""
        _, oldest = self._idle.popitem(last=False)
        self._idle_units -= oldest.units
        del self._index[oldest.key]
        oldest.state = EntryState.DISCARDED
        self._give_back(oldest)
        self.evictions += 1

    def _give_back(self, entry: Entry) -> None:
        self._free += entry.units
        self.memory.give_back(entry.block)
