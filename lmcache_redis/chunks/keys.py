# SPDX-License-Identifier: Apache-2.0
"""`ObjectKey`, the name of one worker's chunk, and hashes (docs/reference/value-format.md).

Encoded, integers big-endian:

    kv_rank u32 | model length u16 | model utf-8 | hash length u8 | "{" | hash in hex | "}"

In Redis Cluster what is in braces decides where a key lies (its hash tag): all stripes of a chunk,
and the parts of all workers and groups of the same tokens, lie on one server.
"""

from __future__ import annotations

import functools
import re
import struct
import sys
from array import array
from binascii import hexlify, unhexlify
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from lmcache_redis.errors import FormatError, check_int

KEY_MAGIC = b"lmcr2:"
NAMESPACE_BYTES = 16
MAX_HASH_BYTES = 63
MAX_MODEL_NAME_BYTES = 1024
MAX_WORLD_SIZE = 0xFF
# In the place of a local rank, which is below the size of a world.
HELD_TOGETHER = 0xFF
INT_HASH_BYTES = 8
CHUNK_HASH_BYTES = 32  # of `hash_chunks`

_HASH_PERSON = b"lmcr2.tokens"
_LONG_HASH_PERSON = b"lmcr2.long-hash"
_RANK_AND_NAME_LENGTH = struct.Struct(">IH")
_HASH_TAG = re.compile(rb"\{[0-9a-f]+\}")


@dataclass(frozen=True, order=True, slots=True)
class ObjectKey:
    """The name of one worker's chunk: hashable, ordered, immutable.

    Attributes:
        chunk_hash: Not empty. One of more than 63 bytes is replaced by its digest (`bounded_hash`).
        model_name: 1 to 1,024 bytes of UTF-8.
        kv_rank: 32 bits (`ComputeKVRank`).

    Raises:
        FormatError: Anything else.
    """

    chunk_hash: bytes
    model_name: str
    kv_rank: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunk_hash", bounded_hash(self.chunk_hash))
        model_name_bytes(self.model_name)
        check_int("kv_rank", self.kv_rank, 0, 0xFFFF_FFFF)

    @staticmethod
    def IntHash2Bytes(chunk_hash: int) -> bytes:
        """Eight bytes, big-endian. Raises FormatError unless 0 <= chunk_hash < 2**64."""
        check_int("an integer chunk hash", chunk_hash, 0, 0xFFFF_FFFF_FFFF_FFFF)
        return chunk_hash.to_bytes(INT_HASH_BYTES, "big")

    @staticmethod
    def Bytes2IntHash(chunk_hash: bytes) -> int:
        """The inverse of `IntHash2Bytes`. Raises FormatError unless given one to eight bytes."""
        if not isinstance(chunk_hash, bytes) or not 1 <= len(chunk_hash) <= INT_HASH_BYTES:
            raise FormatError(
                f"an integer chunk hash has 1 to {INT_HASH_BYTES} bytes, not {chunk_hash!r:.80}"
            )
        return int.from_bytes(chunk_hash, "big")

    @staticmethod
    def ComputeKVRank(
        world_size: int, global_rank: int, local_world_size: int, local_rank: int
    ) -> int:
        """32 bits: the four arguments, eight bits each, the first in the most significant bits.

        Raises FormatError for a world over 255 workers, and for ranks outside theirs.
        """
        check_int("world_size", world_size, 1, MAX_WORLD_SIZE)
        check_int("global_rank", global_rank, 0, world_size - 1)
        check_int("local_world_size", local_world_size, 1, world_size)
        check_int("local_rank", local_rank, 0, local_world_size - 1)
        return world_size << 24 | global_rank << 16 | local_world_size << 8 | local_rank

    def to_bytes(self) -> bytes:
        """The ObjectKey part of a Redis key; `from_bytes` is its exact inverse."""
        before = before_hash(self.model_name, self.kv_rank, len(self.chunk_hash))
        return before + hash_tag(self.chunk_hash)

    @classmethod
    def from_bytes(cls, data: bytes) -> ObjectKey:
        """Decodes a key. Raises FormatError unless `data` is exactly the `to_bytes` of some key."""
        fixed = _RANK_AND_NAME_LENGTH.size
        if len(data) < fixed:
            raise FormatError(f"an ObjectKey has at least {fixed} bytes, not {len(data)}")
        kv_rank, name_length = _RANK_AND_NAME_LENGTH.unpack_from(data)
        hash_at = fixed + name_length + 1
        if len(data) < hash_at or len(data) != hash_at + hash_tag_bytes(data[hash_at - 1]):
            raise FormatError(f"the lengths in an ObjectKey do not add up to {len(data)} bytes")
        check_int("the length of a chunk hash", data[hash_at - 1], 1, MAX_HASH_BYTES)
        chunk_hash = hash_in(bytes(data), data[hash_at - 1])
        try:
            model_name = str(data[fixed : hash_at - 1], "utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"the model name in an ObjectKey is not UTF-8: {error}") from None
        return cls(chunk_hash, model_name, kv_rank)


def share_rank(shares: int, share: int, held: int = 1) -> int:
    """The kv_rank of share number `share` of `shares` of a chunk's bytes, 8 bits each.

    The local half repeats the global half, so engines that place their workers on other nodes
    share chunks. held: of this many shares from there on together: no rank of `ComputeKVRank`, and
    no key in Redis has it (`held_ranks`).
    """
    check_int("the number of shares", shares, 0, 0xFF)
    check_int("the number of a share", share, 0, 0xFF)
    check_int("the shares that are held", held, 1, max(1, shares - share))
    if held == 1:
        return (shares << 8 | share) * 0x0001_0001
    return shares << 24 | share << 16 | held << 8 | HELD_TOGETHER


def share_of(kv_rank: int) -> int:
    """The number of the (first) share."""
    return kv_rank >> 16 & 0xFF


def held_ranks(kv_rank: int) -> list[int]:
    """The kv_rank of each share that is held together; any other one is its own."""
    if kv_rank & 0xFF != HELD_TOGETHER:
        return [kv_rank]
    shares, first, held, _ = kv_rank.to_bytes(4, "big")
    if not 1 < held <= shares - first:
        return [kv_rank]
    return [share_rank(shares, first + number) for number in range(held)]


def overlapping_ranks(kv_rank: int) -> list[int]:
    """The kv_rank of each worker, of any size, that holds some of the same shares.

    A worker's shares are one of the equal parts that all shares can be divided into. Of a rank that
    names no shares, itself.
    """
    own = held_ranks(kv_rank)
    shares, first = kv_rank >> 24, share_of(own[0])
    if first >= shares or own[0] != share_rank(shares, first):
        return [kv_rank]
    found = []
    for held in (each for each in range(1, shares + 1) if shares % each == 0):
        begin = first - first % held
        found += [share_rank(shares, at, held) for at in range(begin, first + len(own), held)]
    return found


def hash_chunks(
    token_ids: Iterable[int], chunk_size_tokens: int, *, salt: bytes = b""
) -> list[bytes]:
    """One hash of 32 bytes per full chunk of token ids, for engines without block hashes.

    root      = H(u32 chunk_size_tokens | salt)
    hash of i = H(hash of chunk i-1, or root | token ids of chunk i, u32 each)

    H is BLAKE2b (RFC 7693) with a digest of 32 bytes and the personalization b"lmcr2.tokens";
    integers are little-endian. Tokens past the last full chunk are ignored.

    salt distinguishes KV that depends on more than tokens (LoRA, tenants, images). Raises
    FormatError unless 0 <= token id < 2**32 and 0 < chunk_size_tokens < 2**32.
    """
    if type(chunk_size_tokens) is not int or not 0 < chunk_size_tokens < 1 << 32:
        raise FormatError(f"a chunk has 1 to 2**32 - 1 tokens, not {chunk_size_tokens!r}")
    array_of_tokens = token_array(token_ids)
    if sys.byteorder == "big":
        array_of_tokens.byteswap()
    tokens = memoryview(array_of_tokens).cast("B")
    blake = functools.partial(blake2b, digest_size=CHUNK_HASH_BYTES, person=_HASH_PERSON)
    parent = blake(chunk_size_tokens.to_bytes(4, "little") + salt).digest()
    chunk_bytes = chunk_size_tokens * array_of_tokens.itemsize
    hashes: list[bytes] = []
    for end in range(chunk_bytes, len(tokens) + 1, chunk_bytes):
        chain = blake(parent)
        chain.update(tokens[end - chunk_bytes : end])
        parent = chain.digest()
        hashes.append(parent)
    return hashes


def before_hash(model_name: str, kv_rank: int, hash_len: int) -> bytes:
    name = model_name_bytes(model_name)
    check_int("kv_rank", kv_rank, 0, 0xFFFF_FFFF)
    check_int("the length of a chunk hash", hash_len, 1, MAX_HASH_BYTES)
    return _RANK_AND_NAME_LENGTH.pack(kv_rank, len(name)) + name + bytes((hash_len,))


def hash_tag(chunk_hash: bytes) -> bytes:
    """The last part of a chunk key. A hash is written in hex, which has no braces of its own."""
    return b"{%b}" % hexlify(chunk_hash)


def hash_tag_bytes(hash_bytes: int) -> int:
    return 2 * hash_bytes + 2


def hash_in(chunk_key: bytes, hash_bytes: int) -> bytes:
    """The chunk hash at the end of a key. hash_bytes: its size. Raises FormatError."""
    tag = chunk_key[-hash_tag_bytes(hash_bytes) :]
    if _HASH_TAG.fullmatch(tag) is None or len(tag) != hash_tag_bytes(hash_bytes):
        raise FormatError(f"a chunk key ends with {hash_bytes} bytes in hex, in braces")
    return unhexlify(tag[1:-1])


def model_name_bytes(model_name: str) -> bytes:
    try:
        name = model_name.encode("utf-8")
    except (AttributeError, UnicodeEncodeError):
        raise FormatError(f"a model name is text that UTF-8 encodes, not {model_name!r}") from None
    if not 1 <= len(name) <= MAX_MODEL_NAME_BYTES:
        raise FormatError(
            f"a model name has 1 to {MAX_MODEL_NAME_BYTES} bytes of UTF-8, not {len(name)}"
        )
    return name


def bounded_hash(chunk_hash: bytes) -> bytes:
    """The hash that a key holds for a chunk hash: itself, or a digest of one of over 63 bytes.

    The digest is BLAKE2b (RFC 7693) of 32 bytes with the personalization b"lmcr2.long-hash". Raises
    FormatError for what is not bytes, or empty.
    """
    check_hash(chunk_hash)
    if len(chunk_hash) <= MAX_HASH_BYTES:
        return chunk_hash
    return blake2b(chunk_hash, digest_size=CHUNK_HASH_BYTES, person=_LONG_HASH_PERSON).digest()


def check_hash(chunk_hash: bytes | None) -> None:
    if not isinstance(chunk_hash, bytes) or not chunk_hash:
        raise FormatError(f"a chunk hash is bytes, at least one, not {chunk_hash!r:.80}")


def token_array(token_ids: Iterable[int]) -> array[int]:
    """Native unsigned integers of 32 bits."""
    tokens = array("I")
    try:
        # The constructor would read bytes as machine words; extend does not.
        tokens.extend(token_ids)
    except (TypeError, OverflowError) as error:
        raise FormatError(f"a token id is 0 to 2**32 - 1: {error}") from None
    return tokens
