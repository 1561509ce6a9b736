# SPDX-License-Identifier: Apache-2.0
"""``LMCacheRedisConnector``: vLLM's ``KVConnectorBase_V1`` for both roles.

No error of the cache reaches the engine: what is not cached is computed. Every entry point is
guarded.
Source: ``vllm/distributed/kv_transfer/kv_connector/v1/base.py`` of vLLM 0.27 to 0.33
(of 0.33 the scheduler was run, the workers read).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from lmcache_redis.client.scheduler import SchedulerClient
from lmcache_redis.client.worker import WorkerClient
from lmcache_redis.errors import LMCacheRedisError
from lmcache_redis.integrations.vllm import making, needs
from lmcache_redis.integrations.vllm.engine import (
    Engine,
    adapters_of,
    is_pausing,
    listen,
    listeners,
    watch_resets,
)
from lmcache_redis.integrations.vllm.epoch import EpochChange, Epochs
from lmcache_redis.integrations.vllm.guard import guarded, nothing
from lmcache_redis.integrations.vllm.identity.lora import adapters_in_memory
from lmcache_redis.integrations.vllm.planning import BlockReferences, given_back
from lmcache_redis.integrations.vllm.reports.stats import ReportingHooks
from lmcache_redis.integrations.vllm.scheduler import ConnectorScheduler
from lmcache_redis.integrations.vllm.setup import SetUp
from lmcache_redis.integrations.vllm.support import wanted_layout
from lmcache_redis.integrations.vllm.worker import (
    ConnectorWorker,
    StepMetadata,
    WorkerReport,
)

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.lmcache_redis")

# vLLM 0.30 or newer is told which requests' loads failed, and allocates other blocks for them.
_TransferResults: Any = needs.TRANSFER_RESULTS.of(base)
# An engine that goes to sleep waits this long for the agent to unmap its memory.
_UNMAP_WITHIN_S = 5.0

making.watch_schedulers()  # vLLM has loaded no plugin if VLLM_PLUGINS leaves this package out


class LMCacheRedisConnector(ReportingHooks, SupportsHMA):
    """Loads and stores KV through the agent of this node. A listener of `engine`."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._begin_reports()
        self._scheduler: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        self._adapter: SchedulerClient | WorkerClient | None = None
        self._references: BlockReferences | None = None
        # The blocks of loads that vLLM waits for. In the scheduler: not yet sent to the workers; in
        # a worker: not yet reported to vLLM. Here, so that they are reported even after
        # `ConnectorScheduler` or `ConnectorWorker` has failed.
        self._awaited: dict[str, Sequence[int]] = {}
        self._failed_blocks: set[int] = set()  # for vLLM versions that ask for blocks
        # In the scheduler: requests that have blocks of a load, and have not computed since. For a
        # reset, which takes these blocks.
        self._loading: dict[str, Request] = {}
        self._loaded: dict[str, Request] = {}
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._engine: Engine | None = None  # in the scheduler
        self._has_adapters = needs.LORA_CONFIG.of(vllm_config) is not None
        self._start()

    @guarded(nothing)
    def _start(self) -> None:
        by_request = _TransferResults is not None
        try:
            needs.require()
            self._set_up = SetUp.of(self, takes_failed_loads=by_request)
        except LMCacheRedisError as error:
            logger.error("the cache stays off: %s", error)
            return
        self._recorder.endpoint = self._set_up.config.endpoint
        if self.role is KVConnectorRole.SCHEDULER:
            self._adapter = self._set_up.scheduler_client()
        else:
            self._adapter = client = self._set_up.worker_client()
            rank = self._vllm_config.parallel_config.rank
            self._worker = ConnectorWorker(client, rank, self._recorder, reallocates=by_request)
            listeners.add(self)

    def turn_off(self) -> None:
        """Turns the cache of this engine off. Loads that vLLM waits for are reported as failed."""
        self._scheduler = self._worker = None
        if self._references is not None:
            self._references.release_unsent()
        if self._announcer is not None:
            self._announcer.forget()
        if isinstance(self._adapter, WorkerClient):
            self._adapter.unregister()  # `build_connector_worker_meta` tells how that goes on
        elif self._adapter is not None:
            self._adapter.shutdown()
            self._adapter = None

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a dropped store only causes a later miss."""
        return False

    # Scheduler

    @guarded(nothing)
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Called by vLLM before 0.30, whose scheduler already has the manager."""
        engine = Engine.in_the_making()
        self.bind_kv_cache_manager(None if engine is None else engine.kv_cache_manager())

    @guarded(nothing)
    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager | None) -> None:
        """Starts the cache: it needs vLLM's blocks."""
        if (engine := Engine.in_the_making()) is None or kv_cache_manager is None:
            logger.error("the cache stays off: %s", making.NOT_SEEN)
            return
        pool = kv_cache_manager.block_pool
        # Also where the cache is off: vLLM defers the freeing of blocks for any connector.
        watch_resets(
            pool, lambda: self._before_reset(engine), lambda: self._given_back(pool, engine)
        )
        adapter = self._adapter
        if not isinstance(adapter, SchedulerClient):
            return
        self._begin_events(adapter, engine, self._set_up.groups, pool.hash_block_size)
        self._references = references = BlockReferences(
            pool, self._vllm_config.parallel_config.world_size
        )
        self._scheduler = self._set_up.scheduler(
            adapter, engine, kv_cache_manager, references, self._recorder, self._announcer
        )
        engine.watch_outputs(self._output_taken)
        self._engine = engine
        self.adapters_read()
        listen(self)

    @guarded(lambda self, *_: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """None until the agent has answered; loads are asynchronous."""
        self._loaded.pop(request.request_id, None)  # its load has failed, or it was preempted
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    @guarded(nothing)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        block_ids: Sequence[list[int]] = blocks.get_block_ids() if num_external_tokens else ()
        if num_external_tokens:
            # Of one group: vLLM versions that report blocks have no other.
            external_blocks = -(-num_external_tokens // self._vllm_config.cache_config.block_size)
            self._awaited[request.request_id] = block_ids[0][-external_blocks:]
            self._loading[request.request_id] = request
        if self._scheduler is not None:
            self._scheduler.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = self._metadata(scheduler_output) or StepMetadata()
        for load in metadata.loads:
            self._awaited.pop(load.request_id, None)
        metadata.lost_loads, self._awaited = self._awaited, {}
        if self._references is not None:
            transfers = (*metadata.loads, *metadata.stores)
            self._references.sent([each.transfer_id for each in transfers])
        for request_id in self._loaded.keys() & scheduler_output.num_scheduled_tokens.keys():
            del self._loaded[request_id]
        return metadata

    @guarded(nothing)
    def _metadata(self, scheduler_output: SchedulerOutput) -> StepMetadata | None:
        return self._scheduler.build_metadata(scheduler_output) if self._scheduler else None

    @guarded(nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        for request_id in connector_output.finished_recving or ():
            request = self._loading.pop(request_id, None)
            if request is not None and not request.is_finished():
                self._loaded[request_id] = request
        report = connector_output.kv_connector_worker_meta
        if not isinstance(report, WorkerReport):
            report = WorkerReport({})
        if self._references is not None:
            self._references.ended(report.ended)
            for rank, stopped in report.broken.items():
                if stopped:
                    self._references.rank_stopped(rank)
        if report.broken:
            self.turn_off()
        if self._scheduler is not None:
            self._scheduler.reported(report)
            for request_id in connector_output.finished_recving or ():
                self._scheduler.load_ended(request_id)

    @guarded(nothing)
    def _output_taken(self, output: SchedulerOutput) -> None:
        if self._scheduler is not None:
            self._scheduler.output_taken(output)

    @guarded(lambda self, *_: (False, None))
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """False: vLLM may release the blocks, because stores have their own references on them.

        The second is ``kv_transfer_params`` of the answer, which proxies hand to the next engine.
        """
        self._loaded.pop(request.request_id, None)
        told = None if self._scheduler is None else self._scheduler.finished(request)
        return False, told

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, for models with several groups."""
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must step on to report ended transfers, or to publish events."""
        if self._references is not None and self._references.expects_reports():
            return True
        return self._announcer is not None and self._announcer.has_events

    @guarded(lambda self: False)
    def has_pending_block_frees(self) -> bool:
        """Whether vLLM should wait a step for blocks rather than preempt a request."""
        return self._references is not None and self._references.frees_soon()

    # What happens to the engine: `engine` notices it, `epoch` says what it means for names

    @guarded(nothing)
    def _before_reset(self, engine: Engine) -> None:
        """vLLM resets its prefix cache: our transfers must not block it."""
        given_up = {**self._loading, **self._loaded}
        # All of them first: an error of the scheduler's part leaves no block to the reset.
        for request in given_up.values():
            engine.give_up_load(request)
        if self._scheduler is not None:
            for request_id in given_up:
                self._scheduler.gave_up_load(request_id)
            if is_pausing():
                self._scheduler.paused()
            why = "the parameters in memory have changed"
            self._scheduler.change_epoch(Epochs.check_parameters, why)
        if self._announcer is not None:
            self._announcer.tell_again()

    @guarded(lambda self, *_: nullcontext())
    def _given_back(self, pool: BlockPool, engine: Engine) -> AbstractContextManager[None]:
        """During a reset: neither our references hinder it, nor what vLLM frees only later."""
        held = [] if self._references is None else self._references.blocks
        return given_back(pool, [*held, *engine.deferred_blocks()])

    @guarded(lambda self: True)
    def reset_cache(self) -> bool | None:
        """Begins a new epoch; not at a pause, which leaves the weights alone."""
        if self._scheduler is None:
            return None
        if not is_pausing():
            self._scheduler.clear()
        return True

    @guarded(nothing)
    def change_epoch(self, change: EpochChange, why: str) -> None:
        if self._scheduler is not None:
            self._scheduler.change_epoch(change, why)

    @guarded(nothing)
    def adapters_read(self) -> None:
        """vLLM may have read adapters: asks the workers which ones they have in memory."""
        engine = self._engine if self._has_adapters else None
        if self._scheduler is not None and engine is not None and engine.was_seen:
            found = engine.in_workers(adapters_in_memory)
            self._scheduler.adapters_read(dict(enumerate(found)))

    @guarded(nothing)
    def engine_ends(self, core: Any) -> None:
        """vLLM calls `shutdown` once its workers have ended, or never if that takes them long."""
        if self._scheduler is not None and self._engine is not None and self._engine.is_of(core):
            self._scheduler.end()

    @guarded(nothing)
    def renamed(self, suffix: str) -> None:
        """This engine is a copy of another, restored from a snapshot (either role)."""
        if self._adapter is not None:
            self._adapter.link.rename(suffix)

    # Worker

    @guarded(nothing)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Exports the paged KV cache and registers it with this and every later agent."""
        if self._worker is None or not isinstance(self._adapter, WorkerClient):
            return
        self._kv_caches = kv_caches
        if self._has_adapters and self._worker.adapters is None:
            self._worker.adapters = adapters_of(self._vllm_config)
        try:
            self._set_up.register(self._adapter, kv_caches)
        except LMCacheRedisError as error:
            logger.error("the cache stays off: %s", error)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """True: vLLM 0.33 or newer starts. Memory that cannot be exported is not cached."""
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """A wish, before there is a connector: after an error the order is vLLM's own."""
        try:
            return wanted_layout(vllm_config)
        except Exception:
            logger.exception("kv_cache_layout is not asked for; please report this")
            return None

    @guarded(nothing)
    def unregister_kv_caches(self) -> None:
        """Before the engine sleeps: the agent unmaps the KV cache (vLLM 0.33 or newer)."""
        client = self._adapter
        if isinstance(client, WorkerClient) and not client.unregister(_UNMAP_WITHIN_S):
            logger.warning("the engine sleeps while an agent may still map its KV cache")

    @guarded(nothing)
    def restore_kv_caches(self) -> None:
        """After the engine has woken: exports the KV cache again (vLLM 0.33 or newer)."""
        self.register_kv_caches(self._kv_caches)

    @guarded(nothing)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.step_begins(self._step())

    @guarded(nothing)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Starts the loads of this step; never waits for them."""
        metadata = self._step()
        self._awaited.update(metadata.lost_loads)
        for load in metadata.loads:
            self._awaited[load.request_id] = load.written
        if self._worker is not None:
            self._worker.begin_loads(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: loads are asynchronous."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Does nothing: whole chunks are stored once the step is known to have worked."""

    def wait_for_save(self) -> None:
        """Does nothing: stores begin with a later step."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Requests whose loads have ended, and those of them that failed (vLLM 0.30 or newer)."""
        ended = self._ended_loads()
        failed = {request_id for request_id, block_ids in ended.items() if block_ids}
        return _TransferResults(finished_recving=set(ended), failed_recving=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads have ended. No request is held for a store."""
        ended = self._ended_loads()
        self._failed_blocks.update(*ended.values())
        return None, set(ended) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that a load did not fill: vLLM recomputes a request from its first such block."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def _all_failed(self) -> dict[str, set[int]]:
        lost, self._awaited = self._awaited, {}
        return {request_id: set(block_ids) for request_id, block_ids in lost.items()}

    @guarded(_all_failed)
    def _ended_loads(self) -> dict[str, set[int]]:
        """The blocks that were not filled, by request."""
        if self._worker is None:
            return self._all_failed()
        ended = self._worker.ended_loads(self._step())
        for request_id, block_ids in self._step().lost_loads.items():
            ended[request_id] = set(block_ids)
        for request_id in ended:
            self._awaited.pop(request_id, None)
        return ended

    @guarded(nothing)
    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Reports ended transfers, or the failure of this worker, to the scheduler."""
        if self._worker is not None:
            return self._worker.report()
        if not isinstance(self._adapter, WorkerClient):
            return None
        rank = self._vllm_config.parallel_config.rank
        return WorkerReport({}, broken={rank: self._adapter.unregister()})

    # Both roles

    @guarded(nothing)
    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.end()
        if self._adapter is not None:
            self._adapter.shutdown()

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata
