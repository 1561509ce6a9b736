# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.chunks.keys import hash_chunks
from lmcache_redis.errors import FormatError

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def plain_hash_chunks(tokens: list[int], chunk_size_tokens: int, salt: bytes) -> list[bytes]:
    """The definition in docs/reference/value-format.md, token by token."""

    def digest(data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=32, person=b"lmcr2.tokens").digest()

    parent = digest(struct.pack("<I", chunk_size_tokens) + salt)
    hashes = []
    for start in range(0, len(tokens) - chunk_size_tokens + 1, chunk_size_tokens):
        chunk = tokens[start : start + chunk_size_tokens]
        parent = digest(parent + b"".join(struct.pack("<I", token) for token in chunk))
        hashes.append(parent)
    return hashes


@given(TOKENS, st.integers(1, 9), st.binary(max_size=70))
def test_agrees_with_the_plain_definition(tokens: list[int], size: int, salt: bytes) -> None:
    assert hash_chunks(tokens, size, salt=salt) == plain_hash_chunks(tokens, size, salt)


@given(TOKENS, TOKENS, st.integers(1, 9))
def test_a_hash_depends_on_the_whole_prefix_and_on_nothing_after(
    head: list[int], tail: list[int], size: int
) -> None:
    whole = hash_chunks(head + tail, size)
    part = hash_chunks(head, size)
    assert whole[: len(part)] == part
    if part:
        changed = hash_chunks([head[0] ^ 1, *head[1:], *tail], size)
        assert set(changed).isdisjoint(whole)


def test_any_sequence_of_ints_gives_the_same_hashes() -> None:
    tokens = [0, 7, 250, 99]
    expected = hash_chunks(tokens, 2)
    assert hash_chunks(tuple(tokens), 2) == expected
    assert hash_chunks(np.array(tokens, dtype=np.int64), 2) == expected
    assert hash_chunks(np.array(tokens, dtype=np.int32), 2) == expected
    assert hash_chunks(iter(tokens), 2) == expected
    assert hash_chunks(bytes(tokens), 2) == expected


@pytest.mark.parametrize("token", [-1, 2**32, 1.5, "a", None])
def test_a_token_id_out_of_range_is_refused(token: object) -> None:
    with pytest.raises(FormatError, match="a token id is 0 to"):
        hash_chunks([1, token], 1)  # type: ignore[list-item]


@pytest.mark.parametrize("size", [0, -1, 2**32, 1.5, True])
def test_a_chunk_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(FormatError, match="1 to 2\\*\\*32 - 1 tokens"):
        hash_chunks([1, 2], size)
