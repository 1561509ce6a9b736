"""Tiers above each other: memory over disk over Redis, or any of these, the fastest first.

The tiers are blocking backends, any of them, also a user's own. What this adds is how they work
together; what is in which of them, each of them knows.

A put is written through to all tiers, the first one first; it is stored if any took it, and one
that did not take it forgets what it had under that key. A get asks from the top down, and what a
lower tier had is promoted to those above it: to the first before the get returns, to the others by
puts that do not block. Simultaneous gets of one key are one load: the others wait for the first, at
most `wait_s`, and read the first tier then, or a copy where that did not take the chunk. A tier
that fails is one that has nothing and takes nothing: it is skipped.

A promotion never brings back what was removed, nor puts an old chunk over a new one. Puts and
removals of a key hold its lock, for as long as all tiers need; one that does not get it within
`wait_s` changes nothing and says so. Before they release it they make the load of that key that is
in flight outdated. A promotion needs the same lock, does not wait for it, and is left out where it
does not get it or its load is outdated: so either the removal comes after the promotion and removes
that too, or there is no promotion.

Keys are taken to name contents. A tier that fails to remove a chunk (its server is down), or that
drops a put that did not block, keeps the previous chunk. It serves that once the tiers above have
lost theirs.
"""

from __future__ import annotations

import builtins
import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

from lmcache_redis.backends.checks import AllocateOnce, allocated_views, payload_views
from lmcache_redis.backends.copying import gathered, scatter
from lmcache_redis.backends.inflight import InflightLoad, InflightLoads
from lmcache_redis.backends.interface import Allocate, LMCBackendInterface
from lmcache_redis.backends.keylocks import KeyLocks
from lmcache_redis.errors import ConfigError
from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import MemoryFormat, RemoteMetadata

if TYPE_CHECKING:
    import torch

DEFAULT_WAIT_S = 10.0
DEFAULT_READ_AHEAD = 4


class LMCHybridBackend(LMCBackendInterface):
    """See the module. Thread-safe.

    tiers: the fastest first; they are closed with this one. wait_s: how long a call waits for
    others of the same key: a get for another get, before it loads for itself, a put or a removal
    for the key's lock, before it is given up. read_ahead: how many chunks of a batched call are in
    flight at once, each on a thread of its own, so that one is copied while the next is sent.
    Without blocking a put still waits for the first tier: that is the one to be found in at once.
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
                "a hybrid has at least one tier, wait_s is at least 0, read_ahead at least 1"
            )
        self._tiers = tuple(tiers)
        self._wait_s = wait_s
        self._read_ahead = read_ahead
        self._loads = InflightLoads()
        self._locks: KeyLocks[ObjectKey] = KeyLocks()
        self._closed = False

    # ---------------------------------------------------------------- bytes

    def put_bytes(
        self,
        key: ObjectKey,
        metadata: RemoteMetadata,
        payload: Sequence[memoryview],
        blocking: bool = True,
    ) -> bool:
        """See the interface. Not stored: also where it did not get the lock within `wait_s`."""
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
        """See the interface."""
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
        """See the interface."""
        self._check_open()
        return any(tier.contains(key) for tier in self._tiers)

    def remove(self, key: ObjectKey) -> bool:
        """See the interface. From all tiers, or where it did not get the lock from none: False."""
        self._check_open()
        if not self._lock(key):
            return False
        try:
            removed = [tier.remove(key) for tier in self._tiers]
            return any(removed)
        finally:
            self._end_change(key)

    def list(self) -> builtins.list[ObjectKey]:
        """See the interface. What any tier has, once."""
        self._check_open()
        return [*dict.fromkeys(key for tier in self._tiers for key in tier.list())]

    def flush(self, timeout_s: float) -> bool:
        """See the interface. All tiers."""
        self._check_open()
        deadline = time.monotonic() + timeout_s
        ended = [tier.flush(max(0.0, deadline - time.monotonic())) for tier in self._tiers]
        return all(ended)

    def close(self) -> None:
        """See the interface. All tiers, the first one first."""
        self._closed = True
        with ExitStack() as stack:
            for tier in reversed(self._tiers):
                stack.callback(tier.close)

    # -------------------------------------------------------------- tensors

    def batched_put(
        self, keys_and_chunks: Iterable[tuple[ObjectKey, torch.Tensor]], blocking: bool = True
    ) -> int:
        """`put` for each; several are in flight at once, those of one key in their order.

        After an error, of a chunk or of the caller's iterator, those that were begun are done.
        """
        from lmcache_redis.backends.tensors import tensor_bytes, tensor_metadata

        self._check_open()
        stored = 0
        begun: deque[tuple[ObjectKey, Future[bool]]] = deque()
        with ThreadPoolExecutor(self._read_ahead, "lmcr-hybrid") as pool:
            for key, kv_chunk in keys_and_chunks:
                # Here: its device works in the order of this thread.
                metadata = tensor_metadata(kv_chunk, self.fmt)
                payload = (tensor_bytes(kv_chunk),)
                while len(begun) == self._read_ahead or any(key == other for other, _ in begun):
                    stored += begun.popleft()[1].result()
                put = pool.submit(self.put_bytes, key, metadata, payload, blocking)
                begun.append((key, put))
            return stored + sum(put.result() for _, put in begun)

    def batched_get(self, keys: Iterable[ObjectKey]) -> Iterator[torch.Tensor | None]:
        """`get` for each, in order; a few later ones are loaded while the first are used.

        Where it is abandoned, loads that were begun end on their threads.
        """
        self._check_open()
        return self._get_ahead(iter(keys))

    # --------------------------------------------------------------- inside

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

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the tier is closed")

    def _lock(self, key: ObjectKey) -> bool:
        """Begin a put or a removal; False: others of the key have taken too long."""
        return self._locks.acquire(key, time.monotonic() + self._wait_s, exclusive=True)

    def _end_change(self, key: ObjectKey) -> None:
        """The end of a put or a removal: see the module."""
        self._loads.outdate(key)
        self._locks.release(key)

    def _lead(
        self, load: InflightLoad, key: ObjectKey, once: AllocateOnce
    ) -> RemoteMetadata | None:
        """Load for all who wait."""
        try:
            # The first tier again: it may have got the chunk between our look and our load.
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
        """Take what the leader brings."""
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
        # Not promoted: the leader's promotion is enough, and this load is not told of changes.
        return self._read(key, once)[1]

    def _read(self, key: ObjectKey, once: AllocateOnce) -> tuple[int, RemoteMetadata | None]:
        """From the first tier that has the chunk, and the number of that."""
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
        """Put what was found into the tiers above; whether the first one has it."""
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
