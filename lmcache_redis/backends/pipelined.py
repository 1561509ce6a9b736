"""The Redis backend with several chunks of a batch in flight.

`batched_get` reads ahead: the next chunks are read while the consumer uses one tensor, or while it
is copied to its device. `batched_put` writes earlier tensors while the next is copied from its
device. Both have at most `window_chunks` and `window_bytes` in flight, but always at least one
chunk.

Each step of the iterator takes at most `deadline_s`. An iterator that is abandoned (closed, or no
longer referenced) cancels its reads without waiting; their memory is freed when the plane has
answered. Between two steps, a key is locked only while it is read: the consumer may put and remove
chunks, including those it is getting.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from lmcache_redis.backends.remote import (
    DEFAULT_DEADLINE_S,
    DEFAULT_LIST_DEADLINE_S,
    DEFAULT_PENDING_BYTES,
    LMCRemoteBackend,
    Transfer,
)
from lmcache_redis.config import DEFAULT_SLOT_BYTES
from lmcache_redis.errors import ConfigError
from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import MemoryFormat
from lmcache_redis.resp import RedisOptions

if TYPE_CHECKING:
    import torch

    from lmcache_redis.backends.tensors import TensorAllocation

DEFAULT_WINDOW_CHUNKS = 16
# Small enough to be transferred within the deadline even on a slow network.
DEFAULT_WINDOW_BYTES = 128 << 20


class LMCPipelinedRemoteBackend(LMCRemoteBackend):
    """See the module, and `LMCRemoteBackend` for everything else.

    window_chunks, window_bytes: the most that a batched call has in flight.
    """

    def __init__(
        self,
        redis: RedisOptions | str,
        dst_device: str = "cpu",
        fmt: MemoryFormat = MemoryFormat.UNDEFINED,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        list_deadline_s: float = DEFAULT_LIST_DEADLINE_S,
        slot_bytes: int = DEFAULT_SLOT_BYTES,
        pending_bytes: int = DEFAULT_PENDING_BYTES,
        window_chunks: int = DEFAULT_WINDOW_CHUNKS,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        layout: bytes | None = None,
    ) -> None:
        if window_chunks < 1 or window_bytes < 1:
            raise ConfigError("window_chunks and window_bytes are at least 1")
        super().__init__(
            redis,
            dst_device,
            fmt,
            deadline_s=deadline_s,
            list_deadline_s=list_deadline_s,
            slot_bytes=slot_bytes,
            pending_bytes=pending_bytes,
            layout=layout,
        )
        self._window_chunks = window_chunks
        self._window_bytes = window_bytes

    def batched_get(self, keys: Iterable[ObjectKey]) -> Iterator[torch.Tensor | None]:
        """`get` for each, in order; the next are read while earlier ones are used."""
        self._check_open()
        return self._get_ahead(iter(keys))

    def batched_put(
        self, keys_and_chunks: Iterable[tuple[ObjectKey, torch.Tensor]], blocking: bool = True
    ) -> int:
        """`put` for each; return how many were stored or, without blocking, accepted.

        A chunk whose write cannot begin within `deadline_s` is not stored; the whole batch may take
        longer. The last stored put of a key wins.
        """
        if not blocking:
            return super().batched_put(keys_and_chunks, blocking)
        self._check_open()
        stored = 0
        stores: deque[Transfer] = deque()
        try:
            for key, kv_chunk in keys_and_chunks:
                while stores and not self._has_room(stores, kv_chunk.nbytes):
                    stored += self._is_stored(stores.popleft())
                # A slot is a view of the tensor's memory, which lives as long as the store.
                put = self._accept(key, *self._encoded(kv_chunk))
                if put is None:
                    continue
                self._queue.drop(put.key)
                store = Transfer(*put)
                if self._begin_store(store):
                    stores.append(store)
        finally:
            # Also after an error of the caller's iterator: until then the tensors are in use.
            stored += sum([self._is_stored(store) for store in stores])
        return stored

    def _get_ahead(self, keys: Iterator[ObjectKey]) -> Iterator[torch.Tensor | None]:
        ahead: deque[tuple[Transfer | None, TensorAllocation]] = deque()
        waiting: list[ObjectKey] = []  # taken from `keys`, not begun
        try:
            while True:
                deadline = self._begin(self._deadline_s)
                # At half: several reads together cost one `describe`, while earlier ones run.
                if len(ahead) <= self._window_chunks // 2:
                    self._fill(ahead, keys, waiting, deadline)
                if not ahead:
                    return
                load, allocation = ahead[0]
                is_loaded = self._is_loaded(load)
                ahead.popleft()
                yield allocation.tensor_on(self.dst_device) if is_loaded else None
        finally:
            for load, _ in ahead:
                if load is not None:
                    self._tier.cancel(load)

    def _fill(
        self,
        ahead: deque[tuple[Transfer | None, TensorAllocation]],
        keys: Iterator[ObjectKey],
        waiting: list[ObjectKey],
        deadline: float,
    ) -> None:
        """Begin the reads that the window has room for, and at least one if none is in flight."""
        from lmcache_redis.backends.tensors import TensorAllocation

        sizes = [load.frame.chunk_bytes for load, _ in ahead if load is not None]
        room_bytes = self._window_bytes - sum(sizes)
        # A guess that the next chunks are as large as the last one; `_begin_loads` counts exactly.
        room = min(self._window_chunks - len(ahead), room_bytes // (sizes or [1])[-1])
        room = max(room, 0 if ahead else 1)
        waiting += itertools.islice(keys, max(0, room - len(waiting)))
        allocations = [TensorAllocation() for _ in waiting[:room]]
        if not allocations:
            return
        # May begin fewer, because of `limit_bytes` or because a key is being written.
        loads = self._begin_loads(
            waiting[:room], allocations, deadline, wait=not ahead, limit_bytes=room_bytes
        )
        del waiting[: len(loads)]
        ahead.extend(zip(loads, allocations, strict=False))

    def _has_room(self, transfers: Collection[Transfer], nbytes: int) -> bool:
        """Whether the window has room for another chunk of `nbytes`."""
        total_bytes = nbytes + sum(each.frame.chunk_bytes for each in transfers)
        return len(transfers) < self._window_chunks and total_bytes <= self._window_bytes
