"""Whose KV is in vLLM's blocks.

A chunk may be stored if every token from the start of the prompt to the chunk's end was computed by
this engine, or loaded by us, under the name that the chunk gets. vLLM's own prefix cache does not
know that: it has blocks that another connector has filled, and its hashes lack what is in our names
(weights, the content of an adapter). So this class remembers under which prefix of names the
content of a block came to be. A block of which it knows nothing ends what may be stored of a
request, and what the request computes behind that is not known either.

What is known of a block holds for all tokens before it too: they were known when it was filled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lmcache_redis.integrations.vllm.engine import watch_new_blocks
from lmcache_redis.integrations.vllm.requests import Tracked
from lmcache_redis.integrations.vllm.support import LayerGroup

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    Blocks = Sequence[Sequence[KVCacheBlock]]


class BlockProvenance:
    """The prefixes of names under which this engine has filled vLLM's blocks.

    groups: that are cached. Blocks of a request are by vLLM's number of the group, from its first
    token on, null ones included.
    """

    def __init__(self, pool: BlockPool, groups: Sequence[LayerGroup]) -> None:
        self._pool = pool
        self._groups = groups
        # By block id: the prefix, and the end of the tokens of its request that are known.
        self._known: dict[int, tuple[bytes, int]] = {}
        watch_new_blocks(pool, self._given)

    def _given(self, blocks: Iterable[KVCacheBlock]) -> None:
        """A request, or another connector, may write these."""
        for block in blocks:
            self._known.pop(block.block_id, None)

    def copied(self, source: int, target: int) -> None:
        """vLLM copies the content of one block to another, which it has just allocated."""
        if (known := self._known.get(source)) is not None:
            self._known[target] = known

    def forget(self) -> None:
        """No block is known any more."""
        self._known.clear()

    def begins(self, tracked: Tracked, blocks: Blocks, computed_tokens: int) -> None:
        """A request begins, or resumes, behind so many tokens: how many of them are known?"""
        if tracked.prefix is None:
            return
        local, prefix = min(tracked.local_tokens, computed_tokens), tracked.prefix
        known = self._known_tokens(blocks, local, prefix)
        if known == local:
            loaded = range(local, min(local + tracked.loaded_tokens, computed_tokens))
            self._filled(blocks, loaded, prefix)
            known = self._known_tokens(blocks, computed_tokens, prefix)
        tracked.known_tokens = sys.maxsize if known == computed_tokens else known
        tracked.filled_tokens = 0

    def fills(self, tracked: Tracked, blocks: Blocks, tokens: int) -> None:
        """The request has its first ``tokens``, all of them known, in its blocks."""
        assert tracked.prefix is not None
        self._filled(blocks, range(tracked.filled_tokens, tokens), tracked.prefix)
        tracked.filled_tokens = tokens

    def ends_known(self, tracked: Tracked, tokens: int) -> bool:
        """Whether the last of the ``tokens`` that vLLM's own cache has of a request is known."""
        end = tracked.request.block_hashes[tokens // tracked.hash_tokens - 1]
        for group in self._groups:
            if found := self._pool.get_cached_block(end, [group.number]):
                return self._is_known(found[0], tokens, tracked.prefix)
        return False

    def _filled(self, blocks: Blocks, tokens: range, prefix: bytes) -> None:
        for group in self._groups:
            size = group.block_size_tokens
            numbers = range(tokens.start // size, -(-tokens.stop // size))
            for number, block in zip(numbers, blocks[group.number][numbers.start :], strict=False):
                end = min((number + 1) * size, tokens.stop)
                # vLLM may compute tokens again that a block already has.
                if not block.is_null and not self._is_known(block, end, prefix):
                    self._known[block.block_id] = prefix, end

    def _known_tokens(self, blocks: Blocks, tokens: int, prefix: bytes) -> int:
        """How many of a request's first ``tokens`` are known, up to the end of a block."""
        known = tokens
        for group in self._groups:
            size, held = group.block_size_tokens, blocks[group.number]
            known = min(known, len(held) * size)
            for number, block in enumerate(held[: -(-known // size)]):
                end = min((number + 1) * size, tokens)
                if not block.is_null and not self._is_known(block, end, prefix):
                    known = min(known, number * size)
                    break
        return known

    def _is_known(self, block: KVCacheBlock, end: int, prefix: bytes | None) -> bool:
        found, known_end = self._known.get(block.block_id, (None, 0))
        return found is not None and found == prefix and end <= known_end
