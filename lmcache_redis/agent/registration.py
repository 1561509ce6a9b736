"""A registered worker: whose memory it is, and how its chunks look in Redis."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lmcache_redis import messages as m
from lmcache_redis.agent.copies import CPU
from lmcache_redis.device.base import DeviceContext
from lmcache_redis.device.handles import CudaIPCHandle
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.errors import ConfigError, FormatError
from lmcache_redis.keys import KEY_MAGIC, NAMESPACE_BYTES, key_stem
from lmcache_redis.protocol import MemoryFormat, RemoteMetadata
from lmcache_redis.stripe import ChunkFrame, stripe_payload_bytes

_stem = lru_cache(maxsize=1024)(key_stem)


@dataclass(frozen=True)
class ChunkForm:
    """What all chunks of one worker have in common: names, sizes, headers.

    Built from a registration alone, before any memory is mapped.
    """

    model_name: str
    kv_rank: int
    fingerprint: bytes
    blocks_per_chunk: int
    block_size_tokens: int
    chunk_bytes: int
    stripe_payload_bytes: int
    metadata: bytes
    key_prefix: bytes

    @staticmethod
    def of(
        layout: KVLayout,
        *,
        model_name: str,
        kv_rank: int,
        chunk_size_tokens: int,
        slot_bytes: int,
        key_prefix: bytes,
    ) -> ChunkForm:
        """Raises ``ConfigError`` where chunks of this layout cannot be cached."""
        blocks = layout.blocks_per_chunk(chunk_size_tokens)
        chunk_bytes = layout.chunk_bytes(chunk_size_tokens)
        # One group of opaque bytes: what lies inside a page is the engine's business.
        metadata = RemoteMetadata(chunk_bytes, [(chunk_bytes,)], ["uint8"], MemoryFormat.PAGES)
        form = ChunkForm(
            model_name=model_name,
            kv_rank=kv_rank,
            fingerprint=layout.fingerprint(chunk_size_tokens),
            blocks_per_chunk=blocks,
            block_size_tokens=layout.block_size_tokens,
            chunk_bytes=chunk_bytes,
            stripe_payload_bytes=stripe_payload_bytes(chunk_bytes, slot_bytes),
            metadata=metadata.serialize(),
            key_prefix=key_prefix,
        )
        try:
            form.frame(bytes(32))
            form.key(bytes(32))
        except FormatError as error:
            raise ConfigError(f"chunks of this KV cache cannot be cached: {error}") from error
        return form

    @property
    def namespace(self) -> bytes:
        """The layout in a key: half of its fingerprint's first half in hex, readable anywhere.

        Hex has no braces, which Redis Cluster would take for a hash tag.
        """
        return self.fingerprint.hex()[:NAMESPACE_BYTES].encode()

    def prefixes(self, epoch: bytes | None) -> list[bytes]:
        """What the keys of all chunks of an epoch begin with; None: of all epochs."""
        if epoch is None:
            return [self.key_prefix + KEY_MAGIC + self.namespace]
        return [self.stem(len(epoch) + nbytes) + epoch for nbytes in m.HASH_BYTES_OF_AN_EPOCH]

    def key(self, chunk_hash: bytes) -> bytes:
        """The chunk's key: its stripes' Redis keys without the stripe index."""
        return self.stem(len(chunk_hash)) + chunk_hash

    def stem(self, hash_bytes: int) -> bytes:
        """What the keys of all chunks with hashes of that length begin with."""
        return _stem(self.namespace, self.model_name, self.kv_rank, hash_bytes, self.key_prefix)

    def frame(self, chunk_hash: bytes) -> ChunkFrame:
        """What the headers of the chunk's stripes say."""
        return ChunkFrame(
            fingerprint=self.fingerprint,
            chunk_hash=chunk_hash,
            chunk_bytes=self.chunk_bytes,
            stripe_payload_bytes=self.stripe_payload_bytes,
            metadata=self.metadata,
        )

    @property
    def stripe_count(self) -> int:
        """Stripes, and so slots, of one chunk."""
        return -(-self.chunk_bytes // self.stripe_payload_bytes)


@dataclass(eq=False)
class Registration:
    """One worker whose memory is mapped."""

    engine_id: str
    worker_id: int
    world_size: int
    form: ChunkForm
    device: DeviceContext
    storages: tuple[m.StorageHandle, ...]
    closed: bool = False

    @property
    def place(self) -> str:
        """Where its memory is: copies of different places do not wait for each other."""
        storage = self.storages[0]
        return storage.device_uuid if isinstance(storage, CudaIPCHandle) else CPU

    @property
    def chunks_a_call(self) -> int:
        """How many chunks its device moves in one call."""
        return max(1, self.device.call_bytes // self.form.chunk_bytes)
