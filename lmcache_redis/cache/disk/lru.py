"""Which chunks a tier with a byte limit holds, and which it gives up first.

Room is reserved before an entry is there, so that a tier that takes time to store never holds more
than its limit. A tier that takes time to remove holds the bytes of what it has taken out until
they are gone. Not thread-safe: the tier has a lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

from lmcache_redis.errors import ConfigError


class Sized(Protocol):
    """An entry. What it counts for never changes."""

    @property
    def nbytes(self) -> int: ...


KeyT = TypeVar("KeyT", bound=Hashable)
EntryT = TypeVar("EntryT", bound=Sized)


class LruIndex(Generic[KeyT, EntryT]):
    """Entries by key, from the least to the most recently used, and the bytes they count for.

    Raises ConfigError unless limit_bytes is positive.
    """

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes <= 0:
            raise ConfigError(f"limit_bytes is {limit_bytes}; it must be positive")
        self.limit_bytes = limit_bytes
        self.used_bytes = 0  # reservations included
        self._entries: OrderedDict[KeyT, EntryT] = OrderedDict()
        self._reserved_bytes = 0

    def keys(self) -> list[KeyT]:
        return list(self._entries)

    def get(self, key: KeyT) -> EntryT | None:
        """The entry, left where it is in the order."""
        return self._entries.get(key)

    def touch(self, key: KeyT, entry: EntryT) -> bool:
        """Make it the most recently used. False: this entry is no longer there."""
        if self._entries.get(key) is not entry:
            return False
        self._entries.move_to_end(key)
        return True

    def reserve(self, nbytes: int) -> list[tuple[KeyT, EntryT]] | None:
        """Make room by evicting what was used longest ago; what that was.

        None: not even that makes room, so nothing was evicted and nothing is reserved.
        """
        if self._reserved_bytes + nbytes > self.limit_bytes:
            return None
        evicted = []
        while self.used_bytes + nbytes > self.limit_bytes:
            evicted.append(self._entries.popitem(last=False))
            self.used_bytes -= evicted[-1][1].nbytes
        self.hold(nbytes)
        return evicted

    def hold(self, nbytes: int) -> None:
        """Reserve bytes that are taken already: of what has left the index and is still there."""
        self.used_bytes += nbytes
        self._reserved_bytes += nbytes

    def release(self, nbytes: int) -> None:
        """Give up a reservation."""
        self.used_bytes -= nbytes
        self._reserved_bytes -= nbytes

    def fill(self, key: KeyT, entry: EntryT) -> EntryT | None:
        """Put an entry where room was reserved for it; the one that it takes the place of."""
        replaced = self.pop(key)
        self._reserved_bytes -= entry.nbytes
        self._entries[key] = entry
        return replaced

    def pop(self, key: KeyT, entry: EntryT | None = None) -> EntryT | None:
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
