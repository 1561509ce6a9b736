"""A tier in a directory: the blocking face of `cache.disk`, which has files, limit and hangs.

Calls that block read and write on the caller's thread. Puts that do not block are copied, and
written in their order by the disk tier's thread. The copies are bounded in bytes, from when one is
begun to when it is stored or dropped; a put that does not fit is refused. A later put or removal of
a key drops the one before it.
"""

from __future__ import annotations

import builtins
import math
import os
import threading
from collections.abc import Sequence
from functools import lru_cache, partial

from lmcache_redis.backends.checks import allocated_views, payload_views
from lmcache_redis.backends.copying import gathered
from lmcache_redis.backends.interface import Allocate, LMCBackendInterface
from lmcache_redis.cache.disk.files import Sync
from lmcache_redis.cache.disk.format import disk_bytes
from lmcache_redis.cache.disk.tier import DEFAULT_PATIENCE_S, READ, REMOVAL, WRITE, DiskTier
from lmcache_redis.errors import ConfigError
from lmcache_redis.keys import ObjectKey
from lmcache_redis.naming import ChunkNames
from lmcache_redis.protocol import MemoryFormat, RemoteMetadata
from lmcache_redis.resp.outcomes import ChunkIO, ReadOutcome, WriteOutcome
from lmcache_redis.stripe import FINGERPRINT_BYTES, ChunkFrame

CLOSE_TIMEOUT_S = 5.0
DEFAULT_QUEUE_BYTES = 256 << 20

_parsed = lru_cache(maxsize=64)(RemoteMetadata.deserialize)


class LMCLocalDiskBackend(LMCBackendInterface):
    """Chunks in files of a directory, which it makes if need be and which it alone uses.

    limit_bytes: what files may take. sync: see `cache.disk.files`. queue_bytes: payload of puts
    that do not block. patience_s: once a call has been in flight for so long, no other is begun
    until it returns: puts are not stored, gets are misses, nothing is removed. layout: the
    fingerprint, 32 bytes, of an engine's KV cache, and key_prefix that of its agent; then the
    chunks are those that the agent keeps in this directory.

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
        layout: bytes | None = None,
        key_prefix: bytes = b"",
    ) -> None:
        super().__init__(dst_device, fmt)
        if patience_s <= 0:
            raise ConfigError(f"patience_s is {patience_s}; it must be positive")
        if layout is not None and len(layout) != FINGERPRINT_BYTES:
            raise ConfigError(f"layout is a fingerprint of {FINGERPRINT_BYTES} bytes")
        self._names = ChunkNames(layout, key_prefix)
        self._queue_bytes = queue_bytes
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._queued: dict[ChunkIO, None] = {}  # waiting or in flight
        self._latest: dict[bytes, ChunkIO] = {}  # of those, what was not dropped
        self._closed = False
        self._tier = DiskTier(
            directory, limit_bytes, sync, read_patience_s=patience_s, write_patience_s=patience_s
        )

    @property
    def limit_bytes(self) -> int:
        return self._tier.limit_bytes

    @property
    def used_bytes(self) -> int:
        """What files take, those that are being written included."""
        return self._tier.used_bytes

    def put_bytes(
        self,
        key: ObjectKey,
        metadata: RemoteMetadata,
        payload: Sequence[memoryview],
        blocking: bool = True,
    ) -> bool:
        """See the interface."""
        self._check_open()
        views = payload_views(metadata, payload)
        if disk_bytes(metadata.length) > self.limit_bytes:
            return False
        chunk_key = self._names.chunk_key(key)
        frame = self._names.frame(key, metadata, metadata.length)
        if not blocking:
            return self._enqueue(chunk_key, frame, views)
        self._drop(chunk_key)
        write = partial(self._tier.store.write, chunk_key, frame, views)
        return self._tier.run(WRITE, write) is WriteOutcome.STORED

    def get_bytes(self, key: ObjectKey, allocate: Allocate) -> RemoteMetadata | None:
        """See the interface. The file is open before `allocate` is called, and so stays whole."""
        self._check_open()
        chunk_key = self._names.chunk_key(key)
        store = self._tier.store
        opened = self._tier.run(READ, partial(store.open, chunk_key))
        if opened is None:
            return None
        fd, file = opened
        try:
            if file.cut.fingerprint != self._names.fingerprint:
                return None
            metadata = _parsed(file.cut.metadata)
            views = allocated_views(metadata, allocate)
            if views is None:
                return None
            outcome = self._tier.run(READ, partial(store.read, fd, chunk_key, file, views))
            return metadata if outcome is ReadOutcome.LOADED else None
        finally:
            os.close(fd)

    def contains(self, key: ObjectKey) -> bool:
        """See the interface."""
        self._check_open()
        return self._tier.lookup(self._names.chunk_key(key))

    def remove(self, key: ObjectKey) -> bool:
        """See the interface."""
        self._check_open()
        chunk_key = self._names.chunk_key(key)
        was_queued = self._drop(chunk_key)
        return self._tier.run(REMOVAL, partial(self._tier.store.remove, chunk_key)) or was_queued

    def list(self) -> builtins.list[ObjectKey]:
        """See the interface. Chunks of its layout: a directory may hold those of several."""
        self._check_open()
        keys = map(self._names.parse, self._tier.store.keys(self._names.common))
        return [key for key in keys if key is not None]

    def flush(self, timeout_s: float) -> bool:
        """See the interface."""
        self._check_open()
        with self._changed:
            before = set(self._queued)
            return self._changed.wait_for(lambda: before.isdisjoint(self._queued), timeout_s)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """See the interface. timeout_s: for puts that wait, then for the calls in flight."""
        self._closed = True
        self._tier.close(2 * timeout_s)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the disk tier is closed")

    def _enqueue(self, chunk_key: bytes, frame: ChunkFrame, views: Sequence[memoryview]) -> bool:
        """Copy the payload and have it written. False: there is no room for the copy."""
        with self._changed:
            if self._queued_bytes + frame.chunk_bytes > self._queue_bytes:
                return False
            self._queued_bytes += frame.chunk_bytes
        try:
            io = ChunkIO(chunk_key, frame, [gathered(views).data], math.inf)
        except MemoryError:
            with self._changed:
                self._queued_bytes -= frame.chunk_bytes
            return False
        with self._changed:
            self._drop(chunk_key)
            self._queued[io] = None
            self._latest[chunk_key] = io
            self._tier.write_all([io], self._written, stuck=lambda _: None)
        return True

    def _drop(self, chunk_key: bytes) -> bool:
        """Drop the put of a key that waits or is in flight; whether there was one.

        One in flight may still be found until the index is changed next: call this before that.
        """
        with self._changed:
            io = self._latest.pop(chunk_key, None)
            if io is not None:
                self._tier.cancel(io)
        return io is not None

    def _written(self, io: ChunkIO, outcome: WriteOutcome) -> None:
        with self._changed:
            del self._queued[io]
            self._queued_bytes -= io.frame.chunk_bytes
            if self._latest.get(io.key) is io:
                del self._latest[io.key]
            self._changed.notify_all()
