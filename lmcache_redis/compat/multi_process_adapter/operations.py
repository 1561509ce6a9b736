"""Operations as LMCache's adapters take them, and the chunks that they name.

Callers name chunks by the hash of each block or by token ids, and may begin or end within a chunk.
The agent takes the hashes of whole chunks (`TransferOp`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from lmcache_redis.chunks.keys import hash_chunks
from lmcache_redis.client.worker import TransferOp

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadStoreOp:
    """Tokens of one request, and the blocks to store or to load their KV.

    block_ids: ids of paged blocks in token order.
    token_ids: all tokens of the request up to ``end``, or more. The blocks hold those of
        ``[start, end)``, by default none.
    block_hashes: instead of tokens, the engine's hash of each of these blocks. They are chained:
        the hash of a block covers every token before it.
    skip_first_n_tokens: a load does not write the first blocks, those of this many tokens, because
        other requests may be reading them.

    Only whole chunks are stored and loaded; hashes and tokens may begin or end within one.
    Raises TypeError for hashes in place of token ids or the reverse, ValueError for inconsistent
    arguments.
    """

    block_ids: Sequence[int]
    token_ids: Sequence[int] | None = None
    block_hashes: Sequence[bytes] | None = None
    start: int = 0
    end: int = 0
    _: KW_ONLY
    skip_first_n_tokens: int = 0  # not in LMCache's class: vLLM gives it

    def __post_init__(self) -> None:
        check_names(self.token_ids, self.block_hashes)
        if self.block_hashes is not None and len(self.block_hashes) != len(self.block_ids):
            raise ValueError(
                f"{len(self.block_hashes)} block hashes for {len(self.block_ids)} blocks"
            )
        if self.token_ids is not None and not 0 <= self.start <= self.end <= len(self.token_ids):
            raise ValueError(
                f"tokens {self.start} to {self.end} of {len(self.token_ids)}: in token mode, start "
                "and end say which tokens the blocks hold"
            )

    def __len__(self) -> int:
        return len(self.block_ids)

    def whole_chunks(
        self, blocks_per_chunk: int, block_tokens: int, cache_salt: str | bytes = ""
    ) -> TransferOp:
        """The operation without parts of chunks at its ends.

        None of its blocks if the chunk size is not known yet (0), or if the number of blocks leaves
        open which tokens they hold, which is logged.
        """
        nothing = TransferOp((), ())
        if not blocks_per_chunk:
            return nothing
        if self.block_hashes is not None:
            hashes = chunk_hashes(blocks_per_chunk, self.block_hashes)
            kept = len(hashes) * blocks_per_chunk
            return TransferOp(self.block_ids[:kept], hashes, self.skip_first_n_tokens)
        assert self.token_ids is not None
        chunk_tokens = blocks_per_chunk * block_tokens
        start, end = -(-self.start // chunk_tokens), self.end // chunk_tokens
        if start >= end:
            return nothing
        before = self.start // block_tokens
        first, last = start * blocks_per_chunk - before, end * blocks_per_chunk - before
        most = -(-self.end // block_tokens) - before
        # Where the first block begins within the tokens, a block at the end may be left out.
        least = most if self.start % block_tokens else last
        if not least <= len(self.block_ids) <= most:
            logger.error(
                "%d blocks do not hold tokens %d to %d in blocks of %d: nothing is stored or "
                "loaded", len(self.block_ids), self.start, self.end, block_tokens,
            )  # fmt: skip
            return nothing
        tokens = self.token_ids[: end * chunk_tokens]
        return TransferOp(
            self.block_ids[first:last],
            hash_chunks(tokens, chunk_tokens, salt=salt_bytes(cache_salt))[start:],
            max(0, self.skip_first_n_tokens - first * block_tokens),
        )


def check_names(
    token_ids: Sequence[int] | None,
    block_hashes: Sequence[bytes] | None,
    cache_salt: str | bytes = "",
) -> None:
    """Checks that exactly one of both is given, of the right type, and a salt only with token ids.

    Raises TypeError or ValueError.
    """
    if (block_hashes is None) == (token_ids is None):
        raise ValueError("give exactly one of block_hashes and token_ids")
    if not isinstance(cache_salt, (str, bytes)):
        raise TypeError(f"a cache_salt is text or bytes, not {type(cache_salt).__name__}")
    if block_hashes is not None:
        if cache_salt:
            raise ValueError("block hashes cover the salt: a cache_salt is for token_ids")
        # Only the first is checked: there may be thousands, and the agent checks each.
        if len(block_hashes) and not isinstance(block_hashes[0], bytes):
            raise TypeError(
                f"a block hash is bytes, not {type(block_hashes[0]).__name__}: "
                "pass token ids as token_ids"
            )
    elif token_ids is not None and len(token_ids) and isinstance(token_ids[0], bytes):
        raise TypeError("a token id is an int, not bytes: pass hashes as block_hashes")


def chunk_hashes(blocks_per_chunk: int, block_hashes: Sequence[bytes]) -> Sequence[bytes]:
    """The names of the whole chunks among blocks: the hash of a chunk's last block."""
    return block_hashes[blocks_per_chunk - 1 :: blocks_per_chunk]


def salt_bytes(cache_salt: str | bytes) -> bytes:
    return cache_salt.encode() if isinstance(cache_salt, str) else cache_salt
