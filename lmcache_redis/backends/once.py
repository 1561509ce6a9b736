"""The buffers of one get that asks several tiers."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_redis.backends.checks import allocated_views
from lmcache_redis.backends.interface import Allocate
from lmcache_redis.protocol import RemoteMetadata


class Once:
    """An `Allocate` that asks the caller's once, whatever tiers begin and do not finish.

    views: what it gave. is_refused: it had no room.
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
            # A tier below has another chunk than the one that could not be finished.
            return None
        return None if self.is_refused else self.views
