# SPDX-License-Identifier: Apache-2.0
"""The disk tier's index and files, kept consistent. Calls block; `tier` has the threads.

Files are written, read and removed outside the lock. This is safe because no name is used twice: a
file that is not in the index yet, or has left it, is used by one call only. A read uses an open
file, so it is complete even if the chunk is evicted or replaced meanwhile.

The limit counts files in blocks of 4 KiB, including the first page of each, and those that are
being written. The least recently used file is evicted first. If concurrent writes leave no space
for one of them, it is not stored.

A file's mtime is the time of its last use. One that is not exactly the expected chunk is a miss and
is removed, with a log line. If the disk is full or fails, writes are not stored, reads are misses,
and each kind of error is logged once a minute. Only the limit causes evictions.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from lmcache_redis.cache.disk.files import ChunkFiles, open_file, read_chunk, touch
from lmcache_redis.cache.disk.format import StoredFile, StoredShape
from lmcache_redis.chunks.frame import ChunkFrame
from lmcache_redis.errors import ConfigError, FormatError
from lmcache_redis.tiers import CallOutcome, ReadOutcome, RemoveResult, WriteOutcome

logger = logging.getLogger(__name__)

_WARNING_INTERVAL_S = 60.0


class DiskStore:
    """Chunks by chunk key, from the least to the most recently used. Thread-safe after `take_over`.

    No method raises for a disk error. Raises ConfigError unless limit_bytes is positive.

    Attributes:
        limit_bytes: may change; the next write evicts what is beyond a smaller one.
        used_bytes: what the files take, including those being written.
        on_evicted: if it is set, called with the keys of evicted chunks, on any thread.
    """

    def __init__(self, files: ChunkFiles, limit_bytes: int) -> None:
        if limit_bytes <= 0:
            raise ConfigError(f"limit_bytes is {limit_bytes}; it must be positive")
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.on_evicted: Callable[[list[bytes]], None] | None = None
        self._writing_bytes = 0  # of the used ones
        self._entries: OrderedDict[bytes, StoredFile] = OrderedDict()
        self._files = files
        self._lock = threading.Lock()
        self._next_sequence = 0
        self._warned_at: dict[str, float] = {}

    def take_over(self, files: Iterable[StoredFile]) -> None:
        """Index the files found. If the limit was lowered, the least recently used are evicted."""
        for file in files:
            with self._lock:
                self._next_sequence = max(self._next_sequence, file.sequence + 1)
                evicted = self._make_room(file.nbytes)
                if evicted is not None:
                    self._fill(file)
            for each in [file] if evicted is None else evicted:
                self._unlink(each)

    def keys(self, prefixes: bytes | tuple[bytes, ...] = b"") -> list[bytes]:
        with self._lock:
            keys = list(self._entries)
        return [key for key in keys if key.startswith(prefixes)]

    def find(self, key: bytes) -> StoredFile | None:
        """The chunk's file in the index, or None. No I/O; does not count as a use."""
        with self._lock:
            return self._entries.get(key)

    def keep(self, key: bytes) -> None:
        """Make the chunk the most recently used."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)

    def write(
        self,
        key: bytes,
        frame: ChunkFrame,
        payload: memoryview,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> WriteOutcome:
        """Write a file and index it in place of an earlier one, unless the write is cancelled."""
        with self._lock:
            file = StoredFile(key, self._next_sequence, StoredShape.of(frame))
            self._next_sequence += 1
            evicted = self._make_room(file.nbytes)
            if evicted is None:
                return WriteOutcome.FULL
            self._writing(file.nbytes)
        for each in evicted:
            self._unlink(each)
        try:
            if evicted and self.on_evicted is not None:
                self.on_evicted([each.key for each in evicted])
            self._files.write(key, file.sequence, frame, payload)
        except BaseException as error:
            with self._lock:
                self._writing(-file.nbytes)
            if not isinstance(error, OSError):
                raise
            self._warn("a chunk was not stored", error)
            return WriteOutcome.UNAVAILABLE
        with self._lock:
            # A cancel is followed by the change of the index that it makes way for. So either it is
            # seen here, or that change comes later and replaces this one.
            self._writing(-file.nbytes)
            cancelled = is_cancelled()
            removed = file if cancelled else self._fill(file)
        if removed is not None:
            self._unlink(removed)
        return WriteOutcome.CANCELLED if cancelled else WriteOutcome.STORED

    def load(self, key: bytes, frame: ChunkFrame, payload: memoryview) -> ReadOutcome:
        """Fill the payload with the chunk, whatever its stripes; make it the most recently used."""
        while (file := self.find(key)) is not None:
            if not file.cut.is_of(frame):
                return ReadOutcome.FOREIGN
            try:
                fd = open_file(self._files.path(key, file.sequence))
            except FileNotFoundError as error:
                with self._lock:
                    vanished = self._take_out(key, file) is not None
                if vanished:
                    self._warn("a file was removed by another process", error)
                # Otherwise it was evicted or replaced since the look-up: look it up again.
            except OSError as error:
                self._warn("a chunk was not loaded", error)
                return ReadOutcome.MISSING
            else:
                try:
                    return self._read(fd, file, payload)
                finally:
                    os.close(fd)
        return ReadOutcome.MISSING

    def _read(self, fd: int, file: StoredFile, payload: memoryview) -> ReadOutcome:
        try:
            read_chunk(fd, file.key, file.cut.frame(file.key), payload)
        except FormatError as error:
            path = self._files.path(file.key, file.sequence)
            logger.warning("%s is removed: %s", path, error)
        except OSError as error:
            self._warn("a chunk was not loaded", error)
            # A sector that cannot be read would delay every read of the chunk.
            if error.errno != errno.EIO:
                return ReadOutcome.UNAVAILABLE
        else:
            self.keep(file.key)
            with contextlib.suppress(OSError):  # only the order after a restart gets less exact
                touch(fd)
            return ReadOutcome.LOADED
        self.remove(file.key, file)
        return ReadOutcome.CORRUPT

    def remove(self, key: bytes, only: StoredFile | None = None) -> bool:
        """Remove a chunk, or only a certain file of it; return whether it existed."""
        with self._lock:
            file = self._take_out(key, only)
        if file is not None:
            self._unlink(file)
        return file is not None

    def remove_or_keep(self, key: bytes) -> RemoveResult:
        """Remove a chunk; if its file cannot be removed, the index keeps it, for another attempt.

        Otherwise it would be found again after a restart.
        """
        with self._lock:
            file = self._take_out(key)
        if file is None:
            return RemoveResult(CallOutcome.DONE)
        if self._unlink(file):
            return RemoveResult(CallOutcome.DONE, 1)
        with self._lock:
            if key not in self._entries:
                self._fill(file)
                self._entries.move_to_end(key, last=False)
        return RemoveResult(CallOutcome.UNAVAILABLE)

    # Under the lock.

    def _make_room(self, nbytes: int) -> list[StoredFile] | None:
        """Take out the least recently used; None, and none, if what is being written takes it."""
        if self._writing_bytes + nbytes > self.limit_bytes:
            return None
        evicted = []
        while self.used_bytes + nbytes > self.limit_bytes:
            evicted.append(self._entries.popitem(last=False)[1])
            self.used_bytes -= evicted[-1].nbytes
        return evicted

    def _writing(self, nbytes: int) -> None:
        self.used_bytes += nbytes
        self._writing_bytes += nbytes

    def _fill(self, file: StoredFile) -> StoredFile | None:
        """Add a file; return the one that it replaces."""
        replaced = self._take_out(file.key)
        self._entries[file.key] = file
        self.used_bytes += file.nbytes
        return replaced

    def _take_out(self, key: bytes, only: StoredFile | None = None) -> StoredFile | None:
        """The file, or a certain file, of a key."""
        file = self._entries.get(key)
        if file is None or only not in (None, file):
            return None
        del self._entries[key]
        self.used_bytes -= file.nbytes
        return file

    # Without it.

    def _unlink(self, file: StoredFile) -> bool:
        try:
            self._files.remove(file.key, file.sequence)
        except OSError as error:
            self._warn("a file could not be removed", error)
            return False
        return True

    def _warn(self, what: str, error: OSError) -> None:
        kind = f"{what}: {error.strerror or error}"
        now = time.monotonic()
        with self._lock:
            if now - self._warned_at.get(kind, -_WARNING_INTERVAL_S) < _WARNING_INTERVAL_S:
                return
            self._warned_at[kind] = now
        logger.warning("disk tier: %s (logged once a minute at most)", kind)
