"""What a load or a store is about: blocks on one side, chunks on the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_redis.keys import IPCCacheEngineKey
from lmcache_redis.messages import ChunkNames


@dataclass(frozen=True)
class LoadStoreOp:
    """Whole chunks of one request and the blocks that hold them, or shall hold them.

    Exactly one of ``block_hashes`` and ``token_ids`` is given.

    block_ids: ids of paged blocks in token order, ``blocks_per_chunk`` a chunk.
    block_hashes: the engine's hash of each of these blocks (hash mode).
    token_ids: all tokens of the request up to ``end`` (token mode); the chunks of
        ``[start, end)`` are meant, both multiples of the chunk size.
    skip_first_n_tokens: blocks of that many leading tokens are not written by a load,
        because other requests may be reading them.
    """

    block_ids: Sequence[int]
    block_hashes: Sequence[bytes] | None = None
    token_ids: Sequence[int] | None = None
    start: int = 0
    end: int = 0
    skip_first_n_tokens: int = 0

    def __post_init__(self) -> None:
        if (self.block_hashes is None) == (self.token_ids is None):
            raise ValueError("give exactly one of block_hashes and token_ids")
        if self.block_hashes is not None and len(self.block_hashes) != len(self.block_ids):
            raise ValueError(
                f"{len(self.block_hashes)} block hashes for {len(self.block_ids)} blocks"
            )

    def __len__(self) -> int:
        return len(self.block_ids)


def chunk_names(
    model_name: str,
    world_size: int,
    request_id: str,
    *,
    blocks_per_chunk: int,
    block_hashes: Sequence[bytes] | None = None,
    token_ids: Sequence[int] | None = None,
    start: int = 0,
    end: int = 0,
    worker_id: int | None = None,
) -> ChunkNames:
    """The names of the whole chunks among ``block_hashes``, or of ``token_ids[start:end]``.

    A chunk is named by the hash of its last block: block hashes are chained, so
    that one covers every token before it. Raises ``ValueError`` unless exactly one is given.
    """
    if (block_hashes is None) == (token_ids is None):
        raise ValueError("give exactly one of block_hashes and token_ids")
    if block_hashes is not None:
        return ChunkNames(tuple(map(bytes, block_hashes[blocks_per_chunk - 1 :: blocks_per_chunk])))
    assert token_ids is not None
    if end <= start:
        return ChunkNames()
    return ChunkNames(
        tokens=IPCCacheEngineKey(
            model_name=model_name,
            world_size=world_size,
            worker_id=worker_id,
            token_ids=tuple(token_ids[:end]),
            start=start,
            end=end,
            request_id=request_id,
        )
    )
