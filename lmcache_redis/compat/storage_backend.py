# SPDX-License-Identifier: Apache-2.0
"""LMCache's storage backends (`lmcache.storage_backend`): constructors of a `ChunkBackend`.

The classes have LMCache's names, constructors and parameters. They take LMCache's configuration
objects and keys, any objects with the same attributes, and ObjectKeys too. The promises of
`objects` hold: a limit in bytes, LRU eviction, checksums, deadlines. A server or a disk
that fails raises nothing: a get is a miss, and a put stores nothing and says so.

A setting is an attribute of any object. For the file of seal keys and for compression LMCache has
no setting: they are in the environment, as for the commands. ConfigError names a setting that is
wrong or not supported, and what it may be.

docs/reference/lmcache-names.md lists what differs. What LMCache stored (pickles, safetensors) is
not read.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.compat.cache_engine_key import (
    AnyKey,
    CacheEngineKey,
    engine_key_of,
    object_key_of,
)
from lmcache_redis.compat.config import (
    LMCacheEngineConfig,
    LMCacheEngineMetadata,
    LMCacheMemPoolMetadata,
)
from lmcache_redis.config import COMPRESS_VARIABLE, SEAL_KEY_FILE_VARIABLE
from lmcache_redis.errors import ConfigError
from lmcache_redis.objects import ChunkBackend
from lmcache_redis.objects.storage import ChunkStorage, in_memory, in_redis, on_disk
from lmcache_redis.resp import RedisOptions
from lmcache_redis.seal import read_seal_keys

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


# They keep every bit, as a backend does without them.
_EXACT_SERDES = (None, "torch", "safetensor", "fast")
_SENTINELS = "redis-sentinel://"


def _memory_of(config: Any, metadata: Any) -> ChunkStorage:
    """Memory, with the smaller limit of the two."""
    device = config.local_device
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f'local_device is {device!r}: set it to "cpu" to keep chunks in memory; a directory is '
            "for LMCLocalDiskBackend"
        )
    return in_memory(min(_limit_bytes(config), _limit_bytes(metadata)))


def _directory_of(config: Any, _: Any) -> ChunkStorage:
    """The directory of local_device, with or without file:// before it."""
    device = config.local_device
    directory = device.removeprefix("file://") if isinstance(device, str) else ""
    if directory in ("", "cpu", "cuda"):
        raise ConfigError(f"local_device is {device!r}: set it to a directory for this backend")
    return on_disk(directory, _limit_bytes(config))


def _redis_of(config: Any, _: Any) -> ChunkStorage:
    """The servers of remote_url."""
    serde, url = config.remote_serde, config.remote_url
    if serde not in _EXACT_SERDES:
        raise ConfigError(
            f'remote_serde is {serde!r}: set it to "torch", "safetensor", "fast" or None; chunks '
            f"are never quantized, and {COMPRESS_VARIABLE}=lossless keeps them in fewer bytes"
        )
    if not isinstance(url, str):
        raise ConfigError(f"remote_url is {url!r}: set it to redis://HOST:PORT")
    if url.startswith(_SENTINELS):
        name = quote(os.environ.get("REDIS_SERVICE_NAME", "mymaster"), safe="")
        url = f"redis+sentinel://{url.removeprefix(_SENTINELS)}/{name}"
    seal_keys = read_seal_keys(os.environ.get(SEAL_KEY_FILE_VARIABLE))
    compress = os.environ.get(COMPRESS_VARIABLE) or None
    return in_redis(RedisOptions(url, seal_keys=seal_keys), compress=compress)


def _limit_bytes(settings: Any) -> int:
    """max_local_cache_size in bytes."""
    size_gib = settings.max_local_cache_size
    if type(size_gib) not in (int, float) or not 0 < size_gib < 1 << 30:
        raise ConfigError(
            f"max_local_cache_size is {size_gib!r}: set it to a positive number of GiB"
        )
    return max(1, int(size_gib * (1 << 30)))


def _check_device(dst_device: str) -> None:
    """Raises ConfigError, saying what to pass, unless this machine has the device."""
    import torch

    try:
        device = torch.device(dst_device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"dst_device is {dst_device!r}: {error}") from None
    count = torch.cuda.device_count()
    if device.type != "cpu" and (device.type != "cuda" or (device.index or 0) >= count):
        raise ConfigError(
            f"dst_device is {dst_device!r}, and this machine has {count} CUDA devices: set it to "
            '"cpu", or to "cuda:N" of one that it has'
        )


class LMCBackendInterface(ABC):
    """The calls of every backend. A backend of one's own has put, get, contains and close.

    dst_device: where `get` returns tensors: "cpu", "cuda" or "cuda:N". Raises ConfigError if this
    machine has no such device.
    """

    def __init__(self, dst_device: str = "cuda") -> None:
        _check_device(dst_device)
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
    """A backend that lists LMCache's keys. It is closed when it is no longer referenced.

    Raises ConfigError for a setting that is wrong.
    """

    _storages: Sequence[Callable[[Any, Any], ChunkStorage]]

    def __init__(
        self, config: LMCacheEngineConfig, metadata: Any, dst_device: str = "cuda"
    ) -> None:
        _check_device(dst_device)
        super().__init__([of(config, metadata) for of in self._storages], dst_device)

    def _object_key(self, key: AnyKey) -> ObjectKey:
        return object_key_of(key)

    def put_blocking(self, key: AnyKey, kv_chunk: torch.Tensor) -> None:
        """`put` that blocks."""
        self.put(key, kv_chunk, blocking=True)

    def put_nonblocking(self, key: AnyKey, kv_chunk: torch.Tensor) -> None:
        """`put` that does not block."""
        self.put(key, kv_chunk, blocking=False)

    def list(self) -> list[AnyKey]:
        """The keys of all chunks, also of those that other processes put, as `CacheEngineKey`s.

        `LayerCacheEngineKey`s for one layer; ObjectKeys for what was put with other keys. The hash
        is what was put, or the digest of one of over 63 bytes (`engine_key_of`).
        """
        return [engine_key_of(key) for key in self.stored_keys()]


class LMCLocalBackend(_Backend):
    """Chunks in the memory of this process.

    config: local_device "cpu" or "cuda", max_local_cache_size. metadata: max_local_cache_size. The
    smaller one is the limit, in GiB.
    """

    _storages = (_memory_of,)


class LMCLocalDiskBackend(_Backend):
    """Chunks in files of a directory, found again after a restart. One backend at a time has it.

    config: local_device, the directory, also as file://DIRECTORY; max_local_cache_size, in GiB.
    metadata: not used, because puts need no pool of buffers.
    """

    _storages = (_directory_of,)


class LMCRemoteBackend(_Backend):
    """Chunks in Redis or Valkey.

    config: remote_url, a URL of the data plane (redis://, rediss://, unix://, redis+sentinel://,
    redis+cluster://) or LMCache's redis-sentinel://HOST:PORT,..., whose master is named by the
    environment variable REDIS_SERVICE_NAME ("mymaster"); remote_serde: "torch", "safetensor",
    "fast" or None, which all mean that every bit is kept. metadata: not used, because a key names
    its model and worker.

    Raises ConfigError for lm:// and for a serde that compresses.
    """

    _storages = (_redis_of,)


class LMCPipelinedRemoteBackend(LMCRemoteBackend):
    """The same: every backend reads and writes ahead in batched calls."""


class LMCHybridBackend(_Backend):
    """Memory above Redis: puts are written to both, and what Redis has is put into memory by a get.

    config: as of `LMCLocalBackend` and `LMCRemoteBackend`; pipelined_backend changes nothing.
    mpool_metadata: as the metadata of `LMCLocalBackend`. A put that does not block still waits for
    memory.
    """

    _storages = (_memory_of, _redis_of)

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheEngineMetadata,
        mpool_metadata: LMCacheMemPoolMetadata,
        dst_device: str = "cuda",
    ) -> None:
        super().__init__(config, mpool_metadata, dst_device)

    def put(self, key: AnyKey, value: torch.Tensor, blocking: bool = True) -> bool:
        # LMCache calls the chunk `value` here.
        return super().put(key, value, blocking)
