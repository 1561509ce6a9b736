# SPDX-License-Identifier: Apache-2.0
"""`CudaDevice` on a real GPU with NVIDIA's driver, and an engine in another process.

The checks of `test_cuda`, without delays; what only a GPU can show comes after them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from lmcache_redis.device import driver
from lmcache_redis.device.cuda import CudaDevice
from lmcache_redis.device.gpu import Gpus
from lmcache_redis.device.handles import CudaIPCHandle
from lmcache_redis.errors import DeviceError
from tests.cuda_driver import more
from tests.device.gpu_calls import (
    Host,
    View,
    changed,
    check_both_directions,
    check_several_workers,
    opened,
    plain,
    seen,
    unpinned_gpus,
)
from tests.device.gpu_exporter import PIECE_BYTES, GpuExporter, content
from tests.device.layouts import one

pytestmark = [pytest.mark.cuda, pytest.mark.servers]
DIRECT, BY_KERNEL = 1, 1 << 40
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _on_a_gpu() -> None:
    """At run time: who loads NVIDIA's library cannot load that of the tests any more."""
    try:
        visible = driver.device_uuids()
    except DeviceError as error:
        pytest.skip(f"no NVIDIA GPU: {error}")
    if not visible or driver.device_name(0).startswith("Stub"):
        pytest.skip("no NVIDIA GPU")


# Descriptors first: what vLLM's cumem allocator makes of a KV cache is shared by them.
@pytest.fixture(scope="module", params=[1, None], ids=["pieces", "one allocation"])
def engine(_on_a_gpu: None, request: pytest.FixtureRequest) -> Iterator[GpuExporter]:
    with GpuExporter(PIECE_BYTES, request.param) as started:
        yield started


@pytest.fixture(scope="module", params=[4, None], ids=["pieces", "one allocation"])
def large(_on_a_gpu: None, request: pytest.FixtureRequest) -> Iterator[GpuExporter]:
    with GpuExporter(4 * PIECE_BYTES, request.param) as started:
        yield started


@pytest.fixture
def memory(engine: GpuExporter) -> Iterator[tuple[View, Host]]:
    with seen(engine) as both:
        yield both


each_way = pytest.mark.parametrize("direct_copy_bytes", [DIRECT, BY_KERNEL])


@each_way
@pytest.mark.parametrize("batch", [True, False], indirect=True)
def test_both_directions(
    engine: GpuExporter, memory: tuple[View, Host], direct_copy_bytes: int, batch: bool
) -> None:
    check_both_directions(engine, memory, direct_copy_bytes, examples=100)


@pytest.mark.parametrize("page_bytes", [2 << 10, 32 << 10, 64 << 10, 73_728, MIB])
def test_real_sizes(large: GpuExporter, page_bytes: int) -> None:
    """A chunk of megabytes there and back, in slots of an agent's size."""
    blocks = 8 * MIB // page_bytes
    size = blocks * page_bytes
    whole, stripe = large.write(3), 1_044_480
    with_slots = Host(16 * MIB, 1, 1)
    device = opened(large, plain(page_bytes, blocks, 1), Gpus(64 << 10, with_slots.pieces_of))
    ids = np.random.default_rng(4).permutation(blocks).tolist()
    sizes = [min(stripe, size - begin) for begin in range(0, size, stripe)]
    slots = with_slots.slots(sizes, 4096)
    device.gather(one(ids, slots))
    pages = np.frombuffer(whole, np.uint8)[:size].reshape(blocks, page_bytes)
    assert b"".join(slots) == pages[ids].tobytes()
    device.scatter(one(ids[::-1], slots))
    device.gather(one(sorted(ids), slots))
    back = pages[ids][np.argsort(ids[::-1])]
    assert b"".join(slots) == back.tobytes()
    device.close()
    with_slots.close()


@each_way
def test_a_call_comes_after_its_signal(direct_copy_bytes: int) -> None:
    engine = GpuExporter(MIB)
    try:
        with seen(engine) as (view, host):
            gpus = Gpus(direct_copy_bytes, host.pieces_of)
            device = opened(engine, plain(2048, 8, 1), gpus, engine.signals)
            slots = host.slots([2048] * 4, 64)
            for seed in range(20):
                device.gather(one([5, 0, 3, 6], slots, after=engine.write_late(seed, 50)))
                right = np.frombuffer(content(seed, 16384), np.uint8).reshape(8, 2048)
                assert b"".join(slots) == right[[5, 0, 3, 6]].tobytes()
                ticket = engine.write_late(seed + 100, 50)
                device.scatter(one([1, 2, 4, 7], slots, after=ticket))
                found = np.frombuffer(view.read(), np.uint8)[:16384].reshape(8, 2048)
                assert b"".join(slots) == found[[1, 2, 4, 7]].tobytes()
            device.close()
    finally:
        engine.kill()


@each_way
def test_several_workers_at_once(
    engine: GpuExporter, memory: tuple[View, Host], direct_copy_bytes: int
) -> None:
    check_several_workers(engine, memory, direct_copy_bytes, rounds=200)


def test_a_claim_beyond_the_allocation_is_refused(engine: GpuExporter) -> None:
    if not isinstance(engine.memory, CudaIPCHandle):
        pytest.skip("pieces are mapped by their size")
    claimed = changed(engine.memory, allocation_bytes=engine.size_bytes + (64 << 20))
    with pytest.raises(DeviceError, match="of GPU memory, which has"):
        CudaDevice([plain(2048, 8, 1)], [claimed], unpinned_gpus())


def test_no_memory_of_a_dead_engine_stays_held() -> None:
    """CUDA keeps what was exported until the last process that opened it has closed it."""
    engine = GpuExporter(512 * MIB)
    try:
        device = opened(engine, plain(MIB, 512, 1), unpinned_gpus())
    finally:
        engine.kill()
    held = more.free_memory()[0]
    with pytest.raises(DeviceError, match="has ended"):
        device.gather(one([0], [memoryview(bytearray(MIB))]))
    device.close()
    assert more.free_memory()[0] - held >= 500 * MIB
