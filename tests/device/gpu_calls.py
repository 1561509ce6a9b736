# SPDX-License-Identifier: Apache-2.0
"""Calls of a `CudaDevice`, checked byte by byte: the engine's memory and the host's, all of it."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_redis.device import driver
from lmcache_redis.device.cuda import CudaDevice
from lmcache_redis.device.gpu import UNPINNED, Gpus
from lmcache_redis.device.handles import CudaHandle, SharedMemoryHandle
from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.device.mapping import EngineMemory
from lmcache_redis.native.madvise import address_of
from tests import cuda_driver
from tests.cuda_driver import more
from tests.device.gpu_exporter import GpuExporter
from tests.device.layouts import Call, Paged, calls, one

GUARD = 0xC3
_GAP_BYTES = 48
Int64s = npt.NDArray[np.int64]


NEEDS_DRIVER = [
    pytest.mark.servers,
    pytest.mark.skipif(bool(cuda_driver.missing()), reason=str(cuda_driver.missing())),
]


def unpinned_gpus(direct_copy_bytes: int = 64 << 10) -> Gpus:
    return Gpus(direct_copy_bytes, lambda addresses: np.full(len(addresses), UNPINNED))


class View:
    """An engine's memory as the test sees and changes it, by a mapping of its own."""

    def __init__(self, engine: GpuExporter) -> None:
        self._size_bytes = engine.size_bytes
        self._context = driver.retain_context(0)
        driver.set_context(self._context)
        self._memory = EngineMemory([engine.memory], 0)
        self._address = self._memory.storages[0].address
        self._stream = driver.create_stream()

    def read(self) -> bytes:
        driver.set_context(self._context)
        found = bytearray(self._size_bytes)
        driver.enqueue_copy_out(address_of(found), self._address, self._size_bytes, self._stream)
        driver.synchronize_stream(self._stream)
        return bytes(found)

    def write(self, content: bytes) -> None:
        driver.set_context(self._context)
        held = bytearray(content)
        more.copy_in(self._address, address_of(held), len(held))

    def close(self) -> None:
        driver.set_context(self._context)
        driver.destroy_stream(self._stream)
        self._memory.close()


class Host:
    """Host memory in pieces of `piece_bytes`, of which the first ones are pinned."""

    def __init__(self, piece_bytes: int, pieces: int, pinned: int) -> None:
        self.piece_bytes = piece_bytes
        self.pinned = pinned
        self._mapped = mmap.mmap(-1, piece_bytes * pieces)
        self.memory = np.frombuffer(self._mapped, dtype=np.uint8)
        self.address = int(self.memory.ctypes.data)
        driver.set_context(driver.retain_context(0))
        for piece in range(pinned):
            driver.pin(self.address + piece * piece_bytes, piece_bytes)

    def pieces_of(self, addresses: Int64s) -> Int64s:
        pieces = (addresses - self.address) // self.piece_bytes
        return np.where(pieces < self.pinned, pieces, UNPINNED)

    def slots(self, sizes: Sequence[int], gap_bytes: int, first: int = 0) -> list[memoryview]:
        """From the offset ``first`` on. None lies in two pieces."""
        found, at = [], first
        for size in sizes:
            if at // self.piece_bytes != (at + size - 1) // self.piece_bytes:
                at = -(-at // self.piece_bytes) * self.piece_bytes
            found.append(memoryview(self._mapped)[at : at + size])
            at += size + gap_bytes
        assert at - gap_bytes <= self.memory.size
        return found

    def close(self) -> None:
        for piece in range(self.pinned):
            driver.unpin(self.address + piece * self.piece_bytes)


def handles_of(engine: GpuExporter, case: Paged, shift: int) -> tuple[list[CudaHandle], list[int]]:
    """A handle of each storage, and where it begins: one after the other, with gaps."""
    handles, starts, at = [], [], _GAP_BYTES + shift
    for storage in case.storages:
        starts.append(at)
        handles.append(range_of(engine, storage.size, at))
        at += storage.size + _GAP_BYTES
    assert at <= engine.size_bytes
    return handles, starts


@contextlib.contextmanager
def seen(engine: GpuExporter) -> Iterator[tuple[View, Host]]:
    """The engine's memory, and the host's: two pinned pieces, and one that is not."""
    view, host = View(engine), Host(64 << 10, 3, 2)
    yield view, host
    host.close()
    view.close()


@contextlib.contextmanager
def viewed(engine: GpuExporter) -> Iterator[tuple[View, Host]]:
    """As `seen`, with the driver of the tests, which is like that of a new process.

    Whoever uses it leaves nothing behind.
    """
    cuda_driver.reset()
    try:
        with seen(engine) as both:
            yield both
        assert cuda_driver.get("refusals") == 0
        left = cuda_driver.counts()
        assert set(left) <= {"contexts", "modules"}, left
    finally:
        cuda_driver.reset()


def changed(handle: CudaHandle, **changes: Any) -> CudaHandle:
    return msgspec.structs.replace(handle, **changes)


def range_of(engine: GpuExporter, size_bytes: int, begin: int = 0) -> CudaHandle:
    """The handle of a part of the engine's memory."""
    offset_bytes = engine.memory.offset_bytes + begin
    return changed(engine.memory, offset_bytes=offset_bytes, size_bytes=size_bytes)


def opened(
    engine: GpuExporter,
    layout: KVLayout,
    gpus: Gpus,
    signals: SharedMemoryHandle | None = None,
    begin: int = 0,
) -> CudaDevice:
    """A device of one layout over the part of the engine's memory that begins there."""
    size_bytes = max(s.offset + layout.num_blocks * s.block_stride for s in layout.segments)
    return CudaDevice([layout], [range_of(engine, size_bytes, begin)], gpus, signals)


def laid_out(storages: Sequence[np.ndarray], starts: Sequence[int], size_bytes: int) -> bytes:
    whole = np.full(size_bytes, GUARD, np.uint8)
    for storage, start in zip(storages, starts, strict=True):
        whole[start : start + storage.size] = storage
    return whole.tobytes()


def put(
    host: Host, slots: Sequence[memoryview], parts: Sequence[memoryview], into: np.ndarray
) -> None:
    """Each part where its slot is, in an image of the host's memory."""
    for slot, part in zip(slots, parts, strict=True):
        at = address_of(slot) - host.address
        into[at : at + len(part)] = np.frombuffer(part, np.uint8)


def check_on_gpu(
    engine: GpuExporter, view: View, host: Host, gpus: Gpus, call: Call, *, shift: int, gap: int
) -> None:
    """Both directions, against the reference gather and scatter."""
    case, count = call.case, len(call.chunks)
    handles, starts = handles_of(engine, case, shift)
    view.write(laid_out(case.storages, starts, engine.size_bytes))
    host.memory[:] = GUARD
    device = CudaDevice([case.layout], handles, gpus, engine.signals)
    try:
        slots = host.slots([slot.nbytes for slot in call.empty_slots()], gap)
        told: list[bytes] = []
        device.gather(call.over(slots), lambda: told.append(b""))
        assert told == [b""]
        want = np.full_like(host.memory, GUARD)
        put(host, slots, call.filled_slots(call.gathered()), want)
        assert np.array_equal(host.memory, want)
        assert view.read() == laid_out(case.storages, starts, engine.size_bytes)

        chunks = [np.random.default_rng(n).bytes(call.chunk_bytes) for n in range(count)]
        put(host, slots, call.filled_slots(chunks), host.memory)
        before = host.memory.copy()
        device.scatter(call.over(slots, call.skip_blocks))
        assert view.read() == laid_out(call.scattered(chunks), starts, engine.size_bytes)
        assert np.array_equal(host.memory, before)
    finally:
        device.close()


def check_both_directions(
    engine: GpuExporter, memory: tuple[View, Host], direct_copy_bytes: int, examples: int
) -> None:
    """Any layout, page size, alignment, stripes, skipped blocks, number of chunks."""
    view, host = memory
    gpus = Gpus(direct_copy_bytes, host.pieces_of)

    @settings(max_examples=examples)
    @given(
        st.sampled_from([1, 2, 4, 8, 16]).flatmap(lambda granule: calls(granule, "cuda")),
        st.sampled_from([0, 0, 1, 8]),
        st.sampled_from([0, 0, 1, 16, 300]),
    )
    def check(call: Call, shift: int, gap: int) -> None:
        call.stripe = max(call.stripe, call.chunk_bytes // 64)
        check_on_gpu(engine, view, host, gpus, call, shift=shift, gap=gap)

    check()


def plain(page_bytes: int, blocks: int, segments: int, stride: int | None = None) -> KVLayout:
    """Segments side by side in one storage, of adjacent pages unless they are a stride apart."""
    step = stride or page_bytes
    places = tuple(Segment(0, n * blocks * step, page_bytes, step) for n in range(segments))
    return KVLayout((), "uint8", "cuda", 16, blocks, places)


def check_several_workers(
    engine: GpuExporter, memory: tuple[View, Host], direct_copy_bytes: int, rounds: int
) -> None:
    """Two workers share the streams of a GPU, and four threads copy at once."""
    host = memory[1]
    content = engine.write(6)
    gpus = Gpus(direct_copy_bytes, host.pieces_of)
    devices = [opened(engine, plain(1024, 16, 1), gpus, begin=n << 14) for n in range(2)]

    def gather(number: int) -> None:
        for n in range(rounds):
            ids = [(n + at) % 16 for at in range(3)]
            slots = host.slots([1024] * 3, 8, first=number * 4096)
            devices[number % 2].gather(one(ids, slots))
            begins = [(number % 2) * (1 << 14) + block * 1024 for block in ids]
            assert b"".join(slots) == b"".join(content[b : b + 1024] for b in begins)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(gather, range(4)))
    devices[0].close()
    gather(1)
    devices[1].close()
