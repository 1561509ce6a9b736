# SPDX-License-Identifier: Apache-2.0
"""A gateway on a loop of its own thread, over a cache, and a tier that is a dict."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.pool import HostPool
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.chunks.names import ChunkNames
from lmcache_redis.compat.gateway.config import GatewayConfig
from lmcache_redis.compat.gateway.main import LoopOwner, open_objects
from lmcache_redis.compat.gateway.server import Gateway
from lmcache_redis.metrics import Metrics
from lmcache_redis.objects.cache import HeapMemory, ObjectCache
from lmcache_redis.testing.memory_tier import MemoryTier
from lmcache_redis.tier_kinds import REDIS
from lmcache_redis.tiers import (
    Backing,
    CallOutcome,
    ChunkIO,
    Done,
    ExistsResult,
    FramesResult,
    KeysResult,
    PlaneState,
    ReadDone,
    ReadOutcome,
    Tier,
    WriteDone,
    WriteOutcome,
)
from tests.compat.gateway.wire import Client

WAIT_S = 60.0
STRIPE_BYTES = (1 << 20) - 4096
_NAMES = ChunkNames()
_Result = TypeVar("_Result")


class Gate:
    """What passes it waits while it is cleared, and goes on when it is set."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Callable[[], None]] | None = None

    def clear(self) -> None:
        with self._lock:
            self._waiting = []

    def set(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting or [], None
        for action in waiting:
            action()

    def passed(self, action: Callable[[], None]) -> None:
        with self._lock:
            if self._waiting is not None:
                self._waiting.append(action)
                return
        action()


class DictTier(MemoryTier):
    """A tier in memory, without an index, that answers when the test wants.

    Clear `open` to make every call wait, or only writes where `holds_writes_only`. `refuses`: it
    takes nothing. `is_damaged`: no read succeeds. `hangs_next`: the next write is not in time, and
    the tier down (`hangs`) from then on. `error`: what it raises, as no tier should.
    """

    def __init__(self, *, holds_writes_only: bool = False) -> None:
        super().__init__("dict", has_index=False)
        self.open = Gate()
        self.refuses = self.hangs_next = self.hangs = self.is_damaged = False
        self.error: Exception | None = None
        self.writes = 0
        self._holds_writes_only = holds_writes_only

    @property
    def chunks(self) -> dict[ObjectKey, RemoteMetadata]:
        kept = [*self._chunks.items()]
        return {_parsed(key): RemoteMetadata.deserialize(each.frame.metadata) for key, each in kept}

    def add(self, key: ObjectKey) -> None:
        """As somebody else has stored it: a byte."""
        frame = _NAMES.frame(key, RemoteMetadata(1, [], [], MemoryFormat.UNDEFINED), 1)
        io = ChunkIO(_NAMES.chunk_key(key), frame, [memoryview(b"x")], time.monotonic() + WAIT_S)
        super().store_all([io], lambda job, outcome: None)

    @property
    def state(self) -> PlaneState:
        return PlaneState(not self.hangs, True, "")

    def lookup(self, key: bytes) -> bool | None:
        return False if self.hangs else None

    def exists(self, keys: Sequence[bytes], deadline: float, done: Done[ExistsResult]) -> None:
        self._enter(partial(super().exists, keys, time.monotonic() + WAIT_S, done))

    def refresh(
        self,
        chunks: Sequence[tuple[bytes, int]],
        deadline: float,
        done: Done[ExistsResult],
        claim_s: float = 0.0,
    ) -> None:
        """Without claims."""
        self.exists([key for key, _ in chunks], deadline, done)

    def describe(self, keys: Sequence[bytes], deadline: float, done: Done[FramesResult]) -> None:
        self._enter(partial(super().describe, keys, time.monotonic() + WAIT_S, done))

    def load_all(self, jobs: Sequence[ChunkIO], done: ReadDone, /) -> None:
        def damaged(job: ChunkIO, outcome: ReadOutcome) -> None:
            done(job, ReadOutcome.CORRUPT)

        self._enter(partial(super().load_all, jobs, damaged if self.is_damaged else done))

    def store_all(self, jobs: Sequence[ChunkIO], done: WriteDone, /) -> None:
        self.writes += len(jobs)
        if self.hangs_next or self.refuses:
            outcome = WriteOutcome.REJECTED if self.refuses else WriteOutcome.TIMED_OUT
            self.hangs_next, self.hangs = False, self.hangs or self.hangs_next
            for job in jobs:
                done(job, outcome)
            return
        self._enter(partial(super().store_all, jobs, done), is_write=True)

    def keys(self, prefix: bytes, deadline: float, limit: int) -> KeysResult:
        answered = threading.Event()
        self._enter(answered.set)
        if not answered.wait(min(WAIT_S, deadline - time.monotonic())):
            return KeysResult(CallOutcome.TIMED_OUT, [])
        return super().keys(prefix, deadline, limit)

    def close(self, deadline_s: float) -> bool:
        self.open.set()
        return True

    def _enter(self, action: Callable[[], None], is_write: bool = False) -> None:
        if self.error is not None:
            raise self.error
        if self._holds_writes_only and not is_write:
            action()
        else:
            self.open.passed(action)


def _parsed(key: bytes) -> ObjectKey:
    parsed = _NAMES.parse(key)
    assert parsed is not None
    return parsed


def cache_over(config: GatewayConfig, tiers: Sequence[Tier]) -> ObjectCache:
    """A cache of its memory over these tiers, owned by the running loop."""
    backings = [Backing(tier, REDIS, 1 << 40) for tier in tiers]
    memory = HeapMemory(spare_bytes=64 << 20)
    cache = Cache(LoopOwner(), memory, backings, Metrics(), idle_limit=config.memory_bytes)
    return ObjectCache(cache, _NAMES, STRIPE_BYTES, 5.0)


class Serving:
    """A started gateway; ends it at the end of the block, and says when something was lost.

    tiers: behind the memory, if there is some; None: those that the settings name.
    """

    def __init__(
        self,
        tiers: Tier | Sequence[Tier] | None,
        **settings: Any,
    ) -> None:
        settings = {
            "listen": "lm://127.0.0.1:0", "buffer_bytes": 1 << 21, "shutdown_deadline_s": 2.0,
            "memory_bytes": 0, "disk_path": "a tier", **settings,
        }  # fmt: skip
        config = GatewayConfig(**settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._cache: ObjectCache | None = None
        self._stopped = False
        try:
            self.run(self._start(config, tiers))
        except BaseException:
            self._end_loop()
            raise
        self.port = self.gateway.address[1]

    async def _start(self, config: GatewayConfig, tiers: Tier | Sequence[Tier] | None) -> None:
        if tiers is None:
            self.cache = open_objects(config)
        else:
            self.cache = cache_over(config, tiers if isinstance(tiers, Sequence) else [tiers])
        self._cache = self.cache
        self.gateway = Gateway(self.cache, config)
        await self.gateway.start()

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def stop(self) -> None:
        self._stopped = True
        self.run(self.gateway.stop())

    def client(self, **more: Any) -> Client:
        return Client(self.port, **more)

    @contextlib.contextmanager
    def clients(self, count: int) -> Iterator[list[Client]]:
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(self.client()) for _ in range(count)]

    def call(self, function: Callable[..., _Result], *args: object) -> _Result:
        """Calls it on the thread of the loop, which owns the cache."""

        async def work() -> _Result:
            return function(*args)

        return self.run(work())

    def stats(self) -> dict[str, int]:
        return self.gateway.stats()

    def until(self, **expected: int) -> None:
        """Waits until these figures are as expected."""
        deadline_s = time.monotonic() + WAIT_S
        while (stats := self.stats()) | expected != stats:
            assert time.monotonic() < deadline_s, (expected, stats)
            time.sleep(0.005)

    def __enter__(self) -> Serving:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if not self._stopped:
                self.stop()
            if error is None:
                self.until(buffer_used_bytes=0, open_connections=0)
                self._close_cache()
                assert self.pool.pinned == 0
        finally:
            self._end_loop()

    @property
    def pool(self) -> HostPool:
        """Where the cache has its chunks."""
        return self.cache.cache.pool

    def _close_cache(self) -> None:
        cache, self._cache = self._cache, None
        if cache is not None:
            self.call(cache.close, 1.0)
            self.call(lambda: None)  # after what the tiers posted at their end

    def _end_loop(self) -> None:
        self._close_cache()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()
