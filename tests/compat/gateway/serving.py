# SPDX-License-Identifier: Apache-2.0
"""A gateway on a loop of its own thread, over a cache, and a tier that is a dict."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.pool import HostPool
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import RemoteMetadata
from lmcache_redis.chunks.names import ChunkNames
from lmcache_redis.compat.gateway.config import GatewayConfig
from lmcache_redis.compat.gateway.main import LoopOwner, open_objects
from lmcache_redis.compat.gateway.server import Gateway
from lmcache_redis.compat.gateway.wire import object_key_of
from lmcache_redis.metrics import Metrics
from lmcache_redis.objects.cache import HeapMemory, ObjectCache
from lmcache_redis.tier_kinds import REDIS
from lmcache_redis.tiers import (
    Backing,
    CallOutcome,
    ChunkIO,
    ExistsResult,
    FramesResult,
    KeysResult,
    PlaneState,
    ReadDone,
    ReadOutcome,
    RemoveResult,
    ScanResult,
    Tier,
    TierPlace,
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


class DictTier:
    """A tier that keeps chunks in a dict, without an index.

    Clear `open` to make every call wait, or only writes where `holds_writes_only`. `refuses`: it
    takes nothing. `damaged`: no read succeeds. `hangs_next`: the next write is not in time, and
    the tier down (`hangs`) from then on. `error`: what it raises, as no tier should.
    """

    name = "dict"

    def __init__(self, *, holds_writes_only: bool = False) -> None:
        self.chunks: dict[ObjectKey, tuple[RemoteMetadata, bytes]] = {}
        self.open = Gate()
        self.refuses = self.hangs_next = self.hangs = self.damaged = False
        self.error: Exception | None = None
        self.writes = 0
        self._holds_writes_only = holds_writes_only

    @property
    def state(self) -> PlaneState:
        return PlaneState(not self.hangs, True, "")

    @property
    def place(self) -> TierPlace:
        return TierPlace(self.name)

    def lookup(self, key: bytes) -> bool | None:
        return False if self.hangs else None

    def scan(
        self, keys: Sequence[bytes], deadline: float, done: Callable[[ScanResult], None]
    ) -> None:
        raise AssertionError("a gateway looks for no prefixes")

    def exists(
        self, keys: Sequence[bytes], deadline: float, done: Callable[[ExistsResult], None]
    ) -> None:
        def answer() -> None:
            done(ExistsResult(CallOutcome.DONE, [_parsed(key) in self.chunks for key in keys]))

        self._enter(answer)

    def refresh(
        self,
        chunks: Sequence[tuple[bytes, int]],
        deadline: float,
        done: Callable[[ExistsResult], None],
        claim_s: float = 0.0,
    ) -> None:
        self.exists([key for key, _ in chunks], deadline, done)

    def unclaim(self, keys: Sequence[bytes]) -> None:
        pass

    def describe(
        self, keys: Sequence[bytes], deadline: float, done: Callable[[FramesResult], None]
    ) -> None:
        def answer() -> None:
            frames = []
            for key in map(_parsed, keys):
                found = self.chunks.get(key)
                frames.append(found and _NAMES.frame(key, found[0], max(1, found[0].length)))
            done(FramesResult(CallOutcome.DONE, frames))

        self._enter(answer)

    def load_all(self, jobs: Sequence[ChunkIO], done: ReadDone) -> None:
        def read(job: ChunkIO) -> None:
            job.check(writable=True)
            key = _parsed(job.key)
            if self.damaged:
                return done(job, ReadOutcome.CORRUPT)
            if key not in self.chunks:
                return done(job, ReadOutcome.MISSING)
            metadata, data = self.chunks[key]
            if metadata.serialize() != job.frame.metadata:
                return done(job, ReadOutcome.FOREIGN)
            for slot in job.slots:
                slot[:], data = data[: len(slot)], data[len(slot) :]
            done(job, ReadOutcome.LOADED)

        self._enter(lambda: [read(job) for job in jobs])

    def store_all(self, jobs: Sequence[ChunkIO], done: WriteDone) -> None:
        def write(job: ChunkIO) -> None:
            job.check(writable=False)
            if self.refuses:
                return done(job, WriteOutcome.REJECTED)
            metadata = RemoteMetadata.deserialize(job.frame.metadata)
            self.chunks[_parsed(job.key)] = metadata, b"".join(job.slots)
            done(job, WriteOutcome.STORED)

        self.writes += len(jobs)
        if self.hangs_next:
            self.hangs_next, self.hangs = False, True
            for job in jobs:
                done(job, WriteOutcome.TIMED_OUT)
            return
        self._enter(lambda: [write(job) for job in jobs], is_write=True)

    def cancel(self, job: ChunkIO) -> None:
        pass

    def remove(
        self,
        key: bytes,
        deadline: float,
        done: Callable[[RemoveResult], None],
        stripe_count: int = 0,
        newest_unix_ms: int | None = None,
    ) -> None:
        removed = self.chunks.pop(_parsed(key), None)
        done(RemoveResult(CallOutcome.DONE, removed is not None))

    def keys(self, prefix: bytes, deadline: float, limit: int) -> KeysResult:
        answered = threading.Event()
        self._enter(answered.set)
        if not answered.wait(min(WAIT_S, deadline - time.monotonic())):
            return KeysResult(CallOutcome.TIMED_OUT, [])
        keys = [_NAMES.chunk_key(key) for key in [*self.chunks]]
        if len(keys) > limit:
            return KeysResult(CallOutcome.OVER_LIMIT, keys[:limit])
        return KeysResult(CallOutcome.DONE, keys)

    def clear(
        self, key_prefixes: Sequence[bytes], deadline: float, done: Callable[[RemoveResult], None]
    ) -> None:
        raise AssertionError("a gateway clears nothing")

    def close(self, deadline_s: float) -> bool:
        self.open.set()
        return True

    def _enter(self, action: Callable[[], object], is_write: bool = False) -> None:
        if self.error is not None:
            raise self.error
        if self._holds_writes_only and not is_write:
            action()
        else:
            self.open.passed(lambda: (action(), None)[1])


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

    def call(self, function: Callable[..., _Result], *args: object) -> _Result:
        """Calls it on the thread of the loop, which owns the cache."""

        async def work() -> _Result:
            return function(*args)

        return self.run(work())

    def remove(self, key: str) -> bool:
        """Removes a chunk behind the gateway's back."""

        async def work() -> bool:
            removed: asyncio.Future[bool] = self._loop.create_future()
            deadline = time.monotonic() + WAIT_S
            self.cache.remove(object_key_of(key), deadline, removed.set_result)
            return await removed

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
