"""The adapters of vLLM's ``lmcache_integration.multi_process_adapter``, with their arguments.

An engine has one scheduler adapter and a worker adapter for each rank, all with one agent. As in
the originals, the constructors return when the agent has told its chunk size, and
``register_kv_caches`` when the agent has mapped the memory; both wait at most ``timeout_s``.

What differs from the originals, and why:

- ``server_url`` is an agent's ``ipc://PATH``. Any user of the machine could reach a TCP port, and
  an agent writes into the memory of engines.
- ``context`` is checked and not used. An adapter has its own context, because its thread closes its
  sockets: a caller that ends a shared context first would wait for that thread, or race with it.
- Several engines of one model may differ in what their chunks hold, so an engine has a name here:
  ``engine_id``, or ``$LMCACHE_REDIS_ENGINE_ID`` in all its processes. Without one the adapters find
  each other as `default_engine_id` says or, as in the originals, by model name and world size; then
  lookups miss while workers of different layouts are registered under these.
- A chunk is rounded up to whole blocks; the originals refuse other chunk sizes.
- An operation's ``event`` is required for a KV cache on a GPU. In CPU memory it may be None.
- All requests of a batch go in one message, and are reported one by one: the blocks of one that
  is still being copied are not reported with those of another.
- Wrong arguments raise TypeError or ValueError, not AssertionError. A `LoadStoreOp` is frozen, and
  checked when it is made.
- Blocks that a retrieve did not fill are in ``get_block_ids_with_load_errors``, besides the log: an
  engine must not compute with them.

A restarted agent is found again. Without an agent, lookups miss and stores are dropped.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import zmq

from lmcache_redis import messages as m
from lmcache_redis.chunks.dtypes import dtype_name
from lmcache_redis.chunks.keys import MAX_WORLD_SIZE
from lmcache_redis.client import adapter, scheduler
from lmcache_redis.client.control import AgentUnreachable
from lmcache_redis.client.link import AgentLink, Call, LinkState
from lmcache_redis.client.transfers import LoadStoreOp as LoadStoreOp
from lmcache_redis.config import ClientConfig
from lmcache_redis.errors import check_int
from lmcache_redis.processes import process_start_time

if TYPE_CHECKING:
    import torch

__all__ = ["LMCacheMPSchedulerAdapter", "LMCacheMPWorkerAdapter", "LoadStoreOp"]

logger = logging.getLogger(__name__)

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


def _named(
    engine_id: str | None, model_name: str, world_size: int, *, is_worker: bool
) -> tuple[str, bool]:
    """The id of the engine, and whether it is made up."""
    given = engine_id or os.environ.get(ENGINE_ID_VARIABLE)
    made_up = default_engine_id(model_name, world_size, is_worker=is_worker)
    return given or made_up, not given


def _nvtx_ranges(*methods: str) -> Callable[[_Adapter], _Adapter]:
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


@_nvtx_ranges("maybe_submit_lookup_request", "check_lookup_result")
class LMCacheMPSchedulerAdapter(scheduler.LMCacheMPSchedulerAdapter):
    """Asks the agent which leading tokens of prompts are cached.

    server_url: the agent's endpoint, ``ipc://PATH``.
    context: a `zmq.Context`; see above.
    model_name, world_size: as in every key of this engine.
    kv_rank: kept as ``worker_id``. A lookup asks for the chunks of all ranks.
    vllm_block_size: tokens of one block of vLLM.
    engine_id: see above.

    Raises AgentUnreachable if no agent answers within ``timeout_s``, ConfigError for an endpoint
    that cannot be one, TypeError and ValueError.
    """

    model_name: str
    world_size: int
    worker_id: int

    def __init__(
        self,
        server_url: str,
        context: zmq.Context[Any],
        model_name: str,
        world_size: int,
        kv_rank: int,
        vllm_block_size: int,
        *,
        engine_id: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        _check(context, model_name, world_size, kv_rank, vllm_block_size)
        self.model_name = model_name
        self.world_size = world_size
        self.worker_id = kv_rank
        self._engine_id, self._unnamed = _named(engine_id, model_name, world_size, is_worker=False)
        self._asked_for_workers = False
        super().__init__(
            ClientConfig(endpoint=server_url).endpoint,
            model_name,
            world_size,
            vllm_block_size,
            engine_id=self._engine_id,
            unnamed=self._unnamed,
        )
        _await_agent(self.link, timeout_s)

    @property
    def chunk_size(self) -> int:
        """Tokens of one chunk."""
        return self.chunk_size_tokens()

    @property
    def blocks_in_chunk(self) -> int:
        """Blocks of one chunk."""
        return self.num_blocks_per_chunk()

    def check_lookup_result(self, request_id: str, *, wait_s: float = 0.0) -> int | None:
        """The number of cached leading tokens; None if it is not known yet.

        Raises ValueError for a request without a lookup.
        """
        if request_id not in self._lookups:
            raise ValueError(
                f"request {request_id!r} has no lookup: call maybe_submit_lookup_request first"
            )
        tokens = super().check_lookup_result(request_id, wait_s=wait_s)
        if tokens == 0 and not self._asked_for_workers:
            self._asked_for_workers = True
            self.link.submit(m.Status, self._check_workers)
        return tokens

    def _check_workers(self, call: Call) -> None:
        """Warns if no lookup can hit, because the workers are those of another engine."""
        if not isinstance(call.answer, m.StatusReport):
            return
        engines = msgspec.json.decode(call.answer.report)["engines"]
        ranks = {each["worker_id"] for each in engines if self._is_ours(each)}
        if len(ranks) < self.world_size:
            logger.warning(
                "lookups miss while only %d of %d workers of engine %s are registered; if the "
                "others run, give them and the scheduler the same engine_id or $%s",
                len(ranks), self.world_size, self._engine_id, ENGINE_ID_VARIABLE,
            )  # fmt: skip

    def _is_ours(self, worker: Mapping[str, Any]) -> bool:
        """Whether a worker, as STATUS tells it, is one of this engine."""
        world = (worker["model"], worker["world_size"]) == (self.model_name, self.world_size)
        unnamed = self._unnamed and worker["unnamed"]
        return worker["engine_id"] == self._engine_id or (unnamed and world)


@_nvtx_ranges(
    "submit_store_request",
    "submit_retrieve_request",
    "batched_submit_store_requests",
    "batched_submit_retrieve_requests",
    "get_finished",
)
class LMCacheMPWorkerAdapter(adapter.LMCacheMPWorkerAdapter):
    """Stores and retrieves the blocks of one worker, by request id.

    Arguments and errors as for `LMCacheMPSchedulerAdapter`; ``kv_rank`` is the worker's rank among
    ``world_size``, and no other worker of the engine has the same.
    """

    model_name: str
    world_size: int
    worker_id: int
    kv_caches: Mapping[str, torch.Tensor]

    def __init__(
        self,
        server_url: str,
        context: zmq.Context[Any],
        model_name: str,
        world_size: int,
        kv_rank: int,
        vllm_block_size: int,
        *,
        engine_id: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        _check(context, model_name, world_size, kv_rank, vllm_block_size)
        self.model_name = model_name
        self.world_size = world_size
        self.worker_id = kv_rank
        self.kv_caches = {}
        self._timeout_s = timeout_s
        engine_id, unnamed = _named(engine_id, model_name, world_size, is_worker=True)
        super().__init__(
            ClientConfig(endpoint=server_url).endpoint,
            model_name,
            world_size,
            kv_rank,
            vllm_block_size,
            engine_id=engine_id,
            unnamed=unnamed,
        )
        _await_agent(self.link, timeout_s)

    @property
    def blocks_in_chunk(self) -> int:
        """Blocks of one chunk."""
        return self.num_blocks_per_chunk()

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        *,
        num_blocks: int | None = None,
        dtype: str | None = None,
        identity: Mapping[str, str] | None = None,
        block_strides: Mapping[str, int] | None = None,
    ) -> None:
        """Registers the tensors of all layers, by name, and waits until the agent has mapped them.

        num_blocks, dtype: those of the tensors, if they can be told from them.
        identity: what else decides the bytes of the KV (a revision of the weights, a backend), in
            addition to the model name, ranks, shapes and dtypes. Engines with equal identities
            exchange chunks.

        Raises TypeError and ValueError for tensors whose blocks or dtype must be given, DeviceError
        if the memory cannot be exported or the agent does not map it.
        """
        _check_tensors(kv_caches)
        if num_blocks is None:
            num_blocks = _num_blocks(kv_caches, self._block_size_tokens)
        super().register_kv_caches(
            kv_caches,
            num_blocks=num_blocks,
            dtype=dtype or _dtype(kv_caches),
            identity={
                "engine": "multi_process_adapter",
                "world_size": str(self.world_size),
                "kv_rank": str(self.worker_id),
                **(identity or {}),
            },
            block_strides=block_strides,
        )
        self.kv_caches = kv_caches
        self.wait_registered(self._timeout_s)


def _check(
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


def _await_agent(link: AgentLink, timeout_s: float) -> None:
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


def _check_tensors(kv_caches: Mapping[str, torch.Tensor]) -> None:
    if not isinstance(kv_caches, Mapping):
        raise TypeError(f"kv_caches is a dict of tensors, not {type(kv_caches).__name__}")
    if not kv_caches:
        raise ValueError("kv_caches is empty: there is nothing to register")
    for name, cache in kv_caches.items():
        if not hasattr(cache, "untyped_storage"):
            raise TypeError(f"KV cache {name!r} is a {type(cache).__name__}, not a tensor")


def _num_blocks(kv_caches: Mapping[str, torch.Tensor], block_size: int) -> int:
    """The number of blocks, from shapes as vLLM has them: [blocks, ...], or [K and V, blocks, ...].

    Raises ValueError where it is not certain.
    """
    found: dict[int, str] = {}
    for name, cache in kv_caches.items():
        shape = tuple(cache.shape)
        counting = 1 if shape[:1] == (2,) else 0
        # [2, block size, ...] may also be two blocks.
        unsure = shape[0:1] == (1,) or (counting == 1 and shape[1:2] == (block_size,))
        if unsure or len(shape) < counting + 2:
            raise ValueError(
                f"which dimension of KV cache {name!r} counts blocks does not follow from its "
                f"shape {list(shape)}: pass num_blocks"
            )
        found.setdefault(shape[counting], name)
    if len(found) > 1:
        (one, first), (other, second), *_ = found.items()
        raise ValueError(
            f"KV cache {first!r} has {one} blocks and {second!r} has {other}: pass num_blocks, or "
            "use WorkerClient.register_groups for layers that do not share their block ids"
        )
    return next(iter(found))


def _dtype(kv_caches: Mapping[str, torch.Tensor]) -> str:
    names = sorted({dtype_name(cache.dtype) for cache in kv_caches.values()})
    if len(names) > 1:
        raise ValueError(f"KV caches of {' and '.join(names)}: pass the model's dtype")
    return names[0]
