# SPDX-License-Identifier: Apache-2.0
"""Launches of kernels: what they may not access. `tests/device/test_cuda.py` has what they move."""

from __future__ import annotations

import numpy as np
import pytest

from lmcache_redis.device import driver, kernels
from lmcache_redis.errors import GpuLost
from tests.cuda_driver.buffers import PAGE, on_gpu


def numbers_on_gpu(values: object) -> int:
    array = np.array(values, np.int64)
    address, memory = on_gpu(array.nbytes)
    memory[:] = array.reshape(-1).view(np.uint8)
    return address


def launch(name: str, ids: object, stream: int, page_bytes: int = 64) -> None:
    """Moves two chunks of four pages each, out of memory of 16."""
    (pages, _), (staging, _) = on_gpu(16 * page_bytes), on_gpu(8 * page_bytes)
    units = page_bytes // 16
    row = [pages, page_bytes, 0, 0, units, 4 * units, 0, 0]
    arguments = [numbers_on_gpu([row]), numbers_on_gpu(ids), staging, 4, 4 * page_bytes]
    function = driver.function_of(driver.load_module(kernels.text(name)), name)
    driver.launch(function, (1, 2), 128, arguments, stream)
    driver.synchronize_stream(stream)


@pytest.mark.parametrize("name", ["gather_16", "scatter_16"])
def test_an_access_outside_is_fatal(stream: int, name: str) -> None:
    launch(name, [[0, 1, 2, 3], [4, -1, 6, 15]], stream)
    with pytest.raises(GpuLost, match="error 700 "):
        launch(name, [[0, 1, 2, 3], [4, 5, 6, 1 << 20]], stream)
    with pytest.raises(GpuLost, match="error 700 "):
        driver.allocate(PAGE)


def test_a_misaligned_access_is_fatal(stream: int) -> None:
    with pytest.raises(GpuLost, match="error 716 "):
        launch("gather_16", [[0, 1, 2, 3]] * 2, stream, page_bytes=24)
