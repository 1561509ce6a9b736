"""What a call enqueues, in which order, to move chunks between an engine's blocks and slots.

`DirectMoves`, for large pages: copies between pages and slots, without a kernel. The GPU's copy
engines make them, beside whatever its processors compute. Small copies would be slow.

`KernelMoves`, for small pages: one kernel reads or writes all pages of the call at the speed of GPU
memory, and the bus carries few large copies between staging and slots. The kernel has to wait until
the engine leaves it a time slice.

A move enqueues nothing that touches the engine's blocks before ``ready`` has returned, because
enqueued work cannot be taken back. What needs no blocks is enqueued before that.
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

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
Moves: TypeAlias = "DirectMoves | KernelMoves"


class PlannedMove(ABC):
    """A call whose arguments are right. Every method may raise DeviceError.

    On return nothing is in flight. ``ready`` is called once, see above.
    """

    @abstractmethod
    def gather(
        self, stream: CopyStream, ready: Ready, on_blocks_read: Callable[[], None] | None
    ) -> None:
        """Blocks to slots."""

    @abstractmethod
    def scatter(self, stream: CopyStream, ready: Ready) -> None:
        """Slots to blocks."""


class DirectMoves:
    """Copies between pages and slots. Adjacent blocks whose pages touch are one copy."""

    def __init__(self, layout: KVLayout, storages: Sequence[Storage]) -> None:
        self._planner = CopyPlanner(layout)
        self._bases = np.array([storage.address for storage in storages], dtype=np.int64)

    def plan(self, call: CopyCall) -> PlannedMove:
        """Raises DeviceError for a wrong argument: no byte has moved yet."""
        parts: list[tuple[_Int64s, _Int64s, _Int64s]] = []
        for chunk in call.chunks:
            storage, offset, slot, slot_offset, nbytes = self._planner.arrays(
                chunk.block_ids, call.stripe_payload_bytes, chunk.skip_blocks
            )
            slots = _addresses(chunk.slots)
            parts.append((slots[slot] + slot_offset, self._bases[storage] + offset, nbytes))
        host, device, nbytes = (np.concatenate(column) for column in zip(*parts, strict=True))
        return _DirectMove(BusCopies(host, device, nbytes))

    def close(self) -> None:
        """It has nothing on the GPU."""


class _DirectMove(PlannedMove):
    def __init__(self, copies: BusCopies) -> None:
        self._copies = copies

    def gather(
        self, stream: CopyStream, ready: Ready, on_blocks_read: Callable[[], None] | None
    ) -> None:
        ready()
        stream.copy_out(self._copies)
        stream.drain()
        if on_blocks_read is not None:
            on_blocks_read()

    def scatter(self, stream: CopyStream, ready: Ready) -> None:
        ready()
        stream.copy_in(self._copies)
        stream.drain()


class PlacedLaunch(NamedTuple):
    """A launch of `table` whose ``count`` rows are on the GPU, at ``rows``."""

    width: int
    rows: int
    count: int


class KernelMoves:
    """Pages by kernels, through staging. The kernels' tables stay on the GPU. Thread-safe."""

    def __init__(self, layout: KVLayout, storages: Sequence[Storage], gpu: Gpu) -> None:
        self._table = SegmentTable(layout, storages)
        self._num_blocks = layout.num_blocks
        self._gpu = gpu
        self._lock = threading.Lock()
        self._launches: dict[int, tuple[PlacedLaunch, ...]] = {}  # by the blocks of a chunk
        self._rows: list[Buffer] = []
        # What the driver or this installation lacks is known when the engine registers.
        for width, _ in self._table.tiles(1).launches:
            self.functions(width)

    def plan(self, call: CopyCall) -> PlannedMove:
        """Raises DeviceError for a wrong argument: no byte has moved yet."""
        ids = [chunk.block_ids for chunk in call.chunks]
        skips = [chunk.skip_blocks for chunk in call.chunks]
        return _KernelMove(self, call, pack_ids(ids, self._num_blocks, skips))

    def close(self) -> None:
        """Free the tables, in the GPU's context. No call may be in progress."""
        self._launches.clear()
        while self._rows:
            self._rows.pop().close()

    def functions(self, width: int) -> tuple[int, int]:
        """The kernels that gather and scatter by accesses of this width."""
        names = [kernels.name_of(width, scatter=scatter) for scatter in (False, True)]
        gather, scatter = map(self._gpu.kernel, names)
        return gather, scatter

    def launches(self, n_blocks: int, stream: CopyStream) -> tuple[PlacedLaunch, ...]:
        """The launches of a chunk. Their rows are on the GPU for every stream."""
        found = self._launches.get(n_blocks)
        if found is not None:
            return found
        with self._lock:
            if n_blocks not in self._launches:
                placed = []
                for width, rows in self._table.tiles(n_blocks).launches:
                    self._rows.append(Buffer())
                    address = self._rows[-1].grown(rows.nbytes)
                    driver.enqueue_copy_in(address, rows.ctypes.data, rows.nbytes, stream.number)
                    placed.append(PlacedLaunch(width, address, len(rows)))
                stream.drain()
                self._launches[n_blocks] = tuple(placed)
            return self._launches[n_blocks]


class _KernelMove(PlannedMove):
    def __init__(self, moves: KernelMoves, call: CopyCall, ids: _Int64s) -> None:
        self._moves = moves
        self._call = call
        self._ids = ids

    def gather(
        self, stream: CopyStream, ready: Ready, on_blocks_read: Callable[[], None] | None
    ) -> None:
        copies, staging = self._staged(stream)
        launch = self._prepared(stream, staging, scatter=False)
        ready()
        launch()
        stream.mark_kernel()
        stream.copy_out(copies)
        if on_blocks_read is not None:
            stream.wait_for_kernel()
            on_blocks_read()
        stream.drain()

    def scatter(self, stream: CopyStream, ready: Ready) -> None:
        copies, staging = self._staged(stream)
        launch = self._prepared(stream, staging, scatter=True)
        stream.copy_in(copies)
        ready()
        launch()
        stream.drain()

    def _staged(self, stream: CopyStream) -> tuple[BusCopies, int]:
        """The copies between staging and slots, and where staging is."""
        chunks, chunk_bytes = self._call.chunks, self._call.chunk_bytes
        offsets, sizes, size_bytes = _stripes(
            len(chunks), chunk_bytes, self._call.stripe_payload_bytes
        )
        staging = stream.staging(size_bytes)
        slots = np.concatenate([_addresses(chunk.slots) for chunk in chunks])
        return BusCopies(slots, staging + offsets, sizes), staging

    def _prepared(self, stream: CopyStream, staging: int, *, scatter: bool) -> Ready:
        """Sends what the kernels need beside staging; the result enqueues them."""
        chunks, n_blocks = self._ids.shape
        launches = [
            (self._moves.functions(each.width)[scatter], each)
            for each in self._moves.launches(n_blocks, stream)
        ]
        sent = stream.send(self._ids)
        stride_bytes = staging_stride_bytes(self._call.chunk_bytes)

        def launch() -> None:
            for function, (_, rows, count) in launches:
                parameters = (rows, sent, staging, n_blocks, stride_bytes, *_SCRATCH)
                grid = (count, chunks)
                driver.launch(function, grid, kernels.THREADS, parameters, stream.number)

        return launch


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
