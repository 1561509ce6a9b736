"""Blocking calls over a `Tier` of the cache: the common part of the disk and the Redis backend.

Payloads move between the tier and the caller's buffers without an intermediate copy. Non-blocking
puts are copied (`PutQueue`). A later put or removal of a key drops a queued put.
"""

from __future__ import annotations

import builtins
import math
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

from lmcache_redis.chunks.frame import FINGERPRINT_BYTES, ChunkFrame, stripe_payload_bytes
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.chunks.names import ChunkNames
from lmcache_redis.compat.backends.buffers import StripeSlots, gathered, payload_views
from lmcache_redis.compat.backends.interface import LMCBackendInterface
from lmcache_redis.errors import ConfigError
from lmcache_redis.tiers import (
    CallOutcome,
    ChunkIO,
    ExistsResult,
    KeyedTier,
    WriteDone,
    WriteOutcome,
)

ResultT = TypeVar("ResultT")


class Put(NamedTuple):
    """A chunk to store: views of the caller's payload, and a deadline (monotonic)."""

    key: bytes
    frame: ChunkFrame
    views: Sequence[memoryview]
    deadline: float


class PutQueue:
    """Non-blocking puts in flight. Thread-safe; has no thread of its own.

    limit_bytes: of the copies, counted from before a copy is made until its write has ended. write:
    begins a write, and calls its second argument once, on any thread, when the write has ended.
    cancel: ends a write early if that is possible.
    """

    def __init__(
        self,
        limit_bytes: int,
        write: Callable[[ChunkIO, WriteDone], None],
        cancel: Callable[[ChunkIO], None],
    ) -> None:
        self._limit_bytes = limit_bytes
        self._write = write
        self._cancel = cancel
        self._bytes = 0
        self._changed = threading.Condition()
        self._writes: set[ChunkIO] = set()  # waiting or in flight
        self._latest: dict[bytes, ChunkIO] = {}  # those of them that were not dropped, by key

    def add(
        self, key: bytes, frame: ChunkFrame, views: Sequence[memoryview], deadline: float
    ) -> bool:
        """Copy a payload and begin its write. False: there is no room for the copy."""
        with self._changed:
            if self._bytes + frame.chunk_bytes > self._limit_bytes:
                return False
            self._bytes += frame.chunk_bytes
        try:
            copy = gathered(views).data
        except MemoryError:
            self._release(frame.chunk_bytes)
            return False
        chunk = ChunkIO(key, frame, StripeSlots((copy,), frame).slots, deadline)
        # Under the lock, so that two puts of a key are written in the order of their calls.
        with self._changed:
            self.drop(key)
            self._writes.add(chunk)
            self._latest[key] = chunk
            self._write(chunk, self._written)
        return True

    def drop(self, key: bytes) -> bool:
        """Drop the put of a key that is queued or in flight; return whether there was one."""
        with self._changed:
            chunk = self._latest.pop(key, None)
            if chunk is not None:
                self._cancel(chunk)
        return chunk is not None

    def flush(self, timeout_s: float) -> bool:
        """Wait until every put added before has ended; False after the timeout."""
        with self._changed:
            before = set(self._writes)
            return self._changed.wait_for(lambda: before.isdisjoint(self._writes), timeout_s)

    def _written(self, chunk: ChunkIO, _outcome: WriteOutcome) -> None:
        with self._changed:
            self._writes.remove(chunk)
            if self._latest.get(chunk.key) is chunk:
                del self._latest[chunk.key]
            self._release(chunk.frame.chunk_bytes)

    def _release(self, nbytes: int) -> None:
        with self._changed:
            self._bytes -= nbytes
            self._changed.notify_all()


class TierBackend(LMCBackendInterface):
    """Thread-safe.

    slot_bytes: the largest payload of a stripe that is written. queue_bytes: the limit of copies of
    non-blocking puts; a put beyond it is refused. deadline_s, list_deadline_s: the timeout of a
    tier's call, and of a `list`.
    """

    def __init__(
        self,
        tier: KeyedTier,
        names: ChunkNames,
        slot_bytes: int,
        queue_bytes: int,
        dst_device: str,
        fmt: MemoryFormat,
        deadline_s: float = math.inf,
        list_deadline_s: float = math.inf,
    ) -> None:
        super().__init__(dst_device, fmt)
        self._tier = tier
        self._names = names
        self._slot_bytes = slot_bytes
        self._queue = PutQueue(queue_bytes, self._write, self._cancel)
        self._deadline_s = deadline_s
        self._list_deadline_s = list_deadline_s

    def put_bytes(
        self,
        key: ObjectKey,
        metadata: RemoteMetadata,
        payload: Sequence[memoryview],
        blocking: bool = True,
    ) -> bool:
        put = self._accept(key, metadata, payload)
        if put is None:
            return False
        if not blocking:
            return self._queue.add(*put)
        self._queue.drop(put.key)
        return self._store(put)

    def contains(self, key: ObjectKey) -> bool:
        chunk_key = self._names.chunk_key(key)
        deadline = self._begin(self._deadline_s)
        is_known = self._tier.lookup(chunk_key)
        if is_known is not None:
            return is_known
        result: ExistsResult = answer_of(partial(self._tier.exists, (chunk_key,), deadline))
        return result.outcome is CallOutcome.DONE and result.present[0]

    def remove(self, key: ObjectKey) -> bool:
        """See the interface. Whatever is stored under the key is removed, even if not a chunk."""
        chunk_key = self._names.chunk_key(key)
        deadline = self._begin(self._deadline_s)
        was_queued = self._queue.drop(chunk_key)
        return self._remove(chunk_key, deadline) or was_queued

    def list(self) -> builtins.list[ObjectKey]:
        """See the interface. Only chunks of the backend's layout; the tier may hold others."""
        deadline = self._begin(self._list_deadline_s)
        keys = map(self._names.parse, self._tier.keys(self._names.common, deadline))
        return [key for key in keys if key is not None]

    def flush(self, timeout_s: float) -> bool:
        self._check_open()
        return self._queue.flush(timeout_s)

    # ------------------------------------------------- overridden by backends

    def _begin(self, limit_s: float) -> float:
        """The deadline of a call that starts now. Raises RuntimeError after `close`."""
        self._check_open()
        return time.monotonic() + limit_s

    def _accept(
        self, key: ObjectKey, metadata: RemoteMetadata, payload: Sequence[memoryview]
    ) -> Put | None:
        """Check and frame a put. None: the tier is down, or a chunk of that size does not fit."""
        views = payload_views(metadata, payload)
        stripe_bytes = stripe_payload_bytes(metadata.length, self._slot_bytes)
        frame = self._names.frame(key, metadata, stripe_bytes)
        put = Put(self._names.chunk_key(key), frame, views, self._begin(self._deadline_s))
        return put if self._tier.state.up and self._fits(metadata.length) else None

    def _fits(self, chunk_bytes: int) -> bool:
        """Whether the tier can store a chunk of that size."""
        return True

    @abstractmethod
    def _store(self, put: Put) -> bool:
        """Write a chunk from the caller's buffers; return whether it was stored."""

    @abstractmethod
    def _remove(self, chunk_key: bytes, deadline: float) -> bool:
        """Remove a chunk; return whether there was one."""

    def _write(self, chunk: ChunkIO, done: WriteDone) -> None:
        """Begin to write a copy. For one key, called in the order in which puts were accepted."""
        self._tier.store_all((chunk,), done)

    def _cancel(self, chunk: ChunkIO) -> None:
        """A later call replaces the copy: do not write it, or do not make it visible."""
        self._tier.cancel(chunk)


def answer_of(ask: Callable[[Callable[[ResultT], None]], None]) -> ResultT:
    """Call a tier and wait for the result that it passes to its callback."""
    answer: SimpleQueue[ResultT] = SimpleQueue()
    ask(answer.put)
    return answer.get()


def names_of(layout: bytes | None, key_prefix: bytes) -> ChunkNames:
    """The names of a backend's chunks. Raises ConfigError if layout is not a fingerprint."""
    if layout is not None and len(layout) != FINGERPRINT_BYTES:
        raise ConfigError(f"layout is a fingerprint of {FINGERPRINT_BYTES} bytes")
    return ChunkNames(layout, key_prefix)
