# SPDX-License-Identifier: Apache-2.0
"""Sessions: the pins that they hold, each released once."""

from __future__ import annotations

import pytest

from lmcache_redis import messages as m
from lmcache_redis.agent import sessions as sessions_module
from lmcache_redis.agent.peers import MAX_MODELS, OTHER_MODELS, Peer, Peers
from lmcache_redis.agent.sessions import Sessions
from lmcache_redis.cache.pool import HostPool
from lmcache_redis.chunks.keys import hash_tag
from lmcache_redis.errors import WireError
from lmcache_redis.metrics import Metrics
from tests.cache.auditing import audit, slots


def test_sessions_give_every_pin_back_once() -> None:
    pool = HostPool(slots(8))
    sessions = Sessions(pool, Metrics())
    session = sessions.open(("engine", "request"), now_s=0.0)
    entries = []
    for number in range(3):
        entry = pool.reserve(bytes([number]), 2)
        assert entry is not None
        pool.publish(entry)
        session.hold(bytes([number]), (0, 0), entry)
        entries.append(entry)
    pool.pin(entries[0])
    session.hold(b"\0", (0, 0), entries[0])  # a second lookup found it again
    assert entries[0].pins == 1
    taken = session.take(b"\1", (0, 0))
    assert taken is entries[1]
    assert session.take(b"\1", (0, 0)) is None
    assert session.release(b"\0") == 1
    assert session.release(b"\0") == 0
    assert sessions.expired(55.0) == []
    assert sessions.expired(61.0) == [session]
    session.busy = 1
    assert sessions.expired(61.0) == []
    sessions.end(session)
    assert len(sessions) == 1  # a copy is still in progress
    sessions.finish(session)
    assert len(sessions) == 0
    assert pool.pinned == 2  # what was taken
    pool.unpin(entries[1])
    assert pool.pinned == 0
    audit(pool)


def test_parts_of_a_chunk_are_taken_one_by_one() -> None:
    pool = HostPool(slots(4))
    session = Sessions(pool, Metrics()).open(("engine", "request"), 0.0)
    for group in range(2):
        entry = pool.reserve(bytes([group]), 2)
        assert entry is not None
        pool.publish(entry)
        session.hold(b"chunk", (0, group), entry)
    for group in range(2):
        assert session.has_pins
        taken = session.take(b"chunk", (0, group))
        assert taken is not None
        pool.unpin(taken)
    assert not session.has_pins
    assert session.take(b"chunk", (0, 0)) is None


def test_of_a_prompt_that_has_ended_the_end_is_evicted_first() -> None:
    """Each chunk needs those before it. Its copies have ended in the order of the prompt."""
    pool = HostPool(slots(6))
    sessions = Sessions(pool, Metrics())
    session = sessions.open(("engine", "request"), 0.0, for_lookup=False)
    session.busy = 1
    session.stems, chunks = (b"row 0 ", b"row 1 "), [b"a", b"b", b"c"]
    session.positions = {chunk: number for number, chunk in enumerate(chunks)}
    keys = [stem + hash_tag(chunk) for chunk in chunks for stem in session.stems]
    for key in keys:
        entry = pool.reserve(key, 1)
        assert entry is not None
        pool.publish(entry)
        pool.unpin(entry)
    sessions.finish(session)
    for left in (4, 2):
        assert pool.reserve(None, 2) is not None
        assert [key in pool for key in keys] == [True] * left + [False] * (6 - left)


def test_a_lookup_keeps_a_session_until_its_engine_ends_it() -> None:
    sessions = Sessions(HostPool(slots(1)), Metrics())

    def work(request: str) -> None:
        session = sessions.open(("engine", request), 0.0, for_lookup=False)
        session.busy += 1
        sessions.finish(session)

    work("stored")
    assert len(sessions) == 0
    looked_up = sessions.open(("engine", "looked up"), 0.0)
    work("looked up")
    looked_up.busy = 1
    sessions.end(looked_up)
    assert sessions.open(looked_up.key, 5.0) is looked_up, "looked up again while a copy runs"
    sessions.finish(looked_up)
    assert [*sessions] == [looked_up]
    assert sessions.expired(64.9) == []
    assert sessions.expired(65.0) == [looked_up]


def test_a_session_cancels_its_lookup_when_it_ends() -> None:
    sessions = Sessions(HostPool(slots(1)), Metrics())
    session = sessions.open(("engine", "request"), now_s=0.0)
    cancelled: list[bool] = []
    session.cancel_lookup = lambda: cancelled.append(True)
    sessions.end(session)
    assert cancelled == [True]
    assert len(sessions) == 0


def test_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 2)
    sessions = Sessions(HostPool(slots(1)), Metrics())
    first = sessions.open(("e", "1"), 0.0)
    sessions.open(("e", "2"), 0.0)
    with pytest.raises(WireError, match="2 requests are open"):
        sessions.open(("e", "3"), 0.0)
    assert sessions.open(("e", "1"), 0.0) is first
    sessions.end(first)
    sessions.open(("e", "3"), 0.0)


def test_a_peer_is_removed_unless_another_has_its_connection() -> None:
    peers = Peers()
    first, second = (Peer(b"1", m.Hello(0, "e", "m", 1, None, "0"), 0.0) for _ in range(2))
    peers.add(first)
    assert peers.add(second) == [first]
    peers.remove(first)
    assert peers.get(b"1") is second
    peers.remove(second)
    assert (len(peers), peers.get(b"1")) == (0, None)


def test_models_are_bounded() -> None:
    peers = Peers()
    for number in range(MAX_MODELS + 2):
        peers.use_of(f"model {number}").lookups += 1
    peers.use_of("model 0").lookups += 1
    assert len(peers.models) == MAX_MODELS + 1
    assert peers.models["model 0"].lookups == peers.models[OTHER_MODELS].lookups == 2
