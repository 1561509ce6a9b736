# SPDX-License-Identifier: Apache-2.0
"""Modules and launches: the kernels that move units between pages and staging."""

from __future__ import annotations

import numpy as np
import pytest

from lmcache_redis.device import driver
from lmcache_redis.errors import GpuLost
from tests import cuda_driver
from tests.cuda_driver.buffers import FRESH, PAGE, Bytes, on_gpu, refused

BLOCKS, WORDS = 16, 8


def function_of(name: str, **head: object) -> int:
    module = driver.load_module(cuda_driver.ptx(name, **head))  # type: ignore[arg-type]
    return driver.function_of(module, name)


def numbers_on_gpu(values: object) -> int:
    array = np.array(values, np.int64)
    address, memory = on_gpu(array.nbytes)
    memory[:] = array.reshape(-1).view(np.uint8)
    return address


class Pages:
    """Memory of 16 blocks of two segments with pages of `page_bytes`, and staging of two chunks."""

    def __init__(self, width: int, page_bytes: int, n_blocks: int = 4) -> None:
        self.width, self.page_bytes, self.n_blocks = width, page_bytes, n_blocks
        self.address, memory = on_gpu(2 * BLOCKS * page_bytes)
        self.pages = memory.reshape(2, BLOCKS, page_bytes)
        self.stride = 2 * n_blocks * page_bytes
        self.staging, staged = on_gpu(2 * self.stride)
        self.staged = staged.reshape(2, 2, n_blocks, page_bytes)

    def rows(self) -> list[list[int]]:
        """One for each page of a chunk."""
        units = self.page_bytes // self.width
        return [
            [
                self.address + segment * BLOCKS * self.page_bytes,
                self.page_bytes,
                (segment * self.n_blocks + block) * self.page_bytes,
                block,
                units,
                units,
                self.width,
                0,
            ]
            for segment in range(2)
            for block in range(self.n_blocks)
        ]

    def launch(self, function: int, ids: object, stream: int) -> None:
        rows = self.rows()
        arguments = [numbers_on_gpu(rows), numbers_on_gpu(ids), self.staging]
        arguments += [self.n_blocks, self.stride, 0, 0]
        driver.launch(function, (len(rows), 2), 128, arguments, stream)
        driver.synchronize_stream(stream)


def random_bytes(memory: Bytes, seed: int = 1) -> None:
    memory[:] = np.random.default_rng(seed).integers(0, 256, memory.shape, np.uint8)


@pytest.mark.parametrize("width", [16, 8, 4, 2, 1])
def test_pages_are_gathered_and_scattered(stream: int, width: int) -> None:
    here = Pages(width, 24 * width)
    random_bytes(here.pages)
    ids = np.random.default_rng(3).permutation(BLOCKS)[:8].reshape(2, 4)
    ids[1, 0] = -1
    here.launch(function_of(f"gather_{width}"), ids, stream)
    expected = here.pages[:, ids].swapaxes(0, 1)
    expected[1, :, 0] = FRESH  # Skipped.
    assert (here.staged == expected).all()

    before = here.pages.copy()
    random_bytes(here.staged, 2)
    here.launch(function_of(f"scatter_{width}"), ids, stream)
    expected = before
    for chunk in range(2):
        for place, block in enumerate(ids[chunk]):
            if block >= 0:
                expected[:, block] = here.staged[chunk, :, place]
    assert (here.pages == expected).all()


@pytest.mark.parametrize("wrong_id", [1 << 20, 10**9])
@pytest.mark.parametrize("name", ["gather_16", "scatter_16"])
def test_an_access_outside_is_fatal(stream: int, name: str, wrong_id: int) -> None:
    here = Pages(16, 64)
    function = function_of(name)
    with pytest.raises(GpuLost, match="error 700 "):
        here.launch(function, [[0, 1, 2, 3], [4, 5, 6, wrong_id]], stream)
    with pytest.raises(GpuLost, match="error 700 "):
        driver.allocate(PAGE)


def test_a_misaligned_access_is_fatal(stream: int) -> None:
    here = Pages(8, 24)
    with pytest.raises(GpuLost, match="error 716 "):
        here.launch(function_of("gather_16"), [[0, 1, 2, 3]] * 2, stream)


@pytest.mark.parametrize(
    ("head", "code"),
    [
        ({"version": "8.1"}, 222),
        ({"target": "sm_100"}, 209),
        ({"target": "sm_90a"}, 209),
        ({"parameters": 4}, 218),
    ],
)
def test_wrong_modules_are_refused(context: int, head: dict[str, object], code: int) -> None:
    with refused(code):
        function_of("gather_16", **head)
