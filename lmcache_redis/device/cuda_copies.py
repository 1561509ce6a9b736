"""Copies between pages and staging on a GPU: Triton's kernels if they run here, else torch alone.

`lmcache_redis.device.cuda_kernels` needs one launch for a whole chunk. It needs Triton, which needs
a C compiler. `IndexedCopies` needs torch alone: one ``index_select`` or ``index_copy_`` for each
*batch*, with elements of at most 8 bytes. Both write the same bytes to the same addresses.

A batch is a run of segments (in chunk order) in one storage, at equal distances, with equal page
sizes and strides: all layers of most KV caches. Its pages form one strided array
``[segment, block, element]``. The chunk's blocks are selected from it; the selection, written
contiguously, is exactly the batch's part of the chunk.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.device.table import (
    SKIPPED,
    BlockIds,
    SegmentTable,
    Storage,
    staging_stride_bytes,
)

logger = logging.getLogger(__name__)

_ELEMENT_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class PageCopies(Protocol):
    """Enqueues copies on the current CUDA stream; the caller waits. Thread-safe.

    ``staging`` is flat uint8 on the device; chunk ``i`` begins at ``i`` times the chunk's bytes,
    rounded up to 16.
    """

    name: str

    def gather(self, block_ids: BlockIds, staging: torch.Tensor) -> None:
        """Pages to staging, except those that are `SKIPPED`."""
        ...

    def scatter(self, block_ids: BlockIds, staging: torch.Tensor) -> None:
        """Staging to pages, except those that are `SKIPPED`.

        If a block is named twice, either of its pages may win.
        """
        ...


def page_copies(layout: KVLayout, storages: Sequence[torch.Tensor]) -> PageCopies:
    """Triton's kernels if they run here, else torch's. Logs the choice once.

    layout: checked here against the storages. storages: flat uint8, on one device, one for each
    that the segments name. Raises DeviceError if the layout exceeds its storages.
    """
    table = SegmentTable(layout, [Storage(each.data_ptr(), each.numel()) for each in storages])
    try:
        from lmcache_redis.device.cuda_kernels import TritonCopies

        kernels = TritonCopies(table, storages[0].device)
        kernels.warm_up()
    except ImportError as error:
        reason = f"Triton cannot be imported ({error})"
    except Exception as error:
        # Triton's errors have no common type: no C compiler, no Python headers, a read-only cache
        # directory, an unknown GPU.
        logger.debug("Triton cannot run a kernel", exc_info=True)
        first_line = str(error).partition("\n")[0]  # a compiler's message continues with source
        reason = f"Triton cannot run a kernel ({type(error).__name__}: {first_line})"
    else:
        _log_once(logging.INFO, "paged KV caches on GPUs are copied by Triton kernels")
        return kernels
    _log_once(
        logging.WARNING,
        f"paged KV caches on GPUs are copied by torch alone, slower than memory allows: {reason}",
    )
    return IndexedCopies(layout, storages)


@functools.cache
def _log_once(level: int, message: str) -> None:
    logger.log(level, message)


class IndexedCopies:
    """A layout's gathers and scatters; a `PageCopies`.

    layout: has passed `KVLayout.check`. storages: flat uint8, one for each that the segments name.
    """

    name = "torch"

    def __init__(self, layout: KVLayout, storages: Sequence[torch.Tensor]) -> None:
        batches = plan_batches(layout, [storage.data_ptr() for storage in storages])
        self._block_bytes = layout.block_bytes
        self._pages = [
            (batch, view_pages(storages[batch.storage], batch, layout.num_blocks))
            for batch in batches
        ]

    def gather(self, block_ids: BlockIds, staging: torch.Tensor) -> None:
        for skip, ids, chunk in self._chunks(block_ids, staging):
            for batch, pages in self._pages:
                part = _part(chunk, batch, len(ids))
                if skip:
                    part[:, skip:] = pages.index_select(1, ids[skip:])
                else:
                    torch.index_select(pages, 1, ids, out=part)

    def scatter(self, block_ids: BlockIds, staging: torch.Tensor) -> None:
        for skip, ids, chunk in self._chunks(block_ids, staging):
            for batch, pages in self._pages:
                pages.index_copy_(1, ids[skip:], _part(chunk, batch, len(ids))[:, skip:])

    def _chunks(
        self, block_ids: BlockIds, staging: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """For each chunk: number of blocks to skip, ids, bytes in staging."""
        skips = (block_ids.host == SKIPPED).sum(axis=1)  # `pack_ids` skips at the front
        chunk_bytes = block_ids.host.shape[1] * self._block_bytes
        stride = staging_stride_bytes(chunk_bytes)
        for index, skip in enumerate(skips.tolist()):
            begin = index * stride
            yield skip, block_ids.device[index], staging[begin : begin + chunk_bytes]


def view_pages(storage: torch.Tensor, batch: Batch, num_blocks: int) -> torch.Tensor:
    """The batch's pages as ``[segments, num_blocks, page elements]`` over a flat uint8 storage."""
    size = batch.element_bytes
    whole = storage[: storage.numel() // size * size].view(_ELEMENT_TYPES[size])
    return whole.as_strided(
        (batch.segment_count, num_blocks, batch.page_bytes // size),
        (batch.segment_step // size, batch.block_stride // size, 1),
        whole.storage_offset() + batch.offset // size,
    )


def _part(chunk: torch.Tensor, batch: Batch, n_blocks: int) -> torch.Tensor:
    """Where the batch's pages are in a staged chunk: ``[segments, n_blocks, page elements]``."""
    begin = batch.bytes_before * n_blocks
    nbytes = batch.segment_count * batch.page_bytes * n_blocks
    part = chunk[begin : begin + nbytes].view(_ELEMENT_TYPES[batch.element_bytes])
    return part.view(batch.segment_count, n_blocks, -1)


class Batch(NamedTuple):
    """Segments ``segment_step`` bytes apart, moved as elements of ``element_bytes``.

    ``bytes_before`` counts the page bytes of all earlier batches in one block: the batch's
    part of a chunk of ``n`` blocks begins at ``n * bytes_before``.
    """

    storage: int
    offset: int
    segment_count: int
    segment_step: int
    page_bytes: int
    block_stride: int
    bytes_before: int
    element_bytes: int


def plan_batches(layout: KVLayout, addresses: Sequence[int]) -> list[Batch]:
    """The layout's segments as batches, in chunk order.

    layout: has passed `KVLayout.check`. addresses: start of each storage; its alignment bounds the
    size of elements.
    """
    batches: list[Batch] = []
    bytes_before = 0
    for segment in layout.segments:
        last = batches[-1] if batches else None
        step = None if last is None else _step_to(segment, last)
        if last is None or step is None:
            batches.append(
                Batch(
                    segment.storage,
                    segment.offset,
                    segment_count=1,
                    segment_step=0,
                    page_bytes=segment.page_bytes,
                    block_stride=segment.block_stride,
                    bytes_before=bytes_before,
                    element_bytes=1,
                )
            )
        else:
            batches[-1] = last._replace(segment_count=last.segment_count + 1, segment_step=step)
        bytes_before += segment.page_bytes
    return [
        batch._replace(element_bytes=_element_bytes(batch, addresses[batch.storage]))
        for batch in batches
    ]


def _step_to(segment: Segment, batch: Batch) -> int | None:
    """The batch's step if the segment continues it, else None."""
    end = batch.offset + (batch.segment_count - 1) * batch.segment_step
    step = segment.offset - end
    alike = (
        segment.storage == batch.storage
        and segment.page_bytes == batch.page_bytes
        and segment.block_stride == batch.block_stride
    )
    continues = step == batch.segment_step or batch.segment_count == 1
    return step if alike and continues and step > 0 else None


def _element_bytes(batch: Batch, address: int) -> int:
    """The largest element size to which the batch is aligned, in its storage and in staging."""
    return math.gcd(
        max(_ELEMENT_TYPES),
        address,
        batch.offset,
        batch.segment_step,
        batch.page_bytes,
        batch.block_stride,
        batch.bytes_before,
    )
