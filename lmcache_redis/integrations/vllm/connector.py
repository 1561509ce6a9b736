"""``LMCacheRedisConnector``: vLLM's ``KVConnectorBase_V1``, both roles.

Nothing here raises into the engine for a cache reason: what cannot be cached is computed.
Source: ``vllm/distributed/kv_transfer/kv_connector/v1/base.py`` of vLLM 0.32.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from lmcache_redis.client.scheduler import LMCacheMPSchedulerAdapter
from lmcache_redis.client.worker import LMCacheMPWorkerAdapter
from lmcache_redis.config import ClientConfig
from lmcache_redis.dtypes import dtype_name
from lmcache_redis.errors import LMCacheRedisError
from lmcache_redis.integrations.vllm.identity import engine_identity, model_name
from lmcache_redis.integrations.vllm.metadata import CompletedStores, StepMetadata
from lmcache_redis.integrations.vllm.probe import kv_identity
from lmcache_redis.integrations.vllm.scheduler import SchedulerHalf
from lmcache_redis.integrations.vllm.stats import NAMES, ConnectorStats
from lmcache_redis.integrations.vllm.support import unsupported
from lmcache_redis.integrations.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

# vLLM shows the lines of loggers below its own name as its own.
logger = logging.getLogger("vllm.lmcache_redis")

_RESET_TIMEOUT_S = 10.0


class LMCacheRedisConnector(KVConnectorBase_V1):
    """Loads and stores KV through the agent of this node."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        config = ClientConfig.from_extra_config(transfer.kv_connector_extra_config)
        # A cache that fails to load computes; vLLM's default would fail the request.
        # The scheduler reads this after it has made the connector.
        transfer.kv_load_failure_policy = "recompute"
        self._config = config
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._adapter: LMCacheMPSchedulerAdapter | LMCacheMPWorkerAdapter | None = None
        self._reported = dict.fromkeys(NAMES, 0)
        reason = unsupported(vllm_config, kv_cache_config)
        if reason is not None:
            logger.error("the cache stays off: %s", reason)
            return
        if role is KVConnectorRole.SCHEDULER:
            self._make_scheduler()
        else:
            self._make_worker()

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped store is a later miss, no more."""
        return False

    # Scheduler

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See the base class: None until the agent has answered; loads are asynchronous."""
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """See the base class."""
        if self._scheduler is not None:
            block_ids = blocks.get_block_ids()[0] if num_external_tokens else []
            self._scheduler.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See the base class."""
        if self._scheduler is None:
            return StepMetadata()
        return self._scheduler.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See the base class."""
        if self._scheduler is not None:
            self._scheduler.worker_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Holds the blocks only while a store still reads them."""
        if self._scheduler is None:
            return False, None
        return self._scheduler.finished(request), None

    def reset_cache(self) -> bool | None:
        """Empties the cache of this engine's layouts, in the host pool and in Redis."""
        if self._scheduler is None:
            return None
        return self._scheduler.reset(_RESET_TIMEOUT_S)

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Exports the paged KV cache and registers it with every agent there will be."""
        if self._worker is None:
            return
        tensors = {name: t for name, t in kv_caches.items() if isinstance(t, torch.Tensor)}
        if len(tensors) != len(kv_caches) or not tensors:
            logger.error("the cache stays off: a layer's KV cache is not one tensor")
            return
        try:
            self._worker.register(
                tensors,
                num_blocks=self._kv_cache_config.num_blocks,
                dtype=dtype_name(next(iter(tensors.values())).dtype),
                identity=engine_identity(
                    self._vllm_config,
                    rank=self._vllm_config.parallel_config.rank,
                    backend=_attention_backend(self._vllm_config),
                    weights_id=self._config.weights_id,
                )
                | kv_identity(
                    self._vllm_config,
                    tensors,
                    num_blocks=self._kv_cache_config.num_blocks,
                    block_strides=_block_strides(self._kv_cache_config),
                ),
                block_strides=_block_strides(self._kv_cache_config),
            )
        except LMCacheRedisError as error:
            logger.error("the cache stays off: %s", error)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Waits until nobody reads the blocks that this step overwrites."""
        if self._worker is not None and isinstance(kv_connector_metadata, StepMetadata):
            self._worker.preempted(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begins this step's loads; never waits for them."""
        if self._worker is not None:
            self._worker.begin_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: no layer waits."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Stores take whole chunks after the forward pass, not layers."""

    def wait_for_save(self) -> None:
        """Begins this step's stores; never waits for them."""
        if self._worker is not None:
            self._worker.begin_stores(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose stores (of those that are held) and whose loads are over."""
        if self._worker is None:
            return None, None
        stored, loaded = self._worker.finished(self._step())
        return stored or None, loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that a load did not fill: vLLM computes from the first of them on."""
        if not isinstance(self._adapter, LMCacheMPWorkerAdapter):
            return set()
        return self._adapter.get_block_ids_with_load_errors()

    def build_connector_worker_meta(self) -> CompletedStores | None:
        """Tells the scheduler half which stores are over."""
        return None if self._worker is None else self._worker.completed_stores()

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """What this worker loaded and stored since the last call."""
        adapter = self._adapter
        if not isinstance(adapter, LMCacheMPWorkerAdapter):
            return None
        now = {name: int(getattr(adapter, name)) for name in NAMES}
        stats = ConnectorStats({name: now[name] - self._reported[name] for name in NAMES})
        self._reported = now
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats | None:
        """See the base class."""
        return ConnectorStats(data if data is not None else dict.fromkeys(NAMES, 0))

    # Both

    def shutdown(self) -> None:
        """Says goodbye to the agent."""
        if self._adapter is not None:
            self._adapter.shutdown()

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    def _make_scheduler(self) -> None:
        vllm_config = self._vllm_config
        block_size = vllm_config.cache_config.block_size
        hash_block = getattr(self._kv_cache_config, "hash_block_size", None) or block_size
        adapter = LMCacheMPSchedulerAdapter(
            self._config.endpoint,
            model_name(vllm_config),
            vllm_config.parallel_config.world_size,
            block_size,
            engine_id=vllm_config.kv_transfer_config.engine_id,
        )
        self._adapter = adapter
        self._scheduler = SchedulerHalf(
            adapter,
            world_size=vllm_config.parallel_config.world_size,
            block_size_tokens=block_size,
            hash_stride=max(1, block_size // hash_block),
            loads=vllm_config.kv_transfer_config.is_kv_consumer,
            stores=vllm_config.kv_transfer_config.is_kv_producer,
        )

    def _make_worker(self) -> None:
        vllm_config = self._vllm_config
        adapter = LMCacheMPWorkerAdapter(
            self._config.endpoint,
            model_name(vllm_config),
            vllm_config.parallel_config.world_size,
            vllm_config.parallel_config.rank,
            vllm_config.cache_config.block_size,
            engine_id=vllm_config.kv_transfer_config.engine_id,
        )
        self._adapter = adapter
        self._worker = WorkerHalf(adapter)


def _attention_backend(vllm_config: VllmConfig) -> str:
    """Names of the attention backends in use: they decide what a block looks like inside."""
    context = vllm_config.compilation_config.static_forward_context
    names = {
        backend.get_name()
        for layer in context.values()
        if hasattr(layer, "get_attn_backend") and (backend := layer.get_attn_backend())
    }
    return "+".join(sorted(names))


def _block_strides(kv_cache_config: KVCacheConfig) -> dict[str, int] | None:
    """Bytes between blocks by layer, where this vLLM says so; older ones leave it to strides."""
    tensors = kv_cache_config.kv_cache_tensors
    if not all(hasattr(tensor, "block_stride") for tensor in tensors):
        return None
    return {layer: tensor.block_stride for tensor in tensors for layer in tensor.layers}
