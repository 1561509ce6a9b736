"""The worker's client with the interface of LMCache's multiprocess adapter: by request id.

vLLM's connector uses `WorkerClient` itself. This class serves engines that were written for
LMCache's adapters (docs/compatibility.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from lmcache_redis.client.calls import InterprocessEvent, Retrieve, Store
from lmcache_redis.client.operations import LoadStoreOp
from lmcache_redis.client.worker import WorkerClient

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
        """Starts a store, see ``WorkerClient.begin_store``."""
        store = self.begin_store(request_id, op, event, cache_salt=cache_salt)
        self._requests.stores.setdefault(request_id, []).append(store)
        self._requests.reported.discard(request_id)

    def submit_retrieve_request(
        self,
        request_id: str,
        op: LoadStoreOp,
        event: InterprocessEvent | None = None,
        *,
        cache_salt: str | bytes = "",
    ) -> None:
        """Starts a retrieve, see ``WorkerClient.begin_retrieve``."""
        retrieve = self.begin_retrieve(request_id, op, event, cache_salt=cache_salt)
        self._requests.retrieves.setdefault(request_id, []).append(retrieve)

    def batched_submit_store_requests(
        self,
        request_ids: Sequence[str],
        ops: Sequence[LoadStoreOp],
        event: InterprocessEvent | None = None,
        *,
        cache_salts: Sequence[str | bytes] | None = None,
    ) -> None:
        """``submit_store_request`` for each request, with its op and salt, after one ``event``."""
        _submit_each(self.submit_store_request, request_ids, ops, event, cache_salts)

    def batched_submit_retrieve_requests(
        self,
        request_ids: Sequence[str],
        ops: Sequence[LoadStoreOp],
        event: InterprocessEvent | None = None,
        *,
        cache_salts: Sequence[str | bytes] | None = None,
    ) -> None:
        """As `batched_submit_store_requests`, for retrieves."""
        _submit_each(self.submit_retrieve_request, request_ids, ops, event, cache_salts)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Ids of requests whose stores, and whose retrieves, have ended since the last call.

        ``finished_req_ids`` are requests that the engine has finished and whose blocks it holds
        for their stores. Only the stores of such requests are reported, and only once, although an
        engine with asynchronous scheduling may repeat an id in later calls. After a call without
        the id, it belongs to a new request. Failed retrieves are reported too, see
        ``get_block_ids_with_load_errors``.
        """
        requests = self._requests
        requests.reported &= finished_req_ids
        requests.held |= finished_req_ids - requests.reported
        _pop_ended(requests.stores)
        stored = {r for r in requests.held if r not in requests.stores}
        requests.held -= stored
        requests.reported |= stored
        loaded = _pop_ended(requests.retrieves)
        for retrieves in loaded.values():
            requests.failed_blocks.update(*(retrieve.failed_blocks for retrieve in retrieves))
        return stored, set(loaded)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Ids of blocks whose retrieve has failed since the last call."""
        failed, self._requests.failed_blocks = self._requests.failed_blocks, set()
        return failed


def _submit_each(
    submit: Callable[..., None],
    request_ids: Sequence[str],
    ops: Sequence[LoadStoreOp],
    event: InterprocessEvent | None,
    cache_salts: Sequence[str | bytes] | None,
) -> None:
    salts = [""] * len(ops) if cache_salts is None else cache_salts
    for request_id, op, salt in zip(request_ids, ops, salts, strict=True):
        submit(request_id, op, event, cache_salt=salt)


def _pop_ended(transfers: dict[str, list[_T]]) -> dict[str, list[_T]]:
    """Removes and returns the requests whose transfers have all ended."""
    ended = {r: each for r, each in transfers.items() if all(t.over for t in each)}
    for request_id in ended:
        del transfers[request_id]
    return ended
