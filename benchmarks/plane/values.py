# SPDX-License-Identifier: Apache-2.0
"""The memory that chunks are stored from and loaded into, and its check."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from lmcache_redis.chunks.cutting import stripe_payload_bytes
from lmcache_redis.errors import RedisUnavailable

PAGE_BYTES = 4096
_STAMPS_A_PAGE = PAGE_BYTES // 8


class Values:
    """Values of one size, each cut into page-aligned slots, with a stamp on every page.

    slots: the memory of each value, in order. slot_bytes: the maximum size of a slot.
    """

    def __init__(self, memory: memoryview, value_bytes: int, items: int, slot_bytes: int) -> None:
        self.value_bytes = value_bytes
        self.slots: list[list[memoryview]] = []
        stripe_bytes = stripe_payload_bytes(value_bytes, slot_bytes)
        at = 0
        for _ in range(items):
            slots = []
            for offset in range(0, value_bytes, stripe_bytes):
                nbytes = min(stripe_bytes, value_bytes - offset)
                slots.append(memory[at : at + nbytes])
                at += -(-nbytes // PAGE_BYTES) * PAGE_BYTES
            self.slots.append(slots)

    @property
    def gigabytes(self) -> float:
        return len(self.slots) * self.value_bytes / 1e9

    def stamp(self) -> None:
        """Writes a unique stamp to every page."""
        for number, stamps in enumerate(self._stamps()):
            stamps[:] = _expected(number, len(stamps))

    def wipe(self) -> None:
        """Removes the stamps: a load has to bring them back."""
        for stamps in self._stamps():
            stamps[:] = 0

    def check(self) -> None:
        """Raises RedisUnavailable unless every page has its stamp."""
        for number, stamps in enumerate(self._stamps()):
            if not np.array_equal(stamps, _expected(number, len(stamps))):
                raise RedisUnavailable(f"slot {number} does not hold what was stored from it")

    def _stamps(self) -> list[np.ndarray[tuple[int], np.dtype[np.uint64]]]:
        return [
            np.frombuffer(slot, np.uint64)[::_STAMPS_A_PAGE]
            for slots in self.slots
            for slot in slots
        ]


def _expected(slot: int, pages: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.arange(pages, dtype=np.uint64) + np.uint64((slot + 1) << 32)


class Arena:
    """Private memory for values, in huge pages if the kernel has them, as the host pool.

    moved_bytes: the maximum total of the values. The memory is released with its last view.
    """

    def __init__(self, moved_bytes: int) -> None:
        self.moved_bytes = moved_bytes
        # Twice the size: slots are page-aligned, so small slots may leave up to half unused.
        mapped = mmap.mmap(-1, 2 * moved_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memoryview(mapped)
        self._current: tuple[tuple[int, int, int], Values] | None = None

    def values(self, value_bytes: int, items: int, slot_bytes: int) -> Values:
        """``items`` values, cut into slots of at most ``slot_bytes``, every page stamped.

        Overwrites the values made before, unless they are the same. value_bytes: a multiple of
        the page size.
        """
        shape = (value_bytes, items, slot_bytes)
        if self._current is None or self._current[0] != shape:
            values = Values(self._memory, *shape)
            values.stamp()
            self._current = (shape, values)
        return self._current[1]
