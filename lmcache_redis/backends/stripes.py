"""A chunk's payload in buffers of any sizes, seen as one slot for each stripe."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from lmcache_redis.backends import copying
from lmcache_redis.stripe import ChunkFrame


class StripeSlots:
    """A slot is a slice of a buffer where the stripe lies within one, as with tensors all do.
    Otherwise it has memory of its own, which is copied from the buffers or to them.

    views: bytes, none of them empty, together as long as the chunk.
    """

    def __init__(self, views: Sequence[memoryview], frame: ChunkFrame) -> None:
        self.slots: list[memoryview] = []
        self._copies: list[tuple[copying.Block, list[memoryview]]] = []
        rest = deque(views)
        for index in range(frame.stripe_count):
            parts = _take(rest, frame.payload_bytes(index))
            if len(parts) > 1:
                block: copying.Block = np.empty(frame.payload_bytes(index), np.uint8)
                self._copies.append((block, parts))
                parts = [block.data]
            self.slots += parts

    def gather(self) -> None:
        """Before a write: copy from the buffers."""
        for block, parts in self._copies:
            copying.gather(parts, block)

    def scatter(self) -> None:
        """After a read: copy to the buffers."""
        for block, parts in self._copies:
            copying.scatter(block, parts)


def _take(rest: deque[memoryview], nbytes: int) -> list[memoryview]:
    """Take the parts of the buffers that are the next bytes."""
    parts: list[memoryview] = []
    while nbytes:
        view = rest.popleft()
        if len(view) > nbytes:
            rest.appendleft(view[nbytes:])
        parts.append(view[:nbytes])
        nbytes -= len(parts[-1])
    return parts
