# SPDX-License-Identifier: Apache-2.0
"""The table that drives the kernels: followed in Python, against the chunk as it is defined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.device.table import (
    COLUMNS,
    ROW_NUMBERS,
    SKIPPED,
    UNITS_PER_TILE,
    Launch,
    SegmentTable,
    Storage,
    pack_ids,
    staging_stride_bytes,
)
from lmcache_redis.errors import DeviceError
from tests.device.layouts import Paged, paged

GRANULES = st.sampled_from([1, 2, 4, 8, 16])
UNITS = st.sampled_from([1, 4, 16, 64, 512])
BLOCKS = st.integers(1, 40)


class Unit(NamedTuple):
    """One access: ``width`` bytes at ``base + ids[block] * stride``, and at ``staged``."""

    base: int
    stride: int
    block: int
    staged: int
    width: int


def units_of(launches: Sequence[Launch]) -> Iterator[Unit]:
    """What the kernel does with the rows, as their description says it."""
    for width, rows in launches:
        for values in rows.tolist():
            row = dict(zip(COLUMNS, values, strict=False))
            for unit in range(row["units"]):
                yield Unit(
                    base=row["address"] + unit % row["period"] * width,
                    stride=row["block_stride"],
                    block=row["first_block"] + unit // row["period"],
                    staged=row["staged"] + unit * width,
                    width=width,
                )


def widths_of(launches: Sequence[Launch]) -> list[int]:
    return [launch.width for launch in launches]


def only_rows(launches: Sequence[Launch]) -> np.ndarray:
    """Of tiles that take one launch."""
    (launch,) = launches
    return launch.rows


def table_of(case: Paged, first_address: int, units: int) -> SegmentTable:
    storages = []
    for size in case.sizes:
        storages.append(Storage(first_address, size))
        first_address += size + 1024
    return SegmentTable(case.layout, storages, units)


@settings(max_examples=40)
@given(GRANULES.flatmap(paged), BLOCKS, UNITS, st.integers(0, 64))
def test_each_byte_of_a_chunk_moves_once_between_its_two_places(
    case: Paged, n_blocks: int, units: int, first_address: int
) -> None:
    table = table_of(case, first_address, units)
    launches = table.launches(n_blocks)
    chunk_bytes = n_blocks * case.layout.block_bytes
    places: list[tuple[int, int, int] | None] = [None] * chunk_bytes
    for unit in units_of(launches):
        for byte in range(unit.width):
            assert places[unit.staged + byte] is None
            places[unit.staged + byte] = (unit.base + byte, unit.stride, unit.block)
    address = [first_address + sum(case.sizes[:n]) + 1024 * n for n in range(len(case.sizes))]
    assert places == [
        (address[s.storage] + s.offset + byte, s.block_stride, block)
        for s in case.layout.segments
        for block in range(n_blocks)
        for byte in range(s.page_bytes)
    ]


@given(GRANULES.flatmap(paged), BLOCKS, UNITS, st.integers(0, 64))
def test_a_launch_has_one_width_and_its_accesses_are_aligned(
    case: Paged, n_blocks: int, units: int, first_address: int
) -> None:
    launches = table_of(case, first_address, units).launches(n_blocks)
    widths = widths_of(launches)
    assert widths == sorted(set(widths), reverse=True)
    for launch in launches:
        assert launch.rows.shape[1] == ROW_NUMBERS
        assert 0 < int(launch.rows[:, 5].max()) <= units
        assert not launch.rows[:, len(COLUMNS) :].any()
    for unit in units_of(launches):
        for block in range(case.layout.num_blocks):
            assert (unit.base + block * unit.stride) % unit.width == 0
        assert unit.staged % unit.width == 0


def table(units: int = UNITS_PER_TILE, blocks: int = 64, *segments: Segment) -> SegmentTable:
    layout = KVLayout((), "uint8", "cuda", 16, blocks, segments)
    end = max(s.offset + blocks * s.block_stride for s in segments)
    storages = {s.storage for s in segments}
    return SegmentTable(layout, [Storage(4096, end)] * len(storages), units)


class TestTiles:
    def test_large_pages_are_cut_evenly(self) -> None:
        """40 KiB are five full tiles; 16 bytes more are six of nearly one size."""
        whole = table(512, 4, Segment(0, 0, 40960, 40960)).launches(1)
        assert only_rows(whole)[:, 5].tolist() == [512] * 5
        more = table(512, 4, Segment(0, 0, 40976, 40976)).launches(1)
        assert only_rows(more)[:, 5].tolist() == [427] * 5 + [426]

    def test_small_pages_share_a_tile(self) -> None:
        """2 KiB: four of a segment's pages in each, and what is left in the last."""
        launches = table(512, 64, Segment(0, 0, 2048, 4096)).launches(10)
        assert only_rows(launches)[:, 3].tolist() == [0, 4, 8]
        assert only_rows(launches)[:, 4].tolist() == [128] * 3
        assert only_rows(launches)[:, 5].tolist() == [512, 512, 256]

    def test_a_70b_of_eight_ranks_fills_its_tiles(self) -> None:
        """80 layers, K and V apart, pages of 4 KiB: 16 blocks are 8 tiles of 2 pages a segment."""
        segments = tuple(Segment(n, 0, 4096, 4096) for n in range(160))
        launches = table(512, 64, *segments).launches(16)
        assert len(only_rows(launches)) == 160 * 8
        assert set(only_rows(launches)[:, 5].tolist()) == {512}
        assert widths_of(launches) == [16]

    @pytest.mark.parametrize(
        ("address", "segment", "n_blocks", "width"),
        [
            (0, Segment(0, 0, 64, 64), 1, 16),
            (8, Segment(0, 0, 64, 64), 1, 8),
            (0, Segment(0, 12, 64, 64), 1, 4),
            (0, Segment(0, 0, 6, 64), 1, 2),
            (0, Segment(0, 0, 64, 65), 1, 1),
        ],
    )
    def test_the_width_is_what_all_places_allow(
        self, address: int, segment: Segment, n_blocks: int, width: int
    ) -> None:
        layout = KVLayout((), "uint8", "cuda", 16, 4, (segment,))
        launches = SegmentTable(layout, [Storage(address, 1024)]).launches(n_blocks)
        assert widths_of(launches) == [width]

    def test_a_segment_behind_an_odd_one_is_as_wide_as_it_can(self) -> None:
        odd, wide = Segment(0, 0, 4, 4), Segment(0, 256, 64, 64)
        both = table(512, 64, odd, wide)
        assert widths_of(both.launches(16)) == [16, 4]
        assert widths_of(both.launches(3)) == [4]

    def test_each_width_has_its_launch(self) -> None:
        segments = Segment(0, 0, 64, 64), Segment(0, 4096, 8, 8), Segment(0, 5000, 2, 2)
        launches = table(512, 64, *segments).launches(16)
        assert widths_of(launches) == [16, 8, 2]
        addresses = [launch.rows[0, 0] - 4096 for launch in launches]
        assert addresses == [0, 4096, 5000]

    @pytest.mark.parametrize("n_blocks", [0, -1, 2**60])
    def test_chunks_of_no_sense(self, n_blocks: int) -> None:
        with pytest.raises(DeviceError, match="a chunk has 1 to"):
            table(512, 64, Segment(0, 0, 64, 64)).launches(n_blocks)

    def test_a_chunk_of_more_tiles_than_a_launch_has_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lmcache_redis.device.table._MAX_TILES", 3)
        pages = table(512, 64, Segment(0, 0, 2048, 4096))
        assert len(only_rows(pages.launches(12))) == 3
        with pytest.raises(DeviceError, match="a chunk has 4 tiles"):
            pages.launches(13)

    def test_a_layout_that_leaves_its_storage_is_refused(self) -> None:
        layout = KVLayout((), "uint8", "cuda", 16, 4, (Segment(0, 0, 64, 64),))
        SegmentTable(layout, [Storage(0, 256)])
        with pytest.raises(DeviceError, match="ends at byte 256"):
            SegmentTable(layout, [Storage(0, 255)])


def test_staging_strides() -> None:
    assert [staging_stride_bytes(n) for n in (1, 15, 16, 17)] == [16, 16, 16, 32]


class TestIds:
    def test_rows_of_chunks(self) -> None:
        packed = pack_ids([[1, 2, 3], [9, 9, 0]], 10)
        assert packed.dtype == np.int64
        assert packed.tolist() == [[1, 2, 3], [9, 9, 0]]

    def test_skipped_blocks_are_no_blocks(self) -> None:
        packed = pack_ids([[1, 2], [3, 4], [5, 6]], 10, [0, 1, 2])
        assert packed.tolist() == [[1, 2], [SKIPPED, 4], [SKIPPED, SKIPPED]]

    def test_as_many_chunks_as_a_launch_has(self) -> None:
        assert pack_ids([[9]] * 65_535, 10).shape == (65_535, 1)

    def test_what_was_given_stays_as_it_was(self) -> None:
        ids = np.array([4, 5])
        pack_ids([ids], 10, [1])
        assert ids.tolist() == [4, 5]

    @pytest.mark.parametrize(
        "chunks",
        [[[10]], [[-1]], [[0, 2**63 - 1]], [[-(2**63)]], [[2**70]], [["a"]], [[[1]]], [[1], [1, 2]],
         [], [[]], [[0]] * 65_536],
    )  # fmt: skip
    def test_ids_out_of_bounds(self, chunks: list[list[int]]) -> None:
        with pytest.raises(DeviceError):
            pack_ids(chunks, 10)

    def test_a_skipped_id_is_checked_too(self) -> None:
        with pytest.raises(DeviceError, match="10 blocks"):
            pack_ids([[10, 1]], 10, [1])

    @pytest.mark.parametrize("skip", [-1, 3])
    def test_skips_out_of_bounds(self, skip: int) -> None:
        with pytest.raises(DeviceError, match="cannot skip"):
            pack_ids([[1, 2]], 10, [skip])
