"""The engine that an adapter belongs to, its arguments, and its link to the agent."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import parent_process
from typing import Any, TypeVar

import zmq

from lmcache_redis.chunks.keys import MAX_WORLD_SIZE
from lmcache_redis.client.control import AgentUnreachable
from lmcache_redis.client.link import AgentLink, LinkState
from lmcache_redis.errors import check_int
from lmcache_redis.processes import process_start_time

ENGINE_ID_VARIABLE = "LMCACHE_REDIS_ENGINE_ID"
TIMEOUT_S = 30.0

_Adapter = TypeVar("_Adapter", bound=type)


def default_engine_id(model_name: str, world_size: int, *, is_worker: bool) -> str:
    """The id of the engine of this process, if none was given.

    An engine is named by the process of its scheduler and by its model. A worker of several runs
    in a child of that process if `multiprocessing` started it; any other worker in that process
    itself. Where processes are arranged otherwise, scheduler and worker have different ids.
    """
    parent = parent_process() if is_worker and world_size > 1 else None
    pid = os.getpid() if parent is None else parent.pid
    return f"{pid}-{process_start_time(pid or 0)}-{model_name}"


def engine_name(
    engine_id: str | None, model_name: str, world_size: int, *, is_worker: bool
) -> tuple[str, bool]:
    """The id of the engine, and whether it is made up."""
    given = engine_id or os.environ.get(ENGINE_ID_VARIABLE)
    made_up = default_engine_id(model_name, world_size, is_worker=is_worker)
    return given or made_up, not given


def nvtx_ranges(*methods: str) -> Callable[[_Adapter], _Adapter]:
    """Puts an NVTX range around each of these methods, if the nvtx package is installed."""

    def annotated(cls: _Adapter) -> _Adapter:
        try:
            from nvtx import annotate
        except ImportError:
            return cls
        for name in methods:
            around = annotate(message=f"{cls.__name__}.{name}", domain="lmcache")
            setattr(cls, name, around(getattr(cls, name)))
        return cls

    return annotated


def check_arguments(
    context: zmq.Context[Any], model_name: str, world_size: int, kv_rank: int, block_size: int
) -> None:
    """Raises TypeError or FormatError for arguments of another order, type or range."""
    if not isinstance(context, zmq.Context):
        raise TypeError(f"context is a zmq.Context, not {type(context).__name__}")
    if not isinstance(model_name, str):
        raise TypeError(f"model_name is text, not {type(model_name).__name__}")
    check_int("world_size", world_size, 1, MAX_WORLD_SIZE)
    check_int("kv_rank", kv_rank, 0, world_size - 1)
    check_int("vllm_block_size", block_size, 1, (1 << 31) - 1)


def await_agent(link: AgentLink, timeout_s: float) -> None:
    """Returns when an agent has accepted the link. Raises AgentUnreachable, and closes it."""
    try:
        link.wait_for(lambda: link.online or link.state is LinkState.REFUSED, timeout_s)
        if not link.online:
            raise AgentUnreachable(
                link.refusal
                or f"no agent answers at {link.endpoint} within {timeout_s:g} s: start one with "
                f"`lmcache-redis agent --endpoint {link.endpoint}`"
            )
    except BaseException:
        link.close()
        raise
