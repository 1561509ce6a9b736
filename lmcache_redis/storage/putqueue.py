"""Puts that nobody waits for: copied at once, stored in their order by one worker thread.

The copies are bounded in bytes, from when one is begun to when it is stored or dropped; a put
that does not fit beside those that wait is refused. Of one key at most one put waits: a later
one drops it. The worker asks `QueuedPut.dropped` once more when what it stored is about to be
found, in the same moment in which a put or remove that came later changes what is found: see
`PutQueue.drop`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import RemoteMetadata
from lmcache_redis.storage.copying import Block, gathered

logger = logging.getLogger(__name__)


class QueuedPut:
    """A chunk that was accepted. dropped: it is not wanted any more. block: None once let go."""

    __slots__ = ("block", "dropped", "key", "metadata")

    def __init__(self, key: ObjectKey, metadata: RemoteMetadata, block: Block) -> None:
        self.key = key
        self.metadata = metadata
        self.block: Block | None = block
        self.dropped = False


class PutQueue:
    """Thread-safe. store: called by the worker for each put, answers for its own failures.

    limit_bytes: payload that may wait or be on its way at once.
    """

    def __init__(
        self, store: Callable[[QueuedPut, Block], object], limit_bytes: int, thread_name: str
    ) -> None:
        self._store = store
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition(threading.Lock())
        self._waiting: deque[QueuedPut] = deque()
        self._latest: dict[ObjectKey, QueuedPut] = {}  # waiting or under way
        self._under_way: QueuedPut | None = None
        self._bytes = 0
        self._accepted = self._ended = 0
        self._closed = False
        self._worker = threading.Thread(target=self._run, name=thread_name, daemon=True)
        self._worker.start()

    def offer(self, key: ObjectKey, metadata: RemoteMetadata, views: Sequence[memoryview]) -> bool:
        """Copy the payload and accept the put. False: no room, or closed meanwhile."""
        with self._changed:
            if self._closed or self._bytes + metadata.length > self._limit_bytes:
                return False
            self._bytes += metadata.length
        try:
            put = QueuedPut(key, metadata, gathered(views))
        except MemoryError:
            with self._changed:
                self._bytes -= metadata.length
            return False
        with self._changed:
            if self._closed:
                return False
            self._drop(key)
            self._latest[key] = put
            self._waiting.append(put)
            self._accepted += 1
            self._changed.notify_all()
        return True

    def drop(self, key: ObjectKey) -> bool:
        """Drop the put of a key that waits or is under way; whether there was one.

        One under way may still be found for a moment. So call this first, then change what is
        found under the lock under which `store` looks at `dropped`: whatever the put did there
        before comes before that change, and afterwards it does nothing.
        """
        with self._changed:
            return self._drop(key)

    def _drop(self, key: ObjectKey) -> bool:
        put = self._latest.pop(key, None)
        if put is None:
            return False
        put.dropped = True
        if put is not self._under_way:
            self._let_go(put)
        return True

    def _let_go(self, put: QueuedPut) -> None:
        if put.block is not None:
            put.block = None
            self._bytes -= put.metadata.length

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was accepted before has ended; False if that takes longer."""
        with self._changed:
            accepted = self._accepted
            return self._changed.wait_for(lambda: self._ended >= accepted, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Flush for so long, drop the rest and end the worker. False: it is stuck in a put.

        The worker then gets as long again before it is left to end by itself.
        """
        self.flush(timeout_s)
        with self._changed:
            self._closed = True
            for put in self._waiting:
                put.dropped = True
                self._let_go(put)
            self._changed.notify_all()
        self._worker.join(timeout_s)
        return not self._worker.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                put = self._under_way = self._waiting.popleft()
                block = None if put.dropped else put.block
            if block is not None:
                try:
                    self._store(put, block)
                except Exception:
                    # A bug of a tier must not end the thread that its flush waits for.
                    logger.exception("a put that nobody waits for failed")
            with self._changed:
                self._under_way = None
                self._let_go(put)
                if self._latest.get(put.key) is put:
                    del self._latest[put.key]
                self._ended += 1
                self._changed.notify_all()
            # Not kept until the next put comes.
            del put, block
