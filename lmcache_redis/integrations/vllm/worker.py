"""The connector in vLLM's workers: registers the KV cache, starts planned transfers, reports ends.

`StepMetadata` and `WorkerReport` are what scheduler and workers exchange through vLLM, once a step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from lmcache_redis.chunks.metadata import dtype_name
from lmcache_redis.client.scheduler import RankPlace
from lmcache_redis.client.transfers import CacheGroup, RetrieveTransfer, StoreTransfer, TransferOp
from lmcache_redis.client.worker import WorkerClient
from lmcache_redis.errors import DeviceError
from lmcache_redis.integrations.vllm.groups import (
    LayerGroup,
    block_strides,
    shard_of_rank,
)
from lmcache_redis.integrations.vllm.identity.engine_identity import (
    attention_backend,
    engine_identity,
)
from lmcache_redis.integrations.vllm.identity.probe import kv_identity
from lmcache_redis.integrations.vllm.reports.stats import Recorder
from lmcache_redis.integrations.vllm.tracing import Headers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

TransferT = TypeVar("TransferT", StoreTransfer, RetrieveTransfer)
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
    trace_headers: Headers | None = None
    compare: bool = False


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers.

    loads, stores: to start in this step.
    lost_loads: block ids, by request, of loads that vLLM waits for and that were never planned
        because the scheduler failed. Workers report them as failed.
    idle: the step runs no model, so that a short wait delays no computation.
    number: the workers report it when the step has ended; 0: they need not.
    """

    loads: list[Planned] = field(default_factory=list)
    stores: list[Planned] = field(default_factory=list)
    lost_loads: dict[str, Sequence[int]] = field(default_factory=dict)
    idle: bool = False
    number: int = 0


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Workers to scheduler.

    ended: for each rank, the transfers that no longer touch their blocks there.
    dropped: not all chunks of a store were begun, or accepted by the agent.
    broken: ranks whose worker failed; True if no transfer of the rank touches a block any longer.
    places: ranks that are now registered with another agent than before, or with none.
    step: the number of the step that has ended, if it has one.
    """

    ended: Mapping[int, list[int]]
    dropped: bool = False
    broken: Mapping[int, bool] = field(default_factory=dict)
    places: Mapping[int, RankPlace | None] = field(default_factory=dict)
    step: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            {**self.ended, **other.ended},
            self.dropped or other.dropped,
            {**self.broken, **other.broken},
            {**self.places, **other.places},
            max(self.step, other.step),
        )


class EndedLoads(NamedTuple):
    """Requests whose loads have ended for vLLM, and the blocks of each that were not filled."""

    requests: set[str]
    failed: dict[str, set[int]]


@dataclass(slots=True)
class _Begun(Generic[TransferT]):
    """What was planned, and the transfer of each of its operations.

    is_told: vLLM has learned that the load has ended or failed.
    """

    planned: Planned
    begun_s: float
    transfers: Sequence[TransferT]
    is_told: bool = False

    @property
    def is_over(self) -> bool:
        return all(each.over for each in self.transfers)


class ConnectorWorker:
    """The loads and stores of one rank. recorder: counts them.

    reallocates: whether vLLM allocates other blocks for a request whose load failed. Then a load
        that is lost or late is reported as failed at once, and the connector's own references
        keep its blocks from other requests. Otherwise vLLM computes into the same blocks, so the
        load must end first.
    """

    def __init__(
        self, client: WorkerClient, rank: int, recorder: Recorder, *, reallocates: bool
    ) -> None:
        self._recorder = recorder
        self._loads_after: int | None = None
        self._to_store: Sequence[Planned] = ()  # of this step, until they begin
        self._has_computed = False  # this step: vLLM has asked for ended loads
        self._client = client
        self._rank = rank
        self._reallocates = reallocates
        self._stores: dict[int, _Begun[StoreTransfer]] = {}
        self._loads: dict[int, _Begun[RetrieveTransfer]] = {}
        self._next = WorkerReport({rank: []})
        self._places: dict[int, RankPlace | None] = {}  # as reported last

    def step_begins(self, metadata: StepMetadata) -> None:
        """Before the forward: loads wait for the steps before, and for the zeroing of new blocks.

        vLLM calls `begin_loads` after it has launched the forward, which uses other blocks. It does
        not ask for the stores of each step: pipeline stages before the last lack that with
        speculative decoding, and so do steps that have failed.
        """
        if self._has_computed:
            self.begin_stores()
        else:
            self.drop_stores()
        self._to_store, self._has_computed = metadata.stores, False
        self._loads_after = self._client.signal() if metadata.loads else None

    def begin_loads(self, metadata: StepMetadata) -> None:
        for load in metadata.loads:
            names = [load.request_id] * len(load.ops)
            transfers = self._client.begin_retrieves(names, load.ops, self._loads_after)
            self._loads[load.transfer_id] = _Begun(load, time.monotonic(), transfers)

    def begin_stores(self) -> None:
        """Starts the stores of this step, once; on CUDA they follow the work queued so far."""
        stores, self._to_store = self._to_store, ()
        after = self._client.signal() if stores else None
        for store in stores:
            names = [store.request_id] * len(store.ops)
            transfers = self._client.begin_stores(names, store.ops, after, compare=store.compare)
            self._stores[store.transfer_id] = _Begun(store, time.monotonic(), transfers)

    def drop_stores(self) -> None:
        """Ends the stores of a step whose blocks were not computed, before they begin."""
        self._ended.extend(each.transfer_id for each in self._to_store)
        self._next.dropped |= bool(self._to_store)
        self._to_store = ()

    def ended_loads(self, metadata: StepMetadata) -> EndedLoads:
        self._has_computed = True
        awaited = [load for load in self._loads.values() if not load.is_told]
        if metadata.idle and awaited:
            self._client.link.wait_for(
                lambda: any(all(each.call.done for each in load.transfers) for load in awaited),
                _IDLE_WAIT_S,
            )
        ended = EndedLoads(set(), {})
        for load in awaited:
            request_id = load.planned.request_id
            given_up = self._reallocates and any(each.given_up for each in load.transfers)
            if not load.is_over and not given_up:
                continue
            load.is_told = True
            ended.requests.add(request_id)
            failed_chunks = sum(len(each.failed_chunks) for each in load.transfers)
            loaded_chunks = sum(each.chunks for each in load.transfers) - failed_chunks
            self._recorder.count("failed_chunks", failed_chunks, self._label)
            self._recorder.count("loaded_chunks", loaded_chunks, self._label)
            found = {"chunks": loaded_chunks, "failed_chunks": failed_chunks}
            self._took("load_seconds", "retrieve", load, found)
            if failed_blocks := set().union(*(each.failed_blocks for each in load.transfers)):
                ended.failed[request_id] = failed_blocks
        for transfer_id, load in list(self._loads.items()):
            if load.is_told and load.is_over:
                del self._loads[transfer_id]
                self._ended.append(transfer_id)
        return ended

    def report(self, step: int) -> WorkerReport | None:
        for transfer_id in [t for t, store in self._stores.items() if store.is_over]:
            store = self._stores.pop(transfer_id)
            results = [each.result for each in store.transfers]
            for result in results:
                self._recorder.count("stored_chunks", result.stored, self._label)
                self._recorder.count("dropped_chunks", result.dropped, self._label)
                self._next.dropped |= result.dropped > 0
            stored, dropped = (sum(getattr(r, n) for r in results) for n in ("stored", "dropped"))
            found = {"chunks": stored, "dropped_chunks": dropped}
            self._took("store_seconds", "store", store, found)
            self._ended.append(transfer_id)
        places = {self._rank: self._client.place}
        if not self._ended and places == self._places and not step:
            return None
        report, self._next = self._next, WorkerReport({self._rank: []})
        report.places = {} if places == self._places else places
        report.step = step
        self._places = places
        return report

    @property
    def _ended(self) -> list[int]:
        """The transfers that the next report names."""
        return self._next.ended[self._rank]

    @property
    def _label(self) -> str:
        return str(self._rank)

    def _took(self, name: str, span: str, begun: _Begun[Any], found: Mapping[str, int]) -> None:
        """Records that a transfer has ended. found: chunks, counted once for each group."""
        self._recorder.observe(name, time.monotonic() - begun.begun_s, self._label)
        planned, attributes = begun.planned, {"rank": self._rank, **found}
        self._recorder.span(
            span, planned.request_id, planned.trace_headers, begun.begun_s, attributes
        )


def register(
    client: WorkerClient,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    groups: Sequence[LayerGroup],
    kv_caches: Mapping[str, Any],
    weights_id: str | None,
) -> None:
    """Exports this rank's paged KV cache, and registers it with this and every later agent.

    kv_caches: vLLM's tensors by layer; a recurrent layer has several. Raises DeviceError if the
    memory cannot be exported, Unidentified if its bytes cannot be identified.
    """
    tensors: dict[str, dict[str, Any]] = {}  # by layer: a recurrent one has one for each state
    for layer, cache in kv_caches.items():
        if isinstance(cache, (list, tuple)):
            tensors[layer] = {f"{layer}#{number}": state for number, state in enumerate(cache)}
        else:
            tensors[layer] = {layer: cache}
    strides = block_strides(kv_cache_config)
    if strides is not None:
        strides = {
            name: strides[layer] for layer in tensors if layer in strides for name in tensors[layer]
        }
    rank, backend = vllm_config.parallel_config.rank, attention_backend(vllm_config)
    identity = engine_identity(vllm_config, rank=rank, backend=backend, weights_id=weights_id)
    cache_groups = []
    for group in groups:
        # With one group, layers that share the KV of another are listed as well.
        layers = group.layers if len(kv_cache_config.kv_cache_groups) > 1 else tensors
        some = {name: each for layer in layers for name, each in tensors.get(layer, {}).items()}
        if not some:
            raise DeviceError(f"this rank has no layer of KV cache group {group.number}")
        pairs = {}  # what decides the group's bytes
        if not group.is_state:  # states are plain tensors
            pairs = kv_identity(
                vllm_config,
                some,
                num_blocks=kv_cache_config.num_blocks,
                block_size_tokens=group.block_size_tokens,
                block_strides=strides,
            )
        spec = kv_cache_config.kv_cache_groups[group.number].kv_cache_spec
        shard, shards, replicas = shard_of_rank(vllm_config, spec)
        if replicas > 1:
            pairs["rank"] = f"shard {shard} of {shards}"
        cache_groups.append(
            CacheGroup(
                some,
                "+".join(dict.fromkeys(dtype_name(each.dtype) for each in some.values())),
                group.block_size_tokens,
                group.reach,
                pairs,
                shard=(shard, shards),
                replica=(rank % replicas, replicas),
            )
        )
    client.register_groups(
        cache_groups,
        num_blocks=kv_cache_config.num_blocks,
        identity=identity,
        block_strides=strides,
    )
