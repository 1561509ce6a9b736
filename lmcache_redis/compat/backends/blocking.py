"""Blocking calls over an `ObjectCache`, which a thread of each backend owns.

A call posts its work to that thread and waits for the result, at most until its deadline. Payloads
are copied on the caller's thread between its buffers and the cache's memory. Everything else
(single flight, promotion, the order of the changes of a key) is the cache's: see `compat.objects`.
"""

from __future__ import annotations

import builtins
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, TimeoutError, wait
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import MAX_SIZE, MemoryFormat, RemoteMetadata
from lmcache_redis.compat.backends.buffers import allocated_views, gather, payload_views, scatter
from lmcache_redis.compat.backends.cache_thread import CacheThread, Storage
from lmcache_redis.compat.backends.interface import (
    Allocate,
    LMCBackendInterface,
    TensorAllocation,
)
from lmcache_redis.compat.objects import Held, Listing, ObjectCache

if TYPE_CHECKING:
    import torch

ResultT = TypeVar("ResultT")

# What a call waits beyond its deadline, so that a tier's own answer comes first.
_GRACE_S = 0.1


class BlockingBackend(LMCBackendInterface):
    """See the module. Thread-safe.

    window_chunks, window_bytes: what a batched call may have in flight, at least one chunk.
    close_s: how long `close` waits for puts.
    """

    close_s = 5.0

    def __init__(
        self,
        storage: Storage,
        dst_device: str,
        fmt: MemoryFormat,
        window_chunks: int = 1,
        window_bytes: int = MAX_SIZE,
    ) -> None:
        super().__init__(dst_device, fmt)
        self.storage = storage
        self._thread = CacheThread(storage)
        self._window_chunks = window_chunks
        self._window_bytes = window_bytes
        self._puts: set[Future[bool]] = set()  # those that have not ended
        self._queued_bytes = 0
        self._lock = threading.Lock()

    # ---------------------------------------------------------------- bytes

    def put_bytes(
        self,
        key: ObjectKey,
        metadata: RemoteMetadata,
        payload: Sequence[memoryview],
        blocking: bool = True,
    ) -> bool:
        """See the interface. Also True if memory alone has the chunk when the time is over."""
        deadline = self._deadline()
        put = self._begin_put(key, metadata, payload, blocking)
        if put is None or not blocking:
            return put is not None
        return _answer(put, deadline, metadata.length <= self.storage.memory_bytes)

    def get_bytes(self, key: ObjectKey, allocate: Allocate) -> RemoteMetadata | None:
        deadline = self._deadline()
        held = self._held(self._begin_get(key, deadline), deadline)
        return None if held is None else self._copied(held, allocate)

    def contains(self, key: ObjectKey) -> bool:
        deadline = self._deadline()
        call: Future[bool] = self._thread.call(partial(self._objects.contains, key, deadline))
        return _answer(call, deadline, False)

    def remove(self, key: ObjectKey) -> bool:
        """See the interface. Whatever is stored under the key is removed, even if not a chunk."""
        deadline = self._deadline()
        call: Future[bool] = self._thread.call(partial(self._objects.remove, key, deadline))
        return _answer(call, deadline, False)

    def list(self) -> builtins.list[ObjectKey]:
        """See the interface. Only chunks of the backend's layout; a tier may hold others."""
        self._deadline()
        deadline = time.monotonic() + self.storage.list_deadline_s
        call: Future[Listing] = self._thread.call(partial(self._objects.keys, deadline))
        return _answer(call, deadline, Listing(False, [])).keys

    def flush(self, timeout_s: float) -> bool:
        self._check_open()
        return not wait(set(self._puts), timeout_s).not_done

    def close(self) -> None:
        """See the interface. Calls in flight on other threads fail, or raise RuntimeError."""
        self._closed = True
        wait(set(self._puts), self.close_s)
        self._thread.close(self.close_s)

    @property
    def used_bytes(self) -> int:
        """Payload of the chunks in memory, without those being read or written."""
        if self._closed:
            return 0
        return self._thread.get(lambda: self._objects.cache.pool.idle).result()

    # -------------------------------------------------------------- tensors

    def batched_put(
        self, keys_and_chunks: Iterable[tuple[ObjectKey, torch.Tensor]], blocking: bool = True
    ) -> int:
        """See the interface. Several are in flight; each has its own deadline."""
        if not blocking:
            return super().batched_put(keys_and_chunks, blocking)
        stored = 0
        begun: deque[tuple[Future[bool], float, int]] = deque()
        try:
            for key, kv_chunk in keys_and_chunks:
                while begun and not self._has_room(begun, kv_chunk.nbytes):
                    stored += self._is_stored(*begun.popleft())
                deadline = self._deadline()
                put = self._begin_put(key, *self._encoded(kv_chunk), blocking)
                if put is not None:
                    begun.append((put, deadline, kv_chunk.nbytes))
        finally:
            # Also after an error of the caller's iterator.
            stored += sum([self._is_stored(*put) for put in begun])
        return stored

    def batched_get(self, keys: Iterable[ObjectKey]) -> Iterator[torch.Tensor | None]:
        """See the interface. The next are loaded while earlier ones are used.

        If the iterator is abandoned, loads in flight end without it.
        """
        self._check_open()
        return self._get_ahead(iter(keys))

    def _get_ahead(self, keys: Iterator[ObjectKey]) -> Iterator[torch.Tensor | None]:
        ahead: deque[Future[Held | None]] = deque()
        room, chunk_bytes = 1, 0
        try:
            while True:
                self._fill(ahead, keys, 1)
                if not ahead:
                    return
                held = self._held(ahead.popleft(), self._deadline())
                if held is not None:
                    chunk_bytes = held.metadata.length
                # The next chunks are taken to be as large as the last one.
                room = self._window_bytes // chunk_bytes if chunk_bytes else 2 * room
                room = min(max(1, room), self._window_chunks)
                self._fill(ahead, keys, room - 1)  # beside the one that the consumer has
                yield self._tensor(held)
        finally:
            for get in ahead:
                get.add_done_callback(partial(_pass_on, self._release))

    def _fill(
        self, ahead: deque[Future[Held | None]], keys: Iterator[ObjectKey], count: int
    ) -> None:
        deadline = self._deadline()
        for key in itertools.islice(keys, max(0, count - len(ahead))):
            ahead.append(self._begin_get(key, deadline))

    def _tensor(self, held: Held | None) -> torch.Tensor | None:
        allocation = TensorAllocation()
        if held is None or self._copied(held, allocation) is None:
            return None
        return allocation.tensor_on(self.dst_device)

    def _has_room(self, begun: deque[tuple[Future[bool], float, int]], nbytes: int) -> bool:
        total_bytes = nbytes + sum(each[2] for each in begun)
        return len(begun) < self._window_chunks and total_bytes <= self._window_bytes

    def _is_stored(self, put: Future[bool], deadline: float, nbytes: int) -> bool:
        return _answer(put, deadline, nbytes <= self.storage.memory_bytes)

    # ---------------------------------------------------------------- calls

    @property
    def _objects(self) -> ObjectCache:
        return self._thread.objects

    def _deadline(self) -> float:
        """The deadline of a call that starts now. Raises RuntimeError after `close`."""
        self._check_open()
        return time.monotonic() + self.storage.deadline_s

    def _accepts(self, nbytes: int) -> bool:
        """Whether memory or a tier can store a chunk of that size now."""
        is_up = any(backing.tier.state.up for backing in self.storage.tiers)
        return is_up or nbytes <= self.storage.memory_bytes

    def _begin_put(
        self,
        key: ObjectKey,
        metadata: RemoteMetadata,
        payload: Sequence[memoryview],
        blocking: bool,
    ) -> Future[bool] | None:
        """Copies the payload and begins its writes. None: it is refused, and nothing changes."""
        views = payload_views(metadata, payload)
        queued_bytes = 0 if blocking else metadata.length
        if not self._accepts(metadata.length) or not self._queue(queued_bytes):
            return None
        put: Future[bool] | None = None
        try:
            reserving = self._thread.get(partial(self._objects.reserve, metadata))
            held = _wait(reserving, None, self._abandon)
            if held is None:
                return None
            try:
                gather(views, held.payload)
                put = self._thread.call(partial(self._publish, key, held))
            except BaseException:
                self._abandon(held)
                raise
        finally:
            if put is None:
                self._queue(-queued_bytes)
        self._puts.add(put)
        put.add_done_callback(partial(self._ended, queued_bytes))
        return put

    def _publish(self, key: ObjectKey, held: Held, written: Callable[[bool], None]) -> None:
        try:
            self._objects.publish(key, held, written)
        except Exception:
            self._objects.abandon(held)
            raise

    def _queue(self, nbytes: int) -> bool:
        """Counts bytes of puts that do not block. False: they are over the limit."""
        with self._lock:
            if nbytes > 0 and self._queued_bytes + nbytes > self.storage.queue_bytes:
                return False
            self._queued_bytes += nbytes
        return True

    def _ended(self, queued_bytes: int, put: Future[bool]) -> None:
        self._queue(-queued_bytes)
        self._puts.discard(put)

    def _begin_get(self, key: ObjectKey, deadline: float) -> Future[Held | None]:
        return self._thread.call(partial(self._objects.get, key, deadline))

    def _held(self, get: Future[Held | None], deadline: float) -> Held | None:
        try:
            return _wait(get, deadline, self._release)
        except TimeoutError:
            return None

    def _copied(self, held: Held, allocate: Allocate) -> RemoteMetadata | None:
        """Copies a chunk to the caller's buffers and releases it."""
        try:
            views = allocated_views(held.metadata, allocate)
            if views is None:
                return None
            scatter(held.payload, views)
            return held.metadata
        finally:
            self._release(held)

    def _release(self, held: Held | None) -> None:
        if held is not None:
            self._thread.post(partial(self._objects.release, held))

    def _abandon(self, held: Held | None) -> None:
        if held is not None:
            self._thread.post(partial(self._objects.abandon, held))


def _answer(call: Future[ResultT], deadline: float, late: ResultT) -> ResultT:
    """The result of a call, or `late` after its deadline."""
    try:
        return call.result(_left_s(deadline))
    except TimeoutError:
        return late


def _wait(
    call: Future[ResultT], deadline: float | None, unwanted: Callable[[ResultT], None]
) -> ResultT:
    """The result of a call; raises TimeoutError after the deadline.

    unwanted: gets the result later, if this raises; on any thread.
    """
    try:
        return call.result(None if deadline is None else _left_s(deadline))
    except BaseException:  # interrupted, too late, or the call failed
        call.add_done_callback(partial(_pass_on, unwanted))
        raise


def _pass_on(unwanted: Callable[[ResultT], None], call: Future[ResultT]) -> None:
    if call.exception() is None:
        unwanted(call.result())


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic()) + _GRACE_S
