# SPDX-License-Identifier: Apache-2.0
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
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from lmcache_redis.integrations.vllm.engine import watch_new_blocks
from lmcache_redis.integrations.vllm.requests import Tracked
from lmcache_redis.integrations.vllm.support import LayerGroup

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    Blocks = Sequence[Sequence[KVCacheBlock]]

_NOTHING = None, 0  # is known of a block


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
        """A request begins, or resumes, behind computed tokens: are their blocks known?"""
        if tracked.prefix is None:
            return
        origin, prefix = tracked.origin, tracked.prefix
        local = min(origin.local_tokens, computed_tokens)
        known = self._known_end(blocks, range(local), prefix)
        if known == local:
            loaded = range(local, min(local + origin.loaded_tokens, computed_tokens))
            self._filled(blocks, loaded, prefix)
            known = self._known_end(blocks, range(local, computed_tokens), prefix)
        origin.known_tokens = sys.maxsize if known == computed_tokens else known
        origin.filled_tokens = known

    def fills(self, tracked: Tracked, blocks: Blocks, tokens: int) -> None:
        """The request has its first ``tokens``, all of them known, in its blocks."""
        assert tracked.prefix is not None
        self._filled(blocks, range(tracked.origin.filled_tokens, tokens), tracked.prefix)
        tracked.origin.filled_tokens = tokens

    def ends_known(self, tracked: Tracked, tokens: int) -> bool:
        """Whether the last of the ``tokens`` that vLLM's own cache has of a request is known."""
        end = tracked.request.block_hashes[tokens // tracked.hash_tokens - 1]
        for group in self._groups:
            if found := self._pool.get_cached_block(end, [group.number]):
                return self._is_known(found[0], tokens, tracked.prefix)
        return False

    def _filled(self, blocks: Blocks, tokens: range, prefix: bytes) -> None:
        for group in self._groups:
            for block, end in _with_ends(blocks[group.number], tokens, group.block_size_tokens):
                # vLLM may compute tokens again that a block already has.
                if not (block.is_null or self._is_known(block, end, prefix)):
                    self._known[block.block_id] = prefix, end

    def _known_end(self, blocks: Blocks, tokens: range, prefix: bytes) -> int:
        """Up to where ``tokens`` of a request are known: their end, or where a block begins."""
        known_end, known = tokens.stop, self._known.get
        for group in self._groups:
            size, held = group.block_size_tokens, blocks[group.number]
            known_end = min(known_end, len(held) * size)
            # A request may begin with thousands of blocks: no call for each of them but one.
            for block, end in _with_ends(held, tokens, size):
                found = known(block.block_id, _NOTHING)
                if not (block.is_null or (found[1] >= end and found[0] == prefix)):
                    known_end = min(known_end, (end - 1) // size * size)
                    break
        return known_end

    def _is_known(self, block: KVCacheBlock, end: int, prefix: bytes | None) -> bool:
        found, known_end = self._known.get(block.block_id, _NOTHING)
        return end <= known_end and found == prefix


def _with_ends(
    held: Sequence[KVCacheBlock], tokens: range, size: int
) -> Iterator[tuple[KVCacheBlock, int]]:
    """The blocks that have a request's ``tokens``, each with the end of those that it has."""
    if not tokens:
        return iter(())
    first = tokens.start // size
    ends = chain(range((first + 1) * size, tokens.stop, size), (tokens.stop,))
    return zip(held[first:], ends, strict=False)
