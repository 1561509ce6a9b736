# SPDX-License-Identifier: Apache-2.0
"""The adapters of vLLM's ``lmcache_integration.multi_process_adapter``, with their arguments.

An engine has one scheduler adapter and a worker adapter for each rank, all with one agent. As in
the originals, the constructors return when the agent has told its chunk size, and
``register_kv_caches`` when the agent has mapped the memory; both wait at most ``timeout_s``.

docs/reference/lmcache-names.md lists what differs from the originals. ``context`` is not used: an
adapter has its own, because its thread closes its sockets. Several engines of one model may differ
in what their chunks hold, so an engine has a name here: ``engine_id``, or
``$LMCACHE_REDIS_ENGINE_ID`` in all its processes. Without one the adapters find each other as
`default_engine_id` says or, as in the originals, by model name and world size; then lookups miss
while workers of different layouts are registered under these.

A restarted agent is found again. Without an agent, or with one of another chunk size than at first,
lookups miss and stores are dropped.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import parent_process
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lmcache_redis import messages as m
from lmcache_redis.chunks.keys import MAX_WORLD_SIZE
from lmcache_redis.chunks.names import engine_chunk_tokens
from lmcache_redis.client.control import AgentUnreachable
from lmcache_redis.client.link import AgentCall, AgentLink
from lmcache_redis.client.registering import CacheGroup
from lmcache_redis.client.scheduler import SchedulerClient
from lmcache_redis.client.worker import RetrieveTransfer, TransferOp, WorkerClient
from lmcache_redis.compat.kv_caches import common_dtype, count_blocks
from lmcache_redis.compat.load_store import (
    BlockLoad,
    LoadStoreOp,
    RequestTransfers,
    check_names,
    chunk_hashes,
    token_hashes,
)
from lmcache_redis.config import ClientConfig
from lmcache_redis.errors import DeviceError, check_int
from lmcache_redis.processes import process_start_time

if TYPE_CHECKING:
    import torch
    import zmq

__all__ = ["LMCacheMPSchedulerAdapter", "LMCacheMPWorkerAdapter", "LoadStoreOp"]

logger = logging.getLogger("vllm.lmcache_redis")

ENGINE_ID_VARIABLE = "LMCACHE_REDIS_ENGINE_ID"
TIMEOUT_S = 30.0
_HOLD_S = 1.0


class AdapterOfEngine:
    """What both adapters have beside a client of the agent.

    server_url: the agent's endpoint, ``ipc://PATH``.
    context: a `zmq.Context`; see above.
    model_name, world_size: as in every key of this engine.
    kv_rank: kept as ``worker_id``; no other worker of the engine has the same.
    vllm_block_size: tokens of one block of vLLM.
    engine_id: see above.

    Raises AgentUnreachable if no agent answers within ``timeout_s``, ConfigError for an endpoint
    that cannot be one, TypeError and ValueError, also for arguments in another order.
    """

    model_name: str
    world_size: int
    worker_id: int
    blocks_in_chunk: int = 0  # of the first agent
    link: AgentLink

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
        check_int("world_size", world_size, 1, MAX_WORLD_SIZE)
        check_int("kv_rank", kv_rank, 0, world_size - 1)
        check_int("vllm_block_size", vllm_block_size, 1, (1 << 31) - 1)
        self.model_name, self.world_size, self.worker_id = model_name, world_size, kv_rank
        self._vllm_block_size, self._timeout_s = vllm_block_size, timeout_s
        is_worker = isinstance(self, WorkerClient)
        given_id = engine_id or os.environ.get(ENGINE_ID_VARIABLE)
        of_client: dict[str, Any] = {
            "endpoint": ClientConfig(endpoint=server_url).endpoint,
            "model_name": model_name,
            "world_size": world_size,
            "block_size_tokens": vllm_block_size,
            "engine_id": given_id or default_engine_id(model_name, world_size, is_worker=is_worker),
            "unnamed": not given_id,
        }
        if is_worker:
            of_client["worker_id"] = kv_rank
            self._requests, self._telling = RequestTransfers(), threading.Lock()
        super().__init__(**of_client)
        self._await_agent()

    def num_blocks_per_chunk(self) -> int:
        """Paged blocks of one chunk."""
        return self.blocks_in_chunk

    def _blocks_in_chunk_of(self, welcome: m.Welcome) -> int:
        block = self._vllm_block_size
        return engine_chunk_tokens(welcome.chunk_size_tokens, [block]) // block

    def _welcomed(self, welcome: m.Welcome) -> str | None:
        """An agent with other chunks is not used: callers keep the size, as the originals do."""
        blocks = self._blocks_in_chunk_of(welcome)
        if self.blocks_in_chunk in (0, blocks):
            why: str | None = super()._welcomed(welcome)  # type: ignore[misc]
            return why
        tokens, block = welcome.chunk_size_tokens, self._vllm_block_size
        return (
            f"it has chunks of {tokens} tokens ({blocks} blocks of {block}), and this adapter was "
            f"made with chunks of {self.blocks_in_chunk} blocks: restart the engine, or the agent "
            f"with --chunk-size-tokens {self.blocks_in_chunk * block}"
        )

    def _await_agent(self) -> None:
        """Returns when an agent has accepted the link. Raises AgentUnreachable, and closes it."""
        link = self.link
        try:
            link.wait_for(lambda: link.online or link.refusal is not None, self._timeout_s)
            if not link.online:
                raise AgentUnreachable(
                    link.refusal
                    or f"no agent answers at {link.endpoint} within {self._timeout_s:g} s: start "
                    f"one with `lmcache-redis agent --endpoint {link.endpoint}`"
                )
            assert link.welcome is not None
            self.blocks_in_chunk = self._blocks_in_chunk_of(link.welcome)
        except BaseException:
            link.close()
            raise


class LMCacheMPSchedulerAdapter(AdapterOfEngine, SchedulerClient):
    """Asks the agent which leading tokens of prompts are cached, by the chunks of all ranks."""

    @property
    def chunk_size(self) -> int:
        """Tokens of one chunk."""
        return self.blocks_in_chunk * self._vllm_block_size

    def maybe_submit_lookup_request(
        self,
        request_id: str,
        block_hashes: Sequence[bytes] | None = None,
        token_ids: Sequence[int] | None = None,
        *,
        cache_salt: str | bytes = "",
    ) -> None:
        """Starts a lookup for ``request_id``, unless that request has one.

        Exactly one of ``block_hashes`` (one per block) and ``token_ids`` is given, both from the
        start of the prompt. ``cache_salt`` stands for everything else that the KV of ``token_ids``
        depends on (salt, LoRA, images); stores need the same salt. Raises ``ValueError``,
        ``TypeError`` otherwise.
        """
        check_names(token_ids, block_hashes, cache_salt)
        if request_id in self._lookups:
            return
        hashes: Sequence[bytes] = ()
        if block_hashes is not None:
            hashes = chunk_hashes(self.blocks_in_chunk, block_hashes)
        elif token_ids is not None:
            hashes = token_hashes(self.chunk_size, token_ids, cache_salt)
        self.begin_lookup(request_id, hashes)

    def check_lookup_result(self, request_id: str, *, wait_s: float = 0.0) -> int | None:
        """The number of cached leading tokens; None if it is not known yet.

        Raises ValueError for a request without a lookup.
        """
        if request_id not in self._lookups:
            raise ValueError(
                f"request {request_id!r} has no lookup: call maybe_submit_lookup_request first"
            )
        return self.hit_tokens(request_id, wait_s=wait_s)

    def cleanup_lookup_result(self, request_id: str) -> None:
        """Forgets the result of a lookup; its chunks stay pinned."""
        self.forget_lookup(request_id)


class LMCacheMPWorkerAdapter(AdapterOfEngine, WorkerClient):
    """Stores and retrieves the blocks of one worker, by request id."""

    kv_caches: Mapping[str, torch.Tensor] = MappingProxyType({})
    _requests: RequestTransfers
    _telling: threading.Lock

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

        Raises ValueError for tensors whose blocks or dtype must be given, DeviceError if the memory
        cannot be exported or the agent does not map it.
        """
        num_blocks = num_blocks or count_blocks(kv_caches, self._block_size_tokens)
        self.register_groups(
            [CacheGroup(kv_caches, dtype or common_dtype(kv_caches), self._block_size_tokens)],
            num_blocks=num_blocks,
            identity={
                "engine": "multi_process_adapter",
                "world_size": str(self.world_size),
                "kv_rank": str(self.worker_id),
                **(identity or {}),
            },
            block_strides=block_strides,
        )
        self.kv_caches = kv_caches

        def refusal() -> str | None:
            sent = self._registration_of_now()
            return None if sent is None else sent.refusal

        self.link.wait_for(lambda: self.ready or refusal() is not None, self._timeout_s)
        if not self.ready:
            raise DeviceError(
                refusal()
                or f"the agent at {self.link.endpoint} has not mapped the KV cache of worker "
                f"{self.worker_id} within {self._timeout_s:g} s: see its log"
            )

    def submit_store_request(
        self,
        request_id: str,
        op: LoadStoreOp,
        event: torch.cuda.Event | None = None,
        *,
        cache_salt: str | bytes = "",
    ) -> None:
        """As `batched_submit_store_requests`, for one request."""
        self.batched_submit_store_requests([request_id], [op], event, cache_salts=[cache_salt])

    def submit_retrieve_request(
        self,
        request_id: str,
        op: LoadStoreOp,
        event: torch.cuda.Event | None = None,
        *,
        cache_salt: str | bytes = "",
    ) -> None:
        """As `batched_submit_retrieve_requests`, for one request."""
        self.batched_submit_retrieve_requests([request_id], [op], event, cache_salts=[cache_salt])

    def batched_submit_store_requests(
        self,
        request_ids: Sequence[str],
        ops: Sequence[LoadStoreOp],
        event: torch.cuda.Event | None = None,
        *,
        cache_salts: Sequence[str | bytes] | None = None,
    ) -> None:
        """Starts the store of each op for its request, all in one message.

        The agent reads the blocks after ``event``, which the engine has recorded after the work
        that uses them: what is queued from now on, on torch's current stream, waits for it too. It
        may be None in CPU memory. A salt stands for everything else that the KV
        of an op's token ids depends on (salt, LoRA, images); block hashes cover it. Raises
        TypeError and ValueError, also for lists of different lengths, and starts nothing.
        """
        after, whole = self._prepared(request_ids, ops, event, cache_salts)
        if not self._requests.may_store:
            logger.error(
                "requests %s are not stored: get_block_ids_with_load_errors was not called after a "
                "load had failed", ", ".join(map(str, request_ids)),
            )  # fmt: skip
            whole = [TransferOp((), ()) for _ in ops]
        stores = self.begin_stores(request_ids, whole, after)
        for request_id, store in zip(request_ids, stores, strict=True):
            self._requests.add_store(request_id, store)

    def batched_submit_retrieve_requests(
        self,
        request_ids: Sequence[str],
        ops: Sequence[LoadStoreOp],
        event: torch.cuda.Event | None = None,
        *,
        cache_salts: Sequence[str | bytes] | None = None,
    ) -> None:
        """As `batched_submit_store_requests`, for retrieves of chunks that lookups have pinned.

        If the agent is lost meanwhile, they are retrieved from the next one, by the time at which
        they count as failed.
        """
        after, whole = self._prepared(request_ids, ops, event, cache_salts)
        place = self.place
        retrieves = self.begin_retrieves(request_ids, whole, after)
        for request_id, op, retrieve in zip(request_ids, ops, retrieves, strict=True):
            asked = op.block_ids[op.skip_first_n_tokens // self._block_size_tokens :]
            left_out = set(asked).difference(retrieve.op.block_ids)

            def again(
                lease_ns: int, request_id: str = request_id, op: TransferOp = retrieve.op
            ) -> RetrieveTransfer:
                return self.begin_retrieves([request_id], [op], after, lease_ns=lease_ns)[0]

            load = BlockLoad(retrieve, place, lambda: self.place, again, left_out)
            self._requests.add_load(request_id, load)

    def _prepared(
        self,
        request_ids: Sequence[str],
        ops: Sequence[LoadStoreOp],
        event: torch.cuda.Event | None,
        cache_salts: Sequence[str | bytes] | None,
    ) -> tuple[int | None, list[TransferOp]]:
        """The ticket of a signal after the event, and the whole chunks of each operation.

        There is no ticket for CPU memory, where this waits for the event.
        """
        salts = [""] * len(ops) if cache_salts is None else cache_salts
        if not len(request_ids) == len(ops) == len(salts):
            raise ValueError(
                f"{len(request_ids)} request ids, {len(ops)} operations and {len(salts)} salts: "
                "give one of each for each request"
            )
        whole = []
        for op, salt in zip(ops, salts, strict=True):
            check_names(op.token_ids, op.block_hashes, salt)
            whole.append(op.whole_chunks(self.blocks_in_chunk, self._block_size_tokens, salt))
        # In CPU memory, vLLM passes a placeholder without `wait`.
        if event is not None and not hasattr(event, "wait" if self.on_cuda else "synchronize"):
            raise TypeError(f"an event is a torch.cuda.Event, not {type(event).__name__}")
        if self.on_cuda and event is None:
            raise ValueError(
                "the KV cache is on a GPU: pass a torch.cuda.Event that is recorded after the work "
                "that uses the blocks"
            )
        if event is not None and not self.on_cuda:
            event.synchronize()
        return self.signal(event), whole

    def get_finished(
        self, finished_req_ids_from_engine: Iterable[str]
    ) -> tuple[set[str], set[str]]:
        """Ids of requests whose stores, and whose retrieves, have ended since the last call.

        ``finished_req_ids_from_engine`` are requests that the engine has finished and whose blocks
        it holds for their stores; one without a store is reported at once. Only the stores of such
        requests are reported, and only once, although an engine with asynchronous scheduling may
        repeat an id in later calls. After a call without the id, it belongs to a new request.
        Failed stores and retrieves are reported too, and logged. After each call, ask for the
        blocks that were not loaded with ``get_block_ids_with_load_errors``, as vLLM does, and
        compute their tokens. Until that call nothing is stored, because whatever the engine
        computes may depend on these blocks; and the next `get_finished` raises LoadErrorsNotTaken,
        which ends an engine that does not ask before it has answered.
        """
        reported = self._requests.finished(finished_req_ids_from_engine)
        if not self._requests.may_store:
            # Before the load is reported: other workers, which do not know, compute next.
            self._tell_hold().wait(_HOLD_S)
        return reported

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Ids of blocks whose retrieve has failed since the last call."""
        failed = self._requests.take_failed_blocks()
        if failed:
            self._tell_hold().wait(_HOLD_S)
        return failed

    def _welcomed(self, welcome: m.Welcome) -> str | None:
        why = super()._welcomed(welcome)
        self._tell_hold()  # what was told to no agent, or to another one
        return why

    def _tell_hold(self) -> AgentCall:
        """Tells the agent whether this worker may store. Called after each change, on any thread:
        the last that the agent hears is how it is."""
        with self._telling:
            return self.hold_stores(not self._requests.may_store)


def default_engine_id(model_name: str, world_size: int, *, is_worker: bool) -> str:
    """The id of the engine of this process, if none was given.

    An engine is named by the process of its scheduler and by its model. A worker of several runs
    in a child of that process if `multiprocessing` started it; any other worker in that process
    itself. Where processes are arranged otherwise, scheduler and worker have different ids.
    """
    parent = parent_process() if is_worker and world_size > 1 else None
    pid = os.getpid() if parent is None else parent.pid
    return f"{pid}-{process_start_time(pid or 0)}-{model_name}"
