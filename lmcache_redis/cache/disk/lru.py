"""The index of the disk tier: files by chunk key, least recently used first, within a byte limit.

Space is reserved before a file is written, so that the tier never exceeds its limit. The bytes of a
file that has left the index stay held until it is unlinked. Not thread-safe: the store has a lock.
"""

from __future__ import annotations

from collections import OrderedDict

from lmcache_redis.cache.disk.format import Cut, disk_bytes
from lmcache_redis.errors import ConfigError


class StoredFile:
    """An entry of the index. touched_at: when its mtime was last set, in monotonic seconds."""

    __slots__ = ("cut", "sequence", "touched_at")

    def __init__(self, sequence: int, cut: Cut, touched_at: float) -> None:
        self.sequence = sequence
        self.cut = cut
        self.touched_at = touched_at

    @property
    def nbytes(self) -> int:
        return disk_bytes(self.cut.chunk_bytes)


class LruIndex:
    """Files by chunk key, from the least to the most recently used, and the bytes they take.

    Raises ConfigError unless limit_bytes is positive.
    """

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes <= 0:
            raise ConfigError(f"limit_bytes is {limit_bytes}; it must be positive")
        self.limit_bytes = limit_bytes
        self.used_bytes = 0  # reservations included
        self._entries: OrderedDict[bytes, StoredFile] = OrderedDict()
        self._reserved_bytes = 0

    def keys(self) -> list[bytes]:
        return list(self._entries)

    def get(self, key: bytes) -> StoredFile | None:
        """The entry. Does not count as a use."""
        return self._entries.get(key)

    def touch(self, key: bytes, entry: StoredFile) -> bool:
        """Make an entry the most recently used. False: it is no longer in the index."""
        if self._entries.get(key) is not entry:
            return False
        self._entries.move_to_end(key)
        return True

    def reserve(self, nbytes: int) -> list[tuple[bytes, StoredFile]] | None:
        """Reserve space, evicting the least recently used entries; return the evicted ones.

        None: other reservations leave too little space; nothing was evicted or reserved.
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
        """Reserve space that is in use: of a file that left the index and is not unlinked yet."""
        self.used_bytes += nbytes
        self._reserved_bytes += nbytes

    def release(self, nbytes: int) -> None:
        self.used_bytes -= nbytes
        self._reserved_bytes -= nbytes

    def fill(self, key: bytes, entry: StoredFile) -> StoredFile | None:
        """Add an entry for which space was reserved; return the one that it replaces."""
        replaced = self.pop(key)
        self._reserved_bytes -= entry.nbytes
        self._entries[key] = entry
        return replaced

    def pop(self, key: bytes, entry: StoredFile | None = None) -> StoredFile | None:
        """Take out the entry of a key, or only a certain entry; None if it is not in the index."""
        found = self._entries.get(key)
        if found is None or (entry is not None and found is not entry):
            return None
        del self._entries[key]
        self.used_bytes -= found.nbytes
        return found

    def clear(self) -> None:
        """Take out all entries; reservations stay."""
        self._entries.clear()
        self.used_bytes = self._reserved_bytes
