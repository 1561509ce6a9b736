"""One load for all concurrent readers of a chunk.

The first reader leads; the others follow and wait for it. A put or a removal marks the load as
outdated: it may return the previous chunk, so later readers do not join it.
"""

from __future__ import annotations

import threading

from lmcache_redis.backends.copying import Block
from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import RemoteMetadata


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
    """Thread-safe."""

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
