# SPDX-License-Identifier: Apache-2.0
"""Canaries in the connector's scheduler, step by step."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from vllm.v1.core.block_pool import BlockPool

from lmcache_redis.chunks.names import FULL_REACH, Reach
from lmcache_redis.client.scheduler import FIRST_CANARY_TOKENS
from lmcache_redis.integrations.vllm.epoch import Epochs
from lmcache_redis.integrations.vllm.planning import BlockReferences
from lmcache_redis.integrations.vllm.scheduler import ConnectorScheduler
from lmcache_redis.integrations.vllm.support import LayerGroup
from lmcache_redis.integrations.vllm.worker import StepMetadata
from tests.integrations.test_scheduler import (
    BLOCK,
    CHUNK,
    FakeRequest,
    ScriptedAdapter,
    ScriptedScheduler,
    computed_before,
    make_scheduler,
    run,
    step,
)

BLOCK_IDS = list(range(1, 17))
NAMES = [n.to_bytes(4, "big") for n in range(3, 16, 4)]  # of the chunks of a `FakeRequest`


@pytest.fixture
def adapter() -> ScriptedAdapter:
    adapter = ScriptedAdapter()
    adapter.tokens, adapter.canary_every = 3 * CHUNK, 1
    return adapter


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_gpu_blocks=128, enable_caching=True, hash_block_size=BLOCK)


@pytest.fixture
def scheduler(adapter: ScriptedAdapter, pool: BlockPool) -> ScriptedScheduler:
    return make_scheduler(adapter, pool, BlockReferences(pool, world_size=1))


def ask(scheduler: ConnectorScheduler, local_tokens: int = 0) -> int | None:
    """A lookup of request ``r``, and its blocks."""
    request = FakeRequest()
    tokens = scheduler.matched_tokens(request, local_tokens)
    if tokens is not None:
        scheduler.allocated(request, (BLOCK_IDS,), tokens)
    return tokens


def chunks_of(metadata: StepMetadata) -> tuple[list[bytes], list[bytes]]:
    """The names of the chunks that are compared, and of those that are stored."""
    compared, stored = (
        [
            n
            for each in metadata.stores
            if each.compare is kind
            for op in each.ops
            for n in op.hashes
        ]
        for kind in (True, False)
    )
    return compared, stored


def test_a_canary_is_computed_and_compared(scheduler: ScriptedScheduler) -> None:
    assert ask(scheduler) == 0
    assert scheduler.adapter.released == []
    first = run(scheduler, step(new=("r", BLOCK_IDS, 0, 2 * CHUNK)))
    assert first.loads == []
    assert chunks_of(first) == (NAMES[:2], [])
    second = run(scheduler, step(cached=("r", None, 2 * CHUNK, 2 * CHUNK)))
    assert chunks_of(second) == (NAMES[2:3], NAMES[3:])
    assert second.stores[0].compare
    (op,) = second.stores[0].ops
    assert (second.stores[0].request_id, op.block_ids) == ("r", BLOCK_IDS[8:12])


def test_its_blocks_have_references_until_they_are_read(scheduler: ScriptedScheduler) -> None:
    ask(scheduler)
    metadata = run(scheduler, step(new=("r", BLOCK_IDS, 0, 2 * CHUNK)))
    held = [scheduler.pool.blocks[block_id].ref_cnt for block_id in BLOCK_IDS]
    assert held == [1] * 8 + [0] * 8
    scheduler._planner.references.ended({0: [metadata.stores[0].transfer_id]})
    assert scheduler.pool.blocks[1].ref_cnt == 0


def test_what_the_lookup_did_not_find_is_no_canary(scheduler: ScriptedScheduler) -> None:
    scheduler.adapter.tokens = 0
    assert ask(scheduler) == 0
    assert scheduler.adapter.released == ["r"]
    metadata = run(scheduler, step(new=("r", BLOCK_IDS, 0, 4 * CHUNK)))
    assert chunks_of(metadata) == ([], NAMES)


@pytest.mark.parametrize("local_tokens", [BLOCK, CHUNK])
def test_nothing_behind_a_local_prefix_is_a_canary(
    scheduler: ScriptedScheduler, local_tokens: int
) -> None:
    computed_before(scheduler, scheduler.pool, BLOCK_IDS, local_tokens)
    assert ask(scheduler, local_tokens) == 3 * CHUNK - local_tokens


def test_a_local_prefix_that_comes_later_ends_it(scheduler: ScriptedScheduler) -> None:
    """vLLM had no blocks for it at first, and another request has computed its prefix since."""
    request = FakeRequest()
    assert scheduler.matched_tokens(request, 0) == 0
    computed_before(scheduler, scheduler.pool, BLOCK_IDS, CHUNK)
    assert scheduler.matched_tokens(request, CHUNK) == 2 * CHUNK


def test_a_prefix_that_another_connector_loads_ends_it(scheduler: ScriptedScheduler) -> None:
    assert ask(scheduler) == 0
    metadata = run(scheduler, step(new=("r", BLOCK_IDS, 2 * CHUNK, 2 * CHUNK)))
    assert chunks_of(metadata)[0] == []


def test_it_is_decided_once_for_a_lookup(scheduler: ScriptedScheduler) -> None:
    draws = iter([0.5, 0.0])
    scheduler._lookups._canaries._draw = lambda: next(draws)
    scheduler.adapter.canary_every = 10
    request = FakeRequest()
    assert [scheduler.matched_tokens(request, 0) for _ in range(3)] == [3 * CHUNK] * 3


def test_a_preemption_ends_it(scheduler: ScriptedScheduler) -> None:
    ask(scheduler)
    run(scheduler, step(new=("r", BLOCK_IDS, 0, CHUNK)))
    run(scheduler, step(preempted={"r"}))
    assert scheduler.adapter.ended == ["r"]
    scheduler.adapter.canary_every = 0
    assert scheduler.matched_tokens(FakeRequest(), 0) == 3 * CHUNK


def test_a_new_epoch_ends_it(scheduler: ScriptedScheduler) -> None:
    ask(scheduler)
    scheduler.change_epoch(Epochs.weights_may_differ, "a test")
    metadata = run(scheduler, step(new=("r", BLOCK_IDS, 0, 4 * CHUNK)))
    assert chunks_of(metadata) == ([], [])


def test_an_engine_that_only_loads_compares_and_does_not_store(
    adapter: ScriptedAdapter, pool: BlockPool
) -> None:
    scheduler = make_scheduler(adapter, pool, BlockReferences(pool, 1), stores=False)
    ask(scheduler)
    metadata = run(scheduler, step(new=("r", BLOCK_IDS, 0, 4 * CHUNK)))
    assert chunks_of(metadata) == (NAMES[:3], [])


def test_canaries_have_a_share_of_what_is_computed(scheduler: ScriptedScheduler) -> None:
    asked = FIRST_CANARY_TOKENS // (3 * CHUNK) + 1
    requests = [FakeRequest(f"r{n}") for n in range(asked)]
    found = [scheduler.matched_tokens(each, 0) for each in requests]
    assert found == [0] * (asked - 1) + [3 * CHUNK]
    for _ in range(40):
        run(scheduler, step(new=("r0", BLOCK_IDS, 0, 4 * CHUNK)))
    assert scheduler.matched_tokens(FakeRequest("later"), 0) == 0


def test_of_a_distrusted_cache_every_hit_is_a_canary(scheduler: ScriptedScheduler) -> None:
    """It costs no prefill, as nothing is loaded: neither chance nor share decide."""
    scheduler._lookups._canaries._draw = lambda: 0.999
    scheduler.adapter.tokens, scheduler.adapter.pinned, scheduler.adapter.canary_every = (
        0,
        3 * CHUNK,
        1000,
    )
    for number in range(2 * FIRST_CANARY_TOKENS // (3 * CHUNK)):
        request = FakeRequest(f"r{number}")
        assert scheduler.matched_tokens(request, 0) == 0
        scheduler.allocated(request, (BLOCK_IDS,), 0)
    assert scheduler.adapter.released == []
    behind = FakeRequest("behind")
    assert scheduler.matched_tokens(behind, CHUNK) == 0
    scheduler.allocated(behind, (BLOCK_IDS,), 0)
    assert scheduler.adapter.released == ["behind"]


@pytest.mark.parametrize("steps", [1, 4])
def test_of_a_window_only_what_is_pinned_is_compared(
    adapter: ScriptedAdapter, pool: BlockPool, steps: int
) -> None:
    groups = [
        LayerGroup(0, (), BLOCK, FULL_REACH),
        LayerGroup(1, (), BLOCK, Reach("window", CHUNK + 1)),
    ]
    ids = [BLOCK_IDS, [64 + n for n in BLOCK_IDS]]
    scheduler = make_scheduler(
        adapter,
        pool,
        BlockReferences(pool, 1),
        groups=groups,
        block_ids=lambda request_id: ids,
    )
    ask(scheduler)
    compared: dict[int, list[bytes]] = {0: [], 1: []}
    for number in range(steps):
        tokens = 4 * CHUNK // steps
        done: Any = {"new": ("r", BLOCK_IDS, 0, tokens)}
        if number:
            done = {"cached": ("r", None, number * tokens, tokens)}
        for planned in run(scheduler, step(**done)).stores:
            for op in planned.ops if planned.compare else ():
                compared[op.group] += op.hashes
    assert compared == {0: NAMES[:3], 1: NAMES[2:3]}


def test_at_first_nothing_is_loaded_behind_local_tokens() -> None:
    adapter = ScriptedAdapter()
    adapter.tokens, adapter.canary_every = 3 * CHUNK, 1000
    pool = BlockPool(num_gpu_blocks=128, enable_caching=True, hash_block_size=BLOCK)
    references = BlockReferences(pool, world_size=1)
    scheduler = make_scheduler(adapter, pool, references, first_compared=2)
    cold = FakeRequest("cold")
    assert scheduler.matched_tokens(cold, 0) == 0
    scheduler.finished(cold)
    blocks = list(range(1, 17))
    computed_before(scheduler, pool, blocks, CHUNK)
    loaded = []
    for number in range(6):
        request = FakeRequest(f"r{number}")
        loaded.append(scheduler.matched_tokens(request, CHUNK))
        assert scheduler.matched_tokens(request, CHUNK) == loaded[-1], "asked once more"
        scheduler.finished(request)
    assert loaded == [0] * 4 + [2 * CHUNK] * 2
