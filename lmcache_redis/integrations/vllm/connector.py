"""``LMCacheRedisConnector``: vLLM's ``KVConnectorBase_V1``, both roles.

Nothing here raises into the engine: what cannot be cached is computed. Every entry is guarded;
what vLLM waits for (a load it was promised) is written down here, apart from the halves that do
the work, so that it is answered also after one of them has failed.
Source: ``vllm/distributed/kv_transfer/kv_connector/v1/base.py`` of vLLM 0.27 to 0.32.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from lmcache_redis.client.scheduler import LMCacheMPSchedulerAdapter
from lmcache_redis.client.worker import WorkerClient
from lmcache_redis.config import ClientConfig
from lmcache_redis.dtypes import dtype_name
from lmcache_redis.errors import LMCacheRedisError
from lmcache_redis.integrations.vllm import epoch
from lmcache_redis.integrations.vllm.adapters import AdapterDigests
from lmcache_redis.integrations.vllm.guard import guarded, nothing
from lmcache_redis.integrations.vllm.identity import attention_backend, engine_identity, model_name
from lmcache_redis.integrations.vllm.metadata import StepMetadata, WorkerReport
from lmcache_redis.integrations.vllm.policy import recompute_failed_loads
from lmcache_redis.integrations.vllm.probe import kv_identity
from lmcache_redis.integrations.vllm.references import BlockReferences, StaleBlocks
from lmcache_redis.integrations.vllm.scheduler import SchedulerHalf
from lmcache_redis.integrations.vllm.stats import NAMES, ConnectorStats
from lmcache_redis.integrations.vllm.support import block_strides, drops_blocks, unsupported
from lmcache_redis.integrations.vllm.worker import Ended, WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.lmcache_redis")

# From 0.30 on: failed loads are told by request, which then gets other blocks.
_TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)


class LMCacheRedisConnector(KVConnectorBase_V1):
    """Loads and stores KV through the agent of this node."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._adapter: LMCacheMPSchedulerAdapter | WorkerClient | None = None
        self._references: BlockReferences | None = None
        self._epoch = epoch.SHARED_EPOCH
        self._own_epoch = False  # no other engine has it
        # Loads that vLLM waits for, and ids of the blocks they write. In the scheduler those that
        # no worker knows of, in a worker those that are not reported.
        self._awaited: dict[str, list[int]] = {}
        self._failed_blocks: set[int] = set()
        self._broken: dict[int, bool] = {}
        self._begin()

    @guarded(nothing)
    def _begin(self) -> None:
        try:
            self._config = ClientConfig.from_extra_config(
                self._kv_transfer_config.kv_connector_extra_config
            )
        except LMCacheRedisError as error:
            logger.error("the cache stays off: %s", error)
            return
        recompute_failed_loads(self)
        reason = unsupported(self._vllm_config, self._kv_cache_config)
        if reason is not None:
            logger.error("the cache stays off: %s", reason)
        elif self.role is KVConnectorRole.SCHEDULER:
            self._adapter = LMCacheMPSchedulerAdapter(**self._engine())
        else:
            rank = self._vllm_config.parallel_config.rank
            self._adapter = client = WorkerClient(**self._engine(), worker_id=rank)
            self._worker = WorkerHalf(client, rank, spares_blocks=_TransferResults is not None)

    def broke(self) -> None:
        """The cache of this engine is off; loads that vLLM waits for are reported as failed."""
        self._scheduler = None
        adapter, self._adapter = self._adapter, None
        if self._worker is not None:
            self._worker = None
            rank = self._vllm_config.parallel_config.rank
            self._broken = {rank: isinstance(adapter, WorkerClient) and adapter.shutdown()}
        elif adapter is not None:
            adapter.shutdown()

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped store is a later miss, no more."""
        return False

    # Scheduler

    @guarded(nothing)
    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """See the base class (vLLM 0.30 or newer)."""
        self._kv_cache_manager = kv_cache_manager
        self.bind_gpu_block_pool(kv_cache_manager.block_pool)

    @guarded(nothing)
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """The scheduler half works on vLLM's own block pool."""
        adapter = self._adapter
        if not isinstance(adapter, LMCacheMPSchedulerAdapter):
            return
        config = self._vllm_config
        block_size = config.cache_config.block_size
        hash_block = getattr(self._kv_cache_config, "hash_block_size", None) or block_size
        manager = getattr(self, "_kv_cache_manager", None)
        if manager is None and drops_blocks(self._kv_cache_config):
            logger.error(
                "the cache stays off: the model's attention drops blocks, and this vLLM does not "
                "tell connectors which; 0.30 or newer does"
            )
            return
        self._epoch = epoch.named_epoch(self._config.weights_id)
        adapters = AdapterDigests()
        self._references = BlockReferences(gpu_block_pool, config.parallel_config.world_size)
        self._scheduler = SchedulerHalf(
            adapter,
            self._references,
            StaleBlocks(gpu_block_pool),
            block_size_tokens=block_size,
            hash_stride=max(1, block_size // hash_block),
            loads=self._kv_transfer_config.is_kv_consumer,
            stores=self._kv_transfer_config.is_kv_producer,
            epoch=self._epoch,
            block_ids=None if manager is None else lambda r: manager.get_block_ids(r)[0],
            adapter_digest=lambda request: adapters.digest(request.lora_request),
        )
        if not epoch.listen(self):
            logger.warning(
                "this vLLM does not tell when weights are updated: call "
                "reset_prefix_cache(reset_connector=True) after each update"
            )

    @guarded(lambda self, *_: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See the base class: None until the agent has answered; loads are asynchronous."""
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    @guarded(nothing)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """See the base class."""
        block_ids = blocks.get_block_ids()[0] if num_external_tokens else []
        if num_external_tokens:
            block_size = self._vllm_config.cache_config.block_size
            self._awaited[request.request_id] = block_ids[-(-num_external_tokens // block_size) :]
        if self._scheduler is not None:
            self._scheduler.allocated(request, block_ids, num_external_tokens)

    @guarded(lambda self, _: self._step_without_cache())
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See the base class."""
        metadata = StepMetadata()
        if self._scheduler is not None:
            metadata = self._scheduler.build_metadata(scheduler_output)
        for _, request_id, _ in metadata.loads:
            self._awaited.pop(request_id, None)
        metadata.lost_loads, self._awaited = self._awaited, {}
        return metadata

    def _step_without_cache(self) -> StepMetadata:
        lost, self._awaited = self._awaited, {}
        return StepMetadata(lost_loads=lost)

    @guarded(nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See the base class."""
        report = connector_output.kv_connector_worker_meta
        if self._references is not None and isinstance(report, WorkerReport):
            self._references.ended(report.ended)
            for rank, stopped in report.broken.items():
                if stopped:
                    self._references.rank_stopped(rank)
        if isinstance(report, WorkerReport) and report.broken:
            self.broke()
        half = self._scheduler
        if half is None:
            return
        for request_id in getattr(connector_output, "failed_recving", ()):
            half.load_failed(request_id)
        half.blocks_failed(connector_output.invalid_block_ids or set())
        for request_id in connector_output.finished_recving or ():
            half.load_ended(request_id)
        if isinstance(report, WorkerReport) and report.dropped:
            half.chunks_dropped()

    @guarded(lambda self, *_: (False, None))
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks need not be held for us: stores have references of their own on them."""
        if self._scheduler is not None:
            self._scheduler.finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether vLLM is to go on stepping, so that workers can report what has ended."""
        references = None if self._scheduler is None else self._references
        return references is not None and references.expects_reports()

    @guarded(lambda self: True)
    def reset_cache(self) -> bool | None:
        """Begins a new epoch: nothing that was stored before is ever loaded by this engine again.

        Removing it from agents and Redis is left to the agent, and may fail.
        """
        if self._scheduler is None:
            return None
        cleared = self._epoch
        self._begin_epoch(epoch.new_epoch(), "the cache was cleared")
        self._scheduler.remove_epoch(cleared)
        return True

    @guarded(nothing)
    def weights_changed(self, why: str) -> None:
        """An update of the weights may have come through. One may take hundreds of calls."""
        if self._scheduler is not None:
            unused = self._own_epoch and self._scheduler.epoch_is_unused
            self._begin_epoch(self._epoch if unused else epoch.new_epoch(), why)

    @guarded(nothing)
    def weights_named(self, weights_id: str) -> None:
        """The weights are now those that every engine of this id has."""
        named = epoch.named_epoch(weights_id)
        if named != self._epoch:
            self._begin_epoch(named, f"the weights are {weights_id!r}", own=False)

    def _begin_epoch(self, new: bytes, why: str, own: bool = True) -> None:
        if self._scheduler is None:
            return
        if new != self._epoch:
            logger.info("%s: KV that was cached before is not used any more", why)
        self._epoch, self._own_epoch = new, own
        self._scheduler.begin_epoch(new)

    # Worker

    @guarded(nothing)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Exports the paged KV cache and registers it with every agent there will be."""
        if not isinstance(self._adapter, WorkerClient):
            return
        tensors = {name: t for name, t in kv_caches.items() if isinstance(t, torch.Tensor)}
        if len(tensors) != len(kv_caches) or not tensors:
            logger.error("the cache stays off: a layer's KV cache is not one tensor")
            return
        strides = block_strides(self._kv_cache_config)
        try:
            self._adapter.register_kv_caches(
                tensors,
                num_blocks=self._kv_cache_config.num_blocks,
                dtype=dtype_name(next(iter(tensors.values())).dtype),
                identity=engine_identity(
                    self._vllm_config,
                    rank=self._vllm_config.parallel_config.rank,
                    backend=attention_backend(self._vllm_config),
                    weights_id=self._config.weights_id,
                )
                | kv_identity(
                    self._vllm_config,
                    tensors,
                    num_blocks=self._kv_cache_config.num_blocks,
                    block_strides=strides,
                ),
                block_strides=strides,
            )
        except LMCacheRedisError as error:
            logger.error("the cache stays off: %s", error)

    @guarded(nothing)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begins this step's loads; never waits for them."""
        metadata = self._step()
        self._awaited.update(metadata.lost_loads)
        for _, request_id, op in metadata.loads:
            skipped = op.skip_first_n_tokens // self._vllm_config.cache_config.block_size
            self._awaited[request_id] = list(op.block_ids[skipped:])
        if self._worker is not None:
            self._worker.begin_loads(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: no layer waits."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Stores take whole chunks after the forward pass, not layers."""

    @guarded(nothing)
    def wait_for_save(self) -> None:
        """Begins this step's stores; never waits for them."""
        if self._worker is not None:
            self._worker.begin_stores(self._step())

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Requests whose loads are over, and those of them that failed (vLLM 0.30 or newer)."""
        ended = self._ended_loads()
        return _TransferResults(finished_recving=ended.requests, failed_recving=set(ended.failed))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads are over. No request is held for a store."""
        ended = self._ended_loads()
        self._failed_blocks.update(*ended.failed.values())
        return None, ended.requests or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that a load was to fill and did not: vLLM computes from the first of them on."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    @guarded(lambda self: self._take_awaited())
    def _ended_loads(self) -> Ended:
        if self._worker is None:
            return self._take_awaited()
        ended = self._worker.ended_loads(self._step())
        for request_id, block_ids in self._step().lost_loads.items():
            ended.requests.add(request_id)
            ended.failed[request_id] = set(block_ids)
        for request_id in ended.requests:
            self._awaited.pop(request_id, None)
        return ended

    def _take_awaited(self) -> Ended:
        """All that vLLM waits for, as failed."""
        awaited, self._awaited = self._awaited, {}
        return Ended(set(awaited), {r: set(block_ids) for r, block_ids in awaited.items()})

    @guarded(nothing)
    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Tells the scheduler half which transfers are over."""
        if self._broken:
            return WorkerReport({}, broken=self._broken)
        return None if self._worker is None else self._worker.report()

    @guarded(nothing)
    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """What this worker loaded and stored since the last call."""
        figures = {} if self._worker is None else self._worker.take_figures()
        return ConnectorStats(figures) if any(figures.values()) else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats | None:
        """See the base class."""
        return ConnectorStats(data if data is not None else dict.fromkeys(NAMES, 0))

    # Both

    @guarded(nothing)
    def shutdown(self) -> None:
        """Says goodbye to the agent."""
        if self._adapter is not None:
            self._adapter.shutdown()

    def _engine(self) -> dict[str, Any]:
        config = self._vllm_config
        return {
            "endpoint": self._config.endpoint,
            "model_name": model_name(config),
            "world_size": config.parallel_config.world_size,
            "block_size_tokens": config.cache_config.block_size,
            "engine_id": self._kv_transfer_config.engine_id,
            "agent_dead_after_s": self._config.agent_dead_after_s,
        }

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata
