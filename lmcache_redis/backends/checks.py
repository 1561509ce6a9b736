"""Checks of the caller's buffers before a backend uses them.

Every backend calls `payload_views` first in `put_bytes`, and calls `allocate` only through
`allocated_views`, so that misuse raises the same error everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lmcache_redis.backends.interface import Allocate
from lmcache_redis.errors import FormatError
from lmcache_redis.protocol import RemoteMetadata


def payload_views(metadata: RemoteMetadata, payload: Iterable[memoryview]) -> list[memoryview]:
    """The payload as views of bytes, without empty ones. Copies nothing.

    Raises FormatError if the chunk is empty, if the buffers' total is not `metadata.length` bytes,
    or if a buffer is not contiguous.
    """
    if not metadata.length:
        raise FormatError("a chunk has at least one byte")
    try:
        views = _byte_views(payload)
    except TypeError as error:
        raise FormatError(f"the payload must be contiguous buffers: {error}") from None
    payload_bytes = sum(view.nbytes for view in views)
    if payload_bytes != metadata.length:
        raise FormatError(f"a payload of {payload_bytes} bytes for a chunk of {metadata.length}")
    return views


def allocated_views(metadata: RemoteMetadata, allocate: Allocate) -> list[memoryview] | None:
    """Call `allocate` and return its buffers as writable views of bytes; None if it returns None.

    Raises ValueError if the buffers' total is not `metadata.length` bytes, or if a buffer is
    read-only or not contiguous.
    """
    buffers: Sequence[memoryview] | None = allocate(metadata)
    if buffers is None:
        return None
    try:
        views = _byte_views(buffers)
    except TypeError as error:
        raise ValueError(f"allocate must return contiguous buffers: {error}") from None
    if any(view.readonly for view in views):
        raise ValueError("allocate returned a read-only buffer")
    allocated_bytes = sum(view.nbytes for view in views)
    if allocated_bytes != metadata.length:
        raise ValueError(
            f"allocate returned {allocated_bytes} bytes for a chunk of {metadata.length} bytes"
        )
    return views


def _byte_views(buffers: Iterable[memoryview]) -> list[memoryview]:
    # An empty view is skipped: a view with a zero in its shape cannot be cast.
    return [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]


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
