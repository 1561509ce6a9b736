# SPDX-License-Identifier: Apache-2.0
"""The calls of a device: what they promise, and which bytes they copy where.

A worker registers handles and a layout. The agent maps the memory once (`context.open_device`).
Gathers and scatters run on its copy threads, several at a time. A call moves one chunk, or several
if chunks are small and calls are expensive. `DeviceContext.close` waits for the calls in progress
and unmaps. After the engine has died, CPU memory stays usable because the mapping keeps it alive;
calls on CUDA memory raise DeviceError.

The bytes of a chunk are segment-major: all pages of segment 0 in token order, then all of segment
1, and so on. They fill the chunk's slots, which are its stripes, one after the other. The same plan
serves both directions: a gather copies from the device to slots, a scatter from slots to it.

`CopyPlanner` lists the copies of a chunk. A GPU has a table for its kernels too (`table`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_redis.device.layout import KVLayout
from lmcache_redis.errors import DeviceError
from lmcache_redis.native.madvise import address_of

_Int64s = npt.NDArray[np.int64]
_MAX_BYTES = 2**63 - 1
_KEPT_SHAPES = 64


# A storage and the offset in it; a slot and the offset in it; the bytes. A slot is an index of the
# chunk's slots, one per stripe.
Copy = tuple[int, int, int, int, int]


class CopyArrays(NamedTuple):
    """`Copy` after `Copy`, by columns."""

    storage: _Int64s
    device_offset: _Int64s
    slot: _Int64s
    slot_offset: _Int64s
    nbytes: _Int64s


class ChunkCopy(NamedTuple):
    """One chunk of a call.

    block_ids: in token order. slots: writable memoryviews of bytes, one for each stripe, together
    as long as the chunk. skip_blocks: how many of the first blocks a scatter leaves.
    """

    block_ids: Sequence[int]
    slots: Sequence[memoryview]
    skip_blocks: int = 0


class CopyCall(NamedTuple):
    """A gather or a scatter of parts of chunks, equally long, in one group.

    after: the ticket of the signal after which the blocks may be read or written, because an engine
    on a GPU may still compute them, or zero them (`device.signals`); None on the CPU, where the
    engine's memory is coherent. until_ns: the engine may reuse the blocks then
    (``time.monotonic_ns()``).
    """

    chunks: Sequence[ChunkCopy]
    group: int = 0
    after: int | None = None
    until_ns: int | None = None


class DeviceContext(ABC):
    """One worker's paged KV cache, mapped. Every method may raise DeviceError.

    Slots and blocks belong to a call until it returns. Arguments are checked before the first byte
    moves: a call that refuses an argument has changed nothing.

    A call that waits for the engine's signal until its ``until_ns`` raises without touching the
    blocks. On the CPU, a call checks the time before each MiB: a late call raises after copying a
    part.

    Attributes:
        layouts: of each group.
        call_bytes: what a call should move at least, in whole chunks; 0: one chunk.
        on_host_cores: whether the engine computes on the cores that the agent uses for copies and
            transfers.
    """

    call_bytes: int
    on_host_cores: bool

    def __init__(self, layouts: Sequence[KVLayout]) -> None:
        self.layouts = layouts
        self._block_bytes = [layout.block_bytes for layout in layouts]
        self._changed = threading.Condition()
        self._in_progress = 0
        self._is_ended = False
        self._is_mapped = True

    @abstractmethod
    def gather(self, call: CopyCall, on_blocks_read: Callable[[], None] | None = None) -> None:
        """Copy the chunks from their blocks into their slots; return when that is complete.

        On a GPU, ``on_blocks_read`` is called once, on the same thread, when the blocks have been
        read and the engine may reuse them: long before the return, if a kernel reads them. On the
        CPU it is not called: the blocks are read when the call returns.
        """

    @abstractmethod
    def scatter(self, call: CopyCall) -> None:
        """Copy the chunks from their slots into their blocks, which the engine may read then."""

    def end_calls(self) -> None:
        """Wait for calls in progress. Later calls raise DeviceError. Idempotent."""
        with self._changed:
            self._is_ended = True
            self._changed.wait_for(lambda: self._in_progress == 0)

    def close(self) -> None:
        """End the calls, then unmap. Idempotent."""
        self.end_calls()
        with self._changed:
            is_first, self._is_mapped = self._is_mapped, False
        if is_first:
            self._unmap()

    @abstractmethod
    def _unmap(self) -> None:
        """Release the memory."""

    @contextlib.contextmanager
    def _mapped(self, call: CopyCall) -> Iterator[None]:
        """Keeps the memory mapped during a call, whose slots are checked.

        Raises DeviceError after `close`.
        """
        for chunk in call.chunks:
            chunk_bytes = len(chunk.block_ids) * self._block_bytes[call.group]
            check_slots([slot.nbytes for slot in chunk.slots], chunk_bytes)
        with self._changed:
            if self._is_ended:
                raise DeviceError("the worker's KV cache is no longer mapped")
            self._in_progress += 1
        try:
            yield
        finally:
            with self._changed:
                self._in_progress -= 1
                self._changed.notify_all()


class _Shape(NamedTuple):
    """A plan without block ids: ``ids[block] * stride`` is missing in its device offsets."""

    copies: CopyArrays
    block: _Int64s
    stride: _Int64s


class CopyPlanner:
    """Plans copies for one layout, which must have passed `KVLayout.check`. Thread-safe.

    Plans of chunks that have adjacent blocks at the same positions differ only in device offsets.
    The rest of a plan is computed once and kept.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._num_blocks = layout.num_blocks
        self._block_bytes = layout.block_bytes
        columns = [(s.storage, s.offset, s.page_bytes, s.block_stride) for s in layout.segments]
        segments = np.array(columns, dtype=np.int64).reshape(-1, 4)
        # No method: it would have this object, which the collector alone would free then.
        self._shape = functools.lru_cache(_KEPT_SHAPES)(functools.partial(_make_shape, segments))

    def copies(
        self, block_ids: Sequence[int], slot_bytes: Sequence[int], skip_blocks: int = 0
    ) -> list[Copy]:
        """The copies of `arrays`, one by one."""
        arrays = self.arrays(block_ids, slot_bytes, skip_blocks)
        columns = [column.tolist() for column in arrays]
        return list(zip(*columns, strict=True))

    def arrays(
        self, block_ids: Sequence[int], slot_bytes: Sequence[int], skip_blocks: int = 0
    ) -> CopyArrays:
        """The copies of one chunk, in chunk order.

        A run of adjacent blocks is one copy if their pages are adjacent. No copy crosses the end of
        a slot.

        block_ids: the chunk's blocks in token order; repetitions are allowed. slot_bytes: of each
        slot. skip_blocks: leading blocks whose copies are left out. Raises DeviceError if an id, a
        size or a count is out of bounds.
        """
        ids = checked_ids(block_ids, self._num_blocks)
        check_slots(slot_bytes, len(ids) * self._block_bytes)
        if not 0 <= skip_blocks <= len(ids):
            raise DeviceError(f"a chunk of {len(ids)} blocks cannot skip {skip_blocks}")
        follows = (ids[1:] == ids[:-1] + 1).tobytes()
        copies, block, stride = self._shape(len(ids), follows, tuple(slot_bytes), skip_blocks)
        storage, offset, slot, slot_offset, nbytes = copies
        return CopyArrays(storage, offset + ids[block] * stride, slot, slot_offset, nbytes)


def _make_shape(
    segments: _Int64s, n_blocks: int, follows: bytes, slot_bytes: tuple[int, ...], skip_blocks: int
) -> _Shape:
    """The plan of a chunk. segments: a row each. follows[k]: block k + 1 is adjacent to block k."""
    blocks = np.arange(skip_blocks, n_blocks, dtype=np.int64)
    begins = np.ones(n_blocks, dtype=np.bool_)
    begins[1:] = ~np.frombuffer(follows, dtype=np.bool_)
    begins[skip_blocks : skip_blocks + 1] = True
    starts = blocks[begins[skip_blocks:]]
    lengths = np.diff(starts, append=n_blocks)

    page_bytes, block_stride = segments[:, 2], segments[:, 3]
    before = (np.cumsum(page_bytes) - page_bytes) * n_blocks
    touching = np.flatnonzero(page_bytes == block_stride)
    apart = np.flatnonzero(page_bytes != block_stride)
    # A piece is one segment's pages of one run of blocks.
    segment = np.concatenate([touching.repeat(len(starts)), apart.repeat(len(blocks))])
    block = np.concatenate([np.tile(starts, len(touching)), np.tile(blocks, len(apart))])
    count = np.concatenate(
        [np.tile(lengths, len(touching)), np.ones(len(apart) * len(blocks), dtype=np.int64)]
    )
    order = np.lexsort((block, segment))
    segment, block, count = segment[order], block[order], count[order]
    begin = before[segment] + block * page_bytes[segment]
    nbytes = count * page_bytes[segment]

    # Cut the pieces where a slot ends.
    sizes = np.array(slot_bytes, dtype=np.int64)
    ends = np.cumsum(sizes)
    slot_begins = ends - sizes
    first = np.searchsorted(ends, begin, side="right")
    parts = np.searchsorted(ends, begin + nbytes, side="left") - first + 1
    piece = np.arange(len(begin)).repeat(parts)
    part = np.arange(len(piece)) - (np.cumsum(parts) - parts).repeat(parts)
    slot = first[piece] + part
    lower = np.maximum(begin[piece], slot_begins[slot])
    upper = np.minimum(begin[piece] + nbytes[piece], ends[slot])
    segment, block = segment[piece], block[piece]
    copies = CopyArrays(
        storage=segments[segment, 0],
        device_offset=segments[segment, 1] + lower - begin[piece],
        slot=slot,
        slot_offset=lower - slot_begins[slot],
        nbytes=upper - lower,
    )
    return _Shape(copies, block, block_stride[segment])


def checked_ids(block_ids: Sequence[int], num_blocks: int) -> _Int64s:
    """The ids as an array. Raises DeviceError unless each is from 0 to ``num_blocks - 1``."""
    try:
        ids = np.asarray(block_ids, dtype=np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise DeviceError(f"block ids must be integers: {error}") from error
    if ids.ndim != 1:
        raise DeviceError(f"block ids of shape {ids.shape}; they must be one row")
    # One comparison for both ends: a negative id is a huge unsigned one.
    if ids.size and int(ids.view(np.uint64).max()) >= num_blocks:
        raise DeviceError(
            f"block ids from {ids.min()} to {ids.max()}; the KV cache has {num_blocks} blocks"
        )
    return ids


def addresses(slots: Sequence[memoryview]) -> _Int64s:
    """Where slots begin. Raises DeviceError unless each is contiguous and writable."""
    try:
        return np.array([address_of(slot) for slot in slots], dtype=np.int64)
    except (BufferError, TypeError, ValueError) as error:
        raise DeviceError(f"a slot cannot be copied to and from: {error}") from error


def check_slots(slot_bytes: Sequence[int], chunk_bytes: int) -> None:
    """Raise DeviceError unless slots of these sizes hold a chunk, and nothing else."""
    held_bytes = sum(slot_bytes)
    if held_bytes != chunk_bytes or chunk_bytes > _MAX_BYTES or min(slot_bytes, default=1) <= 0:
        raise DeviceError(
            f"a chunk of {chunk_bytes} bytes cannot fill {len(slot_bytes)} slots of {held_bytes}"
        )
