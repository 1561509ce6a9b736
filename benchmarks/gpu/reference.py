# SPDX-License-Identifier: Apache-2.0
"""Gathers and scatters page by page, with torch alone: what the kernels are checked against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lmcache_redis.device.layout import KVLayout
from lmcache_redis.device.table import SKIPPED, staging_stride_bytes


class ReferenceCopies:
    """As `benchmarks.gpu.launches.KernelCopies`, on any device.

    layout: has passed `KVLayout.check`. storages: flat uint8, one for each that the segments name.
    """

    name = "torch"

    def __init__(self, layout: KVLayout, storages: Sequence[torch.Tensor]) -> None:
        self._block_bytes = layout.block_bytes
        self._pages = [
            storages[each.storage].as_strided(
                (layout.num_blocks, each.page_bytes),
                (each.block_stride, 1),
                storages[each.storage].storage_offset() + each.offset,
            )
            for each in layout.segments
        ]

    def gather(self, ids: torch.Tensor, staging: torch.Tensor) -> None:
        for pages, blocks, skip, part in self._parts(ids, staging):
            part[skip:] = pages[blocks[skip:]]

    def scatter(self, ids: torch.Tensor, staging: torch.Tensor) -> None:
        for pages, blocks, skip, part in self._parts(ids, staging):
            pages[blocks[skip:]] = part[skip:]

    def _parts(
        self, ids: torch.Tensor, staging: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]]:
        """For each chunk and segment: pages, ids, blocks to skip, and where they are staged."""
        skips = (ids == SKIPPED).sum(dim=1).tolist()  # `pack_ids` skips at the front
        count = ids.shape[1]
        stride = staging_stride_bytes(count * self._block_bytes)
        for number, skip in enumerate(skips):
            at = number * stride
            for pages in self._pages:
                nbytes = count * pages.shape[1]
                part = staging[at : at + nbytes].view(count, -1)
                yield pages, ids[number], skip, part
                at += nbytes
