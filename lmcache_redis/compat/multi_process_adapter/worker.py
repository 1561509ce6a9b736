"""The adapter of an engine's workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import zmq

from lmcache_redis.client.registering import CacheGroup
from lmcache_redis.client.worker import TransferOp, WorkerClient
from lmcache_redis.compat.multi_process_adapter.engine import TIMEOUT_S, AdapterOfEngine
from lmcache_redis.compat.multi_process_adapter.operations import LoadStoreOp, check_names
from lmcache_redis.compat.multi_process_adapter.requests import RequestTransfers
from lmcache_redis.compat.multi_process_adapter.tensors import (
    check_tensors,
    common_dtype,
    count_blocks,
)
from lmcache_redis.config import ClientConfig

if TYPE_CHECKING:
    import torch


class LMCacheMPWorkerAdapter(WorkerClient, AdapterOfEngine):
    """Stores and retrieves the blocks of one worker, by request id.

    Arguments and errors as for `LMCacheMPSchedulerAdapter`; ``kv_rank`` is the worker's rank among
    ``world_size``, and no other worker of the engine has the same.
    """

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
        named = self._join(
            context, model_name, world_size, kv_rank, vllm_block_size, engine_id, is_worker=True
        )
        self.kv_caches = {}
        self._timeout_s = timeout_s
        self._requests = RequestTransfers()
        super().__init__(
            ClientConfig(endpoint=server_url).endpoint,
            model_name,
            world_size,
            kv_rank,
            vllm_block_size,
            **named,
        )
        self._await_agent(timeout_s)

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
        check_tensors(kv_caches)
        if num_blocks is None:
            num_blocks = count_blocks(kv_caches, self._block_size_tokens)
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
        self.wait_registered(self._timeout_s)

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
        TypeError, also for what is no operation or no event, and ValueError, also for lists of
        different lengths, and starts nothing.
        """
        after, whole = self._prepared(request_ids, ops, event, cache_salts)
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
        """As `batched_submit_store_requests`, for retrieves of chunks that lookups have pinned."""
        after, whole = self._prepared(request_ids, ops, event, cache_salts)
        retrieves = self.begin_retrieves(request_ids, whole, after)
        for request_id, op, retrieve in zip(request_ids, ops, retrieves, strict=True):
            skip_blocks = op.skip_first_n_tokens // self._block_size_tokens
            asked = frozenset(op.block_ids[skip_blocks:])
            self._requests.add_retrieve(
                request_id, retrieve, asked.difference(retrieve.op.block_ids)
            )

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
        for op, salt in zip(ops, salts, strict=True):
            if not isinstance(op, LoadStoreOp):
                raise TypeError(f"an operation is a LoadStoreOp, not {type(op).__name__}")
            check_names(op.token_ids, op.block_hashes, salt)
        if event is not None and not (hasattr(event, "wait") and hasattr(event, "synchronize")):
            raise TypeError(f"an event is a torch.cuda.Event, not {type(event).__name__}")
        if self.on_cuda and event is None:
            raise ValueError(
                "the KV cache is on a GPU: pass a torch.cuda.Event that is recorded after the work "
                "that uses the blocks"
            )
        size = self.num_blocks_per_chunk()
        pairs = zip(ops, salts, strict=True)
        whole = [op.whole_chunks(size, self._block_size_tokens, salt) for op, salt in pairs]
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
        Failed stores and retrieves are reported too, and logged; for retrieves see
        ``get_block_ids_with_load_errors``.
        """
        return self._requests.finished(finished_req_ids_from_engine)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Ids of blocks whose retrieve has failed since the last call."""
        return self._requests.take_failed_blocks()
