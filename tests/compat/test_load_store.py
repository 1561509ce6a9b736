# SPDX-License-Identifier: Apache-2.0
"""What the adapters take, in the order that LMCache's callers give it, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_redis.chunks.keys import bounded_hash, hash_chunks
from lmcache_redis.compat.load_store import LoadStoreOp, check_names

TOKENS = list(range(100, 164))
HASHES = [b"a" * 32, b"b" * 32]


def test_arguments_by_position_are_in_the_order_of_lmcache() -> None:
    by_tokens = LoadStoreOp([7, 8], TOKENS, None, 32, 64)
    assert by_tokens == LoadStoreOp(block_ids=[7, 8], token_ids=TOKENS, start=32, end=64)
    by_hashes = LoadStoreOp([7, 8], None, HASHES)
    assert by_hashes == LoadStoreOp(block_ids=[7, 8], block_hashes=HASHES)
    assert len(by_tokens) == 2


def test_as_vllm_gives_them() -> None:
    """lmcache_mp_connector.py of vLLM 0.32."""
    op = LoadStoreOp(
        token_ids=[*TOKENS, 1, 2], block_ids=[7, 8], start=32, end=64, skip_first_n_tokens=16
    )
    assert (op.skip_first_n_tokens, op.block_hashes) == (16, None)


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        (([7, 8], HASHES), TypeError, "pass hashes as block_hashes"),
        (([7, 8], None, TOKENS[:2]), TypeError, "pass token ids as token_ids"),
        (([7, 8], None, ["a", "b"]), TypeError, "a block hash is bytes, not str"),
        (([7, 8],), ValueError, "exactly one"),
        (([7, 8], TOKENS, HASHES), ValueError, "exactly one"),
        (([7, 8], TOKENS, None, 32, 16), ValueError, "start and end say which"),
        (([7, 8], TOKENS, None, 32, 96), ValueError, "tokens 32 to 96 of 64"),
        (([7, 8], TOKENS, None, -32, 32), ValueError, "tokens -32 to 32 of 64"),
        (([7, 8], None, HASHES[:1]), ValueError, "1 block hashes for 2 blocks"),
        (([7, 8], TOKENS, None, 0, 64, 16), TypeError, "positional"),
    ],
)
def test_what_is_refused(arguments: tuple[Any, ...], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        LoadStoreOp(*arguments)


def test_the_defaults_of_token_mode_name_no_chunk() -> None:
    """As in the original, which stores and loads nothing then."""
    op = LoadStoreOp([7, 8], TOKENS)
    assert (op.start, op.end) == (0, 0)
    assert not op.whole_chunks(2, 16).block_ids


@pytest.mark.parametrize(
    ("start", "end", "blocks", "kept"),
    [
        (0, 64, 4, (0, 64, 0, 4)),
        (0, 100, 7, (0, 64, 0, 4)),  # the seventh block is not full
        (0, 63, 4, (0, 0, 0, 0)),
        (64, 127, 4, (0, 0, 0, 0)),
        (16, 128, 7, (64, 128, 3, 7)),
        (20, 130, 8, (64, 128, 3, 7)),  # the first block holds tokens from 16 on
        (70, 120, 4, (0, 0, 0, 0)),
        (0, 100, 6, (0, 64, 0, 4)),  # without the block that is not full
        (0, 100, 4, (0, 64, 0, 4)),  # without those that are left out
        # Not the blocks of these tokens, or which of them is not certain.
        (0, 100, 8, (0, 0, 0, 0)),
        (0, 100, 3, (0, 0, 0, 0)),
        (16, 128, 4, (0, 0, 0, 0)),
        (20, 130, 7, (0, 0, 0, 0)),
    ],
)
def test_tokens_are_cut_to_whole_chunks(
    start: int, end: int, blocks: int, kept: tuple[int, int, int, int]
) -> None:
    ids = list(range(100, 100 + blocks))
    whole = LoadStoreOp(ids, range(200), None, start, end).whole_chunks(4, 16)
    begin, stop, first, last = kept
    assert [*whole.hashes] == hash_chunks(range(stop), 64)[begin // 64 :]
    assert [*whole.block_ids] == ids[first:last]


@pytest.mark.parametrize(("blocks", "kept"), [(8, 8), (6, 4), (3, 0)])
def test_hashes_are_cut_to_whole_chunks(blocks: int, kept: int) -> None:
    hashes = [bytes([n]) * 32 for n in range(blocks)]
    whole = LoadStoreOp(range(blocks), None, hashes).whole_chunks(4, 16)
    assert [*whole.block_ids] == [*range(kept)]
    assert whole.hashes == hashes[3:kept:4]


@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 300])
def test_a_hash_that_no_key_holds_is_digested(nbytes: int) -> None:
    hashes = [bytes([n]) * nbytes for n in range(4)]
    names = LoadStoreOp(range(4), None, hashes).whole_chunks(2, 16).hashes
    assert [len(each) for each in names] == [nbytes if nbytes < 64 else 32] * 2
    assert names == [bounded_hash(hashes[1]), bounded_hash(hashes[3])]
    assert len({*names}) == 2


@pytest.mark.parametrize(("skip", "left"), [(16, 0), (48, 0), (80, 2)])
def test_what_is_skipped_counts_from_the_first_whole_chunk(skip: int, left: int) -> None:
    op = LoadStoreOp(range(7), range(200), None, 16, 128, skip_first_n_tokens=skip)
    assert op.whole_chunks(4, 16).skip_blocks == left


def test_blocks_that_do_not_hold_the_tokens_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    LoadStoreOp(range(8), range(200), None, 0, 100).whole_chunks(4, 16)
    assert "8 blocks do not hold tokens 0 to 100 in blocks of 16" in caplog.text


@pytest.mark.parametrize(
    ("cache_salt", "salt"), [("", b""), ("\u00e9", "\u00e9".encode()), (b"\x00\xff", b"\x00\xff")]
)
def test_the_salt_is_hashed_with_the_tokens(cache_salt: str | bytes, salt: bytes) -> None:
    op = LoadStoreOp(range(4), TOKENS, None, 0, 64)
    assert op.whole_chunks(2, 16, cache_salt).hashes == hash_chunks(TOKENS, 32, salt=salt)


def test_a_salt_that_would_be_lost_is_refused() -> None:
    with pytest.raises(ValueError, match="block hashes cover the salt"):
        check_names(None, HASHES, "s")
    with pytest.raises(TypeError, match="text or bytes, not int"):
        check_names(TOKENS, None, 5)  # type: ignore[arg-type]
