"""The connector's scheduler half: what to look up, load and store, decided each step.

A request's way, as vLLM calls it:

    matched_tokens      None until the agent has answered, then how many tokens to load
    allocated           blocks exist: a load is planned
    build_metadata      loads and stores of this step go to the workers
    worker_output       loads have ended, stores have ended
    finished            what its lookup pinned is released

A chunk is named ``epoch | adapter digest | hash of its last block``. The epoch (`epoch`) and the
digest of a LoRA adapter are empty as a rule; vLLM's hashes are chained, so that the last one covers
every token before it. A request keeps the epoch it began in, and uses the cache only while that
is the engine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmcache_redis.client.operations import LoadStoreOp
from lmcache_redis.client.scheduler import LMCacheMPSchedulerAdapter
from lmcache_redis.integrations.vllm.metadata import Planned, StepMetadata
from lmcache_redis.integrations.vllm.recent import RecentChunks
from lmcache_redis.integrations.vllm.references import BlockReferences, StaleBlocks

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

# How long one step may wait for lookups: an idle engine gains by it, a busy one must not stall.
_IDLE_WAIT_S = 0.005
_BUSY_WAIT_S = 0.0005

BlockIds = Callable[[str], Sequence[int]]
AdapterDigest = Callable[[Any], "bytes | None"]


@dataclass(slots=True)
class _Tracked:
    """One request. Chunk numbers count chunks of ``chunk`` tokens."""

    request: Request
    prefix: bytes | None  # what the names of its chunks begin with; None: it is not cached
    chunk: int = 0
    block_ids: list[int] = field(default_factory=list)
    lookup_chunk: int | None = None  # the lookup began there
    local_tokens: int = 0  # computed locally when the lookup was answered
    considered_chunks: int = 0  # chunks whose store has been decided on
    offered: bool = False  # vLLM was told how many tokens, and has not allocated blocks since
    computes: bool = False  # it has blocks
    loading: frozenset[int] | None = None  # blocks that its load writes
    give_up: bool = False  # a load failed: compute


class SchedulerHalf:
    """Runs in vLLM's scheduler.

    hash_stride: block hashes a block (1 unless vLLM hashes finer than it allocates).
    epoch: what names begin with, until `begin_epoch`.
    block_ids: the blocks that a request has now, null ones included; None where vLLM does not
        tell, and requests keep their blocks until they end.
    adapter_digest: of a request's LoRA adapter; None where it cannot be told from others.
    """

    def __init__(
        self,
        adapter: LMCacheMPSchedulerAdapter,
        references: BlockReferences,
        stale: StaleBlocks,
        *,
        block_size_tokens: int,
        hash_stride: int,
        loads: bool,
        stores: bool,
        epoch: bytes,
        block_ids: BlockIds | None,
        adapter_digest: AdapterDigest,
    ) -> None:
        self._adapter = adapter
        self._references = references
        self._stale = stale
        self._block_size_tokens = block_size_tokens
        self._hash_stride = hash_stride
        self._may_load = loads
        self._may_store = stores
        self._epoch = epoch
        self.epoch_is_unused = True
        self._block_ids = block_ids
        self._adapter_digest = adapter_digest
        self._tracked: dict[str, _Tracked] = {}
        self._resuming: set[str] = set()  # their load has ended, and they have not run since
        self._loads: list[Planned] = []
        self._recent = RecentChunks()
        self._wait_budget_s = _IDLE_WAIT_S

    def matched_tokens(self, request: Request, local_tokens: int) -> int | None:
        """Tokens beyond ``local_tokens`` that can be loaded; None while that is not known."""
        chunk = self._adapter.chunk_size_tokens()
        tracked = self._track(request, chunk)
        if not chunk or not self._may_load or tracked.give_up or request.skip_reading_prefix_cache:
            return 0
        if tracked.prefix is None:
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
                block_hashes=self._names(tracked),
                first_chunk=tracked.lookup_chunk,
            )
        tokens = self._result(request.request_id)
        if tokens is None:
            return None
        tracked.local_tokens = local_tokens
        if tracked.offered and self._resuming:
            # No blocks were free for it. Some hold a load that has ended, and vLLM before 0.31 does
            # not come to their request while this one blocks the queue: let it go on to them.
            tracked.offered = False
            return None
        tracked.offered = True
        # What the agent has just not found is offered again, however recently it was stored.
        first_miss = max(tracked.lookup_chunk, tokens // chunk)
        self._recent.discard(self._chunk_names(tracked)[first_miss:])
        return max(0, tokens - local_tokens)

    def allocated(self, request: Request, block_ids: Sequence[int], external_tokens: int) -> None:
        """Blocks were allocated; ``external_tokens`` of them are to be loaded."""
        tracked = self._track(request, self._adapter.chunk_size_tokens())
        tracked.computes = True
        tracked.offered = False
        self._resuming.discard(request.request_id)
        if not external_tokens or tracked.lookup_chunk is None:
            if tracked.loading is None:
                self._adapter.release_lookup_locks(request.request_id)
            self._adapter.cleanup_lookup_result(request.request_id)
            return
        per_chunk = tracked.chunk // self._block_size_tokens
        end_chunk = (tracked.local_tokens + external_tokens) // tracked.chunk
        first, last = tracked.lookup_chunk * per_chunk, end_chunk * per_chunk
        written = self._first_written(block_ids, tracked.local_tokens, last)
        op = LoadStoreOp(
            block_ids=list(block_ids[first:last]),
            block_hashes=self._names(tracked)[first:last],
            skip_first_n_tokens=(written - first) * self._block_size_tokens,
        )
        tracked.loading = frozenset(block_ids[written:last])
        transfer_id = self._references.take(block_ids[written:last])
        self._loads.append(Planned(transfer_id, request.request_id, op))
        self._recent.add(self._chunk_names(tracked)[tracked.lookup_chunk : end_chunk])
        self._adapter.cleanup_lookup_result(request.request_id)

    def build_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """What the workers begin in this step."""
        metadata = StepMetadata(idle=output.total_num_scheduled_tokens == 0)
        metadata.loads, self._loads = self._loads, []
        for request_id in output.preempted_req_ids or ():
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

    def load_failed(self, request_id: str) -> None:
        """The request's load failed, on any rank: the rest of it is computed."""
        tracked = self._tracked.get(request_id)
        if tracked is not None and tracked.loading is not None:
            tracked.give_up = True
            self._recent.clear()  # what was thought to be cached may not be

    def blocks_failed(self, block_ids: set[int]) -> None:
        """As `load_failed`, where vLLM tells of blocks."""
        for request_id, tracked in self._tracked.items():
            if not block_ids.isdisjoint(tracked.loading or ()):
                self.load_failed(request_id)

    def load_ended(self, request_id: str) -> None:
        """The load of a request has ended, on all ranks."""
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.loading is None:
            return  # another connector's
        tracked.loading = None
        if tracked.request.is_finished():
            del self._tracked[request_id]
        else:
            self._resuming.add(request_id)

    def chunks_dropped(self) -> None:
        """The agent did not take all that it was offered: it is offered again."""
        self._recent.clear()

    def finished(self, request: Request) -> None:
        """A request has ended. Its blocks are not held for it: stores have references of theirs."""
        self._adapter.end_session(request.request_id)
        self._resuming.discard(request.request_id)
        tracked = self._tracked.get(request.request_id)
        # vLLM itself holds the blocks of a load until it is reported.
        if tracked is not None and tracked.loading is None:
            del self._tracked[request.request_id]

    def begin_epoch(self, epoch: bytes) -> None:
        """From now on chunks are named otherwise. Requests that have begun are not cached.

        Those that still wait look up anew.
        """
        self._epoch = epoch
        self.epoch_is_unused = True
        self._stale.begin_epoch()
        self._recent.clear()
        for request_id, tracked in list(self._tracked.items()):
            if tracked.computes:
                tracked.prefix = None
            else:
                self._adapter.end_session(request_id)
                del self._tracked[request_id]

    def remove_epoch(self, epoch: bytes) -> None:
        """Has the agent remove what is stored under an epoch, sooner or later."""
        self._adapter.clear(epoch)

    def _track(self, request: Request, chunk: int) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            self.epoch_is_unused = False
            tracked = _Tracked(request, self._prefix(request))
            self._tracked[request.request_id] = tracked
        if chunk and tracked.chunk != chunk:  # new, or the agent came back with other chunks
            if tracked.chunk:
                self._forget_lookup(tracked)
            tracked.chunk = chunk
            tracked.considered_chunks = 0
        return tracked

    def _prefix(self, request: Request) -> bytes | None:
        """What the names of its chunks begin with, or None where they would be in doubt."""
        if self._stale.may_be_hit():
            return None
        digest = self._adapter_digest(request)
        return None if digest is None else self._epoch + digest

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

    def _first_written(self, block_ids: Sequence[int], local_tokens: int, last: int) -> int:
        """The first block that a load writes: behind the local ones, and behind null ones.

        Blocks before a sliding window are null; other requests may be reading the local ones.
        """
        first = local_tokens // self._block_size_tokens
        null = [n for n in range(first, last) if self._references.is_null(block_ids[n])]
        return null[-1] + 1 if null else first

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
        if not chunk or not self._may_store or tracked.prefix is None:
            return
        self._track(tracked.request, chunk)
        blocks = tracked.block_ids if self._block_ids is None else self._block_ids(request_id)
        # A block has a hash once all its tokens are final: drafts that may be
        # rejected, and tokens not sampled yet, are left to a later step.
        tokens = min(
            computed_tokens,
            self._hashed_tokens(tracked.request),
            len(blocks) * self._block_size_tokens,
        )
        complete_chunks = tokens // chunk
        if complete_chunks <= tracked.considered_chunks:
            return
        if tracked.prefix != self._prefix(tracked.request):
            tracked.prefix = None  # its adapter was replaced meanwhile
            return
        per_chunk = chunk // self._block_size_tokens
        names = self._names(tracked)
        block_ids: list[int] = []
        block_names: list[bytes] = []
        for number in range(tracked.considered_chunks, complete_chunks):
            first, last = number * per_chunk, (number + 1) * per_chunk
            of_chunk = blocks[first:last]
            # A window may have moved past the beginning of the chunk: then there is no whole one.
            if names[last - 1] in self._recent or any(map(self._references.is_null, of_chunk)):
                continue
            self._recent.add([names[last - 1]])
            block_ids += of_chunk
            block_names += names[first:last]
        tracked.considered_chunks = complete_chunks
        if block_ids:
            op = LoadStoreOp(block_ids=block_ids, block_hashes=block_names)
            transfer_id = self._references.take(block_ids)
            metadata.stores.append(Planned(transfer_id, request_id, op))

    def _hashed_tokens(self, request: Request) -> int:
        return len(request.block_hashes) // self._hash_stride * self._block_size_tokens

    def _names(self, tracked: _Tracked) -> Sequence[bytes]:
        """A name for each block, without a copy where vLLM's hashes are the names."""
        hashes: Sequence[bytes] = tracked.request.block_hashes
        stride = self._hash_stride
        if stride > 1:
            hashes = hashes[stride - 1 :: stride]
        prefix = tracked.prefix
        return [prefix + each for each in hashes] if prefix else hashes

    def _chunk_names(self, tracked: _Tracked) -> Sequence[bytes]:
        per_chunk = tracked.chunk // self._block_size_tokens
        return self._names(tracked)[per_chunk - 1 :: per_chunk]
