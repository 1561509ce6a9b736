# SPDX-License-Identifier: Apache-2.0
"""Lookups of prefixes, for the connector in vLLM's scheduler: what can be loaded of a prompt."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lmcache_redis.client.scheduler import Canaries, SchedulerClient
from lmcache_redis.integrations.vllm.planning import StepPlanner
from lmcache_redis.integrations.vllm.prefill import PrefillRate
from lmcache_redis.integrations.vllm.reports.stats import Recorder
from lmcache_redis.integrations.vllm.requests import CachePolicy, RequestLookup, Tracked

if TYPE_CHECKING:
    from lmcache_redis.integrations.vllm.reports.events import Announcer

# Time that one step may wait for lookups: it helps an idle engine and stalls a busy one. An empty
# step takes about 5 ms more. A new agent answers after 7 ms, if computing takes 0.1 s: until then
# it waits for a load that shows the rate of Redis.
_IDLE_WAIT_S = 0.01
_BUSY_WAIT_S = 0.0005


class PrefixLookups:
    """Asks the agent, and decides whether what it has found is loaded or compared.

    announcer: tells routers; None if none listens.
    """

    def __init__(
        self,
        client: SchedulerClient,
        planner: StepPlanner,
        recorder: Recorder,
        announcer: Announcer | None,
        policy: CachePolicy,
    ) -> None:
        self.prefill = PrefillRate()
        self._client = client
        self._planner = planner
        self._recorder = recorder
        self._announcer = announcer
        self._load_always = policy.load_always
        self._canaries = Canaries(first=policy.first_compared)
        self._wait_budget_s = _IDLE_WAIT_S  # what this step may still wait

    def step_scheduled(self, prompt_tokens: int, *, idle: bool) -> None:
        """The engine computes a step with these tokens of prompts. idle: it runs no model."""
        self._canaries.computed(prompt_tokens)
        self.prefill.scheduled(prompt_tokens, time.monotonic())
        self._wait_budget_s = _IDLE_WAIT_S if idle else _BUSY_WAIT_S

    def found_tokens(self, tracked: Tracked, local_tokens: int) -> int | None:
        """Tokens beyond ``local_tokens`` that can be loaded; None: not known yet."""
        request, chunk_tokens = tracked.request, tracked.chunk_tokens
        if (
            not chunk_tokens
            or tracked.computes
            or tracked.prefix is None
            or not tracked.options.load
            or request.skip_reading_prefix_cache
        ):
            return 0
        lookup = tracked.lookup
        if lookup is not None and local_tokens < lookup.first_chunk * chunk_tokens:
            # Local blocks were evicted since the lookup began.
            self.forget(tracked)
        if tracked.lookup is None:
            limit_tokens = tracked.hashed_tokens()
            if tracked.options.max_load_tokens is not None:
                limit_tokens = min(limit_tokens, tracked.options.max_load_tokens)
            if not self._planner.needs_all:
                # vLLM computes the last token again. What is before a window, or a state before
                # its last token, would then be missing.
                limit_tokens = min(limit_tokens, request.num_tokens - 1)
            chunks = range(local_tokens // chunk_tokens, limit_tokens // chunk_tokens)
            if not chunks:
                return 0
            if not self._client.ranks.known():
                return None  # only for the first requests: vLLM steps, and the workers report
            tracked.lookup = RequestLookup(chunks.start, time.monotonic())
            self.announce(tracked, chunks)
            self.prefill.begun.end(request.request_id)  # it was preempted
            names = tracked.chunk_names()
            self._client.begin_lookup(
                request.request_id,
                names[chunks.start : chunks.stop],
                first_chunk=chunks.start,
                before=names[: chunks.start] if self._client.names_before else (),
                token_s=0.0 if self._load_always else self.prefill.token_s,
                busy_s=self.prefill.busy_s(time.monotonic()),
                tenant=tracked.options.tenant,
                # Once: what did not come then is not waited for after a preemption.
                stored_tokens=0 if tracked.started else tracked.options.stored_tokens or 0,
            )
        began_s = time.monotonic()
        tokens = self._client.hit_tokens(request.request_id, wait_s=self._wait_budget_s)
        now_s = time.monotonic()
        self._wait_budget_s = max(0.0, self._wait_budget_s - (now_s - began_s))
        if tokens is None:
            return None
        lookup = tracked.lookup
        lookup.local_tokens = local_tokens
        if lookup.asked_s is not None:
            self._recorder.observe("lookup_seconds", now_s - lookup.asked_s)
            found = {"local_tokens": local_tokens, "hit_tokens": max(0, tokens - local_tokens)}
            self._recorder.span("lookup", request, lookup.asked_s, found)
            lookup.asked_s = None
        # Chunks that the agent did not find are stored again, even if they are recent.
        first_miss = max(lookup.first_chunk, tokens // chunk_tokens)
        self._planner.missed(tracked.chunk_names()[first_miss:])
        is_compared = self._is_canary(tracked, lookup, tokens)
        if is_compared or lookup.held_back or tokens <= local_tokens:
            return 0
        if local_tokens and not self._planner.provenance.ends_known(tracked, local_tokens):
            # What vLLM has of its prefix was not made under the names that it has now. Nothing is
            # loaded behind that, because vLLM would compute from there. Or it is being computed in
            # the step that vLLM is scheduling: then the next step knows.
            if lookup.asked_again:
                return 0
            lookup.asked_again = True
            return None
        return tokens - local_tokens

    def _is_canary(self, tracked: Tracked, lookup: RequestLookup, tokens: int) -> bool:
        """Whether its hit is compared; decided once for each lookup.

        tokens: what may be loaded. If nothing may be, comparing costs no prefill.
        """
        pinned = self._client.pinned_tokens(tracked.request.request_id)
        if lookup.local_tokens or lookup.first_chunk or not pinned:
            if lookup.canary_chunks is None and tokens > lookup.local_tokens:
                lookup.held_back = self._canaries.holds_back(self._client.canary_every)
            lookup.canary_chunks = 0
        elif lookup.canary_chunks is None:
            every = self._client.canary_every
            taken = bool(every) if tokens < pinned else self._canaries.takes(tokens, every)
            lookup.canary_chunks = pinned // tracked.chunk_tokens if taken else 0
        return bool(lookup.canary_chunks)

    def forget(self, tracked: Tracked) -> None:
        """Ends the lookup of a request."""
        tracked.lookup = None
        self._client.end_session(tracked.request.request_id)

    def announce(self, tracked: Tracked, chunks: range) -> None:
        if self._announcer is not None:
            names = tracked.chunk_names()
            self._announcer.named(tracked.request, names, chunks, tracked.chunk_tokens)
