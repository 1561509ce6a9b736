# SPDX-License-Identifier: Apache-2.0
"""Chunks that no engine asks for again leave every tier, whatever is in flight."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from lmcache_redis.cache import clearing
from lmcache_redis.tier_kinds import REDIS
from lmcache_redis.tiers import CallOutcome, ExistsResult, RemoveResult, WriteOutcome
from tests.cache.played import FORM, HASHES, PlayedTier, World

PREFIX = FORM.names.common


class Played(World):
    def __init__(self) -> None:
        self.tier = PlayedTier("Redis")
        super().__init__([(self.tier, REDIS)])

    def swept(
        self, outcome: CallOutcome = CallOutcome.DONE, of: Sequence[bytes] = (PREFIX,)
    ) -> float:
        """The pass that has begun ends; its deadline."""
        ((prefixes, deadline_s, done),) = self.tier.cleared
        assert prefixes == [*of]
        self.tier.cleared.clear()
        done(RemoveResult(outcome))
        self.loop.run_posted()
        return deadline_s


@pytest.fixture
def played() -> Iterator[Played]:
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
        played.pass_time(240.0)
        played.swept(outcome)
        assert not played.tier.cleared, "there is a pause"
    played.pass_time(240.0)
    assert played.counted("clears_failed") == {"clears_failed": 4}
    assert played.loop.run_due() == 1.0, "no timer is set"
    assert not played.tier.cleared


def test_one_pass_at_a_time_of_all_that_is_due(played: Played) -> None:
    """A pass looks at every key of a server."""
    epochs = [[b"%d.%d" % (epoch, rank) for rank in range(32)] for epoch in range(3)]
    for prefixes in epochs:
        played.cache.clear(prefixes, for_good=True)
    for due in (epochs[0], [*epochs[1], *epochs[2]]):
        played.swept(of=due)
    assert not played.tier.cleared, "the second time is a while after the first"


def test_a_pass_has_more_time_after_a_failure(
    played: Played, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it takes to look at every key, one ends."""
    outcomes = [*[CallOutcome.TIMED_OUT] * 7, CallOutcome.DONE, CallOutcome.DONE]
    minutes = []
    for number, outcome in enumerate(outcomes):
        played.cache.clear([PREFIX], for_good=not number)
        minutes.append(round((played.swept(outcome) - time.monotonic()) / 60))
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
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clearing, "_MOST_PREFIXES", 2)
    played.cache.clear([b"1"])
    played.cache.clear([b"2", b"3", b"4"])
    for due in ([b"1"], [b"3", b"4"]):
        played.swept(of=due)
    assert not played.tier.cleared


def test_nothing_to_clear_asks_nothing(played: Played) -> None:
    assert played.cache.clear([], for_good=True) == 0
    assert not played.tier.cleared
    assert not played.loop._heap, "nor later"


def test_any_other_clear_is_one_sweep(played: Played) -> None:
    for outcome in (CallOutcome.DONE, CallOutcome.UNAVAILABLE):
        played.cache.clear([PREFIX])
        played.swept(outcome)
    played.pass_time(240.0)
    assert not played.tier.cleared
    assert not played.cache.clears.ended.has(FORM.key(HASHES[0]))
