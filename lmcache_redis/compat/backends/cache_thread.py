"""A thread that owns an `ObjectCache`, and asynchronous calls to it as futures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from lmcache_redis.cache.threads import OwnerLoop
from lmcache_redis.compat.backends.storage import ChunkStorage, open_cache
from lmcache_redis.compat.heap import HeapMemory
from lmcache_redis.compat.objects import HeldChunk
from lmcache_redis.tiers import Done

ResultT = TypeVar("ResultT")

# Beyond the time for writes: tiers that hang have ended their calls by then.
_JOIN_S = 10.0


class CacheThread:
    """Owns the `ObjectCache` of a backend's storages, the fastest first. Thread-safe.

    Raises ConfigError for storages that cannot be opened, or not together.
    """

    def __init__(self, storages: Sequence[ChunkStorage]) -> None:
        with_tiers = [each for each in storages if each.open_tier is not None]
        self.deadline_s = min((each.deadline_s for each in with_tiers or storages), default=0.0)
        self._woken = threading.Event()
        self._loop = OwnerLoop(self._woken.set)
        self.objects = open_cache(storages, self._loop, HeapMemory(), self.deadline_s)
        self._lock = threading.Lock()
        self._calls: set[Future[Any]] = set()
        self._has_ended = False
        self.is_closed = False
        self._thread = threading.Thread(target=self._run, name="lmcr-cache", daemon=True)
        self._thread.start()

    @property
    def calls(self) -> set[Future[Any]]:
        """Those that have not ended."""
        return set(self._calls)

    def call(self, begin: Callable[[Done[ResultT]], None]) -> Future[ResultT]:
        """The result of an asynchronous call to the cache: what it passes to its `done`.

        begin: the call without its `done`. Raises RuntimeError after `close`.
        """
        future: Future[ResultT] = Future()
        with self._lock:
            if self.is_closed:
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

    def release(self, held: HeldChunk | None) -> None:
        """Unpins a chunk that a get has found."""
        if held is not None:
            self._loop.post(partial(self.objects.release, held))

    def abandon(self, held: HeldChunk | None) -> None:
        """Frees memory that was reserved for a put."""
        if held is not None:
            self._loop.post(partial(self.objects.abandon, held))

    def close(self, timeout_s: float) -> None:
        """Calls have this time to end, and writes as much again; those that do not raise.

        Idempotent.
        """
        with self._lock:
            was_closed, self.is_closed = self.is_closed, True
        if not was_closed:
            wait(self.calls, timeout_s)
            self._loop.post(partial(self._close, timeout_s))
        self._thread.join(timeout_s + _JOIN_S)

    def _run(self) -> None:
        while not self._has_ended:
            self._woken.wait(self._loop.run_due())
            self._woken.clear()
            self._loop.run_posted()
        self._loop.run_posted()  # what the tiers posted when they closed
        for future in self.calls:
            future.set_exception(RuntimeError("the backend is closed"))
        self.objects.cache.pool.clear()

    def _close(self, timeout_s: float) -> None:
        self._has_ended = True
        self.objects.close(timeout_s)
