"""A tier in host memory: copies of chunks, up to a byte limit, least recently used first out.

An entry is a private copy of the payload that nobody writes to again. The lock is held only to
change the index: copies, in both directions, run outside it and without the GIL, on a
reference that keeps the entry's memory whole while others evict or replace it.

`put` and a successful `get` make a chunk the most recently used; `contains` does not. The limit
counts payload. Beside it there may be, for a moment, one copy for each thread that is in a put,
and entries that left the index while a get still reads them.

There is no worker. The caller's buffers are the caller's again on return, so a put that does
not block has to copy at once all the same, and the copy is all the work: the insertion after it
takes microseconds, less than to hand it over. So both kinds of put do the same, nothing ever
waits, and `flush` has nothing to do.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import MemoryFormat, RemoteMetadata
from lmcache_redis.storage.checks import allocated_views, payload_views
from lmcache_redis.storage.copying import Block, gathered, scatter
from lmcache_redis.storage.interface import Allocate, LMCBackendInterface
from lmcache_redis.storage.lru import LruIndex


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    metadata: RemoteMetadata
    block: Block

    @property
    def nbytes(self) -> int:
        return self.metadata.length


class LMCLocalBackend(LMCBackendInterface):
    """Chunks in the memory of this process.

    limit_bytes: payload to hold at most; a chunk larger than that is not stored. Raises
    ConfigError unless it is positive.
    """

    def __init__(
        self,
        limit_bytes: int,
        dst_device: str = "cpu",
        fmt: MemoryFormat = MemoryFormat.UNDEFINED,
    ) -> None:
        super().__init__(dst_device, fmt)
        self._index: LruIndex[_Entry] = LruIndex(limit_bytes)
        self._lock = threading.Lock()
        self._closed = False

    @property
    def limit_bytes(self) -> int:
        return self._index.limit_bytes

    @property
    def used_bytes(self) -> int:
        """Payload of the chunks that it holds."""
        return self._index.used_bytes

    def put_bytes(
        self,
        key: ObjectKey,
        metadata: RemoteMetadata,
        payload: Sequence[memoryview],
        blocking: bool = True,
    ) -> bool:
        self._check_open()
        views = payload_views(metadata, payload)
        if metadata.length > self.limit_bytes:
            return False
        try:
            entry = _Entry(metadata, gathered(views))
        except MemoryError:
            return False
        with self._lock:
            self._check_open()
            # What goes is let go of, thus freed, after the lock.
            replaced = self._index.pop(key)
            evicted = self._index.reserve(entry.nbytes)
            self._index.fill(key, entry)
        del replaced, evicted
        return True

    def get_bytes(self, key: ObjectKey, allocate: Allocate) -> RemoteMetadata | None:
        with self._lock:
            self._check_open()
            entry = self._index.get(key)
        if entry is None:
            return None
        views = allocated_views(entry.metadata, allocate)
        if views is None:
            return None
        scatter(entry.block, views)
        with self._lock:
            self._index.touch(key, entry)
        return entry.metadata

    def contains(self, key: ObjectKey) -> bool:
        with self._lock:
            self._check_open()
            return self._index.get(key) is not None

    def remove(self, key: ObjectKey) -> bool:
        with self._lock:
            self._check_open()
            removed = self._index.pop(key)
        return removed is not None

    def list(self) -> builtins.list[ObjectKey]:
        with self._lock:
            self._check_open()
            return self._index.keys()

    def flush(self, timeout_s: float) -> bool:
        self._check_open()
        return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._index.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the local tier is closed")
