# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter in Triton. Compiled when the package is built, and never imported to serve.

A program moves one tile of one chunk (`lmcache_redis.device.table`). The direction and the width of
its accesses are compile-time constants. Addresses, strides and page sizes come from the table,
which stays on the GPU, so these kernels serve every layout, and a launch only needs block ids.

It is fast because a thread has four 16-byte loads in flight before its first store, adjacent
threads read adjacent 16 bytes, and with 32 registers per thread a multiprocessor runs as many
programs as it can hold. It is safe because `pack_ids` has checked the ids and the table addresses
only pages.

Imports Triton alone, since builds have no other requirement. Under ``TRITON_INTERPRET=1``, set
before Triton is imported, the same code runs on CPU tensors.
"""

# Kernels are not typed: only the code around them is.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="no-redef"

from __future__ import annotations

import triton
import triton.language as tl

WARPS = 4
UNITS_PER_TILE = 512
# The types of the parameters, as Triton writes them.
PARAMETERS = {
    "rows": "*i64",
    "block_ids": "*i64",
    "staging": "*u8",
    "n_blocks": "i64",
    "staging_stride_bytes": "i64",
}
_ROW_NUMBERS = tl.constexpr(8)


@triton.jit(do_not_specialize=["n_blocks", "staging_stride_bytes"])
def move_tile(
    rows,
    block_ids,
    staging,
    n_blocks,
    staging_stride_bytes,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCATTER: tl.constexpr,
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
    row = rows + tl.program_id(0).to(tl.int64) * _ROW_NUMBERS
    chunk = tl.program_id(1).to(tl.int64)
    address = tl.load(row)
    block_stride = tl.load(row + 1)
    staged = tl.load(row + 2)
    first_block = tl.load(row + 3)
    period = tl.load(row + 4).to(tl.int32)
    units = tl.load(row + 5).to(tl.int32)

    unit = tl.arange(0, UNITS)
    ids = block_ids + chunk * n_blocks + first_block
    block = tl.load(ids + unit // period, mask=unit < units, other=-1)
    moved = (block >= 0)[:, None]
    page = address + block * block_stride + (unit % period).to(tl.int64) * WIDTH
    here = staging.to(tl.int64) + chunk * staging_stride_bytes + staged
    stage = here + unit.to(tl.int64) * WIDTH
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
