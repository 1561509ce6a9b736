"""References of our own on vLLM's blocks, for as long as a transfer may touch them.

vLLM gives a block to another request when its last reference goes: when its request ends, is
preempted, or has moved its sliding window past it. While we hold one more, a block that a store
still reads is not written by anyone else, and a block that a late load may still write is in
no other request's hands. References are given back when every rank has reported the transfer ended.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

# Longer than the lease of any transfer.
_REPORT_S = 10.0


@dataclass(slots=True)
class _Held:
    blocks: list[KVCacheBlock]
    ranks: set[int]  # those that may still touch them
    since_s: float


class BlockReferences:
    """By transfer, the blocks that we hold a reference on."""

    def __init__(self, pool: BlockPool, world_size: int) -> None:
        self._pool = pool
        self._world_size = world_size
        self._held: dict[int, _Held] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        """Transfers in flight."""
        return len(self._held)

    def expects_reports(self) -> bool:
        """Whether workers are about to report the end of a transfer.

        A transfer that outlives its lease by far is in the hands of a frozen agent: its end is
        reported with the steps of later requests.
        """
        earliest_s = time.monotonic() - _REPORT_S
        return any(held.since_s > earliest_s for held in self._held.values())

    def is_null(self, block_id: int) -> bool:
        """Whether it stands for a block that a request no longer has, or never had."""
        return bool(self._pool.blocks[block_id].is_null)

    def take(self, block_ids: Iterable[int]) -> int:
        """Begins a transfer over these blocks, none of them null; returns its id."""
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(blocks)
        transfer_id = next(self._ids)
        self._held[transfer_id] = _Held(blocks, set(range(self._world_size)), time.monotonic())
        return transfer_id

    def ended(self, by_rank: Mapping[int, Sequence[int]]) -> None:
        """Ranks touch the blocks of these transfers no longer."""
        for rank, transfer_ids in by_rank.items():
            for transfer_id in transfer_ids:
                self._release(transfer_id, rank)

    def rank_stopped(self, rank: int) -> None:
        """The rank touches no block at all any more."""
        self.ended({rank: list(self._held)})

    def _release(self, transfer_id: int, rank: int) -> None:
        held = self._held.get(transfer_id)
        if held is None:
            return
        held.ranks.discard(rank)
        if not held.ranks:
            del self._held[transfer_id]
            # As vLLM itself does: the end of a prefix is evicted before its beginning.
            self._pool.free_blocks(reversed(held.blocks))


class StaleBlocks:
    """Whether vLLM's own prefix cache may hold KV of an earlier epoch.

    Between new weights and the reset of that cache vLLM itself still hits what the old weights
    computed. Nothing of a request that may do so is stored under the new epoch.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._suspect: Any = None

    def begin_epoch(self) -> None:
        """What vLLM has cached up to now is of an earlier epoch."""
        self._suspect = self._pool.cached_block_hash_to_block

    def may_be_hit(self) -> bool:
        """Whether any of that is still there. A reset replaces the map."""
        suspect = self._suspect
        if suspect is None:
            return False
        if suspect is self._pool.cached_block_hash_to_block and len(suspect) > 0:
            return True
        self._suspect = None
        return False
