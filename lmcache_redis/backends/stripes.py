"""A chunk's payload in buffers of any sizes, as one slot per stripe."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from lmcache_redis.backends import copying
from lmcache_redis.stripe import ChunkFrame


class StripeSlots:
    """One slot per stripe: a slice of a buffer if the stripe lies within one, as always for a
    tensor. Otherwise the slot has memory of its own, copied from or to the buffers.

    views: of bytes, none of them empty, in total as long as the chunk.
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
    """Take the next `nbytes` from the buffers, as one or more parts."""
    parts: list[memoryview] = []
    while nbytes:
        view = rest.popleft()
        if len(view) > nbytes:
            rest.appendleft(view[nbytes:])
        parts.append(view[:nbytes])
        nbytes -= len(parts[-1])
    return parts
