"""Which chunks an agent may write, because it has claimed them from other writers, and until when.

A claim outlasts its write, so that who asks about the chunk at the same time sees it whole. It must
not hold up the next write of its own holder. Times are those of `time.monotonic()`.
"""

from __future__ import annotations

from collections.abc import Sequence


class Claims:
    """Those of one tier that have not run out."""

    def __init__(self) -> None:
        self._until_s: dict[bytes, float] = {}  # in the order in which they were made

    def add(self, keys: Sequence[bytes], until_s: float, now_s: float) -> None:
        while self._until_s and self._until_s[key := next(iter(self._until_s))] <= now_s:
            del self._until_s[key]
        for each in keys:
            self._until_s.pop(each, None)
            self._until_s[each] = until_s

    def until_s(self, key: bytes) -> float:
        """0.0 without a claim; the past if it has run out."""
        return self._until_s.get(key, 0.0)
