# SPDX-License-Identifier: Apache-2.0
"""Which blocks of which group a load or a store names, and whether there is room for a load."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id

from lmcache_redis.integrations.vllm.planning import BlockReferences, StepPlanner
from lmcache_redis.integrations.vllm.requests import (
    RequestLookup,
    RequestOptions,
    Tracked,
)
from lmcache_redis.integrations.vllm.support import layer_groups, left_out_groups
from tests.integrations.scripted import CHUNK, FakeRequest
from tests.integrations.test_groups import BLOCK, full, groups, replayed, ring, state, window

PER_CHUNK = CHUNK // BLOCK


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_gpu_blocks=128, enable_caching=True, hash_block_size=BLOCK)


def planner_of(pool: BlockPool, *specs: Any) -> StepPlanner:
    config = groups(*specs)
    references = BlockReferences(pool, world_size=1)
    left_out = left_out_groups(config)
    return StepPlanner(references, layer_groups(config), left_out, CHUNK, lambda request_id: [])


def blocks_of(pool: BlockPool, table: list[list[int]]) -> list[list[KVCacheBlock]]:
    return [[pool.blocks[block_id] for block_id in ids] for ids in table]


def tracked(chunks: int, request_id: str = "r") -> Tracked:
    request: Any = FakeRequest(request_id, chunks * CHUNK + 1)
    lookup = RequestLookup(0, None)
    return Tracked(request, b"", RequestOptions(), BLOCK, CHUNK, lookup=lookup)


def test_operations_name_groups_as_the_agent_numbers_them(pool: BlockPool) -> None:
    """A group that is left out has no number there, and its blocks are not touched."""
    planner = planner_of(pool, ring(8), full(), replayed(32), window(17))
    table = [[1], [2, 3, 4, 5], [6, 7, 8, 9], [0, 0, 0, 13]]
    (store,) = planner.store(tracked(1), blocks_of(pool, table), range(1))
    planner.load(tracked(1), table, CHUNK)
    for planned in (*planner.begin_step(), store):
        assert {op.group: list(op.block_ids) for op in planned.ops} == {0: [2, 3, 4, 5], 1: [13]}
    held = {block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null}
    assert held == {2, 3, 4, 5, 13}


def test_a_state_is_stored_where_vllms_own_cache_has_it(pool: BlockPool) -> None:
    """A block under another hash has another state, one of another group another layer's."""
    one = tracked(2)
    first, last = one.chunk_hashes()
    table = [list(range(1, 9)), list(range(9, 17))]

    def stored(*cached_as: Any) -> dict[int, list[int]]:
        pool.blocks[16].reset_hash()
        if cached_as:
            pool.blocks[16].set_block_hash(make_block_hash_with_group_id(*cached_as))
        planner = planner_of(pool, full(), state())
        (store,) = planner.store(one, blocks_of(pool, table), range(1, 2))
        return {op.group: list(op.block_ids) for op in store.ops}

    without = {0: [5, 6, 7, 8]}
    assert stored() == stored(first, 1) == stored(last, 0) == without
    assert stored(last, 1) == {**without, 1: [16]}


@pytest.mark.parametrize(
    ("specs", "needed"),
    [
        # Of two requests of 8 chunks, 4 are loaded. Each computes a chunk in a step, and has two
        # blocks more in each group.
        ([full(), window(2 * CHUNK)], 16 + 8 + 2 * (16 + 2) + 2 * (4 + 2)),
        ([full(), replayed(2 * CHUNK)], 16 + 8 + 2 * (16 + 2) + 2 * (4 + 2)),
        ([full(), ring(8)], 16 + 2 * (16 + 2) + 2 * 2),
    ],
)
def test_room_is_counted_in_the_blocks_of_all_groups(
    pool: BlockPool, specs: list[Any], needed: int
) -> None:
    planner = planner_of(pool, *specs)
    first, second = tracked(8, "first"), tracked(8, "second")
    assert not planner.needs_all
    table = [list(range(1, 17)), [0] * 8 + list(range(17, 25))]
    planner.load(first, table, 4 * CHUNK)
    pool.get_new_blocks(pool.get_num_free_blocks() - needed)
    planner.begin_step()
    assert planner.has_room(second, 4 * CHUNK)
    pool.get_new_blocks(1)
    assert not planner.has_room(second, 4 * CHUNK)
    planner.forget_load("first")  # nothing waits that cannot be preempted
    planner.begin_step()
    assert planner.has_room(second, 4 * CHUNK)


def test_full_attention_alone_needs_no_room_of_its_own(pool: BlockPool) -> None:
    planner = planner_of(pool, full())
    assert planner.needs_all
    planner.load(tracked(8, "first"), [list(range(1, 17))], 4 * CHUNK)
    pool.get_new_blocks(pool.get_num_free_blocks())
    assert planner.has_room(tracked(8, "second"), 4 * CHUNK)


class CountedBlock:
    """A block that counts how often somebody asks which one it is."""

    is_null = False

    def __init__(self, number: int) -> None:
        self.number, self.asked = number, 0

    @property
    def block_id(self) -> int:
        self.asked += 1
        return self.number


@pytest.mark.parametrize("specs", [[full()], [full(), window(8 * CHUNK)]])
@pytest.mark.parametrize("loaded_chunks", [0, 2])
def test_what_a_request_begins_with_is_looked_at_once(
    pool: BlockPool, specs: list[Any], loaded_chunks: int
) -> None:
    """Most of a long prompt is in vLLM's own cache, and this is the scheduler's time."""
    chunks, provenance = 8, planner_of(pool, *specs).provenance
    local, end = (chunks - loaded_chunks) * CHUNK, chunks * CHUNK
    blocks: Any = [
        [CountedBlock(group * 1000 + number) for number in range(end // BLOCK + 1)]
        for group in range(len(specs))
    ]
    provenance.fills(tracked(chunks + 1, "before"), blocks, local)
    counted = [each for group in blocks for each in group]
    for each in counted:
        each.asked = 0
    request = tracked(chunks + 1)
    request.origin.local_tokens, request.origin.loaded_tokens = local, end - local
    provenance.begins(request, blocks, end)
    provenance.fills(request, blocks, end + BLOCK)
    assert request.origin.known_tokens > end
    assert all(each.asked == 1 for each in counted if each.number % 1000 < local // BLOCK)
    again = tracked(chunks + 1, "again")
    again.origin.local_tokens = end + BLOCK
    provenance.begins(again, blocks, end + BLOCK)
    assert again.origin.known_tokens > end + BLOCK


def test_the_last_block_says_nothing_of_those_before(pool: BlockPool) -> None:
    """All is forgotten while a request runs that fills more blocks, or a sibling fills one anew."""
    provenance = planner_of(pool, full()).provenance
    blocks = blocks_of(pool, [list(range(1, 17))])
    before, request = tracked(4, "before"), tracked(4)
    provenance.fills(before, blocks, 2 * CHUNK)
    provenance.forget()
    provenance.fills(before, blocks, 4 * CHUNK)
    request.origin.local_tokens = 4 * CHUNK
    provenance.begins(request, blocks, 4 * CHUNK)
    assert request.origin.known_tokens == 0
