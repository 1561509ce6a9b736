# SPDX-License-Identifier: Apache-2.0
"""Plans loads and stores: which blocks hold which parts of chunks, and whether there is room.

A chunk has one part for each group of layers. A load moves the parts that a prefix needs, as vLLM
has allocated blocks for them; a store takes each part that is complete and still there. While a
transfer is in flight, its blocks have a reference of the connector's.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from typing import TYPE_CHECKING

from lmcache_redis.chunks.names import FULL_REACH
from lmcache_redis.client.worker import TransferOp
from lmcache_redis.integrations.vllm.provenance import BlockProvenance
from lmcache_redis.integrations.vllm.requests import Tracked
from lmcache_redis.integrations.vllm.support import LayerGroup
from lmcache_redis.integrations.vllm.worker import Planned

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_REPORT_S = 10.0  # longer than the lease of most transfers
# A store takes a fraction of this. vLLM waits this long before it preempts a request.
_FREED_SOON_S = 0.5
_MAX_RECENT_CHUNKS = 200_000
_REMEMBERED_S = 60.0


@dataclass(slots=True)
class _Held:
    """A transfer. ranks: that may still touch the blocks. sent_s: None: the workers have not it."""

    blocks: list[KVCacheBlock]
    ranks: set[int]
    is_store: bool
    sent_s: float | None = None

    def was_sent_within(self, seconds: float) -> bool:
        """True also for one that is sent with the next step."""
        return self.sent_s is None or self.sent_s > time.monotonic() - seconds


class BlockReferences:
    """The blocks that the connector holds references to, by transfer.

    vLLM reuses a block when its last reference is released. The connector's keeps it from other
    requests while a store may read it or a late load may write it, until every rank has reported
    the end of the transfer.
    """

    def __init__(self, pool: BlockPool, world_size: int) -> None:
        self.pool = pool
        self._world_size = world_size
        self._held: dict[int, _Held] = {}
        self._ids = count(1)

    def expects_reports(self) -> bool:
        """Whether workers will soon report the end of a transfer, unless the agent is frozen."""
        return any(held.was_sent_within(_REPORT_S) for held in self._held.values())

    def frees_soon(self) -> bool:
        """Whether blocks become free when stores in flight have read them."""
        return any(
            held.is_store
            and held.was_sent_within(_FREED_SOON_S)
            and any(block.ref_cnt == 1 for block in held.blocks)
            for held in self._held.values()
        )

    @property
    def blocks(self) -> list[KVCacheBlock]:
        """One for each reference."""
        return [block for held in self._held.values() for block in held.blocks]

    def take(self, block_ids: Iterable[int], *, for_store: bool = False) -> int:
        """Takes references to blocks, none of them null, for a new transfer; returns its id."""
        blocks = [self.pool.blocks[block_id] for block_id in block_ids]
        self.pool.touch(blocks)
        transfer_id = next(self._ids)
        self._held[transfer_id] = _Held(blocks, set(range(self._world_size)), for_store)
        return transfer_id

    def sent(self, transfer_ids: Iterable[int]) -> None:
        """The workers get these transfers with the step that was built last."""
        now_s = time.monotonic()
        for transfer_id in transfer_ids:
            self._held[transfer_id].sent_s = now_s

    @property
    def in_flight(self) -> list[int]:
        """The transfers that were sent and have not ended."""
        return [number for number, held in self._held.items() if held.sent_s is not None]

    def release(self, transfer_ids: Iterable[int]) -> None:
        """These transfers are never sent."""
        for transfer_id in transfer_ids:
            # In vLLM's own order: the end of a prefix is evicted before its beginning.
            self.pool.free_blocks(reversed(self._held.pop(transfer_id).blocks))

    def release_unsent(self) -> None:
        """No transfer is sent any more."""
        self.release([number for number, held in self._held.items() if held.sent_s is None])

    def ended(self, by_rank: Mapping[int, Sequence[int]]) -> None:
        """These ranks no longer touch the blocks of these transfers."""
        for rank, transfer_ids in by_rank.items():
            for transfer_id in transfer_ids:
                held = self._held.get(transfer_id)
                if held is None:
                    continue
                held.ranks.discard(rank)
                if not held.ranks:
                    self.release([transfer_id])

    def rank_stopped(self, rank: int) -> None:
        self.ended({rank: list(self._held)})


@contextmanager
def given_back(pool: BlockPool, blocks: Sequence[KVCacheBlock]) -> Iterator[None]:
    """Releases references while vLLM resets its prefix cache, which none of them may hinder.

    No block is allocated meanwhile. What transfers and steps in flight read and write there has no
    name in that cache afterwards.
    """
    pool.free_blocks(reversed(blocks))
    try:
        yield
    finally:
        pool.touch(blocks)


class RecentChunks:
    """Parts of chunks that were stored or found within the last minute: they are not stored again.

    A part is the number of its group and the chunk's name. This only saves messages: the agent
    itself checks which chunks it has.
    """

    def __init__(self) -> None:
        self._expiry_s: OrderedDict[tuple[int, bytes], float] = OrderedDict()

    def __contains__(self, part: tuple[int, bytes]) -> bool:
        return self._expiry_s.get(part, 0.0) > time.monotonic()

    def add(self, group: int, names: Iterable[bytes]) -> None:
        expiry_s = time.monotonic() + _REMEMBERED_S
        for name in names:
            self._expiry_s[group, name] = expiry_s
            self._expiry_s.move_to_end((group, name))
        while len(self._expiry_s) > _MAX_RECENT_CHUNKS:
            self._expiry_s.popitem(last=False)

    def discard(self, group: int, names: Iterable[bytes]) -> None:
        for name in names:
            self._expiry_s.pop((group, name), None)

    def clear(self) -> None:
        self._expiry_s.clear()


class StepPlanner:
    """Plans for the requests of one engine, and takes the references to their blocks.

    left_out: groups that are not cached, because vLLM computes them again. step_tokens: the most
    tokens of a request that vLLM computes before it releases blocks. blocks: returns a
    request's current blocks by vLLM's number of the group, null ones included. needs_all: a prefix
    needs every block before its end, and nothing else.
    """

    def __init__(
        self,
        references: BlockReferences,
        groups: Sequence[LayerGroup],
        left_out: Sequence[LayerGroup],
        step_tokens: int,
        blocks: Callable[[str], Sequence[Sequence[KVCacheBlock]]],
    ) -> None:
        self.needs_all = not left_out and all(group.reach == FULL_REACH for group in groups)
        self.references = references
        self.provenance = BlockProvenance(references.pool, groups)
        self._blocks = references.pool.blocks
        self._groups = groups
        self._all_groups = (*groups, *left_out)
        self._step_tokens = step_tokens
        self.blocks = blocks
        self.recent = RecentChunks()
        # Blocks that a request needs beyond those of its load, until it is scheduled.
        self.missing_blocks: dict[str, int] = {}
        self._is_full = False  # a load waits for blocks in this step
        self._loads: list[Planned] = []

    def begin_step(self) -> list[Planned]:
        """Returns the loads that were planned since the last step."""
        self._is_full = False
        loads, self._loads = self._loads, []
        return loads

    def tokens_in(self, blocks: Sequence[Sequence[KVCacheBlock]]) -> int:
        return min(len(blocks[each.number]) * each.block_size_tokens for each in self._groups)

    def has_room(self, tracked: Tracked, end: int) -> bool:
        """Whether there are blocks for the request, loaded up to ``end``, and for all that load.

        vLLM cannot preempt a request between its load and its next step. With sliding windows it
        reserves too few blocks for such requests: all would wait for each other's.
        """
        if self.needs_all or not self.missing_blocks:
            return True
        if not self._is_full:
            held = 0
            for group in self._all_groups:
                size = group.block_size_tokens
                held += end // size - group.reach.first_token(end) // size
            missing = self._missing(tracked, end) + sum(self.missing_blocks.values())
            self._is_full = self.references.pool.get_num_free_blocks() < held + missing
        # Requests behind one that waits do not take the blocks from it.
        return not self._is_full

    def load(
        self, tracked: Tracked, block_ids: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """Plans the load of ``external_tokens`` into blocks that vLLM has allocated, by group."""
        assert tracked.lookup is not None
        local_tokens = tracked.lookup.local_tokens
        request_id, end = tracked.request.request_id, local_tokens + external_tokens
        names = tracked.chunk_names()[: end // tracked.chunk_tokens]
        ops: list[TransferOp] = []
        for place, group in enumerate(self._groups):
            chunk_tokens, block_tokens = tracked.chunk_tokens, group.block_size_tokens
            ids, stop = block_ids[group.number], end // block_tokens
            # Other requests may be reading local blocks, and blocks before a sliding window are
            # null: the load writes only the blocks after both.
            first = local_tokens // block_tokens
            null = [n for n in range(first, stop) if self._blocks[ids[n]].is_null]
            if null:
                first = null[-1] + 1
            if first == stop:
                continue
            first_chunk = first * block_tokens // chunk_tokens
            parts = [group.part(chunk, chunk_tokens) for chunk in range(first_chunk, len(names))]
            are_adjacent = all(part.start == before.stop for before, part in pairwise(parts))
            begin = parts[0].start
            if first < begin or not are_adjacent:
                raise RuntimeError(f"vLLM asks for more of {group} than its windows reach")
            hashes = names[first_chunk:]
            self.recent.add(group.number, hashes)
            more = {"skip_blocks": first - begin, "group": place}
            ops.append(TransferOp(ids[begin:stop], hashes, **more, tenant=tracked.options.tenant))
        self.missing_blocks[request_id] = self._missing(tracked, end)
        written = (block_id for op in ops for block_id in op.block_ids[op.skip_blocks :])
        transfer_id = self.references.take(written)
        tracked.loading = Planned(transfer_id, request_id, tuple(ops), tracked.trace_headers)
        self._loads.append(tracked.loading)

    def forget_load(self, request_id: str) -> None:
        """The request has been scheduled since its load, or holds no blocks of one."""
        self.missing_blocks.pop(request_id, None)

    def store(
        self,
        tracked: Tracked,
        blocks: Sequence[Sequence[KVCacheBlock]],
        chunks: range,
        *,
        compare: bool = False,
    ) -> list[Planned]:
        """The store of ``chunks``, or their comparison with what a canary's lookup has pinned."""
        names, ops = tracked.chunk_names(), []
        for place, group in enumerate(self._groups):
            block_ids: list[int] = []
            hashes: list[bytes] = []
            named = 0  # of a comparison; clients may choose it
            pinned = group.reach.first_chunk(tracked.canary_chunks, tracked.chunk_tokens)
            some = range(max(pinned, chunks.start), chunks.stop) if compare else chunks
            for chunk, part in self._complete_parts(group, tracked, blocks[group.number], some):
                if not compare:
                    if (group.number, names[chunk]) in self.recent:
                        continue
                    self.recent.add(group.number, names[chunk : chunk + 1])
                block_ids += (block.block_id for block in part)
                hashes.append(names[chunk])
                named += compare and tracked.is_client_named(chunk)
            if block_ids:
                more = {"group": place, "client_named": int(named)}
                ops.append(TransferOp(block_ids, hashes, **more, tenant=tracked.options.tenant))
        if not ops:
            return []
        transfer_id = self.references.take([n for op in ops for n in op.block_ids], for_store=True)
        headers = None if compare else tracked.trace_headers
        return [Planned(transfer_id, tracked.request.request_id, tuple(ops), headers, compare)]

    def missed(self, names: Sequence[bytes]) -> None:
        """These chunks are not cached: they are stored again, even if they are recent."""
        for group in self._groups:
            self.recent.discard(group.number, names)

    def _missing(self, tracked: Tracked, end: int) -> int:
        """Blocks that its other tokens need at most, at one time."""
        tokens = tracked.request.num_tokens - end
        missing = 0
        for group in self._all_groups:
            released = group.reach.kind in ("window", "local")
            count = min(tokens, self._step_tokens) if released else tokens
            missing += count // group.block_size_tokens + 2
        return missing

    def _complete_parts(
        self,
        group: LayerGroup,
        tracked: Tracked,
        blocks: Sequence[KVCacheBlock],
        chunks: Iterable[int],
    ) -> Iterator[tuple[int, Sequence[KVCacheBlock]]]:
        """Those of ``chunks`` whose parts are in blocks, and the blocks of each."""
        hashes, suffix = tracked.chunk_hashes(), group.number.to_bytes(4, "big")
        for chunk in chunks:
            part = blocks[group.part(chunk, tracked.chunk_tokens)]
            if any(block.is_null for block in part):
                continue  # a sliding window has dropped some
            # A state is overwritten in place, unless vLLM's own cache has it under its hash.
            if not group.is_state or part[0].block_hash == hashes[chunk] + suffix:
                yield chunk, part
