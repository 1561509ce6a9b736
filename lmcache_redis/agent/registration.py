"""A registered worker: whose memory it is, and how its chunks are named and cut."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_redis import messages as m
from lmcache_redis.agent.copies import CPU
from lmcache_redis.config import AgentConfig
from lmcache_redis.device.context import DeviceContext
from lmcache_redis.device.handles import CudaIPCHandle
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.errors import ConfigError, FormatError
from lmcache_redis.naming import ChunkForm, ChunkNames


def form_of(layout: KVLayout, model_name: str, kv_rank: int, config: AgentConfig) -> ChunkForm:
    """The form of a worker's chunks. Raises ``ConfigError`` where they cannot be cached."""
    chunk_bytes = layout.chunk_bytes(config.chunk_size_tokens)
    fingerprint = layout.fingerprint(config.chunk_size_tokens)
    try:
        # Opaque bytes: what lies inside a page is the engine's business.
        return ChunkForm.of_pages(
            ChunkNames(fingerprint, config.key_prefix),
            model_name,
            kv_rank,
            chunk_bytes,
            config.slot_bytes,
        )
    except FormatError as error:
        raise ConfigError(f"chunks of this KV cache cannot be cached: {error}") from error


def epoch_prefixes(form: ChunkForm, epoch: bytes | None) -> list[bytes]:
    """What the keys of all chunks of an epoch begin with; None: of all epochs."""
    if epoch is None:
        return [form.names.common]
    return [form.stem(len(epoch) + nbytes) + epoch for nbytes in m.HASH_BYTES_OF_AN_EPOCH]


@dataclass(eq=False)
class Registration:
    """One worker whose memory is mapped."""

    engine_id: str
    worker_id: int
    world_size: int
    form: ChunkForm
    blocks_per_chunk: int
    device: DeviceContext
    storages: tuple[m.StorageHandle, ...]

    @property
    def place(self) -> str:
        """Where its memory is: copies of different places do not wait for each other."""
        storage = self.storages[0]
        return storage.device_uuid if isinstance(storage, CudaIPCHandle) else CPU

    @property
    def chunks_a_call(self) -> int:
        """How many chunks its device moves in one call."""
        return max(1, self.device.call_bytes // self.form.chunk_bytes)
