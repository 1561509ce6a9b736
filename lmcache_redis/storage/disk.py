"""A tier in a directory: one file for each chunk, up to a byte limit, found again after a restart.

What a file is stands in `disk_format`, how it gets there in `disk_files`, how index and files
go together in `disk_store`, what is made of a directory that was left behind in `disk_scan`.
The index is in memory; after a restart the files alone say what there is.

The limit counts what files take in blocks of 4 KiB, the first page of each included. Least
recently used goes first. A file's mtime says when it was last put or got; gets set it once in
ten seconds at most, so that after a restart the order is right up to that.

A file that is damaged is removed, one log line each, and a miss. A disk that is full or fails,
a directory that is gone or may not be written: a put is not stored, a get is a miss, and each
kind of error is warned of once a minute. A full disk evicts nothing: the limit does.

A disk that hangs keeps the threads that are in it. Once one of them has been there for
`patience_s`, nobody else is sent after it until it returns: puts are not stored, gets are misses,
nothing is removed.

Puts that do not block are copied and stored in their order by one worker; see `putqueue`.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmcache_redis.errors import ConfigError
from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import MemoryFormat, RemoteMetadata
from lmcache_redis.storage.checks import allocated_views, payload_views
from lmcache_redis.storage.copying import Block
from lmcache_redis.storage.disk_files import SYNC_POLICIES, ChunkFiles, Sync, lock_directory
from lmcache_redis.storage.disk_format import disk_bytes
from lmcache_redis.storage.disk_scan import Scan
from lmcache_redis.storage.disk_store import DiskStore
from lmcache_redis.storage.interface import Allocate, LMCBackendInterface
from lmcache_redis.storage.putqueue import PutQueue, QueuedPut

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
DEFAULT_QUEUE_BYTES = 256 << 20
DEFAULT_PATIENCE_S = 5.0


class LMCLocalDiskBackend(LMCBackendInterface):
    """Chunks in files of a directory, which it makes if need be and which it alone uses.

    limit_bytes: see the module. sync: see `disk_files`. queue_bytes: payload of puts that do
    not block and wait for the worker. patience_s: see the module. Opening takes as long as to read
    a page of every file.

    Raises ConfigError for impossible values, for a directory that cannot be used, and for one
    that another tier has open, in this process or another.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        limit_bytes: int,
        sync: Sync = "none",
        dst_device: str = "cpu",
        fmt: MemoryFormat = MemoryFormat.UNDEFINED,
        queue_bytes: int = DEFAULT_QUEUE_BYTES,
        *,
        patience_s: float = DEFAULT_PATIENCE_S,
    ) -> None:
        super().__init__(dst_device, fmt)
        if sync not in SYNC_POLICIES:
            raise ConfigError(f"sync is {sync!r}; it is one of {', '.join(SYNC_POLICIES)}")
        if patience_s <= 0:
            raise ConfigError(f"patience_s is {patience_s}; it must be positive")
        path = Path(directory)
        self._store = DiskStore(ChunkFiles(path, sync), limit_bytes, patience_s)
        self._changed = threading.Condition(threading.Lock())
        self._calls = 0
        self._closed = False
        self._lock_fd = lock_directory(path)
        try:
            self._store.take_over(Scan(path))
        except OSError as error:
            os.close(self._lock_fd)
            raise ConfigError(
                f"the directory {path} cannot be read ({error}): make it readable or choose another"
            ) from error
        self._queue = PutQueue(self._store_queued, queue_bytes, "lmcr-disk")

    @property
    def limit_bytes(self) -> int:
        return self._store.index.limit_bytes

    @property
    def used_bytes(self) -> int:
        """What files take, those that are being written included."""
        return self._store.index.used_bytes

    def put_bytes(
        self,
        key: ObjectKey,
        metadata: RemoteMetadata,
        payload: Sequence[memoryview],
        blocking: bool = True,
    ) -> bool:
        with self._in_call():
            views = payload_views(metadata, payload)
            if disk_bytes(metadata.length) > self.limit_bytes:
                return False
            if not blocking:
                return self._queue.offer(key, metadata, views)
            self._queue.drop(key)
            return self._store.put(key, metadata, views)

    def get_bytes(self, key: ObjectKey, allocate: Allocate) -> RemoteMetadata | None:
        with self._in_call():
            opened = self._store.open(key)
            if opened is None:
                return None
            fd, file = opened
            try:
                views = allocated_views(file.metadata, allocate)
                if views is None or not self._store.read(fd, key, file, views):
                    return None
            finally:
                os.close(fd)
            return file.metadata

    def contains(self, key: ObjectKey) -> bool:
        with self._in_call():
            return self._store.contains(key)

    def remove(self, key: ObjectKey) -> bool:
        with self._in_call():
            waited = self._queue.drop(key)
            return self._store.remove(key) or waited

    def list(self) -> builtins.list[ObjectKey]:
        with self._in_call():
            return self._store.keys()

    def flush(self, timeout_s: float) -> bool:
        with self._in_call():
            return self._queue.flush(timeout_s)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """See the interface. timeout_s: for puts that wait, then for each that is under way."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        ended = self._queue.close(timeout_s)
        with self._changed:
            ended &= self._changed.wait_for(lambda: not self._calls, timeout_s)
        if ended:
            self._store.index.clear()
            os.close(self._lock_fd)
        else:
            # Whoever opened the directory now would meet a file that is still to be renamed.
            logger.warning("the disk does not answer: its directory stays locked by this process")

    @contextlib.contextmanager
    def _in_call(self) -> Iterator[None]:
        """`close` waits for calls, for a bounded time, before others may have the directory."""
        with self._changed:
            if self._closed:
                raise RuntimeError("the disk tier is closed")
            self._calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._calls -= 1
                if self._closed:
                    self._changed.notify_all()

    def _store_queued(self, put: QueuedPut, block: Block) -> None:
        self._store.put(put.key, put.metadata, [block.data], put)
