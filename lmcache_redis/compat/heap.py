"""Memory of a host pool for chunks of any size: one block each (`lmcache_redis.cache.pool`)."""

from __future__ import annotations

import sys
from collections import deque

import numpy as np
import numpy.typing as npt

# Smaller blocks come from the allocator, which has warm memory of their size.
LEAST_REUSED_BYTES = 64 << 10
DEFAULT_SPARE_BYTES = 128 << 20


class HeapMemory:
    """One block of memory per chunk, of exactly its size. A unit is a byte. Not thread-safe.

    The kernel zeroes each fresh page at its first touch, which takes longer than the copy into it.
    So freed blocks are kept as spares for later chunks of their size.

    capacity_bytes: payload of all blocks together. spare_bytes: limit of all spares.
    """

    def __init__(
        self, capacity_bytes: int = sys.maxsize, spare_bytes: int = DEFAULT_SPARE_BYTES
    ) -> None:
        self.capacity = capacity_bytes
        self.spare_limit_bytes = spare_bytes
        self.spare_bytes = 0
        self._spares: deque[npt.NDArray[np.uint8]] = deque()  # the last freed at the end

    def units(self, chunk_bytes: int, stripe_bytes: int) -> int:
        return chunk_bytes

    def take(self, units: int) -> memoryview:
        """See `PoolMemory`. A block is a view of its bytes."""
        for place in range(len(self._spares) - 1, -1, -1):
            if self._spares[place].nbytes == units:
                array = self._spares[place]
                del self._spares[place]
                self.spare_bytes -= units
                return array.data
        return np.empty(units, np.uint8).data

    def give_back(self, block: memoryview) -> None:
        if block.nbytes < LEAST_REUSED_BYTES:
            return
        assert isinstance(block.obj, np.ndarray)
        self._spares.append(block.obj)
        self.spare_bytes += block.nbytes
        while self.spare_bytes > self.spare_limit_bytes:
            self.spare_bytes -= self._spares.popleft().nbytes

    def views(self, block: memoryview, chunk_bytes: int, stripe_bytes: int) -> list[memoryview]:
        """See `PoolMemory`. The views are contiguous: one stripe per chunk gives one view."""
        starts = range(0, chunk_bytes, stripe_bytes)
        return [block[start : min(start + stripe_bytes, chunk_bytes)] for start in starts]

    def close(self) -> None:
        """Free all spares, and keep none from now on."""
        self.spare_limit_bytes = self.spare_bytes = 0
        self._spares.clear()
