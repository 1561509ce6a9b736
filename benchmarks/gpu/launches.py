# SPDX-License-Identifier: Apache-2.0
"""The package's kernels, launched by the driver on torch's memory and torch's current stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmcache_redis.device import driver, kernels
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.device.table import Launch, SegmentTable, Storage, staging_stride_bytes


class KernelCopies:
    """Gathers and scatters of one layout. Returns before they have run.

    storages: flat uint8 on one GPU, one for each that the segments name. ``ids`` are of `pack_ids`,
    on that GPU; ``staging`` is flat uint8 there, aligned to 16. Raises DeviceError if the layout
    exceeds its storages, or the driver cannot compile a kernel.
    """

    name = "kernels"

    def __init__(self, layout: KVLayout, storages: Sequence[torch.Tensor]) -> None:
        places = [Storage(each.data_ptr(), each.numel()) for each in storages]
        self._table = SegmentTable(layout, places)
        self._device = storages[0].device
        self._functions: dict[str, int] = {}
        self._launches: dict[int, list[tuple[Launch, torch.Tensor]]] = {}

    def gather(self, ids: torch.Tensor, staging: torch.Tensor) -> None:
        self._launch(ids, staging, scatter=False)

    def scatter(self, ids: torch.Tensor, staging: torch.Tensor) -> None:
        self._launch(ids, staging, scatter=True)

    def _launch(self, ids: torch.Tensor, staging: torch.Tensor, *, scatter: bool) -> None:
        chunks, n_blocks = ids.shape
        stride_bytes = staging_stride_bytes(n_blocks * self._table.block_bytes)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        for (width, rows), there in self._launches_of(n_blocks):
            driver.launch(
                self._function(kernels.name_of(width, scatter=scatter)),
                (len(rows), chunks),
                kernels.THREADS,
                (there.data_ptr(), ids.data_ptr(), staging.data_ptr(), n_blocks, stride_bytes),
                stream,
            )

    def _function(self, name: str) -> int:
        """Of the context that torch has made current. Its module stays loaded until the end."""
        if name not in self._functions:
            module = driver.load_module(kernels.text(name))
            self._functions[name] = driver.function_of(module, name)
        return self._functions[name]

    def _launches_of(self, n_blocks: int) -> list[tuple[Launch, torch.Tensor]]:
        if n_blocks not in self._launches:
            # From pageable memory: a copy is complete when this returns.
            self._launches[n_blocks] = [
                (each, torch.from_numpy(each.rows).to(self._device))
                for each in self._table.launches(n_blocks)
            ]
        return self._launches[n_blocks]
