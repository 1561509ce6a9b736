"""A chunk's payload in buffers of any sizes, seen as one slot for each stripe.

A stripe that lies within one buffer is a slice of it; one that lies across several has memory
of its own, copied from the buffers before a write (`gathered`) or to them after a read
(`Scatter.finish`). With one buffer, as every tensor is, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lmcache_redis.stripe import ChunkFrame


def gathered(views: Sequence[memoryview], frame: ChunkFrame) -> list[memoryview]:
    """A slot for each stripe, holding its payload. The views are bytes, none of them empty."""
    return [
        pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
        for pieces in _pieces(views, frame)
    ]


class Scatter:
    """Slots for a read into writable buffers."""

    def __init__(self, views: Sequence[memoryview], frame: ChunkFrame) -> None:
        self.slots: list[memoryview] = []
        self._across: list[tuple[memoryview, list[memoryview]]] = []
        for pieces in _pieces(views, frame):
            if len(pieces) == 1:
                self.slots.append(pieces[0])
                continue
            slot = memoryview(bytearray(sum(len(piece) for piece in pieces)))
            self.slots.append(slot)
            self._across.append((slot, pieces))

    def finish(self) -> None:
        """The slots are filled: bring what lies across buffers to them."""
        for slot, pieces in self._across:
            start = 0
            for piece in pieces:
                piece[:] = slot[start : start + len(piece)]
                start += len(piece)


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
