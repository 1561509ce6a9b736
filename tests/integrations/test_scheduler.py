# SPDX-License-Identifier: Apache-2.0
"""The connector in the scheduler, step by step, with scripted answers of the agent.

The whole of it runs against a real agent and a real vLLM in test_vllm.py; here are the cases
that a real scheduler reaches only by luck.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from vllm.v1.core.block_pool import BlockPool

from lmcache_redis.cache.pacing import Computing, TransferRate, WorthLoading
from lmcache_redis.chunks.names import FULL_REACH, Reach
from lmcache_redis.client.scheduler import Ranks
from lmcache_redis.client.worker import TransferOp
from lmcache_redis.integrations.vllm import planning
from lmcache_redis.integrations.vllm.epoch import Epochs, named_epoch
from lmcache_redis.integrations.vllm.identity.lora import AdapterDigests
from lmcache_redis.integrations.vllm.parameters import UNREAD
from lmcache_redis.integrations.vllm.planning import BlockReferences, StepPlanner
from lmcache_redis.integrations.vllm.reports.stats import Recorder
from lmcache_redis.integrations.vllm.requests import CachePolicy, RequestNames
from lmcache_redis.integrations.vllm.scheduler import ConnectorScheduler
from lmcache_redis.integrations.vllm.support import LayerGroup
from lmcache_redis.integrations.vllm.worker import StepMetadata, WorkerReport

BLOCK, CHUNK = 16, 64
# The blocks of requests, as vLLM's manager has them after a `step`.
TABLES: dict[str, list[int]] = {}


class ScriptedAdapter:
    """Gives scripted answers and records the questions."""

    def __init__(self) -> None:
        self.tokens: int | None = 0
        self.tiers: list[str] = []
        self.chunk = CHUNK
        self.ranks = Ranks(1)
        self.lookups: list[tuple[str, int]] = []
        self.released: list[str] = []
        self.ended: list[str] = []
        self.jobs: set[str] = set()
        self.canary_every = 0
        self.names_before = False
        self.before = 0  # chunks named before the last lookup
        self.pinned: int | None = None  # if not all of it may be loaded
        self.answers_in_s = 0.0  # if it is not waited for as long, a lookup is not answered

    def chunk_size_tokens(self) -> int:
        return self.chunk

    def begin_lookup(
        self,
        request_id: str,
        hashes: Any,
        first_chunk: int,
        before: Any,
        token_s: float,
        busy_s: float,
        tenant: str,
        stored_tokens: int,
    ) -> None:
        self.token_s, self.busy_s, self.tenant = token_s, busy_s, tenant
        self.stored_tokens = stored_tokens
        self.hashes = len(hashes)
        self.before = len(before)
        if request_id not in self.jobs:
            self.jobs.add(request_id)
            self.lookups.append((request_id, first_chunk))

    def hit_tokens(self, request_id: str, wait_s: float) -> int | None:
        return self.tokens if wait_s >= self.answers_in_s else None

    def pinned_tokens(self, request_id: str) -> int:
        return (self.tokens or 0) if self.pinned is None else self.pinned

    def hit_tiers(self, request_id: str) -> list[str]:
        return self.tiers

    def forget_lookup(self, request_id: str) -> None:
        self.jobs.discard(request_id)

    def release_lookup(self, request_id: str) -> None:
        self.released.append(request_id)

    def end_session(self, request_id: str) -> None:
        self.jobs.discard(request_id)
        self.ended.append(request_id)


@dataclass
class FakeRequest:
    request_id: str = "r"
    tokens: int = 4 * CHUNK + 1
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: Any = None
    lora_request: Any = None
    over: bool = False
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.grow(self.tokens)

    def grow(self, tokens: int) -> None:
        self.tokens = tokens
        self.block_hashes[:] = [n.to_bytes(4, "big") for n in range(tokens // BLOCK)]

    @property
    def num_tokens(self) -> int:
        return self.tokens

    @property
    def num_prompt_tokens(self) -> int:
        return self.tokens

    def is_finished(self) -> bool:
        return self.over


def step(
    *,
    new: tuple[str, list[int], int, int] | None = None,
    cached: tuple[str, list[int] | None, int, int] | None = None,
    resumed: bool = False,
    preempted: set[str] | None = None,
) -> Any:
    """A SchedulerOutput: (request id, block ids, computed before, scheduled now)."""
    scheduled = {row[0]: row[3] for row in (new, cached) if row}
    if new or (cached and resumed):
        TABLES[(new or cached)[0]] = []
    for row in (new, cached):
        if row:
            TABLES.setdefault(row[0], []).extend(row[1] or [])
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(scheduled.values()),
        num_scheduled_tokens=scheduled,
        preempted_req_ids=preempted,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=row[0], num_computed_tokens=row[2]) for row in (new,) if row
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[cached[0]] if cached else [],
            num_computed_tokens=[cached[2]] if cached else [],
            resumed_req_ids={cached[0]} if cached and resumed else set(),
        ),
    )


@pytest.fixture
def adapter() -> ScriptedAdapter:
    return ScriptedAdapter()


@pytest.fixture
def pool() -> BlockPool:
    """vLLM's own. Block 0 is its null block."""
    return BlockPool(num_gpu_blocks=128, enable_caching=True, hash_block_size=BLOCK)


@pytest.fixture
def references(pool: BlockPool) -> BlockReferences:
    return BlockReferences(pool, world_size=2)


def make_scheduler(
    adapter: ScriptedAdapter,
    pool: BlockPool,
    references: BlockReferences,
    recorder: Recorder | None = None,
    **options: Any,
) -> ScriptedScheduler:
    groups = options.pop("groups", [LayerGroup(0, (), BLOCK, FULL_REACH)])
    hash_tokens = options.pop("hash_tokens", BLOCK)
    names = RequestNames(Epochs(None, None, lambda: UNREAD), options.pop("media", None))
    announcer = options.pop("announcer", None)
    step_tokens = options.pop("step_tokens", 4 * CHUNK)
    block_ids = options.pop("block_ids", lambda request_id: (TABLES.get(request_id, []),))
    planner = StepPlanner(
        references,
        groups,
        (),
        step_tokens,
        lambda name: [[pool.blocks[each] for each in ids] for ids in block_ids(name)],
    )
    made = ScriptedScheduler(
        adapter,  # type: ignore[arg-type]
        planner,
        names,
        CachePolicy(hash_tokens, **options),
        recorder or Recorder(),
        announcer,
    )
    made.adapter, made.pool, made.references = adapter, pool, references
    return made


class ScriptedScheduler(ConnectorScheduler):
    """With what lies around it at hand."""

    adapter: ScriptedAdapter
    pool: BlockPool
    references: BlockReferences


@pytest.fixture
def scheduler(
    adapter: ScriptedAdapter, pool: BlockPool, references: BlockReferences
) -> ScriptedScheduler:
    return make_scheduler(adapter, pool, references)


def name_weights(scheduler: ConnectorScheduler, weights_id: str) -> None:
    scheduler.change_epoch(lambda epochs: epochs.weights_have_id(weights_id), "an update")


def run(scheduler: ConnectorScheduler, output: Any) -> StepMetadata:
    """A step whose output vLLM takes: its metadata, with the stores of what it fills."""
    metadata = scheduler.build_metadata(output)
    scheduler.output_taken(output)
    metadata.stores, scheduler._steps.stores = scheduler._steps.stores, []
    return metadata


def computed_before(
    scheduler: ConnectorScheduler, pool: BlockPool, blocks: list[int], tokens: int
) -> None:
    """Another request has computed these tokens, and vLLM has its blocks in its own cache."""
    params = {"lmcache_redis": {"load": False, "store": False}}
    request = FakeRequest("before", tokens, kv_transfer_params=params)
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, [], 0)
    run(scheduler, step(new=("before", blocks, 0, tokens)))
    count = tokens // BLOCK
    filled = [pool.blocks[each] for each in blocks[:count]]
    pool.cache_full_blocks(request, filled, 0, count, BLOCK, 0)  # type: ignore[arg-type]
    scheduler.finished(request)


def only_store(metadata: StepMetadata) -> TransferOp:
    ((_, _, (op,), *_),) = metadata.stores
    return op


def test_a_lookup_is_asked_once_and_answered_later(scheduler: ScriptedScheduler) -> None:
    request = FakeRequest()
    scheduler.adapter.tokens = None
    assert scheduler.matched_tokens(request, 0) is None
    assert scheduler.matched_tokens(request, 0) is None
    scheduler.adapter.tokens = 3 * CHUNK
    assert scheduler.matched_tokens(request, 0) == 3 * CHUNK
    assert scheduler.adapter.lookups == [("r", 0)]


def test_an_idle_engine_waits_for_a_tier_that_is_measured(
    scheduler: ScriptedScheduler,
) -> None:
    computing = Computing()
    computing.told(0.1 / 1024, 0.0, (), 0.0)  # a prompt of 1,024 tokens in 0.1 s
    measured_s = WorthLoading(computing, 4, 256).patience_s(TransferRate(), 0.0)
    scheduler.adapter.answers_in_s = measured_s + 0.004  # and the question, over two sockets
    # Not None: vLLM would run an empty step before it asks again.
    assert scheduler.matched_tokens(FakeRequest(), 0) == 0
    run(scheduler, step(new=("r", [*range(1, 18)], 0, 4 * CHUNK)))
    assert scheduler.matched_tokens(FakeRequest("behind a model's step"), 0) is None
    run(scheduler, step())
    assert scheduler.matched_tokens(FakeRequest("behind an empty step"), 0) == 0


def test_what_is_before_a_lookup_is_named_if_it_counts(scheduler: ScriptedScheduler) -> None:
    for name, scheduler.adapter.names_before in (("off", False), ("on", True)):
        scheduler.matched_tokens(FakeRequest(name), 2 * CHUNK)
        assert scheduler.adapter.lookups[-1] == (name, 2)
        assert scheduler.adapter.before == (2 if scheduler.adapter.names_before else 0)


def test_the_first_lookup_waits_until_all_workers_have_reported(
    scheduler: ScriptedScheduler,
) -> None:
    scheduler.adapter.ranks = Ranks(2)
    scheduler.adapter.tokens = 3 * CHUNK
    request = FakeRequest()
    assert scheduler.matched_tokens(request, 0) is None
    scheduler.reported(WorkerReport({}, places={0: None}))
    assert scheduler.matched_tokens(request, 0) is None
    assert scheduler.adapter.lookups == []
    scheduler.reported(WorkerReport({}, places={1: None}))
    assert scheduler.matched_tokens(request, 0) == 3 * CHUNK
    assert scheduler.adapter.lookups == [("r", 0)]


def test_only_what_is_not_computed_locally_is_loaded(scheduler: ScriptedScheduler) -> None:
    request = FakeRequest()
    local = CHUNK + 2 * BLOCK  # ends inside the second chunk
    computed_before(scheduler, scheduler.pool, list(range(100, 107)), local + 1)
    scheduler.adapter.tokens = 4 * CHUNK
    scheduler.adapter.lookups.clear()
    assert scheduler.matched_tokens(request, local) == 4 * CHUNK - local
    assert scheduler.adapter.lookups == [("r", 1)]
    scheduler.allocated(request, [list(range(100, 117))], 4 * CHUNK - local)
    metadata = run(scheduler, step())
    ((_, _, (op,), *_),) = metadata.loads
    assert list(op.block_ids) == list(range(104, 116))
    assert list(op.hashes) == request.block_hashes[7:16:4]
    assert op.skip_blocks == 2
    assert metadata.idle
    assert run(scheduler, step()).loads == []


def test_lookups_loads_and_stores_say_whose_they_are(scheduler: ScriptedScheduler) -> None:
    request = FakeRequest(kv_transfer_params={"lmcache_redis": {"tenant": "team"}})
    scheduler.adapter.tokens = CHUNK
    assert scheduler.matched_tokens(request, 0) == CHUNK
    assert scheduler.adapter.tenant == "team"
    scheduler.allocated(request, [list(range(1, 18))], CHUNK)
    ((_, _, (load,), *_),) = run(scheduler, step()).loads
    scheduler.load_ended("r")
    store = only_store(run(scheduler, step(new=("r", list(range(1, 18)), CHUNK, 3 * CHUNK + 1))))
    assert (load.tenant, store.tenant) == ("team", "team")


def test_a_request_without_blocks_lets_a_loaded_one_go_on(scheduler: ScriptedScheduler) -> None:
    """vLLM 0.27 to 0.30 stop for ever at the first request that they cannot allocate blocks for."""
    loaded, blocked = FakeRequest("r"), FakeRequest("s")
    scheduler.adapter.tokens = 4 * CHUNK
    scheduler.matched_tokens(loaded, 0)
    scheduler.allocated(loaded, [list(range(1, 18))], 4 * CHUNK)
    assert scheduler.matched_tokens(blocked, 0) == 4 * CHUNK
    assert scheduler.matched_tokens(blocked, 0) == 4 * CHUNK  # the load has not ended
    scheduler.load_ended("r")
    assert scheduler.matched_tokens(blocked, 0) is None
    assert scheduler.matched_tokens(blocked, 0) == 4 * CHUNK
    scheduler.allocated(loaded, [], 0)
    assert scheduler.matched_tokens(blocked, 0) == 4 * CHUNK
    assert scheduler.matched_tokens(blocked, 0) == 4 * CHUNK


def test_evicted_local_blocks_are_looked_up_again(scheduler: ScriptedScheduler) -> None:
    computed_before(scheduler, scheduler.pool, list(range(100, 109)), 2 * CHUNK)
    scheduler.adapter.lookups.clear()
    scheduler.adapter.ended.clear()
    request = FakeRequest()
    scheduler.adapter.tokens = None
    assert scheduler.matched_tokens(request, 2 * CHUNK) is None
    assert scheduler.matched_tokens(request, 0) is None
    assert scheduler.adapter.lookups == [("r", 2), ("r", 0)]
    assert scheduler.adapter.ended == ["r"]


@pytest.mark.parametrize("tokens", [0, CHUNK - 1])
def test_prompts_shorter_than_a_chunk_are_not_looked_up(
    scheduler: ScriptedScheduler, tokens: int
) -> None:
    assert scheduler.matched_tokens(FakeRequest(tokens=tokens), 0) == 0
    assert scheduler.adapter.lookups == []


def test_no_lookup_without_an_agent_or_against_the_request(scheduler: ScriptedScheduler) -> None:
    assert scheduler.matched_tokens(FakeRequest(skip_reading_prefix_cache=True), 0) == 0
    scheduler.adapter.chunk = 0
    assert scheduler.matched_tokens(FakeRequest("s"), 0) == 0
    metadata = run(scheduler, step(new=("s", list(range(1, 18)), 0, 4 * CHUNK + 1)))
    assert metadata.stores == []
    assert scheduler.adapter.lookups == []


def test_a_miss_gives_its_pins_back(scheduler: ScriptedScheduler) -> None:
    request = FakeRequest()
    assert scheduler.matched_tokens(request, 0) == 0
    scheduler.allocated(request, [], 0)
    assert scheduler.adapter.released == ["r"]
    assert scheduler.adapter.jobs == set()


def test_chunks_are_stored_when_they_are_complete_and_once(scheduler: ScriptedScheduler) -> None:
    request = FakeRequest(tokens=2 * CHUNK + 40)
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, [], 0)
    blocks = list(range(50, 61))
    # Chunked prefill: the first step ends inside the second chunk.
    first = run(scheduler, step(new=("r", blocks, 0, CHUNK + 10)))
    assert list(only_store(first).block_ids) == blocks[:4]
    second = run(scheduler, step(cached=("r", None, CHUNK + 10, CHUNK + 30)))
    assert list(only_store(second).block_ids) == blocks[4:8]
    assert run(scheduler, step(cached=("r", None, 2 * CHUNK + 40, 1))).stores == []
    # Decoding completes the third chunk, whose last block came later.
    request.grow(3 * CHUNK)
    third = run(scheduler, step(cached=("r", [99], 3 * CHUNK - 1, 1)))
    assert list(only_store(third).block_ids) == [*blocks[8:], 99]
    # Computed, but its last token is not final yet: no hash, no store.
    assert run(scheduler, step(cached=("r", [100, 101, 102, 103], 3 * CHUNK, 64))).stores == []


def test_what_was_loaded_is_not_stored_again(scheduler: ScriptedScheduler) -> None:
    request = FakeRequest()
    scheduler.adapter.tokens = 3 * CHUNK
    scheduler.matched_tokens(request, 0)
    blocks = list(range(1, 18))
    scheduler.allocated(request, [blocks], 3 * CHUNK)
    run(scheduler, step())
    scheduler.load_ended("r")
    metadata = run(scheduler, step(new=("r", blocks, 3 * CHUNK, CHUNK + 1)))
    assert list(only_store(metadata).block_ids) == blocks[12:16]


def test_blocks_are_referenced_until_all_workers_read_them(scheduler: ScriptedScheduler) -> None:
    request = FakeRequest(tokens=CHUNK + 1)
    scheduler.matched_tokens(request, 0)
    blocks = scheduler.pool.get_new_blocks(5)
    ids = [block.block_id for block in blocks]
    metadata = run(scheduler, step(new=("r", ids, 0, CHUNK + 1)))
    ((transfer_id, *_),) = metadata.stores
    scheduler.finished(request)
    scheduler.pool.free_blocks(reversed(blocks))  # as vLLM does at the end of the request
    free = scheduler.pool.get_num_free_blocks()
    # The connector still holds the first four: taking all free blocks does not return them.
    taken = {block.block_id for block in scheduler.pool.get_new_blocks(free)}
    assert taken.isdisjoint(ids[:4])
    assert ids[4] in taken
    scheduler.references.ended({0: [transfer_id]})
    scheduler.references.ended({0: [transfer_id]})  # reported again by the same rank
    assert scheduler.pool.get_num_free_blocks() == 0
    scheduler.references.ended({1: [transfer_id]})
    assert {block.block_id for block in scheduler.pool.get_new_blocks(4)} == set(ids[:4])
    assert not scheduler.references._held


def test_the_blocks_of_a_rank_that_stopped_are_given_back(scheduler: ScriptedScheduler) -> None:
    free = scheduler.pool.get_num_free_blocks()
    scheduler.matched_tokens(FakeRequest(), 0)
    run(scheduler, step(new=("r", list(range(1, 18)), 0, 4 * CHUNK + 1)))
    assert scheduler.pool.get_num_free_blocks() == free - 16
    scheduler.references.rank_stopped(0)
    assert scheduler.pool.get_num_free_blocks() == free - 16
    scheduler.references.rank_stopped(1)
    assert scheduler.pool.get_num_free_blocks() == free


def test_vllm_steps_on_for_reports_but_not_for_a_frozen_agent(
    references: BlockReferences, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not references.expects_reports()
    transfer_id = references.take([1, 2])
    assert references.expects_reports()  # until the workers have it, whenever that is
    references.sent([transfer_id])
    assert references.expects_reports()
    later_s = time.monotonic() + 60.0
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    assert not references.expects_reports()
    assert len(references._held) == 1
    references.ended({0: [transfer_id], 1: [transfer_id]})
    assert not references._held


def test_null_blocks_are_neither_stored_nor_loaded(
    adapter: ScriptedAdapter, pool: BlockPool, references: BlockReferences
) -> None:
    """As a sliding window leaves them: the block table changes behind the request's back."""
    table = [0] * 6 + list(range(7, 18))
    window = LayerGroup(0, (), BLOCK, Reach("window", 10 * BLOCK + 1))
    scheduler = make_scheduler(
        adapter, pool, references, groups=[window], block_ids=lambda request_id: (table,)
    )
    request = FakeRequest()
    adapter.tokens = 4 * CHUNK
    assert scheduler.matched_tokens(request, 0) == 4 * CHUNK
    scheduler.allocated(request, [table], 4 * CHUNK)
    ((_, _, (op,), *_),) = run(scheduler, step()).loads
    # The first chunk is not loaded at all, of the second chunk the last two blocks.
    assert list(op.block_ids) == table[4:16]
    assert list(op.hashes) == request.block_hashes[7:16:4]
    assert op.skip_blocks == 2
    assert pool.blocks[0].ref_cnt == 0
    assert [pool.blocks[n].ref_cnt for n in range(1, 17)] == [0] * 6 + [1] * 10

    other = FakeRequest("s")
    other.block_hashes[:] = [b"other" + h for h in other.block_hashes]
    adapter.tokens = 0
    scheduler.matched_tokens(other, 0)
    scheduler.allocated(other, [table], 0)
    metadata = run(scheduler, step(new=("s", list(range(1, 18)), 0, 4 * CHUNK + 1)))
    # The second chunk has lost its first two blocks.
    assert list(only_store(metadata).block_ids) == table[8:16]
    assert pool.blocks[0].ref_cnt == 0


def test_a_failed_load_is_not_tried_again(scheduler: ScriptedScheduler) -> None:
    blocks = list(range(1, 18))
    request = FakeRequest("r")
    scheduler.adapter.tokens = 4 * CHUNK
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, [blocks], 4 * CHUNK)
    run(scheduler, step())
    # One rank reports the failure in one step; the load ends in a later step.
    scheduler.reported(WorkerReport({}, failed={"r"}))
    run(scheduler, step())
    scheduler.load_ended("r")
    lookups = len(scheduler.adapter.lookups)
    assert scheduler.matched_tokens(request, 0) == 0
    assert len(scheduler.adapter.lookups) == lookups
    # Computed chunks are stored, because chunks that were thought to be cached may not be.
    metadata = run(scheduler, step(new=("r", blocks, 0, 4 * CHUNK + 1)))
    assert len(only_store(metadata).block_ids) == 16


def test_a_request_aborted_in_its_load_is_reported_loaded(scheduler: ScriptedScheduler) -> None:
    request = FakeRequest()
    scheduler.adapter.tokens = 4 * CHUNK
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, [list(range(1, 18))], 4 * CHUNK)
    ((transfer_id, *_),) = run(scheduler, step()).loads
    request.over = True
    scheduler.finished(request)
    assert len(scheduler.references._held) == 1  # the agent may still be writing
    scheduler.load_ended("r")
    scheduler.load_ended("r")  # another connector's load, or reported twice
    scheduler.references.ended({0: [transfer_id], 1: [transfer_id]})
    assert not scheduler.references._held


def test_a_preempted_request_starts_over(scheduler: ScriptedScheduler) -> None:
    request = FakeRequest(tokens=2 * CHUNK + 1)
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, [], 0)
    run(scheduler, step(new=("r", list(range(1, 10)), 0, CHUNK)))
    run(scheduler, step(preempted={"r"}))
    scheduler.adapter.tokens = CHUNK
    assert scheduler.matched_tokens(request, 0) == CHUNK
    assert scheduler.adapter.lookups == [("r", 0), ("r", 0)]
    scheduler.allocated(request, [list(range(20, 29))], CHUNK)
    run(scheduler, step())
    scheduler.load_ended("r")
    blocks = list(range(20, 29))
    resumed = run(scheduler, step(cached=("r", blocks, CHUNK, CHUNK + 1), resumed=True))
    assert list(only_store(resumed).block_ids) == blocks[4:8]


def test_an_agent_that_comes_back_with_other_chunks(scheduler: ScriptedScheduler) -> None:
    request = FakeRequest()
    scheduler.adapter.tokens = None
    assert scheduler.matched_tokens(request, 0) is None
    scheduler.adapter.chunk = 2 * CHUNK
    assert scheduler.matched_tokens(request, 0) is None
    assert scheduler.adapter.ended == ["r"]
    assert scheduler.adapter.lookups == [("r", 0), ("r", 0)]


def test_what_a_lookup_does_not_find_is_stored_again(scheduler: ScriptedScheduler) -> None:
    for request_id in ("r", "s"):
        request = FakeRequest(request_id, tokens=2 * CHUNK + 1)
        scheduler.adapter.tokens = 0  # also for the second: the cache was emptied in between
        scheduler.matched_tokens(request, 0)
        scheduler.allocated(request, [], 0)
        metadata = run(scheduler, step(new=(request_id, list(range(1, 10)), 0, 2 * CHUNK + 1)))
        assert len(only_store(metadata).block_ids) == 8


def test_a_chunk_that_the_agent_dropped_is_stored_again(scheduler: ScriptedScheduler) -> None:
    computed_before(scheduler, scheduler.pool, list(range(1, 18)), 4 * CHUNK)
    for request_id, dropped in (("r", False), ("s", True), ("t", False)):
        scheduler.matched_tokens(FakeRequest(request_id), 4 * CHUNK)
        scheduler.allocated(FakeRequest(request_id), [], 0)
        blocks = list(range(1, 18))
        stores = run(scheduler, step(new=(request_id, blocks, 4 * CHUNK, 1))).stores
        assert [row[1] for row in stores] == ([] if request_id == "s" else [request_id])
        if dropped:
            scheduler.reported(WorkerReport({}, dropped=True))


def test_a_chunk_that_was_stored_recently_is_not_stored_again(scheduler: ScriptedScheduler) -> None:
    for request_id, stores in (("r", 1), ("s", 0)):
        request = FakeRequest(request_id, tokens=2 * CHUNK + 1)
        # The second has all tokens in vLLM's own blocks, so there is nothing to look up.
        scheduler.matched_tokens(request, 0 if stores else 2 * CHUNK)
        scheduler.allocated(request, [], 0)
        metadata = run(scheduler, step(new=(request_id, list(range(1, 10)), 0, 2 * CHUNK + 1)))
        assert len(metadata.stores) == stores


def store_of(
    scheduler: ConnectorScheduler,
    request_id: str,
    tokens: int = 2 * CHUNK + 1,
    lora: str | None = None,
) -> StepMetadata:
    request = FakeRequest(request_id, tokens=tokens, lora_request=lora)
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, [], 0)
    return run(scheduler, step(new=(request_id, list(range(1, 10)), 0, tokens)))


def test_names_begin_with_the_epoch_and_the_adapter(
    scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = {None: b"", "known": b"A" * 16, "unknown": None}
    monkeypatch.setattr(AdapterDigests, "digest", lambda self, lora: digests[lora])
    plain = FakeRequest(tokens=2 * CHUNK + 1).block_hashes[3::4]
    assert only_store(store_of(scheduler, "r")).hashes == plain
    assert only_store(store_of(scheduler, "s", lora="known")).hashes == [
        b"A" * 16 + h for h in plain
    ]
    assert store_of(scheduler, "t", lora="unknown").stores == []  # not identified
    assert [request_id for request_id, _ in scheduler.adapter.lookups] == ["r", "s"]
    name_weights(scheduler, "step-1")
    epoch = named_epoch("step-1")
    assert len(epoch) == 8
    assert only_store(store_of(scheduler, "u")).hashes == [epoch + h for h in plain]
    names = only_store(store_of(scheduler, "v", lora="known")).hashes
    assert names == [epoch + b"A" * 16 + h for h in plain]


def test_a_request_across_epochs_is_not_cached(scheduler: ScriptedScheduler) -> None:
    """Its blocks hold KV of two weights."""
    computing, waiting = FakeRequest("r", tokens=2 * CHUNK + 1), FakeRequest("s")
    scheduler.matched_tokens(computing, 0)
    scheduler.allocated(computing, [], 0)
    blocks = list(range(1, 10))
    assert len(run(scheduler, step(new=("r", blocks, 0, CHUNK))).stores) == 1
    scheduler.adapter.tokens = None
    assert scheduler.matched_tokens(waiting, 0) is None
    name_weights(scheduler, "step-1")
    assert run(scheduler, step(cached=("r", None, CHUNK, CHUNK + 1))).stores == []
    # Preempted, it begins again, and is still not cached.
    run(scheduler, step(preempted={"r"}))
    assert scheduler.matched_tokens(computing, 0) == 0
    # One that only waited looks up again, under the new names.
    assert scheduler.matched_tokens(waiting, 0) is None
    assert scheduler.adapter.lookups == [("r", 0), ("s", 0), ("s", 0)]


def asked_behind(
    scheduler: ConnectorScheduler, name: str, local: int, blocks: list[int], lora: str | None = None
) -> tuple[int | None, StepMetadata]:
    """What is loaded and stored of four chunks of which vLLM has ``local`` tokens of its own."""
    request = FakeRequest(name, lora_request=lora)
    found = scheduler.matched_tokens(request, local)
    if found is None:  # the step that was being scheduled may have known more
        found = scheduler.matched_tokens(request, local)
    scheduler.allocated(request, [blocks], 0)
    rest = 4 * CHUNK + 1 - local
    metadata = run(scheduler, step(new=(name, blocks, local, rest)))
    scheduler.finished(request)
    scheduler._planner.recent.clear()
    return found, metadata


def test_old_kv_in_vllms_cache_is_not_stored(scheduler: ScriptedScheduler) -> None:
    """Nor what is computed behind it; and nothing is loaded behind it."""
    old = list(range(1, 18))
    computed_before(scheduler, scheduler.pool, old, 4 * CHUNK)
    scheduler.adapter.tokens = 4 * CHUNK
    assert asked_behind(scheduler, "r", CHUNK, [*old[:4], *range(40, 53)])[0] == 3 * CHUNK
    name_weights(scheduler, "step-1")
    found, metadata = asked_behind(scheduler, "s", CHUNK, [*old[:4], *range(60, 73)])
    assert (found, metadata.stores) == (0, [])
    found, metadata = asked_behind(scheduler, "t", 4 * CHUNK, [*old[:4], *range(60, 73)])
    assert (found, metadata.stores) == (0, [])  # what "s" has computed behind it is not known
    found, metadata = asked_behind(scheduler, "u", 0, list(range(80, 97)))
    assert found == 4 * CHUNK
    assert len(only_store(metadata).hashes) == 4


def test_kv_of_an_adapter_that_was_replaced_is_not_stored(
    scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's hashes have an adapter's name and path, and so its old blocks are hits."""
    digests = {"v1": b"A" * 16, "v2": b"B" * 16}
    monkeypatch.setattr(AdapterDigests, "digest", lambda self, lora: digests[lora])
    old, new = list(range(1, 18)), list(range(40, 57))
    _, stored = asked_behind(scheduler, "r", 0, old, "v1")
    assert len(only_store(stored).hashes) == 4
    _, stored = asked_behind(scheduler, "s", 4 * CHUNK, old, "v2")
    assert stored.stores == []
    _, stored = asked_behind(scheduler, "t", CHUNK, [*old[:4], *new[4:]], "v2")
    assert stored.stores == []
    _, stored = asked_behind(scheduler, "u", 4 * CHUNK, old, "v1")  # the old one is still there
    assert len(only_store(stored).hashes) == 4
    _, stored = asked_behind(scheduler, "v", 0, list(range(60, 77)), "v2")
    assert len(only_store(stored).hashes) == 4


def test_a_block_that_is_given_away_is_not_known(scheduler: ScriptedScheduler) -> None:
    taken = scheduler.pool.get_new_blocks(17)
    blocks = [each.block_id for each in taken]
    assert asked_behind(scheduler, "r", 0, blocks)[1].stores
    assert asked_behind(scheduler, "s", 4 * CHUNK, blocks)[1].stores
    scheduler.pool.free_blocks(taken)
    for rank in (0, 1):
        scheduler.references.rank_stopped(rank)
    scheduler.pool.get_new_blocks(scheduler.pool.get_num_free_blocks())  # whoever fills them now
    assert asked_behind(scheduler, "t", 4 * CHUNK, blocks)[1].stores == []


def test_a_request_from_before_an_epoch_does_not_load(scheduler: ScriptedScheduler) -> None:
    """Preempted at once, before any store told it that its names are old."""
    request = FakeRequest("r", tokens=2 * CHUNK + 1)
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, [], 0)
    run(scheduler, step(new=("r", list(range(1, 10)), 0, CHUNK)))
    name_weights(scheduler, "step-1")
    run(scheduler, step(preempted={"r"}))
    assert scheduler.matched_tokens(request, 0) == 0
    assert scheduler.adapter.lookups == [("r", 0)]


def test_an_adapter_that_is_replaced_while_a_request_runs(
    scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed since has no name, neither the old adapter's nor the new one's."""
    digest: list[bytes | None] = [b"A" * 16]
    monkeypatch.setattr(AdapterDigests, "digest", lambda self, lora: digest[0])
    request = FakeRequest("r", tokens=3 * CHUNK + 1, lora_request="adapter")
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, [], 0)
    stored = run(scheduler, step(new=("r", list(range(1, 14)), 0, CHUNK)))
    assert len(only_store(stored).hashes) == 1
    digest[0] = b"B" * 16
    assert run(scheduler, step(cached=("r", None, CHUNK, CHUNK))).stores == []
    digest[0] = b"A" * 16  # no way back: what was computed meanwhile is unknown
    assert run(scheduler, step(cached=("r", None, 2 * CHUNK, CHUNK + 1))).stores == []


@pytest.mark.parametrize(
    ("read", "stored"), [(b"A" * 16, True), (b"B" * 16, False), (b"", False), (None, True)]
)
@pytest.mark.parametrize("ended", [False, True])
def test_an_adapter_that_is_read_as_another_than_it_was_named(
    scheduler: ScriptedScheduler,
    monkeypatch: pytest.MonkeyPatch,
    read: bytes | None,
    stored: bool,
    ended: bool,
) -> None:
    """Its files were replaced between our look and vLLM's reading, in the step that computes."""
    monkeypatch.setattr(AdapterDigests, "digest", lambda self, lora: b"A" * 16)
    lora = SimpleNamespace(lora_int_id=1, lora_path="/adapter")
    request = FakeRequest("r", tokens=2 * CHUNK + 1, lora_request=lora)
    other = FakeRequest("other", tokens=CHUNK + 1)
    waiting = FakeRequest("waiting", lora_request=lora)
    scheduler.matched_tokens(waiting, 0)
    blocks, seen = list(range(1, 10)), {} if read is None else {1: read}
    names: list[str] = []
    for each, its in ((request, blocks), (other, list(range(40, 45)))):
        scheduler.matched_tokens(each, 0)
        scheduler.allocated(each, [], 0)
        output = step(new=(each.request_id, its, 0, each.tokens))
        names += [store.request_id for store in scheduler.build_metadata(output).stores]
        if ended:
            scheduler.finished(each)
        scheduler.reported(WorkerReport({}, adapters={0: seen}))
        scheduler.output_taken(output)
    output = step()
    names += [store.request_id for store in scheduler.build_metadata(output).stores]
    scheduler.output_taken(output)
    assert names == (["r", "other"] if stored else ["other"])
    # Nor is what it has left in vLLM's own cache.
    scheduler.reported(WorkerReport({}, adapters={0: {1: b"A" * 16}}))
    if ended:
        scheduler._planner.recent.clear()
        request = FakeRequest("s", lora_request=lora)
        scheduler.matched_tokens(request, 2 * CHUNK)
        scheduler.allocated(request, [blocks], 0)
        end = run(scheduler, step(new=("s", blocks, 2 * CHUNK, 2 * CHUNK + 1)))
        assert bool(end.stores) == stored
    # One that was waiting has looked up under the wrong name.
    scheduler.matched_tokens(waiting, 0)
    assert scheduler.adapter.lookups.count(("waiting", 0)) == (1 if stored else 2)


def test_after_a_failed_step_workers_tell_their_adapters_again(
    scheduler: ScriptedScheduler,
) -> None:
    scheduler.adapters_read({0: {}})
    lost, taken = (
        step(new=(name, list(range(start, start + 9)), 0, CHUNK + 1))
        for name, start in (("r", 1), ("s", 20))
    )
    for name, output in (("r", lost), ("s", taken)):
        request = FakeRequest(name, tokens=CHUNK + 1)
        scheduler.matched_tokens(request, 0)
        scheduler.allocated(request, [], 0)
        assert not scheduler.build_metadata(output).adapters
    scheduler.output_taken(taken)
    assert scheduler.build_metadata(step()).adapters
    scheduler.reported(WorkerReport({}, adapters={0: {}}))
    assert not scheduler.build_metadata(step()).adapters


# ------------------------------------------------------- beside other connectors


@pytest.mark.parametrize("local", [0, CHUNK])
def test_what_another_connector_has_loaded_is_not_stored(
    scheduler: ScriptedScheduler, local: int
) -> None:
    """Nor what is computed behind it, by this request or by one that finds its blocks."""
    first = list(range(1, 18))
    if local:
        computed_before(scheduler, scheduler.pool, first[:4], local)
    request = FakeRequest("r")
    scheduler.matched_tokens(request, local)
    scheduler.allocated(request, [], 0)
    brought = run(scheduler, step(new=("r", first, local + CHUNK, 3 * CHUNK + 1 - local)))
    assert [len(store.ops[0].hashes) for store in brought.stores] == [1] * (local // CHUNK)
    request.grow(5 * CHUNK)
    assert run(scheduler, step(cached=("r", [20, 21, 22], 4 * CHUNK + 1, CHUNK))).stores == []
    scheduler.finished(request)
    assert asked_behind(scheduler, "s", 4 * CHUNK, first)[1].stores == []
    # Preempted, a request computes all of it itself.
    again = list(range(40, 57))
    assert len(only_store(asked_behind(scheduler, "t", 0, again)[1]).hashes) == 4


def test_a_request_that_resumes_with_a_siblings_load(scheduler: ScriptedScheduler) -> None:
    request = FakeRequest("r", tokens=2 * CHUNK + 1)
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, [], 0)
    run(scheduler, step(new=("r", list(range(1, 10)), 0, 1)))
    resumed = ("r", list(range(20, 30)), CHUNK, CHUNK + 1)
    again = step(cached=resumed, resumed=True, preempted={"r"})
    assert run(scheduler, again).stores == []
    assert run(scheduler, step(cached=("r", None, 2 * CHUNK + 1, 1))).stores == []
    resumed = ("r", list(range(40, 50)), 0, 2 * CHUNK + 1)
    stored = run(scheduler, step(cached=resumed, resumed=True, preempted={"r"}))
    assert only_store(stored).block_ids == list(range(40, 48))


# ------------------------------------------------------- steps that fail


def begun(scheduler: ConnectorScheduler, name: str, blocks: list[int], tokens: int) -> Any:
    request = FakeRequest(name)
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, [], 0)
    return step(new=(name, blocks, 0, tokens))


def test_a_step_is_stored_once_its_output_was_taken(scheduler: ScriptedScheduler) -> None:
    """Two steps are in flight, as with asynchronous scheduling."""
    first = begun(scheduler, "r", list(range(1, 18)), 2 * CHUNK)
    assert scheduler.build_metadata(first).stores == []
    second = step(cached=("r", None, 2 * CHUNK, 2 * CHUNK + 1))
    assert scheduler.build_metadata(second).stores == []
    assert scheduler.references.expects_reports()  # vLLM steps on, so that they are sent
    scheduler.output_taken(first)
    third = step(cached=("r", None, 4 * CHUNK + 1, 1))
    assert list(only_store(scheduler.build_metadata(third)).block_ids) == list(range(1, 9))
    scheduler.output_taken(second)
    scheduler.output_taken(third)
    assert list(only_store(scheduler.build_metadata(step())).block_ids) == list(range(9, 17))
    assert scheduler.build_metadata(step()).stores == []


def test_nothing_that_a_failed_step_has_computed_is_stored(scheduler: ScriptedScheduler) -> None:
    """Nor a later step's, which may have used it. vLLM goes on after faults of experts."""
    free = scheduler.pool.get_num_free_blocks()
    good = begun(scheduler, "good", list(range(20, 37)), 4 * CHUNK + 1)
    scheduler.build_metadata(good)
    scheduler.output_taken(good)
    ((sent, *_),) = scheduler.build_metadata(step()).stores
    scheduler.references.sent([sent])
    failed = begun(scheduler, "r", list(range(1, 18)), 2 * CHUNK)
    scheduler.build_metadata(failed)
    behind = step(cached=("r", None, 2 * CHUNK, 2 * CHUNK + 1))
    scheduler.build_metadata(behind)
    scheduler.output_taken(behind)
    after = scheduler.build_metadata(step())
    assert after.stores == []
    assert after.unsure == [sent]  # its end may have been reported in the failed step
    scheduler.references.ended({0: [sent], 1: [sent]})
    assert scheduler.pool.get_num_free_blocks() == free
    # What vLLM still has of it in its own cache is not stored, nor what others compute behind it.
    assert asked_behind(scheduler, "s", 2 * CHUNK, list(range(1, 18)))[1].stores == []
    assert run(scheduler, step(cached=("r", [60, 61], 4 * CHUNK + 1, 1))).stores == []
    assert len(asked_behind(scheduler, "t", 0, list(range(40, 57)))[1].stores) == 1


def test_loads_of_failed_steps_are_asked_for_while_vllm_waits(scheduler: ScriptedScheduler) -> None:
    scheduler.adapter.tokens = 2 * CHUNK
    for name, first in (("waits", 1), ("ended", 20)):
        request = FakeRequest(name)
        assert scheduler.matched_tokens(request, 0) == 2 * CHUNK
        scheduler.allocated(request, [list(range(first, first + 17))], 2 * CHUNK)
    failed = step()
    loads = scheduler.build_metadata(failed).loads
    scheduler.references.sent(each.transfer_id for each in loads)
    after = step()
    scheduler.build_metadata(after)
    scheduler.load_ended("ended")  # vLLM 0.33 saves some reports of a failed step
    scheduler.output_taken(after)
    asked = scheduler.build_metadata(step())
    assert asked.unsure == [each.transfer_id for each in loads]
    assert asked.awaited == [loads[0]]
    assert loads[0].written == list(range(1, 9))
    assert (asked.number, asked.lost_steps) == (3, (1,))
    assert not scheduler.build_metadata(step()).awaited


def test_a_step_behind_a_lost_one_may_be_lost_too(scheduler: ScriptedScheduler) -> None:
    """Its reports are asked for again, although nothing of it would be stored."""
    scheduler.adapter.tokens = 2 * CHUNK
    request = FakeRequest("r")
    assert scheduler.matched_tokens(request, 0) == 2 * CHUNK
    scheduler.allocated(request, [list(range(1, 18))], 2 * CHUNK)
    steps = [step() for _ in range(5)]
    for each in steps[:3]:
        scheduler.references.sent(load.transfer_id for load in scheduler.build_metadata(each).loads)
    scheduler.output_taken(steps[1])
    asked = scheduler.build_metadata(steps[3])
    assert [each.request_id for each in asked.awaited] == ["r"]
    assert asked.lost_steps == (1,)
    scheduler.output_taken(steps[3])
    again = scheduler.build_metadata(steps[4])
    assert [each.request_id for each in again.awaited] == ["r"]
    assert again.lost_steps == (1, 3)


@pytest.mark.parametrize("taken", [False, True])
def test_what_waits_to_be_stored_is_dropped_at_a_pause(
    scheduler: ScriptedScheduler, taken: bool
) -> None:
    """In its caller's process vLLM goes to sleep without another step, and discards the KV."""
    free = scheduler.pool.get_num_free_blocks()
    output = begun(scheduler, "r", list(range(1, 18)), 2 * CHUNK)
    scheduler.build_metadata(output)
    if taken:
        scheduler.output_taken(output)
    scheduler.finished(FakeRequest("r"))
    scheduler.paused()
    assert scheduler.pool.get_num_free_blocks() == free
    assert scheduler.adapter.ended == ["r"]
    if not taken:
        scheduler.output_taken(output)
    woken = step()
    assert scheduler.build_metadata(woken).stores == []
    scheduler.output_taken(woken)
    # Whoever computes it again stores it.
    again = begun(scheduler, "s", list(range(20, 37)), 2 * CHUNK)
    scheduler.build_metadata(again)
    scheduler.output_taken(again)
    assert list(only_store(scheduler.build_metadata(step())).block_ids) == list(range(20, 28))


def test_a_session_ends_behind_the_stores_of_its_request(scheduler: ScriptedScheduler) -> None:
    """A request of one token ends in the step that computes its prompt."""
    output = begun(scheduler, "r", list(range(1, 18)), 4 * CHUNK + 1)
    scheduler.build_metadata(output)
    scheduler.finished(FakeRequest("r"))
    scheduler.output_taken(output)
    assert scheduler.adapter.ended == []
    carries = step()
    assert only_store(scheduler.build_metadata(carries))
    assert scheduler.adapter.ended == []
    scheduler.output_taken(carries)
    assert scheduler.adapter.ended == ["r"]
    scheduler.finished(FakeRequest("without stores"))
    assert scheduler.adapter.ended == ["r", "without stores"]


def test_an_output_of_no_step_says_nothing(scheduler: ScriptedScheduler) -> None:
    """vLLM 0.33 gives its scheduler empty ones to deliver reports of steps that have failed."""
    output = begun(scheduler, "r", list(range(1, 18)), 2 * CHUNK)
    scheduler.build_metadata(output)
    scheduler.output_taken(step())
    assert scheduler.build_metadata(step()).stores == []
    scheduler.output_taken(output)
    assert len(scheduler.build_metadata(step()).stores) == 1


@pytest.mark.parametrize(("beside", "tokens"), [(True, 0), (False, 2 * CHUNK)])
def test_a_prompt_that_a_prefiller_sends_is_not_loaded(
    adapter: ScriptedAdapter,
    pool: BlockPool,
    references: BlockReferences,
    beside: bool,
    tokens: int,
) -> None:
    """Half a hit would replace the transfer of all of it. Without another connector, none comes."""
    scheduler = make_scheduler(adapter, pool, references, beside_others=beside)
    adapter.tokens = 2 * CHUNK
    params: dict[str, Any] = {"do_remote_prefill": True, "remote_host": "prefiller"}
    request = FakeRequest(kv_transfer_params=params)
    assert scheduler.matched_tokens(request, 0) == tokens
    params["do_remote_prefill"] = False  # as Nixl does it, once it has the blocks
    assert scheduler.matched_tokens(request, 0) == tokens
    assert len(adapter.lookups) == (0 if beside else 1)


# ---------------------------------------------------- prefill and decode apart


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        (None, 0),
        ({"lmcache_redis": {"stored_tokens": 2 * CHUNK}}, 2 * CHUNK),
        ({"do_remote_prefill": True}, sys.maxsize),
        ({"do_remote_prefill": True, "lmcache_redis": {"stored_tokens": CHUNK}}, CHUNK),
        ({"do_remote_prefill": True, "lmcache_redis": {"stored_tokens": 0}}, 0),
        ({"do_remote_prefill": False, "do_remote_decode": True}, 0),
    ],
)
def test_what_another_engine_is_storing_is_waited_for_once(
    scheduler: ScriptedScheduler, params: Any, tokens: int
) -> None:
    request = FakeRequest(kv_transfer_params=params)
    scheduler.matched_tokens(request, 0)
    assert scheduler.adapter.stored_tokens == tokens
    scheduler.allocated(request, [], 0)
    run(scheduler, step(new=("r", [*range(1, 9)], 0, 2 * CHUNK)))
    run(scheduler, step(preempted={"r"}))
    scheduler.matched_tokens(request, 0)
    assert scheduler.adapter.stored_tokens == 0
    assert len(scheduler.adapter.lookups) == 2


def test_a_prefill_says_how_much_of_it_is_stored(scheduler: ScriptedScheduler) -> None:
    params = {"do_remote_decode": True, "remote_host": None}
    nothing = {"lmcache_redis": {"stored_tokens": 0}}
    for name, more, told in [
        ("prefill", params, {"lmcache_redis": {"stored_tokens": 2 * CHUNK}}),
        ("known", params, {"lmcache_redis": {"stored_tokens": 2 * CHUNK}}),
        ("not stored", {**params, "lmcache_redis": {"store": False}}, nothing),
        ("not said", None, None),
        ("held back", params, nothing),
    ]:
        scheduler.adapter.names_before = name == "held back"
        request = FakeRequest(name, 2 * CHUNK + 20, kv_transfer_params=more)
        scheduler.matched_tokens(request, 0)
        scheduler.allocated(request, [], 0)
        blocks = 2 * CHUNK // BLOCK + 2
        run(scheduler, step(new=(name, [*range(1, 1 + blocks)], 0, 2 * CHUNK + 20)))
        assert scheduler.finished(request) == told
    never_seen: Any = FakeRequest("never seen", kv_transfer_params=params)
    assert scheduler.finished(never_seen) == nothing


# ------------------------------------------------------- memory


def test_a_hit_that_is_refused_while_nothing_runs_is_computed(scheduler: ScriptedScheduler) -> None:
    scheduler.adapter.tokens = 2 * CHUNK
    request = FakeRequest()
    for _ in range(3):  # a step runs: blocks may become free
        assert scheduler.matched_tokens(request, 0) == 2 * CHUNK
        run(scheduler, step(cached=("other", None, 1, 1)))
    assert scheduler.matched_tokens(request, 0) == 2 * CHUNK
    transfer = scheduler.references.take([5])  # one is in flight
    run(scheduler, step())
    assert scheduler.matched_tokens(request, 0) == 2 * CHUNK
    scheduler.references.ended({0: [transfer], 1: [transfer]})
    run(scheduler, step())
    assert scheduler.matched_tokens(request, 0) == 0
    assert scheduler.adapter.ended == ["r"]
    assert scheduler.matched_tokens(request, 0) == 0
    assert scheduler.adapter.lookups == [("r", 0)]


def test_vllm_waits_for_blocks_that_only_stores_hold(
    pool: BlockPool, references: BlockReferences, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(planning.time, "monotonic", lambda: now)
    blocks = pool.get_new_blocks(2)
    store = references.take([blocks[0].block_id], for_store=True)
    load = references.take([blocks[1].block_id])
    references.sent([store, load])
    assert not references.frees_soon()  # the request has them too
    pool.free_blocks(blocks)
    assert references.frees_soon()
    now += 1.0  # a slow agent: a request is preempted rather than held up
    assert not references.frees_soon()
    now -= 1.0
    references.ended({0: [store], 1: [store]})
    assert not references.frees_soon()  # a load may take long
    references.ended({0: [load], 1: [load]})


def test_an_aborted_load_that_fails_is_stored_again(scheduler: ScriptedScheduler) -> None:
    """Its chunks may not be cached, although a lookup has found them."""
    scheduler.adapter.tokens = 2 * CHUNK
    request = FakeRequest("r", tokens=2 * CHUNK + 1)
    assert scheduler.matched_tokens(request, 0) == 2 * CHUNK
    scheduler.allocated(request, [list(range(1, 10))], 2 * CHUNK)
    run(scheduler, step())
    request.over = True
    scheduler.finished(request)
    scheduler.adapter.tokens = 0
    scheduler.reported(WorkerReport({}, failed={"r"}))
    scheduler.load_ended("r")
    assert "r" not in scheduler._tracked
    # A lookup would tell that they are missing.
    other = FakeRequest("s", tokens=2 * CHUNK + 1, skip_reading_prefix_cache=True)
    scheduler.matched_tokens(other, 0)
    scheduler.allocated(other, [], 0)
    stored = run(scheduler, step(new=("s", list(range(1, 10)), 0, 2 * CHUNK + 1)))
    assert len(only_store(stored).hashes) == 2


def test_a_prefix_is_given_back_so_that_its_end_is_evicted_first(
    pool: BlockPool, references: BlockReferences
) -> None:
    from vllm.v1.core.kv_cache_utils import BlockHash

    blocks = pool.get_new_blocks(3)

    class Computed:
        request_id = "r"
        block_hashes: ClassVar = [BlockHash(bytes([n]) * 32) for n in range(3)]

    pool.cache_full_blocks(Computed(), blocks, 0, 3, BLOCK, 0)  # type: ignore[arg-type]
    store = references.take([each.block_id for each in blocks], for_store=True)
    pool.free_blocks(reversed(blocks))
    references.ended({0: [store], 1: [store]})
    freed = [each.block_id for each in pool.free_block_queue.get_all_free_blocks()][-3:]
    assert freed == [each.block_id for each in reversed(blocks)]


def test_recent_chunks_are_forgotten_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(planning.time, "monotonic", lambda: now)
    recent = planning.RecentChunks()
    recent.add(0, [b"chunk"])
    now += 59
    assert (0, b"chunk") in recent
    now += 2
    assert (0, b"chunk") not in recent
    assert (1, b"chunk") not in recent


# ------------------------------------------------------- what a request asks for


def wishing(**wishes: Any) -> FakeRequest:
    return FakeRequest(kv_transfer_params={"lmcache_redis": wishes})


def test_a_request_that_must_not_load_is_not_looked_up(scheduler: ScriptedScheduler) -> None:
    assert scheduler.matched_tokens(wishing(load=False), 0) == 0
    assert scheduler.adapter.lookups == []


def test_a_request_loads_at_most_what_it_allows(scheduler: ScriptedScheduler) -> None:
    assert scheduler.matched_tokens(wishing(max_load_tokens=CHUNK - 1), 0) == 0
    assert scheduler.adapter.lookups == []
    request = wishing(max_load_tokens=2 * CHUNK + 1)
    request.request_id = "s"
    scheduler.matched_tokens(request, 0)
    assert scheduler.adapter.hashes == 2


def test_a_request_that_must_not_be_stored_is_loaded(scheduler: ScriptedScheduler) -> None:
    scheduler.adapter.tokens = CHUNK
    assert scheduler.matched_tokens(wishing(store=False), 0) == CHUNK
    metadata = run(scheduler, step(new=("r", list(range(1, 18)), 0, 4 * CHUNK + 1)))
    assert metadata.stores == []


# ------------------------------------------------------- what computing costs


def test_lookups_say_what_the_engine_takes_to_compute_a_token(scheduler: ScriptedScheduler) -> None:
    scheduler.matched_tokens(FakeRequest("first"), 0)
    assert scheduler.adapter.token_s == 0.0
    output = step(new=("first", list(range(1, 18)), 0, 4 * CHUNK))
    scheduler.build_metadata(output)
    time.sleep(0.02)
    scheduler.output_taken(output)
    scheduler.matched_tokens(FakeRequest("second"), 0)
    assert scheduler.adapter.token_s > 0.02 / (4 * CHUNK)


def test_lookups_say_what_is_left_of_the_prompts_begun(scheduler: ScriptedScheduler) -> None:
    def asked(name: str) -> int:
        """What another request's lookup says, in tokens."""
        scheduler.matched_tokens(FakeRequest(name), 0)
        return round(scheduler.adapter.busy_s / scheduler.adapter.token_s)

    first = FakeRequest("first", 9 * CHUNK)
    scheduler.matched_tokens(first, 0)
    assert scheduler.adapter.busy_s == 0.0
    scheduler.allocated(first, [[*range(1, 37)]], 0)
    run(scheduler, step(new=("first", [*range(1, 37)], 0, 4 * CHUNK)))
    first.num_computed_tokens = 4 * CHUNK  # as vLLM does behind each step
    assert asked("second") == 5 * CHUNK
    scheduler.allocated(FakeRequest("third", 2 * CHUNK), [[*range(40, 48)]], 0)
    assert asked("fourth") == 7 * CHUNK
    # One is preempted, and asks again before it begins again.
    first.num_computed_tokens = 0
    scheduler.build_metadata(step(preempted={"first"}))
    assert asked("first") == 2 * CHUNK
    scheduler.finished(FakeRequest("third", 2 * CHUNK))
    assert asked("fifth") == 0


def test_an_engine_that_loads_always_says_nothing_of_its_time(scheduler: ScriptedScheduler) -> None:
    scheduler.matched_tokens(FakeRequest("first"), 0)
    assert scheduler.adapter.token_s == scheduler.adapter.busy_s == 0.0


def test_steps_of_tokens_after_the_prompt_are_not_measured(scheduler: ScriptedScheduler) -> None:
    scheduler.matched_tokens(FakeRequest(), 0)
    for computed, is_measured in ((4 * CHUNK + 1, False), (4 * CHUNK, True)):
        run(scheduler, step(new=("r", list(range(1, 31)), computed, 200)))
        scheduler.matched_tokens(FakeRequest(f"behind {computed}"), 0)
        assert (scheduler.adapter.token_s > 0.0) == is_measured
