"""LMCache's storage backends (`lmcache.storage_backend`): constructors of a `ChunkBackend`.

The classes have LMCache's names, constructors and parameters. They take LMCache's configuration
objects and keys, and any objects with the same attributes (`compat.config`, `compat.engine_keys`),
and ObjectKeys too. The promises of `compat.backends` hold: a limit in bytes, LRU eviction,
checksums, deadlines. A server or a disk that fails raises nothing: a get is a miss, and a put
stores nothing and says so.

docs/reference/lmcache-names.md lists what differs. What LMCache stored (pickles, safetensors) is
not read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_redis.compat.backend_settings import check_device, directory_of, memory_of, redis_of
from lmcache_redis.compat.backends import ChunkBackend
from lmcache_redis.compat.backends.storage import ChunkStorage
from lmcache_redis.compat.cache_engine_key import CacheEngineKey
from lmcache_redis.compat.config import (
    LMCacheEngineConfig,
    LMCacheEngineMetadata,
    LMCacheMemPoolMetadata,
)
from lmcache_redis.compat.engine_keys import AnyKey, engine_key_of

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


class LMCBackendInterface(ABC):
    """The calls of every backend. A backend of one's own has put, get, contains and close.

    dst_device: where `get` returns tensors: "cpu", "cuda" or "cuda:N". Raises ConfigError if this
    machine has no such device.
    """

    def __init__(self, dst_device: str = "cuda") -> None:
        check_device(dst_device)
        self.dst_device = dst_device

    @abstractmethod
    def put(self, key: AnyKey, kv_chunk: torch.Tensor, blocking: bool = True) -> Any:
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


class _Backend(ChunkBackend, LMCBackendInterface):
    """A backend that lists LMCache's keys. It is closed when it is no longer referenced."""

    def __init__(
        self, config: LMCacheEngineConfig, metadata: Any, dst_device: str = "cuda"
    ) -> None:
        check_device(dst_device)
        super().__init__(self._storages(config, metadata), dst_device)

    @staticmethod
    @abstractmethod
    def _storages(config: LMCacheEngineConfig, metadata: Any) -> Sequence[ChunkStorage]:
        """Raises ConfigError for a setting that is missing or wrong."""

    def put_blocking(self, key: AnyKey, kv_chunk: torch.Tensor) -> None:
        """`put` that blocks."""
        self.put(key, kv_chunk, blocking=True)

    def put_nonblocking(self, key: AnyKey, kv_chunk: torch.Tensor) -> None:
        """`put` that does not block."""
        self.put(key, kv_chunk, blocking=False)

    def list(self) -> list[AnyKey]:
        """The keys of all chunks, also of those that other processes put, as `CacheEngineKey`s.

        `LayerCacheEngineKey`s for one layer; ObjectKeys for what was put with other keys.
        """
        return [engine_key_of(key) for key in self.stored_keys()]


class LMCLocalBackend(_Backend):
    """Chunks in the memory of this process.

    config: local_device "cpu" or "cuda", max_local_cache_size. metadata: max_local_cache_size. The
    smaller one is the limit, in GiB.
    """

    @staticmethod
    def _storages(config: LMCacheEngineConfig, metadata: Any) -> Sequence[ChunkStorage]:
        return [memory_of(config, metadata)]


class LMCLocalDiskBackend(_Backend):
    """Chunks in files of a directory, found again after a restart. One backend at a time has it.

    config: local_device, the directory, also as file://DIRECTORY; max_local_cache_size, in GiB.
    metadata: not used, because puts need no pool of buffers.
    """

    @staticmethod
    def _storages(config: LMCacheEngineConfig, metadata: Any) -> Sequence[ChunkStorage]:
        return [directory_of(config)]


class LMCRemoteBackend(_Backend):
    """Chunks in Redis or Valkey.

    config: remote_url, a URL of the data plane (redis://, rediss://, unix://, redis+sentinel://,
    redis+cluster://) or LMCache's redis-sentinel://HOST:PORT,..., whose master is named by the
    environment variable REDIS_SERVICE_NAME ("mymaster") and whose timeout is REDIS_TIMEOUT (1
    second); remote_serde: "torch", "safetensor", "fast" or None, which all mean that bytes are
    stored as they are. metadata: not used, because a key names its model and worker.

    Raises ConfigError for lm:// and for a serde that compresses.
    """

    @staticmethod
    def _storages(config: LMCacheEngineConfig, metadata: Any) -> Sequence[ChunkStorage]:
        return [redis_of(config)]


class LMCPipelinedRemoteBackend(LMCRemoteBackend):
    """The same: every backend reads and writes ahead in batched calls."""


class LMCHybridBackend(_Backend):
    """Memory above Redis: puts are written to both, and what Redis has is put into memory by a get.

    config: as of `LMCLocalBackend` and `LMCRemoteBackend`; pipelined_backend changes nothing.
    mpool_metadata: as the metadata of `LMCLocalBackend`. A put that does not block still waits for
    memory.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheEngineMetadata,
        mpool_metadata: LMCacheMemPoolMetadata,
        dst_device: str = "cuda",
    ) -> None:
        super().__init__(config, mpool_metadata, dst_device)

    @staticmethod
    def _storages(config: LMCacheEngineConfig, metadata: Any) -> Sequence[ChunkStorage]:
        return [memory_of(config, metadata), redis_of(config)]

    def put(self, key: AnyKey, value: torch.Tensor, blocking: bool = True) -> bool:
        # LMCache calls the chunk `value` here.
        return super().put(key, value, blocking)
