"""The transfers of requests: callers of LMCache's adapters ask for results by request id."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import TypeVar

from lmcache_redis import messages as m
from lmcache_redis.client.worker import RetrieveTransfer, StoreTransfer

logger = logging.getLogger(__name__)

_T = TypeVar("_T", StoreTransfer, RetrieveTransfer)


class RequestTransfers:
    """Transfers in flight by request id, and results that are not reported yet."""

    def __init__(self) -> None:
        self.stores: dict[str, list[StoreTransfer]] = {}
        self._retrieves: dict[str, list[RetrieveTransfer]] = {}
        self._held: set[str] = set()  # finished; the engine holds blocks for stores
        self._reported: set[str] = set()
        self._left_out: dict[str, set[int]] = {}  # blocks to be loaded that are in no whole chunk
        self._failed_blocks: set[int] = set()

    def add_store(self, request_id: str, store: StoreTransfer) -> None:
        self.stores.setdefault(request_id, []).append(store)
        self._reported.discard(request_id)

    def add_retrieve(
        self, request_id: str, retrieve: RetrieveTransfer, left_out: Collection[int] = ()
    ) -> None:
        """left_out: blocks that the engine asked for and the retrieve does not fill."""
        self._retrieves.setdefault(request_id, []).append(retrieve)
        self._left_out.setdefault(request_id, set()).update(left_out)

    def finished(self, finished_by_engine: Iterable[str]) -> tuple[set[str], set[str]]:
        """See `LMCacheMPWorkerAdapter.get_finished`."""
        finished = set(finished_by_engine)
        self._reported &= finished
        self._held |= finished - self._reported
        for request_id, stores in _pop_ended(self.stores).items():
            for store in stores:
                if isinstance(store.call.answer, m.Failure):
                    logger.error(
                        "request %s was not stored: %s", request_id, store.call.answer.reason
                    )
        stored = {r for r in self._held if r not in self.stores}
        self._held -= stored
        self._reported |= stored
        loaded = _pop_ended(self._retrieves)
        for request_id, retrieves in loaded.items():
            failed = self._left_out.pop(request_id).union(*(r.failed_blocks for r in retrieves))
            if failed:
                logger.error(
                    "request %s: %d blocks were not loaded and hold no valid KV",
                    request_id, len(failed),
                )  # fmt: skip
            self._failed_blocks |= failed
        return stored, set(loaded)

    def take_failed_blocks(self) -> set[int]:
        """Ids of blocks whose retrieve has failed since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed


def _pop_ended(transfers: dict[str, list[_T]]) -> dict[str, list[_T]]:
    """Removes and returns the requests whose transfers have all ended."""
    ended = {r: each for r, each in transfers.items() if all(t.over for t in each)}
    for request_id in ended:
        del transfers[request_id]
    return ended
