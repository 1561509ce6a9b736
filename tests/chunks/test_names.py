# SPDX-License-Identifier: Apache-2.0
"""The names of chunks: which keys are ours, which parts a prefix needs, what cannot be named."""

from __future__ import annotations

import pytest

from lmcache_redis.chunks.names import (
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


@pytest.mark.parametrize("model", ["org/model", "a{b", "{a}b", "m" * 123])
@pytest.mark.parametrize("rank", [7, 0x7B017B00])
def test_a_claim_is_the_key_of_no_chunk(model: str, rank: int) -> None:
    key = ChunkForm.of(NAMES, model, rank, opaque_pages(100), 64).key(b"h" * 32)
    claim = claim_key(key, b"mine:")
    assert claim.startswith(b"mine:lmcr2:")
    assert slot_of(claim) == slot_of(stripe_key(key, 3))
    assert claim != claim_key(key[:-1], b"mine:")
    assert chunk_key_in(claim, b"mine:") is None
    with pytest.raises(FormatError):
        parse_stripe_key(claim, b"mine:")


def test_an_account_is_the_key_of_no_chunk() -> None:
    account, later = account_keys("Käse}{", (7, 8), b"mine:")
    assert account.startswith(b"mine:lmcr2:tenant:")
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


def test_a_form_that_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(FormatError, match="a model name has 1 to 1024 bytes"):
        ChunkForm.of(NAMES, "", 0, opaque_pages(100), 64)
    with pytest.raises(FormatError, match="kv_rank"):
        ChunkForm.of(NAMES, "org/model", -1, opaque_pages(100), 64)
    with pytest.raises(FormatError, match="at most 65535 can be numbered"):
        ChunkForm.of(NAMES, "org/model", 0, opaque_pages(64 * 65536), 64)
    with pytest.raises(FormatError):
        ChunkForm.of(NAMES, "org/model", 0, opaque_pages(0), 64)
