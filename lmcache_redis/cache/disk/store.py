"""The disk tier's index and files, kept consistent. Calls block; `tier` has the threads.

Files are written, read and removed outside the lock. This is safe because no name is used twice: a
file that is not in the index yet, or has left it, is used by one call only.

The limit counts files in blocks of 4 KiB, including the first page of each, and holds at all times:
space is reserved before a file is written, and released when a file is unlinked. The least recently
used file is evicted first. If concurrent writes leave no space for one of them, it is not stored.
(A file that is evicted while it is being read uses disk space until the read ends.)

A file's mtime is the time of its last write or read. Reads set it at most once in ten seconds, so
the order after a restart is exact to ten seconds.

A read uses an open file, so it is complete even if the chunk is evicted or replaced meanwhile. A
file that is not exactly the expected chunk is a miss and is removed, with a log line. If the disk
is full or fails, or the directory was removed or is not writable, writes are not stored, reads are
misses, and each kind of error is logged once a minute. A full disk causes no eviction; only the
limit does.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_redis.cache.disk.files import ChunkFiles, read_chunk, touch
from lmcache_redis.cache.disk.format import StoredShape, disk_bytes
from lmcache_redis.cache.disk.scan import Scan
from lmcache_redis.chunks.frame import ChunkFrame
from lmcache_redis.errors import ConfigError, FormatError
from lmcache_redis.tiers import ReadOutcome, WriteOutcome

logger = logging.getLogger(__name__)

TOUCH_INTERVAL_S = 10.0

_WARNING_INTERVAL_S = 60.0


@dataclass(slots=True, eq=False)
class StoredFile:
    """An entry of the index. touched_at: when its mtime was last set, in monotonic seconds."""

    sequence: int
    cut: StoredShape
    touched_at: float

    @property
    def nbytes(self) -> int:
        return disk_bytes(self.cut.chunk_bytes)


class LruIndex:
    """Files by chunk key, from the least to the most recently used, and the bytes they take.

    The bytes of a file that has left the index stay held until it is unlinked. Not thread-safe: the
    store has a lock. Raises ConfigError unless limit_bytes is positive.
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


class DiskStore:
    """Chunks by chunk key. Thread-safe after `take_over`.

    No method raises for a disk error. Raises ConfigError unless limit_bytes is positive.

    Attributes:
        on_evicted: if it is set, called with the keys of evicted chunks, on any thread.
    """

    def __init__(self, files: ChunkFiles, limit_bytes: int) -> None:
        self.index = LruIndex(limit_bytes)
        self._files = files
        self._lock = threading.Lock()
        self._next_sequence = 0
        self._warned_at: dict[str, float] = {}
        self.on_evicted: Callable[[list[bytes]], None] | None = None

    def take_over(self, scan: Scan) -> None:
        """Index the files found. If the limit was lowered, the least recently used are evicted."""
        self._next_sequence = scan.next_sequence
        long_ago = time.monotonic() - TOUCH_INTERVAL_S
        for found in scan.found:
            file = StoredFile(found.sequence, found.cut, long_ago)
            with self._lock:
                evicted = self.index.reserve(file.nbytes)
                if evicted is not None:
                    self.index.fill(found.key, file)
            self._unlink([(found.key, file)] if evicted is None else evicted)

    def keys(self, prefix: bytes = b"") -> list[bytes]:
        with self._lock:
            keys = self.index.keys()
        return [key for key in keys if key.startswith(prefix)]

    def find(self, key: bytes) -> StoredFile | None:
        """The chunk's file in the index, or None. No I/O; does not count as a use."""
        with self._lock:
            return self.index.get(key)

    def keep(self, key: bytes) -> None:
        """Make the chunk the most recently used."""
        with self._lock:
            file = self.index.get(key)
            if file is not None:
                self.index.touch(key, file)

    def write(
        self,
        key: bytes,
        frame: ChunkFrame,
        views: Sequence[memoryview],
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> WriteOutcome:
        """Write a file and index it in place of an earlier one, unless the write is cancelled."""
        nbytes = disk_bytes(frame.chunk_bytes)
        with self._lock:
            file = StoredFile(self._next_sequence, StoredShape.of(frame), time.monotonic())
            self._next_sequence += 1
            evicted = self.index.reserve(nbytes)
            if evicted is None:
                return WriteOutcome.FULL
            # Until they are unlinked, the evicted files hold the space that the new one needs.
            surplus_bytes = max(0, sum(each.nbytes for _, each in evicted) - nbytes)
            self.index.hold(surplus_bytes)
        if evicted and self.on_evicted is not None:
            self.on_evicted([each for each, _ in evicted])
        self._unlink(evicted, surplus_bytes)
        outcome = WriteOutcome.UNAVAILABLE
        try:
            self._files.write(key, file.sequence, frame, views)
            outcome = WriteOutcome.STORED
        except OSError as error:
            self._warn("a chunk was not stored", error)
            return outcome
        finally:
            if outcome is not WriteOutcome.STORED:
                self._release(nbytes)
        with self._lock:
            # A cancel is followed by the change of the index that it makes way for. So either it is
            # seen here, or that change comes later and replaces this one.
            removed: StoredFile | None = file
            if is_cancelled():
                outcome = WriteOutcome.CANCELLED
            else:
                removed = self.index.fill(key, file)
                self.index.hold(removed.nbytes if removed is not None else 0)
        if removed is not None:
            self._unlink([(key, removed)], removed.nbytes)
        return outcome

    def load(self, key: bytes, frame: ChunkFrame, views: Sequence[memoryview]) -> ReadOutcome:
        """Fill the views with the chunk described by the frame."""
        opened = self.open(key)
        if opened is None:
            return ReadOutcome.MISSING
        fd, file = opened
        try:
            if not file.cut.is_chunk_of(frame):
                return ReadOutcome.FOREIGN
            return self.read(fd, key, file, views)
        finally:
            os.close(fd)

    def open(self, key: bytes) -> tuple[int, StoredFile] | None:
        """A descriptor of the chunk's file, which the caller closes, and its index entry."""
        while True:
            file = self.find(key)
            if file is None:
                return None
            try:
                return self._files.open(key, file.sequence), file
            except FileNotFoundError as error:
                with self._lock:
                    vanished = self.index.pop(key, file) is not None
                if vanished:
                    self._warn("a file was removed by another process", error)
                # Otherwise it was evicted or replaced since the look-up: look it up again.
            except OSError as error:
                self._warn("a chunk was not loaded", error)
                return None

    def read(
        self, fd: int, key: bytes, file: StoredFile, views: Sequence[memoryview]
    ) -> ReadOutcome:
        """Fill the views from an open file and make the chunk the most recently used."""
        try:
            read_chunk(fd, key, file.cut.frame(key), views)
        except FormatError as error:
            logger.warning("%s is removed: %s", self._files.path(key, file.sequence), error)
        except OSError as error:
            self._warn("a chunk was not loaded", error)
            # A sector that cannot be read would delay every read of the chunk.
            if error.errno != errno.EIO:
                return ReadOutcome.UNAVAILABLE
        else:
            self._touch(fd, key, file)
            return ReadOutcome.LOADED
        self.remove(key, file)
        return ReadOutcome.CORRUPT

    def remove(self, key: bytes, only: StoredFile | None = None) -> bool:
        """Remove a chunk, or only a certain file of it; return whether it existed."""
        with self._lock:
            file = self.index.pop(key, only)
            if file is None:
                return False
            self.index.hold(file.nbytes)
        self._unlink([(key, file)], file.nbytes)
        return True

    def _unlink(self, files: Sequence[tuple[bytes, StoredFile]], held_bytes: int = 0) -> None:
        """Unlink files that left the index, then release the bytes held for them."""
        for key, file in files:
            self._unlink_one(key, file)
        self._release(held_bytes)

    def _unlink_one(self, key: bytes, file: StoredFile) -> None:
        try:
            self._files.remove(key, file.sequence)
        except OSError as error:
            self._warn("a file could not be removed", error)

    def _release(self, nbytes: int) -> None:
        with self._lock:
            self.index.release(nbytes)

    def _touch(self, fd: int, key: bytes, file: StoredFile) -> None:
        now = time.monotonic()
        with self._lock:
            if not self.index.touch(key, file) or now - file.touched_at < TOUCH_INTERVAL_S:
                return
            file.touched_at = now
        with contextlib.suppress(OSError):  # only the order after a restart gets less exact
            touch(fd)

    def _warn(self, what: str, error: OSError) -> None:
        kind = f"{what}: {error.strerror or error}"
        now = time.monotonic()
        with self._lock:
            if now - self._warned_at.get(kind, -_WARNING_INTERVAL_S) < _WARNING_INTERVAL_S:
                return
            self._warned_at[kind] = now
        logger.warning("disk tier: %s (logged once a minute at most)", kind)
