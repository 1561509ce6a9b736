"""Chunks in memory without a copy: a tier lends what it holds, and keeps what was written into it.

For whoever moves payloads between a tier in memory and sockets. What is lent never changes: a
chunk that is replaced, removed or evicted meanwhile lives on, whole, until the last view of it is
gone, and only then is its memory used again. So nothing has to be given back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import RemoteMetadata


@dataclass(frozen=True, slots=True, eq=False)
class Lent:
    """A chunk of a tier. payload: `metadata.length` bytes, read-only."""

    metadata: RemoteMetadata
    payload: memoryview


class Lender(ABC):
    """What a tier in memory can do beside the contract; every call may come from any thread."""

    @abstractmethod
    def borrow(self, key: ObjectKey) -> Lent | None:
        """The chunk, as a get that hits; None where it is not in memory, or not to be lent now.

        Never waits. After None a get may find it all the same.
        """

    @abstractmethod
    def room(self, metadata: RemoteMetadata) -> memoryview | None:
        """Memory to write the payload of a chunk into; None where it would not be kept.

        Never waits. It is the caller's until `keep`, or until the last reference is gone.
        """

    @abstractmethod
    def keep(
        self,
        key: ObjectKey,
        metadata: RemoteMetadata,
        room: memoryview,
        visible: Callable[[], None],
    ) -> bool:
        """Store the chunk that was written into `room`, as a put that blocks, without a copy.

        room: what `room` gave for this metadata; nobody writes to it from now on. visible: called
        once, on this thread, as soon as every get finds the chunk: it may still be on its way to
        tiers below. Not called where the chunk is not stored.
        """
