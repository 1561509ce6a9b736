"""One load for all simultaneous readers of a chunk.

The first reader leads, the others follow and wait for it. A put or a removal makes the load
outdated: it may bring the older chunk, so later readers do not join it.
"""

from __future__ import annotations

import threading

from lmcache_redis.backends.copying import Block
from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import RemoteMetadata


class InflightLoad:
    """What the leader tells its followers, once `ended` is set.

    is_absent: no tier has the chunk. copy: the chunk, where the first tier did not take it.
    Neither: each follower reads for itself, the first tier first.
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
        """The load of a key, and whether it is the caller's to lead."""
        with self._lock:
            load = self._loads.get(key)
            if load is not None:
                load.followers += 1
                return load, False
            load = self._loads[key] = InflightLoad()
            return load, True

    def outdate(self, key: ObjectKey) -> None:
        """The chunk was put or removed: what is being loaded is not what is stored."""
        with self._lock:
            load = self._loads.pop(key, None)
            if load is not None:
                load.is_outdated = True

    def leave(self, key: ObjectKey, load: InflightLoad) -> bool:
        """Ends joining; whether another reader has joined. Idempotent."""
        with self._lock:
            if self._loads.get(key) is load:
                del self._loads[key]
            return load.followers > 0
