"""What the scheduler half decides, step by step, with answers of the agent written down here.

The whole of it runs against a real agent and a real vLLM in test_vllm.py; here are the cases
that a real scheduler reaches only by luck.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from lmcache_redis.client.operations import LoadStoreOp
from lmcache_redis.integrations.vllm.metadata import CompletedStores, StepMetadata
from lmcache_redis.integrations.vllm.scheduler import SchedulerHalf

BLOCK, CHUNK = 16, 64


class ScriptedAdapter:
    """Answers as it is told, and remembers what it was asked."""

    def __init__(self) -> None:
        self.tokens: int | None = 0
        self.chunk = CHUNK
        self.lookups: list[tuple[str, int]] = []
        self.released: list[str] = []
        self.ended: list[str] = []
        self.jobs: set[str] = set()

    def chunk_size_tokens(self) -> int:
        return self.chunk

    def maybe_submit_lookup_request(
        self, request_id: str, block_hashes: Any, first_chunk: int
    ) -> None:
        if request_id not in self.jobs:
            self.jobs.add(request_id)
            self.lookups.append((request_id, first_chunk))

    def check_lookup_result(self, request_id: str, wait_s: float) -> int | None:
        return self.tokens

    def cleanup_lookup_result(self, request_id: str) -> None:
        self.jobs.discard(request_id)

    def release_lookup_locks(self, request_id: str) -> None:
        self.released.append(request_id)

    def end_session(self, request_id: str) -> None:
        self.jobs.discard(request_id)
        self.ended.append(request_id)


@dataclass
class FakeRequest:
    request_id: str = "r"
    tokens: int = 4 * CHUNK + 1
    skip_reading_prefix_cache: bool = False
    over: bool = False
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.grow(self.tokens)

    def grow(self, tokens: int) -> None:
        self.tokens = tokens
        self.block_hashes[:] = [n.to_bytes(4, "big") for n in range(tokens // BLOCK)]

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
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(scheduled.values()),
        num_scheduled_tokens=scheduled,
        preempted_req_ids=preempted,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=new[0], block_ids=(new[1],), num_computed_tokens=new[2])
        ]
        if new
        else [],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[cached[0]] if cached else [],
            new_block_ids=[(cached[1],) if cached[1] is not None else None] if cached else [],
            num_computed_tokens=[cached[2]] if cached else [],
            resumed_req_ids={cached[0]} if cached and resumed else set(),
        ),
    )


def output(**fields: Any) -> Any:
    empty = {"finished_recving": None, "invalid_block_ids": set(), "kv_connector_worker_meta": None}
    return SimpleNamespace(**{**empty, **fields})


@pytest.fixture
def adapter() -> ScriptedAdapter:
    return ScriptedAdapter()


@pytest.fixture
def half(adapter: ScriptedAdapter) -> SchedulerHalf:
    return SchedulerHalf(
        adapter,  # type: ignore[arg-type]
        world_size=2,
        block_size_tokens=BLOCK,
        hash_stride=1,
        loads=True,
        stores=True,
    )


def only_store(metadata: StepMetadata) -> LoadStoreOp:
    ((_, op),) = metadata.stores
    return op


def test_a_lookup_is_asked_once_and_answered_later(
    half: SchedulerHalf, adapter: ScriptedAdapter
) -> None:
    request = FakeRequest()
    adapter.tokens = None
    assert half.matched_tokens(request, 0) is None
    assert half.matched_tokens(request, 0) is None
    adapter.tokens = 3 * CHUNK
    assert half.matched_tokens(request, 0) == 3 * CHUNK
    assert adapter.lookups == [("r", 0)]


def test_only_what_is_not_computed_locally_is_loaded(
    half: SchedulerHalf, adapter: ScriptedAdapter
) -> None:
    request = FakeRequest()
    adapter.tokens = 4 * CHUNK
    local = CHUNK + 2 * BLOCK  # ends inside the second chunk
    assert half.matched_tokens(request, local) == 4 * CHUNK - local
    assert adapter.lookups == [("r", 1)]
    half.allocated(request, list(range(100, 117)), 4 * CHUNK - local)
    metadata = half.build_metadata(step())
    ((_, op),) = metadata.loads
    assert list(op.block_ids) == list(range(104, 116))
    assert list(op.block_hashes or ()) == request.block_hashes[4:16]
    assert op.skip_first_n_tokens == 2 * BLOCK
    assert metadata.idle
    assert half.build_metadata(step()).loads == []


def test_local_blocks_that_were_evicted_meanwhile_are_looked_up_again(
    half: SchedulerHalf, adapter: ScriptedAdapter
) -> None:
    request = FakeRequest()
    adapter.tokens = None
    assert half.matched_tokens(request, 2 * CHUNK) is None
    assert half.matched_tokens(request, 0) is None
    assert adapter.lookups == [("r", 2), ("r", 0)]
    assert adapter.ended == ["r"]


@pytest.mark.parametrize("tokens", [0, CHUNK - 1])
def test_prompts_shorter_than_a_chunk_are_not_looked_up(
    half: SchedulerHalf, adapter: ScriptedAdapter, tokens: int
) -> None:
    assert half.matched_tokens(FakeRequest(tokens=tokens), 0) == 0
    assert adapter.lookups == []


def test_nothing_is_looked_up_without_an_agent_or_when_the_request_says_so(
    half: SchedulerHalf, adapter: ScriptedAdapter
) -> None:
    assert half.matched_tokens(FakeRequest(skip_reading_prefix_cache=True), 0) == 0
    adapter.chunk = 0
    assert half.matched_tokens(FakeRequest("s"), 0) == 0
    metadata = half.build_metadata(step(new=("s", list(range(17)), 0, 4 * CHUNK + 1)))
    assert metadata.stores == []
    assert adapter.lookups == []


def test_a_miss_gives_its_pins_back(half: SchedulerHalf, adapter: ScriptedAdapter) -> None:
    request = FakeRequest()
    assert half.matched_tokens(request, 0) == 0
    half.allocated(request, [], 0)
    assert adapter.released == ["r"]
    assert adapter.jobs == set()


def test_chunks_are_stored_when_they_are_complete_and_once(
    half: SchedulerHalf, adapter: ScriptedAdapter
) -> None:
    request = FakeRequest(tokens=2 * CHUNK + 40)
    half.matched_tokens(request, 0)
    half.allocated(request, [], 0)
    blocks = list(range(50, 61))
    # Chunked prefill: the first step ends inside the second chunk.
    first = half.build_metadata(step(new=("r", blocks, 0, CHUNK + 10)))
    assert list(only_store(first).block_ids) == blocks[:4]
    second = half.build_metadata(step(cached=("r", None, CHUNK + 10, CHUNK + 30)))
    assert list(only_store(second).block_ids) == blocks[4:8]
    assert half.build_metadata(step(cached=("r", None, 2 * CHUNK + 40, 1))).stores == []
    # Decoding completes the third chunk, whose last block came later.
    request.grow(3 * CHUNK)
    third = half.build_metadata(step(cached=("r", [99], 3 * CHUNK - 1, 1)))
    assert list(only_store(third).block_ids) == [*blocks[8:], 99]
    # Computed, but its last token is not final yet: no hash, no store.
    assert half.build_metadata(step(cached=("r", [100, 101, 102, 103], 3 * CHUNK, 64))).stores == []


def test_what_was_loaded_is_not_stored_again(half: SchedulerHalf, adapter: ScriptedAdapter) -> None:
    request = FakeRequest()
    adapter.tokens = 3 * CHUNK
    half.matched_tokens(request, 0)
    blocks = list(range(17))
    half.allocated(request, blocks, 3 * CHUNK)
    half.build_metadata(step())
    half.worker_output(output(finished_recving={"r"}))
    metadata = half.build_metadata(step(new=("r", blocks, 3 * CHUNK, CHUNK + 1)))
    assert list(only_store(metadata).block_ids) == blocks[12:16]


def test_blocks_are_held_until_every_worker_has_read_them(
    half: SchedulerHalf, adapter: ScriptedAdapter
) -> None:
    request = FakeRequest(tokens=CHUNK + 1)
    half.matched_tokens(request, 0)
    half.build_metadata(step(new=("r", list(range(5)), 0, CHUNK + 1)))
    half.worker_output(output(kv_connector_worker_meta=CompletedStores({"r": 1})))
    assert half.finished(request)
    assert half.build_metadata(step()).held == {"r"}
    assert half.build_metadata(step()).held == set()

    other = FakeRequest("s", tokens=CHUNK + 1)
    other.block_hashes[:] = [b"other" + h for h in other.block_hashes]
    half.matched_tokens(other, 0)
    half.build_metadata(step(new=("s", list(range(5)), 0, CHUNK + 1)))
    half.worker_output(output(kv_connector_worker_meta=CompletedStores({"s": 2})))
    assert not half.finished(other)
    assert adapter.ended == ["r", "s"]


def test_a_failed_load_is_not_tried_again(half: SchedulerHalf, adapter: ScriptedAdapter) -> None:
    request = FakeRequest()
    adapter.tokens = 4 * CHUNK
    half.matched_tokens(request, 0)
    half.allocated(request, list(range(17)), 4 * CHUNK)
    half.build_metadata(step())
    half.worker_output(output(finished_recving={"r"}, invalid_block_ids={3}))
    assert half.matched_tokens(request, 0) == 0
    assert len(adapter.lookups) == 1
    # What is computed now is stored: what was thought to be cached may not be.
    metadata = half.build_metadata(step(new=("r", list(range(17)), 0, 4 * CHUNK + 1)))
    assert len(only_store(metadata).block_ids) == 16


def test_a_request_that_is_aborted_while_it_loads_is_only_reported_as_loaded(
    half: SchedulerHalf, adapter: ScriptedAdapter
) -> None:
    request = FakeRequest()
    adapter.tokens = 4 * CHUNK
    half.matched_tokens(request, 0)
    half.allocated(request, list(range(17)), 4 * CHUNK)
    half.build_metadata(step())
    request.over = True
    assert not half.finished(request)
    assert half.build_metadata(step()).held == set()
    half.worker_output(output(finished_recving={"r"}))
    half.worker_output(output(kv_connector_worker_meta=CompletedStores({"r": 1})))


def test_a_preempted_request_starts_over(half: SchedulerHalf, adapter: ScriptedAdapter) -> None:
    request = FakeRequest(tokens=2 * CHUNK + 1)
    half.matched_tokens(request, 0)
    half.allocated(request, [], 0)
    half.build_metadata(step(new=("r", list(range(9)), 0, CHUNK)))
    metadata = half.build_metadata(step(preempted={"r"}))
    assert metadata.preempted == ["r"]
    adapter.tokens = CHUNK
    assert half.matched_tokens(request, 0) == CHUNK
    assert adapter.lookups == [("r", 0), ("r", 0)]
    half.allocated(request, list(range(20, 29)), CHUNK)
    half.build_metadata(step())
    half.worker_output(output(finished_recving={"r"}))
    blocks = list(range(20, 29))
    resumed = half.build_metadata(step(cached=("r", blocks, CHUNK, CHUNK + 1), resumed=True))
    assert list(only_store(resumed).block_ids) == blocks[4:8]


def test_an_agent_that_comes_back_with_other_chunks(
    half: SchedulerHalf, adapter: ScriptedAdapter
) -> None:
    request = FakeRequest()
    adapter.tokens = None
    assert half.matched_tokens(request, 0) is None
    adapter.chunk = 2 * CHUNK
    assert half.matched_tokens(request, 0) is None
    assert adapter.ended == ["r"]
    assert adapter.lookups == [("r", 0), ("r", 0)]


def test_what_a_lookup_does_not_find_is_stored_again(
    half: SchedulerHalf, adapter: ScriptedAdapter
) -> None:
    for request_id in ("r", "s"):
        request = FakeRequest(request_id, tokens=2 * CHUNK + 1)
        adapter.tokens = 0  # also for the second: the cache was emptied in between
        half.matched_tokens(request, 0)
        half.allocated(request, [], 0)
        metadata = half.build_metadata(step(new=(request_id, list(range(9)), 0, 2 * CHUNK + 1)))
        assert len(only_store(metadata).block_ids) == 8


def test_what_the_agent_did_not_take_is_offered_again(
    half: SchedulerHalf, adapter: ScriptedAdapter
) -> None:
    for request_id, dropped in (("r", False), ("s", True), ("t", False)):
        half.matched_tokens(FakeRequest(request_id), 4 * CHUNK)
        half.allocated(FakeRequest(request_id), [], 0)
        stores = half.build_metadata(step(new=(request_id, list(range(17)), 4 * CHUNK, 1))).stores
        assert [row[0] for row in stores] == ([] if request_id == "s" else [request_id])
        completed = CompletedStores({request_id: 1}).aggregate(CompletedStores({}, dropped))
        half.worker_output(output(kv_connector_worker_meta=completed))


def test_what_was_stored_a_moment_ago_is_not_offered_again(
    half: SchedulerHalf, adapter: ScriptedAdapter
) -> None:
    for request_id, stores in (("r", 1), ("s", 0)):
        request = FakeRequest(request_id, tokens=2 * CHUNK + 1)
        # The second has all of it in vLLM's own blocks, and so nothing to look up.
        half.matched_tokens(request, 0 if stores else 2 * CHUNK)
        half.allocated(request, [], 0)
        metadata = half.build_metadata(step(new=(request_id, list(range(9)), 0, 2 * CHUNK + 1)))
        assert len(metadata.stores) == stores
