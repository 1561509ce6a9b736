"""A worker's side: hands its paged KV cache over once, then only block ids.

Who may touch which blocks, and until when, is decided in ``ownership``.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from lmcache_redis import messages as m
from lmcache_redis.client.link import AgentLink, Call
from lmcache_redis.client.liveness import AgentProcess, ProcessState
from lmcache_redis.client.operations import LoadStoreOp, chunk_names
from lmcache_redis.client.ownership import (
    RETRIEVE_LEASE_S,
    STEP_S,
    STORE_LEASE_S,
    Blocks,
    retrieve_blocks,
    store_blocks,
)
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.device.opening import export_kv_caches
from lmcache_redis.errors import ConfigError
from lmcache_redis.keys import ObjectKey

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_REMEMBERED_REPORTS = 10_000
_POLL_S = 0.01


class InterprocessEvent(Protocol):
    """A ``torch.cuda.Event(interprocess=True)`` that has been recorded."""

    def ipc_handle(self) -> bytes:
        """The handle another process opens it by."""


@dataclass(slots=True)
class _Transfer:
    call: Call
    op: LoadStoreOp
    lease_ns: int
    blocks_per_chunk: int
    agent: AgentProcess | None
    event: InterprocessEvent | None = None  # kept alive until the agent has waited for it


class LMCacheMPWorkerAdapter:
    """Stores and retrieves the blocks of one worker through the agent of its node.

    endpoint, model_name, world_size, engine_id: as for the scheduler's adapter.
    worker_id: this worker's rank in the world.
    block_size_tokens: tokens of one paged block.
    """

    def __init__(
        self,
        endpoint: str,
        model_name: str,
        world_size: int,
        worker_id: int,
        block_size_tokens: int,
        *,
        engine_id: str,
        agent_dead_after_s: float = 1.5,
    ) -> None:
        self._model_name = model_name
        self._world_size = world_size
        self._worker_id = worker_id
        self._block_size_tokens = block_size_tokens
        self._registration: tuple[KVLayout, tuple[m.StorageHandle, ...]] | None = None
        self._held_caches: Mapping[str, torch.Tensor] = {}
        self._registered: m.Welcome | None = None  # that of the agent which has mapped the memory
        self._agent: AgentProcess | None = None
        self._stores: dict[str, list[_Transfer]] = {}
        self._retrieves: dict[str, list[_Transfer]] = {}
        self._completed_stores: dict[str, int] = {}
        self._held: set[str] = set()
        self._reported: OrderedDict[str, None] = OrderedDict()
        self._failed_blocks: set[int] = set()
        self.stored_chunks = 0
        self.dropped_chunks = 0
        self.loaded_chunks = 0
        self.failed_chunks = 0
        self.link = AgentLink(
            endpoint,
            engine_id=engine_id,
            model_name=model_name,
            world_size=world_size,
            worker_id=worker_id,
            dead_after_s=agent_dead_after_s,
            on_welcome=self._register,
        )

    # Registration

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        *,
        num_blocks: int,
        dtype: str,
        identity: Mapping[str, str],
        block_strides: Mapping[str, int] | None = None,
    ) -> None:
        """Exports the paged KV cache and registers it, now and with every later agent.

        kv_caches: one tensor a layer, of which one dimension is ``num_blocks`` long. CPU tensors
            move into shared memory, in place.
        identity: whatever else decides the bytes of a chunk (model revision, backend, ...).
        block_strides: bytes between blocks, by tensor, where the engine knows them.
        Raises ``DeviceError`` where the memory cannot be exported.
        """
        exported = export_kv_caches(kv_caches, num_blocks, block_strides)
        layout = KVLayout(
            identity=tuple(sorted(identity.items())),
            dtype=dtype,
            device=exported.device,
            block_size_tokens=self._block_size_tokens,
            num_blocks=num_blocks,
            segments=exported.segments,
            page_format=exported.page_format,
        )
        self._registration = (layout, exported.storages)
        self._held_caches = kv_caches  # the memory lives as long as somebody holds the tensors
        if self.link.welcome is not None:
            self._register(self.link.welcome)

    @property
    def ready(self) -> bool:
        """Whether an agent has mapped this worker's memory and is still there."""
        # In this order: the next agent's welcome is there before the link is online again.
        return self.link.online and self._registered is self.link.welcome

    def num_blocks_per_chunk(self) -> int:
        """Paged blocks of one chunk; 0 while no agent has been met."""
        welcome = self.link.welcome
        return 0 if welcome is None else welcome.chunk_size_tokens // self._block_size_tokens

    def _register(self, welcome: m.Welcome) -> None:
        self._registered = None
        self._agent = AgentProcess(welcome)
        if self._registration is None:
            return
        layout, storages = self._registration
        try:
            fingerprint = layout.fingerprint(welcome.chunk_size_tokens)
            layout.blocks_per_chunk(welcome.chunk_size_tokens)
        except ConfigError as error:
            logger.error("the agent cannot be used: %s", error)
            return
        self.link.submit(
            m.RegisterKVCache,
            partial(self._on_registered, welcome),
            kv_rank=ObjectKey.ComputeKVRank(
                self._world_size, self._worker_id, self._world_size, self._worker_id
            ),
            layout=layout,
            fingerprint=fingerprint,
            storages=storages,
        )

    def _on_registered(self, welcome: m.Welcome, call: Call) -> None:
        if isinstance(call.answer, m.Done):
            self._registered = welcome
            logger.info("the agent has mapped the KV cache of worker %d", self._worker_id)
        elif isinstance(call.answer, m.Failure):
            logger.error("the agent refused the KV cache: %s", call.answer.reason)

    # Submitting

    def submit_store_request(
        self,
        request_id: str,
        op: LoadStoreOp,
        event: InterprocessEvent | None = None,
        *,
        cache_salt: str | bytes = "",
    ) -> None:
        """Starts a store of ``op``'s chunks; ``event`` tells when its blocks may be read (CUDA).

        ``cache_salt`` is whatever their KV depends on beside ``op``'s token ids (salt, LoRA,
        images); block hashes cover it. Raises ``ValueError``, ``TypeError`` where it is none.
        """
        lease_ns = _lease(STORE_LEASE_S if event is None else STEP_S + STORE_LEASE_S)
        call = self.link.submit(
            m.Store,
            request_id=request_id,
            chunks=self._names(request_id, op, cache_salt),
            block_ids=tuple(op.block_ids),
            lease_ns=lease_ns,
            event=None if event is None else event.ipc_handle(),
        )
        self._stores.setdefault(request_id, []).append(self._transfer(call, op, lease_ns, event))

    def submit_retrieve_request(
        self,
        request_id: str,
        op: LoadStoreOp,
        event: InterprocessEvent | None = None,
        *,
        cache_salt: str | bytes = "",
    ) -> None:
        """Starts a retrieve of ``op``'s chunks, which a lookup has pinned, into its blocks.

        ``event`` tells when the blocks may be written (CUDA). ``cache_salt``: as for the store.
        """
        lease_ns = _lease(RETRIEVE_LEASE_S)
        call = self.link.submit(
            m.Retrieve,
            request_id=request_id,
            chunks=self._names(request_id, op, cache_salt),
            block_ids=tuple(op.block_ids),
            skip_first_n_tokens=op.skip_first_n_tokens,
            lease_ns=lease_ns,
            event=None if event is None else event.ipc_handle(),
        )
        transfer = self._transfer(call, op, lease_ns, event)
        self._retrieves.setdefault(request_id, []).append(transfer)

    def batched_submit_store_requests(
        self,
        request_ids: Sequence[str],
        ops: Sequence[LoadStoreOp],
        event: InterprocessEvent | None = None,
        *,
        cache_salts: Sequence[str | bytes] | None = None,
    ) -> None:
        """``submit_store_request`` for each pair (and its salt), all after one ``event``."""
        salts = [""] * len(ops) if cache_salts is None else cache_salts
        for request_id, op, salt in zip(request_ids, ops, salts, strict=True):
            self.submit_store_request(request_id, op, event, cache_salt=salt)

    def batched_submit_retrieve_requests(
        self,
        request_ids: Sequence[str],
        ops: Sequence[LoadStoreOp],
        event: InterprocessEvent | None = None,
        *,
        cache_salts: Sequence[str | bytes] | None = None,
    ) -> None:
        """``submit_retrieve_request`` for each pair (and its salt), all after one ``event``."""
        salts = [""] * len(ops) if cache_salts is None else cache_salts
        for request_id, op, salt in zip(request_ids, ops, salts, strict=True):
            self.submit_retrieve_request(request_id, op, event, cache_salt=salt)

    # Finishing

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Request ids whose stores, and whose retrieves, are over since the last call.

        ``finished_req_ids`` are requests that the engine has finished and whose blocks it
        holds for their stores. A store is reported only after that, each id once, even when
        the engine repeats it. Failed retrieves are reported too, see
        ``get_block_ids_with_load_errors``.
        """
        self._held |= {r for r in finished_req_ids if r not in self._reported}
        self._poll_stores()
        stored = {r for r in self._held if r not in self._stores}
        self._held -= stored
        for request_id in stored:
            self._reported[request_id] = None
        while len(self._reported) > _REMEMBERED_REPORTS:
            self._reported.popitem(last=False)
        return stored, self._poll_retrieves()

    def wait_for_retrieves(self, timeout_s: float) -> None:
        """Waits until a pending retrieve is answered, or for ``timeout_s``."""
        calls = [t.call for ts in self._retrieves.values() for t in ts]
        if calls and not any(call.done for call in calls):
            self.link.wait_for(lambda: any(call.done for call in calls), timeout_s)

    def wait_for_stores(self, request_ids: Sequence[str]) -> None:
        """Waits until the blocks of these requests are no longer read (at most one lease)."""
        for transfer in [t for r in request_ids for t in self._stores.get(r, ())]:
            while self._store_blocks(transfer) is Blocks.HELD:
                if transfer.call.wait(_POLL_S):
                    time.sleep(_POLL_S)  # lost, but its agent may live: the lease decides

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Ids of blocks whose retrieve failed, since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_completed_stores(self) -> dict[str, int]:
        """How many stores of each request were completed since the last call."""
        self._poll_stores()
        completed, self._completed_stores = self._completed_stores, {}
        return completed

    def shutdown(self) -> None:
        """Tells the agent that the memory goes away, and closes the connection."""
        if self.ready:
            self.link.submit(m.UnregisterKVCache).wait(1.0)
        self.link.close()

    def _poll_stores(self) -> None:
        for request_id, transfers in list(self._stores.items()):
            left = [t for t in transfers if not self._store_over(t)]
            over = len(transfers) - len(left)
            if over:
                known = self._completed_stores.get(request_id, 0)
                self._completed_stores[request_id] = known + over
            if left:
                self._stores[request_id] = left
            else:
                del self._stores[request_id]

    def _store_over(self, transfer: _Transfer) -> bool:
        blocks = self._store_blocks(transfer)
        if blocks is Blocks.HELD:
            return False
        answer = transfer.call.answer
        if isinstance(answer, m.StoreResult):
            self.stored_chunks += answer.stored
            self.dropped_chunks += answer.dropped
        else:
            self.dropped_chunks += len(transfer.op) // transfer.blocks_per_chunk
        return True

    def _store_blocks(self, transfer: _Transfer) -> Blocks:
        return store_blocks(
            transfer.call.state,
            sent=transfer.call.sent,
            now_ns=time.monotonic_ns(),
            lease_ns=transfer.lease_ns,
            agent=lambda: _state_of(transfer),
        )

    def _poll_retrieves(self) -> set[str]:
        loaded = set()
        for request_id, transfers in list(self._retrieves.items()):
            left = [t for t in transfers if not self._retrieve_over(t)]
            if left:
                self._retrieves[request_id] = left
            else:
                del self._retrieves[request_id]
                loaded.add(request_id)
        return loaded

    def _retrieve_over(self, transfer: _Transfer) -> bool:
        blocks = retrieve_blocks(
            transfer.call.state,
            sent=transfer.call.sent,
            now_ns=time.monotonic_ns(),
            lease_ns=transfer.lease_ns,
            agent=lambda: _state_of(transfer),
        )
        if blocks is Blocks.HELD:
            return False
        answer = transfer.call.answer
        per_chunk = transfer.blocks_per_chunk
        chunks = len(transfer.op) // per_chunk
        failed: Sequence[int] = range(chunks)
        if isinstance(answer, m.RetrieveResult):
            failed = [chunk for chunk in answer.failed_chunks if chunk < chunks]
        self.loaded_chunks += chunks - len(failed)
        self.failed_chunks += len(failed)
        for chunk in failed:
            first = chunk * per_chunk
            self._failed_blocks.update(transfer.op.block_ids[first : first + per_chunk])
        return True

    def _transfer(
        self, call: Call, op: LoadStoreOp, lease_ns: int, event: InterprocessEvent | None = None
    ) -> _Transfer:
        # Where no agent was ever met, the whole operation counts as one chunk.
        blocks_per_chunk = self.num_blocks_per_chunk() or max(1, len(op))
        return _Transfer(call, op, lease_ns, blocks_per_chunk, self._agent, event)

    def _names(self, request_id: str, op: LoadStoreOp, cache_salt: str | bytes) -> m.ChunkNames:
        return chunk_names(
            self._model_name,
            self._world_size,
            request_id,
            blocks_per_chunk=self.num_blocks_per_chunk(),
            block_hashes=op.block_hashes,
            token_ids=op.token_ids,
            start=op.start,
            end=op.end,
            worker_id=self._worker_id,
            cache_salt=cache_salt,
        )


def _state_of(transfer: _Transfer) -> ProcessState:
    return ProcessState.UNKNOWN if transfer.agent is None else transfer.agent.state()


def _lease(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)
