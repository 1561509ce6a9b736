"""The agent's parts by themselves: timers, fills, sessions."""

from __future__ import annotations

import time

import pytest

from lmcache_redis.agent import sessions as sessions_module
from lmcache_redis.agent.fills import Fills
from lmcache_redis.agent.sessions import Sessions
from lmcache_redis.agent.timers import Timers
from lmcache_redis.errors import WireError
from lmcache_redis.hostpool import HostPool


def test_timers_run_in_order_and_only_when_due() -> None:
    timers, ran = Timers(), []
    now = time.monotonic()
    timers.at(now - 1, lambda: ran.append("second"))
    timers.at(now - 2, lambda: ran.append("first"))
    cancelled = timers.at(now - 3, lambda: ran.append("never"))
    later = timers.after(100, lambda: ran.append("later"))
    cancelled.cancel()
    assert timers.run_due() == 1.0
    assert ran == ["first", "second"]
    later.cancel()
    timers.at(time.monotonic() + 0.5, lambda: None)
    assert 0 < timers.run_due() <= 0.5


def test_a_fill_tells_all_watchers_and_keeps_their_pins() -> None:
    pool = HostPool(4)
    fills = Fills(pool)
    entry = fills.begin(b"key", 2)
    assert entry is not None
    assert fills.begin(b"other", 3) is None
    told: list[tuple[str, bool]] = []
    for name in "ab":
        pool.pin(entry)
        fills.watch(entry, lambda ready, name=name: told.append((name, ready)))  # type: ignore[misc]
    assert fills.end(entry, filled=True)
    assert told == [("a", True), ("b", True)]
    assert pool.pinned_slots == 2
    pool.unpin(entry)
    pool.unpin(entry)
    assert pool.pinned_slots == 0
    assert pool.used_slots == 2
    pool.audit()


def test_a_fill_that_fails_leaves_the_pool_when_the_last_pin_goes() -> None:
    pool = HostPool(4)
    fills = Fills(pool)
    entry = fills.begin(b"key", 2)
    assert entry is not None
    pool.pin(entry)
    fills.watch(entry, lambda ready: pool.unpin(entry))
    assert not fills.end(entry, filled=False)
    assert pool.free_slots == 4
    assert b"key" not in pool
    pool.audit()


def test_a_fill_that_nobody_watches_any_more_is_cancelled() -> None:
    pool = HostPool(4)
    fills = Fills(pool)
    entry = fills.begin(b"key", 2)
    assert entry is not None
    cancelled: list[bool] = []
    fills.on_abandoned(entry, lambda: cancelled.append(True))
    watchers = [lambda ready: None, lambda ready: None]
    for watcher in watchers:
        fills.watch(entry, watcher)
    fills.unwatch(entry, watchers[0])
    assert not cancelled
    fills.unwatch(entry, watchers[1])
    fills.unwatch(entry, watchers[1])
    assert cancelled == [True]
    fills.end(entry, filled=False)
    pool.audit()


def test_sessions_give_every_pin_back_once() -> None:
    pool = HostPool(8)
    sessions = Sessions(pool, timeout_s=10)
    session = sessions.open(("engine", "request"), now_s=0.0)
    entries = []
    for number in range(3):
        entry = pool.reserve(bytes([number]), 2)
        assert entry is not None
        pool.publish(entry)
        session.hold((0, bytes([number])), entry)
        entries.append(entry)
    pool.pin(entries[0])
    session.hold((0, b"\0"), entries[0])  # a second lookup found it again
    assert entries[0].pins == 1
    taken = session.take((0, b"\1"))
    assert taken is entries[1]
    assert session.take((0, b"\1")) is None
    assert session.release(b"\0") == 1
    assert session.release(b"\0") == 0
    assert sessions.expired(5.0) == []
    assert sessions.expired(11.0) == [session]
    session.busy = 1
    assert sessions.expired(11.0) == []
    sessions.end(session)
    assert len(sessions) == 1  # a copy is still in progress
    session.busy = 0
    sessions.settle(session)
    assert len(sessions) == 0
    assert pool.pinned_slots == 2  # what was taken
    pool.unpin(entries[1])
    assert pool.pinned_slots == 0
    pool.audit()


def test_a_session_cancels_its_lookup_when_it_ends() -> None:
    sessions = Sessions(HostPool(1), timeout_s=10)
    session = sessions.open(("engine", "request"), now_s=0.0)
    cancelled: list[bool] = []
    session.cancel_lookup = lambda: cancelled.append(True)
    sessions.end(session)
    assert cancelled == [True]
    assert len(sessions) == 0


def test_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 2)
    sessions = Sessions(HostPool(1), timeout_s=10)
    first = sessions.open(("e", "1"), 0.0)
    sessions.open(("e", "2"), 0.0)
    with pytest.raises(WireError, match="2 requests are open"):
        sessions.open(("e", "3"), 0.0)
    assert sessions.open(("e", "1"), 0.0) is first
    sessions.end(first)
    sessions.open(("e", "3"), 0.0)
