# SPDX-License-Identifier: Apache-2.0
"""The names of chunks: which keys are ours, which parts a prefix needs, what cannot be named."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import pytest

from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.names import (
    MAX_REACH_TOKENS,
    ChunkForm,
    ChunkNames,
    Reach,
    account_keys,
    chunk_key_in,
    claim_key,
    is_claim_key,
    opaque_pages,
    parse_stripe_key,
    stripe_key,
    tenant_digest,
)
from lmcache_redis.errors import FormatError
from lmcache_redis.resp.routes import slot_of

NAMES = ChunkNames(bytes(range(32)), b"mine:")


def test_a_chunk_key_is_read_out_of_a_stripes_key() -> None:
    key = ChunkForm.of(NAMES, "org/model", 7, opaque_pages(100), 64).key(b"h" * 32)
    assert key.startswith(b"mine:lmcr2:")
    assert chunk_key_in(stripe_key(key, 3), b"mine:") == key
    assert chunk_key_in(b"mine:" + key, b"mine:") is None
    assert chunk_key_in(stripe_key(key, 3), b"") is None


def test_a_chunk_key_and_what_it_names() -> None:
    form = ChunkForm.of(NAMES, "org/model", 7, opaque_pages(100), 64)
    named = ObjectKey(b"h" * 32, "org/model", 7)
    key = NAMES.chunk_key(named)
    assert key == form.key(b"h" * 32)
    assert NAMES.parse(key) == named
    for other in (ChunkNames(bytes(32), b"mine:"), ChunkNames(NAMES.fingerprint)):
        assert other.parse(key) is None
    assert NAMES.parse(key[:-1]) is None


def test_keys_of_hashes_that_begin_so() -> None:
    form = ChunkForm.of(NAMES, "org/model", 7, opaque_pages(100), 64)
    beginning = form.keys_after(b"ab", 4)
    assert form.key(b"abcd").startswith(beginning)
    for other in (b"aacd", b"bbcd", b"abcde"):
        assert not form.key(other).startswith(beginning)


@pytest.mark.parametrize("model", ["org/model", "a{b", "{a}b", "m" * 123])
@pytest.mark.parametrize("rank", [7, 0x7B017B00])
def test_a_claim_is_the_key_of_no_chunk(model: str, rank: int) -> None:
    key = ChunkForm.of(NAMES, model, rank, opaque_pages(100), 64).key(b"h" * 32)
    claim = claim_key(key, b"mine:")
    digest = blake2b(key, digest_size=8).hexdigest().encode()
    assert claim.startswith(b"mine:lmcr2:claim:" + digest + b"{")
    assert is_claim_key(claim, b"mine:")
    assert not is_claim_key(stripe_key(key, 3), b"mine:")
    assert slot_of(claim) == slot_of(stripe_key(key, 3))
    assert claim != claim_key(key[:-1], b"mine:")
    assert chunk_key_in(claim, b"mine:") is None
    with pytest.raises(FormatError):
        parse_stripe_key(claim, b"mine:")


def test_an_account_is_the_key_of_no_chunk() -> None:
    account, later = account_keys("Käse}{", (7, 8), b"mine:")
    digest = tenant_digest("Käse}{")
    assert len(digest) == 16
    assert account == b"mine:lmcr2:tenant:%b:7" % digest.hex().encode()
    assert account != later
    assert chunk_key_in(account, b"mine:") is None
    assert not is_claim_key(account, b"mine:")
    with pytest.raises(FormatError):
        parse_stripe_key(account, b"mine:")


@pytest.mark.parametrize(
    ("reach", "blocks"),
    [
        (Reach(), 16),
        (Reach("state"), 1),
        (Reach("window", 1), 1),  # a window of the token itself still has a block
        (Reach("window", 17), 1),
        (Reach("window", 18), 2),
        (Reach("window", 4096), 16),
    ],
)
def test_blocks_of_a_part(reach: Reach, blocks: int) -> None:
    assert reach.blocks_per_part(16, 16) == blocks


def test_a_reach_that_means_nothing_is_refused() -> None:
    reaches: list[tuple[Any, int]] = [("all", 9), ("state", 1), ("window", 0), ("local", 0)]
    for kind, tokens in (*reaches, ("window", -1), ("window", MAX_REACH_TOKENS + 1)):
        with pytest.raises(FormatError, match="reach"):
            Reach(kind, tokens)
    assert Reach("window", MAX_REACH_TOKENS).first_token(9) == 0
    assert Reach().first_token(9) == 0, "full attention reads all"


def test_a_form_that_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(FormatError, match="a model name has 1 to 1024 bytes"):
        ChunkForm.of(NAMES, "", 0, opaque_pages(100), 64)
    with pytest.raises(FormatError, match="kv_rank"):
        ChunkForm.of(NAMES, "org/model", -1, opaque_pages(100), 64)
    with pytest.raises(FormatError, match="at most 65535 can be numbered"):
        ChunkForm.of(NAMES, "org/model", 0, opaque_pages(64 * 65536), 64)
    with pytest.raises(FormatError):
        ChunkForm.of(NAMES, "org/model", 0, opaque_pages(0), 64)
