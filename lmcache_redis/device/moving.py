"""How the chunks of a call get between an engine's blocks and slots: what is enqueued, in which order.

`DirectMoves`, for large pages: copies between pages and slots, without a kernel. The GPU's copy
engines make them, beside whatever its processors compute. Small copies would be slow.

`KernelMoves`, for small pages: one kernel reads or writes all pages of the call at the speed of GPU
memory, and the bus carries few large copies between staging and slots. The kernel has to wait until
the engine leaves it a time slice.

A move enqueues nothing that touches the engine's blocks before ``ready`` has returned, because
enqueued work cannot be taken back. What needs no blocks is enqueued before.
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_redis.device import driver, kernels
from lmcache_redis.device.bus import BusCopies
from lmcache_redis.device.calls import CopyCall, CopyPlanner
from lmcache_redis.device.gpu import Buffer, CopyStream, Gpu
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.device.table import SegmentTable, Storage, pack_ids, staging_stride_bytes
from lmcache_redis.native.madvise import address_of

_KEPT_PLANS = 64
# After its parameters, a kernel may have two pointers to scratch memory, which it does not use.
_SCRATCH = (0, 0)

_Int64s = npt.NDArray[np.int64]
Ready = Callable[[], None]


class Moves(ABC):
    """The moves of one group. Every method may raise DeviceError. Thread-safe."""

    @abstractmethod
    def check(self, call: CopyCall) -> BusCopies | _Int64s:
        """The plan of a call whose arguments are right: no byte has moved yet."""

    @abstractmethod
    def gather(
        self,
        call: CopyCall,
        plan: BusCopies | _Int64s,
        stream: CopyStream,
        ready: Ready,
        on_blocks_read: Callable[[], None] | None,
    ) -> None:
        """Blocks to slots. On return nothing is in flight."""

    @abstractmethod
    def scatter(
        self, call: CopyCall, plan: BusCopies | _Int64s, stream: CopyStream, ready: Ready
    ) -> None:
        """Slots to blocks. On return nothing is in flight."""

    def close(self) -> None:
        """Free what it has on the GPU, in its context. No call may be in progress."""


class DirectMoves(Moves):
    """Copies between pages and slots. Adjacent blocks whose pages touch are one copy."""

    def __init__(self, layout: KVLayout, storages: Sequence[Storage]) -> None:
        self._planner = CopyPlanner(layout)
        self._bases = np.array([storage.address for storage in storages], dtype=np.int64)

    def check(self, call: CopyCall) -> BusCopies:
        parts: list[tuple[_Int64s, _Int64s, _Int64s]] = []
        for chunk in call.chunks:
            storage, offset, slot, slot_offset, nbytes = self._planner.arrays(
                chunk.block_ids, call.stripe_payload_bytes, chunk.skip_blocks
            )
            slots = _addresses(chunk.slots)
            parts.append((slots[slot] + slot_offset, self._bases[storage] + offset, nbytes))
        host, device, nbytes = (np.concatenate(column) for column in zip(*parts, strict=True))
        return BusCopies(host, device, nbytes)

    def gather(
        self,
        call: CopyCall,
        plan: BusCopies | _Int64s,
        stream: CopyStream,
        ready: Ready,
        on_blocks_read: Callable[[], None] | None,
    ) -> None:
        assert isinstance(plan, BusCopies)
        ready()
        stream.copy_out(plan)
        stream.drain()
        if on_blocks_read is not None:
            on_blocks_read()

    def scatter(
        self, call: CopyCall, plan: BusCopies | _Int64s, stream: CopyStream, ready: Ready
    ) -> None:
        assert isinstance(plan, BusCopies)
        ready()
        stream.copy_in(plan)
        stream.drain()


class _PlacedLaunch(NamedTuple):
    """A `table.Launch` whose rows are on the GPU."""

    width: int
    rows: int
    count: int


class KernelMoves(Moves):
    """Pages by kernels, through staging. The kernels' tables stay on the GPU."""

    def __init__(self, layout: KVLayout, storages: Sequence[Storage], gpu: Gpu) -> None:
        self._table = SegmentTable(layout, storages)
        self._num_blocks = layout.num_blocks
        self._gpu = gpu
        self._lock = threading.Lock()
        self._launches: dict[int, tuple[_PlacedLaunch, ...]] = {}  # by the blocks of a chunk
        self._rows: list[Buffer] = []
        # What a kernel's driver or PTX lacks is known when the engine registers.
        for launch in self._table.tiles(1).launches:
            for scatter in (False, True):
                gpu.kernel(kernels.name_of(launch.width, scatter=scatter))

    def check(self, call: CopyCall) -> _Int64s:
        """The block ids, as a kernel takes them."""
        ids = [chunk.block_ids for chunk in call.chunks]
        return pack_ids(ids, self._num_blocks, [chunk.skip_blocks for chunk in call.chunks])

    def gather(
        self,
        call: CopyCall,
        plan: BusCopies | _Int64s,
        stream: CopyStream,
        ready: Ready,
        on_blocks_read: Callable[[], None] | None,
    ) -> None:
        assert isinstance(plan, np.ndarray)
        copies, staging = self._staged(call, stream)
        launch = self._prepared(call, plan, stream, staging, scatter=False)
        ready()
        launch()
        stream.mark_kernel()
        stream.copy_out(copies)
        if on_blocks_read is not None:
            stream.wait_for_kernel()
            on_blocks_read()
        stream.drain()

    def scatter(
        self, call: CopyCall, plan: BusCopies | _Int64s, stream: CopyStream, ready: Ready
    ) -> None:
        assert isinstance(plan, np.ndarray)
        copies, staging = self._staged(call, stream)
        launch = self._prepared(call, plan, stream, staging, scatter=True)
        stream.copy_in(copies)
        ready()
        launch()
        stream.drain()

    def close(self) -> None:
        self._launches.clear()
        while self._rows:
            self._rows.pop().close()

    def _staged(self, call: CopyCall, stream: CopyStream) -> tuple[BusCopies, int]:
        """The copies between staging and slots, and where staging is."""
        offsets, sizes, size_bytes = _stripes(
            len(call.chunks), call.chunk_bytes, call.stripe_payload_bytes
        )
        staging = stream.staging(size_bytes)
        slots = np.concatenate([_addresses(chunk.slots) for chunk in call.chunks])
        return BusCopies(slots, staging + offsets, sizes), staging

    def _prepared(
        self, call: CopyCall, ids: _Int64s, stream: CopyStream, staging: int, *, scatter: bool
    ) -> Callable[[], None]:
        """Enqueues the kernels, when it is called."""
        chunks, n_blocks = ids.shape
        launches = [
            (self._gpu.kernel(kernels.name_of(each.width, scatter=scatter)), each)
            for each in self._launches_of(n_blocks, stream)
        ]
        sent = stream.send(ids)
        stride_bytes = staging_stride_bytes(call.chunk_bytes)

        def launch() -> None:
            for function, (_, rows, count) in launches:
                arguments = (rows, sent, staging, n_blocks, stride_bytes, *_SCRATCH)
                driver.launch(function, (count, chunks), kernels.THREADS, arguments, stream.number)

        return launch

    def _launches_of(self, n_blocks: int, stream: CopyStream) -> tuple[_PlacedLaunch, ...]:
        """The rows of a chunk, on the GPU for every stream."""
        found = self._launches.get(n_blocks)
        if found is not None:
            return found
        with self._lock:
            if n_blocks not in self._launches:
                placed = []
                for width, rows in self._table.tiles(n_blocks).launches:
                    buffer = Buffer()
                    address = buffer.grown(rows.nbytes)
                    self._rows.append(buffer)
                    driver.enqueue_copy_in(address, rows.ctypes.data, rows.nbytes, stream.number)
                    placed.append(_PlacedLaunch(width, address, len(rows)))
                stream.drain()
                self._launches[n_blocks] = tuple(placed)
            return self._launches[n_blocks]


def moves_of(layout: KVLayout, storages: Sequence[Storage], gpu: Gpu) -> Moves:
    """By direct copies if no page is smaller than the GPU's setting, else by kernels."""
    if min(segment.page_bytes for segment in layout.segments) >= gpu.direct_copy_bytes:
        return DirectMoves(layout, storages)
    return KernelMoves(layout, storages, gpu)


@functools.lru_cache(_KEPT_PLANS)
def _stripes(chunks: int, chunk_bytes: int, stripe_bytes: int) -> tuple[_Int64s, _Int64s, int]:
    """Where the stripes of staged chunks begin, how long they are, and how long staging is."""
    begins = np.arange(0, chunk_bytes, stripe_bytes, dtype=np.int64)
    stride_bytes = staging_stride_bytes(chunk_bytes)
    starts = np.arange(chunks, dtype=np.int64)[:, None] * stride_bytes
    sizes = np.minimum(stripe_bytes, chunk_bytes - begins)
    return (starts + begins).ravel(), np.tile(sizes, chunks), chunks * stride_bytes


def _addresses(slots: Sequence[memoryview]) -> _Int64s:
    return np.array([address_of(slot) for slot in slots], dtype=np.int64)
