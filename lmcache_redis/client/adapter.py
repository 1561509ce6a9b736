"""The worker's client with the interface of LMCache's multiprocess adapter: by request id.

vLLM's connector uses `WorkerClient` itself. This class serves engines that were written for
LMCache's adapters (docs/compatibility.md).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from lmcache_redis import messages as m
from lmcache_redis.client.transfers import InterprocessEvent, LoadStoreOp, Retrieve, Store
from lmcache_redis.client.worker import WorkerClient

logger = logging.getLogger(__name__)

_T = TypeVar("_T", Store, Retrieve)


@dataclass(slots=True)
class _Requests:
    """Transfers in flight by request id, and results that are not reported yet."""

    stores: dict[str, list[Store]] = field(default_factory=dict)
    retrieves: dict[str, list[Retrieve]] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)  # finished; the engine holds blocks for stores
    reported: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)


class LMCacheMPWorkerAdapter(WorkerClient):
    """Stores and retrieves by request id. Arguments as for `WorkerClient`."""

    @cached_property
    def _requests(self) -> _Requests:
        return _Requests()

    def submit_store_request(
        self,
        request_id: str,
        op: LoadStoreOp,
        event: InterprocessEvent | None = None,
        *,
        cache_salt: str | bytes = "",
    ) -> None:
        """Starts a store, see ``WorkerClient.begin_stores``."""
        self.batched_submit_store_requests([request_id], [op], event, cache_salts=[cache_salt])

    def submit_retrieve_request(
        self,
        request_id: str,
        op: LoadStoreOp,
        event: InterprocessEvent | None = None,
        *,
        cache_salt: str | bytes = "",
    ) -> None:
        """Starts a retrieve, see ``WorkerClient.begin_retrieves``."""
        self.batched_submit_retrieve_requests([request_id], [op], event, cache_salts=[cache_salt])

    def batched_submit_store_requests(
        self,
        request_ids: Sequence[str],
        ops: Sequence[LoadStoreOp],
        event: InterprocessEvent | None = None,
        *,
        cache_salts: Sequence[str | bytes] | None = None,
    ) -> None:
        """``submit_store_request`` for each request, with its op and salt, after one ``event``.

        All in one message. The engine has recorded the event, after the work that uses the blocks;
        it may be None in CPU memory. Raises TypeError, also for what is no operation or no event,
        and ValueError, also for lists of different lengths, and starts nothing.
        """
        event = self._awaited_by_agent(ops, event)
        stores = self.begin_stores(request_ids, ops, event, cache_salts=cache_salts)
        for request_id, store in zip(request_ids, stores, strict=True):
            self._requests.stores.setdefault(request_id, []).append(store)
            self._requests.reported.discard(request_id)

    def batched_submit_retrieve_requests(
        self,
        request_ids: Sequence[str],
        ops: Sequence[LoadStoreOp],
        event: InterprocessEvent | None = None,
        *,
        cache_salts: Sequence[str | bytes] | None = None,
    ) -> None:
        """As `batched_submit_store_requests`, for retrieves."""
        event = self._awaited_by_agent(ops, event)
        retrieves = self.begin_retrieves(request_ids, ops, event, cache_salts=cache_salts)
        for request_id, retrieve in zip(request_ids, retrieves, strict=True):
            self._requests.retrieves.setdefault(request_id, []).append(retrieve)

    def _awaited_by_agent(
        self, ops: Sequence[LoadStoreOp], event: InterprocessEvent | None
    ) -> InterprocessEvent | None:
        """The event that the agent waits for; none for CPU memory, where this waits for it."""
        for op in ops:
            if not isinstance(op, LoadStoreOp):
                raise TypeError(f"an operation is a LoadStoreOp, not {type(op).__name__}")
        if event is not None and not hasattr(event, "ipc_handle"):
            raise TypeError(f"an event is a torch.cuda.Event, not {type(event).__name__}")
        if self.on_cuda:
            if event is None:
                raise ValueError(
                    "the KV cache is on a GPU: pass a torch.cuda.Event(interprocess=True) that is "
                    "recorded after the work that uses the blocks"
                )
            return event
        if event is not None:
            event.synchronize()
        return None

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
        requests, finished = self._requests, set(finished_req_ids_from_engine)
        requests.reported &= finished
        requests.held |= finished - requests.reported
        for request_id, stores in _pop_ended(requests.stores).items():
            for store in stores:
                if isinstance(store.call.answer, m.Failure):
                    logger.error(
                        "request %s was not stored: %s", request_id, store.call.answer.reason
                    )
        stored = {r for r in requests.held if r not in requests.stores}
        requests.held -= stored
        requests.reported |= stored
        loaded = _pop_ended(requests.retrieves)
        for request_id, retrieves in loaded.items():
            failed = set().union(*(retrieve.failed_blocks for retrieve in retrieves))
            if failed:
                logger.error(
                    "request %s: %d blocks were not loaded and hold no valid KV",
                    request_id, len(failed),
                )  # fmt: skip
            requests.failed_blocks |= failed
        return stored, set(loaded)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Ids of blocks whose retrieve has failed since the last call."""
        failed, self._requests.failed_blocks = self._requests.failed_blocks, set()
        return failed


def _pop_ended(transfers: dict[str, list[_T]]) -> dict[str, list[_T]]:
    """Removes and returns the requests whose transfers have all ended."""
    ended = {r: each for r, each in transfers.items() if all(t.over for t in each)}
    for request_id in ended:
        del transfers[request_id]
    return ended
