"""Gather and scatter with torch alone: ``index_select`` and ``index_copy_``, one a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lmcache_redis.device.cuda_copies import BlockIds
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.device.staging import Batch, plan_batches
from lmcache_redis.device.table import SKIPPED, staging_stride_bytes

_ELEMENT_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class IndexedCopies:
    """A layout's gathers and scatters; a `PageCopies`.

    Args:
        layout: has passed `KVLayout.check`.
        storages: flat uint8, one for each that the segments name.
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
        """For each chunk: how many blocks to skip, its ids, its bytes in staging."""
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
    """Where the batch's pages lie in a staged chunk: ``[segments, n_blocks, page elements]``."""
    begin = batch.bytes_before * n_blocks
    nbytes = batch.segment_count * batch.page_bytes * n_blocks
    part = chunk[begin : begin + nbytes].view(_ELEMENT_TYPES[batch.element_bytes])
    return part.view(batch.segment_count, n_blocks, -1)
