# SPDX-License-Identifier: Apache-2.0
"""Copy plans against gather and scatter byte by byte, neighbours included."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.device.calls import CopyPlanner, check_slots
from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.errors import DeviceError
from tests.device.layouts import (
    Paged,
    blocks_of,
    empty_slots,
    filled_slots,
    paged,
    stripe_sizes,
)

STRIPES = st.integers(1, 700)


class Copy(NamedTuple):
    storage: int
    device_offset: int
    slot: int
    slot_offset: int
    nbytes: int


@given(paged(), st.data(), STRIPES)
def test_gather_equals_the_reference(case: Paged, data: st.DataObject, stripe: int) -> None:
    ids = data.draw(blocks_of(case.layout.num_blocks))
    skip = data.draw(st.integers(0, len(ids)))
    expected = case.chunk(ids, skip)
    slots, sizes = empty_slots(len(expected), stripe), stripe_sizes(len(expected), stripe)
    for storage, offset, slot, at, nbytes in CopyPlanner(case.layout).copies(ids, sizes, skip):
        slots[slot][at : at + nbytes] = case.storages[storage][offset : offset + nbytes]
    want = filled_slots(expected, stripe)
    assert [bytes(slot) for slot in slots] == [bytes(slot) for slot in want]


@given(paged(), st.data(), STRIPES)
def test_scatter_equals_the_reference(case: Paged, data: st.DataObject, stripe: int) -> None:
    ids = data.draw(blocks_of(case.layout.num_blocks, unique=True))
    skip = data.draw(st.integers(0, len(ids)))
    chunk = np.random.default_rng(stripe).bytes(len(case.chunk(ids)))
    expected = case.with_chunk(ids, chunk, skip)
    slots, sizes = filled_slots(chunk, stripe), stripe_sizes(len(chunk), stripe)
    for storage, offset, slot, at, nbytes in CopyPlanner(case.layout).copies(ids, sizes, skip):
        case.storages[storage][offset : offset + nbytes] = slots[slot][at : at + nbytes]
    for after, want in zip(case.storages, expected, strict=True):
        assert np.array_equal(after, want)


@given(paged(), st.data(), STRIPES)
def test_a_plan_is_in_order_in_bounds_and_within_stripes(
    case: Paged, data: st.DataObject, stripe: int
) -> None:
    ids = data.draw(blocks_of(case.layout.num_blocks))
    sizes = stripe_sizes(len(case.chunk(ids)), stripe)
    copies = map(Copy._make, CopyPlanner(case.layout).copies(ids, sizes))
    at = 0
    for copy in copies:
        assert copy.nbytes > 0
        assert sum(sizes[: copy.slot]) + copy.slot_offset == at
        assert copy.slot_offset + copy.nbytes <= sizes[copy.slot]
        assert 0 <= copy.device_offset <= case.sizes[copy.storage] - copy.nbytes
        at += copy.nbytes
    assert at == len(case.chunk(ids))


@given(paged(), st.data(), STRIPES)
def test_a_planner_that_has_planned_before_plans_the_same(
    case: Paged, data: st.DataObject, stripe: int
) -> None:
    planner = CopyPlanner(case.layout)
    for _ in range(3):
        ids = data.draw(blocks_of(case.layout.num_blocks))
        sizes = stripe_sizes(len(case.chunk(ids)), stripe)
        assert planner.copies(ids, sizes) == CopyPlanner(case.layout).copies(ids, sizes)


LAYOUT = KVLayout(
    identity=(),
    dtype="uint8",
    device="cpu",
    block_size_tokens=16,
    num_blocks=100,
    segments=(Segment(0, 0, 64, 64), Segment(0, 6400, 64, 64), Segment(1, 0, 64, 96)),
)


class TestRuns:
    def test_neighbouring_blocks_with_touching_pages_are_one_copy(self) -> None:
        assert CopyPlanner(LAYOUT).copies([7, 8, 9, 3], [768]) == [
            Copy(0, 7 * 64, 0, 0, 192),
            Copy(0, 3 * 64, 0, 192, 64),
            Copy(0, 6400 + 7 * 64, 0, 256, 192),
            Copy(0, 6400 + 3 * 64, 0, 448, 64),
            Copy(1, 7 * 96, 0, 512, 64),
            Copy(1, 8 * 96, 0, 576, 64),
            Copy(1, 9 * 96, 0, 640, 64),
            Copy(1, 3 * 96, 0, 704, 64),
        ]

    def test_a_new_run_begins_after_the_skipped_blocks(self) -> None:
        assert CopyPlanner(LAYOUT).copies([7, 8, 9], [576], 2) == [
            Copy(0, 9 * 64, 0, 128, 64),
            Copy(0, 6400 + 9 * 64, 0, 320, 64),
            Copy(1, 9 * 96, 0, 512, 64),
        ]

    def test_a_copy_ends_with_its_stripe(self) -> None:
        assert CopyPlanner(LAYOUT).copies([0, 1], [100, 284])[:3] == [
            Copy(0, 0, 0, 0, 100),
            Copy(0, 100, 1, 0, 28),
            Copy(0, 6400, 1, 28, 128),
        ]

    def test_nothing_to_copy(self) -> None:
        assert CopyPlanner(LAYOUT).copies([], []) == []
        assert CopyPlanner(LAYOUT).copies([5, 6], [384], 2) == []

    def test_a_large_model_needs_hundreds_of_copies_not_thousands(self) -> None:
        """80 layers, K and V apart, 16 blocks in a row, 2 MiB stripes of a 80 MiB chunk."""
        page = 32 << 10
        segments = tuple(Segment(layer, 0, page, page) for layer in range(160))
        layout = KVLayout((), "uint8", "cpu", 16, 100, segments)
        assert len(CopyPlanner(layout).copies(range(40, 56), [2 << 20] * 40)) <= 200


class TestBounds:
    @pytest.mark.parametrize("ids", [[100], [-1], [0, 2**63 - 1], [-(2**63)], [2**63], [2**70]])
    def test_blocks(self, ids: list[int]) -> None:
        with pytest.raises(DeviceError, match="block"):
            CopyPlanner(LAYOUT).copies(ids, [192])

    @pytest.mark.parametrize("ids", [["a"], [None], [[1, 2]], [[1], [2]]])
    def test_what_is_no_row_of_blocks(self, ids: list[int]) -> None:
        with pytest.raises(DeviceError, match="block ids"):
            CopyPlanner(LAYOUT).copies(ids, [192])

    @pytest.mark.parametrize(
        ("sizes", "skip"),
        [
            ([], 0),
            ([383], 0),
            ([385], 0),
            ([384, 0], 0),
            ([400, -16], 0),
            ([2**63, 384 - 2**63], 0),
            ([384], -1),
            ([384], 3),
        ],
    )
    def test_sizes(self, sizes: list[int], skip: int) -> None:
        with pytest.raises(DeviceError):
            CopyPlanner(LAYOUT).copies([1, 2], sizes, skip)

    def test_slots(self) -> None:
        check_slots([], 0)
        check_slots([8, 4, 8], 20)
        for sizes in ([], [8, 8], [8, 8, 3], [8, 8, 8], [20, 0], [24, -4]):
            with pytest.raises(DeviceError, match="a chunk of 20 bytes cannot fill"):
                check_slots(sizes, 20)
