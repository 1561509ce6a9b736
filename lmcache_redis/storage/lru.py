"""Which chunks a tier with a byte limit holds, and which it gives up first.

Room is reserved before an entry is there, so that a tier that takes time to store never
holds more than its limit; one that takes time to let go sees to that itself. Not thread-safe:
the tier has a lock.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from lmcache_redis.errors import ConfigError
from lmcache_redis.keys import ObjectKey


class Sized(Protocol):
    """An entry; what it counts for never changes."""

    @property
    def nbytes(self) -> int: ...


EntryT = TypeVar("EntryT", bound=Sized)


class LruIndex(Generic[EntryT]):
    """Entries by key, from the least to the most recently used, and the bytes they count for.

    Raises ConfigError unless limit_bytes is positive.
    """

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes <= 0:
            raise ConfigError(f"limit_bytes is {limit_bytes}; it must be positive")
        self.limit_bytes = limit_bytes
        self.used_bytes = 0  # reservations included
        self._entries: OrderedDict[ObjectKey, EntryT] = OrderedDict()
        self._reserved_bytes = 0

    def keys(self) -> list[ObjectKey]:
        return list(self._entries)

    def get(self, key: ObjectKey) -> EntryT | None:
        """The entry, left where it is in the order."""
        return self._entries.get(key)

    def touch(self, key: ObjectKey, entry: EntryT) -> bool:
        """Make it the most recently used. False: this entry is no longer there."""
        if self._entries.get(key) is not entry:
            return False
        self._entries.move_to_end(key)
        return True

    def reserve(self, nbytes: int) -> list[tuple[ObjectKey, EntryT]] | None:
        """Make room by giving up what was used longest ago; what that was.

        None: not even that makes room, so nothing was given up and nothing is reserved.
        """
        if self._reserved_bytes + nbytes > self.limit_bytes:
            return None
        given_up = []
        while self.used_bytes + nbytes > self.limit_bytes:
            given_up.append(self._entries.popitem(last=False))
            self.used_bytes -= given_up[-1][1].nbytes
        self.used_bytes += nbytes
        self._reserved_bytes += nbytes
        return given_up

    def release(self, nbytes: int) -> None:
        """Give up a reservation."""
        self.used_bytes -= nbytes
        self._reserved_bytes -= nbytes

    def fill(self, key: ObjectKey, entry: EntryT) -> EntryT | None:
        """Put an entry where room was reserved for it; the one that it takes the place of."""
        replaced = self.pop(key)
        self._reserved_bytes -= entry.nbytes
        self._entries[key] = entry
        return replaced

    def pop(self, key: ObjectKey, entry: EntryT | None = None) -> EntryT | None:
        """Take an entry out: whatever is under the key, or only the one given."""
        found = self._entries.get(key)
        if found is None or (entry is not None and found is not entry):
            return None
        del self._entries[key]
        self.used_bytes -= found.nbytes
        return found

    def clear(self) -> None:
        """Take all entries out; reservations stay."""
        self._entries.clear()
        self.used_bytes = self._reserved_bytes
