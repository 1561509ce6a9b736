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

import contextlib
import mmap
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from lmcache_redis.chunks.names import ChunkForm
from lmcache_redis.native import numa
from lmcache_redis.native.madvise import (
    HUGE_PAGE_BYTES,
    PAGE_SIZE_BYTES,
    address_of,
    ask_for_huge_pages,
    fault_in,
)

# Faulting in takes this share of a core; this share of all cores while requests run, except for
# the memory that the next of them will use.
_SHARE = 0.5
_BUSY_SHARE = 0.025
_NEAR_BYTES = 16 << 20


class PoolMemory(Protocol):
    """Where a pool keeps payloads. A unit is the smallest amount that the memory allocates.

    capacity: in units.
    """

    capacity: int

    def units(self, chunk_bytes: int, stripe_bytes: int) -> int:
        """The units that a chunk takes if it is split into stripes of that size."""

    def take(self, units: int) -> Any:
        """A block with undefined contents. Raises MemoryError."""

    def give_back(self, block: Any) -> None:
        """Free a block, whose views are no longer used."""

    def views(self, block: Any, chunk_bytes: int, stripe_bytes: int) -> list[memoryview]:
        """The chunk's stripes in its block, each a writable view of exactly its bytes."""


class Arena:
    """Anonymous private memory cut into page-aligned slots of one size. A unit is a slot.

    A block is a tuple of slot numbers. A slot has one stripe, or as many as fit (shares are small).
    `take` and `give_back` are for one thread.
    The arena is spread over all NUMA nodes (`numa_nodes`), unless numactl or a cpuset says
    otherwise. slot_bytes: usable; the stride is rounded up to a page. Raises ValueError if not even
    one slot fits, and OSError if the address space cannot be allocated.
    """

    def __init__(self, size_bytes: int, slot_bytes: int) -> None:
        if slot_bytes <= 0:
            raise ValueError(f"slot_bytes is {slot_bytes}; it must be positive")
        self.slot_bytes = slot_bytes
        self.slot_stride_bytes = -(-slot_bytes // PAGE_SIZE_BYTES) * PAGE_SIZE_BYTES
        self.capacity = size_bytes // self.slot_stride_bytes
        if self.capacity <= 0:
            raise ValueError(
                f"an arena of {size_bytes} bytes holds no slot of {slot_bytes} bytes "
                f"(a slot takes {self.slot_stride_bytes})"
            )
        self.size_bytes = self.capacity * self.slot_stride_bytes
        # Huge pages need 2 MiB alignment; the slack is address space that is never touched.
        self._mmap = mapped = mmap.mmap(
            -1, self.size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        # A stack: the slot used last, whose memory is the warmest, is taken first. It comes after
        # the mapping, which fails at once for a size whose list would take minutes.
        self._free = list(range(self.capacity - 1, -1, -1))
        address = address_of(mapped)
        start = -address % HUGE_PAGE_BYTES
        self.base_address = address + start
        ask_for_huge_pages(self.base_address, self.size_bytes)
        self.numa_nodes = numa.spread(self.base_address, self.size_bytes)
        self.prefaulted_bytes = 0  # from the start on; all when `prefault` has ended, however
        self._view = memoryview(mapped)[start : start + self.size_bytes]

    def prefault(self, stop: threading.Event, is_busy: Callable[[], bool] = lambda: False) -> bool:
        """Fault in the whole arena, so that first use causes no page faults. Releases the GIL.

        Contents are kept. A step blocks threads that map memory; after each it pauses, for as long.
        (A low priority would be worse: a thread without a core keeps the kernel's lock.) While
        ``is_busy``, what lies far ahead of use takes `_BUSY_SHARE` of the cores: an engine may
        compute on them. False: ``stop`` was set, or the kernel is older than 5.14. Raises
        MemoryError.
        """
        busy_share = min(_SHARE, _BUSY_SHARE * len(os.sched_getaffinity(0)))
        try:
            for offset in range(0, self.size_bytes, HUGE_PAGE_BYTES):
                started_s = time.monotonic()
                step = self.base_address + offset
                nbytes = min(HUGE_PAGE_BYTES, self.size_bytes - offset)
                if stop.is_set() or not fault_in(step, nbytes, for_write=True):
                    return False
                self.prefaulted_bytes = offset + nbytes
                used_bytes = (self.capacity - len(self._free)) * self.slot_stride_bytes
                is_far = self.prefaulted_bytes > used_bytes + _NEAR_BYTES
                share = busy_share if is_far and is_busy() else _SHARE
                stop.wait((time.monotonic() - started_s) * (1 / share - 1))
            return True
        finally:
            self.prefaulted_bytes = self.size_bytes

    def units(self, chunk_bytes: int, stripe_bytes: int) -> int:
        return -(-chunk_bytes // (self._per_slot(stripe_bytes) * stripe_bytes))

    def _per_slot(self, stripe_bytes: int) -> int:
        return max(1, self.slot_bytes // stripe_bytes)

    def take(self, units: int) -> tuple[int, ...]:
        block = tuple(self._free[: -units - 1 : -1])
        del self._free[-units:]
        return block

    def give_back(self, block: tuple[int, ...]) -> None:
        self._free.extend(block)

    def views(
        self, block: tuple[int, ...], chunk_bytes: int, stripe_bytes: int
    ) -> list[memoryview]:
        if stripe_bytes > self.slot_bytes:
            raise IndexError(f"stripes of {stripe_bytes} bytes in slots of {self.slot_bytes}")
        memory, stride = self._view, self.slot_stride_bytes
        in_slot = [number * stripe_bytes for number in range(self._per_slot(stripe_bytes))]
        places = [slot * stride + at for slot in block for at in in_slot]
        stripes = -(-chunk_bytes // stripe_bytes)
        views = [memory[at : at + stripe_bytes] for at in places[:stripes]]
        views[-1] = views[-1][: chunk_bytes - (stripes - 1) * stripe_bytes]
        return views

    def close(self) -> None:
        """Release the memory, at once or when its last view is gone. Idempotent."""
        self._view.release()
        # Views keep the mapping alive; the last one releases it.
        with contextlib.suppress(BufferError):
            self._mmap.close()


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
            raise RuntimeError(f"an entry of {units} units")
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
