# SPDX-License-Identifier: Apache-2.0
"""Objects over a real directory and a real Redis, and the tiers' `describe`, `keys`, `remove`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.disk.tier import DiskTier
from lmcache_redis.cache.threads import OwnerLoop
from lmcache_redis.chunks.names import ChunkNames
from lmcache_redis.metrics import Metrics
from lmcache_redis.objects.cache import Found, HeapMemory, ObjectCache
from lmcache_redis.resp import RedisOptions, RedisPlane
from lmcache_redis.tier_kinds import DISK
from lmcache_redis.tiers import (
    Backing,
    CallOutcome,
    FramesResult,
    RemoveResult,
    Tier,
)
from tests.cache.played import run_until
from tests.objects.test_objects import key_of, metadata_of
from tests.servers import RedisServer

STRIPE_BYTES = 4096
NAMES = ChunkNames()
SIZES = (1, 4096, 4097, 100_000)


class Objects:
    """An object cache on the test's own loop. keeps: the idle limit in bytes."""

    def __init__(self, *tiers: Tier, keeps: int = 1 << 30) -> None:
        self.loop = OwnerLoop(lambda: None)
        backings = [Backing(tier, DISK, 1 << 30) for tier in tiers]
        self.cache = Cache(self.loop, HeapMemory(), backings, Metrics(), keeps)
        self.objects = ObjectCache(self.cache, NAMES, STRIPE_BYTES, 5.0)

    def ask(self, call: Callable[..., None], *args: Any) -> Any:
        """The answer of a call that takes a deadline and `done`."""
        answers: list[Any] = []
        call(*args, time.monotonic() + 10, answers.append)
        run_until(self.loop, lambda: answers)
        return answers[0]

    def put(self, number: int, payload: bytes) -> bool:
        held = self.objects.reserve(key_of(number), metadata_of(len(payload)))
        assert held is not None
        held.payload[:] = payload
        written: list[bool] = []
        self.objects.publish(key_of(number), held, written.append)
        run_until(self.loop, lambda: written)
        return written[0]

    def get(self, number: int) -> bytes | None:
        held = self.objects.hold(key_of(number))
        if held is None:
            found: Found | None = self.ask(self.objects.find, key_of(number))
            if found is None:
                return None
            held = self.ask(self.objects.load, key_of(number), found)
        if held is None:
            return None
        payload = bytes(held.payload)
        self.objects.release(held)
        return payload

    def close(self) -> None:
        assert self.objects.close(5.0)
        self.loop.run_posted()
        assert self.cache.pool.pinned == 0


def redis_tier(server: RedisServer) -> RedisPlane:
    plane = RedisPlane(RedisOptions(server.url))
    plane.start()
    assert plane.wait_probed(10).up
    return plane


@pytest.fixture(params=["disk", pytest.param("Redis", marks=pytest.mark.servers)])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    if request.param == "disk":
        yield DiskTier(tmp_path, 1 << 30, read_threads=1, write_threads=3, write_nice=0)
    else:
        yield redis_tier(request.getfixturevalue("server"))


def test_what_a_tier_says_of_its_chunks(tier: Tier) -> None:
    objects = Objects(tier)
    objects.put(1, bytes(10_000))
    one, two = NAMES.chunk_key(key_of(1)), NAMES.chunk_key(key_of(2))
    result: FramesResult = objects.ask(tier.describe, [one, two])
    frame = NAMES.frame(key_of(1), metadata_of(10_000), 3392)
    assert result == FramesResult(CallOutcome.DONE, [frame, None])
    assert tier.keys(NAMES.common, time.monotonic() + 10, 9) == (CallOutcome.DONE, [one])
    assert tier.keys(one, time.monotonic() + 10, 9) == (CallOutcome.DONE, [one])
    assert tier.keys(two, time.monotonic() + 10, 9) == (CallOutcome.DONE, [])
    assert tier.keys(one, time.monotonic() + 10, 0).outcome is CallOutcome.OVER_LIMIT
    objects.cache.pool.clear()
    counted: RemoveResult = objects.ask(tier.remove, one)
    assert counted[:2] == (CallOutcome.DONE, 3 if tier.name == "Redis" else 1)
    counted = objects.ask(tier.remove, one)
    assert counted[:2] == (CallOutcome.DONE, 0)
    assert tier.keys(NAMES.common, time.monotonic() + 10, 9) == (CallOutcome.DONE, [])
    objects.close()


@pytest.mark.servers
def test_a_wrong_chunk_leaves_memory_and_every_tier(tmp_path: Path, server: RedisServer) -> None:
    """Whoever holds it keeps its bytes. The tiers' watchers are told."""
    objects = Objects(DiskTier(tmp_path, 1 << 30), redis_tier(server))
    key = NAMES.chunk_key(key_of(1))
    for found_in in ("memory", "Redis alone"):
        assert objects.put(1, b"abc" * 10_000)
        held = objects.objects.hold(key_of(1))
        assert held is not None
        if found_in == "Redis alone":
            objects.cache.pool.clear()
        changes: list[Any] = []
        objects.cache.pool.on_change = lambda *change, told=changes: told.append(change)
        objects.cache.remove(key)
        gone = {(key, 0, False), (key, 1, False)}
        run_until(objects.loop, lambda gone=gone, told=changes: gone <= {*told})
        assert objects.get(1) is None
        assert not objects.ask(objects.objects.contains, key_of(1))
        assert bytes(held.payload) == b"abc" * 10_000
        objects.objects.release(held)
    assert objects.put(1, b"new")
    assert objects.get(1) == b"new"
    objects.close()
