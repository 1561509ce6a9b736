# SPDX-License-Identifier: Apache-2.0
"""Chunks that the host pool serves are kept in the tiers, which are asked behind the answer."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from lmcache_redis.cache import writebehind
from lmcache_redis.cache.lookup import PrefixLookup
from lmcache_redis.cache.parts import LookupRequest
from lmcache_redis.cache.pool import Entry
from lmcache_redis.tier_kinds import DISK, REDIS
from lmcache_redis.tiers import CallOutcome, ExistsResult, ReadOutcome, WriteOutcome
from tests.cache.played import FORM, HASHES, PlayedTier, World

CHUNKS = [(FORM.key(name), FORM.stripe_count) for name in HASHES]


class Hot(World):
    """Chunks in the pool over two tiers."""

    def __init__(self) -> None:
        self.disk, self.redis = (
            PlayedTier("disk", {*(key for key, _ in CHUNKS)}),
            PlayedTier("Redis"),
        )
        super().__init__([(self.disk, DISK), (self.redis, REDIS)])
        self.entries = [self.hold(name) for name in HASHES]

    def look_up(self) -> list[int]:
        """Looks up the prompt; what the tiers had been asked when it was answered."""
        asked: list[int] = []

        def answer(lookup: PrefixLookup) -> None:
            asked.extend(len(tier.refreshed) for tier in (self.disk, self.redis))
            self.held = lookup.parts.take()

        PrefixLookup(self.cache, LookupRequest([FORM], HASHES, math.inf), answer).start()
        self.loop.run_posted()
        self.release(self.held.values())
        return asked

    def answer(self, tier: PlayedTier, result: ExistsResult) -> None:
        _, done = tier.refreshed.pop()
        done(result)
        self.loop.run_posted()
        self.loop.run_due()

    def age(self) -> None:
        """Time passes until all may be asked about again."""
        for entry in self.entries:
            entry.refreshed_s = 0.0


@pytest.fixture
def hot() -> Iterator[Hot]:
    hot = Hot()
    yield hot
    hot.close()


def test_what_the_pool_serves_is_reported_after_the_answer(hot: Hot) -> None:
    assert hot.look_up() == [0, 0]
    for tier in (hot.disk, hot.redis):
        assert [chunks for chunks, _ in tier.refreshed] == [CHUNKS]
        hot.answer(tier, ExistsResult(CallOutcome.DONE, [True] * len(CHUNKS)))
    hot.look_up()
    assert hot.redis.refreshed == [], "once in a while"
    hot.age()
    hot.look_up()
    assert len(hot.redis.refreshed) == 1


def test_a_tier_that_knows_of_a_prefixs_end_is_not_told_again(hot: Hot) -> None:
    """The end is used least: whoever has told of it has told of what comes before."""
    hot.entries[-1].refreshed_s = math.inf
    hot.look_up()
    assert (hot.disk.refreshed, hot.redis.refreshed) == ([], [])


def written_again(hot: Hot) -> list[Entry]:
    """Those that Redis is asked about before they are written; it lacks them."""
    ((chunks, _),) = hot.redis.refreshed
    hot.answer(hot.redis, ExistsResult(CallOutcome.DONE, [False] * len(chunks)))
    written: list[Entry] = [job.entry for job in hot.redis.written]
    for job in hot.redis.written:
        hot.redis.write_done(job, WriteOutcome.STORED)
    hot.loop.run_posted()
    return written


def test_what_a_tier_lacks_is_written_to_it_again(hot: Hot) -> None:
    told = hot.listen()
    hot.look_up()
    hot.answer(hot.redis, ExistsResult(CallOutcome.DONE, [True, False, True, False, True]))
    assert told == [(FORM.key(name), 1, n % 2 == 0) for n, name in enumerate(HASHES)]
    assert written_again(hot) == [hot.entries[1], hot.entries[3]]
    assert told[-2:] == [(hot.entries[n].key, 1, True) for n in (1, 3)]
    assert hot.disk.written == []


def test_what_is_not_known_is_neither_written_nor_absent(hot: Hot) -> None:
    told = hot.listen()
    hot.look_up()
    hot.answer(hot.redis, ExistsResult(CallOutcome.DONE, [None, False, None, True, None]))
    assert told == [(hot.entries[n].key, 1, n == 3) for n in (1, 3)]
    assert written_again(hot) == [hot.entries[1]]


def test_a_tier_that_is_down_is_not_asked(hot: Hot) -> None:
    hot.redis.is_up = False
    hot.look_up()
    assert (len(hot.disk.refreshed), hot.redis.refreshed) == (1, [])


def test_what_left_the_pool_meanwhile_is_not_written(hot: Hot) -> None:
    hot.look_up()
    hot.cache.pool.discard(hot.entries[0])
    hot.answer(hot.redis, ExistsResult(CallOutcome.DONE, [False] * len(CHUNKS)))
    assert written_again(hot) == hot.entries[1:]


def test_what_is_loaded_is_not_reported(hot: Hot) -> None:
    hot.cache.pool.discard(hot.entries[0])
    hot.redis.index = {CHUNKS[0][0]}
    hot.disk.index = {key for key, _ in CHUNKS[1:]}
    held: list[Entry] = []
    request = LookupRequest([FORM], HASHES, math.inf)
    PrefixLookup(hot.cache, request, lambda found: held.extend(found.parts.take().values())).start()
    (job,) = hot.redis.read
    hot.redis.read_done(job, ReadOutcome.LOADED)
    hot.run(lambda: held and hot.redis.refreshed)
    assert [chunks for chunks, _ in hot.redis.refreshed] == [CHUNKS[1:]]
    hot.release(held)
    hot.run(lambda: hot.disk.written)  # what comes from Redis goes to the disk
    hot.disk.write_done(hot.disk.written[0], WriteOutcome.STORED)
    hot.loop.run_posted()


def test_one_batch_is_asked_about_at_a_time(hot: Hot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writebehind, "_BATCH_CHUNKS", 2)
    hot.look_up()
    for batch in (CHUNKS[:2], CHUNKS[2:4], CHUNKS[4:]):
        assert [chunks for chunks, _ in hot.redis.refreshed] == [batch]
        hot.answer(hot.redis, ExistsResult(CallOutcome.DONE, [True] * len(batch)))
    assert hot.redis.refreshed == []
