# SPDX-License-Identifier: Apache-2.0
"""What happens to vLLM's engine, and its interface does not tell.

The engine is the one that is being made (`making`). These methods are wrapped; they run in the
scheduler's process, between two steps. `needs` says what happens where one of them is missing.

collective_rpc        every update of weights by vLLM goes through it; `parameters` notices others
set_weight_version    names the weights
_reset_caches         empties vLLM's caches for a pause, and calls what resets its prefix cache
sleep, wake_up        of the executor: at level 2 the weights are thrown away
add_lora              reads an adapter, hours before its first request if vLLM preloads it
shutdown              ends its workers first, and is killed if that takes 5 s
reset_prefix_cache    of the block pool (`watch_resets`): whoever asks for a reset, it ends there
get_new_blocks        of the block pool (`watch_new_blocks`): whoever allocates, it comes from there
update_from_output    of the scheduler (`Engine.watch_outputs`): it takes the output of a step
"""

from __future__ import annotations

import logging
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from lmcache_redis.errors import Unsupported
from lmcache_redis.integrations.vllm import making, needs
from lmcache_redis.integrations.vllm.epoch import EpochChange, Epochs
from lmcache_redis.integrations.vllm.identity.lora import AdaptersInMemory
from lmcache_redis.integrations.vllm.parameters import Parameters, parameters_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.lmcache_redis")

WEIGHTS_ID_RPC = "lmcache_redis_weights_id"
_RESTORE_RPC = "checkpoint_restore"

# Methods that leave the weights unchanged. Any other counts as an update: one epoch too many costs
# misses, one too few costs wrong answers.
_HARMLESS = frozenset(
    {
        "add_lora", "annotate_profile", "check_health", "checkpoint_prepare", _RESTORE_RPC,
        "compute_weight_checksums", "get_encoder_timing_stats", "get_kv_cache_spec",
        "get_model_inspection", "get_supported_tasks", "init_weight_transfer_engine",
        "list_loras", "pin_lora", "profile", "release_late_interaction_query_cache", "remove_lora",
        "reset_encoder_cache", "reset_mm_cache", "save_sharded_state", "save_tensorized_model",
        "shutdown_weight_transfer_engine", "synchronize_device", "update_max_model_len", "wake_up",
    }
)  # fmt: skip
# Of those, methods that read adapters, or drop them from memory, as an update of weights may.
_OF_ADAPTERS = ("add_lora", "remove_lora")
# Methods that end an update: the weights may be those of an earlier epoch again.
_LOADED = frozenset({"finish_weight_update", "reload_weights"})
# From this level of sleep on, the weights are thrown away.
_WITHOUT_WEIGHTS = 2

_T = TypeVar("_T")


# Of a process. They have `change_epoch(change, why)`, in the scheduler's process: the weights may
# have changed, or have a name; `adapters_read()`: so may the adapters in memory;
# `engine_ends(core)`: an engine ends, whose workers still live; and `renamed(suffix)`: the engine
# is a copy of another, and has the suffix in its id from now on.
listeners: weakref.WeakSet[Any] = weakref.WeakSet()


class _Pausing(threading.local):
    now = False


_pausing = _Pausing()


def is_pausing() -> bool:
    """Whether vLLM empties its caches for a pause, which says nothing about the weights."""
    return _pausing.now


class Engine:
    """The engine whose scheduler makes a connector. Holds it weakly: the engine owns us.

    executor: None if it was not seen: then nothing is asked of its workers.
    """

    def __init__(self, executor: Any, scheduler: Any) -> None:
        self._executor, self._scheduler = _weak(executor), _weak(scheduler)

    @classmethod
    def in_the_making(cls) -> Engine | None:
        """The engine whose scheduler is being made on this thread; None: none was seen."""
        if (scheduler := making.scheduler()) is None:
            return None
        return cls(making.executor_of(needs.SCHEDULER_CONFIG.of(scheduler)), scheduler)

    @property
    def was_seen(self) -> bool:
        """Whether its workers can be asked."""
        return self._executor() is not None

    @property
    def vllm_config(self) -> VllmConfig | None:
        """None if the engine is gone, or its workers were never seen."""
        config: VllmConfig | None = needs.EXECUTOR_CONFIG.of(self._executor())
        return config

    def is_of(self, core: Any) -> bool:
        """Whether this is the engine of an ``EngineCore``."""
        executor = self._executor()
        return executor is not None and needs.MODEL_EXECUTOR.of(core) is executor

    def in_workers(self, function: Callable[[Any], _T]) -> list[_T]:
        """What a function of a module returns for each rank's worker, in order of the ranks."""
        if (executor := self._executor()) is None:
            raise Unsupported(making.NOT_SEEN)
        return list(needs.EXECUTOR_RPC.of(executor)(function))

    def kv_cache_manager(self) -> Any:
        """None before the scheduler has made it."""
        return needs.KV_CACHE_MANAGER.of(self._scheduler())

    def is_paused(self) -> bool:
        """Whether vLLM is paused or asleep."""
        return bool(needs.PAUSE_STATE.of(self._scheduler()))

    def deferred_blocks(self) -> list[KVCacheBlock]:
        """Those that vLLM will free when the step in flight, which may still write them, has ended.

        It does so with any connector that loads. Null blocks are left out.
        """
        deferred = needs.DEFERRED_FREES.of(self._scheduler())
        return [block for _, blocks in deferred for block in blocks if not block.is_null]

    def parameters(self) -> Parameters | None:
        """The parameters of all ranks, read now; None if they cannot be read."""
        executor = self._executor()
        try:
            if needs.IS_SLEEPING.of(executor) and "weights" in needs.SLEEPING_TAGS.of(executor):
                return None  # they may be unmapped
            return Parameters.of_ranks([Parameters(*e) for e in self.in_workers(parameters_digest)])
        except Exception as error:  # whatever an executor or a model raises
            logger.warning(
                "the parameters in memory cannot be read (%r): every reset of vLLM's prefix cache "
                "counts as new weights; check_weights false in kv_connector_extra_config ends this",
                error,
            )
            return None

    def watch_outputs(self, taken: Callable[[Any], None]) -> None:
        """Calls ``taken(scheduler_output)`` when the scheduler has taken the output of that step.

        It never does for a step that raises, even if vLLM goes on.
        """

        def around(update: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = update(scheduler_output, *args, **kwargs)
            taken(scheduler_output)
            return outputs

        needs.UPDATE_FROM_OUTPUT.wrap(self._scheduler(), around)

    def give_up_load(self, request: Request) -> None:
        """Frees the blocks of a request whose load has begun or ended; it starts over.

        vLLM still waits for the report of a load in flight, also for a request that was aborted.
        """
        scheduler = self._scheduler()
        if scheduler is not None:
            needs.KV_CACHE_MANAGER.of(scheduler).free(request)
            if not request.is_finished():
                request.num_computed_tokens = 0


def _weak(found: Any) -> Callable[[], Any]:
    return (lambda: None) if found is None else weakref.ref(found)


def adapters_of(vllm_config: VllmConfig) -> AdaptersInMemory | None:
    """Those of the worker of an engine in this process."""
    try:
        return AdaptersInMemory.of(needs.MODEL_RUNNER.of(making.worker_of(vllm_config)))
    except AttributeError:  # then adapters are not cached, with a sentence
        return None


def recompute_failed_loads(connector: KVConnectorBase_V1) -> bool:
    """Sets ``kv_load_failure_policy`` to ``recompute``; vLLM's default fails the request.

    The scheduler reads that of its own config after it has made the connector. A child of
    ``MultiConnector`` has another. Returns whether the connector is one, as its scheduler sees it.
    """
    own = needs.CONNECTOR_TRANSFER.of(connector)
    engines, scheduler = own, making.scheduler()
    if scheduler is not None:
        engines = needs.SCHEDULER_CONFIG.of(scheduler).kv_transfer_config
    for each in (own, engines):
        each.kv_load_failure_policy = "recompute"
    return engines is not own


def watch_resets(
    pool: BlockPool,
    before: Callable[[], None],
    during: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Calls ``before()`` at every reset of vLLM's prefix cache, which runs inside ``during()``."""

    def around(reset: Callable[[], bool]) -> bool:
        before()
        with during():
            return bool(reset())

    needs.RESET_PREFIX_CACHE.wrap(pool, around)


def watch_new_blocks(pool: BlockPool, given: Callable[[Sequence[KVCacheBlock]], None]) -> None:
    """Calls ``given(blocks)`` for blocks that a request gets to write to."""

    def around(get: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        blocks = get(*args, **kwargs)
        given(blocks)
        return blocks

    needs.GET_NEW_BLOCKS.wrap(pool, around)


def listen(listener: Any) -> None:
    """Notifies ``listener``, on the scheduler's thread, for as long as it lives."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    listeners.add(listener)
    for owner, need, around in (
        (EngineCore, needs.COLLECTIVE_RPC, _around_rpc),
        (EngineCore, needs.SET_WEIGHT_VERSION, _around_version),
        (EngineCore, needs.RESET_CACHES, _around_pause),
        (EngineCore, needs.ADD_LORA, _around_adapter),
        (EngineCore, needs.CORE_SHUTDOWN, _around_shutdown),
        (Executor, needs.SLEEP, _around_sleep),
        (Executor, needs.WAKE_UP, _around_wake_up),
    ):
        if need.is_in(owner):
            need.wrap_once(owner, around)


def _change_epochs(change: EpochChange, why: str) -> None:
    for listener in list(listeners):
        listener.change_epoch(change, why)


def _adapters_read() -> None:
    for listener in list(listeners):
        listener.adapters_read()


def _around_rpc(
    collective_rpc: Callable[..., Any], core: Any, method: Any, *args: Any, **kwargs: Any
) -> Any:
    if method == WEIGHTS_ID_RPC:
        return _name_weights(core, *args, **kwargs)
    change: EpochChange = Epochs.weights_may_differ  # also after a failure: some may be new
    try:
        result = collective_rpc(core, method, *args, **kwargs)
        if method in _LOADED:
            change = Epochs.weights_were_loaded
        return result
    finally:
        if method not in _HARMLESS or method in _OF_ADAPTERS:
            _adapters_read()
        if method not in _HARMLESS:
            name = method if isinstance(method, str) else "a function"
            _change_epochs(change, f"collective_rpc of {name}")
        elif method == _RESTORE_RPC:
            _rename(core)


def _around_pause(reset_caches: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    _pausing.now = True
    try:
        return reset_caches(core, *args, **kwargs)
    finally:
        _pausing.now = False


def _around_adapter(add_lora: Callable[..., bool], core: Any, lora_request: Any) -> bool:
    try:
        return add_lora(core, lora_request)
    finally:
        _adapters_read()


def _around_shutdown(shutdown: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    for listener in list(listeners):
        listener.engine_ends(core)
    return shutdown(core, *args, **kwargs)


def _around_version(set_weight_version: Callable[..., Any], core: Any, weight_version: str) -> Any:
    result = set_weight_version(core, weight_version)
    change = methodcaller("weights_have_version", weight_version)
    _change_epochs(change, f"weight version {weight_version!r}")
    return result


def _around_sleep(
    sleep: Callable[..., Any], executor: Any, level: int = 1, *args: Any, **kwargs: Any
) -> Any:
    try:
        return sleep(executor, level, *args, **kwargs)
    finally:
        if level >= _WITHOUT_WEIGHTS:
            _change_epochs(Epochs.weights_may_differ, f"sleep at level {level}")


def _around_wake_up(wake_up: Callable[..., Any], executor: Any, *args: Any, **kwargs: Any) -> Any:
    result = wake_up(executor, *args, **kwargs)
    _change_epochs(Epochs.check_unknown, "the engine has woken")
    return result


def _name_weights(
    core: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
) -> list[bool]:
    """Serves ``WEIGHTS_ID_RPC`` without the workers."""
    (weights_id,) = args or tuple((kwargs or {}).values()) or (None,)
    if not isinstance(weights_id, str) or not 0 < len(weights_id) <= 256:
        raise ValueError(
            f"{WEIGHTS_ID_RPC} takes one id of 1 to 256 characters, not {weights_id!r}"
        )
    _change_epochs(methodcaller("weights_have_id", weights_id), f"weights_id {weights_id!r}")
    return [True] * core.vllm_config.parallel_config.world_size


def _rename(core: Any) -> None:
    """Several engines may have been restored from one snapshot: each takes a name of its own."""
    suffix = uuid.uuid4().hex[:8]
    try:
        needs.EXECUTOR_RPC.of(needs.MODEL_EXECUTOR.of(core))(rename, args=(suffix,))
    finally:
        rename(None, suffix)


def rename(worker: Any, suffix: str) -> None:
    """Also runs in a worker, by ``collective_rpc``."""
    for listener in list(listeners):
        listener.renamed(suffix)
