"""The engine that an adapter belongs to, its arguments, and its link to the agent."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import parent_process
from typing import Any

import zmq

from lmcache_redis.chunks.keys import MAX_WORLD_SIZE
from lmcache_redis.client.control import AgentUnreachable
from lmcache_redis.client.link import AgentLink, LinkState
from lmcache_redis.errors import check_int
from lmcache_redis.processes import process_start_time

ENGINE_ID_VARIABLE = "LMCACHE_REDIS_ENGINE_ID"
TIMEOUT_S = 30.0


class AdapterOfEngine:
    """What both adapters have beside a client of the agent."""

    model_name: str
    world_size: int
    worker_id: int
    link: AgentLink
    num_blocks_per_chunk: Callable[[], int]

    @property
    def blocks_in_chunk(self) -> int:
        """Blocks of one chunk."""
        return self.num_blocks_per_chunk()

    def _join(
        self,
        context: zmq.Context[Any],
        model_name: str,
        world_size: int,
        kv_rank: int,
        block_size: int,
        engine_id: str | None,
        *,
        is_worker: bool,
    ) -> dict[str, Any]:
        """Keeps the arguments; the engine's `engine_id`, and whether it is `unnamed`.

        Raises TypeError or FormatError for arguments of another order, type or range.
        """
        if not isinstance(context, zmq.Context):
            raise TypeError(f"context is a zmq.Context, not {type(context).__name__}")
        if not isinstance(model_name, str):
            raise TypeError(f"model_name is text, not {type(model_name).__name__}")
        check_int("world_size", world_size, 1, MAX_WORLD_SIZE)
        check_int("kv_rank", kv_rank, 0, world_size - 1)
        check_int("vllm_block_size", block_size, 1, (1 << 31) - 1)
        self.model_name, self.world_size, self.worker_id = model_name, world_size, kv_rank
        given = engine_id or os.environ.get(ENGINE_ID_VARIABLE)
        made_up = default_engine_id(model_name, world_size, is_worker=is_worker)
        return {"engine_id": given or made_up, "unnamed": not given}

    def _await_agent(self, timeout_s: float) -> None:
        """Returns when an agent has accepted the link. Raises AgentUnreachable, and closes it."""
        link = self.link
        try:
            link.wait_for(lambda: link.online or link.state is LinkState.REFUSED, timeout_s)
            if not link.online:
                raise AgentUnreachable(
                    link.refusal
                    or f"no agent answers at {link.endpoint} within {timeout_s:g} s: start one "
                    f"with `lmcache-redis agent --endpoint {link.endpoint}`"
                )
        except BaseException:
            link.close()
            raise


def default_engine_id(model_name: str, world_size: int, *, is_worker: bool) -> str:
    """The id of the engine of this process, if none was given.

    An engine is named by the process of its scheduler and by its model. A worker of several runs
    in a child of that process if `multiprocessing` started it; any other worker in that process
    itself. Where processes are arranged otherwise, scheduler and worker have different ids.
    """
    parent = parent_process() if is_worker and world_size > 1 else None
    pid = os.getpid() if parent is None else parent.pid
    return f"{pid}-{process_start_time(pid or 0)}-{model_name}"
