"""Non-blocking puts: copies of their payloads, bounded in bytes, until they are written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from lmcache_redis.backends.copying import gathered
from lmcache_redis.backends.stripes import StripeSlots
from lmcache_redis.resp.outcomes import ChunkIO, WriteOutcome
from lmcache_redis.stripe import ChunkFrame

WriteDone = Callable[[ChunkIO, WriteOutcome], None]


class PutQueue:
    """Non-blocking puts in flight. Thread-safe; has no thread of its own.

    limit_bytes: of the copies, counted from before a copy is made until its write has ended. write:
    begins a write, and calls its second argument once, on any thread, when the write has ended.
    cancel: ends a write early if that is possible.
    """

    def __init__(
        self,
        limit_bytes: int,
        write: Callable[[ChunkIO, WriteDone], None],
        cancel: Callable[[ChunkIO], None],
    ) -> None:
        self._limit_bytes = limit_bytes
        self._write = write
        self._cancel = cancel
        self._bytes = 0
        self._changed = threading.Condition()
        self._writes: set[ChunkIO] = set()  # waiting or in flight
        self._latest: dict[bytes, ChunkIO] = {}  # those of them that were not dropped, by key

    def add(
        self, key: bytes, frame: ChunkFrame, views: Sequence[memoryview], deadline: float
    ) -> bool:
        """Copy a payload and begin its write. False: there is no room for the copy."""
        with self._changed:
            if self._bytes + frame.chunk_bytes > self._limit_bytes:
                return False
            self._bytes += frame.chunk_bytes
        try:
            copy = gathered(views).data
        except MemoryError:
            self._release(frame.chunk_bytes)
            return False
        chunk = ChunkIO(key, frame, StripeSlots((copy,), frame).slots, deadline)
        # Under the lock, so that two puts of a key are written in the order of their calls.
        with self._changed:
            self.drop(key)
            self._writes.add(chunk)
            self._latest[key] = chunk
            self._write(chunk, self._written)
        return True

    def drop(self, key: bytes) -> bool:
        """Drop the put of a key that is queued or in flight; return whether there was one."""
        with self._changed:
            chunk = self._latest.pop(key, None)
            if chunk is not None:
                self._cancel(chunk)
        return chunk is not None

    def flush(self, timeout_s: float) -> bool:
        """Wait until every put added before has ended; False after the timeout."""
        with self._changed:
            before = set(self._writes)
            return self._changed.wait_for(lambda: before.isdisjoint(self._writes), timeout_s)

    def _written(self, chunk: ChunkIO, _outcome: WriteOutcome) -> None:
        with self._changed:
            self._writes.remove(chunk)
            if self._latest.get(chunk.key) is chunk:
                del self._latest[chunk.key]
            self._release(chunk.frame.chunk_bytes)

    def _release(self, nbytes: int) -> None:
        with self._changed:
            self._bytes -= nbytes
            self._changed.notify_all()
