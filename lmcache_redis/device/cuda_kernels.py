"""Gather and scatter as Triton kernels: one launch for all pages of one chunk, or of several.

A program moves one tile of one chunk (`lmcache_redis.device.table`). Only the widths of its
accesses are compile-time constants. Addresses, strides and page sizes come from the table, which
stays on the GPU, so one kernel serves every layout, and a launch only needs block ids.

It is fast because a thread has four 16-byte loads in flight before its first store, adjacent
threads read adjacent 16 bytes, and with 32 registers per thread a multiprocessor runs as many
programs as it can hold. It is safe because `pack_ids` has checked the ids and the table addresses
only pages.

Under ``TRITON_INTERPRET=1``, set before Triton is imported, the same code runs on CPU tensors.
"""

# Kernels are not typed: only the code around them is.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="no-redef"

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from lmcache_redis.device.table import COLUMNS, SKIPPED, BlockIds, SegmentTable, Tiles
from lmcache_redis.errors import DeviceError

_WARPS = 4
# One thread compiles at a time: Triton has no lock of its own. No code under this lock waits for a
# GPU: a launch that hangs must not block the launches of other GPUs.
_compiling = threading.Lock()

_COLUMN_COUNT = tl.constexpr(len(COLUMNS))


@triton.jit
def _move_tile(
    row, block_ids, staging, UNITS: tl.constexpr, WIDTH: tl.constexpr, SCATTER: tl.constexpr
):
    # As few elements per unit as possible: a unit of 16 bytes has four elements of four bytes.
    if WIDTH >= 4:
        element: tl.constexpr = tl.int32
        per_unit: tl.constexpr = WIDTH // 4
    elif WIDTH == 2:
        element: tl.constexpr = tl.int16
        per_unit: tl.constexpr = 1
    else:
        element: tl.constexpr = tl.int8
        per_unit: tl.constexpr = 1
    address = tl.load(row)
    block_stride = tl.load(row + 1)
    staged = tl.load(row + 2)
    first_block = tl.load(row + 3)
    period = tl.load(row + 4).to(tl.int32)
    units = tl.load(row + 5).to(tl.int32)

    unit = tl.arange(0, UNITS)
    block = tl.load(block_ids + first_block + unit // period, mask=unit < units, other=-1)
    moved = (block >= 0)[:, None]
    page = address + block * block_stride + (unit % period).to(tl.int64) * WIDTH
    stage = staging + staged + unit.to(tl.int64) * WIDTH
    part = tl.arange(0, per_unit)[None, :]
    page_parts = page.to(tl.pointer_type(element))[:, None] + part
    stage_parts = stage.to(tl.pointer_type(element))[:, None] + part
    # The compiler cannot infer the alignment of an address from a table: with these hints a unit is
    # one access.
    page_parts = tl.max_contiguous(tl.multiple_of(page_parts, (1, WIDTH)), (1, per_unit))
    stage_parts = tl.max_contiguous(tl.multiple_of(stage_parts, (1, WIDTH)), (1, per_unit))
    if SCATTER:
        tl.store(page_parts, tl.load(stage_parts, mask=moved), mask=moved)
    else:
        tl.store(stage_parts, tl.load(page_parts, mask=moved), mask=moved)


# Unspecialised: a count that happens to be 1 or a multiple of 16 needs no new compilation.
@triton.jit(do_not_specialize=["n_blocks", "staging_stride_bytes"])
def _move_chunks(
    rows,
    block_ids,
    staging,
    n_blocks,
    staging_stride_bytes,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    NARROW: tl.constexpr,
    SCATTER: tl.constexpr,
):
    row = rows + tl.program_id(0).to(tl.int64) * _COLUMN_COUNT
    chunk = tl.program_id(1).to(tl.int64)
    ids = block_ids + chunk * n_blocks
    here = staging.to(tl.int64) + chunk * staging_stride_bytes
    if NARROW == 0:
        _move_tile(row, ids, here, UNITS, WIDTH, SCATTER)
    else:
        if tl.load(row + 6) == WIDTH:
            _move_tile(row, ids, here, UNITS, WIDTH, SCATTER)
        else:
            _move_tile(row, ids, here, UNITS, NARROW, SCATTER)


class TritonCopies:
    """A layout's gathers and scatters; a `PageCopies`. Its tables stay on the device.

    Thread-safe. Launches go to the current stream of the current device, and return at once.
    """

    name = "Triton"

    def __init__(self, table: SegmentTable, device: torch.device) -> None:
        self._table = table
        self._device = device
        self._rows: dict[int, tuple[Tiles, torch.Tensor]] = {}
        self._compiled: set[tuple[tuple[int, ...], bool]] = set()

    def gather(self, block_ids: BlockIds, staging: torch.Tensor) -> None:
        self._launch(block_ids, staging, scatter=False)

    def scatter(self, block_ids: BlockIds, staging: torch.Tensor) -> None:
        self._launch(block_ids, staging, scatter=True)

    def warm_up(self) -> None:
        """Compile and launch both kernels on a block that is skipped, and wait for them.

        A chunk of more blocks may allow wider accesses: its first launch compiles those kernels.
        """
        host = np.full((1, 1), SKIPPED, dtype=np.int64)
        block_ids = BlockIds(host, torch.from_numpy(host).to(self._device))
        staging = torch.empty(self._table.block_bytes, dtype=torch.uint8, device=self._device)
        self.gather(block_ids, staging)
        self.scatter(block_ids, staging)
        block_ids.device.cpu()  # raises their errors

    def _launch(self, block_ids: BlockIds, staging: torch.Tensor, *, scatter: bool) -> None:
        chunks, n_blocks = block_ids.device.shape
        tiles, rows = self._rows_of(n_blocks)
        _check_staging(staging, chunks, tiles)
        width, *narrow = tiles.widths
        grid = (len(tiles.rows), chunks)
        arguments = (rows, block_ids.device, staging, n_blocks, tiles.staging_stride_bytes)
        options: dict[str, Any] = {
            "UNITS": self._table.units_per_tile,
            "WIDTH": width,
            "NARROW": narrow[0] if narrow else 0,
            "SCATTER": scatter,
            "num_warps": _WARPS,
        }
        kind = (tiles.widths, scatter)
        if kind not in self._compiled:
            with _compiling:
                _move_chunks.warmup(*arguments, grid=grid, **options)
            self._compiled.add(kind)
        _move_chunks[grid](*arguments, **options)

    def _rows_of(self, n_blocks: int) -> tuple[Tiles, torch.Tensor]:
        found = self._rows.get(n_blocks)
        if found is None:
            tiles = self._table.tiles(n_blocks)
            # From pageable memory: the copy is complete for every stream when this returns.
            found = self._rows[n_blocks] = (tiles, torch.from_numpy(tiles.rows).to(self._device))
        return found


def _check_staging(staging: torch.Tensor, chunks: int, tiles: Tiles) -> None:
    """Raise DeviceError unless staging is as large and as aligned as the launch needs."""
    needed = (chunks - 1) * tiles.staging_stride_bytes + tiles.chunk_bytes
    if staging.numel() < needed or not staging.is_contiguous():
        raise DeviceError(f"{staging.numel()} bytes of staging, of which {needed} are needed")
    if staging.data_ptr() % tiles.widths[0]:
        raise DeviceError(f"staging is not aligned to {tiles.widths[0]} bytes")
