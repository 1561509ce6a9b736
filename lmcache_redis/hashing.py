"""Chunk hashes from token ids, for engines that do not send hashes of their own.

    root      = H(u32 chunk_size_tokens | salt)
    hash of i = H(hash of chunk i-1, or root | token ids of chunk i, u32 each)

H is BLAKE2b (RFC 7693) with a digest of 32 bytes and the personalization
b"lmcr1.tokens"; integers are little-endian. A hash thus names all tokens up to the end of
its chunk, and is the same in every process and on every machine.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from hashlib import blake2b

from lmcache_redis.errors import FormatError

CHUNK_HASH_BYTES = 32

_PERSON = b"lmcr1.tokens"
_TOKEN_BYTES = 4


def hash_chunks(
    token_ids: Iterable[int], chunk_size_tokens: int, *, salt: bytes = b""
) -> list[bytes]:
    """One hash of 32 bytes for every full chunk; tokens past the last full chunk are left out.

    salt keeps apart what the tokens alone do not (LoRA, tenants, images). Raises
    FormatError unless 0 <= token id < 2**32 and 0 < chunk_size_tokens < 2**32.
    """
    if type(chunk_size_tokens) is not int or not 0 < chunk_size_tokens < 1 << 32:
        raise FormatError(f"a chunk of {chunk_size_tokens!r} tokens; 1 to 2**32 - 1 can be hashed")
    tokens = _encoded(token_ids)
    parent = blake2b(
        chunk_size_tokens.to_bytes(4, "little") + salt,
        digest_size=CHUNK_HASH_BYTES,
        person=_PERSON,
    ).digest()
    chunk_bytes = chunk_size_tokens * _TOKEN_BYTES
    hashes: list[bytes] = []
    for end in range(chunk_bytes, len(tokens) + 1, chunk_bytes):
        chain = blake2b(parent, digest_size=CHUNK_HASH_BYTES, person=_PERSON)
        chain.update(tokens[end - chunk_bytes : end])
        parent = chain.digest()
        hashes.append(parent)
    return hashes


def _encoded(token_ids: Iterable[int]) -> memoryview:
    """Every token id as a little-endian u32."""
    tokens = array("I")
    try:
        # extend, not the constructor, which would take bytes for machine words
        tokens.extend(token_ids)
    except (TypeError, OverflowError) as error:
        raise FormatError(f"a token id is 0 to 2**32 - 1: {error}") from None
    if sys.byteorder == "big":
        tokens.byteswap()
    return memoryview(tokens).cast("B")
