# SPDX-License-Identifier: Apache-2.0
"""The memory of the host pool: pages of this process, in slots of one size."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Protocol

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

    def units(self, sizes: Sequence[int]) -> int:
        """The units that a chunk takes whose stripes have these sizes."""

    def take(self, units: int) -> Any:
        """A block with undefined contents. Raises MemoryError."""

    def give_back(self, block: Any) -> None:
        """Free a block, whose views are no longer used."""

    def views(self, block: Any, sizes: Sequence[int]) -> list[memoryview]:
        """The chunk's stripes in its block, each a writable view of exactly its bytes."""


class Arena:
    """Anonymous private memory cut into page-aligned slots of one size. A unit is a slot.

    A block is a tuple of slot numbers. A slot has one stripe, or several small ones.
    `take` and `give_back` are for one thread. The arena is spread over all NUMA nodes
    (`numa_nodes`), unless numactl or a cpuset says otherwise. slot_bytes: usable; the stride is
    rounded up to a page. Raises ValueError if not even one slot fits, and OSError if the address
    space cannot be allocated.
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

    def units(self, sizes: Sequence[int]) -> int:
        return _placed(tuple(sizes), self.slot_bytes)[0]

    def take(self, units: int) -> tuple[int, ...]:
        block = tuple(self._free[: -units - 1 : -1])
        del self._free[-units:]
        return block

    def give_back(self, block: tuple[int, ...]) -> None:
        self._free.extend(block)

    def views(self, block: tuple[int, ...], sizes: Sequence[int]) -> list[memoryview]:
        memory, stride = self._view, self.slot_stride_bytes
        places = _placed(tuple(sizes), self.slot_bytes)[1]
        starts = [block[slot] * stride + at for slot, at in places]
        return [memory[at : at + size] for at, size in zip(starts, sizes, strict=True)]

    def close(self) -> None:
        """Release the memory, at once or when its last view is gone. Idempotent."""
        self._view.release()
        # Views keep the mapping alive; the last one releases it.
        with contextlib.suppress(BufferError):
            self._mmap.close()


@functools.lru_cache(maxsize=256)
def _placed(sizes: tuple[int, ...], slot_bytes: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """How many slots stripes of these sizes take; for each its slot, and where it begins there.

    The largest are placed first, each into the first slot where it fits. Raises IndexError if one
    is larger than a slot.
    """
    used: list[int] = []  # of each slot, in bytes
    places: dict[int, tuple[int, int]] = {}
    largest_first = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    for size, stripes in groupby(largest_first, sizes.__getitem__):
        if size > slot_bytes:
            raise IndexError(f"a stripe of {size} bytes in slots of {slot_bytes}")
        slot = 0
        for stripe in stripes:
            while slot < len(used) and used[slot] + size > slot_bytes:
                slot += 1
            if slot == len(used):
                used.append(0)
            places[stripe] = slot, used[slot]
            used[slot] += size
    return len(used), tuple(places[stripe] for stripe in range(len(sizes)))
