"""A chunk's payload in buffers of any sizes, seen as one slot for each stripe.

A stripe that lies within one buffer is a slice of it; one that lies across several has memory
of its own, copied from the buffers before a write (`gathered`) or to them after a read
(`Scatter.finish`). With one buffer, as every tensor is, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lmcache_redis.backends import copying
from lmcache_redis.stripe import ChunkFrame


def gathered(views: Sequence[memoryview], frame: ChunkFrame) -> list[memoryview]:
    """A slot for each stripe, holding its payload. The views are bytes, none of them empty."""
    return [
        pieces[0] if len(pieces) == 1 else copying.gathered(pieces).data
        for pieces in _pieces(views, frame)
    ]


class Scatter:
    """Slots for a read into writable buffers."""

    def __init__(self, views: Sequence[memoryview], frame: ChunkFrame) -> None:
        self.slots: list[memoryview] = []
        self._across: list[tuple[copying.Block, list[memoryview]]] = []
        for pieces in _pieces(views, frame):
            if len(pieces) == 1:
                self.slots.append(pieces[0])
                continue
            block: copying.Block = np.empty(sum(map(len, pieces)), np.uint8)
            self.slots.append(block.data)
            self._across.append((block, pieces))

    def finish(self) -> None:
        """The slots are filled: bring what lies across buffers to them."""
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
