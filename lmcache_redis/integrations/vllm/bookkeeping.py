"""The scheduler's bookkeeping: references to blocks, and recent chunks.

And what computing a prompt costs this engine, from its own steps.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_REPORT_S = 10.0  # longer than the lease of most transfers
# A store takes a fraction of this. vLLM waits this long before it preempts a request.
_FREED_SOON_S = 0.5
_MAX_RECENT_CHUNKS = 200_000
_REMEMBERED_S = 60.0
# Steps with fewer prompt tokens say nothing about prefill speed.
_LEAST_TOKENS = 64
# Weight of earlier steps in the average.
_KEPT = 0.75


@dataclass(slots=True)
class _Held:
    blocks: list[KVCacheBlock]
    ranks: set[int]  # those that may still touch the blocks
    since_s: float
    is_store: bool


class BlockReferences:
    """The blocks that the connector holds references to, by transfer.

    vLLM reuses a block when its last reference is released. A request releases its reference when
    it ends, is preempted, or moves its sliding window past the block. The connector's reference
    keeps a block from other requests while a store may read it or a late load may write it. It is
    released when every rank has reported the end of the transfer.
    """

    def __init__(self, pool: BlockPool, world_size: int) -> None:
        self._pool = pool
        self._world_size = world_size
        self._held: dict[int, _Held] = {}
        self._ids = itertools.count(1)

    def expects_reports(self) -> bool:
        """Whether workers will soon report the end of a transfer.

        A transfer still in flight long after its lease belongs to a frozen agent. Its end is
        reported in the steps of later requests.
        """
        earliest_s = time.monotonic() - _REPORT_S
        return any(held.since_s > earliest_s for held in self._held.values())

    def frees_soon(self) -> bool:
        """Whether blocks become free when stores in flight have read them."""
        earliest_s = time.monotonic() - _FREED_SOON_S
        return any(
            held.is_store
            and held.since_s > earliest_s
            and any(block.ref_cnt == 1 for block in held.blocks)
            for held in self._held.values()
        )

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """Releases all references within the context, and takes them again after it.

        vLLM resets its prefix cache only while no block is in use. None is allocated meanwhile,
        and what transfers read and write has no name in that cache.
        """
        blocks = [block for held in self._held.values() for block in held.blocks]
        self._pool.free_blocks(reversed(blocks))
        try:
            yield
        finally:
            self._pool.touch(blocks)

    def free_blocks(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def is_null(self, block_id: int) -> bool:
        """Whether the id is the placeholder for a block that a request does not have."""
        return bool(self._pool.blocks[block_id].is_null)

    def has_state(self, block_id: int, block_hash: bytes, group: int) -> bool:
        """Whether vLLM itself takes the block of ``group`` for the state after ``block_hash``.

        A request's recurrent state moves from block to block and is overwritten in place. A block
        that vLLM's prefix cache has under the hash stays as it is after the step.
        """
        cached_as = self._pool.blocks[block_id].block_hash
        return bool(cached_as == block_hash + group.to_bytes(4, "big"))

    def take(self, block_ids: Iterable[int], *, for_store: bool = False) -> int:
        """Takes references to blocks, none of them null, for a new transfer; returns its id."""
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(blocks)
        transfer_id = next(self._ids)
        self._held[transfer_id] = _Held(
            blocks, set(range(self._world_size)), time.monotonic(), for_store
        )
        return transfer_id

    def ended(self, by_rank: Mapping[int, Sequence[int]]) -> None:
        """These ranks no longer touch the blocks of these transfers."""
        for rank, transfer_ids in by_rank.items():
            for transfer_id in transfer_ids:
                held = self._held.get(transfer_id)
                if held is None:
                    continue
                held.ranks.discard(rank)
                if not held.ranks:
                    del self._held[transfer_id]
                    # In vLLM's own order: the end of a prefix is evicted before its beginning.
                    self._pool.free_blocks(reversed(held.blocks))

    def rank_stopped(self, rank: int) -> None:
        self.ended({rank: list(self._held)})


class RecentChunks:
    """Names of chunks that were stored or found within the last minute: they are not stored again.

    This only saves messages: the agent itself checks which chunks it has. Names expire because
    stores may be dropped and Redis evicts.
    """

    def __init__(self) -> None:
        self._expiry_s: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, name: bytes) -> bool:
        return self._expiry_s.get(name, 0.0) > time.monotonic()

    def add(self, names: Iterable[bytes]) -> None:
        expiry_s = time.monotonic() + _REMEMBERED_S
        for name in names:
            self._expiry_s[name] = expiry_s
            self._expiry_s.move_to_end(name)
        while len(self._expiry_s) > _MAX_RECENT_CHUNKS:
            self._expiry_s.popitem(last=False)

    def discard(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._expiry_s.pop(name, None)

    def clear(self) -> None:
        self._expiry_s.clear()


class PrefillRate:
    """Seconds per prompt token, of recent steps. Times are those of `time.monotonic()`.

    A step also computes the next tokens of running requests, so the rate falls when many run. Steps
    may overlap: one begins when the one before it has ended.
    """

    def __init__(self) -> None:
        self._scheduled: dict[int, tuple[int, float]] = {}  # by step: prompt tokens, when
        self._steps = 0
        self._last_end_s = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def token_s(self) -> float:
        """Seconds per prompt token; 0.0: not measured yet."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def scheduled(self, prompt_tokens: int, now_s: float) -> int:
        """A step is scheduled. Returns its number for `ended`, or 0 if it is not measured."""
        if prompt_tokens < _LEAST_TOKENS:
            return 0
        self._steps += 1
        self._scheduled[self._steps] = (prompt_tokens, now_s)
        return self._steps

    def ended(self, step: int, now_s: float) -> None:
        """The step with this number has ended; 0: a step that is not measured."""
        tokens, scheduled_s = self._scheduled.pop(step, (0, now_s))
        if tokens:
            self._tokens = self._tokens * _KEPT + tokens
            self._seconds = self._seconds * _KEPT + now_s - max(scheduled_s, self._last_end_s)
            for earlier in [each for each in self._scheduled if each < step]:
                del self._scheduled[earlier]
        self._last_end_s = now_s
