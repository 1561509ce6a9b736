"""Puts that nobody waits for: copies in memory of the tier, bounded, on their way to Redis.

A put that was accepted is written when its key's turn comes (puts of one key in their order,
never while somebody reads it), by its deadline, or is dropped: the server failed, or somebody
removed the key. What does not fit beside those that are still on their way is not accepted.
There is no thread: each is begun by whoever ends what it waited for, and written by the plane.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

from lmcache_redis.backends.copying import Block
from lmcache_redis.backends.copying import gathered as in_new_memory
from lmcache_redis.backends.slots import gathered
from lmcache_redis.backends.turns import Turns
from lmcache_redis.keys import ObjectKey
from lmcache_redis.resp import ChunkIO, RedisPlane, WriteOutcome
from lmcache_redis.stripe import ChunkFrame


class PendingPut:
    """One accepted put. io: what the plane was given, once it was."""

    __slots__ = ("chunk_key", "deadline", "dropped", "frame", "io", "key", "payload")

    def __init__(
        self, key: ObjectKey, chunk_key: bytes, frame: ChunkFrame, payload: Block, deadline: float
    ) -> None:
        self.key = key
        self.chunk_key = chunk_key
        self.frame = frame
        self.payload = payload
        self.deadline = deadline
        self.dropped = False
        self.io: ChunkIO | None = None


class PendingPuts:
    """Thread-safe. max_bytes: of payloads that are on their way."""

    def __init__(self, plane: RedisPlane, turns: Turns[ObjectKey], max_bytes: int) -> None:
        self._plane = plane
        self._turns = turns
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._bytes = 0
        self._puts: dict[ObjectKey, list[PendingPut]] = {}
        self._closed = False

    def add(
        self,
        key: ObjectKey,
        chunk_key: bytes,
        frame: ChunkFrame,
        views: Sequence[memoryview],
        deadline: float,
    ) -> bool:
        """Accept a put; False: there is no room. The views are the caller's again."""
        with self._changed:
            if self._closed or self._bytes + frame.chunk_bytes > self._max_bytes:
                return False
            self._bytes += frame.chunk_bytes
        try:
            put = PendingPut(key, chunk_key, frame, in_new_memory(views), deadline)
        except MemoryError:
            with self._changed:
                self._bytes -= frame.chunk_bytes
            return False
        with self._changed:
            self._puts.setdefault(key, []).append(put)
        self._turns.enter_later(key, lambda: self._start(put))
        return True

    def drop(self, key: ObjectKey) -> bool:
        """Drop what is on its way for a key; whether anything was. Its turn is still to come."""
        with self._changed:
            puts = list(self._puts.get(key, ()))
            for put in puts:
                put.dropped = True
                if put.io is not None:
                    self._plane.cancel(put.io)
        return bool(puts)

    def flush(self, timeout_s: float) -> bool:
        """Wait until every put that was accepted before is stored or dropped."""
        with self._changed:
            before = {put for puts in self._puts.values() for put in puts}

            def done() -> bool:
                return not any(put in before for puts in self._puts.values() for put in puts)

            return self._changed.wait_for(done, timeout_s)

    def close(self) -> None:
        """Begin none from now on; those the plane has, it answers."""
        with self._changed:
            self._closed = True

    def _start(self, put: PendingPut) -> bool:
        """Its turn has come: False gives it back. On any thread, also on one of the plane."""
        with self._changed:
            # Under the lock: after `close` the plane gets nothing more.
            if not put.dropped and not self._closed and time.monotonic() < put.deadline:
                slots = gathered((put.payload.data,), put.frame)
                put.io = ChunkIO(put.chunk_key, put.frame, slots, put.deadline)
                self._plane.write(put.io, partial(self._written, put))
                return True
        self._forget(put)
        return False

    def _written(self, put: PendingPut, _io: ChunkIO, _outcome: WriteOutcome) -> None:
        """On a thread of the plane."""
        self._forget(put)
        self._turns.leave(put.key)

    def _forget(self, put: PendingPut) -> None:
        with self._changed:
            self._bytes -= put.frame.chunk_bytes
            puts = self._puts[put.key]
            puts.remove(put)
            if not puts:
                del self._puts[put.key]
            self._changed.notify_all()
