"""A backend in a directory: blocking calls over `cache.disk`.

Blocking calls use files on the caller's thread. The disk tier's thread writes non-blocking puts.
"""

from __future__ import annotations

import os
from functools import partial

from lmcache_redis.cache.disk.files import Sync
from lmcache_redis.cache.disk.format import disk_bytes
from lmcache_redis.cache.disk.tier import DEFAULT_PATIENCE_S, READ, REMOVAL, WRITE, DiskTier
from lmcache_redis.chunks.frame import parsed_metadata
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import MAX_SIZE, MemoryFormat, RemoteMetadata
from lmcache_redis.compat.backends.buffers import allocated_views
from lmcache_redis.compat.backends.interface import Allocate
from lmcache_redis.compat.backends.tiered import Put, TierBackend, names_of
from lmcache_redis.errors import ConfigError
from lmcache_redis.tiers import ReadOutcome, WriteOutcome

CLOSE_TIMEOUT_S = 5.0
DEFAULT_QUEUE_BYTES = 256 << 20


class LMCLocalDiskBackend(TierBackend):
    """Chunks in files of a directory, created if needed, that no other tier uses.

    limit_bytes: what the files may take. sync: see `cache.disk.files`. queue_bytes: payload of
    non-blocking puts, counted from before it is copied until it is written or dropped. patience_s:
    once a call has been in flight for longer, no other starts until it returns: puts are not
    stored, gets are misses, removals do nothing. layout, key_prefix: the fingerprint (32 bytes) of
    an engine's KV cache and the key prefix of its agent, to share the chunks that the agent keeps
    in this directory.

    Raises ConfigError if a value is invalid, or if the directory cannot be used or is in use by
    another tier, of this process or another.
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
        if patience_s <= 0:
            raise ConfigError(f"patience_s is {patience_s}; it must be positive")
        names = names_of(layout, key_prefix)
        self._disk = DiskTier(
            directory, limit_bytes, sync, read_patience_s=patience_s, write_patience_s=patience_s
        )
        super().__init__(self._disk, names, MAX_SIZE, queue_bytes, dst_device, fmt)

    @property
    def limit_bytes(self) -> int:
        return self._disk.limit_bytes

    @property
    def used_bytes(self) -> int:
        return self._disk.used_bytes

    def get_bytes(self, key: ObjectKey, allocate: Allocate) -> RemoteMetadata | None:
        """See the interface. The file is opened before `allocate` is called, so it stays whole."""
        self._check_open()
        chunk_key = self._names.chunk_key(key)
        store = self._disk.store
        opened = self._disk.run(READ, partial(store.open, chunk_key))
        if opened is None:
            return None
        fd, file = opened
        try:
            if file.cut.fingerprint != self._names.fingerprint:
                return None
            metadata = parsed_metadata(file.cut.metadata)
            views = allocated_views(metadata, allocate)
            if views is None:
                return None
            outcome = self._disk.run(READ, partial(store.read, fd, chunk_key, file, views))
            return metadata if outcome is ReadOutcome.LOADED else None
        finally:
            os.close(fd)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """See the interface. timeout_s: for queued puts, and again for the calls in flight."""
        self._closed = True
        self._disk.close(2 * timeout_s)

    def _fits(self, chunk_bytes: int) -> bool:
        return disk_bytes(chunk_bytes) <= self.limit_bytes

    def _store(self, put: Put) -> bool:
        write = partial(self._disk.store.write, put.key, put.frame, put.views)
        return self._disk.run(WRITE, write) is WriteOutcome.STORED

    def _remove(self, chunk_key: bytes, deadline: float) -> bool:
        return self._disk.run(REMOVAL, partial(self._disk.store.remove, chunk_key)) or False
