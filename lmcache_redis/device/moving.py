# SPDX-License-Identifier: Apache-2.0
"""What a call enqueues, in which order, to move chunks between an engine's blocks and slots.

`DirectMoves`, for large pages: copies between pages and slots, without a kernel. The GPU's copy
engines make them, beside whatever its processors compute. Small copies would be slow.

`KernelMoves`, for small pages: one kernel reads or writes all pages of the call at the speed of GPU
memory, and the bus carries few large copies between staging and slots. The kernel has to wait until
the engine leaves it a time slice.

A move checks its arguments before anything is enqueued, and returns when nothing is in flight. It
enqueues nothing that touches the engine's blocks before ``ready``, which it calls once, has
returned, because enqueued work cannot be taken back. What needs no blocks is enqueued before that.
Moves are thread-safe, and may raise DeviceError.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from lmcache_redis.device import driver, kernels
from lmcache_redis.device.calls import CopyCall, CopyPlanner, addresses
from lmcache_redis.device.gpu import BusCopies, CopyStream, Gpu
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.device.table import SegmentTable, Storage, pack_ids, staging_stride_bytes

_Int64s = npt.NDArray[np.int64]
Ready = Callable[[], None]
OnRead: TypeAlias = "Callable[[], None] | None"  # when the blocks have been read


class DirectMoves:
    """Copies between pages and slots. Adjacent blocks whose pages touch are one copy."""

    def __init__(self, layout: KVLayout, storages: Sequence[Storage]) -> None:
        self._planner = CopyPlanner(layout)
        self._bases = np.array([storage.address for storage in storages], dtype=np.int64)

    def gather(self, call: CopyCall, stream: CopyStream, ready: Ready, on_read: OnRead) -> None:
        self._move(call, stream, ready, inward=False)
        if on_read is not None:
            on_read()

    def scatter(self, call: CopyCall, stream: CopyStream, ready: Ready) -> None:
        self._move(call, stream, ready, inward=True)

    def close(self) -> None:
        """Nothing of it is on the GPU."""

    def _move(self, call: CopyCall, stream: CopyStream, ready: Ready, *, inward: bool) -> None:
        parts: list[tuple[_Int64s, _Int64s, _Int64s]] = []
        for chunk in call.chunks:
            slot_bytes = [slot.nbytes for slot in chunk.slots]
            storage, offset, slot, slot_offset, nbytes = self._planner.arrays(
                chunk.block_ids, slot_bytes, chunk.skip_blocks
            )
            slots = addresses(chunk.slots)
            parts.append((slots[slot] + slot_offset, self._bases[storage] + offset, nbytes))
        copies = BusCopies(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        ready()
        stream.copy(copies, inward=inward)
        stream.drain()


class PlacedLaunch(NamedTuple):
    """A launch of `table` whose rows, one for each tile, are on the GPU, at ``rows``."""

    width: int
    rows: int
    tiles: int


class KernelMoves:
    """Pages by kernels, through staging. The kernels' tables stay on the GPU."""

    def __init__(self, layout: KVLayout, storages: Sequence[Storage], gpu: Gpu) -> None:
        self._table = SegmentTable(layout, storages)
        self._num_blocks = layout.num_blocks
        self._gpu = gpu
        self._lock = threading.Lock()
        self._launches: dict[int, tuple[PlacedLaunch, ...]] = {}  # by the blocks of a chunk
        self._rows = ExitStack()
        # What the driver or this installation lacks is known when the engine registers.
        for width, _ in self._table.launches(1):
            for scatter in (False, True):
                self._function(width, scatter=scatter)

    def gather(self, call: CopyCall, stream: CopyStream, ready: Ready, on_read: OnRead) -> None:
        copies, launch = self._prepared(call, stream, scatter=False)
        ready()
        launch()
        stream.mark_kernel()
        stream.copy(copies, inward=False)
        if on_read is not None:
            stream.wait_for_kernel()
            on_read()
        stream.drain()

    def scatter(self, call: CopyCall, stream: CopyStream, ready: Ready) -> None:
        copies, launch = self._prepared(call, stream, scatter=True)
        stream.copy(copies, inward=True)
        ready()
        launch()
        stream.drain()

    def close(self) -> None:
        """Free what is on the GPU, in its context. No call may be in progress."""
        self._launches.clear()
        self._rows.close()

    def _prepared(
        self, call: CopyCall, stream: CopyStream, *, scatter: bool
    ) -> tuple[BusCopies, Ready]:
        """The copies between staging and slots, and what enqueues the kernels."""
        each_ids = [chunk.block_ids for chunk in call.chunks]
        ids = pack_ids(each_ids, self._num_blocks, [chunk.skip_blocks for chunk in call.chunks])
        chunks, n_blocks = ids.shape
        chunk_bytes = n_blocks * self._table.block_bytes
        stride_bytes = staging_stride_bytes(chunk_bytes)
        staging = stream.staging.grown(chunks * stride_bytes)
        slots = [slot for chunk in call.chunks for slot in chunk.slots]
        sizes = np.array([slot.nbytes for slot in slots], dtype=np.int64)
        number, offset = np.divmod(np.cumsum(sizes) - sizes, chunk_bytes)
        copies = BusCopies(addresses(slots), staging + number * stride_bytes + offset, sizes)
        launches = [
            (self._function(each.width, scatter=scatter), each)
            for each in self._placed(n_blocks, stream)
        ]
        sent = stream.send(ids)

        def launch() -> None:
            for function, (_, rows, tiles) in launches:
                parameters = (rows, sent, staging, n_blocks, stride_bytes)
                grid = (tiles, chunks)
                driver.launch(function, grid, kernels.THREADS, parameters, stream.number)

        return copies, launch

    def _function(self, width: int, *, scatter: bool) -> int:
        """The kernel that gathers or scatters by accesses of this width."""
        return self._gpu.kernel(kernels.name_of(width, scatter=scatter))

    def _placed(self, n_blocks: int, stream: CopyStream) -> tuple[PlacedLaunch, ...]:
        """The launches of a chunk. Their rows are on the GPU for every stream."""
        found = self._launches.get(n_blocks)
        if found is not None:
            return found
        with self._lock:
            if n_blocks not in self._launches:
                placed = []
                for width, rows in self._table.launches(n_blocks):
                    address = driver.allocate(rows.nbytes)
                    self._rows.callback(driver.free, address)
                    driver.enqueue_copy_in(address, rows.ctypes.data, rows.nbytes, stream.number)
                    placed.append(PlacedLaunch(width, address, len(rows)))
                stream.drain()
                self._launches[n_blocks] = tuple(placed)
            return self._launches[n_blocks]


Moves = DirectMoves | KernelMoves


def moves_of(layout: KVLayout, storages: Sequence[Storage], gpu: Gpu) -> Moves:
    """By direct copies if no page is smaller than the GPU's setting, else by kernels."""
    if min(segment.page_bytes for segment in layout.segments) >= gpu.direct_copy_bytes:
        return DirectMoves(layout, storages)
    return KernelMoves(layout, storages, gpu)
