# SPDX-License-Identifier: Apache-2.0
"""The connector in vLLM's workers: starts planned transfers, and reports their ends.

`StepMetadata` and `WorkerReport` are what scheduler and workers exchange through vLLM, once a step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from lmcache_redis.client.scheduler import RankPlace
from lmcache_redis.client.worker import TransferOp, WorkerClient
from lmcache_redis.integrations.vllm.identity.lora import AdaptersInMemory
from lmcache_redis.integrations.vllm.reports.stats import Recorder

# More than there are in the steps in flight.
_MOST_TOLD = 4096
# A step that runs no model waits this long for a load: polling faster would slow the agent.
_IDLE_WAIT_S = 0.005


class Planned(NamedTuple):
    """A load or a store that every worker starts: an operation for each group of layers.

    A ``transfer_id`` is never reused. trace_headers: of the request, if the transfer has a span.
    compare: a store whose blocks are compared with what is cached, and not stored.
    """

    transfer_id: int
    request_id: str
    ops: tuple[TransferOp, ...]
    trace_headers: Mapping[str, str] | None = None
    compare: bool = False

    @property
    def written(self) -> list[int]:
        """The blocks that a load fills."""
        return [number for op in self.ops for number in op.block_ids[op.skip_blocks :]]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers.

    loads: to start in this step. stores: of what steps before it have computed.
    lost_loads: block ids, by request, of loads that vLLM waits for and that were never planned
        because the scheduler failed. Workers report them as failed.
    unsure: transfers of which a report may be lost: the workers report those that they do not have.
    awaited: loads that vLLM waits for then: those of which it has not learned have failed.
    number: of this step. lost_steps: of steps that have failed, whose reports are lost.
    adapters: the workers report again which ones they have in memory.
    idle: the step runs no model, so that a short wait delays no computation.
    """

    loads: list[Planned] = field(default_factory=list)
    stores: list[Planned] = field(default_factory=list)
    lost_loads: dict[str, Sequence[int]] = field(default_factory=dict)
    unsure: Sequence[int] = ()
    awaited: Sequence[Planned] = ()
    number: int = 0
    lost_steps: Sequence[int] = ()
    adapters: bool = False
    idle: bool = False


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Workers to scheduler.

    ended: for each rank, the transfers that no longer touch their blocks there.
    failed: requests whose load failed on some rank.
    dropped: the agent has not accepted all chunks of a store, or has not answered.
    broken: ranks whose worker failed; True if no transfer of the rank touches a block any longer.
    places: ranks that are now registered with another agent than before, or with none.
    adapters: of ranks where that has changed, the digests of the adapters in memory, by id.
    """

    ended: Mapping[int, list[int]]
    dropped: bool = False
    broken: Mapping[int, bool] = field(default_factory=dict)
    places: Mapping[int, RankPlace | None] = field(default_factory=dict)
    failed: Set[str] = frozenset()
    adapters: Mapping[int, Mapping[int, bytes]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            {**self.ended, **other.ended},
            self.dropped or other.dropped,
            {**self.broken, **other.broken},
            {**self.places, **other.places},
            self.failed | other.failed,
            {**self.adapters, **other.adapters},
        )


@dataclass(slots=True)
class _Begun:
    """What was planned, and the transfer of each of its operations."""

    planned: Planned
    begun_s: float
    transfers: Sequence[Any]  # `StoreTransfer`s or `RetrieveTransfer`s
    is_told: bool = False  # vLLM has learned that the load has ended or failed

    @property
    def is_over(self) -> bool:
        return all(each.over for each in self.transfers)

    @property
    def chunks(self) -> set[bytes]:
        """Each once, whatever groups and shares it has."""
        return {name for each in self.transfers for name in each.op.hashes}


class Told:
    """In which step vLLM has learned that a load has ended, of the newest loads.

    step: the number of this step. lost: requests of which it is to learn again, that their load has
    failed, and the blocks of each.
    """

    def __init__(self) -> None:
        self.step = 0
        self.lost: dict[str, set[int]] = {}
        self._steps: dict[int, int] = {}  # by transfer

    def add(self, transfer_id: int) -> None:
        self._steps[transfer_id] = self.step
        if len(self._steps) > _MOST_TOLD:
            del self._steps[next(iter(self._steps))]

    def again(self, load: Planned, is_held: bool, lost_steps: Sequence[int]) -> None:
        """Of a load that vLLM waits for. is_held: it was begun, and has not ended."""
        told = self._steps.get(load.transfer_id)
        if not is_held if told is None else told in lost_steps:
            self.add(load.transfer_id)
            self.lost[load.request_id] = set(load.written)

    def take_lost(self) -> dict[str, set[int]]:
        lost, self.lost = self.lost, {}
        return lost


class ConnectorWorker:
    """The loads and stores of one rank.

    reallocates: whether vLLM allocates other blocks for a request whose load failed. Then a load
        that is lost or late is reported as failed at once. Otherwise vLLM computes into the same
        blocks, so the load must end first.
    """

    def __init__(
        self, client: WorkerClient, rank: int, recorder: Recorder, *, reallocates: bool
    ) -> None:
        self._recorder = recorder
        self._after: int | None = None  # the steps before this one
        self._client = client
        self._rank = rank
        self._reallocates = reallocates
        self._stores: dict[int, _Begun] = {}
        self._loads: dict[int, _Begun] = {}
        self._told = Told()
        self._next = WorkerReport({rank: []})
        self._places: dict[int, RankPlace | None] = {}  # as reported last
        self.adapters: AdaptersInMemory | None = None
        self._digests: dict[int, bytes] | None = None  # as reported last

    def step_begins(self, metadata: StepMetadata) -> None:
        """Before the forward: stores follow the steps before, which have computed their blocks.

        So do loads, which also wait for the zeroing of new blocks.
        """
        self._told.step = metadata.number
        if metadata.loads or metadata.stores:
            self._after = self._client.signal()
        for store in metadata.stores:
            names = [store.request_id] * len(store.ops)
            compare = store.compare
            transfers = self._client.begin_stores(names, store.ops, self._after, compare=compare)
            self._stores[store.transfer_id] = _Begun(store, time.monotonic(), transfers)

    def begin_loads(self, metadata: StepMetadata) -> None:
        """vLLM calls this after it has launched the forward, which uses other blocks."""
        for load in metadata.loads:
            names = [load.request_id] * len(load.ops)
            transfers = self._client.begin_retrieves(names, load.ops, self._after)
            self._loads[load.transfer_id] = _Begun(load, time.monotonic(), transfers)
        if metadata.adapters:
            self._digests = None
        begun = {*self._stores, *self._loads}
        self._ended.extend(each for each in metadata.unsure if each not in begun)
        for load in metadata.awaited:
            self._told.again(load, load.transfer_id in begun, metadata.lost_steps)

    def ended_loads(self, metadata: StepMetadata) -> dict[str, set[int]]:
        """Requests whose loads have ended for vLLM, and the blocks of each that were not filled."""
        awaited = [load for load in self._loads.values() if not load.is_told]
        if metadata.idle and awaited:
            self._client.link.wait_for(
                lambda: any(all(each.call.done for each in load.transfers) for load in awaited),
                _IDLE_WAIT_S,
            )
        ended = self._told.take_lost()
        self._next.failed |= ended.keys()
        for load in awaited:
            given_up = self._reallocates and any(each.given_up for each in load.transfers)
            if not load.is_over and not given_up:
                continue
            load.is_told = True
            self._told.add(load.planned.transfer_id)
            request_id = load.planned.request_id
            ended[request_id] = set().union(*(each.failed_blocks for each in load.transfers))
            if ended[request_id]:
                self._next.failed |= {request_id}
            failed = {each.op.hashes[n] for each in load.transfers for n in each.failed_chunks}
            loaded_chunks, failed_chunks = len(load.chunks - failed), len(failed)
            self._recorder.count("failed_chunks", failed_chunks, str(self._rank))
            self._recorder.count("loaded_chunks", loaded_chunks, str(self._rank))
            found = {"chunks": loaded_chunks, "failed_chunks": failed_chunks}
            self._took("load_seconds", "retrieve", load, found)
        for transfer_id, load in list(self._loads.items()):
            if load.is_told and load.is_over:
                del self._loads[transfer_id]
                self._ended.append(transfer_id)
        return ended

    def report(self) -> WorkerReport | None:
        for transfer_id in [t for t, store in self._stores.items() if store.is_over]:
            store = self._stores.pop(transfer_id)
            results = [each.result for each in store.transfers]
            # The agent counts, and does not say of which chunks it dropped a part.
            dropped = max((each.dropped for each in results), default=0)
            stored = max((each.stored for each in results), default=0)
            stored = min(stored, len(store.chunks) - dropped)
            self._recorder.count("stored_chunks", stored, str(self._rank))
            self._recorder.count("dropped_chunks", dropped, str(self._rank))
            self._next.dropped |= dropped > 0
            found = {"chunks": stored, "dropped_chunks": dropped}
            self._took("store_seconds", "store", store, found)
            self._ended.append(transfer_id)
        report, self._next = self._next, WorkerReport({self._rank: []})
        places = {self._rank: self._client.place}
        if places != self._places:
            report.places = self._places = places
        if self.adapters is not None and (digests := self.adapters.digests()) != self._digests:
            self._digests = digests
            report.adapters = {self._rank: digests}
        return None if report == self._next else report

    @property
    def _ended(self) -> list[int]:
        """The transfers that the next report names."""
        return self._next.ended[self._rank]

    def _took(self, name: str, span: str, begun: _Begun, found: Mapping[str, int]) -> None:
        """Records that a transfer has ended. found: chunks."""
        self._recorder.observe(name, time.monotonic() - begun.begun_s, str(self._rank))
        error = "chunks_failed" if found.get("failed_chunks") else ""
        attributes = {"rank": self._rank, **found}
        self._recorder.span(span, begun.planned, begun.begun_s, attributes, error)
