"""`CudaDevice` over CUDA IPC, on a real GPU, with a process that stands in for an engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

from lmcache_redis.cache.pool import Arena
from lmcache_redis.device.cuda import CudaDevice, PinnedMemory
from lmcache_redis.device.cuda_ipc import CudaIPCWrapper, device_uuid
from lmcache_redis.errors import DeviceError
from tests.device.cuda_exporter import BLOCKS, CudaExporter
from tests.device.layouts import empty_slots

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no NVIDIA GPU: torch.cuda.is_available() is False"
    ),
]
STRIPE = 5000


@pytest.fixture
def engine() -> Iterator[CudaExporter]:
    exporter = CudaExporter()
    yield exporter
    exporter.kill()


@pytest.fixture
def arena() -> Iterator[Arena]:
    pool = Arena(1 << 20, STRIPE)
    pinned = PinnedMemory(pool.base_address, pool.size_bytes, torch.device("cuda:0"))
    yield pool
    pinned.close()
    pool.close()


def slots_of(arena: Arena, chunk_bytes: int) -> list[memoryview]:
    block = tuple(range(-(-chunk_bytes // STRIPE)))
    return arena.views(block, chunk_bytes, STRIPE)


def test_gather_reads_what_the_engine_has(engine: CudaExporter, arena: Arena) -> None:
    layout, handles = engine.share()
    device = CudaDevice([layout], handles)
    for ids in ([3, 4, 5, 0, 11], [7], list(range(BLOCKS))):
        slots = slots_of(arena, len(ids) * layout.block_bytes)
        device.gather(ids, slots, STRIPE)
        assert b"".join(slots) == engine.chunk(ids)
    device.close()


def test_scatter_writes_what_the_engine_sees(engine: CudaExporter, arena: Arena) -> None:
    layout, handles = engine.share()
    device = CudaDevice([layout], handles)
    ids, others = [7, 6, 1, 2], [0, 3, 4, 5, 8, 9, 10, 11, 7]
    before = engine.chunk(others)
    chunk = os.urandom(len(ids) * layout.block_bytes)
    slots = slots_of(arena, len(chunk))
    for index, slot in enumerate(slots):
        slot[:] = chunk[index * STRIPE : index * STRIPE + slot.nbytes]
    device.scatter(ids, slots, STRIPE, skip_blocks=1)
    device.close()
    assert engine.chunk(others) == before
    at = 0
    written = engine.chunk(ids)
    for segment in layout.segments:
        end = at + len(ids) * segment.page_bytes
        assert written[at + segment.page_bytes : end] == chunk[at + segment.page_bytes : end]
        at = end


def test_unpinned_slots_work(engine: CudaExporter) -> None:
    layout, handles = engine.share()
    device = CudaDevice([layout], handles)
    slots = empty_slots(2 * layout.block_bytes, STRIPE)
    device.gather([1, 2], slots, STRIPE)
    assert b"".join(slots) == engine.chunk([1, 2])
    device.close()


def test_a_gather_comes_after_the_engines_event(engine: CudaExporter, arena: Arena) -> None:
    layout, handles = engine.share()
    device = CudaDevice([layout], handles)
    event, happened = engine.ask("fill late", 3.0)
    assert not happened
    slots = slots_of(arena, 2 * layout.block_bytes)
    device.gather([0, 5], slots, STRIPE, event=bytes.fromhex(event))
    assert b"".join(slots) == engine.chunk([0, 5])
    assert set(np.frombuffer(b"".join(slots), np.float16)) == {3.0}
    device.close()


def test_a_scatter_comes_after_the_engines_event(engine: CudaExporter, arena: Arena) -> None:
    layout, handles = engine.share()
    device = CudaDevice([layout], handles)
    event, _ = engine.ask("fill late", 0.0)
    slots = slots_of(arena, layout.block_bytes)
    for slot in slots:
        slot[:] = b"\x01" * slot.nbytes
    device.scatter([5], slots, STRIPE, event=bytes.fromhex(event))
    assert engine.chunk([5]) == b"\x01" * layout.block_bytes
    assert set(engine.chunk([4])) == {0}
    device.close()


def test_several_threads(engine: CudaExporter, arena: Arena) -> None:
    layout, handles = engine.share()
    device = CudaDevice([layout], handles)
    want = {block: engine.chunk([block]) for block in range(BLOCKS)}
    failed: list[BaseException] = []

    def copy(block: int) -> None:
        try:
            for _ in range(20):
                slots = empty_slots(layout.block_bytes, STRIPE)
                device.gather([block], slots, STRIPE)
                assert b"".join(slots) == want[block]
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=copy, args=(block,)) for block in range(BLOCKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    device.close()
    assert not failed


def test_pinned_memory_is_known_as_such(arena: Arena) -> None:
    assert torch.frombuffer(slots_of(arena, STRIPE)[0], dtype=torch.uint8).is_pinned()


def test_an_engine_that_sees_its_gpu_by_uuid(arena: Arena) -> None:
    engine = CudaExporter(CUDA_VISIBLE_DEVICES=f"GPU-{device_uuid(0)}")
    try:
        layout, handles = engine.share()
        device = CudaDevice([layout], handles)
        slots = slots_of(arena, layout.block_bytes)
        device.gather([2], slots, STRIPE)
        assert b"".join(slots) == engine.chunk([2])
        device.close()
    finally:
        engine.kill()


def test_registering_again_with_the_same_handles(engine: CudaExporter, arena: Arena) -> None:
    """As after a restart of the agent: the engine sends the same handles again."""
    layout, handles = engine.share()
    for _ in range(3):
        device = CudaDevice([layout], handles)
        slots = slots_of(arena, layout.block_bytes)
        device.gather([2], slots, STRIPE)
        assert b"".join(slots) == engine.chunk([2])
        device.close()


def test_an_engine_that_is_killed(engine: CudaExporter) -> None:
    layout, handles = engine.share()
    device = CudaDevice([layout], handles)
    engine.kill()
    with pytest.raises(DeviceError, match="has ended"):
        device.gather([0], empty_slots(layout.block_bytes, STRIPE), STRIPE)
    device.close()
    with pytest.raises(DeviceError):
        CudaDevice([layout], handles)


def test_expandable_segments_name_the_setting() -> None:
    engine = CudaExporter(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    try:
        with pytest.raises(DeviceError, match="expandable_segments:True"):
            engine.share()
    finally:
        engine.kill()


def test_cuda_malloc_async_names_the_setting() -> None:
    engine = CudaExporter(PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    try:
        with pytest.raises(DeviceError, match="cudaMallocAsync"):
            engine.share()
    finally:
        engine.kill()


def test_several_chunks_in_a_call(engine: CudaExporter, arena: Arena) -> None:
    """One launch each way; what is skipped counts from the first block of the first chunk."""
    layout, handles = engine.share()
    device = CudaDevice([layout], handles)
    chunks = [[3, 4], [0, 11], [7, 5]]
    ids = [block for chunk in chunks for block in chunk]
    stripes = -(-2 * layout.block_bytes // STRIPE)
    blocks = [tuple(range(n * stripes, (n + 1) * stripes)) for n in range(3)]
    slots = [slot for b in blocks for slot in arena.views(b, 2 * layout.block_bytes, STRIPE)]
    device.gather(ids, slots, STRIPE, chunks=3)
    for number, chunk in enumerate(chunks):
        part = slots[number * stripes : (number + 1) * stripes]
        assert b"".join(part) == engine.chunk(chunk)
    before = {block: engine.chunk([block]) for block in range(BLOCKS)}
    # Each chunk goes where the next one came from, but for the first three blocks.
    to = [0, 11, 7, 5, 3, 4]
    device.scatter(to, slots, STRIPE, skip_blocks=3, chunks=3)
    device.close()
    moved = dict(list(zip(to, ids, strict=True))[3:])
    for block in range(BLOCKS):
        assert engine.chunk([block]) == before[moved.get(block, block)]


def test_the_blocks_may_be_reused_before_the_return(engine: CudaExporter, arena: Arena) -> None:
    layout, handles = engine.share()
    device = CudaDevice([layout], handles)
    ids = list(range(BLOCKS))
    slots = slots_of(arena, BLOCKS * layout.block_bytes)
    want, told = engine.chunk(ids), []
    device.gather(ids, slots, STRIPE, on_blocks_read=lambda: told.append(True))
    device.close()
    assert told == [True]
    assert b"".join(slots) == want


def test_no_memory_of_a_dead_engine_stays_held() -> None:
    """CUDA keeps what was exported until the last process that opened it has closed it."""
    engine = CudaExporter(EXTRA_MIB="512")
    try:
        layout, handles = engine.share()
        device = CudaDevice([layout], handles)
    finally:
        engine.kill()
    held = torch.cuda.mem_get_info()[0]
    device.close()
    assert torch.cuda.mem_get_info()[0] - held >= 500 << 20


def test_a_forged_handle(engine: CudaExporter) -> None:
    layout, handles = engine.share()
    forged = msgspec.structs.replace(handles[0], memory_handle=os.urandom(64))
    with pytest.raises(DeviceError):
        CudaDevice([layout], [forged, *handles[1:]])
    CudaDevice([layout], handles).close()


def test_wrappers_of_parts_are_refused() -> None:
    tensor = torch.zeros(8, 8, device="cuda")
    for part in (tensor.t(), tensor[1:]):
        with pytest.raises(DeviceError, match="only contiguous tensors at the start"):
            CudaIPCWrapper(part)
    with pytest.raises(DeviceError, match="process that made it"):
        CudaIPCWrapper(tensor).to_tensor()
