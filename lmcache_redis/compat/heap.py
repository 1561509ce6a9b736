"""Memory of a host pool for chunks of any size: one block each (`lmcache_redis.cache.pool`)."""

from __future__ import annotations

import sys
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

# Smaller blocks come from the allocator, which has warm memory of their size.
LEAST_REUSED_BYTES = 64 << 10
DEFAULT_SPARE_BYTES = 128 << 20
_SIZES_TO_A_DOUBLING = 8


class HeapMemory:
    """One block of memory per chunk, of exactly its size. A unit is a byte. Not thread-safe.

    The kernel zeroes each fresh page at its first touch, which takes longer than the copy into it.
    So freed blocks are kept as spares for later chunks of about their size (at most an eighth
    smaller). Beyond the limit, spares of the least recently used sizes are freed.

    capacity_bytes: payload of all blocks together. spare_bytes: limit of all spares.
    """

    def __init__(
        self, capacity_bytes: int = sys.maxsize, spare_bytes: int = DEFAULT_SPARE_BYTES
    ) -> None:
        self.capacity = capacity_bytes
        self.spare_limit_bytes = spare_bytes
        self.spare_bytes = 0
        # By size; the most recently used size is at the end.
        self._spare: OrderedDict[int, list[npt.NDArray[np.uint8]]] = OrderedDict()

    def units(self, chunk_bytes: int, stripe_bytes: int) -> int:
        return chunk_bytes

    def take(self, units: int) -> memoryview:
        """See `PoolMemory`. A block is a view of its bytes."""
        if units < LEAST_REUSED_BYTES:
            return np.empty(units, np.uint8).data
        size = _size_for(units)
        spare = self._spare.get(size)
        if not spare:
            return np.empty(size, np.uint8).data[:units]
        self._spare.move_to_end(size)
        self.spare_bytes -= size
        return spare.pop().data[:units]

    def give_back(self, block: memoryview) -> None:
        array = block.obj
        assert isinstance(array, np.ndarray)
        size = array.nbytes
        if size < LEAST_REUSED_BYTES:
            return
        self._spare.setdefault(size, []).append(array)
        self._spare.move_to_end(size)
        self.spare_bytes += size
        self._trim()

    def views(self, block: memoryview, chunk_bytes: int, stripe_bytes: int) -> list[memoryview]:
        """See `PoolMemory`. The views are contiguous: one stripe per chunk gives one view."""
        starts = range(0, chunk_bytes, stripe_bytes)
        return [block[start : min(start + stripe_bytes, chunk_bytes)] for start in starts]

    def close(self) -> None:
        """Free all spares, and keep none from now on."""
        self.spare_limit_bytes = 0
        self._trim()

    def _trim(self) -> None:
        """Free spares over the limit, least recently used sizes first."""
        while self.spare_bytes > self.spare_limit_bytes:
            oldest, arrays = next(iter(self._spare.items()))
            if arrays:
                arrays.pop()
                self.spare_bytes -= oldest
            else:
                del self._spare[oldest]


def _size_for(nbytes: int) -> int:
    """Round up to one of few sizes, so that a spare fits chunks of about the same length."""
    step = (1 << (nbytes - 1).bit_length()) // (2 * _SIZES_TO_A_DOUBLING)
    return -(-nbytes // step) * step
