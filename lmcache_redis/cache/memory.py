"""The memory of a host pool: one arena of equal slots, spread over NUMA nodes and faulted in.

An `Arena` knows nothing of chunks. `HostPool` decides who holds which slot.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time

from lmcache_redis.cache import numa
from lmcache_redis.native.madvise import (
    HUGE_PAGE_BYTES,
    PAGE_SIZE_BYTES,
    address_of,
    ask_for_huge_pages,
    fault_in,
)

# A step keeps every other thread of the process from mapping memory: keep it short.
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
