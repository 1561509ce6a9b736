"""What Redis holds of one part of a chunk: stripes, their headers, keys, and the server's share."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_redis.chunks.frame import HEADER_BYTES, stripe_payload_bytes
from lmcache_redis.chunks.keys import NAMESPACE_BYTES
from lmcache_redis.chunks.names import key_stem, stripe_key

# vLLM's block hashes are SHA-256.
_HASH = bytes(32)
# Of a key: its entry in the table of keys, its object, and the heads of two strings.
_ENTRY_BYTES = 64
# Sizes from here on have four classes for each power of two, in jemalloc.
_SMALL_BYTES = 128


@dataclass(frozen=True, slots=True)
class StoredPart:
    """memory_bytes: what the server counts for it, towards its maxmemory."""

    part_bytes: int
    stripes: int
    value_bytes: int
    memory_bytes: int


def stored_part(part_bytes: int, slot_bytes: int, model: str) -> StoredPart:
    """A part as agents store it. Raises FormatError for a size that is not positive."""
    payload = stripe_payload_bytes(part_bytes, slot_bytes)
    stripes = -(-part_bytes // payload)
    last = part_bytes - (stripes - 1) * payload
    key = len(stripe_key(key_stem(bytes(NAMESPACE_BYTES), model, 0, len(_HASH)) + _HASH, 0))
    values = (stripes - 1) * _allocated(payload + HEADER_BYTES) + _allocated(last + HEADER_BYTES)
    memory = values + stripes * (_allocated(key) + _ENTRY_BYTES)
    return StoredPart(part_bytes, stripes, part_bytes + stripes * HEADER_BYTES, memory)


def _allocated(size_bytes: int) -> int:
    """What jemalloc, the allocator of Redis and Valkey, takes for so many bytes.

    https://jemalloc.net/jemalloc.3.html#size_classes
    """
    spacing = 16
    if size_bytes > _SMALL_BYTES:
        spacing = 1 << ((size_bytes - 1).bit_length() - 3)
    return -(-size_bytes // spacing) * spacing
