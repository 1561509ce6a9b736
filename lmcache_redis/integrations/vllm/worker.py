"""The connector's worker half: begins what the scheduler half planned, reports what is over."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lmcache_redis.client.transfers import Retrieve, Store
from lmcache_redis.client.worker import WorkerClient
from lmcache_redis.integrations.vllm.metadata import StepMetadata, WorkerReport
from lmcache_redis.integrations.vllm.stats import NAMES

# How long a step that runs no model waits for a load, instead of spinning beside the agent.
_IDLE_WAIT_S = 0.005


class Ended(NamedTuple):
    """Loads that vLLM may go on after: ids of their requests, and blocks that were not filled."""

    requests: set[str]
    failed: dict[str, set[int]]


class WorkerHalf:
    """Runs in each of vLLM's workers.

    spares_blocks: whether a request whose load failed gives its blocks back and gets others. Then
        a load that will not be answered is reported failed at once; its blocks are kept from
        others by our own references. Else vLLM computes into the same blocks, so that a load
        has to end first.
    """

    def __init__(self, client: WorkerClient, rank: int, *, spares_blocks: bool) -> None:
        self._client = client
        self._rank = rank
        self._spares_blocks = spares_blocks
        self._stores: dict[int, Store] = {}
        self._loads: dict[int, Retrieve] = {}
        self._waited_for: dict[str, int] = {}  # by request, the load that vLLM waits for
        self._ended: list[int] = []
        self._dropped = False
        self._figures = dict.fromkeys(NAMES, 0)

    def begin_loads(self, metadata: StepMetadata) -> None:
        """Begins this step's loads."""
        # vLLM may still be zeroing the fresh blocks, on the same stream.
        event = _recorded_event(self._client) if metadata.loads else None
        for transfer_id, request_id, op in metadata.loads:
            self._waited_for[request_id] = transfer_id
            self._loads[transfer_id] = self._client.begin_retrieve(request_id, op, event)

    def begin_stores(self, metadata: StepMetadata) -> None:
        """Begins this step's stores; on CUDA they wait, on the GPU, for what is queued so far."""
        event = _recorded_event(self._client) if metadata.stores else None
        for transfer_id, request_id, op in metadata.stores:
            self._stores[transfer_id] = self._client.begin_store(request_id, op, event)

    def ended_loads(self, metadata: StepMetadata) -> Ended:
        """Loads that have ended since the last call, well or not."""
        if metadata.idle:
            self._wait_for_a_load()
        ended = Ended(set(), {})
        for request_id, transfer_id in list(self._waited_for.items()):
            load = self._loads[transfer_id]
            if not load.over and not (self._spares_blocks and load.given_up):
                continue
            del self._waited_for[request_id]
            ended.requests.add(request_id)
            failed_chunks = len(load.failed_chunks)
            self._figures["failed_chunks"] += failed_chunks
            self._figures["loaded_chunks"] += load.chunks - failed_chunks
            if failed_blocks := load.failed_blocks:
                ended.failed[request_id] = failed_blocks
        for transfer_id in [t for t, load in self._loads.items() if load.over]:
            if transfer_id not in self._waited_for.values():
                del self._loads[transfer_id]
                self._ended.append(transfer_id)
        return ended

    def report(self) -> WorkerReport | None:
        """What the scheduler half has to know, if anything."""
        for transfer_id in [t for t, store in self._stores.items() if store.over]:
            result = self._stores.pop(transfer_id).result
            self._figures["stored_chunks"] += result.stored
            self._figures["dropped_chunks"] += result.dropped
            self._dropped |= result.dropped > 0
            self._ended.append(transfer_id)
        if not self._ended:
            return None
        report = WorkerReport({self._rank: self._ended}, self._dropped)
        self._ended, self._dropped = [], False
        return report

    def take_figures(self) -> dict[str, int]:
        """What was loaded and stored since the last call."""
        figures, self._figures = self._figures, dict.fromkeys(NAMES, 0)
        return figures

    def _wait_for_a_load(self) -> None:
        calls = [self._loads[transfer_id].call for transfer_id in self._waited_for.values()]
        if calls:
            self._client.link.wait_for(lambda: any(call.done for call in calls), _IDLE_WAIT_S)


def _recorded_event(client: WorkerClient) -> torch.cuda.Event | None:
    """An event behind what the current stream has queued; None on the CPU."""
    if not client.on_cuda:
        return None
    event = torch.cuda.Event(interprocess=True)
    event.record()
    return event
