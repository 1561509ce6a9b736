"""An engine whose scheduler is vLLM's and whose model and agent are played.

The content of every block is known: a token's KV is a digest of the tokens up to it, and a state is
the digest of all tokens before it. So the engine notices when a step reads KV that is not there,
when a load writes a block that others read, and when a store reads a block that has changed.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from lmcache_redis.cache.pacing import PrefixNeeds
from lmcache_redis.client.scheduler import Canaries, Ranks
from lmcache_redis.client.worker import TransferOp
from lmcache_redis.integrations.vllm.connector import LMCacheRedisConnector
from lmcache_redis.integrations.vllm.support import LayerGroup
from lmcache_redis.integrations.vllm.worker import Planned, StepMetadata, WorkerReport

MAX_TOKENS = 1024
_STEPS = 3000


class Agent:
    """What the cache holds: the blocks of each part, by group and name. Also the adapter."""

    def __init__(self, groups: Sequence[LayerGroup], chunk_tokens: int) -> None:
        self.ranks = Ranks(1)
        self.parts: dict[tuple[int, bytes], tuple[Any, ...]] = {}
        self.pinned: dict[str, set[tuple[int, bytes]]] = {}
        self._groups = groups
        self._chunk_tokens = chunk_tokens
        self._answers: dict[str, int] = {}
        self.canary_every = 0
        self.compare_only = False
        self.cleared: list[bytes] = []

    def clear(self, epoch: bytes) -> None:
        self.cleared.append(epoch)

    def chunk_size_tokens(self) -> int:
        return self._chunk_tokens

    def begin_lookup(
        self,
        request_id: str,
        names: Sequence[bytes],
        first_chunk: int,
        token_s: float,
        busy_s: float,
    ) -> None:
        if request_id in self._answers:
            return
        reaches = [group.reach for group in self._groups]
        needs = PrefixNeeds(reaches, first_chunk, self._chunk_tokens)
        hit = needs.longest(len(names), lambda part: (part[1], names[part[0]]) in self.parts)
        pinned = {(row, names[chunk]) for chunk, row in needs.parts(hit)}
        self.pinned[request_id] = pinned
        self._answers[request_id] = (first_chunk + hit) * self._chunk_tokens if hit else 0

    def hit_tokens(self, request_id: str, wait_s: float) -> int | None:
        return 0 if self.compare_only else self._answers.get(request_id, 0)

    def pinned_tokens(self, request_id: str) -> int:
        return self._answers.get(request_id, 0)

    def hit_tiers(self, request_id: str) -> Sequence[str]:
        return ()

    def forget_lookup(self, request_id: str) -> None:
        self._answers.pop(request_id, None)

    def release_lookup(self, request_id: str) -> None:
        self.pinned.pop(request_id, None)

    def end_session(self, request_id: str) -> None:
        self._answers.pop(request_id, None)

    def shutdown(self) -> None:
        pass


@dataclass
class Counts:
    """What happened, so that a test knows what it has tested."""

    loads: int = 0
    failed_loads: int = 0
    late_loads: int = 0
    loaded_parts: dict[int, int] = field(default_factory=dict)
    stored_parts: dict[int, int] = field(default_factory=dict)
    compared_parts: dict[int, int] = field(default_factory=dict)
    preemptions: int = 0
    finished: int = 0


class PlayedEngine:
    """vLLM's scheduler with our connector, over played workers and a played agent.

    Loads and stores end some steps after they begin, at random. A load may fail, and a failed one
    may go on to write while vLLM already uses the request's other blocks.
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
    ) -> None:
        init_none_hash(sha256)
        self._rng = rng
        self._fail = fail
        self.hold = False  # no load ends
        sizes = [spec.block_size for spec in specs]
        hashed = [spec.block_size for spec in specs if spec.prefix_cacheable]
        kv_config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)
            ],
        )
        cache = CacheConfig(block_size=min(hashed), enable_prefix_caching=True)
        cache.mamba_cache_mode = "align"
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(model),
                skip_tokenizer_init=True,
                dtype="float32",
                max_model_len=MAX_TOKENS,
            ),
            cache_config=cache,
            device_config=DeviceConfig("cpu"),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=batch_tokens,
                max_model_len=MAX_TOKENS,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
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
        states = [spec.block_size for spec in specs if hasattr(spec, "mamba_cache_mode")]
        cache.block_size, cache.num_gpu_blocks = max(states, default=min(sizes)), num_blocks
        config.scheduler_config.async_scheduling = False
        self.hash_tokens = _gcd(hashed)
        kv_config.hash_block_size = self.hash_tokens
        self.scheduler = Scheduler(
            config, kv_config, StructuredOutputManager(config), _lcm(sizes), self.hash_tokens
        )
        self.connector = self.scheduler.connector
        assert isinstance(self.connector, LMCacheRedisConnector)
        inner = self.connector._scheduler
        assert inner is not None, "the cache is off"
        self.groups: Sequence[LayerGroup] = inner._planner._groups
        self._left_out = [(n, spec) for n, spec in enumerate(specs) if not spec.prefix_cacheable]
        self.agent = Agent(self.groups, chunk_tokens)
        self.connector._adapter.shutdown()
        inner._client = inner._lookups._client = self.connector._adapter = self.agent  # type: ignore[assignment]
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free_blocks = self.pool.get_num_free_blocks()
        self.counts = Counts()
        inner._lookups._canaries = Canaries(rng.random)
        self._hasher = get_request_block_hasher(self.hash_tokens, sha256)
        self._ids = itertools.count()
        self._requests: dict[str, Request] = {}
        self._blocks: dict[int, Any] = {}  # content: a list of digests, or the digest of a state
        self._truth: dict[bytes, list[int]] = {}  # by vLLM's hash: the digests up to there
        self._loads: list[tuple[Planned, bool]] = []  # and whether vLLM was told that it failed
        self._stores: list[Planned] = []
        self._ended: list[int] = []

    # Requests

    def ask(self, prompt: Sequence[int], answer_tokens: int) -> str:
        request = Request(
            request_id=f"r{next(self._ids)}",
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=answer_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self._requests[request.request_id] = request
        self.scheduler.add_request(request)
        return request.request_id

    def abort(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self._requests.pop(request_id, None)

    @property
    def asked(self) -> list[str]:
        return list(self._requests)

    def run(self) -> None:
        """Steps until all requests are answered and all transfers have ended."""
        for _ in range(_STEPS):
            transfers = (*self._loads, *self._stores, *self._ended)
            pending = transfers or self.connector.has_pending_push_work()
            if not self._requests and not pending:
                break
            self.step()
        else:
            assert self._requests, "blocks that stay held"
            raise AssertionError(f"requests that do not end: {list(self._requests)}")
        self.step()
        self.step()
        assert self.pool.get_num_free_blocks() == self.free_blocks, "blocks that stay held"

    # Steps

    def step(self) -> None:
        output = self.scheduler.schedule()
        self.counts.preemptions += len(output.preempted_req_ids or ())
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, StepMetadata)
        assert self.connector._scheduler is not None, "the cache was turned off"
        for tracked in self.connector._scheduler._tracked.values():
            # This engine has computed or loaded whatever is in its blocks.
            assert tracked.origin.known_tokens == sys.maxsize, (
                f"{tracked.request.request_id}: not known"
            )
        for block_id in output.new_block_ids_to_zero or ():
            self._blocks[block_id] = None
        for copy in output.kv_cache_block_copies or ():
            self._blocks[copy.dst_block_id] = self._blocks.get(copy.src_block_id)
        for load in metadata.loads:
            self._begin_load(load)
        sampled = {
            request_id: self._compute(self._requests[request_id], count)
            for request_id, count in output.num_scheduled_tokens.items()
        }
        for store in metadata.stores:
            self._check_store(store)
            self._stores.append(store)
            # A lookup of the request may have begun since: then the agent looks in its pool.
            pinned = self.agent.pinned.get(store.request_id)
            for op in store.ops if store.compare and pinned is not None else ():
                for name in op.hashes:
                    assert (op.group, name) in pinned, "a part that no lookup has pinned"
        report = self._end_some()
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=list(sampled),
                req_id_to_index={request_id: n for n, request_id in enumerate(sampled)},
                sampled_token_ids=list(sampled.values()),
                kv_connector_output=report,
            ),
        )
        for request_id, request in list(self._requests.items()):
            if request.is_finished():
                del self._requests[request_id]
                self.counts.finished += 1

    def _digests(self, request: Request) -> list[int]:
        digests, last = [], 0
        for token in request.all_token_ids:
            last = hash((last, token))
            digests.append(last)
        for number, name in enumerate(request.block_hashes):
            self._truth.setdefault(name, digests[: (number + 1) * self.hash_tokens])
        return digests

    def _compute(self, request: Request, count: int) -> list[int]:
        """Reads the KV that the step needs, and writes that of its tokens."""
        begin = request.num_computed_tokens - count  # vLLM has advanced it
        digests = self._digests(request)
        table = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for group in self.groups:
            ids, size = table[group.number], group.block_size_tokens
            if group.is_state:
                if begin:
                    found = self._blocks.get(ids[(begin - 1) // size])
                    assert found == digests[begin - 1], f"{request.request_id}: state of {begin}"
                self._write(ids[(begin + count - 1) // size], digests[begin + count - 1])
                continue
            for token in range(group.reach.first_token(begin), begin):
                content = self._content(ids[token // size], size)
                assert content[token % size] == digests[token], (
                    f"{request.request_id}: token {token} of group {group} before {begin}"
                )
            for token in range(begin, begin + count):
                content = list(self._content(ids[token // size], size))
                content[token % size] = digests[token]
                self._write(ids[token // size], content)
        for number, spec in self._left_out:
            self._compute_left_out(request, table[number], spec, range(begin, begin + count))
        if begin + count < request.num_tokens:
            return []
        return [abs(digests[-1]) % 7]

    def _compute_left_out(
        self, request: Request, ids: Sequence[int], spec: Any, step: range
    ) -> None:
        """As `_compute`, for a group that nothing loads: a step that replays a window fills it."""
        digests, size = self._digests(request), spec.block_size
        if isinstance(spec, CircularBufferSpec):
            # Tokens are compressed in groups of half a block.
            first, ids = step.start - step.start % (size // 2), list(ids) * (step.stop // size + 1)
        else:
            first = max(0, step.start - spec.sliding_window + 1, request.replay_start)
        for token in range(first, step.start):
            found = self._content(ids[token // size], size)[token % size]
            assert found == digests[token], f"{request.request_id}: token {token} of {spec}"
        for token in step:
            content = list(self._content(ids[token // size], size))
            content[token % size] = digests[token]
            self._write(ids[token // size], content)

    def _content(self, block_id: int, size: int) -> list[Any]:
        """Of the tokens of a block; None where something else is."""
        content = self._blocks.get(block_id)
        return content if isinstance(content, list) and len(content) == size else [None] * size

    def _write(self, block_id: int, content: Any) -> None:
        block = self.pool.blocks[block_id]
        assert not block.is_null
        self._blocks[block_id] = content

    # Transfers

    def _begin_load(self, load: Planned) -> None:
        request = self._requests[load.request_id]
        table = self.scheduler.kv_cache_manager.get_block_ids(load.request_id)
        end = request.num_computed_tokens
        if any(group.reach.kind != "all" for group in self.groups):
            assert end <= request.num_tokens - 1
        pinned = self.agent.pinned[load.request_id]
        for op in load.ops:
            group = self.groups[op.group]
            # Exactly the blocks that are neither null nor local, up to the end of the load.
            for name in op.hashes:
                assert (op.group, name) in pinned, "a part that no lookup has pinned"
            written = _written(op)
            size = group.block_size_tokens
            own = [
                block_id
                for block_id in table[group.number][: end // size]
                if self.pool.blocks[block_id].block_hash is None
                and not self.pool.blocks[block_id].is_null
            ]
            assert written == own
            for block_id in written:
                assert self.pool.blocks[block_id].ref_cnt == 2, "the request's and the connector's"
        self.counts.loads += 1
        self._loads.append((load, False))

    def _check_store(self, store: Planned) -> None:
        for op in store.ops:
            self._read(op)
            for block_id in op.block_ids:
                assert self.pool.blocks[block_id].ref_cnt > 0

    def _read(self, op: TransferOp, *, compare: bool = False) -> None:
        """Reads parts into the agent, or compares them with its own, and checks every byte."""
        group = self.groups[op.group]
        names = op.hashes
        per_part = len(op.block_ids) // len(names)
        size = group.block_size_tokens
        for number, name in enumerate(names):
            ids = op.block_ids[number * per_part : (number + 1) * per_part]
            content = tuple(self._blocks.get(block_id) for block_id in ids)
            digests = self._truth[name[-32:]]  # after the epoch
            if group.is_state:
                expected: tuple[Any, ...] = (digests[-1],)
            else:
                last = digests[-per_part * size :]
                expected = tuple(last[n * size : (n + 1) * size] for n in range(per_part))
            assert content == expected, f"a store of group {group} reads what it should not"
            counts = self.counts.compared_parts if compare else self.counts.stored_parts
            counts[op.group] = counts.get(op.group, 0) + 1
            if compare:
                assert self.agent.parts.get((op.group, name), content) == content
            else:
                self.agent.parts[op.group, name] = content

    def _end_some(self) -> KVConnectorOutput:
        """Ends transfers at random, and reports it."""
        received: set[str] = set()
        failed: set[str] = set()
        for entry in list(self._loads):
            load, told = entry
            if self.hold or self._rng.random() < 0.5:
                continue
            if not told and self._rng.random() < self._fail:
                # vLLM is told at once; the agent may still write.
                received.add(load.request_id)
                failed.add(load.request_id)
                self.counts.failed_loads += 1
                self._loads[self._loads.index(entry)] = (load, True)
                self._write_load(load, spoil=True)
                continue
            self._loads.remove(entry)
            self._ended.append(load.transfer_id)
            if told:
                self.counts.late_loads += 1
                self._write_load(load, spoil=True)
                continue
            received.add(load.request_id)
            if not self._write_load(load):
                failed.add(load.request_id)
                self.counts.failed_loads += 1
        for store in list(self._stores):
            if self._rng.random() < 0.5:
                self._stores.remove(store)
                for op in store.ops:
                    self._read(op, compare=store.compare)
                self._ended.append(store.transfer_id)
        report = None
        if self._ended or failed:
            report = WorkerReport({0: self._ended}, failed=frozenset(failed))
        self._ended = []
        return KVConnectorOutput(
            finished_recving=received, failed_recving=failed, kv_connector_worker_meta=report
        )

    def _write_load(self, load: Planned, *, spoil: bool = False) -> bool:
        """Writes the parts; False if one is gone. spoil: writes something else."""
        complete = True
        for op in load.ops:
            names = op.hashes
            per_part = len(op.block_ids) // len(names)
            for number, name in enumerate(names):
                part = self.agent.parts.get((op.group, name))
                if part is None:
                    complete = False
                    continue
                loaded = self.counts.loaded_parts
                loaded[op.group] = loaded.get(op.group, 0) + (not spoil)
                for n, content in enumerate(part, start=number * per_part):
                    if n >= op.skip_blocks:
                        self._write(op.block_ids[n], "spoiled" if spoil else content)
        return complete

    def evict(self, share: float) -> None:
        """The agent loses parts at random, pinned ones too."""
        for part in list(self.agent.parts):
            if self._rng.random() < share:
                del self.agent.parts[part]


def _written(op: TransferOp) -> list[int]:
    return list(op.block_ids[op.skip_blocks :])


def _gcd(sizes: Sequence[int]) -> int:
    import math

    return math.gcd(*sizes)


def _lcm(sizes: Sequence[int]) -> int:
    import math

    return math.lcm(*sizes)
