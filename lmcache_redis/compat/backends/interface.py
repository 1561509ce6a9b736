"""The contract of every backend, over an `ObjectCache` that a thread of each backend owns.

A backend keeps chunks by `ObjectKey`, each with its `RemoteMetadata`, which describes its bytes.
The byte calls copy payloads, on the caller's thread, between the cache's memory and the caller's
buffers. The tensor calls allocate the buffers, and copy no tensor on the CPU.

Calls may come from several threads at once; an iterator of `batched_get` is for one thread at a
time. Every call ends by a deadline. No call raises because of stored bytes, because a server or a
disk fails, or because a chunk does not fit: then a put stores nothing and returns False, and a get
is a miss. Misuse raises: FormatError for a key or a chunk without an encoding, ValueError for wrong
buffers of `allocate`, RuntimeError after `close`.

Single flight, promotion and the order of the changes of a key are the cache's (`compat.objects`).
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
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import MAX_SIZE, MemoryFormat, RemoteMetadata
from lmcache_redis.compat.backends.buffers import (
    Allocate,
    TensorAllocation,
    allocated_views,
    copy,
    encoded,
    payload_views,
)
from lmcache_redis.compat.backends.cache_thread import CacheThread, Storage
from lmcache_redis.compat.objects import Held, Listing
from lmcache_redis.errors import FormatError
from lmcache_redis.resp import RedisPlane

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

ResultT = TypeVar("ResultT")

# What a call waits beyond its deadline, so that a tier's own answer comes first.
_GRACE_S = 0.1


class _Put(NamedTuple):
    ended: Future[bool]
    deadline: float
    nbytes: int


class LMCBackendInterface:
    """See the module.

    dst_device: where `get` and `batched_get` place tensors: "cpu" or a CUDA device. fmt: the memory
    format that `put` writes into the metadata of tensors. window_chunks, window_bytes: what a
    batched call may have in flight, at least one chunk. close_s: how long `close` waits for puts.
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
        self.dst_device = dst_device
        self.fmt = fmt
        self.storage = storage
        self._thread = CacheThread(storage)
        self._objects = self._thread.objects
        self._window_chunks = window_chunks
        self._window_bytes = window_bytes
        self._is_closed = self._is_probed = False
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
        """Store a chunk, replacing the one under this key. Return whether it was stored.

        payload: contiguous buffers in order, `metadata.length` bytes in total; on return the caller
        may reuse them. blocking: the chunk is stored on return, or memory alone has it when the
        time is over. Otherwise True means accepted: it is stored in the background, or dropped if
        that fails; until then gets may or may not find it.
        """
        put = self._begin_put(key, metadata, payload, blocking)
        return put is not None and (not blocking or self._is_stored(put))

    def get_bytes(self, key: ObjectKey, allocate: Allocate) -> RemoteMetadata | None:
        """Load a chunk into the buffers that `allocate` returns; None is a miss.

        `allocate` is called at most once, on this thread. After a miss the buffers' contents are
        undefined.
        """
        deadline = self._deadline()
        return self._copied(self._held(self._begin_get(key, deadline), deadline), allocate)

    def contains(self, key: ObjectKey) -> bool:
        """Whether a get would most likely find the chunk. Does not count as a use."""
        return self.batched_contains([key])[0]

    def batched_contains(self, keys: Iterable[ObjectKey]) -> builtins.list[bool]:
        """`contains` for each, all asked at once."""
        checked, deadline = [_checked(key) for key in keys], self._deadline()
        calls: builtins.list[Future[bool]] = [
            self._thread.call(partial(self._objects.contains, key, deadline)) for key in checked
        ]
        return [_result(call, deadline, False) for call in calls]

    def remove(self, key: ObjectKey) -> bool:
        """Remove a chunk and drop a queued put of it; return whether there was one.

        Whatever is stored under the key is removed, even if not a chunk. Also False if the backend
        does not answer in time: the chunk may then still exist.
        """
        deadline = self._deadline()
        remove = partial(self._objects.remove, _checked(key), deadline)
        call: Future[bool] = self._thread.call(remove)
        return _result(call, deadline, False)

    def list(self) -> builtins.list[ObjectKey]:
        """The keys of all chunks of the backend's layout, in any order.

        Those put or removed meanwhile may be missing.
        """
        self._deadline()
        deadline = time.monotonic() + self.storage.list_deadline_s
        call: Future[Listing] = self._thread.call(partial(self._objects.keys, deadline))
        return _result(call, deadline, Listing(False, [])).keys

    def flush(self, timeout_s: float) -> bool:
        """Wait until all earlier puts are stored or dropped; False after the timeout."""
        self._check_open()
        return not wait(set(self._puts), timeout_s).not_done

    def close(self, timeout_s: float | None = None) -> None:
        """Flush, end all threads and free all memory. Idempotent.

        timeout_s: for queued puts, and again for the calls in flight; by default `close_s`. Calls
        in flight on other threads fail, or raise RuntimeError.
        """
        self._is_closed = True
        timeout_s = self.close_s if timeout_s is None else timeout_s
        wait(set(self._puts), timeout_s)
        self._thread.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def used_bytes(self) -> int:
        """Payload of the chunks in memory, without those being read or written."""
        if self._is_closed:
            return 0
        return self._thread.get(lambda: self._objects.cache.pool.idle).result()

    # -------------------------------------------------------------- tensors

    def put(self, key: ObjectKey, kv_chunk: torch.Tensor, blocking: bool = True) -> bool:
        """Store a tensor of one to eight dimensions, without a batch dimension. See `put_bytes`."""
        return self.put_bytes(key, *encoded(kv_chunk, self.fmt), blocking)

    def get(self, key: ObjectKey) -> torch.Tensor | None:
        """The chunk as a tensor in new memory on `dst_device`; None is a miss."""
        deadline = self._deadline()
        return self._tensor(self._held(self._begin_get(key, deadline), deadline))

    def batched_put(
        self, keys_and_chunks: Iterable[tuple[ObjectKey, torch.Tensor]], blocking: bool = True
    ) -> int:
        """`put` for each; return how many were stored or, without blocking, accepted.

        Several are in flight, each with a deadline of its own. The last put of a key wins. The
        caller may reuse the tensors on return, or after an error of the iterator, which is raised.
        """
        count = 0
        begun: deque[_Put] = deque()
        try:
            for key, kv_chunk in keys_and_chunks:
                while begun and not self._has_room(begun, kv_chunk.nbytes):
                    count += self._is_stored(begun.popleft())
                put = self._begin_put(key, *encoded(kv_chunk, self.fmt), blocking)
                if put is not None and blocking:
                    begun.append(put)
                elif put is not None:
                    count += 1
        finally:
            count += sum([self._is_stored(put) for put in begun])
        return count

    def batched_get(self, keys: Iterable[ObjectKey]) -> Iterator[torch.Tensor | None]:
        """`get` for each, in order: each is yielded when it is loaded, while the next are loaded.

        If the iterator is abandoned, loads in flight end without it.
        """
        self._check_open()
        return self._get_ahead(iter(keys))

    def _get_ahead(self, keys: Iterator[ObjectKey]) -> Iterator[torch.Tensor | None]:
        ahead: deque[Future[Held | None]] = deque()
        room, chunk_bytes = 1, 0

        def fill(count: int) -> None:
            deadline = self._deadline()
            for key in itertools.islice(keys, max(0, count - len(ahead))):
                ahead.append(self._begin_get(key, deadline))

        try:
            while True:
                fill(1)
                if not ahead:
                    return
                held = self._held(ahead.popleft(), self._deadline())
                if held is not None:
                    chunk_bytes = held.metadata.length
                # The next chunks are taken to be as large as the last one.
                room = self._window_bytes // chunk_bytes if chunk_bytes else 2 * room
                room = min(max(1, room), self._window_chunks)
                fill(room - 1)  # beside the one that the consumer has
                yield self._tensor(held)
        finally:
            for get in ahead:
                get.add_done_callback(partial(_pass_on, self._release))

    def _has_room(self, begun: deque[_Put], nbytes: int) -> bool:
        total_bytes = nbytes + sum(put.nbytes for put in begun)
        return len(begun) < self._window_chunks and total_bytes <= self._window_bytes

    # ---------------------------------------------------------------- calls

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"the backend is closed: {type(self).__name__}")

    def _deadline(self) -> float:
        """The deadline of a call that starts now. Raises RuntimeError after `close`.

        The first calls wait until the first probes of the servers have ended.
        """
        self._check_open()
        wait_s = self.storage.deadline_s
        deadline = time.monotonic() + wait_s
        if not self._is_probed:
            planes = [each.tier for each in self.storage.tiers]
            self._is_probed = all(
                plane.wait_probed(wait_s).probed
                for plane in planes
                if isinstance(plane, RedisPlane)
            )
        return deadline

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
    ) -> _Put | None:
        """Copies the payload and begins its writes. None: it is refused, and nothing changes."""
        deadline = self._deadline()
        views = payload_views(metadata, payload)
        _checked(key)
        queued_bytes = 0 if blocking else metadata.length
        if not self._accepts(metadata.length) or not self._queue(queued_bytes):
            return None
        put: Future[bool] | None = None
        try:
            reserving = self._thread.get(partial(self._objects.reserve, metadata))
            held = _result(reserving, deadline, None, self._abandon)
            if held is None:
                return None
            try:
                copy(held.payload, views, into_block=True)
                put = self._thread.call(partial(self._objects.publish, key, held))
            except BaseException:
                self._abandon(held)
                raise
        finally:
            if put is None:
                self._queue(-queued_bytes)
        self._puts.add(put)
        put.add_done_callback(partial(self._ended, queued_bytes))
        return _Put(put, deadline, metadata.length)

    def _is_stored(self, put: _Put) -> bool:
        return _result(put.ended, put.deadline, put.nbytes <= self.storage.memory_bytes)

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
        return self._thread.call(partial(self._objects.get, _checked(key), deadline))

    def _held(self, get: Future[Held | None], deadline: float) -> Held | None:
        return _result(get, deadline, None, self._release)

    def _tensor(self, held: Held | None) -> torch.Tensor | None:
        allocation = TensorAllocation()
        if self._copied(held, allocation) is None or allocation.tensor is None:
            return None
        tensor = allocation.tensor
        return tensor if self.dst_device == "cpu" else tensor.to(self.dst_device)

    def _copied(self, held: Held | None, allocate: Allocate) -> RemoteMetadata | None:
        """Copies a chunk to the caller's buffers and releases it."""
        if held is None:
            return None
        try:
            views = allocated_views(held.metadata, allocate)
            if views is None:
                return None
            copy(held.payload, views, into_block=False)
            return held.metadata
        finally:
            self._release(held)

    def _release(self, held: Held | None) -> None:
        if held is not None:
            self._thread.post(partial(self._objects.release, held))

    def _abandon(self, held: Held | None) -> None:
        if held is not None:
            self._thread.post(partial(self._objects.abandon, held))


def _checked(key: ObjectKey) -> ObjectKey:
    """Raises FormatError unless it is a key."""
    if not isinstance(key, ObjectKey):
        raise FormatError(f"a key is an ObjectKey, not {type(key).__name__}: {key!r:.80}")
    return key


def _result(
    call: Future[ResultT],
    deadline: float,
    late: ResultT,
    unwanted: Callable[[ResultT], None] = lambda _: None,
) -> ResultT:
    """The result of a call, or `late` after its deadline.

    unwanted: gets the result later, on any thread, if this is too late, or interrupted.
    """
    try:
        return call.result(max(0.0, deadline - time.monotonic()) + _GRACE_S)
    except BaseException as error:
        call.add_done_callback(partial(_pass_on, unwanted))
        if isinstance(error, TimeoutError):
            return late
        raise


def _pass_on(unwanted: Callable[[ResultT], None], call: Future[ResultT]) -> None:
    if call.exception() is None:
        unwanted(call.result())
