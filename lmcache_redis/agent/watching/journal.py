"""The changes that one scheduler has not been told yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, islice
from typing import NamedTuple

from lmcache_redis.messages import HASH_BYTES_OF_AN_EPOCH, Change
from lmcache_redis.naming import PartNames

MAX_CHANGES = 1 << 16
# Of the names of chunks: without an epoch, and with one.
_HASH_BYTES = (*HASH_BYTES_OF_AN_EPOCH, *(8 + nbytes for nbytes in HASH_BYTES_OF_AN_EPOCH))


class _Place(NamedTuple):
    part: int
    tier: str
    chunk_hash: bytes


class Journal:
    """The last change of each part in each tier. parts: whose changes; their indices name them.

    limit: of the changes kept. Beyond, all are dropped, and the next `take` says so.
    """

    def __init__(self, parts: Sequence[PartNames], limit: int = MAX_CHANGES) -> None:
        self._limit = limit
        self._lost = False
        self._changes: dict[_Place, bool] = {}  # in the order in which they came
        # A key does not say where its hash begins, so every length is tried.
        self._parts: Mapping[int, Mapping[bytes, int]] = {
            nbytes: {part.stem(nbytes): number for number, part in enumerate(parts)}
            for nbytes in _HASH_BYTES
        }

    def __len__(self) -> int:
        return len(self._changes) + self._lost

    def note(self, key: bytes, tier: str, there: bool) -> None:
        """A chunk is in a tier, or not any more. Ignores chunks of others."""
        for nbytes, parts in self._parts.items():
            part = parts.get(key[:-nbytes])
            if part is not None:
                place = _Place(part, tier, key[-nbytes:])
                self._changes.pop(place, None)
                self._changes[place] = there
                break
        if len(self._changes) > self._limit:
            self._changes.clear()
            self._lost = True

    def take(self, limit: int) -> tuple[tuple[Change, ...], bool]:
        """The oldest changes, at most ``limit``, and whether earlier ones were dropped."""
        taken = [*islice(self._changes.items(), limit)]
        for place, _ in taken:
            del self._changes[place]
        lost, self._lost = self._lost, False
        runs = groupby(taken, key=lambda each: (each[0].part, each[0].tier, each[1]))
        changes = tuple(
            Change(*run, tuple(place.chunk_hash for place, _ in places)) for run, places in runs
        )
        return changes, lost
