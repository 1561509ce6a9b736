# SPDX-License-Identifier: Apache-2.0
"""The engine that vLLM makes in this process: seen as it is made, because no interface names it.

The engine core makes an executor, whose workers read the model and register their KV cache, and
then a scheduler, which makes the connector. vLLM loads plugins before all of that, and so these
constructors are wrapped by then (`watch_loading`). What was not seen is None. An engine's config
is told from another's by identity, so none is taken for another. A child of a ``MultiConnector``
has a copy of the config, with the same parts.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from lmcache_redis.integrations.vllm import needs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.lmcache_redis")

NOT_SEEN = "vLLM was not seen making this engine: VLLM_PLUGINS must not leave out lmcache_redis"

# Of a process.
executors: weakref.WeakSet[Any] = weakref.WeakSet()
workers: weakref.WeakSet[Any] = weakref.WeakSet()


class _Making(threading.local):
    scheduler: Any = None


_making = _Making()


def watch_loading(look: Callable[[Any], None]) -> None:
    """Calls ``look(vllm_config)`` before vLLM reads a model, in each process of an engine.

    In the engine core's before it makes its workers, in a worker's before it loads.
    """
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def engine_begins(executor: Any, vllm_config: VllmConfig, *_: Any) -> None:
        executors.add(executor)
        watch_schedulers()
        look(vllm_config)

    def worker_begins(worker: Any, *_: Any) -> None:
        workers.add(worker)
        look(needs.WORKER_CONFIG.of(worker))

    needs.EXECUTOR_INIT.wrap_once(Executor, after(engine_begins))
    needs.INIT_DEVICE.wrap_once(WorkerWrapperBase, after(worker_begins))


def watch_schedulers() -> None:
    """From now on a scheduler is known while it is made. Never raises: then none is known."""
    try:
        from vllm.v1.core.sched.scheduler import Scheduler
    except ImportError:
        return  # `needs.require` says so
    needs.SCHEDULER_INIT.wrap_once(Scheduler, while_made)


def while_made(init: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Makes a scheduler, which is known on this thread meanwhile."""
    outer = _making.scheduler
    _making.scheduler = scheduler
    try:
        init(scheduler, *args, **kwargs)
    finally:
        _making.scheduler = outer


def scheduler() -> Any:
    """The scheduler that is being made on this thread, or None."""
    return _making.scheduler


def executor_of(vllm_config: VllmConfig) -> Any:
    """The executor of an engine, or None."""
    return _of(executors, vllm_config)


def worker_of(vllm_config: VllmConfig) -> Any:
    """The worker of an engine in this process, or None."""
    wrapper = _of(workers, vllm_config)
    return None if wrapper is None else needs.WORKER.of(wrapper)


def is_of_an_engine(vllm_config: VllmConfig) -> bool:
    """Whether an engine or a worker has this config itself, and not a copy."""
    return any(_config(each) is vllm_config for each in (*executors, *workers))


def after(first: Callable[..., None]) -> Callable[..., Any]:
    """Has ``first`` called with a method's arguments before the method is."""

    def around(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            first(*args, *kwargs.values())
        except Exception:  # it has not seen the files, and so they are not known
            logger.exception("the files of the model were not looked at; please report this")
        return method(*args, **kwargs)

    return around


def _of(made: Iterable[Any], vllm_config: VllmConfig) -> Any:
    for each in list(made):
        config = _config(each)
        if config is not None and config.parallel_config is vllm_config.parallel_config:
            return each
    return None


def _config(made: Any) -> Any:
    return needs.EXECUTOR_CONFIG.of(made)
