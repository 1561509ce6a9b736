"""A worker's side in the form of the original interface: transfers by request id.

vLLM's connector uses `WorkerClient` itself; this is for engines that were written for LMCache's
multiprocess adapters (docs/compatibility.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from lmcache_redis.client.operations import LoadStoreOp
from lmcache_redis.client.transfers import InterprocessEvent, Retrieve, Store
from lmcache_redis.client.worker import WorkerClient

_T = TypeVar("_T", Store, Retrieve)


class LMCacheMPWorkerAdapter(WorkerClient):
    """Stores and retrieves by request id. Arguments as for `WorkerClient`."""

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
        self._stores: dict[str, list[Store]] = {}
        self._retrieves: dict[str, list[Retrieve]] = {}
        self._held: set[str] = set()
        self._reported: set[str] = set()
        self._failed_blocks: set[int] = set()
        super().__init__(
            endpoint,
            model_name,
            world_size,
            worker_id,
            block_size_tokens,
            engine_id=engine_id,
            agent_dead_after_s=agent_dead_after_s,
        )

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
        self._stores.setdefault(request_id, []).append(store)
        self._reported.discard(request_id)

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
        self._retrieves.setdefault(request_id, []).append(retrieve)

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

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Request ids whose stores, and whose retrieves, are over since the last call.

        ``finished_req_ids`` are requests that the engine has finished and whose blocks it
        holds for their stores. A store is reported only after that, and once, although an engine
        that schedules asynchronously may repeat the id in the calls that follow; after a call
        without it, the id is another request's. Failed retrieves are reported too, see
        ``get_block_ids_with_load_errors``.
        """
        self._reported &= finished_req_ids
        self._held |= finished_req_ids - self._reported
        _take_ended(self._stores)
        stored = {r for r in self._held if r not in self._stores}
        self._held -= stored
        self._reported |= stored
        loaded = _take_ended(self._retrieves)
        for retrieves in loaded.values():
            for retrieve in retrieves:
                self._failed_blocks |= retrieve.failed_blocks
        return stored, set(loaded)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Ids of blocks whose retrieve failed, since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed


def _take_ended(transfers: dict[str, list[_T]]) -> dict[str, list[_T]]:
    """Takes out the requests whose transfers are all over."""
    ended = {r: each for r, each in transfers.items() if all(t.over for t in each)}
    for request_id in ended:
        del transfers[request_id]
    return ended
