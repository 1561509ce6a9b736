"""The host pool: one arena of equal slots, and the index that decides who holds them.

`Arena` is memory, `HostPool` is bookkeeping over slot numbers; they do not know each other.
Neither is thread-safe: the agent's loop thread owns both. Copies and sockets work on the
memoryviews that the loop thread handed them, and the entry stays pinned meanwhile.

An entry's life::

    reserve ──▶ FILLING ──publish──▶ READY ──evicted / discard / clear──▶ DISCARDED
                   └───────────discard / clear────────────────────────────────┘

A DISCARDED entry has left the index; its slots become free when its last pin goes, never
before. The pool never holds more than ``slot_count`` slots, whatever is asked of it.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum

from lmcache_redis import numa
from lmcache_redis.madvise import (
    HUGE_PAGE_BYTES,
    PAGE_SIZE_BYTES,
    address_of,
    ask_for_huge_pages,
    fault_in,
)

# While a step runs, nobody else in the process can map or unmap memory: keep it short.
_PREFAULT_STEP_BYTES = HUGE_PAGE_BYTES


class Arena:
    """Anonymous private memory cut into page-aligned slots of one size.

    On a machine of several NUMA nodes it lies on all of them (`numa_nodes`), unless numactl or a
    cpuset says otherwise.

    Args:
        size_bytes: memory to hold; the part that fills no whole slot is not used.
        slot_bytes: usable bytes of a slot. Slots lie ``slot_stride_bytes`` apart, which is
            ``slot_bytes`` rounded up to a page.

    Raises:
        ValueError: not even one slot fits, or a size is not positive.
        OSError: the address space cannot be had.
    """

    def __init__(self, size_bytes: int, slot_bytes: int) -> None:
        if slot_bytes <= 0:
            raise ValueError(f"slot_bytes is {slot_bytes}; it must be positive")
        self.slot_bytes = slot_bytes
        self.slot_stride_bytes = -(-slot_bytes // PAGE_SIZE_BYTES) * PAGE_SIZE_BYTES
        self.slot_count = size_bytes // self.slot_stride_bytes
        if self.slot_count <= 0:
            raise ValueError(
                f"an arena of {size_bytes} bytes holds no slot of {slot_bytes} bytes "
                f"(a slot takes {self.slot_stride_bytes})"
            )
        self.size_bytes = self.slot_count * self.slot_stride_bytes
        # Huge pages need 2 MiB alignment; the slack is address space that nothing touches.
        mapped = mmap.mmap(
            -1, self.size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self._mmap: mmap.mmap | None = mapped
        address = address_of(mapped)
        start = -address % HUGE_PAGE_BYTES
        self.base_address = address + start
        self.huge_pages = ask_for_huge_pages(self.base_address, self.size_bytes)
        self.numa_nodes = numa.spread(self.base_address, self.size_bytes)
        self._view = memoryview(mapped)[start : start + self.size_bytes]

    def prefault(self, stop: threading.Event) -> bool:
        """Fault all of it in, so that first use costs no page faults. The GIL is free.

        Contents stay, and slots may be in use meanwhile. After each step it rests for as long as
        that took: so it gives way to others where cores are short. (A low priority would not do:
        a thread that gets no core keeps what it holds, the GIL or the kernel's lock of the address
        space, from threads that have one.) Returns whether all of it is present: False when
        ``stop`` was set, or on a kernel before 5.14, which cannot do this safely (the arena then
        works all the same and is faulted in by its use).

        Raises:
            MemoryError: the machine does not have that much memory.
        """
        for offset in range(0, self.size_bytes, _PREFAULT_STEP_BYTES):
            started_s = time.monotonic()
            nbytes = min(_PREFAULT_STEP_BYTES, self.size_bytes - offset)
            if stop.is_set() or not fault_in(self.base_address + offset, nbytes, for_write=True):
                return False
            stop.wait(time.monotonic() - started_s)
        return True

    def slot_view(self, index: int, nbytes: int) -> memoryview:
        """The first ``nbytes`` of slot ``index``, writable, of exactly that length.

        Raises:
            IndexError: no such slot, or more bytes than a slot has.
        """
        if not 0 <= index < self.slot_count:
            raise IndexError(f"slot {index} of {self.slot_count}")
        if not 0 <= nbytes <= self.slot_bytes:
            raise IndexError(f"{nbytes} bytes of a slot of {self.slot_bytes}")
        start = index * self.slot_stride_bytes
        return self._view[start : start + nbytes]

    def close(self) -> None:
        """Give the memory back: at once, or when the last view that is out is gone. Idempotent."""
        self._view.release()
        mapped, self._mmap = self._mmap, None
        if mapped is not None:
            # While views are out the mapping lives in them, and goes with the last of them.
            with contextlib.suppress(BufferError):
                mapped.close()


class EntryState(Enum):
    """Where an entry stands; see the module's picture."""

    FILLING = "filling"
    READY = "ready"
    DISCARDED = "discarded"


class Entry:
    """One chunk in the pool. Only `HostPool` changes it; ``persisted`` is the agent's note.

    Attributes:
        slots: one slot for each stripe, in stripe order.
        pins: holders; an entry with pins is never evicted and its slots are never reused.
        persisted: the chunk is known to be in Redis.
    """

    __slots__ = ("key", "persisted", "pins", "slots", "state")

    def __init__(self, key: bytes, slots: tuple[int, ...]) -> None:
        self.key = key
        self.slots = slots
        self.pins = 1
        self.state = EntryState.FILLING
        self.persisted = False

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

    def audit(self) -> None:
        """Check every invariant; for tests and idle moments (linear in the slots).

        Raises:
            RuntimeError: the books do not balance; says which.
        """
        entries = [*self._index.values(), *self._leaving]
        held = [slot for entry in entries for slot in entry.slots] + self._free
        if sorted(held) != list(range(self.slot_count)):
            raise RuntimeError("a slot is lost or held twice")
        for key, entry in self._index.items():
            idle = entry.pins == 0
            if entry.key != key or entry.state is EntryState.DISCARDED or entry.pins < 0:
                raise RuntimeError(f"should not be in the index: {entry!r}")
            if idle and entry.state is not EntryState.READY:
                raise RuntimeError(f"unpinned but not ready: {entry!r}")
            if idle is not (self._idle.get(key) is entry):
                raise RuntimeError(f"pins and the eviction order disagree: {entry!r}")
        for entry in self._leaving:
            if entry.state is not EntryState.DISCARDED or entry.pins <= 0:
                raise RuntimeError(f"should not be leaving: {entry!r}")
        if not self._idle.keys() <= self._index.keys():
            raise RuntimeError("the eviction order names keys that are not in the index")
        if self._idle_slots != sum(len(entry.slots) for entry in self._idle.values()):
            raise RuntimeError("the count of evictable slots is wrong")
