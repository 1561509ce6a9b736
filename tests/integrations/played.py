# SPDX-License-Identifier: Apache-2.0
"""An engine whose scheduler is vLLM's and whose model and agent are played.

`played_memory` knows what every block must contain, and `played_transfers` what transfers may
touch. So the engine notices when a step reads KV that is not there, when a load writes a block that
others read, and when a store reads a block that has changed.

As in vLLM's engine, steps are scheduled, sent to the worker, and computed in this order; then their
outputs are taken. With asynchronous scheduling some are in flight at a time: the scheduler plans
with tokens that it has not seen, and drafts that may be rejected. When a step computes, between
its being sent and its output being taken, is random.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lmcache_redis.client.scheduler import Canaries
from lmcache_redis.integrations.vllm.connector import LMCacheRedisConnector
from lmcache_redis.integrations.vllm.support import LayerGroup
from lmcache_redis.integrations.vllm.worker import StepMetadata
from tests.integrations.played_memory import Agent, Memory
from tests.integrations.played_transfers import Transfers

MAX_TOKENS = 1024
# The model's tokens. Requests may stop at the first.
VOCABULARY = 7
_STEPS = 3000
_IDLE_STEPS = 20


@dataclass
class _Running:
    """What the worker knows of a request: its tokens, and how many of them are computed."""

    request: Request
    tokens: list[int]
    digests: list[int]
    computed: int


class _Scheduled(NamedTuple):
    """A request in a step. drafts: those that the scheduler knows, or placeholders."""

    running: _Running
    tokens: int
    drafts: Sequence[int]
    table: Sequence[Sequence[int]]
    replay_start: int


@dataclass
class _Step:
    """A step in flight. result: once it has been computed."""

    output: Any
    scheduled: list[_Scheduled]
    result: ModelRunnerOutput | None = None


class PlayedEngine:
    """vLLM's scheduler with our connector, over played workers and a played agent.

    in_flight: steps that are in flight when another is scheduled; with any, scheduling is
    asynchronous. drafts: tokens that are proposed for each one; a random number is right.
    may_fail: the cache may turn itself off.
    """

    def __init__(
        self,
        model: Path,
        specs: Sequence[Any],
        *,
        chunk_tokens: int,
        num_blocks: int,
        rng: random.Random,
        batch_tokens: int = 64,
        fail: float = 0.0,
        in_flight: int = 0,
        drafts: int = 0,
        may_fail: bool = False,
    ) -> None:
        self._rng, self._may_fail = rng, may_fail
        self._in_flight, self._drafts = in_flight, drafts
        init_none_hash(sha256)
        kv_config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"{n}"], spec) for n, spec in enumerate(specs)],
        )
        sizes = [spec.block_size for spec in specs]
        # Groups that vLLM's own prefix cache leaves out have no say in how it hashes.
        hashed = [spec.block_size for spec in specs if spec.prefix_cacheable] or sizes
        config = _config(model, min(hashed), batch_tokens, drafts)
        cache = config.cache_config
        states = [spec.block_size for spec in specs if hasattr(spec, "mamba_cache_mode")]
        cache.block_size, cache.num_gpu_blocks = max(states, default=min(sizes)), num_blocks
        # vLLM has switched it off: this is a CPU.
        config.scheduler_config.async_scheduling = bool(in_flight)
        hash_tokens = kv_config.hash_block_size = math.gcd(*hashed)
        scheduler = AsyncScheduler if in_flight else Scheduler
        self.scheduler = scheduler(
            config, kv_config, StructuredOutputManager(config), math.lcm(*sizes), hash_tokens
        )
        assert self.scheduler.defer_block_free == bool(in_flight)
        self.connector = self.scheduler.connector
        assert isinstance(self.connector, LMCacheRedisConnector)
        inner = self.connector._scheduler
        assert inner is not None, "the cache is off"
        self.groups: Sequence[LayerGroup] = inner._planner._groups
        self.agent = Agent(self.groups, chunk_tokens)
        self.connector._adapter.shutdown()
        inner._client = inner._lookups._client = self.connector._adapter = self.agent  # type: ignore[assignment]
        self.pool = self.scheduler.kv_cache_manager.block_pool
        left_out = [(n, spec) for n, spec in enumerate(specs) if not spec.prefix_cacheable]
        self._memory = Memory(self.pool, self.groups, left_out, hash_tokens)
        self.free_blocks = self.pool.get_num_free_blocks()
        self.transfers = Transfers(self.agent, self._memory, self.pool, self.groups, rng, fail)
        self.counts = self.transfers.counts
        inner._lookups._canaries = Canaries(rng.random)
        self._hasher = get_request_block_hasher(hash_tokens, sha256)
        self._ids = itertools.count()
        self._requests: dict[str, Request] = {}
        self._steps: deque[_Step] = deque()
        self._running: dict[str, _Running] = {}  # the worker's

    # Requests

    def ask(self, prompt: Sequence[int], answer_tokens: int, *, stops: bool = False) -> str:
        """stops: the answer may end earlier, which the scheduler cannot foresee."""
        request = Request(
            request_id=f"r{next(self._ids)}",
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(
                max_tokens=answer_tokens, ignore_eos=True, stop_token_ids=[0] if stops else None
            ),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self._requests[request.request_id] = request
        self._memory.learn(request)
        self.scheduler.add_request(request)
        return request.request_id

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self._requests.pop(request_id, None)
        self.counts.aborted += 1

    def reset(self, *, running: bool = False) -> bool:
        """Empties vLLM's own prefix cache; succeeds wherever it would without a connector."""
        deferred = [block for _, blocks in self.scheduler.deferred_frees for block in blocks]
        expected = running or not self.scheduler.running
        done = self.scheduler.reset_prefix_cache(reset_running_requests=running)
        assert done == expected, f"vLLM's reset returned {done}"
        if done:
            assert all(block.block_hash is None for block in self.pool.blocks)
            self.counts.resets += 1
            self.counts.deferred += bool(self.scheduler.deferred_frees)
        assert all(block.ref_cnt > 0 or block.is_null for block in deferred), "freed too early"
        return done

    def lose_steps(self) -> None:
        """The steps in flight raise, before or after they have computed; nothing of them arrives.

        vLLM's fault tolerance then aborts all requests and goes on. Its own cache has blocks that
        were never computed: it is emptied.
        """
        self._schedule()
        for step in self._steps:
            if self._rng.random() < 0.5:
                break
            self._compute(step)
        self.counts.lost_steps += len(self._steps)
        self._steps.clear()
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        # vLLM itself does not count lost steps: what it frees behind them would stay.
        self.scheduler.processed_step_seq = self.scheduler.sched_step_seq
        self.scheduler._drain_deferred_frees()
        self._requests.clear()
        self._running.clear()
        self.reset()

    @property
    def asked(self) -> list[str]:
        return list(self._requests)

    def run(self) -> None:
        """Steps until all requests are answered and all transfers have ended."""
        idle = 0
        for _ in range(_STEPS):
            if not self._requests and not self.transfers.busy:
                # The connector may still have transfers that no worker knows.
                if idle == _IDLE_STEPS or not self.connector.has_pending_push_work():
                    break
                idle += 1
            self.step()
        else:
            raise AssertionError(f"requests that do not end: {list(self._requests)}")
        self.step()
        self.step()
        while self._steps:
            self._take()
        held = self.free_blocks - self.pool.get_num_free_blocks()
        assert not held, f"blocks that stay held: {held}"
        assert not self.scheduler.requests, "requests that vLLM keeps"
        assert self.reset()

    # Steps

    def step(self) -> None:
        """Schedules a step, and takes the output of the one before those that may be in flight."""
        self._schedule()
        for step in self._steps:
            if self._rng.random() < 0.5:
                break
            self._compute(step)
        while len(self._steps) > self._in_flight:
            self._take()

    def _schedule(self) -> None:
        output = self.scheduler.schedule()
        self.counts.preemptions += len(output.preempted_req_ids or ())
        self.counts.overlapped += bool(self._steps and output.total_num_scheduled_tokens)
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, StepMetadata)
        connector = self.connector._scheduler
        assert self._may_fail or connector is not None, "the cache was turned off"
        for tracked in connector._tracked.values() if connector is not None else ():
            # This engine has computed or loaded whatever is in its blocks.
            known, name = tracked.origin.known_tokens, tracked.request.request_id
            assert known == sys.maxsize or self.counts.lost_steps, f"{name}: {known}"
        tables = self.scheduler.kv_cache_manager.get_block_ids
        for load in metadata.loads:
            request = self._requests[load.request_id]
            self.transfers.check_load(load, request, tables(load.request_id))
        for store in metadata.stores:
            self.transfers.check_store(store)
        for request_id in output.finished_req_ids:
            self._running.pop(request_id, None)
        cached = output.scheduled_cached_reqs
        begun = [new.req_id for new in output.scheduled_new_reqs]
        resumed = [each for each in cached.req_ids if each in cached.resumed_req_ids]
        for request_id in (*begun, *resumed):
            request, count = self._requests[request_id], output.num_scheduled_tokens[request_id]
            tokens, before = list(request.all_token_ids), request.num_computed_tokens - count
            digests = self._memory.digests(tokens)
            self._running[request_id] = _Running(request, tokens, digests, before)
        drafts = output.scheduled_spec_decode_tokens
        scheduled = []
        for request_id, count in output.num_scheduled_tokens.items():
            running = self._running[request_id]
            start = getattr(running.request, "replay_start", 0)
            table, placed = tables(request_id), drafts.get(request_id, ())
            scheduled.append(_Scheduled(running, count, placed, table, start))
        self._steps.append(_Step(output, scheduled))

    def _compute(self, step: _Step) -> None:
        """What the worker does in a step, once."""
        if step.result is not None:
            return
        output, metadata = step.output, step.output.kv_connector_metadata
        self._memory.prepare(output.new_block_ids_to_zero or (), output.kv_cache_block_copies or ())
        self.transfers.begin_loads(metadata)
        sampled = {each.running.request.request_id: self._tokens(each) for each in step.scheduled}
        self.transfers.begin_stores(metadata)
        step.result = ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={request_id: n for n, request_id in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=self.transfers.end_some(metadata.lost_loads.keys()),
        )

    def _tokens(self, scheduled: _Scheduled) -> list[int]:
        """Computes a request's tokens in a step; returns those that it samples."""
        running, count = scheduled.running, scheduled.tokens
        tokens, begin = running.tokens, running.computed
        drafts = list(scheduled.drafts)
        end = begin + count
        if drafts and drafts[0] == -1:
            drafts = self._propose(running, len(drafts))
        known = end - len(drafts)
        digests = running.digests
        if drafts:
            digests = self._memory.digests([*tokens[:known], *drafts], digests[:known])
        step, name = range(begin, end), running.request.request_id
        self._memory.compute(name, scheduled.table, digests, step, scheduled.replay_start)
        running.computed = known
        if known < len(tokens):
            assert not drafts
            return []
        assert known == len(tokens), f"{name}: the step ends at {known} of {len(tokens)} tokens"
        sampled = []
        for draft in (*drafts, None):
            token = _next(running.digests[-1])
            sampled.append(token)
            tokens.append(token)
            running.digests = self._memory.digests(tokens, running.digests)
            if token != draft:
                break
            running.computed += 1
        self.counts.accepted += len(sampled) - 1
        self.counts.rejected += len(drafts) - (len(sampled) - 1)
        return sampled

    def _propose(self, running: _Running, count: int) -> list[int]:
        """Draft tokens behind a request's, of which a random number is right."""
        right = self._rng.randrange(count + 1)
        tokens, digests = list(running.tokens), running.digests
        for number in range(count):
            token = _next(digests[-1])
            tokens.append(token if number < right else (token + 1) % VOCABULARY)
            digests = self._memory.digests(tokens, digests)
        return tokens[len(running.tokens) :]

    def _take(self) -> None:
        """The scheduler takes the output of the oldest step in flight."""
        step = self._steps.popleft()
        self._compute(step)
        self.scheduler.update_from_output(step.output, step.result)
        if self._drafts and not self._in_flight:
            ids = [each.running.request.request_id for each in step.scheduled]
            drafts = [self._propose(each.running, self._drafts) for each in step.scheduled]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))
        for request_id, request in list(self._requests.items()):
            self._memory.learn(request)
            if request.is_finished():
                del self._requests[request_id]
                self.counts.finished += 1

    def evict(self, share: float) -> None:
        """The agent loses parts at random, pinned ones too."""
        for part in list(self.agent.parts):
            if self._rng.random() < share:
                del self.agent.parts[part]


def _config(model: Path, block_tokens: int, batch_tokens: int, drafts: int) -> VllmConfig:
    cache = CacheConfig(block_size=block_tokens, enable_prefix_caching=True)
    cache.mamba_cache_mode = "align"
    return VllmConfig(
        model_config=_model_config(model),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=batch_tokens,
            max_model_len=MAX_TOKENS,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        speculative_config=_speculative_config(drafts) if drafts else None,
        kv_transfer_config=KVTransferConfig(
            kv_connector="LMCacheRedisConnector",
            kv_connector_module_path="lmcache_redis.integrations.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "endpoint": "ipc:///nowhere/agent.sock",
                "check_weights": False,  # nothing computes
            },
        ),
    )


@functools.cache
def _model_config(model: Path) -> ModelConfig:
    return ModelConfig(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=MAX_TOKENS,
    )


@functools.cache
def _speculative_config(drafts: int) -> SpeculativeConfig:
    return SpeculativeConfig(method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=2)


def _next(digest: int) -> int:
    """The token that the model samples."""
    return abs(digest) % VOCABULARY
