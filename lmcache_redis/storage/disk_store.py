"""The index of the disk tier and its files, kept in step.

Files are written, read and removed outside the lock. That they never get in each other's way
follows from their names, none of which is used twice: a file that is not in the index yet, or
not any more, is nobody else's.

Room is reserved before a file is written, and reserved it can be only when what made the room
is gone: from when a file leaves the index to when it is removed, one lock is held that every
reservation takes. So the limit holds at all times. Several puts at once may leave no room for
one another; then one is not stored. (What is read while it goes takes its room until then.)

A call that has not returned for `patience_s`, as on a network file system that is gone, holds
its own thread and no other: until it returns, nothing is asked of the disk.

A get reads from an open file: it is whole, also where the chunk is evicted or replaced
meanwhile. What is not, to the last bit, the chunk that it should be is removed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Iterable, Sequence

from lmcache_redis.errors import FormatError
from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import RemoteMetadata
from lmcache_redis.storage.disk_files import ChunkFiles, read_chunk, touch
from lmcache_redis.storage.disk_format import disk_bytes
from lmcache_redis.storage.disk_scan import Scan
from lmcache_redis.storage.lru import LruIndex
from lmcache_redis.storage.patience import Patience
from lmcache_redis.storage.putqueue import QueuedPut

logger = logging.getLogger(__name__)

TOUCH_INTERVAL_S = 10.0

_WARNING_INTERVAL_S = 60.0


class StoredFile:
    """An entry of the index. touched_at: when its mtime was set last, in monotonic seconds."""

    __slots__ = ("metadata", "nbytes", "sequence", "touched_at")

    def __init__(self, sequence: int, metadata: RemoteMetadata, touched_at: float) -> None:
        self.sequence = sequence
        self.metadata = metadata
        self.nbytes = disk_bytes(metadata.length)
        self.touched_at = touched_at


class DiskStore:
    """Chunks by key. Thread-safe, from when it was told what there is (`take_over`).

    No method raises for what the disk does. Raises ConfigError unless limit_bytes is positive.
    """

    def __init__(self, files: ChunkFiles, limit_bytes: int, patience_s: float) -> None:
        self.index: LruIndex[StoredFile] = LruIndex(limit_bytes)
        self._files = files
        self._patience = Patience(f"the disk tier in {files.directory}", patience_s)
        self._lock = threading.Lock()
        self._room = threading.Lock()  # taken before the other one, and held while files go
        self._next_sequence = 0
        self._warned_at: dict[str, float] = {}

    def take_over(self, scan: Scan) -> None:
        """Index what was found. The limit may be lower than it was: the oldest go."""
        self._next_sequence = scan.next_sequence
        long_ago = time.monotonic() - TOUCH_INTERVAL_S
        for found in scan.found:
            file = StoredFile(found.sequence, found.metadata, long_ago)
            evicted = self.index.reserve(file.nbytes)
            if evicted is None:
                self._unlink(found.key, file)
                continue
            self.index.fill(found.key, file)
            self._unlink_all(evicted)

    def keys(self) -> list[ObjectKey]:
        with self._lock:
            return self.index.keys()

    def contains(self, key: ObjectKey) -> bool:
        with self._lock:
            is_there = self.index.get(key) is not None
        return is_there and not self._patience.is_lost

    # --------------------------------------------------------------- storing

    def put(
        self,
        key: ObjectKey,
        metadata: RemoteMetadata,
        views: Sequence[memoryview],
        queued: QueuedPut | None = None,
    ) -> bool:
        """Write a file and make it the one that is found, unless `queued` was dropped."""
        if self._patience.is_lost:
            return False
        with self._patience.call():
            return self._put(key, metadata, views, queued)

    def _put(
        self,
        key: ObjectKey,
        metadata: RemoteMetadata,
        views: Sequence[memoryview],
        queued: QueuedPut | None,
    ) -> bool:
        with self._room:
            with self._lock:
                file = StoredFile(self._next_sequence, metadata, time.monotonic())
                self._next_sequence += 1
                evicted = self.index.reserve(file.nbytes)
            if evicted is None:
                return False
            self._unlink_all(evicted)
        stored = False
        try:
            self._files.write(key, file.sequence, metadata, views)
            with self._room:
                with self._lock:
                    stored = queued is None or not queued.dropped
                    replaced = self.index.fill(key, file) if stored else file
                if replaced is not None:
                    self._unlink(key, replaced)
        except OSError as error:
            self._warn("a chunk was not stored", error)
        finally:
            if not stored:
                with self._lock:
                    self.index.release(file.nbytes)
        return stored

    def remove(self, key: ObjectKey, only: StoredFile | None = None) -> bool:
        """Remove a chunk, or only one file of it; whether it was there.

        From a disk that does not answer nothing is: it may be found when it does again.
        """
        if self._patience.is_lost:
            return False
        with self._patience.call(), self._room:
            with self._lock:
                file = self.index.pop(key, only)
            if file is None:
                return False
            self._unlink(key, file)
            return True

    def _unlink_all(self, files: Iterable[tuple[ObjectKey, StoredFile]]) -> None:
        for key, file in files:
            self._unlink(key, file)

    def _unlink(self, key: ObjectKey, file: StoredFile) -> None:
        try:
            self._files.remove(key, file.sequence)
        except OSError as error:
            self._warn("a file could not be removed", error)

    # --------------------------------------------------------------- loading

    def open(self, key: ObjectKey) -> tuple[int, StoredFile] | None:
        """A descriptor, which is the caller's, of the chunk's file."""
        while not self._patience.is_lost:
            with self._lock:
                file = self.index.get(key)
            if file is None:
                return None
            try:
                with self._patience.call():
                    return self._files.open(key, file.sequence), file
            except FileNotFoundError as error:
                with self._lock:
                    vanished = self.index.pop(key, file) is not None
                if vanished:
                    self._warn("a file was removed by somebody else", error)
                    return None
                # Evicted or replaced since it was looked up: look again.
            except OSError as error:
                self._warn("a chunk was not loaded", error)
                return None
        return None

    def read(self, fd: int, key: ObjectKey, file: StoredFile, views: Sequence[memoryview]) -> bool:
        """Fill the views from an open file and make the chunk the most recently used."""
        try:
            with self._patience.call():
                read_chunk(fd, key, file.metadata, views)
                self._touch(fd, key, file)
            return True
        except FormatError as error:
            logger.warning("%s is removed: %s", self._files.path(key, file.sequence), error)
        except OSError as error:
            self._warn("a chunk was not loaded", error)
            # A sector that cannot be read would hold up every get of the chunk.
            if error.errno != errno.EIO:
                return False
        self.remove(key, file)
        return False

    def _touch(self, fd: int, key: ObjectKey, file: StoredFile) -> None:
        now = time.monotonic()
        with self._lock:
            if not self.index.touch(key, file) or now - file.touched_at < TOUCH_INTERVAL_S:
                return
            file.touched_at = now
        with contextlib.suppress(OSError):  # a worse order after a restart, nothing else
            touch(fd)

    def _warn(self, what: str, error: OSError) -> None:
        kind = f"{what}: {error.strerror or error}"
        now = time.monotonic()
        with self._lock:
            if now - self._warned_at.get(kind, -_WARNING_INTERVAL_S) < _WARNING_INTERVAL_S:
                return
            self._warned_at[kind] = now
        logger.warning("disk tier: %s (said once a minute at most)", kind)
