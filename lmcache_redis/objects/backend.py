# SPDX-License-Identifier: Apache-2.0
"""`ChunkBackend`: blocking calls to an `ObjectCache` that a thread of each backend owns.

A backend keeps chunks by `ObjectKey`, each with its `RemoteMetadata`, which describes its bytes.
The byte calls copy payloads, on the
caller's thread, between the cache's memory and the caller's buffers. The tensor calls allocate the
buffers, and copy no tensor on the CPU.

Calls may come from several threads at once; an iterator of `batched_get` is for one thread at a
time. Every call ends by a deadline. No call raises because of stored bytes, because a server or a
disk fails, or because a chunk does not fit: then a put stores nothing and returns False, and a get
is a miss. Misuse raises: FormatError for a key or a chunk without an encoding, ValueError for wrong
buffers of `allocate`, Closed after `close`, and RuntimeError in a process that was forked since.

Single flight, promotion and the order of the changes of a key are the cache's (`objects.cache`).
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, TimeoutError, wait
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lmcache_redis.cache.threads import OwnerLoop
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import RemoteMetadata
from lmcache_redis.errors import Closed, ConfigError, FormatError, LMCacheRedisError, NotListed
from lmcache_redis.objects.buffers import (
    Allocate,
    TensorAllocation,
    byte_views,
    copy,
    encoded,
)
from lmcache_redis.objects.cache import HeapMemory, HeldChunk
from lmcache_redis.objects.storage import ChunkStorage, open_cache
from lmcache_redis.processes import NamedThread, check_not_forked
from lmcache_redis.resp import RedisPlane
from lmcache_redis.tiers import Done

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

# What a batched call may have in flight, at least one chunk. Small enough to be transferred within
# the deadline even on a slow network.
WINDOW_CHUNKS = 16
WINDOW_BYTES = 128 << 20
# Payload in flight; non-blocking puts beyond it are refused.
QUEUE_BYTES = 256 << 20
CLOSE_S = 5.0
_LIST_S = 60.0
# What a call waits beyond its deadline, so that a tier's own answer comes first.
_GRACE_S = 0.1
# Beyond the time for writes: tiers that hang have ended their calls by then.
_JOIN_S = 10.0


class CacheThread:
    """Owns the `ObjectCache` of a backend's storages, the fastest first. Thread-safe.

    Raises ConfigError for storages that cannot be opened, or not together.
    """

    def __init__(self, storages: Sequence[ChunkStorage]) -> None:
        with_tiers = [each for each in storages if each.open_tier is not None]
        self.deadline_s = min((each.deadline_s for each in with_tiers or storages), default=0.0)
        self._woken = threading.Event()
        self._loop = OwnerLoop(self._woken.set)
        self._memory = HeapMemory()
        self.objects = open_cache(storages, self._loop, self._memory, self.deadline_s)
        self._pid = os.getpid()
        self._calls: set[Future[Any]] = set()
        self._has_ended = False
        self.is_closed = False
        self._thread = NamedThread("lmcr-cache", self._run)
        self._thread.start()

    @property
    def calls(self) -> set[Future[Any]]:
        """Those that have not ended."""
        return set(self._calls)

    def call(self, begin: Callable[[Done[ResultT]], None]) -> Future[ResultT]:
        """The result of an asynchronous call to the cache: what it passes to its `done`.

        begin: the call without its `done`. Raises RuntimeError as `check_usable`.
        """
        self.check_usable()
        future: Future[ResultT] = Future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._loop.post(partial(_begin, begin, future))
        return future

    def check_usable(self) -> None:
        """Raises Closed after `close`, and RuntimeError after a fork."""
        check_not_forked("the backend", self._pid)
        if self.is_closed:
            raise Closed("the backend is closed")

    def release(self, held: HeldChunk | None) -> None:
        """Unpins a chunk that a get has found."""
        if held is not None:
            self._loop.post(partial(self.objects.release, held))

    def abandon(self, held: HeldChunk | None) -> None:
        """Frees memory that was reserved for a put."""
        if held is not None:
            self._loop.post(partial(self.objects.abandon, held))

    def close(self, timeout_s: float) -> None:
        """Calls have this time to end, and writes as much again; those that do not raise.

        Idempotent. After a fork it leaves all to the parent.
        """
        self.is_closed = True
        if os.getpid() != self._pid:
            return
        wait(self.calls, timeout_s)
        self._loop.post(partial(self._close, timeout_s))
        self._thread.join(timeout_s + _JOIN_S)

    def _run(self) -> None:
        for tier in self.objects.cache.tiers:
            if isinstance(tier, RedisPlane):
                tier.wait_probed(self.deadline_s)  # the first calls wait for this
        while not self._has_ended:
            self._woken.wait(self._loop.run_due())
            self._woken.clear()
            self._loop.run_posted()
        self._loop.run_posted()  # what the tiers posted when they closed
        for future in self.calls:
            future.set_exception(Closed("the backend is closed"))
        self.objects.cache.pool.clear()
        self._memory.close()

    def _close(self, timeout_s: float) -> None:
        self._has_ended = True
        self.objects.close(timeout_s)


def _begin(begin: Callable[[Done[ResultT]], None], future: Future[ResultT]) -> None:
    try:
        begin(future.set_result)
    except Exception as error:
        if future.done():
            raise
        if not isinstance(error, LMCacheRedisError):
            logger.exception("a call failed")  # our own bug
        # Without the traceback: its frames have the future.
        future.set_exception(error.with_traceback(None))


class _Put(NamedTuple):
    ended: Future[bool]
    deadline: float
    nbytes: int


class ChunkBackend:
    """Chunks by key, by blocking calls. No call raises because of stored bytes or of a server.

    A put is written to all storages; it is stored if any of them stores it. One that does not
    store it removes what it has under the key. A get asks them in order; a chunk that a lower one
    has is put into those above. Concurrent gets of one key are one load.

    Args:
        storages: Memory, a directory or servers, the fastest first; memory can only be the first.
        dst_device: Where `get` and `batched_get` place tensors: "cpu" or a CUDA device.

    Raises:
        ConfigError: A storage cannot be opened, storages differ in layout or key prefix, or this
            machine has no such device.
    """

    def __init__(self, storages: Sequence[ChunkStorage], dst_device: str = "cpu") -> None:
        if re.fullmatch(r"cpu|cuda(:[0-9]+)?", str(dst_device)) is None:
            raise ConfigError(f"the device is {dst_device!r}: choose cpu or cuda, as cuda:0")
        self.dst_device = dst_device
        self._thread = CacheThread(storages)
        self._objects = self._thread.objects
        self._tiers = self._objects.cache.tiers
        self._memory_bytes = storages[0].memory_bytes
        # Also when it is no longer referenced, and at exit: no call holds a reference to it.
        self._close = weakref.finalize(self, self._thread.close, CLOSE_S)

    @property
    def why_down(self) -> str:
        """Why calls fail at the last storage: why it is down, or what its last operations were
        answered. Empty if they worked, or if none was tried and it is up."""
        return "".join(tier.state.reason for tier in self._tiers[-1:])

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
        that fails; until then gets may or may not find it, but in memory they do at once.
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

    def batched_contains(self, keys: Iterable[ObjectKey]) -> list[bool]:
        """`contains` for each, all asked at once."""
        checked, deadline = [self._object_key(key) for key in keys], self._deadline()
        calls: list[Future[bool]] = [
            self._thread.call(partial(self._objects.contains, key, deadline)) for key in checked
        ]
        return [_result(call, deadline, False) for call in calls]

    def remove(self, key: ObjectKey) -> bool:
        """Remove a chunk and drop a queued put of it; return whether there was one.

        Whatever is stored under the key is removed, even if not a chunk. Also False if the backend
        does not answer in time: the chunk may then still exist.
        """
        deadline = self._deadline()
        remove = partial(self._objects.remove, self._object_key(key), deadline)
        call: Future[bool] = self._thread.call(remove)
        return _result(call, deadline, False)

    def stored_keys(self) -> list[ObjectKey]:
        """The keys of all chunks of the backend's layout, in any order.

        Those put or removed meanwhile may be missing. Raises NotListed if others may be: a server
        does not answer, or refuses, or has more than fit in memory.
        """
        objects, deadline = self._objects, self._deadline()
        call: Future[set[bytes] | None] = self._thread.call(
            lambda done: done(objects.pooled_keys())
        )
        pooled = _result(call, deadline, None)
        if pooled is None:
            raise NotListed("not all names can be listed: memory did not answer in time")
        found = objects.listed(pooled, deadline + _LIST_S)
        if found.why_not:
            raise NotListed(f"not all names can be listed: {found.why_not}")
        return found.keys

    def flush(self, timeout_s: float) -> bool:
        """Wait until all earlier puts are stored or dropped; False after the timeout."""
        self._thread.check_usable()
        return not wait(self._thread.calls, timeout_s).not_done

    def close(self) -> None:
        """Flush for a bounded time, end all threads and free all memory. Idempotent.

        Calls in flight on other threads fail, or raise RuntimeError.
        """
        self._close()

    # -------------------------------------------------------------- tensors

    def put(self, key: ObjectKey, kv_chunk: torch.Tensor, blocking: bool = True) -> bool:
        """Store a tensor of one to eight dimensions, without a batch dimension. See `put_bytes`.

        The calls with tensors raise ConfigError where there is no torch.
        """
        return self.put_bytes(key, *encoded(kv_chunk), blocking)

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
                while begun and not _has_room(begun, kv_chunk.nbytes):
                    count += self._is_stored(begun.popleft())
                put = self._begin_put(key, *encoded(kv_chunk), blocking)
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
        waiting = iter(keys)
        ahead: deque[Future[HeldChunk | None]] = deque()
        room, chunk_bytes = 1, 0

        def fill(count: int) -> None:
            deadline = self._deadline()
            for key in itertools.islice(waiting, max(0, count - len(ahead))):
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
                room = WINDOW_BYTES // chunk_bytes if chunk_bytes else 2 * room
                room = min(max(1, room), WINDOW_CHUNKS)
                fill(room - 1)  # beside the one that the consumer has
                yield self._tensor(held)
        finally:
            for get in ahead:
                get.add_done_callback(partial(_pass_on, self._thread.release))

    # ---------------------------------------------------------------- calls

    def _object_key(self, key: Any) -> ObjectKey:
        """Of what a caller names a chunk by. Raises FormatError."""
        if not isinstance(key, ObjectKey):
            raise FormatError(f"a key is an ObjectKey, not {type(key).__name__}")
        return key

    def _deadline(self) -> float:
        """The deadline of a call that starts now."""
        return time.monotonic() + self._thread.deadline_s

    def _begin_put(
        self,
        key: ObjectKey,
        metadata: RemoteMetadata,
        payload: Sequence[memoryview],
        blocking: bool,
    ) -> _Put | None:
        """Copies the payload and begins its writes. None: it is refused, and nothing changes."""
        deadline = self._deadline()
        if not metadata.length:
            raise FormatError("a chunk has at least one byte")
        views = byte_views(payload, metadata.length, "the payload")
        object_key, objects, nbytes = self._object_key(key), self._objects, metadata.length

        def reserve(done: Done[HeldChunk | None]) -> None:
            pool, tiers = objects.cache.pool, self._tiers
            is_kept = nbytes <= self._memory_bytes or any(tier.state.up for tier in tiers)
            has_room = blocking or not 0 < pool.pinned > QUEUE_BYTES - nbytes
            done(objects.reserve(object_key, metadata) if is_kept and has_room else None)

        # Its error would keep a frame that has the call, see `_result`.
        held = _result(self._thread.call(reserve), deadline, None, self._thread.abandon)
        if held is None:
            return None
        try:
            copy(held.payload, views, into_block=True)
            ended: Future[bool] = self._thread.call(partial(objects.publish, object_key, held))
        except BaseException:
            self._thread.abandon(held)
            raise
        return _Put(ended, deadline, nbytes)

    def _is_stored(self, put: _Put) -> bool:
        return _result(put.ended, put.deadline, False) or put.nbytes <= self._memory_bytes

    def _begin_get(self, key: ObjectKey, deadline: float) -> Future[HeldChunk | None]:
        return self._thread.call(partial(self._objects.get, self._object_key(key), deadline))

    def _held(self, get: Future[HeldChunk | None], deadline: float) -> HeldChunk | None:
        return _result(get, deadline, None, self._thread.release)

    def _tensor(self, held: HeldChunk | None) -> torch.Tensor | None:
        allocation = TensorAllocation()
        self._copied(held, allocation)
        tensor = allocation.tensor
        if tensor is None or self.dst_device == "cpu":
            return tensor
        return tensor.to(self.dst_device)

    def _copied(self, held: HeldChunk | None, allocate: Allocate) -> RemoteMetadata | None:
        """Copies a chunk to the caller's buffers and releases it."""
        if held is None:
            return None
        try:
            buffers = allocate(held.metadata)
            if buffers is None:
                return None
            views = byte_views(buffers, held.metadata.length, "what allocate returned")
            if any(view.readonly for view in views):
                raise ValueError("allocate returned a read-only buffer")
            copy(held.payload, views, into_block=False)
            return held.metadata
        finally:
            self._thread.release(held)


def _has_room(begun: deque[_Put], nbytes: int) -> bool:
    total_bytes = nbytes + sum(put.nbytes for put in begun)
    return len(begun) < WINDOW_CHUNKS and total_bytes <= WINDOW_BYTES


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
    finally:
        del call  # else its error and this frame would keep each other


def _pass_on(unwanted: Callable[[ResultT], None], call: Future[ResultT]) -> None:
    if call.exception() is None:
        unwanted(call.result())
