"""What the adapters take, in the order that LMCache's callers give it, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_redis.client.transfers import LoadStoreOp, chunk_names
from lmcache_redis.errors import FormatError
from lmcache_redis.keys import IPCCacheEngineKey
from lmcache_redis.messages import ChunkNames

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
        (([7, 8], TOKENS), ValueError, "start and end say which"),
        (([7, 8], TOKENS, None, 32, 96), ValueError, "tokens 32 to 96 of 64"),
        (([7, 8], TOKENS, None, -32, 32), ValueError, "tokens -32 to 32 of 64"),
        (([7, 8], None, HASHES[:1]), ValueError, "1 block hashes for 2 blocks"),
        (([7, 8], TOKENS, None, 0, 64, 16), TypeError, "positional"),
    ],
)
def test_what_is_refused(arguments: tuple[Any, ...], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        LoadStoreOp(*arguments)


def names(**named: Any) -> ChunkNames:
    return chunk_names("m", 2, "r", blocks_per_chunk=2, **named)


@pytest.mark.parametrize(
    ("cache_salt", "salt"), [("", b""), ("\u00e9", "\u00e9".encode()), (b"\x00\xff", b"\x00\xff")]
)
def test_the_salt_is_in_the_key(cache_salt: str | bytes, salt: bytes) -> None:
    found = names(token_ids=TOKENS, start=0, end=64, worker_id=1, cache_salt=cache_salt)
    expected = IPCCacheEngineKey(
        "m", 2, 1, token_ids=tuple(TOKENS), end=64, request_id="r", salt=salt
    )
    assert found == ChunkNames(tokens=expected)


def test_a_salt_that_would_be_lost_is_refused() -> None:
    with pytest.raises(ValueError, match="block hashes cover the salt"):
        names(block_hashes=HASHES, cache_salt="s")
    with pytest.raises(TypeError, match="text or bytes, not int"):
        names(token_ids=TOKENS, end=64, cache_salt=5)
    with pytest.raises(FormatError, match="at most 4096 bytes"):
        names(token_ids=TOKENS, end=64, cache_salt="s" * 4097)
