# SPDX-License-Identifier: Apache-2.0
"""Canaries in the connector's scheduler, step by step."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from lmcache_redis.chunks.names import FULL_REACH, Reach
from lmcache_redis.client.scheduler import FIRST_CANARY_TOKENS
from lmcache_redis.integrations.vllm.support import LayerGroup
from lmcache_redis.integrations.vllm.worker import StepMetadata
from tests.integrations.scripted import BLOCK, BLOCKS, CHUNK, FakeRequest, Scripted

BLOCK_IDS = BLOCKS[:16]
NAMES = [n.to_bytes(4, "big") for n in range(3, 16, 4)]  # of the chunks of a `FakeRequest`


def scripted(**options: Any) -> Scripted:
    """Three chunks are found, and every hit is a canary."""
    made = Scripted(**options)
    made.adapter.tokens, made.adapter.canary_every = 3 * CHUNK, 1
    return made


@pytest.fixture
def scheduler() -> Scripted:
    return scripted()


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


def test_a_canary_is_computed_and_compared(scheduler: Scripted) -> None:
    assert scheduler.begin(FakeRequest()) == 0
    assert scheduler.adapter.released == []
    first = scheduler.run(new=("r", BLOCK_IDS, 0, 2 * CHUNK))
    assert first.loads == []
    assert chunks_of(first) == (NAMES[:2], [])
    # Its blocks have references until they are read.
    held = [scheduler.pool.blocks[block_id].ref_cnt for block_id in BLOCK_IDS]
    assert held == [1] * 8 + [0] * 8
    ended = [first.stores[0].transfer_id]
    scheduler.references.ended({0: ended, 1: ended})
    assert scheduler.pool.blocks[1].ref_cnt == 0
    second = scheduler.run(cached=("r", None, 2 * CHUNK, 2 * CHUNK))
    assert chunks_of(second) == (NAMES[2:3], NAMES[3:])
    assert second.stores[0].compare
    (op,) = second.stores[0].ops
    assert (second.stores[0].request_id, op.block_ids) == ("r", BLOCK_IDS[8:12])


def test_what_the_lookup_did_not_find_is_no_canary(scheduler: Scripted) -> None:
    scheduler.adapter.tokens = 0
    assert scheduler.begin(FakeRequest()) == 0
    assert scheduler.adapter.released == ["r"]
    assert scheduler.adapter.jobs == set()
    metadata = scheduler.run(new=("r", BLOCK_IDS, 0, 4 * CHUNK))
    assert chunks_of(metadata) == ([], NAMES)


@pytest.mark.parametrize("local_tokens", [BLOCK, CHUNK])
def test_nothing_behind_a_local_prefix_is_a_canary(scheduler: Scripted, local_tokens: int) -> None:
    """Also if it comes later, because vLLM had no blocks for the request at first."""
    request = FakeRequest()
    assert scheduler.matched_tokens(request, 0) == 0
    scheduler.computed_before(BLOCK_IDS, local_tokens)
    for each in (request, FakeRequest("later")):
        assert scheduler.matched_tokens(each, local_tokens) == 3 * CHUNK - local_tokens


def test_a_prefix_that_another_connector_loads_ends_it(scheduler: Scripted) -> None:
    assert scheduler.begin(FakeRequest()) == 0
    metadata = scheduler.run(new=("r", BLOCK_IDS, 2 * CHUNK, 2 * CHUNK))
    assert chunks_of(metadata)[0] == []


def test_it_is_decided_once_for_a_lookup(scheduler: Scripted) -> None:
    draws = iter([0.5, 0.0])
    scheduler._lookups._canaries._draw = lambda: next(draws)
    scheduler.adapter.canary_every = 10
    request = FakeRequest()
    assert [scheduler.matched_tokens(request, 0) for _ in range(3)] == [3 * CHUNK] * 3


def test_a_preemption_ends_it(scheduler: Scripted) -> None:
    scheduler.prefill(FakeRequest(), tokens=CHUNK)
    scheduler.run(preempted={"r"})
    assert scheduler.adapter.ended == ["r"]
    scheduler.adapter.canary_every = 0
    assert scheduler.matched_tokens(FakeRequest(), 0) == 3 * CHUNK


def test_a_new_epoch_ends_it(scheduler: Scripted) -> None:
    scheduler.begin(FakeRequest())
    scheduler.name_weights("step-1")
    metadata = scheduler.run(new=("r", BLOCK_IDS, 0, 4 * CHUNK))
    assert chunks_of(metadata) == ([], [])


def test_an_engine_that_only_loads_compares_and_does_not_store() -> None:
    metadata = scripted(stores=False).prefill(FakeRequest())
    assert chunks_of(metadata) == (NAMES[:3], [])


def test_canaries_have_a_share_of_what_is_computed(scheduler: Scripted) -> None:
    asked = FIRST_CANARY_TOKENS // (3 * CHUNK) + 1
    requests = [FakeRequest(f"r{n}") for n in range(asked)]
    found = [scheduler.matched_tokens(each, 0) for each in requests]
    assert found == [0] * (asked - 1) + [3 * CHUNK]
    for _ in range(40):
        scheduler.run(new=("r0", BLOCK_IDS, 0, 4 * CHUNK))
    assert scheduler.matched_tokens(FakeRequest("later"), 0) == 0


def test_of_a_distrusted_cache_every_hit_is_a_canary(scheduler: Scripted) -> None:
    """It costs no prefill, as nothing is loaded: neither chance nor share decide."""
    scheduler._lookups._canaries._draw = lambda: 0.999
    adapter = scheduler.adapter
    adapter.tokens, adapter.pinned, adapter.canary_every = 0, 3 * CHUNK, 1000
    for number in range(2 * FIRST_CANARY_TOKENS // (3 * CHUNK)):
        assert scheduler.begin(FakeRequest(f"r{number}")) == 0
    assert adapter.released == []
    assert scheduler.begin(FakeRequest("behind"), local=CHUNK) == 0
    assert adapter.released == ["behind"]


@pytest.mark.parametrize("steps", [1, 4])
def test_of_a_window_only_what_is_pinned_is_compared(steps: int) -> None:
    groups = [
        LayerGroup(0, (), BLOCK, FULL_REACH),
        LayerGroup(1, (), BLOCK, Reach("window", CHUNK + 1)),
    ]
    ids = [BLOCK_IDS, [64 + n for n in BLOCK_IDS]]
    scheduler = scripted(groups=groups, block_ids=lambda request_id: ids)
    tokens = 4 * CHUNK // steps
    planned = scheduler.prefill(FakeRequest(), tokens=tokens).stores
    for number in range(1, steps):
        planned += scheduler.run(cached=("r", None, number * tokens, tokens)).stores
    compared: dict[int, list[bytes]] = {0: [], 1: []}
    for op in (op for each in planned if each.compare for op in each.ops):
        compared[op.group] += op.hashes
    assert compared == {0: NAMES[:3], 1: NAMES[2:3]}


def test_at_first_nothing_is_loaded_behind_local_tokens() -> None:
    scheduler = scripted(first_compared=2)
    scheduler.adapter.canary_every = 1000
    cold = FakeRequest("cold")
    assert scheduler.matched_tokens(cold, 0) == 0
    scheduler.finished(cold)
    scheduler.computed_before(BLOCK_IDS, CHUNK)
    loaded = []
    for number in range(6):
        request = FakeRequest(f"r{number}")
        loaded.append(scheduler.matched_tokens(request, CHUNK))
        assert scheduler.matched_tokens(request, CHUNK) == loaded[-1], "asked once more"
        scheduler.finished(request)
    assert loaded == [0] * 4 + [2 * CHUNK] * 2
