"""A tier in host memory: copies of chunks, up to a byte limit, least recently used first out.

An entry is a private block that nobody writes to again. The lock is held only to change the
index: copies, in both directions, run outside it and without the GIL, on a reference that keeps
the entry's memory whole while others evict or replace it. With such a reference chunks are lent
without a copy (`lending`); with the last one the memory is free for the next (`recycling`).

`put` and a successful `get` make a chunk the most recently used; `contains` does not. The limit
counts payload. Beside it there may be

    one block for each put that is under way, and the room that was given to somebody
    entries that left the index while somebody still reads them; nothing more is lent, nor room
        given, while these and the blocks above are over a quarter of the limit, or 128 MiB if
        that is more
    memory kept for the next puts, an eighth of the limit, at most 128 MiB

There is no worker. The caller's buffers are the caller's again on return, so a put that does
not block has to copy at once all the same, and the copy is all the work: the insertion after it
takes microseconds, less than to hand it over. So both kinds of put do the same, nothing ever
waits, and `flush` has nothing to do.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lmcache_redis.backends.checks import allocated_views, payload_views
from lmcache_redis.backends.copying import Block, gather, scatter
from lmcache_redis.backends.interface import Allocate, LMCBackendInterface
from lmcache_redis.backends.lending import Lender, Lent
from lmcache_redis.backends.recycling import Blocks
from lmcache_redis.cache.lru import LruIndex
from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import MemoryFormat, RemoteMetadata

_MOST_SPARE_BYTES = 128 << 20
_LEAST_UNLISTED_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    metadata: RemoteMetadata
    block: Block

    @property
    def nbytes(self) -> int:
        return self.metadata.length


class LMCLocalBackend(LMCBackendInterface, Lender):
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
        self._index: LruIndex[ObjectKey, _Entry] = LruIndex(limit_bytes)
        self._most_unlisted_bytes = max(limit_bytes // 4, _LEAST_UNLISTED_BYTES)
        self._blocks = Blocks(min(limit_bytes // 8, _MOST_SPARE_BYTES))
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
        block = self._block(metadata.length)
        if block is None:
            return False
        gather(views, block)
        self._insert(key, _Entry(metadata, block))
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

    def borrow(self, key: ObjectKey) -> Lent | None:
        """See the lender."""
        with self._lock:
            self._check_open()
            entry = self._index.get(key)
            if entry is None or not self._lends():
                return None
            self._index.touch(key, entry)
        return Lent(entry.metadata, entry.block.data.toreadonly())

    def room(self, metadata: RemoteMetadata) -> memoryview | None:
        """See the lender."""
        with self._lock:
            self._check_open()
            if not self._lends():
                return None
        block = self._block(metadata.length)
        return None if block is None else block.data

    def keep(
        self,
        key: ObjectKey,
        metadata: RemoteMetadata,
        room: memoryview,
        visible: Callable[[], None],
    ) -> bool:
        """See the lender."""
        (view,) = payload_views(metadata, (room,))
        self._insert(key, _Entry(metadata, np.frombuffer(view, np.uint8)))
        visible()
        return True

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
        self._blocks.close()

    def _block(self, nbytes: int) -> Block | None:
        if not 0 < nbytes <= self.limit_bytes:
            return None
        try:
            return self._blocks.take(nbytes)
        except MemoryError:
            return None

    def _insert(self, key: ObjectKey, entry: _Entry) -> None:
        with self._lock:
            self._check_open()
            # What goes is let go of, thus free, after the lock.
            replaced = self._index.pop(key)
            evicted = self._index.reserve(entry.nbytes)
            self._index.fill(key, entry)
        del replaced, evicted

    def _lends(self) -> bool:
        return self._blocks.taken_bytes - self._index.used_bytes <= self._most_unlisted_bytes

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the local tier is closed")
