"""Prefix lookups over tiers whose answers the test decides: pins and counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from lmcache_redis.cache import counters
from lmcache_redis.cache.lookup import PrefixLookup
from lmcache_redis.cache.pool import Entry, EntryState
from lmcache_redis.naming import ChunkForm
from lmcache_redis.resp.outcomes import (
    CallOutcome,
    ChunkIO,
    ExistsResult,
    ReadOutcome,
    ScanResult,
    WriteOutcome,
)
from tests.cache.played import FORM, HASHES, PlayedTier, World

KEYS = [FORM.key(name) for name in HASHES]
SECOND_RANK = ChunkForm.of_pages(FORM.names, FORM.model_name, 1, FORM.chunk_bytes, 64)


class Tiers(World):
    """A disk with an index in front of Redis without one."""

    def __init__(self, slots: int = 64) -> None:
        self.disk, self.redis = PlayedTier("disk", set()), PlayedTier("Redis")
        super().__init__([(self.disk, counters.DISK), (self.redis, counters.REDIS)], slots=slots)
        self.found: list[tuple[int, dict[str, int]]] = []
        self.held: list[dict[tuple[int, int], Entry]] = []

    def look_up(self, *forms: ChunkForm, within_s: float = 60.0) -> PrefixLookup:
        def done(lookup: PrefixLookup) -> None:
            self.found.append((lookup.bound, lookup.loaded()))
            self.held.append(lookup.take())

        deadline_s = time.monotonic() + within_s
        lookup = PrefixLookup(self.cache, forms or (FORM,), HASHES, deadline_s, done)
        lookup.start()
        return lookup

    def answer_scan(self, length: int, outcome: CallOutcome = CallOutcome.DONE) -> None:
        _, done = self.redis.scanned.pop(0)
        done(ScanResult(outcome, length))
        self.loop.run_posted()

    def end(
        self, tier: PlayedTier, *outcomes: ReadOutcome, rest: ReadOutcome | None = None
    ) -> None:
        """Ends the first reads of a tier with these outcomes, the others with ``rest`` if given."""
        jobs = tier.read[:] if rest is not None else tier.read[: len(outcomes)]
        del tier.read[: len(jobs)]
        for number, job in enumerate(jobs):
            outcome = outcomes[number] if number < len(outcomes) else rest
            assert outcome is not None
            if outcome is ReadOutcome.LOADED:
                for slot in job.slots:
                    slot[:] = job.frame.chunk_hash[:1] * len(slot)
            tier.read_done(job, outcome)
        self.loop.run_posted()

    def give_back(self) -> None:
        for held in self.held:
            for entry in held.values():
                self.cache.pool.unpin(entry)
        self.held.clear()


@pytest.fixture
def make() -> Iterator[Callable[..., Tiers]]:
    made: list[Tiers] = []

    def make(slots: int = 64) -> Tiers:
        made.append(Tiers(slots))
        return made[-1]

    yield make
    for tiers in made:
        tiers.give_back()
        for queue in tiers.cache.queues:
            queue.begin_all()
        for tier in (tiers.disk, tiers.redis):
            while tier.asked:
                keys, done = tier.asked.pop()
                done(ExistsResult(CallOutcome.DONE, [True] * len(keys)))
            tiers.loop.run_posted()
            for job in tier.written:
                if job.tag in tiers.cache.queues[tier is tiers.redis]._jobs:
                    tier.write_done(job, WriteOutcome.STORED)
        tiers.loop.run_posted()
        tiers.close()


@pytest.fixture
def tiers(make: Callable[..., Tiers]) -> Tiers:
    return make()


def test_each_chunk_comes_from_the_first_place_that_has_it(tiers: Tiers) -> None:
    """Pool, disk, Redis. The scan is for the rest; chunks from Redis are written to disk."""
    tiers.hold(HASHES[0])
    tiers.disk.index = {KEYS[1], KEYS[3]}
    tiers.look_up()
    assert [job.key for job in tiers.disk.read] == [KEYS[1], KEYS[3]]
    assert [keys for keys, _ in tiers.redis.scanned] == [[KEYS[2], KEYS[4]]]
    tiers.answer_scan(1)
    assert [job.key for job in tiers.redis.read] == [KEYS[2]]
    assert tiers.found == []
    tiers.end(tiers.redis, rest=ReadOutcome.LOADED)
    tiers.end(tiers.disk, rest=ReadOutcome.LOADED)
    assert tiers.found == [(4, {"disk": 2, "Redis": 1})]
    (held,) = tiers.held
    assert sorted(held) == [(chunk, 0) for chunk in range(4)]
    for (chunk, _), entry in held.items():
        assert (entry.state, entry.pins >= 1) == (EntryState.READY, True)
        content = b"".join(tiers.cache.views(FORM, entry))
        assert content == HASHES[chunk][:1] * FORM.chunk_bytes
    assert tiers.counted() == {
        "miss_absent": 1,
        "loaded_chunks": 1,
        "loaded_bytes": FORM.chunk_bytes,
        "disk_loaded_chunks": 2,
        "disk_loaded_bytes": 2 * FORM.chunk_bytes,
    }
    tiers.loop.run_due()
    assert [job.key for job in tiers.disk.written] == [KEYS[2]]
    assert tiers.redis.asked == [], "what is on disk is not sent to Redis by a lookup"


def test_what_a_tier_does_not_give_is_read_from_the_next_into_the_same_slots(
    tiers: Tiers,
) -> None:
    tiers.disk.index = set(KEYS)
    tiers.look_up()
    slots = [job.slots for job in tiers.disk.read]
    tiers.end(tiers.disk, ReadOutcome.CORRUPT, ReadOutcome.UNAVAILABLE, rest=ReadOutcome.LOADED)
    assert [job.slots for job in tiers.redis.read] == slots[:2]
    tiers.end(tiers.redis, rest=ReadOutcome.LOADED)
    assert tiers.found == [(5, {"disk": 3, "Redis": 2})]
    assert tiers.counted("miss_") == {"miss_disk": 2}


@pytest.mark.parametrize(
    ("outcome", "counter"),
    [(each, counter) for each, counter in counters.REDIS.misses.items()],
    ids=lambda each: getattr(each, "name", ""),
)
def test_a_load_that_fails_ends_the_prefix(
    tiers: Tiers, outcome: ReadOutcome, counter: str
) -> None:
    tiers.look_up()
    tiers.answer_scan(5)
    tiers.end(tiers.redis, ReadOutcome.LOADED, ReadOutcome.LOADED, outcome)
    # The loads behind it are cancelled; the answer is the part that is pinned.
    assert tiers.found == [(2, {"disk": 0, "Redis": 2})]
    assert [job.key for job in tiers.redis.cancelled] == KEYS[3:]
    tiers.end(tiers.redis, rest=ReadOutcome.CANCELLED)
    # A cancelled load counts as one that missed the deadline.
    assert tiers.counted("miss_")[counter] == 1 + 2 * (counter == "miss_deadline")
    assert len(tiers.cache.pool) == 2


def test_a_stuck_load_keeps_its_slots_and_every_lookup_goes_to_the_next_tier(
    tiers: Tiers,
) -> None:
    tiers.disk.index = {KEYS[0]}
    for _ in range(2):
        tiers.look_up()
        tiers.answer_scan(0)
    (job,) = tiers.disk.read
    tiers.disk.is_up = False
    tiers.disk.read_stuck(job)
    tiers.loop.run_posted()
    (instead,) = tiers.redis.read
    assert instead.key == job.key
    assert {view.obj for view in job.slots} != {}
    stuck, loaded = job.tag.entry, instead.tag.entry  # type: ignore[attr-defined]
    assert not set(stuck.block) & set(loaded.block)
    tiers.end(tiers.redis, rest=ReadOutcome.LOADED)
    assert tiers.found == [(1, {"disk": 0, "Redis": 1}), (1, {"disk": 0, "Redis": 0})]
    assert tiers.counted("miss_") == {"miss_disk": 1, "miss_absent": 8}
    tiers.give_back()
    assert tiers.cache.pool.pinned == len(job.slots), "the tier may still write to them"
    tiers.disk.read_done(job, ReadOutcome.LOADED)
    tiers.loop.run_posted()
    assert tiers.cache.pool.pinned == 0
    assert tiers.cache.pool.get(KEYS[0]) is loaded


def test_without_room_the_end_of_the_prefix_is_dropped(make: Callable[..., Tiers]) -> None:
    """Chunks of three slots in a pool of seven: a chunk at the beginning has priority."""
    tiers = make(7)
    for name in HASHES[3:]:
        tiers.hold(name)
    tiers.look_up()
    tiers.answer_scan(3)
    assert [job.key for job in tiers.redis.read] == KEYS[:2]
    tiers.end(tiers.redis, rest=ReadOutcome.LOADED)
    assert tiers.found == [(2, {"disk": 0, "Redis": 2})]
    assert tiers.counted("miss_") == {"miss_pool_full": 3}


def test_a_deadline_answers_with_what_is_held(tiers: Tiers) -> None:
    tiers.look_up(within_s=0.05)
    tiers.answer_scan(5)
    tiers.end(tiers.redis, ReadOutcome.LOADED, ReadOutcome.LOADED)
    tiers.run(lambda: tiers.found)
    assert tiers.found == [(2, {"disk": 0, "Redis": 2})]
    assert tiers.counted("lookups_") == {"lookups_timed_out": 1}
    assert tiers.counted("miss_") == {"miss_deadline": 3}
    assert [job.key for job in tiers.redis.cancelled] == KEYS[2:]
    tiers.end(tiers.redis, rest=ReadOutcome.CANCELLED)


def test_a_deadline_before_the_scan_answers_with_the_pool(tiers: Tiers) -> None:
    tiers.redis.is_probed = False
    tiers.hold(HASHES[0])
    tiers.look_up(within_s=0.05)
    tiers.run(lambda: tiers.found)
    assert tiers.found == [(1, {"disk": 0, "Redis": 0})]
    assert tiers.redis.scanned == [], "a server that was never asked is waited for"


@pytest.mark.parametrize("outcome", [CallOutcome.UNAVAILABLE, CallOutcome.TIMED_OUT])
def test_a_tier_that_cannot_be_asked_ends_the_prefix(tiers: Tiers, outcome: CallOutcome) -> None:
    tiers.hold(HASHES[0])
    lookup = tiers.look_up()
    tiers.answer_scan(0, outcome)
    assert tiers.found == [(1, {"disk": 0, "Redis": 0})]
    assert tiers.counted() == {"miss_redis_error": 4}
    assert lookup.reasons == {"Redis is not available"}


def test_a_chunk_counts_when_every_rank_has_its_part(tiers: Tiers) -> None:
    tiers.look_up(FORM, SECOND_RANK)
    (keys, _) = tiers.redis.scanned[0]
    assert len(keys) == 10
    tiers.answer_scan(5)  # two chunks, and one rank of the third
    assert len(tiers.redis.read) == 4
    tiers.end(tiers.redis, rest=ReadOutcome.LOADED)
    assert tiers.found == [(2, {"disk": 0, "Redis": 2})]
    assert sorted(tiers.held[0]) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_cancelled_lookup_gives_everything_back_and_says_nothing(tiers: Tiers) -> None:
    tiers.hold(HASHES[0])
    first, second = tiers.look_up(), tiers.look_up()
    tiers.answer_scan(4)
    tiers.answer_scan(4)
    assert len(tiers.redis.read) == 4, "one load serves both"
    first.cancel()
    assert tiers.redis.cancelled == []
    second.cancel()
    assert [job.key for job in tiers.redis.cancelled] == KEYS[1:]
    tiers.end(tiers.redis, rest=ReadOutcome.CANCELLED)
    assert tiers.found == []
    assert tiers.cache.pool.pinned == 0


def test_what_is_cleared_while_it_is_loaded_is_not_found(tiers: Tiers) -> None:
    tiers.look_up()
    tiers.answer_scan(5)
    assert tiers.cache.clear([FORM.names.common]) == 5
    assert [tier.cleared[0][0] for tier in (tiers.disk, tiers.redis)] == [FORM.names.common] * 2
    tiers.end(tiers.redis, rest=ReadOutcome.LOADED)
    assert tiers.found == [(0, {"disk": 0, "Redis": 0})]
    assert len(tiers.cache.pool) == 0


def test_a_tier_that_breaks_keeps_the_slots_of_what_it_took(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may still write to them: no other chunk gets them before `done`."""
    read_all = tiers.redis.read_all

    later: list[Callable[[], None]] = []

    def bug(jobs: Any, done: Any, stuck: Any) -> None:
        read_all(jobs[:1], done, stuck)
        later.extend(partial(done, job, ReadOutcome.CANCELLED) for job in jobs[1:])
        raise RuntimeError("a bug")

    monkeypatch.setattr(tiers.redis, "read_all", bug)
    tiers.look_up(within_s=0.05)
    tiers.answer_scan(5)
    assert "a bug" in caplog.text
    tiers.run(lambda: tiers.found)
    assert tiers.found == [(0, {"disk": 0, "Redis": 0})]
    assert len(tiers.cache.pool) == 0
    assert tiers.cache.pool.pinned == 5 * FORM.stripe_count
    tiers.end(tiers.redis, rest=ReadOutcome.LOADED)
    assert tiers.cache.pool.pinned == 4 * FORM.stripe_count
    for complete in later:
        complete()
    tiers.run(lambda: not tiers.cache.pool.pinned)
    assert len(tiers.cache.pool) == 0


def test_jobs_carry_what_a_tier_needs(tiers: Tiers) -> None:
    tiers.look_up()
    tiers.answer_scan(1)
    (job,) = tiers.redis.read
    assert isinstance(job, ChunkIO)
    assert (job.key, job.frame) == (KEYS[0], FORM.frame(HASHES[0]))
    assert [len(slot) for slot in job.slots] == [64, 64, 32]
    tiers.end(tiers.redis, rest=ReadOutcome.LOADED)
