"""A chunk's payload in buffers of any sizes, seen as one slot for each stripe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lmcache_redis.backends import copying
from lmcache_redis.stripe import ChunkFrame


class StripeSlots:
    """A stripe that lies within one buffer is a slice of it; one that lies across several has
    memory of its own. With one buffer, as every tensor is, nothing is copied.

    views: bytes, none of them empty, together as long as the chunk.
    """

    def __init__(self, views: Sequence[memoryview], frame: ChunkFrame) -> None:
        self.slots: list[memoryview] = []
        self._across: list[tuple[copying.Block, list[memoryview]]] = []
        for pieces in _pieces(views, frame):
            if len(pieces) == 1:
                self.slots.append(pieces[0])
            else:
                block: copying.Block = np.empty(sum(map(len, pieces)), np.uint8)
                self.slots.append(block.data)
                self._across.append((block, pieces))

    def gather(self) -> None:
        """Before a write: bring what lies across buffers to its slots."""
        for block, pieces in self._across:
            copying.gather(pieces, block)

    def scatter(self) -> None:
        """After a read: bring it from its slots to the buffers."""
        for block, pieces in self._across:
            copying.scatter(block, pieces)


def _pieces(views: Sequence[memoryview], frame: ChunkFrame) -> Iterator[list[memoryview]]:
    """For each stripe the parts of the buffers that hold it."""
    number = start = 0
    for index in range(frame.stripe_count):
        left = frame.payload_bytes(index)
        pieces: list[memoryview] = []
        while left:
            piece = views[number][start : start + left]
            pieces.append(piece)
            left -= len(piece)
            start += len(piece)
            if start == len(views[number]):
                number, start = number + 1, 0
        yield pieces
