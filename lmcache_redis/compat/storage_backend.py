"""LMCache's storage backends (`lmcache.storage_backend`) over `lmcache_redis.compat.backends`.

The classes have LMCache's names, constructors, parameters and return types. They take LMCache's
configuration objects and keys, and any objects with the same attributes (`compat.config`,
`compat.engine_keys`), and ObjectKeys too. Each is a thin face of the backend with the same name,
whose promises hold: a limit in bytes, LRU eviction, checksums, deadlines. A server or a disk that
fails raises nothing: a get is a miss, a put stores nothing, and `batched_put` returns fewer.

docs/reference/lmcache-names.md lists what differs. What LMCache stored (pickles, safetensors) is
not read.
"""

from __future__ import annotations

import builtins
import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.compat import backends
from lmcache_redis.compat.backend_settings import (
    check_device,
    disk_backend,
    memory_backend,
    redis_backend,
    setting,
)
from lmcache_redis.compat.cache_engine_key import CacheEngineKey
from lmcache_redis.compat.config import (
    LMCacheEngineConfig,
    LMCacheEngineMetadata,
    LMCacheMemPoolMetadata,
)
from lmcache_redis.compat.engine_keys import EngineKey, KeyKinds, object_key_of

if TYPE_CHECKING:
    import torch

__all__ = [
    "CacheEngineKey",
    "LMCBackendInterface",
    "LMCHybridBackend",
    "LMCLocalBackend",
    "LMCLocalDiskBackend",
    "LMCPipelinedRemoteBackend",
    "LMCRemoteBackend",
    "LMCacheEngineConfig",
    "LMCacheEngineMetadata",
    "LMCacheMemPoolMetadata",
]

AnyKey: TypeAlias = "ObjectKey | EngineKey"


class LMCBackendInterface(ABC):
    """The calls of every backend. A backend of one's own has put, get, contains and close.

    dst_device: where `get` returns tensors: "cpu", "cuda" or "cuda:N". Raises ConfigError if this
    machine has no such device.
    """

    def __init__(self, dst_device: str = "cuda") -> None:
        check_device(dst_device)
        self.dst_device = dst_device

    @abstractmethod
    def put(self, key: AnyKey, kv_chunk: torch.Tensor, blocking: bool = True) -> None:
        """Store a chunk of one to eight dimensions, none of them a batch.

        blocking: it is stored on return. Otherwise it is copied, and stored in the background.
        """

    @abstractmethod
    def get(self, key: AnyKey) -> torch.Tensor | None:
        """The chunk, in new memory on dst_device; None if it is not found."""

    @abstractmethod
    def contains(self, key: AnyKey) -> bool:
        """Whether the chunk is stored."""

    @abstractmethod
    def close(self) -> None:
        """Store what is queued, for a bounded time, and end all threads."""

    def batched_put(
        self, keys_and_chunks: Iterable[tuple[AnyKey, torch.Tensor]], blocking: bool = True
    ) -> int:
        """`put` for each; returns how many were put."""
        count = 0
        for key, kv_chunk in keys_and_chunks:
            self.put(key, kv_chunk, blocking)
            count += 1
        return count

    def batched_get(self, keys: Iterable[AnyKey]) -> Iterable[torch.Tensor | None]:
        """`get` for each, in order."""
        return map(self.get, keys)


class _Backend(LMCBackendInterface):
    """The face of a backend. It is closed when it is no longer referenced, or at exit."""

    def __init__(
        self, config: LMCacheEngineConfig, metadata: Any, dst_device: str = "cuda"
    ) -> None:
        super().__init__(dst_device)
        self._tier = self._open(config, metadata)
        self._kinds = KeyKinds()
        self._close = weakref.finalize(self, self._tier.close)

    @abstractmethod
    def _open(self, config: LMCacheEngineConfig, metadata: Any) -> backends.LMCBackendInterface:
        """The backend. Raises ConfigError for a setting that is missing or wrong."""

    def _named(self, key: AnyKey) -> ObjectKey:
        # A method, so that an iterator of batched_get keeps its backend open.
        return object_key_of(key)

    def put(self, key: AnyKey, kv_chunk: torch.Tensor, blocking: bool = True) -> None:
        self._tier.put(self._kinds.object_key_of(key), kv_chunk, blocking)

    def put_blocking(self, key: AnyKey, kv_chunk: torch.Tensor) -> None:
        """`put` that blocks."""
        self.put(key, kv_chunk, blocking=True)

    def put_nonblocking(self, key: AnyKey, kv_chunk: torch.Tensor) -> None:
        """`put` that does not block."""
        self.put(key, kv_chunk, blocking=False)

    def get(self, key: AnyKey) -> torch.Tensor | None:
        return self._tier.get(self._named(key))

    def contains(self, key: AnyKey) -> bool:
        return self._tier.contains(self._named(key))

    def remove(self, key: AnyKey) -> None:
        """Remove a chunk, if there is one, and drop a queued put of it."""
        self._tier.remove(self._named(key))

    def list(self) -> builtins.list[AnyKey]:
        """The keys of all chunks, also of those that other processes put.

        They have the class of the keys that were put here, or are `CacheEngineKey`s.
        """
        return [self._kinds.key_of(key) for key in self._tier.list()]

    def batched_put(
        self, keys_and_chunks: Iterable[tuple[AnyKey, torch.Tensor]], blocking: bool = True
    ) -> int:
        """`put` for each; returns how many were stored or, without blocking, accepted."""
        named = ((self._kinds.object_key_of(key), chunk) for key, chunk in keys_and_chunks)
        return self._tier.batched_put(named, blocking)

    def batched_get(self, keys: Iterable[AnyKey]) -> Iterable[torch.Tensor | None]:
        """`get` for each, in order: an iterator, which yields each when it is loaded."""
        return self._tier.batched_get(map(self._named, keys))

    def close(self) -> None:
        self._close()


class LMCLocalBackend(_Backend):
    """Chunks in the memory of this process.

    config: local_device "cpu" or "cuda", max_local_cache_size. metadata: max_local_cache_size. The
    smaller one is the limit, in GiB.
    """

    def _open(self, config: LMCacheEngineConfig, metadata: Any) -> backends.LMCBackendInterface:
        return memory_backend(config, metadata, self.dst_device)


class LMCLocalDiskBackend(_Backend):
    """Chunks in files of a directory, found again after a restart. One backend at a time has it.

    config: local_device, the directory, also as file://DIRECTORY; max_local_cache_size, in GiB.
    metadata: not used, because puts need no pool of buffers.
    """

    def _open(self, config: LMCacheEngineConfig, metadata: Any) -> backends.LMCBackendInterface:
        return disk_backend(config, self.dst_device)


class LMCRemoteBackend(_Backend):
    """Chunks in Redis or Valkey.

    config: remote_url, a URL of the data plane (redis://, rediss://, unix://, redis+sentinel://,
    redis+cluster://) or LMCache's redis-sentinel://HOST:PORT,..., whose master is named by the
    environment variable REDIS_SERVICE_NAME ("mymaster") and whose timeout is REDIS_TIMEOUT (1
    second); remote_serde: "torch", "safetensor", "fast" or None, which all mean that bytes are
    stored as they are. metadata: not used, because a key names its model and worker.

    Raises ConfigError for lm:// and for a serde that compresses.
    """

    _is_pipelined = False

    def _open(self, config: LMCacheEngineConfig, metadata: Any) -> backends.LMCBackendInterface:
        return redis_backend(config, self.dst_device, self._is_pipelined)


class LMCPipelinedRemoteBackend(LMCRemoteBackend):
    """`LMCRemoteBackend` whose `batched_get` reads ahead and whose `batched_put` writes ahead.

    It is for libraries. The agent and the gateway do not use it: they pipeline on the data plane.
    """

    _is_pipelined = True


class LMCHybridBackend(_Backend):
    """Memory above Redis: puts are written to both, and what Redis has is put into memory by a get.

    config: as of `LMCLocalBackend` and `LMCRemoteBackend`; with pipelined_backend the remote one is
    pipelined. mpool_metadata: as the metadata of `LMCLocalBackend`. A put that does not block still
    waits for memory.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheEngineMetadata,
        mpool_metadata: LMCacheMemPoolMetadata,
        dst_device: str = "cuda",
    ) -> None:
        super().__init__(config, mpool_metadata, dst_device)

    def _open(self, config: LMCacheEngineConfig, metadata: Any) -> backends.LMCBackendInterface:
        with contextlib.ExitStack() as opened:
            memory = memory_backend(config, metadata, "cpu")
            opened.callback(memory.close)
            redis = redis_backend(config, "cpu", bool(setting(config, "pipelined_backend")))
            opened.callback(redis.close)
            hybrid = backends.LMCHybridBackend((memory, redis), self.dst_device)
            opened.pop_all()
        return hybrid

    def put(self, key: AnyKey, value: torch.Tensor, blocking: bool = True) -> None:
        # LMCache calls the chunk `value` here.
        super().put(key, value, blocking)
