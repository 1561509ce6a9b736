"""A backend in Redis or Valkey: one server, a Sentinel's master, or a cluster.

Blocking calls over `cache.redis`, and so over the data plane (docs/data-plane.md): payloads move
between sockets and the caller's buffers, without a copy if a stripe lies within one buffer.

A get first reads the header of stripe 0, which has the chunk's metadata and stripe size; then it
calls `allocate` and reads all stripes. A chunk that is incomplete, of two stores, damaged or not
ours is a miss. Within one backend, a get of a key never overlaps a put or a removal of it
(`keylocks`). If another process writes or removes the chunk meanwhile, the get is a miss and the
chunk may be lost, but no byte is ever wrong.

Every call ends within `deadline_s` (`list`: `list_deadline_s`), including name resolution and
connecting; a wait on a socket may overrun it by milliseconds. While the server is down all calls
return at once: False, None or an empty list. In addition to the plane's commands, the server must
allow GETRANGE and SCAN.
"""

from __future__ import annotations

import builtins
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import TypeGuard, cast

from lmcache_redis.backends.buffers import StripeSlots, allocated_views
from lmcache_redis.backends.interface import Allocate
from lmcache_redis.backends.keylocks import Grant, KeyLocks
from lmcache_redis.backends.tiered import (
    Put,
    TierBackend,
    answer_of,
    names_of,
    never_stuck,
)
from lmcache_redis.config import DEFAULT_SLOT_BYTES
from lmcache_redis.errors import ConfigError
from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import MemoryFormat, RemoteMetadata
from lmcache_redis.resp import ChunkIO, ReadOutcome, RedisOptions, RedisPlane, WriteOutcome
from lmcache_redis.resp.outcomes import FramesResult, RemoveResult, WriteDone
from lmcache_redis.stripe import ChunkFrame, parsed_metadata

DEFAULT_PENDING_BYTES = 256 << 20
DEFAULT_DEADLINE_S = 5.0
DEFAULT_LIST_DEADLINE_S = 60.0
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
    own chunks, and slot_bytes is theirs.

    Raises ConfigError if the URL names no server or a number is invalid. Connects in the
    background.
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
        layout: bytes | None = None,
    ) -> None:
        if deadline_s < 0.01 or list_deadline_s < deadline_s:
            raise ConfigError("deadline_s is at least 0.01, list_deadline_s at least deadline_s")
        if slot_bytes < 64 or pending_bytes < 0:
            raise ConfigError("slot_bytes is at least 64, pending_bytes at least 0")
        options = RedisOptions(redis) if isinstance(redis, str) else redis
        names = names_of(layout, options.key_prefix)
        self._plane = RedisPlane(options)
        super().__init__(
            self._plane,
            names,
            slot_bytes,
            pending_bytes,
            dst_device,
            fmt,
            deadline_s,
            list_deadline_s,
        )
        self._locks: KeyLocks[bytes] = KeyLocks()
        self._probed = False
        self._plane.start()

    def get_bytes(self, key: ObjectKey, allocate: Allocate) -> RemoteMetadata | None:
        (load,) = self._begin_loads((key,), (allocate,), self._begin(self._deadline_s))
        return parsed_metadata(load.frame.metadata) if self._is_loaded(load) else None

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
            self._tier.read_all(begun, self._ended, never_stuck)
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
            self._tier.write_all((store,), self._ended, never_stuck)
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
                self._tier.write_all((chunk,), end, never_stuck)
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
