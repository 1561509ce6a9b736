"""The connector in the scheduler, step by step, with scripted answers of the agent.

The whole of it runs against a real agent and a real vLLM in test_vllm.py; here are the cases
that a real scheduler reaches only by luck.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from vllm.v1.core.block_pool import BlockPool

from lmcache_redis.chunks.names import FULL_REACH, Reach
from lmcache_redis.client.scheduler import Ranks
from lmcache_redis.client.worker import TransferOp
from lmcache_redis.integrations.vllm import planning
from lmcache_redis.integrations.vllm.epoch import Epochs, named_epoch
from lmcache_redis.integrations.vllm.identity.lora import AdapterDigests
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
        self.pinned: int | None = None  # if not all of it may be loaded

    def chunk_size_tokens(self) -> int:
        return self.chunk

    def begin_lookup(
        self, request_id: str, hashes: Any, first_chunk: int, token_s: float, busy_s: float
    ) -> None:
        self.token_s, self.busy_s = token_s, busy_s
        self.hashes = len(hashes)
        if request_id not in self.jobs:
            self.jobs.add(request_id)
            self.lookups.append((request_id, first_chunk))

    def hit_tokens(self, request_id: str, wait_s: float) -> int | None:
        return self.tokens

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
    beside_a_load: bool = False,
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
        has_sync_kv_loads=beside_a_load,
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
) -> ConnectorScheduler:
    groups = options.pop("groups", [LayerGroup(0, (), BLOCK, FULL_REACH)])
    hash_tokens = options.pop("hash_tokens", BLOCK)
    names = RequestNames(Epochs(None, None, bytes), pool, options.pop("media", None))
    announcer = options.pop("announcer", None)
    step_tokens = options.pop("step_tokens", 4 * CHUNK)
    block_ids = options.pop("block_ids", lambda request_id: (TABLES[request_id],))
    planner = StepPlanner(references, groups, (), step_tokens, block_ids)
    return ConnectorScheduler(
        adapter,  # type: ignore[arg-type]
        planner,
        names,
        CachePolicy(hash_tokens, **options),
        recorder or Recorder(),
        announcer,
    )


@pytest.fixture
def scheduler(
    adapter: ScriptedAdapter, pool: BlockPool, references: BlockReferences
) -> ConnectorScheduler:
    return make_scheduler(adapter, pool, references)


def name_weights(scheduler: ConnectorScheduler, weights_id: str) -> None:
    scheduler.change_epoch(lambda epochs: epochs.weights_have_id(weights_id), "an update")


def only_store(metadata: StepMetadata) -> TransferOp:
    ((_, _, (op,), *_),) = metadata.stores
    return op


def test_a_lookup_is_asked_once_and_answered_later(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    request = FakeRequest()
    adapter.tokens = None
    assert scheduler.matched_tokens(request, 0) is None
    assert scheduler.matched_tokens(request, 0) is None
    adapter.tokens = 3 * CHUNK
    assert scheduler.matched_tokens(request, 0) == 3 * CHUNK
    assert adapter.lookups == [("r", 0)]


def test_the_first_lookup_waits_until_all_workers_have_reported(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    adapter.ranks = Ranks(2)
    adapter.tokens = 3 * CHUNK
    request = FakeRequest()
    assert scheduler.matched_tokens(request, 0) is None
    scheduler.reported(WorkerReport({}, places={0: None}))
    assert scheduler.matched_tokens(request, 0) is None
    assert adapter.lookups == []
    scheduler.reported(WorkerReport({}, places={1: None}))
    assert scheduler.matched_tokens(request, 0) == 3 * CHUNK
    assert adapter.lookups == [("r", 0)]


def test_only_what_is_not_computed_locally_is_loaded(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    request = FakeRequest()
    adapter.tokens = 4 * CHUNK
    local = CHUNK + 2 * BLOCK  # ends inside the second chunk
    assert scheduler.matched_tokens(request, local) == 4 * CHUNK - local
    assert adapter.lookups == [("r", 1)]
    scheduler.allocated(request, [list(range(100, 117))], 4 * CHUNK - local)
    metadata = scheduler.build_metadata(step())
    ((_, _, (op,), *_),) = metadata.loads
    assert list(op.block_ids) == list(range(104, 116))
    assert list(op.hashes) == request.block_hashes[7:16:4]
    assert op.skip_blocks == 2
    assert metadata.idle
    assert scheduler.build_metadata(step()).loads == []


def test_a_request_without_blocks_lets_a_loaded_one_go_on(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    """vLLM 0.27 to 0.30 stop for ever at the first request that they cannot allocate blocks for."""
    loaded, blocked = FakeRequest("r"), FakeRequest("s")
    adapter.tokens = 4 * CHUNK
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


def test_evicted_local_blocks_are_looked_up_again(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    request = FakeRequest()
    adapter.tokens = None
    assert scheduler.matched_tokens(request, 2 * CHUNK) is None
    assert scheduler.matched_tokens(request, 0) is None
    assert adapter.lookups == [("r", 2), ("r", 0)]
    assert adapter.ended == ["r"]


@pytest.mark.parametrize("tokens", [0, CHUNK - 1])
def test_prompts_shorter_than_a_chunk_are_not_looked_up(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter, tokens: int
) -> None:
    assert scheduler.matched_tokens(FakeRequest(tokens=tokens), 0) == 0
    assert adapter.lookups == []


def test_no_lookup_without_an_agent_or_against_the_request(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    assert scheduler.matched_tokens(FakeRequest(skip_reading_prefix_cache=True), 0) == 0
    adapter.chunk = 0
    assert scheduler.matched_tokens(FakeRequest("s"), 0) == 0
    metadata = scheduler.build_metadata(step(new=("s", list(range(1, 18)), 0, 4 * CHUNK + 1)))
    assert metadata.stores == []
    assert adapter.lookups == []


def test_a_miss_gives_its_pins_back(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    request = FakeRequest()
    assert scheduler.matched_tokens(request, 0) == 0
    scheduler.allocated(request, [], 0)
    assert adapter.released == ["r"]
    assert adapter.jobs == set()


def test_chunks_are_stored_when_they_are_complete_and_once(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    request = FakeRequest(tokens=2 * CHUNK + 40)
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, [], 0)
    blocks = list(range(50, 61))
    # Chunked prefill: the first step ends inside the second chunk.
    first = scheduler.build_metadata(step(new=("r", blocks, 0, CHUNK + 10)))
    assert list(only_store(first).block_ids) == blocks[:4]
    second = scheduler.build_metadata(step(cached=("r", None, CHUNK + 10, CHUNK + 30)))
    assert list(only_store(second).block_ids) == blocks[4:8]
    assert scheduler.build_metadata(step(cached=("r", None, 2 * CHUNK + 40, 1))).stores == []
    # Decoding completes the third chunk, whose last block came later.
    request.grow(3 * CHUNK)
    third = scheduler.build_metadata(step(cached=("r", [99], 3 * CHUNK - 1, 1)))
    assert list(only_store(third).block_ids) == [*blocks[8:], 99]
    # Computed, but its last token is not final yet: no hash, no store.
    assert (
        scheduler.build_metadata(step(cached=("r", [100, 101, 102, 103], 3 * CHUNK, 64))).stores
        == []
    )


def test_what_was_loaded_is_not_stored_again(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    request = FakeRequest()
    adapter.tokens = 3 * CHUNK
    scheduler.matched_tokens(request, 0)
    blocks = list(range(1, 18))
    scheduler.allocated(request, [blocks], 3 * CHUNK)
    scheduler.build_metadata(step())
    scheduler.load_ended("r")
    metadata = scheduler.build_metadata(step(new=("r", blocks, 3 * CHUNK, CHUNK + 1)))
    assert list(only_store(metadata).block_ids) == blocks[12:16]


def test_blocks_are_referenced_until_all_workers_read_them(
    scheduler: ConnectorScheduler, references: BlockReferences, pool: BlockPool
) -> None:
    request = FakeRequest(tokens=CHUNK + 1)
    scheduler.matched_tokens(request, 0)
    blocks = pool.get_new_blocks(5)
    ids = [block.block_id for block in blocks]
    metadata = scheduler.build_metadata(step(new=("r", ids, 0, CHUNK + 1)))
    ((transfer_id, *_),) = metadata.stores
    scheduler.finished(request)
    pool.free_blocks(reversed(blocks))  # as vLLM does at the end of the request
    free = pool.get_num_free_blocks()
    # The connector still holds the first four: taking all free blocks does not return them.
    taken = {block.block_id for block in pool.get_new_blocks(free)}
    assert taken.isdisjoint(ids[:4])
    assert ids[4] in taken
    references.ended({0: [transfer_id]})
    references.ended({0: [transfer_id]})  # reported again by the same rank
    assert pool.get_num_free_blocks() == 0
    references.ended({1: [transfer_id]})
    assert {block.block_id for block in pool.get_new_blocks(4)} == set(ids[:4])
    assert not references._held


def test_the_blocks_of_a_rank_that_stopped_are_given_back(
    scheduler: ConnectorScheduler, references: BlockReferences, pool: BlockPool
) -> None:
    free = pool.get_num_free_blocks()
    scheduler.matched_tokens(FakeRequest(), 0)
    scheduler.build_metadata(step(new=("r", list(range(1, 18)), 0, 4 * CHUNK + 1)))
    assert pool.get_num_free_blocks() == free - 16
    references.rank_stopped(0)
    assert pool.get_num_free_blocks() == free - 16
    references.rank_stopped(1)
    assert pool.get_num_free_blocks() == free


def test_vllm_steps_on_for_reports_but_not_for_a_frozen_agent(
    references: BlockReferences, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not references.expects_reports()
    transfer_id = references.take([1, 2])
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
    ((_, _, (op,), *_),) = scheduler.build_metadata(step()).loads
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
    metadata = scheduler.build_metadata(step(new=("s", list(range(1, 18)), 0, 4 * CHUNK + 1)))
    # The second chunk has lost its first two blocks.
    assert list(only_store(metadata).block_ids) == table[8:16]
    assert pool.blocks[0].ref_cnt == 0


def test_a_failed_load_is_not_tried_again(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    blocks = list(range(1, 18))
    request = FakeRequest("r")
    adapter.tokens = 4 * CHUNK
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, [blocks], 4 * CHUNK)
    scheduler.build_metadata(step())
    # One rank reports the failure in one step; the load ends in a later step.
    scheduler.reported(WorkerReport({}, failed={"r"}))
    scheduler.build_metadata(step())
    scheduler.load_ended("r")
    lookups = len(adapter.lookups)
    assert scheduler.matched_tokens(request, 0) == 0
    assert len(adapter.lookups) == lookups
    # Computed chunks are stored, because chunks that were thought to be cached may not be.
    metadata = scheduler.build_metadata(step(new=("r", blocks, 0, 4 * CHUNK + 1)))
    assert len(only_store(metadata).block_ids) == 16


def test_a_request_aborted_in_its_load_is_reported_loaded(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter, references: BlockReferences
) -> None:
    request = FakeRequest()
    adapter.tokens = 4 * CHUNK
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, [list(range(1, 18))], 4 * CHUNK)
    ((transfer_id, *_),) = scheduler.build_metadata(step()).loads
    request.over = True
    scheduler.finished(request)
    assert len(references._held) == 1  # the agent may still be writing
    scheduler.load_ended("r")
    scheduler.load_ended("r")  # another connector's load, or reported twice
    references.ended({0: [transfer_id], 1: [transfer_id]})
    assert not references._held


def test_a_preempted_request_starts_over(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    request = FakeRequest(tokens=2 * CHUNK + 1)
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, [], 0)
    scheduler.build_metadata(step(new=("r", list(range(1, 10)), 0, CHUNK)))
    scheduler.build_metadata(step(preempted={"r"}))
    adapter.tokens = CHUNK
    assert scheduler.matched_tokens(request, 0) == CHUNK
    assert adapter.lookups == [("r", 0), ("r", 0)]
    scheduler.allocated(request, [list(range(20, 29))], CHUNK)
    scheduler.build_metadata(step())
    scheduler.load_ended("r")
    blocks = list(range(20, 29))
    resumed = scheduler.build_metadata(step(cached=("r", blocks, CHUNK, CHUNK + 1), resumed=True))
    assert list(only_store(resumed).block_ids) == blocks[4:8]


def test_an_agent_that_comes_back_with_other_chunks(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    request = FakeRequest()
    adapter.tokens = None
    assert scheduler.matched_tokens(request, 0) is None
    adapter.chunk = 2 * CHUNK
    assert scheduler.matched_tokens(request, 0) is None
    assert adapter.ended == ["r"]
    assert adapter.lookups == [("r", 0), ("r", 0)]


def test_what_a_lookup_does_not_find_is_stored_again(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    for request_id in ("r", "s"):
        request = FakeRequest(request_id, tokens=2 * CHUNK + 1)
        adapter.tokens = 0  # also for the second: the cache was emptied in between
        scheduler.matched_tokens(request, 0)
        scheduler.allocated(request, [], 0)
        metadata = scheduler.build_metadata(
            step(new=(request_id, list(range(1, 10)), 0, 2 * CHUNK + 1))
        )
        assert len(only_store(metadata).block_ids) == 8


def test_a_chunk_that_the_agent_dropped_is_stored_again(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    for request_id, dropped in (("r", False), ("s", True), ("t", False)):
        scheduler.matched_tokens(FakeRequest(request_id), 4 * CHUNK)
        scheduler.allocated(FakeRequest(request_id), [], 0)
        blocks = list(range(1, 18))
        stores = scheduler.build_metadata(step(new=(request_id, blocks, 4 * CHUNK, 1))).stores
        assert [row[1] for row in stores] == ([] if request_id == "s" else [request_id])
        if dropped:
            scheduler.reported(WorkerReport({}, dropped=True))


def test_a_chunk_that_was_stored_recently_is_not_stored_again(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    for request_id, stores in (("r", 1), ("s", 0)):
        request = FakeRequest(request_id, tokens=2 * CHUNK + 1)
        # The second has all tokens in vLLM's own blocks, so there is nothing to look up.
        scheduler.matched_tokens(request, 0 if stores else 2 * CHUNK)
        scheduler.allocated(request, [], 0)
        metadata = scheduler.build_metadata(
            step(new=(request_id, list(range(1, 10)), 0, 2 * CHUNK + 1))
        )
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
    return scheduler.build_metadata(step(new=(request_id, list(range(1, 10)), 0, tokens)))


def test_names_begin_with_the_epoch_and_the_adapter(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = {None: b"", "known": b"A" * 16, "unknown": None}
    monkeypatch.setattr(AdapterDigests, "digest", lambda self, lora: digests[lora])
    plain = FakeRequest(tokens=2 * CHUNK + 1).block_hashes[3::4]
    assert only_store(store_of(scheduler, "r")).hashes == plain
    assert only_store(store_of(scheduler, "s", lora="known")).hashes == [
        b"A" * 16 + h for h in plain
    ]
    assert store_of(scheduler, "t", lora="unknown").stores == []  # not identified
    assert [request_id for request_id, _ in adapter.lookups] == ["r", "s"]
    name_weights(scheduler, "step-1")
    epoch = named_epoch("step-1")
    assert len(epoch) == 8
    assert only_store(store_of(scheduler, "u")).hashes == [epoch + h for h in plain]
    names = only_store(store_of(scheduler, "v", lora="known")).hashes
    assert names == [epoch + b"A" * 16 + h for h in plain]


def test_a_request_across_epochs_is_not_cached(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    """Its blocks hold KV of two weights."""
    computing, waiting = FakeRequest("r", tokens=2 * CHUNK + 1), FakeRequest("s")
    scheduler.matched_tokens(computing, 0)
    scheduler.allocated(computing, [], 0)
    blocks = list(range(1, 10))
    assert len(scheduler.build_metadata(step(new=("r", blocks, 0, CHUNK))).stores) == 1
    adapter.tokens = None
    assert scheduler.matched_tokens(waiting, 0) is None
    name_weights(scheduler, "step-1")
    assert scheduler.build_metadata(step(cached=("r", None, CHUNK, CHUNK + 1))).stores == []
    # Preempted, it begins again, and is still not cached.
    scheduler.build_metadata(step(preempted={"r"}))
    assert scheduler.matched_tokens(computing, 0) == 0
    # One that only waited looks up again, under the new names.
    assert scheduler.matched_tokens(waiting, 0) is None
    assert adapter.lookups == [("r", 0), ("s", 0), ("s", 0)]


def test_nothing_is_stored_while_vllm_may_hit_old_kv(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter, pool: BlockPool
) -> None:
    from vllm.v1.core.kv_cache_utils import BlockHash

    class Computed:
        request_id = "old"
        block_hashes: ClassVar = [BlockHash(b"h" * 32)]

    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks(Computed(), [block], 0, 1, BLOCK, 0)  # type: ignore[arg-type]
    pool.free_blocks([block])
    assert store_of(scheduler, "r").stores
    name_weights(scheduler, "step-1")
    assert store_of(scheduler, "s").stores == []
    pool.cached_block_hash_to_block = type(pool.cached_block_hash_to_block)()  # vLLM's own reset
    assert store_of(scheduler, "t").stores
    name_weights(scheduler, "step-2")  # with nothing in vLLM's cache there is nothing to wait for
    assert store_of(scheduler, "u").stores


def test_a_request_from_before_an_epoch_does_not_load(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    """Preempted at once, before any store told it that its names are old."""
    request = FakeRequest("r", tokens=2 * CHUNK + 1)
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, [], 0)
    scheduler.build_metadata(step(new=("r", list(range(1, 10)), 0, CHUNK)))
    name_weights(scheduler, "step-1")
    scheduler.build_metadata(step(preempted={"r"}))
    assert scheduler.matched_tokens(request, 0) == 0
    assert adapter.lookups == [("r", 0)]


def test_an_adapter_that_is_replaced_while_a_request_runs(
    scheduler: ConnectorScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed since has no name, neither the old adapter's nor the new one's."""
    digest: list[bytes | None] = [b"A" * 16]
    monkeypatch.setattr(AdapterDigests, "digest", lambda self, lora: digest[0])
    request = FakeRequest("r", tokens=3 * CHUNK + 1, lora_request="adapter")
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, [], 0)
    stored = scheduler.build_metadata(step(new=("r", list(range(1, 14)), 0, CHUNK)))
    assert len(only_store(stored).hashes) == 1
    digest[0] = b"B" * 16
    assert scheduler.build_metadata(step(cached=("r", None, CHUNK, CHUNK))).stores == []
    digest[0] = b"A" * 16  # no way back: what was computed meanwhile is unknown
    assert scheduler.build_metadata(step(cached=("r", None, 2 * CHUNK, CHUNK + 1))).stores == []


# ------------------------------------------------------- beside other connectors


def test_what_a_sibling_loads_is_stored_when_a_token_has_come(
    scheduler: ConnectorScheduler,
) -> None:
    """Until then it may report that its load failed, and the blocks hold something else."""
    request = FakeRequest("r", tokens=3 * CHUNK + 1)
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, [], 0)
    blocks = list(range(1, 14))
    begun = step(new=("r", blocks, 2 * CHUNK, CHUNK + 1), beside_a_load=True)
    assert scheduler.build_metadata(begun).stores == []
    # The next step is planned before the report of this one has come.
    assert scheduler.build_metadata(step(cached=("r", None, 3 * CHUNK + 1, 1))).stores == []
    request.num_output_tokens = 1
    stored = scheduler.build_metadata(step(cached=("r", None, 3 * CHUNK + 2, 1)))
    assert len(only_store(stored).hashes) == 3


def test_a_request_that_resumes_with_a_siblings_load(scheduler: ConnectorScheduler) -> None:
    request = FakeRequest("r", tokens=2 * CHUNK + 1)
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, [], 0)
    scheduler.build_metadata(step(new=("r", list(range(1, 10)), 0, 1)))
    request.num_output_tokens = 5
    resumed = ("r", list(range(20, 30)), CHUNK, CHUNK + 1)
    again = step(cached=resumed, resumed=True, preempted={"r"}, beside_a_load=True)
    assert scheduler.build_metadata(again).stores == []
    assert scheduler.build_metadata(step(cached=("r", None, 2 * CHUNK + 1, 1))).stores == []
    request.num_output_tokens = 6
    stored = scheduler.build_metadata(step(cached=("r", None, 2 * CHUNK + 2, 1)))
    assert only_store(stored).block_ids == list(range(20, 28))


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


# ------------------------------------------------------- memory


def test_a_hit_that_is_refused_while_nothing_runs_is_computed(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter, references: BlockReferences
) -> None:
    adapter.tokens = 2 * CHUNK
    request = FakeRequest()
    for _ in range(3):  # a step runs: blocks may become free
        assert scheduler.matched_tokens(request, 0) == 2 * CHUNK
        scheduler.build_metadata(step(cached=("other", None, 1, 1)))
    assert scheduler.matched_tokens(request, 0) == 2 * CHUNK
    transfer = references.take([5])  # one is in flight
    scheduler.build_metadata(step())
    assert scheduler.matched_tokens(request, 0) == 2 * CHUNK
    references.ended({0: [transfer], 1: [transfer]})
    scheduler.build_metadata(step())
    assert scheduler.matched_tokens(request, 0) == 0
    assert adapter.ended == ["r"]
    assert scheduler.matched_tokens(request, 0) == 0
    assert adapter.lookups == [("r", 0)]


def test_vllm_waits_for_blocks_that_only_stores_hold(
    pool: BlockPool, references: BlockReferences, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(planning.time, "monotonic", lambda: now)
    blocks = pool.get_new_blocks(2)
    store = references.take([blocks[0].block_id], for_store=True)
    load = references.take([blocks[1].block_id])
    assert not references.frees_soon()  # the request has them too
    pool.free_blocks(blocks)
    assert references.frees_soon()
    now += 1.0  # a slow agent: a request is preempted rather than held up
    assert not references.frees_soon()
    now -= 1.0
    references.ended({0: [store], 1: [store]})
    assert not references.frees_soon()  # a load may take long
    references.ended({0: [load], 1: [load]})


def test_an_aborted_load_that_fails_is_stored_again(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    """Its chunks may not be cached, although a lookup has found them."""
    adapter.tokens = 2 * CHUNK
    request = FakeRequest("r", tokens=2 * CHUNK + 1)
    assert scheduler.matched_tokens(request, 0) == 2 * CHUNK
    scheduler.allocated(request, [list(range(1, 10))], 2 * CHUNK)
    scheduler.build_metadata(step())
    request.over = True
    scheduler.finished(request)
    adapter.tokens = 0
    scheduler.reported(WorkerReport({}, failed={"r"}))
    scheduler.load_ended("r")
    assert "r" not in scheduler._tracked
    # A lookup would tell that they are missing.
    other = FakeRequest("s", tokens=2 * CHUNK + 1, skip_reading_prefix_cache=True)
    scheduler.matched_tokens(other, 0)
    scheduler.allocated(other, [], 0)
    stored = scheduler.build_metadata(step(new=("s", list(range(1, 10)), 0, 2 * CHUNK + 1)))
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


def test_a_request_that_must_not_load_is_not_looked_up(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    assert scheduler.matched_tokens(wishing(load=False), 0) == 0
    assert adapter.lookups == []


def test_a_request_loads_at_most_what_it_allows(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    assert scheduler.matched_tokens(wishing(max_load_tokens=CHUNK - 1), 0) == 0
    assert adapter.lookups == []
    request = wishing(max_load_tokens=2 * CHUNK + 1)
    request.request_id = "s"
    scheduler.matched_tokens(request, 0)
    assert adapter.hashes == 2


def test_a_request_that_must_not_be_stored_is_loaded(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    adapter.tokens = CHUNK
    assert scheduler.matched_tokens(wishing(store=False), 0) == CHUNK
    metadata = scheduler.build_metadata(step(new=("r", list(range(1, 18)), 0, 4 * CHUNK + 1)))
    assert metadata.stores == []


# ------------------------------------------------------- what computing costs


def test_lookups_say_what_the_engine_takes_to_compute_a_token(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    scheduler.matched_tokens(FakeRequest("first"), 0)
    assert adapter.token_s == 0.0
    metadata = scheduler.build_metadata(step(new=("first", list(range(1, 18)), 0, 4 * CHUNK)))
    assert metadata.number
    time.sleep(0.02)
    scheduler.reported(WorkerReport({}, step=metadata.number))
    scheduler.matched_tokens(FakeRequest("second"), 0)
    assert adapter.token_s > 0.02 / (4 * CHUNK)


def test_lookups_say_what_is_left_of_the_prompts_begun(
    scheduler: ConnectorScheduler, adapter: ScriptedAdapter
) -> None:
    def asked(name: str) -> int:
        """What another request's lookup says, in tokens."""
        scheduler.matched_tokens(FakeRequest(name), 0)
        return round(adapter.busy_s / adapter.token_s)

    first = FakeRequest("first", 9 * CHUNK)
    scheduler.matched_tokens(first, 0)
    assert adapter.busy_s == 0.0
    scheduler.allocated(first, [[*range(1, 37)]], 0)
    metadata = scheduler.build_metadata(step(new=("first", [*range(1, 37)], 0, 4 * CHUNK)))
    first.num_computed_tokens = 4 * CHUNK  # as vLLM does behind each step
    scheduler.reported(WorkerReport({}, step=metadata.number))
    assert asked("second") == 5 * CHUNK
    scheduler.allocated(FakeRequest("third", 2 * CHUNK), [[*range(40, 48)]], 0)
    assert asked("fourth") == 7 * CHUNK
    # One is preempted, and asks again before it begins again.
    first.num_computed_tokens = 0
    scheduler.build_metadata(step(preempted={"first"}))
    assert asked("first") == 2 * CHUNK
    scheduler.finished(FakeRequest("third", 2 * CHUNK))
    assert asked("fifth") == 0


def test_steps_of_tokens_after_the_prompt_are_not_measured(scheduler: ConnectorScheduler) -> None:
    request = FakeRequest()
    scheduler.matched_tokens(request, 0)
    scheduler.build_metadata(step(new=("r", list(range(1, 18)), 0, 4 * CHUNK + 1)))
    assert scheduler.build_metadata(step(cached=("r", None, 4 * CHUNK + 1, 200))).number == 0
    assert scheduler.build_metadata(step(cached=("r", None, 4 * CHUNK, 200))).number
