# SPDX-License-Identifier: Apache-2.0
"""The name of a chunk, and the form of its parts: the same in Redis and on disk, for everyone.

    user prefix | b"lmcr2:" | namespace (16) | ObjectKey (`keys`)

The namespace identifies the layout: for agents the first 16 hex digits of the engine's fingerprint,
for the library the namespace of tensors, whose metadata describes them. In Redis each stripe of a
chunk adds its index, a big-endian u16; a file on disk has the digest of the key as its name. All
chunks of a worker share everything before the hash: the stem.

A model whose layers have several kinds of KV cache has several *groups*. A chunk then has one part
for each group, with a layout, and so a namespace, of its own. `Reach` says which parts the engine
needs in order to continue after a prefix.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from lmcache_redis.chunks.cutting import stripe_payload_bytes
from lmcache_redis.chunks.frame import ChunkFrame
from lmcache_redis.chunks.keys import (
    HELD_TOGETHER,
    KEY_MAGIC,
    NAMESPACE_BYTES,
    ObjectKey,
    before_hash,
    hash_tag,
    held_ranks,
    overlapping_ranks,
    share_of,
)
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.errors import FormatError, check_int

# The fingerprint of tensors, which have no layout.
TENSORS = hashlib.blake2b(b"lmcr2.tensors", digest_size=32).digest()
# That of values that describe layouts, see `agent.reports.explaining`.
DESCRIPTIONS = hashlib.blake2b(b"lmcr2.layouts", digest_size=32).digest()

MAX_REACH_TOKENS = 1 << 40
MAX_STRIPE_INDEX = 0xFFFF
# Behind the user's prefix, of keys that name no stripe. No namespace begins so.
_CLAIM_MAGIC = KEY_MAGIC + b"claim:"
_ACCOUNT_MAGIC = KEY_MAGIC + b"tenant:"
_STRIPE_INDEX = struct.Struct(">H")
_RANK_BYTES = 4
_TOGETHER = bytes((HELD_TOGETHER,))


def key_stem(
    namespace: bytes, model_name: str, kv_rank: int, hash_len: int, key_prefix: bytes = b""
) -> bytes:
    """What a Redis key has before the hash tag. Raises FormatError for a field out of range."""
    if len(namespace) != NAMESPACE_BYTES:
        raise FormatError(f"a namespace has {NAMESPACE_BYTES} bytes, not {len(namespace)}")
    return key_prefix + KEY_MAGIC + namespace + before_hash(model_name, kv_rank, hash_len)


def stripe_key(chunk_key: bytes, stripe_index: int) -> bytes:
    """The Redis key of one stripe of a chunk. Raises FormatError for an index over 16 bits."""
    if not 0 <= stripe_index <= MAX_STRIPE_INDEX:
        raise FormatError(f"stripe_index is {stripe_index}, outside 0 to {MAX_STRIPE_INDEX}")
    return chunk_key + _STRIPE_INDEX.pack(stripe_index)


def parse_stripe_key(data: bytes, key_prefix: bytes = b"") -> tuple[bytes, ObjectKey, int]:
    """(namespace, key, stripe index) of a Redis key. Raises FormatError for any other bytes."""
    start = key_prefix + KEY_MAGIC
    object_at = len(start) + NAMESPACE_BYTES
    index_at = len(data) - _STRIPE_INDEX.size
    if data[: len(start)] != start or index_at < object_at:
        raise FormatError("not the key of a stripe: it has another prefix or is too short")
    (stripe_index,) = _STRIPE_INDEX.unpack_from(data, index_at)
    namespace = bytes(data[len(start) : object_at])
    return namespace, ObjectKey.from_bytes(data[object_at:index_at]), stripe_index


def claim_key(chunk_key: bytes, key_prefix: bytes) -> bytes:
    """The Redis key that a writer of the chunk sets for a while, so that no other writes it."""
    digest = hashlib.blake2b(chunk_key, digest_size=8).hexdigest()
    # A model's name or a rank may have a brace: the first decides where the chunk lies.
    tag = chunk_key[chunk_key.find(b"{", len(key_prefix)) :]
    return b"%b%b%b%b" % (key_prefix, _CLAIM_MAGIC, digest.encode(), tag)


def is_claim_key(data: bytes, key_prefix: bytes) -> bool:
    return data.startswith(key_prefix + _CLAIM_MAGIC)


def tenant_digest(tenant: str) -> bytes:
    """16 bytes for a tenant as `tenants.shown`; values have the first 8."""
    return hashlib.blake2b(tenant.encode(), digest_size=16).digest()


def account_keys(tenant: str, buckets: Iterable[int], key_prefix: bytes) -> list[bytes]:
    """The Redis keys of what a tenant has written, in buckets of time (`agent.limits`)."""
    stem = b"%b%b%b:" % (key_prefix, _ACCOUNT_MAGIC, tenant_digest(tenant).hex().encode())
    return [b"%b%d" % (stem, bucket) for bucket in buckets]


def names_no_stripe(data: bytes, key_prefix: bytes) -> bool:
    """Whether it is a key of a claim or an account."""
    return data.startswith((key_prefix + _CLAIM_MAGIC, key_prefix + _ACCOUNT_MAGIC))


def chunk_key_in(data: bytes, key_prefix: bytes) -> bytes | None:
    """The chunk key in the Redis key of a stripe; None for any other key."""
    if not data.startswith(key_prefix + KEY_MAGIC) or names_no_stripe(data, key_prefix):
        return None
    return data[: -_STRIPE_INDEX.size]


class ChunkNames:
    """Keys and frames of the chunks of one layout. Thread-safe.

    layout: the fingerprint of an engine's KV cache; None: tensors. prefix: the user's, of all keys.

    Attributes:
        common: the common prefix of all keys of the layout.
        stem: by model name, rank and length of a hash: the common prefix of a worker's keys.
    """

    def __init__(self, layout: bytes | None = None, prefix: bytes = b"") -> None:
        self.fingerprint = TENSORS if layout is None else layout
        # Hex has no braces, which Redis Cluster would take for a hash tag.
        whole = self.fingerprint if layout is None else layout.hex().encode()
        namespace = whole[:NAMESPACE_BYTES]
        self.common = prefix + KEY_MAGIC + namespace
        self.stem = functools.lru_cache(maxsize=256)(
            functools.partial(key_stem, namespace, key_prefix=prefix)
        )

    def chunk_key(self, key: ObjectKey) -> bytes:
        stem = self.stem(key.model_name, key.kv_rank, len(key.chunk_hash))
        return stem + hash_tag(key.chunk_hash)

    def parse(self, chunk_key: bytes) -> ObjectKey | None:
        """The inverse of `chunk_key`; None if it names no chunk of this layout."""
        if not chunk_key.startswith(self.common):
            return None
        try:
            return ObjectKey.from_bytes(chunk_key[len(self.common) :])
        except FormatError:
            return None

    def frame(self, key: ObjectKey, metadata: RemoteMetadata, stripe_bytes: int) -> ChunkFrame:
        """The frame of its stripes. Raises FormatError for a chunk that cannot be encoded."""
        encoded = metadata.serialize()
        return ChunkFrame(self.fingerprint, key.chunk_hash, metadata.length, stripe_bytes, encoded)


class Reach(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tokens of a prefix the layers of a group still read when they compute the next token.

    kind: "all" for full attention; "window" for a sliding window of ``tokens``, the next token
        included; "local" for attention chunks of ``tokens``, which do not see each other; "state"
        for layers whose state after the last token stands for all of them (Mamba).

    These are the tokens that vLLM's ``get_num_skipped_tokens`` leaves over, for each kind.
    """

    kind: Literal["all", "window", "local", "state"] = "all"
    tokens: int = 0

    def __post_init__(self) -> None:
        check_int("the tokens of a reach", self.tokens, 0, MAX_REACH_TOKENS)
        if (self.tokens == 0) != (self.kind in ("all", "state")):
            raise FormatError(f"a reach of kind {self.kind!r} cannot have {self.tokens} tokens")

    def first_token(self, end: int) -> int:
        """The first token that is read after a prefix of ``end`` tokens; ``end`` if none is."""
        if self.kind == "window":
            return max(0, end - self.tokens + 1)
        if self.kind == "local":
            return end - end % self.tokens
        return 0 if self.kind == "all" else max(0, end - 1)

    def first_chunk(self, end: int, chunk_tokens: int) -> int:
        """A prefix of ``end`` chunks needs the parts from this one on. Never falls with ``end``."""
        return min(end, self.first_token(end * chunk_tokens) // chunk_tokens)

    def blocks_per_part(self, blocks_per_chunk: int, block_tokens: int) -> int:
        """How many of a chunk's blocks, counted from its end, a prefix can need."""
        if self.kind == "state":
            return 1
        if self.kind == "window":
            return min(blocks_per_chunk, max(1, -(-(self.tokens - 1) // block_tokens)))
        return blocks_per_chunk


FULL_REACH = Reach()


def engine_chunk_tokens(chunk_size_tokens: int, block_sizes_tokens: Iterable[int]) -> int:
    """Tokens of an engine's chunks: the agent's chunk size, rounded up to whole blocks.

    vLLM gives layers with recurrent states, and the attention beside them, blocks of unusual sizes
    (544 tokens, for instance). block_sizes_tokens: of every group; positive.
    """
    common = math.lcm(*block_sizes_tokens)
    return -(-chunk_size_tokens // common) * common


@dataclass(frozen=True)
class PartNames:
    """How one worker's chunks, or their parts of one group, are named; which a prefix needs."""

    names: ChunkNames
    model_name: str
    kv_rank: int
    reach: Reach = field(default=FULL_REACH, kw_only=True)

    @property
    def fingerprint(self) -> bytes:
        return self.names.fingerprint

    def key(self, chunk_hash: bytes) -> bytes:
        """The chunk key: the Redis keys of its stripes, without their index."""
        return self.stem(len(chunk_hash)) + hash_tag(chunk_hash)

    def keys_after(self, first: bytes, hash_bytes: int) -> bytes:
        """The common prefix of keys whose hashes begin with ``first``. hash_bytes: of each."""
        return self.stem(hash_bytes) + hash_tag(first)[:-1]

    def stem(self, hash_bytes: int) -> bytes:
        """The common prefix of the keys of all chunks with hashes of `hash_bytes` bytes."""
        return self.names.stem(self.model_name, self.kv_rank, hash_bytes)


def opaque_pages(nbytes: int) -> RemoteMetadata:
    """The metadata of opaque pages. Raises FormatError for a size below 0."""
    return RemoteMetadata(nbytes, [(nbytes,)], ["uint8"], MemoryFormat.PAGES)


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares that a chunk consists of, of equal size, each cut into stripes as a chunk is.

    first: the number of the first one. metadata: of one share, serialized.
    """

    first: int
    count: int
    metadata: bytes


class ShareKeys:
    """The keys of the shares of chunks, which engines of other sizes find. Thread-safe.

    key_prefix: the user's, of all keys.
    """

    def __init__(self, key_prefix: bytes = b"") -> None:
        self._at = len(key_prefix) + len(KEY_MAGIC) + NAMESPACE_BYTES
        self._last = slice(self._at + _RANK_BYTES - 1, self._at + _RANK_BYTES)
        self._ranks = functools.lru_cache(maxsize=256)(_held_ranks)
        self._holders = functools.lru_cache(maxsize=256)(_holding_ranks)

    def of(self, key: bytes) -> Sequence[bytes]:
        """Those of a chunk, or of a beginning of keys; of what has no shares, itself."""
        if key[self._last] != _TOGETHER:
            return (key,)
        ranks = self._ranks(key[self._at : self._at + _RANK_BYTES])
        if len(ranks) < 2:
            return (key,)
        before, behind = key[: self._at], key[self._at + _RANK_BYTES :]
        return [before + rank + behind for rank in ranks]

    def first_of_each(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """`first` of these. Cheap if none has shares: lookups ask about hundreds."""
        if _TOGETHER not in {key[self._last] for key in keys}:
            return keys
        return [self.first(key) for key in keys]

    def first(self, key: bytes) -> bytes:
        """The first of these."""
        rank = key[self._at : self._at + _RANK_BYTES]
        first = self._ranks(rank)[0]
        if first == rank:
            return key
        return key[: self._at] + first + key[self._at + _RANK_BYTES :]

    def holders(self, key: bytes) -> Sequence[bytes]:
        """The keys of the chunks, of ranks of any size, that have this one or this share."""
        ranks = self._holders(key[self._at : self._at + _RANK_BYTES])
        before, behind = key[: self._at], key[self._at + _RANK_BYTES :]
        return [before + rank + behind for rank in ranks]


def _holding_ranks(rank: bytes) -> list[bytes]:
    if len(rank) < _RANK_BYTES:
        return [rank]
    ranks = overlapping_ranks(int.from_bytes(rank, "big"))
    return [each.to_bytes(_RANK_BYTES, "big") for each in ranks]


def _held_ranks(rank: bytes) -> list[bytes]:
    if len(rank) < _RANK_BYTES:
        return [rank]
    ranks = held_ranks(int.from_bytes(rank, "big"))
    return [each.to_bytes(_RANK_BYTES, "big") for each in ranks]


@dataclass(frozen=True)
class ChunkForm(PartNames):
    """What one worker's chunks, or their parts of one group, share. metadata: serialized.

    stripe_payload_bytes: of every stripe but the last one of the chunk, or of each share. shares:
    if the chunks are cut into shares.
    """

    chunk_bytes: int
    stripe_payload_bytes: int
    metadata: bytes
    shares: Shares | None = None

    @staticmethod
    def of(
        names: ChunkNames,
        model_name: str,
        kv_rank: int,
        metadata: RemoteMetadata,
        slot_bytes: int,
        reach: Reach = FULL_REACH,
        of_share: RemoteMetadata | None = None,
    ) -> ChunkForm:
        """The form of chunks in stripes of at most ``slot_bytes``. Raises FormatError.

        of_share: the metadata of each share, if they are cut into shares.
        """
        shares = None
        if of_share is not None:
            ranks = held_ranks(kv_rank)
            shares = Shares(share_of(ranks[0]), len(ranks), of_share.serialize())
            if shares.count * of_share.length != metadata.length:
                raise FormatError(
                    f"{shares.count} shares of {of_share.length} bytes are no chunk of "
                    f"{metadata.length}"
                )
        stripe_bytes = stripe_payload_bytes((of_share or metadata).length, slot_bytes)
        form = ChunkForm(
            names, model_name, kv_rank, metadata.length, stripe_bytes, metadata.serialize(),
            shares, reach=reach,
        )  # fmt: skip
        form.frame(bytes(32))
        form.key(bytes(32))
        return form

    @functools.cached_property
    def stripe_sizes(self) -> tuple[int, ...]:
        """The payload bytes of the stripes of one chunk, and so of its slots."""
        count = 1 if self.shares is None else self.shares.count
        whole = self.chunk_bytes // count
        starts = range(0, whole, self.stripe_payload_bytes)
        return tuple(min(self.stripe_payload_bytes, whole - start) for start in starts) * count

    @property
    def stripe_count(self) -> int:
        """Stripes, and so slots, of one chunk."""
        return len(self.stripe_sizes)

    def frame(self, chunk_hash: bytes) -> ChunkFrame:
        """The frame of a chunk, or of its first share."""
        size, fingerprint = self.stripe_payload_bytes, self.fingerprint
        if (shares := self.shares) is None:
            return ChunkFrame(fingerprint, chunk_hash, self.chunk_bytes, size, self.metadata)
        # All shares have one fingerprint: the number tells a share from the others.
        share_bytes = self.chunk_bytes // shares.count
        return ChunkFrame(
            fingerprint, chunk_hash, share_bytes, size, shares.metadata, 1 + shares.first
        )
