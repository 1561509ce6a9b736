"""The memory of a host pool. `HostPool` decides which chunk holds which block.

`Arena` is for chunks of few sizes, known at the start: equal slots, spread over NUMA nodes and
faulted in early. `compat.heap` is for chunks of any size.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from typing import Any, Protocol

from lmcache_redis.native import numa
from lmcache_redis.native.madvise import (
    HUGE_PAGE_BYTES,
    PAGE_SIZE_BYTES,
    address_of,
    ask_for_huge_pages,
    fault_in,
)

# A step blocks threads that map memory, by the lock of the address space: keep it short.
_PREFAULT_STEP_BYTES = HUGE_PAGE_BYTES


class PoolMemory(Protocol):
    """Where a pool keeps payloads. A unit is the smallest amount that the memory allocates."""

    @property
    def capacity(self) -> int:
        """Units of all blocks together."""

    def units(self, chunk_bytes: int, stripe_bytes: int) -> int:
        """The units that a chunk takes if it is split into stripes of that size."""

    def take(self, units: int) -> Any:
        """A block with undefined contents. Raises MemoryError.

        All blocks taken at one time have at most `capacity` units.
        """

    def give_back(self, block: Any) -> None:
        """Free a block, whose views are no longer used."""

    def views(self, block: Any, chunk_bytes: int, stripe_bytes: int) -> list[memoryview]:
        """The chunk's stripes in its block, each a writable view of exactly its bytes."""


class Arena:
    """Anonymous private memory cut into page-aligned slots of one size. A unit is a slot.

    A block is a tuple of slot numbers, one per stripe. `take` and `give_back` are for one thread;
    any thread may call the other methods.

    On a machine with several NUMA nodes the arena is spread over all of them (`numa_nodes`), unless
    numactl or a cpuset says otherwise.

    size_bytes: memory to allocate; a remainder smaller than a slot is not used. slot_bytes: usable
    bytes of a slot. Slots are ``slot_stride_bytes`` apart, which is ``slot_bytes`` rounded up to a
    page. Raises ValueError if not even one slot fits, or a size is not positive, and OSError if the
    address space cannot be allocated.
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
        # A stack: the slot used last, whose memory is the warmest, is taken first.
        self._free = list(range(self.capacity - 1, -1, -1))
        # Huge pages need 2 MiB alignment; the slack is address space that is never touched.
        mapped = mmap.mmap(
            -1, self.size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self._mmap: mmap.mmap | None = mapped
        address = address_of(mapped)
        start = -address % HUGE_PAGE_BYTES
        self.base_address = address + start
        ask_for_huge_pages(self.base_address, self.size_bytes)
        self.numa_nodes = numa.spread(self.base_address, self.size_bytes)
        self.prefaulted_bytes = 0  # from the start on; all when `prefault` has ended, however
        self._view = memoryview(mapped)[start : start + self.size_bytes]

    def prefault(self, stop: threading.Event) -> bool:
        """Fault in the whole arena, so that first use causes no page faults. Releases the GIL.

        Contents are kept, and slots may be in use meanwhile. After each step it pauses for as long
        as the step took, so that other threads get the cores. (A low priority would be worse: a
        thread without a core keeps the GIL or the kernel's lock of the address space from threads
        that have one.) Returns whether the whole arena is present: False if ``stop`` was set, or on
        a kernel before 5.14, which cannot do this safely (the arena is then faulted in by use).
        Raises MemoryError if the machine does not have enough memory.
        """
        try:
            for offset in range(0, self.size_bytes, _PREFAULT_STEP_BYTES):
                started_s = time.monotonic()
                step = self.base_address + offset
                nbytes = min(_PREFAULT_STEP_BYTES, self.size_bytes - offset)
                if stop.is_set() or not fault_in(step, nbytes, for_write=True):
                    return False
                self.prefaulted_bytes = offset + nbytes
                stop.wait(time.monotonic() - started_s)
            return True
        finally:
            self.prefaulted_bytes = self.size_bytes

    def units(self, chunk_bytes: int, stripe_bytes: int) -> int:
        """See `PoolMemory`. One slot per stripe."""
        return -(-chunk_bytes // stripe_bytes)

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
        views = [memory[at : at + stripe_bytes] for at in [slot * stride for slot in block]]
        views[-1] = views[-1][: chunk_bytes - (len(block) - 1) * stripe_bytes]
        return views

    def close(self) -> None:
        """Release the memory, at once or when its last view is gone. Idempotent."""
        self._view.release()
        mapped, self._mmap = self._mmap, None
        if mapped is not None:
            # Views keep the mapping alive; the last one releases it.
            with contextlib.suppress(BufferError):
                mapped.close()
