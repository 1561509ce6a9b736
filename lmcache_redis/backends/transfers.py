"""One chunk between a tier's caller and the data plane: begun here, waited for later.

The plane answers each by its deadline, on a thread of its own; until then it uses the buffers,
so nobody returns to their owner before that. With the answer the key's turn is given back.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol, TypeVar

from lmcache_redis.backends.slots import Scatter, gathered
from lmcache_redis.backends.turns import Turns
from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import RemoteMetadata
from lmcache_redis.resp import ChunkIO, ReadOutcome, WriteOutcome
from lmcache_redis.stripe import ChunkFrame

ResultT = TypeVar("ResultT", covariant=True)


class Transfer(Protocol[ResultT]):
    """What loads and stores have in common."""

    io: ChunkIO

    def wait(self) -> ResultT:
        """How it ended, once that is decided."""


class Load:
    """A read into buffers of the caller; holds a reader's turn until it is answered."""

    def __init__(
        self,
        turns: Turns[ObjectKey],
        key: ObjectKey,
        chunk_key: bytes,
        frame: ChunkFrame,
        metadata: RemoteMetadata,
        views: Sequence[memoryview],
        deadline: float,
    ) -> None:
        self.key = key
        self.metadata = metadata
        self._turns = turns
        self._scatter = Scatter(views, frame)
        self._is_answered = threading.Event()
        self._is_loaded = False
        self.io = ChunkIO(chunk_key, frame, self._scatter.slots, deadline)

    def answer(self, outcome: ReadOutcome) -> None:
        """The plane's callback."""
        self._is_loaded = outcome is ReadOutcome.LOADED
        self._turns.leave(self.key)
        self._is_answered.set()

    def wait(self) -> RemoteMetadata | None:
        """What was loaded, once that is decided; None: a miss."""
        self._is_answered.wait()
        if not self._is_loaded:
            return None
        self._scatter.finish()
        return self.metadata


class Store:
    """A write from buffers of the caller; holds the writer's turn until it is answered."""

    def __init__(
        self,
        turns: Turns[ObjectKey],
        key: ObjectKey,
        chunk_key: bytes,
        frame: ChunkFrame,
        views: Sequence[memoryview],
        deadline: float,
    ) -> None:
        self._turns = turns
        self._key = key
        self._is_answered = threading.Event()
        self._is_stored = False
        self.io = ChunkIO(chunk_key, frame, gathered(views, frame), deadline)

    def answer(self, outcome: WriteOutcome) -> None:
        """The plane's callback."""
        self._is_stored = outcome is WriteOutcome.STORED
        self._turns.leave(self._key)
        self._is_answered.set()

    def wait(self) -> bool:
        """Whether it was stored, once that is decided."""
        self._is_answered.wait()
        return self._is_stored
