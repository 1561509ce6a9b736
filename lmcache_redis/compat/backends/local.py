"""A backend in host memory: copies of chunks, up to a byte limit, with LRU eviction.

Blocking calls over a `HostPool` of heap memory (`lmcache_redis.cache`). The lock is held only while
the pool changes; payloads are copied outside it, without the GIL, while the entry is pinned. So a
chunk that is replaced or removed during a read is read whole, and a chunk being read is not
evicted.

`put` and `get` make a chunk the most recently used; `contains` does not. The limit counts payload.
In addition there may be one block per call in flight, and spare memory for the next puts: an eighth
of the limit, at most 128 MiB.

There is no worker thread. A non-blocking put must copy at once, because the caller may reuse its
buffers on return, and the copy is all the work: inserting the entry takes microseconds, less than
handing it to a thread. So both kinds of put are the same, and `flush` has nothing to wait for.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Sequence

import numpy as np

from lmcache_redis.cache.pool import Entry, EntryState, HostPool
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.compat.backends.buffers import allocated_views, gather, payload_views, scatter
from lmcache_redis.compat.backends.interface import Allocate, LMCBackendInterface
from lmcache_redis.compat.heap import HeapMemory
from lmcache_redis.errors import ConfigError

_MOST_SPARE_BYTES = 128 << 20


class LMCLocalBackend(LMCBackendInterface):
    """Chunks in the memory of this process.

    limit_bytes: the most payload to hold; a larger chunk is not stored. Raises ConfigError unless
    it is positive.
    """

    def __init__(
        self, limit_bytes: int, dst_device: str = "cpu", fmt: MemoryFormat = MemoryFormat.UNDEFINED
    ) -> None:
        super().__init__(dst_device, fmt)
        if limit_bytes <= 0:
            raise ConfigError(f"limit_bytes is {limit_bytes}; it must be positive")
        self.limit_bytes = limit_bytes
        self._memory = HeapMemory(spare_bytes=min(limit_bytes // 8, _MOST_SPARE_BYTES))
        self._pool = HostPool(self._memory, limit_bytes)
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Payload of the chunks, without those being read."""
        with self._lock:
            return self._pool.idle

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
        with self._lock:
            entry = self._pool.reserve(None, metadata.length)
        if entry is None:
            return False
        try:
            entry.tag = metadata
            gather(views, np.frombuffer(entry.block, np.uint8))
            with self._lock:
                self._check_open()
                return self._pool.publish(entry, key.to_bytes())
        finally:
            self._give_back(entry)

    def get_bytes(self, key: ObjectKey, allocate: Allocate) -> RemoteMetadata | None:
        with self._lock:
            self._check_open()
            entry = self._pool.get(key.to_bytes())
            if entry is None:
                return None
            self._pool.pin(entry)
        try:
            metadata = entry.tag
            assert isinstance(metadata, RemoteMetadata)
            views = allocated_views(metadata, allocate)
            if views is None:
                return None
            scatter(np.frombuffer(entry.block, np.uint8), views)
            return metadata
        finally:
            self._give_back(entry)

    def contains(self, key: ObjectKey) -> bool:
        with self._lock:
            self._check_open()
            return key.to_bytes() in self._pool

    def remove(self, key: ObjectKey) -> bool:
        with self._lock:
            self._check_open()
            entry = self._pool.peek(key.to_bytes())
            if entry is None:
                return False
            self._pool.discard(entry)
            return True

    def list(self) -> builtins.list[ObjectKey]:
        with self._lock:
            self._check_open()
            keys = [entry.key for entry in self._pool]
        return [ObjectKey.from_bytes(key) for key in keys]

    def flush(self, timeout_s: float) -> bool:
        self._check_open()
        return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._pool.clear()
            self._memory.close()

    def _give_back(self, entry: Entry) -> None:
        """End a call: unpin the entry, and discard it if it was not published."""
        with self._lock:
            if entry.state is EntryState.FILLING:
                self._pool.discard(entry)
            self._pool.unpin(entry)
