"""Which parts of its chunks a prefix needs.

A lookup has rows, one for each rank and group of layers; a chunk has one part in each row. How far
back an engine still reads a row's tokens after a prefix is the row's `Reach`:

    chunk                       0   1   2   3   4   5   prefix of 6 chunks
    row 0: all                  n   n   n   n   n   n   n: the part is needed
    row 1: window, 1.5 chunks   .   .   .   .   n   n
    row 2: state                .   .   .   .   .   n

Chunks count from the first one of the lookup, which is chunk ``first_chunk`` of the prompt. The
engine has those before it: they are never needed. Windows count from the prompt's beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lmcache_redis.chunks.names import Reach

Part = tuple[int, int]  # chunk, row


class PrefixNeeds:
    """What the prefixes of one lookup need.

    reaches: of each row. chunk_tokens: may be 0 if every row needs all tokens.

    Raises ValueError for rows whose needs cannot be told: they need a ``chunk_tokens``.
    """

    def __init__(self, reaches: Sequence[Reach], first_chunk: int = 0, chunk_tokens: int = 0):
        # Rows that need only some of a prefix's parts.
        self.bounded = [row for row, reach in enumerate(reaches) if reach.kind != "all"]
        if first_chunk < 0 or chunk_tokens < bool(self.bounded):
            raise ValueError(f"first chunk {first_chunk}, chunks of {chunk_tokens} tokens")
        self._reaches = reaches
        self._first_chunk = first_chunk
        self._chunk_tokens = chunk_tokens

    def first(self, row: int, length: int) -> int:
        """A prefix of ``length`` chunks needs the row's parts from this chunk to its end.

        Never decreases with ``length``; ``length`` itself if it needs none.
        """
        reach, before = self._reaches[row], self._first_chunk
        if reach.kind == "all":
            return 0
        return max(0, reach.first_chunk(before + length, self._chunk_tokens) - before)

    def parts(self, length: int) -> Iterator[Part]:
        """The parts that a prefix of ``length`` chunks needs."""
        for row in range(len(self._reaches)):
            for chunk in range(self.first(row, length), length):
                yield chunk, row

    def between(self, longer: int, shorter: int) -> tuple[list[Part], list[Part]]:
        """What changes if a prefix of ``longer`` chunks shrinks to ``shorter``.

        Returns the parts that are no longer needed, and those that are needed from then on. From
        the shorter prefix to the empty one, all parts are of the first kind.
        """
        dropped: list[Part] = []
        added: list[Part] = []
        for row in range(len(self._reaches)):
            before, now = self.first(row, longer), self.first(row, shorter)
            dropped += [(chunk, row) for chunk in range(max(before, shorter), longer)]
            added += [(chunk, row) for chunk in range(now, min(before, shorter))]
        return dropped, added

    def parts_of_any(self, length: int) -> Iterator[Part]:
        """The parts of the bounded rows that some prefix of at most ``length`` chunks needs."""
        chunks: dict[Reach, list[int]] = {}  # most rows have the reach of another
        for row in self.bounded:
            reach = self._reaches[row]
            if reach not in chunks:
                # If a longer prefix needs a part, so does the one that ends with its chunk.
                chunks[reach] = [n for n in range(length) if self.first(row, n + 1) <= n]
            for chunk in chunks[reach]:
                yield chunk, row

    def longest(self, limit: int, has: Callable[[Part], bool]) -> int:
        """The longest prefix of at most ``limit`` chunks all of whose needed parts are there.

        If a needed part is not, neither are the prefixes that end after its chunk possible: those
        up to ``limit`` need it too, because `first` does not decrease. Asks ``has`` at most once
        about each part.
        """
        length = limit
        rows = range(len(self._reaches))
        seen = [limit for _ in rows]  # the row's parts from here to the end of the prefix are there
        before = limit + 1
        while length < before:
            before = length
            for row in rows:
                first = self.first(row, length)
                for chunk in range(first, min(length, seen[row])):
                    if not has((chunk, row)):
                        length = chunk
                        break
                seen[row] = first
        return length
