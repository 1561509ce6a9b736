# SPDX-License-Identifier: Apache-2.0
"""The connector in vLLM's scheduler: decides in each step what to look up, load and store.

vLLM calls, for one request:

    matched_tokens      None until the agent has answered, then the number of tokens to load
    allocated           blocks are allocated: the load is planned
    build_metadata      a step: its loads go to the workers, and stores of steps before
    output_taken        the step has computed what it should: what it has filled may be stored
    load_ended          its load has ended on all ranks
    finished            the chunks that its lookup pinned are released

What a step computes is stored once vLLM has taken the output of that step. A step that raises, even
if vLLM goes on, may have left anything in its blocks. With asynchronous scheduling several steps
are in flight; their outputs are taken in order.

A request whose hit is a canary (`Canaries`) loads nothing. Its chunks are compared as soon as
they are computed, with those that its lookup has pinned.

The name of a chunk is ``epoch | adapter digest | hash of its last block``. vLLM's hashes are
chained, so the last one covers every token before it. A request uses the cache only in the epoch in
which it began.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_redis.client.scheduler import SchedulerClient
from lmcache_redis.integrations.vllm import needs
from lmcache_redis.integrations.vllm.epoch import EpochChange, Epochs
from lmcache_redis.integrations.vllm.lookups import PrefixLookups
from lmcache_redis.integrations.vllm.planning import StepPlanner
from lmcache_redis.integrations.vllm.reports.stats import Recorder
from lmcache_redis.integrations.vllm.requests import (
    CachePolicy,
    RequestNames,
    RequestOptions,
    TenantNames,
    Tracked,
    is_prefill,
)
from lmcache_redis.integrations.vllm.steps import Step, StepsInFlight
from lmcache_redis.integrations.vllm.worker import Planned, StepMetadata, WorkerReport

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from lmcache_redis.integrations.vllm.reports.events import Announcer

logger = logging.getLogger("vllm.lmcache_redis")

# For the agent to take a message before the connection is closed.
_LAST_WAIT_S = 0.5


class ConnectorScheduler:
    """Decides on lookups, loads and stores. announcer: tells routers; None if none listens."""

    def __init__(
        self,
        client: SchedulerClient,
        planner: StepPlanner,
        names: RequestNames,
        policy: CachePolicy,
        recorder: Recorder,
        announcer: Announcer | None = None,
    ) -> None:
        self._client = client
        self._planner = planner
        self._names = names
        self._policy = policy
        self._recorder = recorder
        self._announcer = announcer
        self._tracked: dict[str, Tracked] = {}
        self._lookups = PrefixLookups(client, planner, recorder, announcer, policy)
        self._is_idle = False  # the last step ran no model
        self._steps = StepsInFlight()
        self._has_hit = False
        self._tenants = TenantNames()
        if announcer is not None:
            announcer.begin_epoch(names.epochs.current)

    # Steps

    def matched_tokens(self, request: Request, local_tokens: int) -> int | None:
        """Tokens beyond ``local_tokens`` that can be loaded; None: vLLM asks again later."""
        tracked = self._track(request)
        self._planner.forget_load(request.request_id)  # if it has failed, it holds no blocks
        tracked.origin.local_tokens, tracked.origin.loaded_tokens = local_tokens, 0
        tokens = self._lookups.found_tokens(tracked, local_tokens)
        if tokens is None:
            return None
        if tracked.matched and self._has_resuming():
            # vLLM had too few free blocks for this request. One that has loaded holds some, and
            # vLLM cannot resume it while this one heads its queue (from 0.31 on, if it has failed).
            tracked.matched = False
            return None
        stands_still = self._is_idle and not self._planner.references.expects_reports()
        if tracked.matched and tokens and stands_still:
            # No step runs and no transfer will end, so that no block becomes free. vLLM reserves
            # blocks for a load that it does not reserve for computing, and counts those of requests
            # whose load has failed. With this one at its head, its queue would wait for ever.
            logger.info("request %s: too few free blocks to load; computing", request.request_id)
            self._compute(tracked)
            return 0
        if tokens and not self._planner.has_room(tracked, local_tokens + tokens):
            return None
        tracked.matched = True
        return tokens

    def allocated(
        self, request: Request, block_ids: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """vLLM allocated blocks, by group; ``external_tokens`` tokens are to be loaded."""
        tracked = self._track(request)
        tracked.started = True
        tracked.matched = False
        self._lookups.prefill.begun.begin(request)
        self._planner.forget_load(request.request_id)
        if external_tokens and (lookup := tracked.lookup) is not None:
            tracked.origin.loaded_tokens = external_tokens
            self._planner.load(tracked, block_ids, external_tokens)
            lookup.load_began_s = time.monotonic()
            tiers = self._client.hit_tiers(request.request_id)
            lookup.loaded = lookup.tokens_by_tier(tiers, external_tokens, tracked.chunk_tokens)
            for tier, tokens in lookup.loaded.items():
                self._recorder.count("hit_tokens", tokens, tier)
            if not self._has_hit:
                self._has_hit = True
                logger.info(
                    "the first hit: %d of the %d tokens of request %s are loaded (%s)",
                    external_tokens, request.num_tokens, request.request_id,
                    ", ".join(f"{tokens} from {tier}" for tier, tokens in lookup.loaded.items()),
                )  # fmt: skip
        elif not tracked.loading and not tracked.canary_chunks:
            self._client.release_lookup(request.request_id)
        self._client.forget_lookup(request.request_id)

    def hit_tokens(self, request_id: str) -> Mapping[str, int]:
        """How many tokens of the load that was planned last for a request come from each tier."""
        tracked = self._tracked.get(request_id)
        return {} if tracked is None or tracked.lookup is None else tracked.lookup.loaded

    def build_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """What the workers start in this step: its loads, and the stores of steps before."""
        loads, idle = self._planner.begin_step(), output.total_num_scheduled_tokens == 0
        stores, self._steps.stores = self._steps.stores, []
        unsure, self._steps.unsure = self._steps.unsure, ()
        awaited, self._steps.awaited = self._steps.awaited, ()
        for request_id in output.preempted_req_ids or ():
            if (tracked := self._tracked.get(request_id)) is not None:
                self._lookups.forget(tracked)
        for copy in needs.BLOCK_COPIES.of(output) or ():
            self._planner.provenance.copied(copy.src_block_id, copy.dst_block_id)
        filled: list[Planned] = []
        adapted: list[tuple[Request, bytes]] = []
        prompt_tokens = 0
        for request_id, begins, computed_tokens in _scheduled(output):
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            count = output.num_scheduled_tokens[request_id]
            if computed_tokens < tracked.request.num_prompt_tokens:
                prompt_tokens += count
            if begins:
                if computed_tokens and tracked.lookup is not None:
                    tracked.lookup.canary_chunks = 0  # others have loaded or computed some
                blocks = self._planner.blocks(request_id)
                self._planner.provenance.begins(tracked, blocks, computed_tokens)
            filled += self._plan_store(tracked, computed_tokens + count)
            if tracked.prefix is not None and tracked.request.lora_request is not None:
                adapted.append((tracked.request, tracked.prefix))
        self._lookups.step_scheduled(prompt_tokens, idle=idle)
        number, lost = self._steps.number, tuple(self._steps.lost) if awaited else ()
        self._steps.scheduled(Step(number, output, filled, stores, adapted))
        self._is_idle = idle
        asks = self._names.adapters.are_forgotten
        return StepMetadata(
            loads,
            stores,
            unsure=unsure,
            awaited=awaited,
            number=number,
            lost_steps=lost,
            adapters=asks,
            idle=idle,
        )

    def output_taken(self, output: SchedulerOutput) -> None:
        """vLLM has taken the output of a step."""
        step, failed = self._steps.taken(output)
        if step is not None:
            self._lookups.prefill.ended(time.monotonic())
            self._steps.stores += self._named_rightly(step)
            # vLLM's own cache may have got blocks with this output, which other requests may use
            # before these are scheduled again.
            for request_id in output.num_scheduled_tokens:
                if (tracked := self._tracked.get(request_id)) is not None:
                    self._fill(tracked, tracked.request.num_computed_tokens)
        if failed:
            self._steps_failed(failed)
        self._end_sessions()

    def _named_rightly(self, step: Step) -> Sequence[Planned]:
        """The stores of requests whose adapter the workers have read as it was named."""
        wrong = {
            request.request_id
            for request, prefix in step.adapted
            if self._names.has_other_adapter(request, prefix)
        }
        if not wrong:
            return step.stores
        self._never_sent([store for store in step.stores if store.request_id in wrong])
        self._planner.provenance.forget()
        return [store for store in step.stores if store.request_id not in wrong]

    def _steps_failed(self, steps: Sequence[Step]) -> None:
        """What they have left in their blocks is not known."""
        logger.warning("a step of this engine has failed: nothing that it computed is stored")
        self._never_sent([store for step in steps for store in step.stores])
        self._lookups.prefill.failed(time.monotonic(), in_flight=len(self._steps))
        self._planner.provenance.forget()
        for tracked in self._tracked.values():
            if tracked.started:
                tracked.prefix = None
        # What the workers have reported in that step is lost.
        self._steps.unsure = self._planner.references.in_flight
        self._steps.awaited = [each.loading for each in self._tracked.values() if each.loading]
        self._names.adapters.forget()

    def _never_sent(self, stores: Sequence[Planned]) -> None:
        self._planner.references.release(store.transfer_id for store in stores)
        self._planner.recent.clear()

    def paused(self) -> None:
        """vLLM empties its caches for a pause, in which it may discard the memory of the KV cache.

        An engine in its caller's process does so without another step, which would send the stores.
        """
        self._never_sent(self._steps.drop_stores())
        self._end_sessions()

    def reported(self, report: WorkerReport) -> None:
        """A step has ended. The connector itself releases the blocks of ended transfers."""
        self._client.ranks.reported(report.places)
        if report.adapters:
            self.adapters_read(report.adapters)
        if report.dropped:
            self._planner.recent.clear()
        for request_id in report.failed:
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.loading:
                tracked.computes = True
                self._planner.recent.clear()  # some of these chunks may not be cached

    def load_ended(self, request_id: str) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is None or not tracked.loading:
            return  # another connector's load
        tracked.loading = None
        if (lookup := tracked.lookup) is not None:
            found = {f"{tier}_tokens": tokens for tier, tokens in lookup.loaded.items()}
            found["failed"] = tracked.computes
            error = "load_failed" if tracked.computes else ""
            self._recorder.span("load", tracked.request, lookup.load_began_s, found, error)
        if tracked.request.is_finished():
            del self._tracked[request_id]
        elif not tracked.computes:
            # Others may find these blocks in vLLM's cache before this request goes on.
            end = tracked.origin.local_tokens + tracked.origin.loaded_tokens
            blocks = self._planner.blocks(request_id)
            self._planner.provenance.begins(tracked, blocks, end)

    def finished(self, request: Request) -> dict[str, Any] | None:
        """The request has ended. Stores in flight have their own references on its blocks.

        Returns what another engine is to be told that decodes it (`RequestOptions`), if one does.
        """
        self._steps.request_ended(request.request_id)
        self._end_sessions()
        self._lookups.prefill.begun.end(request.request_id)
        self._planner.forget_load(request.request_id)
        tracked = self._tracked.get(request.request_id)
        # vLLM itself holds the blocks of a load until the load is reported.
        if tracked is not None and not tracked.loading:
            self._fill(tracked, request.num_computed_tokens)
            del self._tracked[request.request_id]
        if not is_prefill(request):
            return None
        stored_tokens = 0
        # What is held back at first (--store-after) may never be written.
        is_written = not self._client.names_before
        if is_written and tracked is not None and tracked.prefix is not None:
            stored_tokens = tracked.considered_chunks * tracked.chunk_tokens
        return {"lmcache_redis": {"stored_tokens": stored_tokens}}

    def _end_sessions(self) -> None:
        """Not before the workers have the stores of a request: they belong to its session."""
        for request_id in self._steps.take_ended():
            self._client.end_session(request_id)

    # Epochs

    def clear(self) -> None:
        """Begins an epoch of its own. Only chunks that no other engine shares are removed."""
        self.change_epoch(Epochs.begin_own, "the cache was cleared")

    def end(self) -> None:
        """The engine ends, and an epoch of its own with it."""
        epochs = self._names.epochs
        epochs.begin_own()
        for ended in epochs.take_ended():
            self._client.clear(ended, wait_s=_LAST_WAIT_S)

    def change_epoch(self, change: EpochChange, why: str) -> None:
        """In a new epoch, running requests are not cached, and waiting ones looked up again."""
        epochs = self._names.epochs
        is_another = change(epochs)
        for ended in epochs.take_ended():
            self._client.clear(ended)
        if not is_another:
            return
        kv = "KV of an earlier epoch is used again"
        if not epochs.is_earlier:
            kv = "KV that was cached before is no longer used"
        logger.info("%s: %s", why, kv)
        self._planner.recent.clear()
        if self._announcer is not None:
            self._announcer.begin_epoch(self._names.epochs.current)
        for request_id, tracked in list(self._tracked.items()):
            self._rename(request_id, tracked)

    def adapters_read(self, digests: Mapping[int, Mapping[int, bytes] | None]) -> None:
        """What ranks have in memory. Requests whose adapter is another one are not cached."""
        self._names.adapters.told(digests)
        for request_id, tracked in list(self._tracked.items()):
            if self._names.has_other_adapter(tracked.request, tracked.prefix):
                self._rename(request_id, tracked)

    def _rename(self, request_id: str, tracked: Tracked) -> None:
        """The names of its chunks have changed: it is not cached, or looked up again if waiting."""
        if tracked.started:
            tracked.prefix = None
        else:
            self._client.end_session(request_id)
            del self._tracked[request_id]

    def gave_up_load(self, request_id: str) -> None:
        """A request that has blocks of a load, and has not computed since, starts over.

        A load in flight keeps its own references on the blocks.
        """
        self._planner.forget_load(request_id)
        if (tracked := self._tracked.get(request_id)) is not None:
            self._compute(tracked)

    def _track(self, request: Request) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            self._names.epochs.is_used = True
            options = RequestOptions.of(request, self._policy, self._tenants)
            prefix = self._names.prefix(request)
            tracked = Tracked(request, prefix, options, self._policy.hash_tokens)
            self._tracked[request.request_id] = tracked
        chunk_tokens = self._client.chunk_size_tokens()
        if chunk_tokens and tracked.chunk_tokens != chunk_tokens:
            if tracked.chunk_tokens:  # the agent was restarted with another chunk size
                self._lookups.forget(tracked)
            tracked.chunk_tokens = chunk_tokens
            tracked.considered_chunks = 0
        return tracked

    def _compute(self, tracked: Tracked) -> None:
        """The rest of the request is computed, without another lookup."""
        tracked.computes = True
        tracked.matched = False
        self._lookups.forget(tracked)

    def _has_resuming(self) -> bool:
        """Whether the load of a request has ended, and it was not scheduled since."""
        loads = self._planner.missing_blocks
        return any(not each.loading and name in loads for name, each in self._tracked.items())

    def _plan_store(self, tracked: Tracked, computed_tokens: int) -> list[Planned]:
        """The stores that this step completes. computed_tokens: in blocks after the step."""
        request, chunk_tokens = tracked.request, self._track(tracked.request).chunk_tokens
        tokens = self._fill(tracked, computed_tokens)
        if not chunk_tokens or tokens // chunk_tokens <= tracked.considered_chunks:
            return []  # most steps end here
        if not (tracked.options.store or tracked.canary_chunks):
            return []
        blocks = self._planner.blocks(request.request_id)
        complete_chunks = min(tokens, self._planner.tokens_in(blocks)) // chunk_tokens
        chunks = range(tracked.considered_chunks, complete_chunks)
        if not chunks:
            return []
        tracked.considered_chunks = chunks.stop
        self._lookups.announce(tracked, chunks)
        stored_from = min(max(chunks.start, tracked.canary_chunks), chunks.stop)
        compared, stored = range(chunks.start, stored_from), range(stored_from, chunks.stop)
        planned = self._planner.store(tracked, blocks, compared, compare=True)
        if tracked.options.store:
            planned += self._planner.store(tracked, blocks, stored)
        return planned

    def _fill(self, tracked: Tracked, computed_tokens: int) -> int:
        """How many tokens of a request are known and in blocks; 0 if it is not cached."""
        if tracked.prefix is None:
            return 0
        # A block has a hash once all its tokens are final. Draft tokens, which may be rejected, and
        # tokens not yet sampled are filled in a later step.
        tokens = min(computed_tokens, tracked.hashed_tokens(), tracked.origin.known_tokens)
        if tokens // tracked.hash_tokens <= tracked.origin.filled_tokens // tracked.hash_tokens:
            return tokens
        if tracked.prefix != self._names.prefix(tracked.request):
            tracked.prefix = None  # its adapter has changed
            return 0
        blocks = self._planner.blocks(tracked.request.request_id)
        self._planner.provenance.fills(tracked, blocks, tokens)
        return tokens


def _scheduled(output: SchedulerOutput) -> Iterator[tuple[str, bool, int]]:
    """Of each request: whether it begins or resumes, and its tokens before.

    Those that begin may use blocks that others fill in this step: running ones, and those with
    fewer tokens before.
    """
    cached = output.scheduled_cached_reqs
    begin = [(each.num_computed_tokens, each.req_id) for each in output.scheduled_new_reqs]
    for request_id, tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        if request_id in cached.resumed_req_ids:
            begin.append((tokens, request_id))
        else:
            yield request_id, False, tokens
    for tokens, request_id in sorted(begin):
        yield request_id, True, tokens
