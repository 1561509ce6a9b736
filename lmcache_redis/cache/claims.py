# SPDX-License-Identifier: Apache-2.0
"""Which chunks an agent may write, because it has claimed them from other writers, and until when.

A claim is given back when its chunk is there, whole: who gets it next sees that. After a write that
has failed it runs out, because the server may still execute what it was sent. It does not hold up
the next write of its own holder. Times are of the owner's clock.
"""

from __future__ import annotations

from collections.abc import Sequence


class Claims:
    """Those of one tier that have not run out."""

    def __init__(self) -> None:
        self._until_s: dict[bytes, float] = {}  # in the order in which they were made
        self._ended: list[bytes] = []

    def add(self, keys: Sequence[bytes], until_s: float, now_s: float) -> None:
        while self._until_s and self._until_s[key := next(iter(self._until_s))] <= now_s:
            del self._until_s[key]
        for each in keys:
            self._until_s.pop(each, None)
            self._until_s[each] = until_s

    def end(self, key: bytes, now_s: float) -> bool:
        """It is to be given back; whether it is the first of those to be."""
        if self._until_s.pop(key, 0.0) <= now_s:
            return False  # it may be another's by now
        self._ended.append(key)
        return len(self._ended) == 1

    def take_ended(self) -> list[bytes]:
        """Those to be given back now."""
        ended, self._ended = self._ended, []
        return ended

    def until_s(self, key: bytes) -> float:
        """0.0 without a claim; the past if it has run out."""
        return self._until_s.get(key, 0.0)
