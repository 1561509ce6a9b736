"""The remote tier, with several chunks of a batch on their way at once.

`batched_get` keeps reads ahead of the consumer: while it works with one tensor, or while that is
brought to its device, the next are on their way. `batched_put` does the same with writes, so that
the next tensor is brought from its device while earlier ones are sent. Both hold at most
`window_chunks` and `window_bytes`, and one chunk in any case.

Each step of the iterator takes at most `deadline_s`. One that is abandoned (closed, or no longer
referenced) cancels what is outstanding; nobody waits for it, and its memory goes when the plane
has answered. Between two steps no turn is held longer than its read takes: a consumer may put and
remove, also the keys that it is getting.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from lmcache_redis.backends.checks import payload_views
from lmcache_redis.backends.remote import (
    DEFAULT_DEADLINE_S,
    DEFAULT_LIST_DEADLINE_S,
    DEFAULT_PENDING_BYTES,
    DEFAULT_SLOT_BYTES,
    LMCRemoteBackend,
)
from lmcache_redis.backends.transfers import Load, Store
from lmcache_redis.errors import ConfigError
from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import MemoryFormat
from lmcache_redis.resp import RedisOptions

if TYPE_CHECKING:
    import torch

    from lmcache_redis.backends.tensors import TensorAllocation

DEFAULT_WINDOW_CHUNKS = 16
# Small enough to be through within the deadline on a slow network too.
DEFAULT_WINDOW_BYTES = 128 << 20


class LMCPipelinedRemoteBackend(LMCRemoteBackend):
    """See the module, and `LMCRemoteBackend` for everything else.

    window_chunks, window_bytes: most that a batched call has on its way.
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
        """`get` for each, in order; later ones are read while the first are used."""
        self._check_open()
        return self._get_ahead(iter(keys))

    def batched_put(
        self, keys_and_chunks: Iterable[tuple[ObjectKey, torch.Tensor]], blocking: bool = True
    ) -> int:
        """`put` for each; how many were stored or, without blocking, accepted.

        Each chunk that cannot be begun within `deadline_s` is given up; all together may take
        longer. Of one key the last that was stored is there.
        """
        if not blocking:
            return super().batched_put(keys_and_chunks, blocking)
        from lmcache_redis.backends.tensors import tensor_bytes, tensor_metadata

        self._check_open()
        stored = 0
        stores: deque[tuple[Store, int]] = deque()
        ahead_bytes = 0
        try:
            for key, kv_chunk in keys_and_chunks:
                metadata = tensor_metadata(kv_chunk, self.fmt)
                # A slot is a view of the tensor's memory: that stays while the store is there.
                views = payload_views(metadata, (tensor_bytes(kv_chunk),))
                frame = self._catalog.frame(key, metadata)
                while stores and (
                    len(stores) >= self._window_chunks
                    or ahead_bytes + metadata.length > self._window_bytes
                ):
                    store, nbytes = stores.popleft()
                    stored += store.wait()
                    ahead_bytes -= nbytes
                deadline = self._begin()
                if not self._is_up(deadline):
                    continue
                begun = self._begin_store(key, frame, views, deadline)
                if begun is not None:
                    stores.append((begun, metadata.length))
                    ahead_bytes += metadata.length
        finally:
            # Also after an error of the caller's iterator: the tensors are in use until then.
            stored += sum([store.wait() for store, _ in stores])
        return stored

    # --------------------------------------------------------------- inside

    def _get_ahead(self, keys: Iterator[ObjectKey]) -> Iterator[torch.Tensor | None]:
        ahead = _Ahead()
        waiting: list[ObjectKey] = []  # taken from `keys`, not begun
        try:
            while True:
                deadline = self._begin()
                # Half: a few together cost one question. Meanwhile the first is still on its way.
                if len(ahead.loads) <= self._window_chunks // 2:
                    self._fill(ahead, keys, waiting, deadline)
                if not ahead.loads:
                    return
                found = ahead.pop()
                yield None if found is None else found.tensor_on(self.dst_device)
        finally:
            for load in ahead.outstanding():
                self._plane.cancel(load.io)

    def _fill(
        self, ahead: _Ahead, keys: Iterator[ObjectKey], waiting: list[ObjectKey], deadline: float
    ) -> None:
        """Begin reads for what there is room for, and one in any case if nothing is ahead."""
        from lmcache_redis.backends.tensors import TensorAllocation

        while True:
            is_first = not ahead.loads
            room_bytes = self._window_bytes - ahead.bytes
            room = min(self._window_chunks - len(ahead.loads), room_bytes // ahead.last_bytes)
            room = max(room, 1 if is_first else 0)
            waiting += itertools.islice(keys, max(0, room - len(waiting)))
            now = waiting[:room]
            if not now:
                return
            allocations = [TensorAllocation() for _ in now]
            # It may begin fewer: no room, or a key is being written, or is among them twice.
            loads = self._begin_loads(
                now,
                allocations,
                deadline,
                wait=is_first,
                room_bytes=room_bytes,
            )
            if not loads and is_first:
                loads = self._begin_loads(now[:1], allocations, deadline)
            if not loads:
                return
            del waiting[: len(loads)]
            for load, allocation in zip(loads, allocations, strict=False):
                ahead.add(load, allocation)


class _Ahead:
    """What one `batched_get` has on its way, in order. None: a miss."""

    def __init__(self) -> None:
        self.loads: deque[tuple[Load | None, TensorAllocation]] = deque()
        self.bytes = 0
        self.last_bytes = 1  # a guess at the next; what is begun is counted

    def add(self, load: Load | None, allocation: TensorAllocation) -> None:
        self.loads.append((load, allocation))
        if load is not None:
            self.last_bytes = load.metadata.length
            self.bytes += load.metadata.length

    def pop(self) -> TensorAllocation | None:
        """Wait for the first. Where that is interrupted it is still outstanding."""
        load, allocation = self.loads[0]
        metadata = load.wait() if load is not None else None
        self.loads.popleft()
        if load is not None:
            self.bytes -= load.metadata.length
        return allocation if metadata is not None else None

    def outstanding(self) -> Iterator[Load]:
        return (load for load, _ in self.loads if load is not None)
