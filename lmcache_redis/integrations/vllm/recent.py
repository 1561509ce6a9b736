"""Chunks that were stored or found a moment ago, so need not be offered again."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable

_CHUNKS = 200_000
_REMEMBERED_S = 60.0


class RecentChunks:
    """Chunk names of the last minute.

    Only a saving: the agent finds out by itself what it has. Forgets after a while, because
    stores may be dropped and Redis evicts.
    """

    def __init__(self) -> None:
        self._expiry_s: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, name: bytes) -> bool:
        return self._expiry_s.get(name, 0.0) > time.monotonic()

    def add(self, names: Iterable[bytes]) -> None:
        """Remembers chunks for a while."""
        expiry_s = time.monotonic() + _REMEMBERED_S
        for name in names:
            self._expiry_s[name] = expiry_s
            self._expiry_s.move_to_end(name)
        while len(self._expiry_s) > _CHUNKS:
            self._expiry_s.popitem(last=False)

    def discard(self, names: Iterable[bytes]) -> None:
        """Forgets some of them."""
        for name in names:
            self._expiry_s.pop(name, None)

    def clear(self) -> None:
        """Forgets all of them."""
        self._expiry_s.clear()
