"""The backends: memory, a directory, Redis or Valkey, and a hierarchy of these."""

from __future__ import annotations

import os
from collections.abc import Sequence

from lmcache_redis.cache.backing import DISK_COUNTERS, REDIS_COUNTERS, Backing
from lmcache_redis.cache.disk.files import Sync
from lmcache_redis.cache.disk.format import disk_bytes
from lmcache_redis.cache.disk.tier import DEFAULT_PATIENCE_S, DiskTier
from lmcache_redis.chunks.frame import FINGERPRINT_BYTES
from lmcache_redis.chunks.metadata import MemoryFormat
from lmcache_redis.chunks.names import ChunkNames
from lmcache_redis.compat.backends.cache_thread import Storage
from lmcache_redis.compat.backends.interface import LMCBackendInterface
from lmcache_redis.config import DEFAULT_SLOT_BYTES
from lmcache_redis.errors import ConfigError
from lmcache_redis.resp import RedisOptions, RedisPlane

DEFAULT_DEADLINE_S = 5.0
DEFAULT_LIST_DEADLINE_S = 60.0
DEFAULT_QUEUE_BYTES = 256 << 20
DEFAULT_WINDOW_CHUNKS = 16
# Small enough to be transferred within the deadline even on a slow network.
DEFAULT_WINDOW_BYTES = 128 << 20
DEFAULT_WAIT_S = 10.0
DEFAULT_READ_AHEAD = 4
# A write may wait for others; a call that hangs is given up earlier, after `patience_s`.
_DISK_DEADLINE_S = 60.0
# `Storage.queue_bytes` bounds what waits.
_NO_LIMIT_BYTES = 1 << 62


class LMCLocalBackend(LMCBackendInterface):
    """Chunks in the memory of this process, up to a byte limit, with LRU eviction.

    limit_bytes: the most payload to hold; a larger chunk is not stored. In addition there may be
    one block per call in flight, and 128 MiB of spare memory. Raises ConfigError unless it is
    positive.
    """

    def __init__(
        self, limit_bytes: int, dst_device: str = "cpu", fmt: MemoryFormat = MemoryFormat.UNDEFINED
    ) -> None:
        if limit_bytes <= 0:
            raise ConfigError(f"limit_bytes is {limit_bytes}; it must be positive")
        self.limit_bytes = limit_bytes
        storage = Storage(
            DEFAULT_DEADLINE_S, DEFAULT_LIST_DEADLINE_S, _NO_LIMIT_BYTES, ChunkNames(), limit_bytes
        )
        super().__init__(storage, dst_device, fmt)


class LMCLocalDiskBackend(LMCBackendInterface):
    """Chunks in files of a directory, created if needed, that no other tier uses.

    limit_bytes: what the files may take. sync: see `cache.disk.files`. queue_bytes: payload of
    non-blocking puts, counted from before it is copied until it is written or dropped. patience_s:
    once a call of the disk has been in flight for longer, no other starts until it returns: puts
    are not stored, gets are misses, removals do nothing. layout, key_prefix: the fingerprint (32
    bytes) of an engine's KV cache and the key prefix of its agent, to share the chunks that the
    agent keeps in this directory.

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
        names = _names_of(layout, key_prefix)
        self._disk = DiskTier(
            directory, limit_bytes, sync,
            read_patience_s=patience_s, write_patience_s=patience_s, write_nice=0,
        )  # fmt: skip
        tiers = (Backing(self._disk, DISK_COUNTERS, _NO_LIMIT_BYTES),)
        storage = Storage(
            _DISK_DEADLINE_S, DEFAULT_LIST_DEADLINE_S, queue_bytes, names, tiers=tiers
        )
        super().__init__(storage, dst_device, fmt)

    @property
    def limit_bytes(self) -> int:
        return self._disk.store.limit_bytes

    @property
    def used_bytes(self) -> int:
        """What the files take."""
        return self._disk.store.used_bytes

    def _accepts(self, nbytes: int) -> bool:
        return super()._accepts(nbytes) and disk_bytes(nbytes) <= self.limit_bytes


class LMCRemoteBackend(LMCBackendInterface):
    """Chunks in Redis or Valkey: one server, a Sentinel's master, or a cluster.

    Every call, and each step of an iterator, ends within `deadline_s` (`list`: `list_deadline_s`),
    including name resolution and connecting. While the server is down all calls return at once:
    False, None or an empty list. In addition to the plane's commands
    (docs/internals/data-plane.md), the server must allow GETRANGE and SCAN.

    redis: a URL, or options with one. deadline_s: of a call, and of the write of an accepted put.
    slot_bytes: the largest payload of a stripe that is written; stripes of any size are read.
    pending_bytes: the limit of copies of accepted puts; a put beyond it is not accepted. layout:
    the fingerprint (32 bytes) of an engine's KV cache, to share the chunks of its agents. Agents
    can read a chunk put here if its shape, dtype and format (MemoryFormat.PAGES) are those of their
    own chunks, and slot_bytes is theirs. window_chunks, window_bytes: the most that a batched call
    has in flight, but always at least one chunk.

    Raises ConfigError if the URL names no server or a number is invalid. Connects in the
    background.
    """

    close_s = 1.0
    _default_window = 1

    def __init__(
        self,
        redis: RedisOptions | str,
        dst_device: str = "cpu",
        fmt: MemoryFormat = MemoryFormat.UNDEFINED,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        list_deadline_s: float = DEFAULT_LIST_DEADLINE_S,
        slot_bytes: int = DEFAULT_SLOT_BYTES,
        pending_bytes: int = DEFAULT_QUEUE_BYTES,
        layout: bytes | None = None,
        window_chunks: int | None = None,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
    ) -> None:
        if deadline_s < 0.01 or list_deadline_s < deadline_s:
            raise ConfigError("deadline_s is at least 0.01, list_deadline_s at least deadline_s")
        if slot_bytes < 64 or pending_bytes < 0:
            raise ConfigError("slot_bytes is at least 64, pending_bytes at least 0")
        window_chunks = self._default_window if window_chunks is None else window_chunks
        if window_chunks < 1 or window_bytes < 1:
            raise ConfigError("window_chunks and window_bytes are at least 1")
        options = RedisOptions(redis) if isinstance(redis, str) else redis
        names = _names_of(layout, options.key_prefix)
        self._plane = RedisPlane(options)
        tiers = (Backing(self._plane, REDIS_COUNTERS, _NO_LIMIT_BYTES),)
        storage = Storage(deadline_s, list_deadline_s, pending_bytes, names, 0, tiers, slot_bytes)
        super().__init__(storage, dst_device, fmt, window_chunks, window_bytes)
        self._plane.start()


class LMCPipelinedRemoteBackend(LMCRemoteBackend):
    """The same, with several chunks of a batch in flight unless ``window_chunks`` is given."""

    _default_window = DEFAULT_WINDOW_CHUNKS


class LMCHybridBackend(LMCBackendInterface):
    """A hierarchy of the backends above, the fastest first.

    A put is written to all tiers; it is stored if any of them stores it. A tier that does not store
    it removes what it has under the key. A get asks the tiers in order; a chunk that a lower one
    has is put into those above. Concurrent gets of one key are one load. A put that does not block
    still waits for memory, so that gets find the chunk at once.

    tiers: backends of this module; memory, if any, is the first. The hybrid has memory of its own,
    of the first one's size, and shares the others' disks and servers; `close` closes them all.
    wait_s: the deadline of a call, if no tier has a shorter one. read_ahead: how many chunks of a
    batched call are in flight at once.

    Raises ConfigError for other tiers, or if they differ in layout or key prefix.
    """

    def __init__(
        self,
        tiers: Sequence[LMCBackendInterface],
        dst_device: str = "cpu",
        fmt: MemoryFormat = MemoryFormat.UNDEFINED,
        *,
        wait_s: float = DEFAULT_WAIT_S,
        read_ahead: int = DEFAULT_READ_AHEAD,
    ) -> None:
        if not tiers or wait_s < 0 or read_ahead < 1:
            raise ConfigError(
                "a hybrid needs at least one tier, wait_s of at least 0, read_ahead of at least 1"
            )
        self._members = tuple(tiers)
        storage = _stacked(self._members, wait_s)
        super().__init__(storage, dst_device, fmt, read_ahead)

    def close(self, timeout_s: float | None = None) -> None:
        """See the interface."""
        super().close(timeout_s)
        for member in self._members:
            member.close(timeout_s)


def _stacked(members: Sequence[LMCBackendInterface], wait_s: float) -> Storage:
    """The storage of a hybrid. Raises ConfigError."""
    if not all(isinstance(each, LMCBackendInterface) for each in members):
        raise ConfigError("the tiers of a hybrid are backends of lmcache_redis.compat.backends")
    first, *lower = (each.storage for each in members)
    if any(each.memory_bytes for each in lower):
        raise ConfigError("memory can only be the first tier of a hybrid, and once")
    with_tiers = [each for each in (first, *lower) if each.tiers] or [first]
    names = with_tiers[0].names
    own = names.common, names.fingerprint
    if any((each.names.common, each.names.fingerprint) != own for each in with_tiers):
        raise ConfigError("the tiers of a hybrid have one layout and one key_prefix")
    return Storage(
        min(wait_s, *(each.deadline_s for each in with_tiers)),
        min(each.list_deadline_s for each in with_tiers),
        min(each.queue_bytes for each in with_tiers),
        names,
        first.memory_bytes,
        tuple(backing for each in with_tiers for backing in each.tiers),
        min(each.stripe_bytes for each in with_tiers),
    )


def _names_of(layout: bytes | None, key_prefix: bytes) -> ChunkNames:
    """The names of a backend's chunks. Raises ConfigError if layout is not a fingerprint."""
    if layout is not None and len(layout) != FINGERPRINT_BYTES:
        raise ConfigError(f"layout is a fingerprint of {FINGERPRINT_BYTES} bytes")
    return ChunkNames(layout, key_prefix)
