"""The connector's worker half: begins what the scheduler half planned, reports what is over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from lmcache_redis.client.worker import LMCacheMPWorkerAdapter
from lmcache_redis.integrations.vllm.metadata import CompletedStores, StepMetadata

if TYPE_CHECKING:
    from lmcache_redis.client.operations import LoadStoreOp

# How long a step that runs no model waits for a load, instead of spinning beside the agent.
_IDLE_WAIT_S = 0.005


class WorkerHalf:
    """Runs in each of vLLM's workers."""

    def __init__(self, adapter: LMCacheMPWorkerAdapter) -> None:
        self._adapter = adapter
        self._cuda = False
        self._dropped_chunks = 0

    def register(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        *,
        num_blocks: int,
        dtype: str,
        identity: Mapping[str, str],
        block_strides: Mapping[str, int] | None,
    ) -> None:
        """Hands the paged KV cache to the agent."""
        self._cuda = any(tensor.is_cuda for tensor in kv_caches.values())
        self._adapter.register_kv_caches(
            kv_caches,
            num_blocks=num_blocks,
            dtype=dtype,
            identity=identity,
            block_strides=block_strides,
        )

    def preempted(self, metadata: StepMetadata) -> None:
        """Waits until nobody reads the blocks of preempted requests: this step overwrites them."""
        if metadata.preempted:
            self._adapter.wait_for_stores(metadata.preempted)

    def begin_loads(self, metadata: StepMetadata) -> None:
        """Begins this step's loads."""
        if metadata.loads:
            # vLLM may still be zeroing the fresh blocks, on the same stream.
            event = self._recorded_event()
            self._adapter.batched_submit_retrieve_requests(*_columns(metadata.loads), event)

    def begin_stores(self, metadata: StepMetadata) -> None:
        """Begins this step's stores; on CUDA they wait, on the GPU, for what is queued so far."""
        if metadata.stores:
            event = self._recorded_event()
            self._adapter.batched_submit_store_requests(*_columns(metadata.stores), event)

    def finished(self, metadata: StepMetadata) -> tuple[set[str], set[str]]:
        """Request ids whose stores, and whose loads, are over."""
        if metadata.idle:
            self._adapter.wait_for_retrieves(_IDLE_WAIT_S)
        return self._adapter.get_finished(metadata.held)

    def completed_stores(self) -> CompletedStores | None:
        """Stores that are over, for the scheduler half."""
        counts = self._adapter.take_completed_stores()
        if not counts:
            return None
        before, self._dropped_chunks = self._dropped_chunks, self._adapter.dropped_chunks
        return CompletedStores(counts, self._dropped_chunks > before)

    def _recorded_event(self) -> torch.cuda.Event | None:
        """An event behind what the current stream has queued; None on the CPU."""
        if not self._cuda:
            return None
        event = torch.cuda.Event(interprocess=True)
        event.record()
        return event


def _columns(rows: list[tuple[str, LoadStoreOp]]) -> tuple[list[str], list[LoadStoreOp]]:
    return [request_id for request_id, _ in rows], [op for _, op in rows]
