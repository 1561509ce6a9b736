# SPDX-License-Identifier: Apache-2.0
"""vLLM's tiered offloading for engines on the CPU, whose KV is in host memory already.

vLLM's spec has a worker for GPUs alone. The spec below is the same with a worker that copies
between tensors, at once: all else is vLLM's, its region, its manager, its layouts.

    "spec_name": "CPUTieringOffloadingSpec",
    "spec_module_path": "lmcache_redis.integrations.vllm_tier"
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.v1.kv_offload.base import CopyRun, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        GPULoadStoreSpec,
        LoadStoreSpec,
    )
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec


class CPUTieringOffloadingSpec(TieringOffloadingSpec):
    """vLLM's spec, with a worker for KV in host memory."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            if self.config.canonical_layout:
                self._validate_canonical_refs(kv_caches)
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostCopyWorker(
                kv_caches, region, self.blocks_per_chunk, self.config.canonical_layout
            )
        return self._worker


class _Parts(NamedTuple):
    """The same bytes of a layer in the engine and in the region, to be indexed by block.

    pages: of shape (blocks, fragments, bytes). chunks: (chunks, blocks of a chunk, fragments,
    bytes). writers, writer: ranks with equal bytes write in turn.
    """

    pages: torch.Tensor
    chunks: torch.Tensor
    writers: int
    writer: int


class HostCopyWorker(OffloadingWorker):
    """Copies blocks between an engine's KV in host memory and the region. A call copies at once."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        region: SharedOffloadRegion,
        blocks_per_chunk: int,
        canonical_layout: bool,
    ) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._finished: list[TransferResult] = []
        groups = kv_caches.group_data_refs
        views = []
        for index, each in enumerate(kv_caches.tensors):
            make_view, sizes = region.create_next_worker_view, [each.page_size_bytes]
            if canonical_layout:
                make_view = region.create_next_canonical_view
                refs = [ref for group in groups for ref in group if ref.tensor_idx == index]
                sizes = [ref.mapping.canonical_page_size_bytes for ref in refs if ref.mapping]
            pages = each.tensor.view(torch.int8).view(-1, each.page_size_bytes)
            views.append((pages, make_view(max(sizes) * blocks_per_chunk)))
        self._groups = [
            [
                part
                for ref in group
                for part in self._parts(ref, canonical_layout, *views[ref.tensor_idx])
            ]
            for group in groups
        ]

    def _parts(
        self,
        ref: CanonicalKVCacheRef,
        canonical_layout: bool,
        pages: torch.Tensor,
        chunks: torch.Tensor,
    ) -> Iterator[_Parts]:
        """The runs of a layer's page. pages, chunks: of its tensor, a row for each."""
        mapping = ref.mapping if canonical_layout else None
        runs: Sequence[CopyRun] = [CopyRun(0, 0, ref.page_size_bytes, 1, 0, 0)]
        writers, writer = 1, 0
        if mapping is not None:
            runs, writers, writer = mapping.runs, mapping.num_writers, mapping.writer_index
        blocks = self._blocks_per_chunk
        for run in runs:
            fragments = (run.num_fragments, run.fragment_size)
            block_bytes = chunks.shape[1] // blocks
            yield _Parts(
                pages.as_strided(
                    (len(pages), *fragments),
                    (pages.stride(0), run.local_stride, 1),
                    pages.storage_offset() + run.local_offset,
                ),
                chunks.as_strided(
                    (len(chunks), blocks, *fragments),
                    (chunks.stride(0), block_bytes, run.canonical_stride, 1),
                    chunks.storage_offset() + run.canonical_offset,
                ),
                writers,
                writer,
            )

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """They have ended."""

    def shutdown(self) -> None:
        self._groups = []
        self._region.cleanup()

    def _copy(
        self, job_id: int, engine: GPULoadStoreSpec, tier: CPULoadStoreSpec, *, is_store: bool
    ) -> bool:
        """Blocks of each group, one after the other, beginning inside a chunk or at its start."""
        started_s, copied = time.monotonic(), 0
        blocks, chunks = torch.from_numpy(engine.block_ids), torch.from_numpy(tier.block_ids)
        first_block = first_chunk = 0
        sizes = zip(self._groups, engine.group_sizes, engine.block_indices, strict=True)
        for parts, size, block_index in sizes:
            if not size:
                continue
            logical = block_index % self._blocks_per_chunk + torch.arange(size)
            rows = chunks[first_chunk + logical // self._blocks_per_chunk].long()
            of_group = blocks[first_block : first_block + size].long()
            at = logical % self._blocks_per_chunk
            for part in parts:
                if is_store:
                    ours = (rows * self._blocks_per_chunk + at) % part.writers == part.writer
                    part.chunks[rows[ours], at[ours]] = part.pages[of_group[ours]]
                    copied += int(ours.sum()) * part.pages[0].numel()
                else:
                    part.pages[of_group] = part.chunks[rows, at]
                    copied += size * part.pages[0].numel()
            first_block += size
            first_chunk += int(logical[-1]) // self._blocks_per_chunk + 1
        assert (first_block, first_chunk) == (len(blocks), len(chunks))
        took_s = time.monotonic() - started_s
        self._finished.append(TransferResult(job_id, True, copied, took_s))
        return True
