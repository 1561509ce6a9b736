"""A thread that owns an `ObjectCache`, and asynchronous calls to it as futures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from lmcache_redis.cache.backing import Backing
from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.threads import Action, OwnerLoop
from lmcache_redis.chunks.metadata import MAX_SIZE
from lmcache_redis.chunks.names import ChunkNames
from lmcache_redis.compat.heap import HeapMemory
from lmcache_redis.compat.objects import ObjectCache
from lmcache_redis.metrics import Metrics

ResultT = TypeVar("ResultT")

# Beyond the time for writes: tiers that hang have ended their calls by then.
_JOIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Storage:
    """What a backend keeps chunks in, and how long its calls may take.

    memory_bytes: payload that stays in memory, above the tiers. tiers: the fastest first.
    stripe_bytes: the largest payload of a stripe that is written. queue_bytes: payload of
    non-blocking puts that have not ended; a put beyond it is refused. deadline_s,
    list_deadline_s: of a call and the write of a put, and of a `list`.
    """

    deadline_s: float
    list_deadline_s: float
    queue_bytes: int
    names: ChunkNames
    memory_bytes: int = 0
    tiers: tuple[Backing, ...] = ()
    stripe_bytes: int = MAX_SIZE


class CacheThread:
    """A thread that owns an `ObjectCache`. Thread-safe."""

    def __init__(self, storage: Storage) -> None:
        self._woken = threading.Event()
        self._loop = OwnerLoop(self._woken.set)
        memory = HeapMemory()
        cache = Cache(self._loop, memory, storage.tiers, Metrics(), storage.memory_bytes)
        self.objects = ObjectCache(cache, storage.names, storage.stripe_bytes, storage.deadline_s)
        self._lock = threading.Lock()
        self._calls: set[Future[Any]] = set()
        self._is_closed = self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="lmcr-cache", daemon=True)
        self._thread.start()

    def call(self, begin: Callable[[Callable[[ResultT], None]], None]) -> Future[ResultT]:
        """The result of an asynchronous call to the cache: what it passes to its `done`.

        begin: the call without its `done`. Raises RuntimeError after `close`.
        """
        future: Future[ResultT] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the backend is closed")
            self._calls.add(future)

        def done(result: ResultT) -> None:
            self._calls.discard(future)
            future.set_result(result)

        def run() -> None:
            try:
                begin(done)
            except Exception as error:
                if future.done():
                    raise
                self._calls.discard(future)
                future.set_exception(error)

        self._loop.post(run)
        return future

    def get(self, read: Callable[[], ResultT]) -> Future[ResultT]:
        """The result of a function, called on the thread."""
        return self.call(lambda done: done(read()))

    def post(self, action: Action) -> None:
        """Runs the action on the thread, unless that has ended."""
        self._loop.post(action)

    def close(self, timeout_s: float) -> None:
        """Writes have this time to end. Calls that remain unanswered raise RuntimeError."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            self._loop.post(partial(self._close, timeout_s))
        self._thread.join(timeout_s + _JOIN_S)

    def _run(self) -> None:
        while not self._has_ended:
            self._woken.wait(self._loop.run_due())
            self._woken.clear()
            self._loop.run_posted()
        self._loop.run_posted()  # what the tiers posted when they closed
        for future in list(self._calls):
            future.set_exception(RuntimeError("the backend is closed"))
        self.objects.cache.pool.clear()

    def _close(self, timeout_s: float) -> None:
        self._has_ended = True
        self.objects.close(timeout_s)
