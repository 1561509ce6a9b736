"""A hierarchy of tiers, the fastest first: memory over disk over Redis, or some of these.

The tiers are blocking backends of any kind, including a user's own. This module coordinates them;
it keeps no index of its own.

A put is written through to all tiers, from the first on. It is stored if any tier stores it; a tier
that does not store it removes what it has under the key. A get asks the tiers in order. A chunk
found in a lower tier is promoted to those above: to the first before the get returns, to the others
by non-blocking puts. Concurrent gets of one key share one load: the others wait for the first, at
most `wait_s`, and then read the first tier, or a copy if the first tier did not store the chunk. A
tier that fails finds nothing and stores nothing, so it is skipped.

A promotion never restores a removed chunk and never replaces a newer one. A put or removal holds
the key lock while all tiers work; if it does not get the lock within `wait_s`, it changes nothing
and returns False. Before it releases the lock it marks the load in flight of that key as outdated.
A promotion needs the same lock and does not wait for it; it is skipped if the lock is held or its
load is outdated. So a removal either follows the promotion and removes its chunk too, or prevents
the promotion.

A key is expected to identify its contents. A tier that fails to remove a chunk (its server is
down), or that drops a non-blocking put, keeps the previous chunk, and serves it once the tiers
above have lost theirs.
"""

from __future__ import annotations

import builtins
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.compat.backends.buffers import (
    Block,
    allocated_views,
    gathered,
    payload_views,
    scatter,
)
from lmcache_redis.compat.backends.interface import Allocate, LMCBackendInterface
from lmcache_redis.compat.backends.keylocks import KeyLocks
from lmcache_redis.errors import ConfigError

if TYPE_CHECKING:
    import torch

DEFAULT_WAIT_S = 10.0
DEFAULT_READ_AHEAD = 4


class AllocateOnce:
    """An `Allocate` shared by several tiers, which calls the caller's at most once.

    views: the caller's buffers. is_refused: the caller's `allocate` returned None.
    """

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._metadata: RemoteMetadata | None = None
        self.views: Sequence[memoryview] = ()
        self.is_refused = False

    def __call__(self, metadata: RemoteMetadata) -> Sequence[memoryview] | None:
        if self._metadata is None:
            self._metadata = metadata
            views = allocated_views(metadata, self._allocate)
            self.is_refused = views is None
            self.views = views or ()
        elif metadata != self._metadata:
            # After a read that failed, a lower tier has a different chunk under the key.
            return None
        return None if self.is_refused else self.views


class InflightLoad:
    """A load in flight. Followers read its result once `ended` is set.

    is_absent: no tier has the chunk. copy: the chunk, if the first tier did not store it. Neither:
    each follower reads the tiers by itself.
    """

    def __init__(self) -> None:
        self.is_absent = False
        self.copy: tuple[RemoteMetadata, Block] | None = None
        self.followers = 0
        self.is_outdated = False
        self.ended = threading.Event()


class InflightLoads:
    """One load for all concurrent readers of a chunk. Thread-safe.

    The first reader leads; the others follow and wait for it. A put or a removal marks the load as
    outdated: it may return the previous chunk, so later readers do not join it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: dict[ObjectKey, InflightLoad] = {}

    def join(self, key: ObjectKey) -> tuple[InflightLoad, bool]:
        """The load of a key, and whether the caller leads it."""
        with self._lock:
            load = self._loads.get(key)
            if load is not None:
                load.followers += 1
                return load, False
            load = self._loads[key] = InflightLoad()
            return load, True

    def outdate(self, key: ObjectKey) -> None:
        """The chunk was put or removed: a load in flight may return the previous one."""
        with self._lock:
            load = self._loads.pop(key, None)
            if load is not None:
                load.is_outdated = True

    def leave(self, key: ObjectKey, load: InflightLoad) -> bool:
        """Let no more readers join; return whether any has joined. Idempotent."""
        with self._lock:
            if self._loads.get(key) is load:
                del self._loads[key]
            return load.followers > 0


class LMCHybridBackend(LMCBackendInterface):
    """See the module. Thread-safe.

    tiers: the fastest first; `close` closes them. wait_s: how long a call waits for others of the
    same key: a get for a load in flight before it loads by itself, a put or a removal for the key
    lock before it gives up. read_ahead: how many chunks of a batched call are in flight at once,
    each on its own thread, so that one is copied while the next is transferred. A non-blocking put
    still waits for the first tier, so that gets find the chunk at once.
    """

    def __init__(
        self,
        tiers: Sequence[LMCBackendInterface],
        dst_device: str = "cpu",
        fmt: MemoryFormat = MemoryFormat.UNDEFINED,
        *,
        wait_s: float = DEFAULT_WAIT_S,
        read_ahead: int = DEFAULT_READ_AHEAD,
    ) -> None:
        super().__init__(dst_device, fmt)
        if not tiers or wait_s < 0 or read_ahead < 1:
            raise ConfigError(
                "a hybrid needs at least one tier, wait_s of at least 0, read_ahead of at least 1"
            )
        self._tiers = tuple(tiers)
        self._wait_s = wait_s
        self._read_ahead = read_ahead
        self._loads = InflightLoads()
        self._locks: KeyLocks[ObjectKey] = KeyLocks()

    # ---------------------------------------------------------------- bytes

    def put_bytes(
        self,
        key: ObjectKey,
        metadata: RemoteMetadata,
        payload: Sequence[memoryview],
        blocking: bool = True,
    ) -> bool:
        """See the interface. Also False if the key lock is not acquired within `wait_s`."""
        views = payload_views(metadata, payload)
        self._check_open()
        if not self._lock(key):
            return False
        try:
            stored = [
                tier.put_bytes(key, metadata, views, blocking or number == 0)
                for number, tier in enumerate(self._tiers)
            ]
            if any(stored):
                for tier, took_it in zip(self._tiers, stored, strict=True):
                    if not took_it:
                        tier.remove(key)
            return any(stored)
        finally:
            self._end_change(key)

    def get_bytes(self, key: ObjectKey, allocate: Allocate) -> RemoteMetadata | None:
        self._check_open()
        once = AllocateOnce(allocate)
        metadata = self._tiers[0].get_bytes(key, once)
        if metadata is not None or once.is_refused or len(self._tiers) == 1:
            return metadata
        load, leads = self._loads.join(key)
        if leads:
            return self._lead(load, key, once)
        return self._follow(load, key, once)

    def contains(self, key: ObjectKey) -> bool:
        self._check_open()
        return any(tier.contains(key) for tier in self._tiers)

    def remove(self, key: ObjectKey) -> bool:
        """See the interface. Removes from all tiers; from none without the lock, and is False."""
        self._check_open()
        if not self._lock(key):
            return False
        try:
            removed = [tier.remove(key) for tier in self._tiers]
            return any(removed)
        finally:
            self._end_change(key)

    def list(self) -> builtins.list[ObjectKey]:
        self._check_open()
        return [*dict.fromkeys(key for tier in self._tiers for key in tier.list())]

    def flush(self, timeout_s: float) -> bool:
        self._check_open()
        deadline = time.monotonic() + timeout_s
        ended = [tier.flush(max(0.0, deadline - time.monotonic())) for tier in self._tiers]
        return all(ended)

    def close(self) -> None:
        self._closed = True
        with ExitStack() as stack:
            for tier in reversed(self._tiers):
                stack.callback(tier.close)

    # -------------------------------------------------------------- tensors

    def batched_put(
        self, keys_and_chunks: Iterable[tuple[ObjectKey, torch.Tensor]], blocking: bool = True
    ) -> int:
        """`put` for each; several are in flight at once, but puts of one key run in order.

        After an error, of a chunk or of the caller's iterator, puts in flight run to their end.
        """
        self._check_open()
        stored = 0
        begun: deque[tuple[ObjectKey, Future[bool]]] = deque()
        with ThreadPoolExecutor(self._read_ahead, "lmcr-hybrid") as pool:
            for key, kv_chunk in keys_and_chunks:
                # On this thread: the copy from a device must follow the caller's work on it.
                metadata, payload = self._encoded(kv_chunk)
                while len(begun) == self._read_ahead or any(key == other for other, _ in begun):
                    stored += begun.popleft()[1].result()
                put = pool.submit(self.put_bytes, key, metadata, payload, blocking)
                begun.append((key, put))
            return stored + sum(put.result() for _, put in begun)

    def batched_get(self, keys: Iterable[ObjectKey]) -> Iterator[torch.Tensor | None]:
        """`get` for each, in order; the next few are loaded while earlier ones are used.

        If the iterator is abandoned, loads in flight end on their threads.
        """
        self._check_open()
        return self._get_ahead(iter(keys))

    def _get_ahead(self, keys: Iterator[ObjectKey]) -> Iterator[torch.Tensor | None]:
        ahead: deque[Future[torch.Tensor | None]] = deque()
        pool = ThreadPoolExecutor(self._read_ahead, "lmcr-hybrid")
        try:
            while True:
                self._check_open()
                more = itertools.islice(keys, self._read_ahead - len(ahead))
                ahead.extend([pool.submit(self.get, key) for key in more])
                if not ahead:
                    return
                yield ahead.popleft().result()
        finally:
            pool.shutdown(wait=not ahead, cancel_futures=True)

    def _lock(self, key: ObjectKey) -> bool:
        """Acquire the key lock for a put or a removal; False: not within `wait_s`."""
        return self._locks.acquire(key, time.monotonic() + self._wait_s, exclusive=True)

    def _end_change(self, key: ObjectKey) -> None:
        """End a put or a removal: mark a load in flight as outdated, then release the lock."""
        self._loads.outdate(key)
        self._locks.release(key)

    def _lead(
        self, load: InflightLoad, key: ObjectKey, once: AllocateOnce
    ) -> RemoteMetadata | None:
        """Load the chunk for this call and all followers."""
        try:
            # The first tier again: it may have stored the chunk since it was asked.
            found_in, metadata = self._read(key, once)
            if metadata is None:
                load.is_absent = not once.is_refused
                return None
            is_in_first = not found_in or self._promote(load, key, metadata, once.views, found_in)
            is_followed = self._loads.leave(key, load)
            if is_followed and not is_in_first:
                load.copy = metadata, gathered(once.views)
            return metadata
        finally:
            self._loads.leave(key, load)
            load.ended.set()

    def _follow(
        self, load: InflightLoad, key: ObjectKey, once: AllocateOnce
    ) -> RemoteMetadata | None:
        """Wait for the leader's load and use its result."""
        if load.ended.wait(self._wait_s):
            if load.is_absent:
                return None
            if load.copy is not None:
                metadata, block = load.copy
                views = allocated_views(metadata, once)
                if views is None:
                    return None
                scatter(block, views)
                return metadata
        # No promotion: the leader's is enough, and this read is not marked when it is outdated.
        return self._read(key, once)[1]

    def _read(self, key: ObjectKey, once: AllocateOnce) -> tuple[int, RemoteMetadata | None]:
        """Read from the first tier that has the chunk. Returns its number, -1 for a miss."""
        for number, tier in enumerate(self._tiers):
            metadata = tier.get_bytes(key, once)
            if metadata is not None:
                return number, metadata
            if once.is_refused:
                break
        return -1, None

    def _promote(
        self,
        load: InflightLoad,
        key: ObjectKey,
        metadata: RemoteMetadata,
        views: Sequence[memoryview],
        found_in: int,
    ) -> bool:
        """Put a chunk found into the tiers above; return whether the first one stored it."""
        if not self._locks.acquire(key, 0.0, exclusive=True):
            return False
        try:
            if load.is_outdated:
                return False
            took_it = [
                tier.put_bytes(key, metadata, views, blocking=number == 0)
                for number, tier in enumerate(self._tiers[:found_in])
            ]
            return took_it[0]
        finally:
            self._locks.release(key)
