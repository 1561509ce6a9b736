"""Loads in flight: watchers, pins and cancellation."""

from __future__ import annotations

from lmcache_redis.cache.inflight import Filled, InflightLoads
from lmcache_redis.cache.pool import HostPool
from tests.cache.auditing import audit, slots


def test_a_load_tells_all_watchers_and_keeps_their_pins() -> None:
    pool = HostPool(slots(4))
    inflight = InflightLoads(pool)
    entry = inflight.begin(b"key", 2)
    assert entry is not None
    assert inflight.begin(b"other", 3) is None
    told: list[tuple[str, Filled]] = []
    for name in "ab":
        pool.pin(entry)
        inflight.watch(entry, lambda ready, name=name: told.append((name, ready)))  # type: ignore[misc]
    assert inflight.end(entry, Filled.READY)
    assert told == [("a", Filled.READY), ("b", Filled.READY)]
    assert pool.pinned == 2
    pool.unpin(entry)
    pool.unpin(entry)
    assert pool.pinned == 0
    assert pool.used == 2
    audit(pool)


def test_a_load_that_fails_leaves_the_pool_when_the_last_pin_goes() -> None:
    pool = HostPool(slots(4))
    inflight = InflightLoads(pool)
    entry = inflight.begin(b"key", 2)
    assert entry is not None
    pool.pin(entry)
    inflight.watch(entry, lambda ready: pool.unpin(entry))
    assert not inflight.end(entry, Filled.FAILED)
    assert pool.free == 4
    assert b"key" not in pool
    audit(pool)


def test_a_load_without_watchers_is_cancelled() -> None:
    pool = HostPool(slots(4))
    inflight = InflightLoads(pool)
    entry = inflight.begin(b"key", 2)
    assert entry is not None
    cancelled: list[bool] = []
    inflight.on_abandoned(entry, lambda: cancelled.append(True))
    watchers = [lambda ready: None, lambda ready: None]
    for watcher in watchers:
        inflight.watch(entry, watcher)
    inflight.unwatch(entry, watchers[0])
    assert not cancelled
    inflight.unwatch(entry, watchers[1])
    inflight.unwatch(entry, watchers[1])
    assert cancelled == [True]
    inflight.end(entry, Filled.FAILED)
    audit(pool)
