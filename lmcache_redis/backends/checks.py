"""Checks of the caller's buffers, before a backend uses them.

Every backend begins `put_bytes` with `payload_views` and calls `allocate` through
`allocated_views`, so that wrong use is the same error everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lmcache_redis.backends.interface import Allocate
from lmcache_redis.errors import FormatError
from lmcache_redis.protocol import RemoteMetadata


def payload_views(metadata: RemoteMetadata, payload: Iterable[memoryview]) -> list[memoryview]:
    """The payload as views of bytes, the empty ones left out. Copies nothing.

    Raises FormatError for a chunk without bytes, for buffers that together are not
    `metadata.length` bytes, and for one that is not contiguous.
    """
    if not metadata.length:
        raise FormatError("a chunk has at least one byte")
    try:
        views = _byte_views(payload)
    except TypeError as error:
        raise FormatError(f"a payload is contiguous buffers: {error}") from None
    payload_bytes = sum(view.nbytes for view in views)
    if payload_bytes != metadata.length:
        raise FormatError(f"a payload of {payload_bytes} bytes for a chunk of {metadata.length}")
    return views


def allocated_views(metadata: RemoteMetadata, allocate: Allocate) -> list[memoryview] | None:
    """Calls `allocate`; its buffers as writable views of bytes, None where it gave none.

    Raises ValueError for buffers that together are not `metadata.length` bytes, and for one
    that is read-only or not contiguous.
    """
    buffers: Sequence[memoryview] | None = allocate(metadata)
    if buffers is None:
        return None
    try:
        views = _byte_views(buffers)
    except TypeError as error:
        raise ValueError(f"allocate gives contiguous buffers: {error}") from None
    if any(view.readonly for view in views):
        raise ValueError("allocate gave a buffer that is read-only")
    allocated_bytes = sum(view.nbytes for view in views)
    if allocated_bytes != metadata.length:
        raise ValueError(
            f"allocate gave {allocated_bytes} bytes for a chunk of {metadata.length} bytes"
        )
    return views


def _byte_views(buffers: Iterable[memoryview]) -> list[memoryview]:
    # A view with a zero in its shape cannot be cast, and there is nothing in it.
    return [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]


class AllocateOnce:
    """An `Allocate` for several tiers: it asks the caller's once, whatever they begin.

    views: what that gave. is_refused: it had no room.
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
