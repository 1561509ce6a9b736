# SPDX-License-Identifier: Apache-2.0
"""Chunks that no engine asks for again leave every tier, whatever is in flight."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from lmcache_redis.cache import clearing
from lmcache_redis.cache.clearing import EndedPrefixes
from lmcache_redis.resp import RedisOptions, RedisPlane
from lmcache_redis.tier_kinds import REDIS
from lmcache_redis.tiers import (
    CallOutcome,
    ExistsResult,
    RemoveResult,
    WriteOutcome,
)
from tests.cache.played import FORM, HASHES, PlayedTier, World
from tests.servers import RedisServer, stripe_keys

PREFIX = FORM.names.common


class Played(World):
    def __init__(self) -> None:
        self.tier = PlayedTier("Redis")
        super().__init__([(self.tier, REDIS)])

    def swept(self, outcome: CallOutcome = CallOutcome.DONE) -> None:
        """The sweep that has begun ends."""
        self.run(lambda: self.tier.cleared)
        ((prefixes, _, done),) = self.tier.cleared
        assert prefixes == [PREFIX]
        self.tier.cleared.clear()
        done(RemoveResult(outcome))
        self.loop.run_posted()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    monkeypatch.setattr(clearing, "_AGAIN_S", 0.001)
    played = Played()
    yield played
    played.close()


@pytest.fixture
def slow() -> Iterator[Played]:
    """With the pauses of every day."""
    played = Played()
    yield played
    played.close()


def test_a_tier_is_cleared_after_the_writes_in_flight(played: Played) -> None:
    for name in HASHES:
        played.cache.write_behind(played.hold(name))
    played.loop.run_due()
    _, answer = played.tier.refreshed.pop()
    answer(ExistsResult(CallOutcome.DONE, [False] * len(HASHES)))
    played.loop.run_posted()
    assert len(played.tier.written) == len(HASHES)
    assert played.cache.clear([PREFIX], for_good=True) == len(HASHES)
    assert not any(FORM.key(name) in played.cache.pool for name in HASHES)
    assert played.cache.clears.ended.has(FORM.key(HASHES[0]))
    for job in played.tier.written:
        assert not played.tier.cleared
        played.tier.write_done(job, WriteOutcome.STORED)
        played.loop.run_posted()
    played.loop.run_posted()
    assert len(played.tier.cleared) == 1


def test_a_tier_is_cleared_for_good_by_two_sweeps(played: Played) -> None:
    played.cache.clear([PREFIX], for_good=True)
    for outcome in (CallOutcome.UNAVAILABLE, CallOutcome.TIMED_OUT, CallOutcome.DONE) * 2:
        played.swept(outcome)
    assert played.counted("clears_failed") == {"clears_failed": 4}
    assert played.loop.run_due() == 1.0, "no timer is set"
    assert not played.tier.cleared


def test_one_pass_at_a_time_of_all_that_is_due(slow: Played) -> None:
    """A pass looks at every key of a server."""
    epochs = [[b"%d.%d" % (epoch, rank) for rank in range(32)] for epoch in range(3)]
    for prefixes in epochs:
        slow.cache.clear(prefixes, for_good=True)
    for due in (epochs[0], [*epochs[1], *epochs[2]]):
        ((prefixes, _, done),) = slow.tier.cleared
        assert prefixes == due
        slow.tier.cleared.clear()
        done(RemoveResult(CallOutcome.DONE))
        slow.loop.run_posted()
    assert not slow.tier.cleared, "the second time is a while after the first"


def test_a_pass_has_more_time_after_a_failure(
    slow: Played, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it takes to look at every key, one ends."""
    outcomes = [*[CallOutcome.TIMED_OUT] * 7, CallOutcome.DONE, CallOutcome.DONE]
    minutes = []
    for number, outcome in enumerate(outcomes):
        slow.cache.clear([PREFIX], for_good=not number)
        ((_, deadline_s, _),) = slow.tier.cleared
        minutes.append(round((deadline_s - time.monotonic()) / 60))
        slow.swept(outcome)
    assert minutes == [1, 2, 4, 8, 16, 32, 60, 60, 1]
    assert caplog.text.count("stay in Redis") == 7
    assert caplog.text.count("tried again in") == 1
    assert "stay in Redis (tried again in 60 s): not answered before its deadline" in caplog.text


def test_the_newest_beginnings_of_keys_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clearing, "_MOST_PREFIXES", 2)
    ended = clearing.EndedPrefixes()
    for prefix in (b"ab", b"cde", b"ab", b"f"):
        ended.add(prefix)
    keys = (b"cdex", b"cde", b"fg", b"cd", b"abx", b"xab", b"")
    assert [ended.has(key) for key in keys] == [True] * 3 + [False] * 4


def test_of_what_waits_for_a_pass_the_newest_is_kept(
    slow: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clearing, "_MOST_PREFIXES", 2)
    slow.cache.clear([b"1"])
    slow.cache.clear([b"2", b"3", b"4"])
    for due in ([b"1"], [b"3", b"4"]):
        ((prefixes, _, done),) = slow.tier.cleared
        assert prefixes == due
        slow.tier.cleared.clear()
        done(RemoveResult(CallOutcome.DONE))
        slow.loop.run_posted()
    assert not slow.tier.cleared


def test_nothing_to_clear_asks_nothing(slow: Played) -> None:
    assert slow.cache.clear([], for_good=True) == 0
    assert not slow.tier.cleared
    assert not slow.loop._heap, "nor later"


def test_any_other_clear_is_one_sweep(played: Played) -> None:
    for outcome in (CallOutcome.DONE, CallOutcome.UNAVAILABLE):
        played.cache.clear([PREFIX])
        played.swept(outcome)
    played.loop.run_due()
    assert not played.tier.cleared
    assert not played.cache.clears.ended.has(FORM.key(HASHES[0]))


def test_what_arrives_late_is_removed(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written by the agent of another node, or out of the socket of a server that was stopped."""
    monkeypatch.setattr(clearing, "_AGAIN_S", 0.2)
    plane = RedisPlane(RedisOptions(server.url))
    plane.start()
    plane.wait_probed(10)
    world = World([(plane, REDIS)])
    with server.client() as client:
        for name in HASHES:
            world.cache.write_behind(world.hold(name))
        world.run(lambda: not world.cache.backlog)
        late = {key: client.get(key) for key in stripe_keys(client)}
        assert len(late) == FORM.stripe_count * len(HASHES)
        client.set("of another", "application")
        world.cache.clear([PREFIX], for_good=True)
        world.run(lambda: len(stripe_keys(client)) == 1)
        client.mset(late)
        world.run(lambda: len(stripe_keys(client)) == 1)
    assert world.cache.close(5.0)
    world.loop.run_posted()
    world.close()


def test_the_newest_ended_epochs_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clearing, "_MOST_PREFIXES", 3)
    ended = EndedPrefixes()
    names = [b"%d" % number * (1 + number % 2) for number in range(5)]
    for name in (*names, *names[3:]):
        ended.add(name)
    assert [ended.has(name + b" and more") for name in names] == [False, False, True, True, True]
    assert not ended.has(b"")
