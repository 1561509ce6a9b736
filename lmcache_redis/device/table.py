# SPDX-License-Identifier: Apache-2.0
"""The table that drives a copy kernel: where each part of each page is. Pure arithmetic.

A launch moves whole chunks between pages and *staging*, contiguous memory with the chunk format of
`lmcache_redis.device.calls`: all pages of segment 0 in token order, then all of segment 1, and so
on. Its work is cut into *tiles*, one for each program of the kernel:

    a page larger than a tile    is cut into equal parts, one tile each
    smaller pages                share a tile if they are adjacent in the chunk

A tile is a row of `ROW_NUMBERS` numbers, of which `COLUMNS` names the first. It moves ``units``
units of the width of its kernel (`lmcache_redis.device.kernels`). Unit ``u`` belongs to the chunk's
block ``b = first_block + u // period`` and is

    at address + ids[b] * block_stride + (u % period) * width    in the paged cache
    at staged + u * width                                        in the chunk's staging

The width is the largest of 16, 8, 4, 2 and 1 bytes that divides the segment's address, its stride,
its page size and the offset of its pages in the chunk. So every access is aligned, and no unit is
cut. A chunk whose segments differ in width takes a launch for each width. The rows depend on the
layout and on the number of blocks in a chunk, which is the same for all chunks of a worker, so they
are computed once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_redis.device.calls import checked_ids
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.errors import DeviceError

COLUMNS = ("address", "block_stride", "staged", "first_block", "period", "units")
ROW_NUMBERS = 8  # the last two are 0: a row is 64 bytes
SKIPPED = -1  # in place of a block id: the page is neither read nor written
WIDEST_BYTES = 16
# 8 KiB per tile at the largest width: four 16-byte loads for each of 128 threads. Sixteen such
# programs fit a multiprocessor: several times the bytes that full bandwidth needs in flight.
UNITS_PER_TILE = 512
_MAX_CHUNKS = 65_535  # the second dimension of a CUDA grid
_MAX_TILES = 2**31 - 1
_MAX_BYTES = 2**62

_Int64s = npt.NDArray[np.int64]


class Storage(NamedTuple):
    """Mapped memory."""

    address: int
    size_bytes: int


class Launch(NamedTuple):
    """What one launch moves of each chunk: ``[tiles, ROW_NUMBERS]``, a row a tile, of one width."""

    width: int
    rows: _Int64s


class SegmentTable:
    """The tiles of one layout in mapped memory.

    storages: one for each storage that the segments name. units_per_tile: maximum units that a
    program of the kernel moves. Raises DeviceError if the layout exceeds its storages.
    """

    def __init__(
        self, layout: KVLayout, storages: Sequence[Storage], units_per_tile: int = UNITS_PER_TILE
    ) -> None:
        layout.check([storage.size_bytes for storage in storages])
        self.block_bytes = layout.block_bytes
        self.units_per_tile = units_per_tile
        segments = layout.segments
        self._address = np.array(
            [storages[s.storage].address + s.offset for s in segments], dtype=np.int64
        )
        self._page_bytes = np.array([s.page_bytes for s in segments], dtype=np.int64)
        self._block_stride = np.array([s.block_stride for s in segments], dtype=np.int64)
        self._before = np.cumsum(self._page_bytes) - self._page_bytes

    def launches(self, n_blocks: int) -> tuple[Launch, ...]:
        """Those that together move all of a chunk: one for each width that occurs, widest first.

        Raises DeviceError if the chunk is empty or too large.
        """
        chunk_bytes = n_blocks * self.block_bytes
        if not 0 < chunk_bytes <= _MAX_BYTES:
            raise DeviceError(
                f"a chunk has 1 to {_MAX_BYTES} bytes, not {chunk_bytes} ({n_blocks} blocks)"
            )
        staged = self._before * n_blocks
        width = _widths(self._address, self._block_stride, self._page_bytes, staged)
        tile_bytes = self.units_per_tile * width

        # A page is cut into parts of whole units, or several pages make one tile.
        parts = -(-self._page_bytes // tile_bytes)
        page_units = self._page_bytes // width
        part_units = -(-page_units // parts)
        parts = -(-page_units // part_units)
        pages_per_tile = np.where(parts > 1, 1, self.units_per_tile // page_units)
        groups = -(-n_blocks // pages_per_tile)
        tiles = groups * parts
        total = int(tiles.sum())
        if total > _MAX_TILES:
            raise DeviceError(f"a chunk has {total} tiles, at most {_MAX_TILES} fit one launch")

        segment = np.arange(len(tiles)).repeat(tiles)
        number = np.arange(total) - (np.cumsum(tiles) - tiles).repeat(tiles)
        group, part = number // parts[segment], number % parts[segment]
        first_block = group * pages_per_tile[segment]
        blocks = np.minimum(pages_per_tile[segment], n_blocks - first_block)
        first_unit = part * part_units[segment]
        units = blocks * np.minimum(part_units[segment], page_units[segment] - first_unit)
        into_page = first_unit * width[segment]
        rows = np.zeros((total, ROW_NUMBERS), dtype=np.int64)
        rows[:, 0] = self._address[segment] + into_page
        rows[:, 1] = self._block_stride[segment]
        rows[:, 2] = staged[segment] + first_block * self._page_bytes[segment] + into_page
        rows[:, 3] = first_block
        rows[:, 4] = part_units[segment]
        rows[:, 5] = units
        width_of_row = width[segment]
        return tuple(
            Launch(each, rows[width_of_row == each])
            for each in sorted(set(width.tolist()), reverse=True)
        )


def pack_ids(
    chunks: Sequence[Sequence[int]], num_blocks: int, skip_blocks: Sequence[int] | None = None
) -> _Int64s:
    """The block ids of equally long chunks as ``[chunks, n_blocks]``, ready for a kernel.

    chunks: block ids in token order. num_blocks: blocks of the layout. skip_blocks: number of each
    chunk's first blocks to skip. Raises DeviceError if an id is not a block, the chunks differ in
    length, or a count is out of bounds. A kernel checks nothing: it accesses every id that passes
    here.
    """
    if not 0 < len(chunks) <= _MAX_CHUNKS:
        raise DeviceError(f"one launch takes 1 to {_MAX_CHUNKS} chunks, not {len(chunks)}")
    lengths = {len(ids) for ids in chunks}
    if len(lengths) != 1 or 0 in lengths:
        raise DeviceError(
            f"the chunks of one launch have as many blocks each, not {sorted(lengths)}"
        )
    joined = list(itertools.chain.from_iterable(chunks))
    packed = checked_ids(joined, num_blocks).reshape(len(chunks), -1)
    for row, skip in zip(packed, skip_blocks or [0] * len(chunks), strict=True):
        if not 0 <= skip <= len(row):
            raise DeviceError(f"a chunk of {len(row)} blocks cannot skip {skip}")
        row[:skip] = SKIPPED
    return packed


def staging_stride_bytes(chunk_bytes: int) -> int:
    """Bytes from chunk to chunk in staging, so that each begins aligned to the widest access."""
    return -(-chunk_bytes // WIDEST_BYTES) * WIDEST_BYTES


def _widths(*parts: _Int64s) -> _Int64s:
    """For each segment the largest power of two, at most 16, that divides all of its numbers."""
    joined = np.bitwise_or.reduce(parts) | WIDEST_BYTES
    lowest: _Int64s = joined & -joined
    return lowest
