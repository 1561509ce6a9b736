"""The connector's scheduler half: what to look up, load and store, decided each step.

A request's way, as vLLM calls it:

    matched_tokens      None until the agent has answered, then how many tokens to load
    allocated           blocks exist: a load is planned
    build_metadata      loads and stores of this step go to the workers
    worker_output       loads have ended, stores have ended
    finished            whether its blocks must be held for stores that still read them
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_redis.client.operations import LoadStoreOp
from lmcache_redis.client.scheduler import LMCacheMPSchedulerAdapter
from lmcache_redis.integrations.vllm.metadata import CompletedStores, StepMetadata

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

# How long one step may wait for lookups: an idle engine gains by it, a busy one must not stall.
_IDLE_WAIT_S = 0.005
_BUSY_WAIT_S = 0.0005
_RECENT_CHUNKS = 200_000
_RECENT_S = 60.0


@dataclass(slots=True)
class _Tracked:
    """One request. Chunk numbers count chunks of ``chunk`` tokens."""

    request: Request
    chunk: int = 0
    block_ids: list[int] = field(default_factory=list)
    lookup_chunk: int | None = None  # the lookup began there
    local_tokens: int = 0  # computed locally when the lookup was answered
    considered_chunks: int = 0  # chunks whose store has been decided on
    loading: frozenset[int] = frozenset()  # blocks of the load in progress
    give_up: bool = False  # a load failed: compute
    pending_stores: int = 0  # over all workers


class SchedulerHalf:
    """Runs in vLLM's scheduler.

    hash_stride: block hashes a block (1 unless vLLM hashes finer than it allocates).
    """

    def __init__(
        self,
        adapter: LMCacheMPSchedulerAdapter,
        *,
        world_size: int,
        block_size_tokens: int,
        hash_stride: int,
        loads: bool,
        stores: bool,
    ) -> None:
        self._adapter = adapter
        self._world_size = world_size
        self._block_size_tokens = block_size_tokens
        self._hash_stride = hash_stride
        self._may_load = loads
        self._may_store = stores
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[tuple[str, LoadStoreOp]] = []
        self._held: set[str] = set()
        self._recent = _RecentChunks()
        self._wait_budget_s = _IDLE_WAIT_S

    def matched_tokens(self, request: Request, local_tokens: int) -> int | None:
        """Tokens beyond ``local_tokens`` that can be loaded; None while that is not known."""
        chunk = self._adapter.chunk_size_tokens()
        tracked = self._track(request, chunk)
        if not chunk or not self._may_load or tracked.give_up or request.skip_reading_prefix_cache:
            return 0
        if tracked.lookup_chunk is not None and local_tokens < tracked.lookup_chunk * chunk:
            # Blocks that were computed when the lookup began have been evicted since.
            self._forget_lookup(tracked)
        if tracked.lookup_chunk is None:
            if self._hashed_tokens(request) < (local_tokens // chunk + 1) * chunk:
                return 0
            tracked.lookup_chunk = local_tokens // chunk
        self._adapter.maybe_submit_lookup_request(
            request.request_id,
            block_hashes=self._block_hashes(request),
            first_chunk=tracked.lookup_chunk,
        )
        tokens = self._result(request.request_id)
        if tokens is None:
            return None
        tracked.local_tokens = local_tokens
        # What the agent has just not found is offered again, however recently it was stored.
        per_chunk = chunk // self._block_size_tokens
        first_miss = max(tracked.lookup_chunk, tokens // chunk)
        self._recent.discard(
            self._chunk_hash(request, number, per_chunk)
            for number in range(first_miss, self._hashed_tokens(request) // chunk)
        )
        return max(0, tokens - local_tokens)

    def allocated(self, request: Request, block_ids: Sequence[int], external_tokens: int) -> None:
        """Blocks were allocated; ``external_tokens`` of them are to be loaded."""
        tracked = self._track(request, self._adapter.chunk_size_tokens())
        if not external_tokens or tracked.lookup_chunk is None:
            if not tracked.loading:
                self._adapter.release_lookup_locks(request.request_id)
            self._adapter.cleanup_lookup_result(request.request_id)
            return
        per_chunk = tracked.chunk // self._block_size_tokens
        end_chunk = (tracked.local_tokens + external_tokens) // tracked.chunk
        first, last = tracked.lookup_chunk * per_chunk, end_chunk * per_chunk
        op = LoadStoreOp(
            block_ids=list(block_ids[first:last]),
            block_hashes=self._block_hashes(request)[first:last],
            skip_first_n_tokens=tracked.local_tokens - tracked.lookup_chunk * tracked.chunk,
        )
        tracked.loading = frozenset(op.block_ids)
        self._loads.append((request.request_id, op))
        self._recent.add(
            self._chunk_hash(request, number, per_chunk)
            for number in range(tracked.lookup_chunk, end_chunk)
        )
        self._adapter.cleanup_lookup_result(request.request_id)

    def build_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """What the workers begin in this step."""
        metadata = StepMetadata(idle=output.total_num_scheduled_tokens == 0)
        metadata.loads, self._loads = self._loads, []
        metadata.held, self._held = self._held, set()
        for request_id in output.preempted_req_ids or ():
            metadata.preempted.append(request_id)
            self._preempted(request_id)
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            after = new.num_computed_tokens + scheduled[new.req_id]
            self._plan_store(new.req_id, new.block_ids[0], True, after, metadata)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            new_ids = cached.new_block_ids[index]
            after = cached.num_computed_tokens[index] + scheduled[request_id]
            resumed = request_id in cached.resumed_req_ids
            block_ids = new_ids[0] if new_ids else None
            self._plan_store(request_id, block_ids, resumed, after, metadata)
        self._wait_budget_s = _IDLE_WAIT_S if metadata.idle else _BUSY_WAIT_S
        return metadata

    def worker_output(self, output: KVConnectorOutput) -> None:
        """Loads and stores that the workers report as over."""
        invalid = output.invalid_block_ids or set()
        for request_id in output.finished_recving or ():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            if not invalid.isdisjoint(tracked.loading):
                tracked.give_up = True
                self._recent.clear()  # what was thought to be cached may not be
            tracked.loading = frozenset()
            if tracked.request.is_finished():
                del self._tracked[request_id]
        completed = output.kv_connector_worker_meta
        if isinstance(completed, CompletedStores):
            if completed.dropped:
                self._recent.clear()
            for request_id, count in completed.counts.items():
                tracked = self._tracked.get(request_id)
                if tracked is not None:
                    tracked.pending_stores -= count

    def finished(self, request: Request) -> bool:
        """Whether the blocks of a finished request must be held: a store still reads them."""
        request_id = request.request_id
        self._adapter.end_session(request_id)
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.loading:
            return False  # vLLM itself holds the blocks of a load until it is reported
        del self._tracked[request_id]
        if tracked.pending_stores <= 0:
            return False
        self._held.add(request_id)
        return True

    def reset(self, timeout_s: float) -> bool:
        """Empties the cache of this engine's layouts; returns whether that was done."""
        self._recent.clear()
        return self._adapter.clear(timeout_s)

    def _track(self, request: Request, chunk: int) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._tracked[request.request_id] = _Tracked(request)
        if chunk and tracked.chunk != chunk:  # new, or the agent came back with other chunks
            if tracked.chunk:
                self._forget_lookup(tracked)
            tracked.chunk = chunk
            tracked.considered_chunks = 0
        return tracked

    def _forget_lookup(self, tracked: _Tracked) -> None:
        tracked.lookup_chunk = None
        self._adapter.end_session(tracked.request.request_id)

    def _preempted(self, request_id: str) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.block_ids = []
            self._forget_lookup(tracked)

    def _result(self, request_id: str) -> int | None:
        started_s = time.monotonic()
        tokens = self._adapter.check_lookup_result(request_id, wait_s=self._wait_budget_s)
        self._wait_budget_s = max(0.0, self._wait_budget_s - (time.monotonic() - started_s))
        return tokens

    def _plan_store(
        self,
        request_id: str,
        new_block_ids: Sequence[int] | None,
        resumed: bool,
        computed_tokens: int,
        metadata: StepMetadata,
    ) -> None:
        """Plans the store of every chunk that this step completes.

        computed_tokens: tokens whose KV is in blocks once the step has run.
        """
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        if resumed:
            tracked.block_ids = list(new_block_ids or ())
        elif new_block_ids:
            tracked.block_ids.extend(new_block_ids)
        chunk = self._adapter.chunk_size_tokens()
        if not chunk or not self._may_store:
            return
        self._track(tracked.request, chunk)
        # A block has a hash once all its tokens are final: drafts that may be
        # rejected, and tokens not sampled yet, are left to a later step.
        tokens = min(
            computed_tokens,
            self._hashed_tokens(tracked.request),
            len(tracked.block_ids) * self._block_size_tokens,
        )
        complete_chunks = tokens // chunk
        if complete_chunks <= tracked.considered_chunks:
            return
        per_chunk = chunk // self._block_size_tokens
        hashes = self._block_hashes(tracked.request)
        block_ids: list[int] = []
        block_hashes: list[bytes] = []
        stored: list[bytes] = []
        for number in range(tracked.considered_chunks, complete_chunks):
            chunk_hash = self._chunk_hash(tracked.request, number, per_chunk)
            if chunk_hash not in self._recent:
                first, last = number * per_chunk, (number + 1) * per_chunk
                block_ids += tracked.block_ids[first:last]
                block_hashes += hashes[first:last]
                stored.append(chunk_hash)
        tracked.considered_chunks = complete_chunks
        if stored:
            self._recent.add(stored)
            op = LoadStoreOp(block_ids=block_ids, block_hashes=block_hashes)
            metadata.stores.append((request_id, op))
            tracked.pending_stores += self._world_size

    def _hashed_tokens(self, request: Request) -> int:
        return len(request.block_hashes) // self._hash_stride * self._block_size_tokens

    def _block_hashes(self, request: Request) -> Sequence[bytes]:
        """One hash a block, without a copy where vLLM keeps them so."""
        hashes: Sequence[bytes] = request.block_hashes
        stride = self._hash_stride
        return hashes if stride == 1 else hashes[stride - 1 :: stride]

    def _chunk_hash(self, request: Request, number: int, per_chunk: int) -> bytes:
        chunk_hash: bytes = request.block_hashes[(number + 1) * per_chunk * self._hash_stride - 1]
        return chunk_hash


class _RecentChunks:
    """Chunks that were stored or found a moment ago, so need not be offered again.

    Only a saving: the agent finds out by itself what it has. Forgets after a while, because
    stores may be dropped and Redis evicts.
    """

    def __init__(self) -> None:
        self._expiry_s: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, chunk_hash: bytes) -> bool:
        return self._expiry_s.get(chunk_hash, 0.0) > time.monotonic()

    def add(self, chunk_hashes: Iterable[bytes]) -> None:
        """Remembers chunks for a while."""
        expiry_s = time.monotonic() + _RECENT_S
        for chunk_hash in chunk_hashes:
            self._expiry_s[chunk_hash] = expiry_s
            self._expiry_s.move_to_end(chunk_hash)
        while len(self._expiry_s) > _RECENT_CHUNKS:
            self._expiry_s.popitem(last=False)

    def discard(self, chunk_hashes: Iterable[bytes]) -> None:
        """Forgets some of them."""
        for chunk_hash in chunk_hashes:
            self._expiry_s.pop(chunk_hash, None)

    def clear(self) -> None:
        """Forgets all of them."""
        self._expiry_s.clear()
