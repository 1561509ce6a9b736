"""The connector in vLLM's workers: starts planned transfers and reports those that have ended."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lmcache_redis.client.calls import Retrieve, Store
from lmcache_redis.client.worker import WorkerClient
from lmcache_redis.integrations.vllm.metadata import STATS, StepMetadata, WorkerReport

# A step that runs no model waits this long for a load: polling would slow the agent.
_IDLE_WAIT_S = 0.005


class EndedLoads(NamedTuple):
    """Requests whose loads have ended for vLLM, and the blocks of each that were not filled."""

    requests: set[str]
    failed: dict[str, set[int]]


class ConnectorWorker:
    """The loads and stores of one rank.

    reallocates: whether vLLM gives a request whose load failed other blocks. Then a load that
        will not be answered is reported as failed at once, and the connector's own references
        keep its blocks from other requests. Otherwise vLLM computes into the same blocks, so the
        load has to end first.
    """

    def __init__(self, client: WorkerClient, rank: int, *, reallocates: bool) -> None:
        self._client = client
        self._rank = rank
        self._reallocates = reallocates
        self._stores: dict[int, Store] = {}
        self._loads: dict[int, Retrieve] = {}
        self._awaited: dict[str, int] = {}  # the load that vLLM waits for, by request
        self._ended: list[int] = []
        self._dropped = False
        self._stats = dict.fromkeys(STATS, 0)

    def begin_loads(self, metadata: StepMetadata) -> None:
        """Starts the loads of this step."""
        # vLLM may still be zeroing the new blocks, on the same stream.
        event = _recorded_event(self._client) if metadata.loads else None
        for transfer_id, request_id, op in metadata.loads:
            self._awaited[request_id] = transfer_id
            self._loads[transfer_id] = self._client.begin_retrieve(request_id, op, event)

    def begin_stores(self, metadata: StepMetadata) -> None:
        """Starts the stores of this step; on CUDA they follow the work queued so far."""
        event = _recorded_event(self._client) if metadata.stores else None
        for transfer_id, request_id, op in metadata.stores:
            self._stores[transfer_id] = self._client.begin_store(request_id, op, event)

    def ended_loads(self, metadata: StepMetadata) -> EndedLoads:
        """Loads that have succeeded or failed since the last call."""
        if metadata.idle and self._awaited:
            calls = [self._loads[transfer_id].call for transfer_id in self._awaited.values()]
            self._client.link.wait_for(lambda: any(call.done for call in calls), _IDLE_WAIT_S)
        ended = EndedLoads(set(), {})
        for request_id, transfer_id in list(self._awaited.items()):
            load = self._loads[transfer_id]
            if not load.over and not (self._reallocates and load.given_up):
                continue
            del self._awaited[request_id]
            ended.requests.add(request_id)
            failed_chunks = len(load.failed_chunks)
            self._stats["failed_chunks"] += failed_chunks
            self._stats["loaded_chunks"] += load.chunks - failed_chunks
            if failed_blocks := load.failed_blocks:
                ended.failed[request_id] = failed_blocks
        for transfer_id in [t for t, load in self._loads.items() if load.over]:
            if transfer_id not in self._awaited.values():
                del self._loads[transfer_id]
                self._ended.append(transfer_id)
        return ended

    def report(self) -> WorkerReport | None:
        """The report to the scheduler, if there is anything to report."""
        for transfer_id in [t for t, store in self._stores.items() if store.over]:
            result = self._stores.pop(transfer_id).result
            self._stats["stored_chunks"] += result.stored
            self._stats["dropped_chunks"] += result.dropped
            self._dropped |= result.dropped > 0
            self._ended.append(transfer_id)
        if not self._ended:
            return None
        report = WorkerReport({self._rank: self._ended}, self._dropped)
        self._ended, self._dropped = [], False
        return report

    def take_stats(self) -> dict[str, int]:
        """The counts of ``STATS`` since the last call."""
        stats, self._stats = self._stats, dict.fromkeys(STATS, 0)
        return stats


def _recorded_event(client: WorkerClient) -> torch.cuda.Event | None:
    """An event after the queued work of the current stream; None on the CPU."""
    if not client.on_cuda:
        return None
    event = torch.cuda.Event(interprocess=True)
    event.record()
    return event
