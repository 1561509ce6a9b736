"""A backend in Redis or Valkey: one server, a Sentinel's master, or a cluster.

Blocking calls over `cache.redis`, and so over the data plane (docs/data-plane.md): payloads move
between sockets and the caller's buffers, without a copy if a stripe lies within one buffer.

A get first reads the header of stripe 0, which has the chunk's metadata and stripe size; then it
calls `allocate` and reads all stripes. A chunk that is incomplete, of two stores, damaged or not
ours is a miss. Within one backend, a get of a key never overlaps a put or a removal of it
(`keylocks`). If another process writes or removes the chunk meanwhile, the get is a miss and the
chunk may be lost, but no byte is ever wrong.

A batch may have several chunks in flight (`LMCPipelinedRemoteBackend`). `batched_get` reads ahead:
the next chunks are read while the consumer uses one tensor, or while it is copied to its device.
`batched_put` writes earlier tensors while the next is copied from its device. An iterator that is
abandoned (closed, or no longer referenced) cancels its reads without waiting; their memory is freed
when the plane has answered. Between two steps, a key is locked only while it is read: the consumer
may put and remove chunks, including those it is getting.

Every call, and each step of an iterator, ends within `deadline_s` (`list`: `list_deadline_s`),
including name resolution and connecting; a wait on a socket may overrun it by milliseconds. While
the server is down all calls return at once: False, None or an empty list. In addition to the
plane's commands, the server must allow GETRANGE and SCAN.
"""

from __future__ import annotations

import builtins
import itertools
import math
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeGuard, cast

from lmcache_redis.chunks.frame import ChunkFrame, parsed_metadata
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.compat.backends.buffers import StripeSlots, allocated_views
from lmcache_redis.compat.backends.interface import Allocate, TensorAllocation
from lmcache_redis.compat.backends.keylocks import Grant, KeyLocks
from lmcache_redis.compat.backends.tiered import Put, TierBackend, answer_of, names_of
from lmcache_redis.config import DEFAULT_SLOT_BYTES
from lmcache_redis.errors import ConfigError
from lmcache_redis.resp import ChunkIO, ReadOutcome, RedisOptions, RedisPlane, WriteOutcome
from lmcache_redis.tiers import FramesResult, RemoveResult, WriteDone

if TYPE_CHECKING:
    import torch

DEFAULT_PENDING_BYTES = 256 << 20
DEFAULT_DEADLINE_S = 5.0
DEFAULT_LIST_DEADLINE_S = 60.0
DEFAULT_WINDOW_CHUNKS = 16
# Small enough to be transferred within the deadline even on a slow network.
DEFAULT_WINDOW_BYTES = 128 << 20
_CLOSE_WRITES_S = 1.0
_AT_ONCE = -math.inf


class Transfer(ChunkIO):
    """A transfer between Redis and the caller's buffers, which are in use until it has ended."""

    __slots__ = ("has_ended", "outcome", "stripes")

    def __init__(
        self, key: bytes, frame: ChunkFrame, views: Sequence[memoryview], deadline: float
    ) -> None:
        self.stripes = StripeSlots(views, frame)
        self.outcome: ReadOutcome | WriteOutcome | None = None
        self.has_ended = threading.Event()
        super().__init__(key, frame, self.stripes.slots, deadline)


class LMCRemoteBackend(TierBackend):
    """See the module. Thread-safe.

    redis: a URL, or options with one. deadline_s: of a call, and of the write of an accepted put.
    slot_bytes: the largest payload of a stripe that is written; stripes of any size are read.
    pending_bytes: the limit of copies of accepted puts; a put beyond it is not accepted. layout:
    the fingerprint (32 bytes) of an engine's KV cache, to share the chunks of its agents. Agents
    can read a chunk put here if its shape, dtype and format (MemoryFormat.PAGES) are those of their
    own chunks, and slot_bytes is theirs. window_chunks, window_bytes: the most that a batched call
    has in flight, but always at least one chunk.

    Raises ConfigError if the URL names no server or a number is invalid. Connects in the
    background.
    """

    _default_window = 1

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
        layout: bytes | None = None,
        window_chunks: int | None = None,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
    ) -> None:
        if deadline_s < 0.01 or list_deadline_s < deadline_s:
            raise ConfigError("deadline_s is at least 0.01, list_deadline_s at least deadline_s")
        if slot_bytes < 64 or pending_bytes < 0:
            raise ConfigError("slot_bytes is at least 64, pending_bytes at least 0")
        self._window_chunks = self._default_window if window_chunks is None else window_chunks
        self._window_bytes = window_bytes
        if self._window_chunks < 1 or window_bytes < 1:
            raise ConfigError("window_chunks and window_bytes are at least 1")
        options = RedisOptions(redis) if isinstance(redis, str) else redis
        names = names_of(layout, options.key_prefix)
        self._plane = RedisPlane(options)
        super().__init__(
            self._plane, names, slot_bytes, pending_bytes, dst_device, fmt,
            deadline_s, list_deadline_s,
        )  # fmt: skip
        self._locks: KeyLocks[bytes] = KeyLocks()
        self._probed = False
        self._plane.start()

    def get_bytes(self, key: ObjectKey, allocate: Allocate) -> RemoteMetadata | None:
        (load,) = self._begin_loads((key,), (allocate,), self._begin(self._deadline_s))
        return parsed_metadata(load.frame.metadata) if self._is_loaded(load) else None

    def batched_get(self, keys: Iterable[ObjectKey]) -> Iterator[torch.Tensor | None]:
        """`get` for each, in order; the next are read while earlier ones are used."""
        self._check_open()
        return self._get_ahead(iter(keys))

    def batched_put(
        self, keys_and_chunks: Iterable[tuple[ObjectKey, torch.Tensor]], blocking: bool = True
    ) -> int:
        """See the interface. A chunk whose write cannot begin within `deadline_s` is not stored.

        The whole batch may take longer. The last stored put of a key wins.
        """
        if not blocking or self._window_chunks == 1:
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

    def close(self) -> None:
        """See the interface. Calls in flight on other threads end soon, as failures or misses."""
        self._closed = True
        self._queue.flush(self._deadline_s)
        self._tier.close(_CLOSE_WRITES_S)

    def _begin(self, limit_s: float) -> float:
        """The first call waits until the first probe of the server has ended."""
        deadline = super()._begin(limit_s)
        if not self._probed:
            self._probed = self._plane.wait_probed(self._deadline_s).probed
        return deadline

    def _begin_loads(
        self,
        keys: Sequence[ObjectKey],
        allocates: Sequence[Allocate],
        deadline: float,
        *,
        wait: bool = True,
        limit_bytes: float = math.inf,
    ) -> builtins.list[Transfer | None]:
        """Begin to load as many of the leading keys as possible together; None: a miss.

        wait: wait for the lock of the first key, and load it whatever its size. The other locks are
        not waited for: waiting while holding a lock whose read has not begun could deadlock. All
        headers are read together. limit_bytes: the most payload to begin.
        """
        locked: builtins.list[bytes] = []
        loads: builtins.list[Transfer | None] = []
        try:
            for chunk_key in map(self._names.chunk_key, keys):
                until = deadline if wait and not locked else _AT_ONCE
                if not self._locks.acquire(chunk_key, until, exclusive=False):
                    break
                locked.append(chunk_key)
            if not locked:
                return [None] if wait else []
            found: FramesResult = answer_of(partial(self._tier.describe, locked, deadline))
            frames = found.frames or [None] * len(locked)
            for key, frame, allocate in zip(keys, frames, allocates, strict=False):
                if frame is not None:
                    limit_bytes -= frame.chunk_bytes
                    if limit_bytes < 0 and (loads or not wait):
                        break
                loads.append(self._load(key, frame, allocate, deadline))
            begun = [load for load in loads if load is not None]
            self._tier.load_all(begun, self._ended)
            for load in begun:
                locked.remove(load.key)
            return loads
        finally:
            for chunk_key in locked:
                self._locks.release(chunk_key)

    def _load(
        self, key: ObjectKey, frame: ChunkFrame | None, allocate: Allocate, deadline: float
    ) -> Transfer | None:
        """A load with its buffers, not begun yet; None if there is no such chunk or no buffer."""
        if frame is None or frame.chunk_hash != key.chunk_hash:
            return None
        if frame.fingerprint != self._names.fingerprint:
            return None
        views = allocated_views(parsed_metadata(frame.metadata), allocate)
        if views is None:
            return None
        return Transfer(self._names.chunk_key(key), frame, views, deadline)

    def _is_loaded(self, load: Transfer | None) -> TypeGuard[Transfer]:
        """Wait for a load; return whether the buffers hold the chunk."""
        if load is None or self._outcome(load) is not ReadOutcome.LOADED:
            return False
        load.stripes.scatter()
        return True

    def _store(self, put: Put) -> bool:
        store = Transfer(*put)
        return self._begin_store(store) and self._is_stored(store)

    def _begin_store(self, store: Transfer) -> bool:
        """Begin to write a chunk; False: its key stayed locked until the deadline."""
        if not self._locks.acquire(store.key, store.deadline, exclusive=True):
            return False
        with self._released_on_error(store.key):
            store.stripes.gather()
            self._tier.store_all((store,), self._ended)
        return True

    def _is_stored(self, store: Transfer) -> bool:
        """Wait for a store in flight; return whether the chunk is stored."""
        return self._outcome(store) is WriteOutcome.STORED

    def _ended(self, chunk: ChunkIO, outcome: ReadOutcome | WriteOutcome) -> None:
        """On a thread of the plane."""
        assert isinstance(chunk, Transfer)
        chunk.outcome = outcome
        self._locks.release(chunk.key)
        chunk.has_ended.set()

    def _outcome(self, transfer: Transfer) -> ReadOutcome | WriteOutcome | None:
        """Wait for the outcome. If interrupted, cancel and wait until the buffers are free."""
        try:
            transfer.has_ended.wait()
        except BaseException:
            self._tier.cancel(transfer)
            transfer.has_ended.wait()
            raise
        return transfer.outcome

    def _remove(self, chunk_key: bytes, deadline: float) -> bool:
        if not self._locks.acquire(chunk_key, deadline, exclusive=True):
            return False
        answer: SimpleQueue[RemoveResult] = SimpleQueue()

        def removed(result: RemoveResult) -> None:
            # In the callback: no write may overtake it, even if the caller is interrupted.
            self._locks.release(chunk_key)
            answer.put(result)

        with self._released_on_error(chunk_key):
            self._tier.remove(chunk_key, deadline, removed)
        return answer.get().removed > 0

    def _write(self, chunk: ChunkIO, done: WriteDone) -> None:
        """Begin the write once the key lock is granted, on the thread that releases the lock."""

        def end(chunk: ChunkIO, outcome: WriteOutcome) -> None:
            done(chunk, outcome)
            self._locks.release(chunk.key)

        def begin(grant: Grant) -> None:
            if grant.cancelled():
                done(chunk, WriteOutcome.CANCELLED)
                return
            try:
                self._tier.store_all((chunk,), end)
            except RuntimeError:  # the plane is closed
                end(chunk, WriteOutcome.CANCELLED)

        chunk.tag = self._locks.request(chunk.key, exclusive=True)
        chunk.tag.add_done_callback(begin)

    def _cancel(self, chunk: ChunkIO) -> None:
        # A write in flight is not cancelled: the plane would remove its sent stripes some time
        # after its end, and with them those of a later write. The later write waits for it instead.
        cast(Grant, chunk.tag).cancel()

    @contextmanager
    def _released_on_error(self, chunk_key: bytes) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._locks.release(chunk_key)
            raise


class LMCPipelinedRemoteBackend(LMCRemoteBackend):
    """The same, with several chunks of a batch in flight unless ``window_chunks`` is given."""

    _default_window = DEFAULT_WINDOW_CHUNKS
