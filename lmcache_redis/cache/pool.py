"""The host pool: the index that decides which chunk holds which slots.

Bookkeeping over slot numbers, without the memory (`Arena`). Not thread-safe: the cache's owner
thread owns it. Copies and sockets work on the memoryviews that the owner handed them, and the entry
stays pinned meanwhile.

An entry's life::

    reserve ──▶ FILLING ──publish──▶ READY ──evicted / discard / clear──▶ DISCARDED
                   └───────────discard / clear────────────────────────────────┘

A DISCARDED entry has left the index; its slots become free when its last pin goes, never
before. The pool never holds more than ``slot_count`` slots, whatever is asked of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum


class EntryState(Enum):
    """Where an entry stands; see the module's picture."""

    FILLING = "filling"
    READY = "ready"
    DISCARDED = "discarded"


class Entry:
    """One chunk in the pool. Only `HostPool` changes it; ``stored_in`` is the cache's note.

    Attributes:
        slots: one slot for each stripe, in stripe order.
        pins: holders; an entry with pins is never evicted and its slots are never reused.
        stored_in: bit n is set where the chunk is known to be in tier n of the cache.
    """

    __slots__ = ("key", "pins", "slots", "state", "stored_in")

    def __init__(self, key: bytes, slots: tuple[int, ...]) -> None:
        self.key = key
        self.slots = slots
        self.pins = 1
        self.state = EntryState.FILLING
        self.stored_in = 0

    def __repr__(self) -> str:
        return f"Entry({self.key.hex()}, {self.state.value}, slots={self.slots}, pins={self.pins})"


class HostPool:
    """Which chunk holds which slots: pins, least-recently-used eviction, a hard limit.

    An entry is used, and so most recent, when it is got, and when its last pin goes.
    Misuse (unpin without pin, publish twice, reserve a key that is there) raises
    RuntimeError and changes nothing: it is a bug of the caller.
    """

    def __init__(self, slot_count: int) -> None:
        if slot_count <= 0:
            raise ValueError(f"slot_count is {slot_count}; it must be positive")
        self.slot_count = slot_count
        self.evictions = 0
        self._free = list(range(slot_count - 1, -1, -1))  # a stack: the warmest slot goes first
        self._index: dict[bytes, Entry] = {}
        self._idle: OrderedDict[bytes, Entry] = OrderedDict()  # READY, unpinned; oldest first
        self._idle_slots = 0
        self._leaving: set[Entry] = set()  # DISCARDED, still pinned

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def used_slots(self) -> int:
        return self.slot_count - len(self._free)

    @property
    def pinned_slots(self) -> int:
        return self.used_slots - self._idle_slots

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

    def reserve(self, key: bytes, n_slots: int) -> Entry | None:
        """A new FILLING entry with ``n_slots`` slots and one pin, or None if that cannot be.

        Evicts as many of the least recently used unpinned READY entries as it needs; where
        even all of them would not do, it evicts none.
        """
        if n_slots <= 0:
            raise RuntimeError(f"an entry of {n_slots} slots")
        if key in self._index:
            raise RuntimeError(f"reserved twice: {self._index[key]!r}")
        if n_slots > len(self._free) + self._idle_slots:
            return None
        while len(self._free) < n_slots:
            _, oldest = self._idle.popitem(last=False)
            self._idle_slots -= len(oldest.slots)
            del self._index[oldest.key]
            oldest.state = EntryState.DISCARDED
            self._free.extend(oldest.slots)
            self.evictions += 1
        entry = Entry(key, tuple(self._free.pop() for _ in range(n_slots)))
        self._index[key] = entry
        return entry

    def publish(self, entry: Entry) -> bool:
        """FILLING to READY; the pin stays. False if it was discarded while it was filled."""
        if entry.state is EntryState.DISCARDED and entry.pins > 0:
            return False
        if entry.state is not EntryState.FILLING:
            raise RuntimeError(f"published in the wrong state: {entry!r}")
        entry.state = EntryState.READY
        return True

    def discard(self, entry: Entry) -> None:
        """Take it out of the index now; its slots become free with its last pin.

        Discarding again is allowed: two who find the same fault need not agree who is first.
        """
        if entry.state is EntryState.DISCARDED:
            return
        del self._index[entry.key]
        entry.state = EntryState.DISCARDED
        if entry.pins > 0:
            self._leaving.add(entry)
            return
        del self._idle[entry.key]
        self._idle_slots -= len(entry.slots)
        self._free.extend(entry.slots)

    def pin(self, entry: Entry) -> None:
        """One more holder. A DISCARDED entry may be pinned by those who hold it already."""
        if entry.pins == 0:
            if entry.state is not EntryState.READY:
                raise RuntimeError(f"pinned after it had left: {entry!r}")
            del self._idle[entry.key]
            self._idle_slots -= len(entry.slots)
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
            self._idle_slots += len(entry.slots)
        else:
            self._leaving.remove(entry)
            self._free.extend(entry.slots)

    def clear(self) -> int:
        """Empty the index; entries with pins keep their slots until unpinned.

        Returns how many entries left the index.
        """
        entries = list(self._index.values())
        for entry in entries:
            self.discard(entry)
        return len(entries)
