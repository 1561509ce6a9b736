# SPDX-License-Identifier: Apache-2.0
"""Wrong chunks: removed until that succeeds; before, not loaded and no reason to skip a store."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest

from lmcache_redis.cache import doubted
from lmcache_redis.cache.pool import Entry
from lmcache_redis.cache.writebehind import WriteBehind
from lmcache_redis.tier_kinds import REDIS
from lmcache_redis.tiers import CallOutcome, ExistsResult, RemoveResult, WriteOutcome
from tests.cache.played import FORM, HASHES, PlayedTier, World

KEY = FORM.key(HASHES[0])


class Removing(World):
    """A cache over one tier, and what became of the removals that were asked for."""

    def __init__(self) -> None:
        self.tier = PlayedTier("Redis")
        super().__init__([(self.tier, REDIS)])
        self.results: list[RemoveResult] = []
        self.hold(HASHES[0])

    @property
    def queue(self) -> WriteBehind:
        return self.cache.queues[0]

    def answer(self, outcome: CallOutcome) -> None:
        """Answers every attempt that waits for it."""
        told, self.tier.removed = self.tier.removed, []
        for _, done in told:
            done(RemoveResult(outcome, int(outcome is CallOutcome.DONE)))
        self.loop.run_posted()

    def fail(self) -> None:
        self.answer(CallOutcome.UNAVAILABLE)

    def next_attempt(self) -> None:
        self.loop.run_posted()
        self.pass_time(doubted._LONGEST_PAUSE_S)
        self.run(lambda: self.tier.removed)

    def stored(self, entry: Entry) -> None:
        (job,) = self.tier.written
        assert job.entry is entry
        self.tier.write_done(job, WriteOutcome.STORED)
        self.loop.run_posted()


@pytest.fixture
def world() -> Iterator[Removing]:
    world = Removing()
    world.cache.remove(KEY, FORM.stripe_count)
    yield world
    world.close()


def test_it_is_tried_until_it_succeeds(world: Removing, caplog: pytest.LogCaptureFixture) -> None:
    assert world.tier.removed_as == [(FORM.stripe_count, None)]
    for attempts in range(1, 6):
        world.fail()
        assert world.counted() == {"failed_removals": attempts}
        assert (world.cache.failed_removals, world.cache.backlog) == (1, 0)
        assert world.queue.is_removing(KEY)
        world.next_attempt()
    later = {*world.tier.removed_as[1:]}
    assert [stripe_count for stripe_count, _ in later] == [FORM.stripe_count]
    world.answer(CallOutcome.DONE)
    assert (world.cache.failed_removals, world.queue.is_removing(KEY)) == (0, False)
    assert caplog.text.count(KEY.hex()) == 1
    world.cache.say_what_stays()
    assert caplog.text.count(KEY.hex()) == 1


def test_a_later_attempt_leaves_what_is_newer(world: Removing) -> None:
    """Than the moment at which the chunk was found wrong, as far as clocks agree."""
    world.answer(CallOutcome.DONE)
    before_ms = time.time_ns() // 1_000_000
    world.cache.remove(KEY)
    after_ms = time.time_ns() // 1_000_000
    world.fail()
    world.next_attempt()
    _, newest_unix_ms = world.tier.removed_as[-1]
    assert newest_unix_ms is not None
    assert before_ms <= newest_unix_ms - doubted.CLOCKS_DIFFER_MS <= after_ms
    world.answer(CallOutcome.DONE)


def test_meanwhile_it_is_not_loaded(world: Removing) -> None:
    world.fail()
    assert world.cache.level_of(KEY) is None
    assert world.cache.prepare_load(FORM, HASHES[0], 0, math.inf) is None
    assert world.cache.prepare_load(FORM, HASHES[1], 0, math.inf) is not None
    for entry in [*world.cache.pool]:
        world.cache.abandon(entry)


def test_the_next_store_asks_nothing_and_takes_its_place(world: Removing) -> None:
    world.fail()
    entry = world.hold(HASHES[0])
    world.cache.write_behind(entry)
    world.run(lambda: world.tier.written)
    assert not world.tier.refreshed, "it believes what the tier would say"
    world.stored(entry)
    assert not world.queue.is_removing(KEY)
    assert world.cache.failed_removals == 0
    world.pass_time(2 * doubted._LONGEST_PAUSE_S)
    assert not world.tier.removed, "a late attempt would remove the new store"


def test_a_store_that_fails_changes_nothing(world: Removing) -> None:
    world.fail()
    world.cache.write_behind(world.hold(HASHES[0]))
    world.run(lambda: world.tier.written)
    # No attempt while the key is written: its end may make it needless.
    world.pass_time(doubted._LONGEST_PAUSE_S)
    assert not world.tier.removed
    world.tier.write_done(world.tier.written[0], WriteOutcome.TIMED_OUT)
    world.next_attempt()
    world.answer(CallOutcome.DONE)
    assert not world.queue.is_removing(KEY)


def test_a_store_during_an_attempt_comes_after_it(world: Removing) -> None:
    entry = world.hold(HASHES[0])
    world.cache.write_behind(entry)
    world.loop.run_due()
    assert not world.tier.written
    world.answer(CallOutcome.DONE)
    world.run(lambda: world.tier.written)
    world.stored(entry)
    assert world.counted("failed") == {}


def test_an_old_answer_does_not_skip_a_store(world: Removing) -> None:
    """The tier was asked before the removal, and answers after it was asked for."""
    world.answer(CallOutcome.DONE)
    entry = world.hold(HASHES[0])
    world.cache.write_behind(entry)
    world.run(lambda: world.tier.refreshed)
    world.cache.remove(FORM.key(HASHES[1]))
    world.queue.remove(KEY, math.inf, world.results.append)
    ((_, told),) = world.tier.refreshed
    told(ExistsResult(CallOutcome.DONE, [True]))
    world.answer(CallOutcome.DONE)
    world.run(lambda: world.tier.written)
    world.stored(entry)
    assert "skipped_chunks" not in world.counted()


def test_nothing_is_sent_while_the_tier_is_down(world: Removing) -> None:
    world.fail()
    world.tier.is_up = False
    world.pass_time(2 * doubted._LONGEST_PAUSE_S)
    assert not world.tier.removed
    assert world.counted() == {"failed_removals": 1}
    world.tier.is_up = True
    world.next_attempt()
    world.answer(CallOutcome.DONE)


def test_what_a_caller_removes_is_tried_once(
    world: Removing, caplog: pytest.LogCaptureFixture
) -> None:
    """A later attempt would remove what others have stored since."""
    world.answer(CallOutcome.DONE)
    caplog.clear()
    world.queue.remove(KEY, math.inf, world.results.append)
    assert world.queue.is_removing(KEY)
    world.fail()
    assert world.results == [RemoveResult(CallOutcome.UNAVAILABLE)]
    assert (world.queue.is_removing(KEY), world.cache.failed_removals) == (False, 0)
    world.pass_time(2 * doubted._LONGEST_PAUSE_S)
    world.cache.begin_writes()
    assert not world.tier.removed
    world.cache.say_what_stays()
    assert (caplog.text, world.counted("failed")) == ("", {})


def test_a_chunk_is_found_wrong_again(world: Removing) -> None:
    """During an attempt, and after it."""
    for attempts in (2, 1):
        world.cache.remove(KEY)
        for _ in range(attempts):
            world.next_attempt()
            world.fail()
        assert world.cache.failed_removals == 1
    world.next_attempt()
    world.answer(CallOutcome.DONE)
    assert not world.queue.is_removing(KEY)
    assert len(world.queue) == 0


def test_what_an_attempt_has_seen_is_known_to_the_next(world: Removing) -> None:
    """Stripe 0, which says how many there are, may be gone."""
    world.answer(CallOutcome.DONE)
    world.cache.remove(KEY)
    ((_, done),) = world.tier.removed
    world.tier.removed.clear()
    done(RemoveResult(CallOutcome.UNAVAILABLE, 1, 10))
    world.loop.run_posted()
    world.next_attempt()
    assert [stripe_count for stripe_count, _ in world.tier.removed_as[1:]] == [0, 10]
    world.answer(CallOutcome.DONE)


def test_after_one_success_the_others_follow_together(world: Removing) -> None:
    keys = [FORM.key(each) for each in HASHES[1:]]
    for key in keys:
        world.cache.remove(key)
    world.fail()
    assert world.cache.failed_removals == len(HASHES)
    for _ in range(2 * len(HASHES)):  # one at a time, each has its turn
        world.next_attempt()
        assert len(world.tier.removed) == 1
        world.fail()
    world.next_attempt()
    world.answer(CallOutcome.DONE)
    world.next_attempt()
    assert len(world.tier.removed) == len(HASHES) - 1
    world.answer(CallOutcome.DONE)
    assert world.cache.failed_removals == 0


def test_those_that_wait_are_bounded(
    world: Removing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(doubted, "MOST_KEYS", 3)
    for each in HASHES[1:]:
        world.cache.remove(FORM.key(each))
    world.fail()
    assert world.cache.failed_removals == 3
    assert not world.queue.is_removing(KEY)
    world.cache.say_what_stays()
    assert f"{len(HASHES)} chunks that were to be removed may still be in Redis" in caplog.text
    for each in HASHES[2:]:
        assert FORM.key(each).hex() in caplog.text


def test_an_owner_that_stops_tries_once_more_and_says_what_stays(
    world: Removing, caplog: pytest.LogCaptureFixture
) -> None:
    world.cache.remove(FORM.key(HASHES[1]))
    world.fail()
    caplog.clear()
    world.cache.begin_writes()
    assert (len(world.tier.removed), world.cache.backlog) == (2, 2)
    (_, first), (_, second) = world.tier.removed
    first(RemoveResult(CallOutcome.DONE, 1))
    second(RemoveResult(CallOutcome.CANCELLED))
    world.loop.run_posted()
    world.cache.begin_writes()
    assert world.cache.backlog == 0
    world.cache.say_what_stays()
    assert KEY.hex() not in caplog.text
    assert "1 chunks that were to be removed may still be in Redis" in caplog.text
    assert FORM.key(HASHES[1]).hex() in caplog.text
