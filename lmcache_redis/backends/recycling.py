"""Memory for payloads that is used again, so that a put does not pay for fresh pages.

The kernel clears every page of fresh memory at its first touch, which takes longer than the copy
that goes into it. So memory that nobody uses any more is kept for the next payload of about its
size, up to a number of bytes.

Nobody gives a block back. Its memory returns by itself when the last reference to it is gone,
that of a slice or of a memoryview included: whoever still reads it never sees the bytes of the
next. One that is forgotten somewhere is a block that is not used again, and nothing worse.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque

import numpy as np

from lmcache_redis.backends.copying import Block

# What is smaller comes from the allocator, which has warm memory of that size.
LEAST_BYTES = 64 << 10
_SIZES_TO_A_DOUBLING = 8


class Blocks:
    """Thread-safe. spare_bytes: most memory that is kept while nobody uses it."""

    def __init__(self, spare_bytes: int) -> None:
        self._spare_bytes = spare_bytes
        self._lock = threading.Lock()
        # By size; the size that was wanted or given back last is at the end.
        self._free: OrderedDict[int, list[Block]] = OrderedDict()
        self._returned: deque[Block] = deque()
        self._free_bytes = self._taken_bytes = 0

    @property
    def taken_bytes(self) -> int:
        """Memory of the blocks that somebody refers to; small ones are not counted."""
        return self._taken_bytes

    @property
    def free_bytes(self) -> int:
        """Memory that is kept for later."""
        return self._free_bytes

    def take(self, nbytes: int) -> Block:
        """So many writable bytes, with anything in them. Raises MemoryError."""
        if nbytes < LEAST_BYTES:
            return np.empty(nbytes, np.uint8)
        size = _size_for(nbytes)
        memory = self._reused(size)
        if memory is None:
            memory = np.empty(size, np.uint8)
        with self._lock:
            self._taken_bytes += size
        # Made from a memoryview: numpy's own slices of it refer to it, not to what is behind it.
        block: Block = np.frombuffer(memory.data[:nbytes], np.uint8)
        weakref.finalize(block, self._give_back, memory).atexit = False
        self._settle()
        return block

    def close(self) -> None:
        """Keep nothing from now on."""
        with self._lock:
            self._spare_bytes = 0
            dropped = self._trim()
        del dropped
        self._settle()

    def _reused(self, size: int) -> Block | None:
        with self._lock:
            found = self._free.get(size)
            if not found:
                return None
            self._free.move_to_end(size)
            self._free_bytes -= size
            return found.pop()

    def _give_back(self, memory: Block) -> None:
        """Called when a block is gone: on any thread, at any moment, also within `take`."""
        self._returned.append(memory)
        self._settle()

    def _settle(self) -> None:
        """Take in what was given back. Never waits: this thread may be the one in the lock.

        Whoever had the lock comes here after it, and finds what others had to leave.
        """
        while self._returned and self._lock.acquire(blocking=False):
            try:
                while self._returned:
                    memory = self._returned.popleft()
                    self._taken_bytes -= memory.nbytes
                    self._free_bytes += memory.nbytes
                    self._free.setdefault(memory.nbytes, []).append(memory)
                    self._free.move_to_end(memory.nbytes)
                dropped = self._trim()
            finally:
                self._lock.release()
            # Unmapped outside of the lock.
            del memory, dropped

    def _trim(self) -> list[Block]:
        """What is over the limit, of the sizes that were used longest ago."""
        dropped: list[Block] = []
        while self._free_bytes > self._spare_bytes:
            size, found = next(iter(self._free.items()))
            if found:
                dropped.append(found.pop())
                self._free_bytes -= size
            else:
                del self._free[size]
        return dropped


def _size_for(nbytes: int) -> int:
    """The next of few sizes: memory of one payload fits others of about its length."""
    step = (1 << (nbytes - 1).bit_length()) // (2 * _SIZES_TO_A_DOUBLING)
    return -(-nbytes // step) * step
