# SPDX-License-Identifier: Apache-2.0
"""How many requests have named a chunk, for `--store-after N`: it is written once N have.

A request names a chunk in its lookup or, where that went to another agent, in its stores. Several
times count once, also if other requests take turns with it: so the latest 65,536 names are kept by
request (up to 7 MiB). Whoever names a chunk needs all chunks before it, so these have been seen as
often, also if they were forgotten here. What vLLM's own cache serves whole is not looked up, so it
is not seen.

The memory of chunks is a fixed table: 2**19 buckets of two, 8 MiB. In a full bucket the chunk seen
last takes the place of the one not seen for longer, so about a million chunks are known, the
latest. Of a chunk 45 bits are kept, beside the 19 of its bucket: one in 2**44 chunks is taken for
another.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

_BUCKETS = 1 << 19
# A chunk seen: its bits, and 8 for how many requests have named it.
_CHUNK_BITS = ~0xFF & (1 << 64) - 1
_COUNT_BITS = 0xFF
# More than engines have in their prompts at one time: 16 million tokens.
_MOST_NAMED = 1 << 16
MOST_SIGHTS = _COUNT_BITS


class ChunkSights:
    """store_after: the requests after which a chunk is written."""

    def __init__(self, store_after: int) -> None:
        self.store_after = store_after
        self._table = array("Q", bytes(2 * _BUCKETS * 8))
        # What each request has named, the latest one last; and all together.
        self._named: dict[Hashable, set[int]] = {}
        self._all_named = 0

    def see(self, request: Hashable, model_name: str, hashes: Sequence[bytes]) -> list[bytes]:
        """A request names chunks, in the order of its prompt. Those that it made to be written."""
        named = self._named[request] = self._named.pop(request, set())
        self._all_named -= len(named)
        most, reached = 1, []
        for chunk_hash in reversed(hashes):
            name = hash((model_name, chunk_hash))
            known = self._find(name)
            before = known & _COUNT_BITS
            most = min(MOST_SIGHTS, max(most, before + (name not in named)))
            named.add(name)
            self._put(name, known, most)
            if before < self.store_after <= most:
                reached.append(chunk_hash)
        self._all_named += len(named)
        while self._all_named > _MOST_NAMED and len(self._named) > 1:
            self._all_named -= len(self._named.pop(next(iter(self._named))))
        return reached[::-1]

    def count(self, model_name: str, chunk_hash: bytes) -> int:
        """The requests that have named a chunk, as far as it is known."""
        return self._find(hash((model_name, chunk_hash))) & _COUNT_BITS

    def _find(self, name: int) -> int:
        """What the table has of a chunk; 0: nothing."""
        at, chunk = 2 * (name % _BUCKETS), name & _CHUNK_BITS
        for known in self._table[at : at + 2]:
            if known & _CHUNK_BITS == chunk and known:
                return known
        return 0

    def _put(self, name: int, known: int, what: int) -> None:
        """Instead of what is known of it, or of the chunk in its bucket seen before the other."""
        at, table = 2 * (name % _BUCKETS), self._table
        if table[at] != known:
            table[at + 1] = table[at]
        table[at] = name & _CHUNK_BITS | what
