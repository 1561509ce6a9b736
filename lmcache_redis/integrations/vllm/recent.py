"""Chunks that were stored or found within the last minute and need not be stored again."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable

_MAX_CHUNKS = 200_000
_REMEMBERED_S = 60.0


class RecentChunks:
    """Names of recent chunks. It only saves messages: the agent itself checks what it has.

    Names expire, because stores may be dropped and Redis evicts.
    """

    def __init__(self) -> None:
        self._expiry_s: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, name: bytes) -> bool:
        return self._expiry_s.get(name, 0.0) > time.monotonic()

    def add(self, names: Iterable[bytes]) -> None:
        """Remembers chunks for a minute."""
        expiry_s = time.monotonic() + _REMEMBERED_S
        for name in names:
            self._expiry_s[name] = expiry_s
            self._expiry_s.move_to_end(name)
        while len(self._expiry_s) > _MAX_CHUNKS:
            self._expiry_s.popitem(last=False)

    def discard(self, names: Iterable[bytes]) -> None:
        """Forgets chunks."""
        for name in names:
            self._expiry_s.pop(name, None)

    def clear(self) -> None:
        """Forgets all chunks."""
        self._expiry_s.clear()
