# SPDX-License-Identifier: Apache-2.0
"""Calls of the driver that a chunk takes, counted without one."""

from __future__ import annotations

import pytest

from benchmarks.gpu.counted import SHAPES, count


@pytest.mark.parametrize("scatter", [False, True])
def test_what_batches_save(scatter: bool) -> None:
    shape = SHAPES[0]
    single, batched = (count(shape, 1, batches=each, scatter=scatter) for each in (False, True))
    copy = "cuMemcpyHtoDAsync_v2" if scatter else "cuMemcpyDtoHAsync_v2"
    # A copy for each page, and one more where a stripe ends within one.
    stripes = -(-(32 << 20) // ((1 << 20) - 4096))
    assert single[copy] >= 512
    assert single[copy] <= 512 + stripes
    assert batched[copy] == 0
    assert single.total() - single[copy] == batched.total() - batched["cuMemcpyBatchAsync"]
