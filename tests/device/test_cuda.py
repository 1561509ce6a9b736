# SPDX-License-Identifier: Apache-2.0
"""`CudaDevice` over the driver of the tests, with an engine in another process: every byte."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from lmcache_redis.device.calls import ChunkCopy, CopyCall
from lmcache_redis.device.gpu import Gpus
from tests import cuda_driver
from tests.device.gpu_calls import (
    NEEDS_DRIVER,
    Host,
    View,
    check_both_directions,
    check_on_gpu,
    check_several_workers,
    opened,
    plain,
)
from tests.device.gpu_exporter import PIECE_BYTES, GpuExporter
from tests.device.layouts import Call, Paged, one

pytestmark = NEEDS_DRIVER
DIRECT, BY_KERNEL = 1, 1 << 40  # Gpus.direct_copy_bytes


@pytest.fixture(scope="module", params=[None, 1], ids=["one allocation", "pieces"])
def engine(request: pytest.FixtureRequest) -> Iterator[GpuExporter]:
    with GpuExporter(PIECE_BYTES, request.param, cuda_driver.environment()) as started:
        yield started


each_way = pytest.mark.parametrize("direct_copy_bytes", [DIRECT, BY_KERNEL])
each_driver = pytest.mark.parametrize("batch", [True, False], indirect=True)


@each_way
@each_driver
def test_both_directions(
    engine: GpuExporter, memory: tuple[View, Host], direct_copy_bytes: int, batch: bool
) -> None:
    """Any layout, page size, alignment, stripes, skipped blocks, number of chunks."""
    cuda_driver.set("delay_us", 50)
    check_both_directions(engine, memory, direct_copy_bytes, examples=25)


@each_way
@each_driver
def test_a_chunk_of_4096_scattered_blocks_of_one_token(
    engine: GpuExporter, memory: tuple[View, Host], direct_copy_bytes: int, batch: bool
) -> None:
    """No two of them are neighbours, and there are bytes between all pages."""
    view, host = memory
    random = np.random.default_rng(4)
    layout = plain(16, 8192, 2, stride=24)
    case = Paged(layout, [random.integers(0, 256, 2 * 8192 * 24, np.uint8)])
    ids = (2 * random.permutation(4096)).tolist()
    gpus = Gpus(direct_copy_bytes, host.pieces_of)
    call = Call(case, [ids], 16 << 10, 7)
    check_on_gpu(engine, view, host, gpus, call, shift=8, gap=16)


BATCH, COPY = "cuMemcpyBatchAsync", "cuMemcpyDtoHAsync_v2"


@pytest.mark.parametrize(
    ("direct_copy_bytes", "gap", "batch", "expected"),
    [
        # Slots and pages that touch: a copy for each segment, or one from staging.
        (DIRECT, 0, True, {BATCH: 1}),
        (DIRECT, 0, False, {COPY: 2}),
        (BY_KERNEL, 0, True, {COPY: 1}),
        # Slots apart, the last of eight in the next pinned piece.
        (DIRECT, 64, True, {BATCH: 1}),
        (DIRECT, 64, False, {COPY: 8}),
        (BY_KERNEL, 64, True, {BATCH: 1}),
        (BY_KERNEL, 64, False, {COPY: 8}),
    ],
    indirect=["batch"],
)
def test_a_call_takes_few_submissions(
    engine: GpuExporter,
    memory: tuple[View, Host],
    direct_copy_bytes: int,
    gap: int,
    batch: bool,
    expected: dict[str, int],
) -> None:
    host = memory[1]
    device = opened(engine, plain(8192, 8, 2), Gpus(direct_copy_bytes, host.pieces_of))
    before = {name: cuda_driver.get(f"{name}.called") for name in (BATCH, COPY)}
    device.gather(one([2, 3, 4, 5], host.slots([8192] * 8, gap)))
    called = {name: cuda_driver.get(f"{name}.called") - n for name, n in before.items()}
    assert {name: n for name, n in called.items() if n} == expected
    device.close()


@each_way
def test_several_workers_at_once(
    engine: GpuExporter, memory: tuple[View, Host], direct_copy_bytes: int
) -> None:
    cuda_driver.set("delay_us", 100)
    check_several_workers(engine, memory, direct_copy_bytes, rounds=20)


def test_buffers_are_made_once_and_grow(engine: GpuExporter, memory: tuple[View, Host]) -> None:
    host = memory[1]
    device = opened(engine, plain(512, 16, 1), Gpus(BY_KERNEL, host.pieces_of))

    def made() -> int:
        return cuda_driver.get("cuMemAlloc_v2.called")

    device.gather(one([1, 2], host.slots([512] * 2, 0)))
    before = made()
    device.gather(one([3, 4], host.slots([512] * 2, 0)))
    assert made() == before
    slots = host.slots([512] * 4, 0)
    two = [ChunkCopy([3, 4], slots[:2]), ChunkCopy([5, 6], slots[2:])]
    device.gather(CopyCall(two))  # staging: ids have room
    assert made() == before + 1
    device.close()
