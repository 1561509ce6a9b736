# SPDX-License-Identifier: Apache-2.0
"""Prefix lookups over tiers whose answers the test decides: pins and counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from lmcache_redis.cache import parts
from lmcache_redis.cache.lookup import PrefixLookup
from lmcache_redis.cache.pacing import Computing, TransferRate
from lmcache_redis.cache.parts import LookupRequest
from lmcache_redis.cache.pool import Entry, EntryState
from lmcache_redis.chunks.names import ChunkForm, opaque_pages
from lmcache_redis.tier_kinds import DISK, REDIS
from lmcache_redis.tiers import (
    CallOutcome,
    ExistsResult,
    LastError,
    Operation,
    ReadOutcome,
    RemoveResult,
    ScanResult,
    TierCounters,
    WriteOutcome,
)
from tests.cache.played import FORM, HASHES, PlayedTier, World, loaded_from
from tests.harness import block_hashes

KEYS = [FORM.key(name) for name in HASHES]
SECOND_RANK = ChunkForm.of(FORM.names, FORM.model_name, 1, opaque_pages(FORM.chunk_bytes), 64)


class Tiers(World):
    """A disk with an index in front of Redis without one."""

    def __init__(self, slots: int = 64) -> None:
        self.disk, self.redis = PlayedTier("disk", set()), PlayedTier("Redis")
        super().__init__([(self.disk, DISK), (self.redis, REDIS)], slots=slots)
        self.found: list[tuple[int, dict[str, int]]] = []
        self.held: list[dict[tuple[int, int], Entry]] = []

    def look_up(
        self,
        *forms: ChunkForm,
        within_s: float = 60.0,
        hashes: Sequence[bytes] = HASHES,
        computing: Computing | None = None,
        urgent: bool = False,
    ) -> PrefixLookup:
        def done(lookup: PrefixLookup) -> None:
            self.found.append((lookup.bound, loaded_from(lookup)))
            self.held.append(lookup.parts.take())

        deadline_s = time.monotonic() + within_s
        request = LookupRequest(
            forms or (FORM,), hashes, deadline_s,
            chunk_tokens=16, computing=computing, urgent=urgent,
        )  # fmt: skip
        lookup = PrefixLookup(self.cache, request, done)
        lookup.start()
        return lookup

    def begin(self, name: str, chunks: int, **how: Any) -> PrefixLookup:
        """A lookup of another prompt, all of which Redis has."""
        lookup = self.look_up(hashes=block_hashes(name, chunks), **how)
        self.answer_scan(chunks)
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
        for _ in range(2):  # what has failed is settled afterwards
            self.loop.run_posted()

    def give_back(self) -> None:
        for held in self.held:
            self.release(held.values())
        self.held.clear()
        for _ in range(3):  # who waits for room
            self.loop.run_posted()


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
            while tier.refreshed:
                chunks, done = tier.refreshed.pop()
                done(ExistsResult(CallOutcome.DONE, [True] * len(chunks)))
                tiers.loop.run_posted()
            for job in tier.written:
                if job.entry in tiers.cache.queues[tier is tiers.redis]._writes:
                    tier.write_done(job, WriteOutcome.STORED)
        tiers.loop.run_posted()
        tiers.close()


@pytest.fixture
def tiers(make: Callable[..., Tiers]) -> Tiers:
    return make()


@pytest.fixture
def diskless(tiers: Tiers) -> Tiers:
    tiers.disk.is_up = False
    return tiers


@pytest.fixture
def narrow(make: Callable[..., Tiers]) -> Tiers:
    """A pool of 15 slots, of which a chunk takes three, and no disk."""
    tiers = make(15)
    tiers.disk.is_up = False
    return tiers


def test_each_chunk_comes_from_the_first_place_that_has_it(tiers: Tiers) -> None:
    """Pool, disk, Redis. The scan is for the rest; chunks from Redis are written to disk."""
    tiers.hold(HASHES[0])
    tiers.disk.index = {KEYS[1], KEYS[3]}
    tiers.look_up()
    assert [keys for keys, _ in tiers.redis.scanned] == [[KEYS[2], KEYS[4]]]
    tiers.answer_scan(1)
    assert [job.key for job in tiers.disk.read] == [KEYS[1], KEYS[3]]
    assert [job.key for job in tiers.redis.read] == [KEYS[2]]
    assert tiers.found == []
    tiers.end(tiers.redis, rest=ReadOutcome.LOADED)
    tiers.end(tiers.disk, rest=ReadOutcome.LOADED)
    assert tiers.found == [(4, {"disk": 2, "Redis": 1})]
    (held,) = tiers.held
    assert sorted(held) == [(chunk, 0) for chunk in range(4)]
    for (chunk, _), entry in held.items():
        assert (entry.state, entry.pins >= 1) == (EntryState.READY, True)
        content = b"".join(tiers.cache.views(entry))
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


def test_a_listener_hears_what_the_tiers_were_found_to_have(tiers: Tiers) -> None:
    told = tiers.listen()
    tiers.disk.index = {KEYS[1]}
    tiers.look_up()
    tiers.answer_scan(2)
    assert len(told) == 4
    assert {*told} == {
        (KEYS[1], 0, True),
        (KEYS[0], 1, True), (KEYS[2], 1, True), (KEYS[3], 1, False),
    }  # fmt: skip
    tiers.end(tiers.disk, rest=ReadOutcome.LOADED)
    tiers.end(tiers.redis, rest=ReadOutcome.LOADED)


def test_the_next_tier_reads_into_the_same_slots(tiers: Tiers) -> None:
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
    [(each, counter) for each, counter in TierCounters.of(REDIS).misses.items()],
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
    # Those behind it have failed in nothing themselves.
    assert tiers.counted("miss_") == {counter: 1}
    assert len(tiers.cache.pool) == 2


def test_a_chunk_larger_than_the_pool_is_a_miss(make: Callable[..., Tiers]) -> None:
    tiers = make(2)
    tiers.look_up()
    tiers.answer_scan(5)
    assert tiers.found == [(0, {"disk": 0, "Redis": 0})]
    assert tiers.counted("miss_") == {"miss_pool_full": 5}


def test_a_pool_of_one_chunk_serves_it(make: Callable[..., Tiers]) -> None:
    tiers = make(3)
    tiers.look_up()
    tiers.answer_scan(5)
    assert [job.key for job in tiers.redis.read] == KEYS[:1]
    tiers.end(tiers.redis, rest=ReadOutcome.LOADED)
    assert tiers.found == [(5, {"disk": 0, "Redis": 5})]


def test_a_deadline_answers_with_what_is_held(tiers: Tiers) -> None:
    lookup = tiers.look_up(within_s=0.05)
    tiers.answer_scan(5)
    assert {job.deadline for job in tiers.redis.read} == {lookup._request.deadline_s}
    tiers.end(tiers.redis, ReadOutcome.LOADED, ReadOutcome.LOADED)
    tiers.run(lambda: tiers.found)
    assert tiers.found == [(2, {"disk": 0, "Redis": 2})]
    assert tiers.counted("lookups_") == {"lookups_timed_out": 1}
    assert tiers.counted("miss_") == {"miss_deadline": 3}
    assert [job.key for job in tiers.redis.cancelled] == KEYS[2:]
    tiers.end(tiers.redis, rest=ReadOutcome.CANCELLED)


def test_an_answer_after_the_end_changes_nothing(tiers: Tiers) -> None:
    tiers.hold(HASHES[0])
    lookup = tiers.look_up()
    lookup.cancel()
    tiers.answer_scan(4)
    assert (tiers.found, tiers.redis.read, lookup.bound) == ([], [], 5)
    assert tiers.counted() == {}
    assert tiers.cache.pool.pinned == 0


def test_a_deadline_before_the_scan_answers_with_the_pool(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers.redis.is_probed = False
    tiers.hold(HASHES[0])
    looks: list[float] = []
    at = tiers.loop.at

    def noted(due_s: float, action: Callable[[], None]) -> Any:
        looks.append(due_s)
        return at(due_s, action)

    tiers.look_up(within_s=0.05)
    monkeypatch.setattr(tiers.loop, "at", noted)
    tiers.run(lambda: tiers.found)
    assert tiers.found == [(1, {"disk": 0, "Redis": 0})]
    assert tiers.redis.scanned == [], "a server that was never asked is waited for"
    assert len(looks) < 20, "it pauses for 10 ms before it looks again"


@pytest.mark.parametrize(
    ("outcome", "counter", "reason"),
    [
        (CallOutcome.UNAVAILABLE, "miss_redis_error", "Redis is not available"),
        (CallOutcome.TIMED_OUT, "miss_redis_silent", "Redis has not answered"),
    ],
)
def test_a_tier_that_cannot_be_asked_ends_the_prefix(
    tiers: Tiers, outcome: CallOutcome, counter: str, reason: str
) -> None:
    tiers.hold(HASHES[0])
    lookup = tiers.look_up()
    tiers.answer_scan(0, outcome)
    assert tiers.found == [(1, {"disk": 0, "Redis": 0})]
    assert tiers.counted() == {counter: 4, "lookups_failed": 1}
    assert lookup.end.reasons == {reason}


def test_a_cancelled_lookup_gives_everything_back(tiers: Tiers) -> None:
    tiers.hold(HASHES[0])
    first, second = tiers.look_up(), tiers.look_up()
    tiers.answer_scan(4)
    tiers.answer_scan(4)
    assert len(tiers.redis.read) == 4, "one load serves both"
    first.cancel()
    assert tiers.redis.cancelled == []
    second.cancel()
    assert sorted(job.key for job in tiers.redis.cancelled) == sorted(KEYS[1:])
    tiers.end(tiers.redis, rest=ReadOutcome.CANCELLED)
    assert tiers.found == []
    assert tiers.cache.pool.pinned == 0


def test_what_is_wrong_is_not_asked_about(tiers: Tiers) -> None:
    """So no answer teaches what an answer takes."""
    tiers.cache.rates[-1].answered(0.02)
    tiers.cache.remove(KEYS[1])
    tiers.look_up()
    assert [keys for keys, _ in tiers.redis.scanned] == [KEYS[:1]]
    tiers.answer_scan(0)
    latency_s = tiers.cache.rates[-1].latency_s
    tiers.hold(HASHES[0])
    tiers.look_up()
    tiers.loop.run_posted()
    assert not tiers.redis.scanned
    assert tiers.cache.rates[-1].latency_s == latency_s
    assert [length for length, _ in tiers.found] == [0, 1]
    for tier in (tiers.disk, tiers.redis):
        ((_, done),) = tier.removed
        done(RemoveResult(CallOutcome.DONE, 1))
    tiers.loop.run_posted()
    tiers.look_up()
    assert [keys for keys, _ in tiers.redis.scanned] == [KEYS[1:]]
    tiers.answer_scan(0)


def test_what_is_cleared_while_it_is_loaded_is_not_found(tiers: Tiers) -> None:
    tiers.look_up()
    tiers.answer_scan(5)
    assert tiers.cache.clear([FORM.names.common]) == 5
    assert [tier.cleared[0][0] for tier in (tiers.disk, tiers.redis)] == [[FORM.names.common]] * 2
    tiers.end(tiers.redis, rest=ReadOutcome.LOADED)
    assert tiers.found == [(0, {"disk": 0, "Redis": 0})]
    assert len(tiers.cache.pool) == 0


def test_a_tier_that_breaks_keeps_the_slots_of_what_it_took(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may still write to them: no other chunk gets them before `done`."""
    load_all = tiers.redis.load_all

    later: list[Callable[[], None]] = []

    def bug(jobs: Any, done: Any) -> None:
        load_all(jobs[:1], done)
        later.extend(partial(done, job, ReadOutcome.CANCELLED) for job in jobs[1:])
        raise RuntimeError("a bug")

    monkeypatch.setattr(tiers.redis, "load_all", bug)
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


# --------------------------------------------------------- the line for room


def test_a_full_pool_is_a_queue(narrow: Tiers) -> None:
    """Chunks of three slots in a pool of 15: each lookup needs it all. First come, first served."""
    prompts = [block_hashes(name, 5) for name in ("first", "second", "third")]
    for prompt in prompts:
        narrow.look_up(hashes=prompt)
        narrow.answer_scan(5)
    for number, prompt in enumerate(prompts, 1):
        assert [job.key for job in narrow.redis.read] == [FORM.key(name) for name in prompt]
        assert narrow.cache.pool.pinned == 15
        narrow.end(narrow.redis, rest=ReadOutcome.LOADED)
        assert len(narrow.found) == number
        narrow.give_back()
    assert narrow.found == [(5, {"disk": 0, "Redis": 5})] * 3
    assert narrow.counted("miss_") == {}


def test_the_urgent_come_first_in_the_line(narrow: Tiers) -> None:
    names = ("first", "waits", "urgent", "urgent too")
    for name in names:
        narrow.begin(name, 5, urgent=name.startswith("urgent"))
    for name in (names[0], *names[2:], names[1]):
        assert narrow.redis.read[0].key == FORM.key(block_hashes(name, 5)[0])
        narrow.end(narrow.redis, rest=ReadOutcome.LOADED)
        narrow.give_back()


def test_a_waiting_lookup_holds_nothing(narrow: Tiers) -> None:
    narrow.hold(HASHES[0])
    narrow.begin("another", 4)
    narrow.look_up()
    narrow.answer_scan(4)
    assert narrow.cache.pool.pinned == 12, "the chunk in the pool is not pinned"
    narrow.look_up(hashes=[HASHES[0]])
    assert narrow.found == [(1, {"disk": 0, "Redis": 0})], "it needs no room"
    narrow.give_back()
    narrow.cache.pool.discard(narrow.cache.pool.get(KEYS[0]))  # type: ignore[arg-type]
    narrow.end(narrow.redis, rest=ReadOutcome.LOADED)
    narrow.give_back()
    (keys, _) = narrow.redis.scanned[0]
    assert keys == [KEYS[0]], "the others are known to be there"
    narrow.answer_scan(1)
    assert [job.key for job in narrow.redis.read] == KEYS
    narrow.end(narrow.redis, rest=ReadOutcome.LOADED)
    assert narrow.found[-1] == (5, {"disk": 0, "Redis": 5})


def test_who_leaves_the_queue_wakes_the_next(narrow: Tiers) -> None:
    """The first one waits for more room than there is, the next one for less."""
    narrow.begin("another", 3)
    first = narrow.look_up()
    narrow.answer_scan(5)
    narrow.begin("next", 2)
    assert len(narrow.redis.read) == 3, "it is not its turn"
    first.cancel()
    narrow.loop.run_posted()
    assert len(narrow.redis.read) == 3 + 2
    narrow.end(narrow.redis, rest=ReadOutcome.LOADED)
    assert [length for length, _ in narrow.found] == [3, 2]


def test_those_that_have_room_load_side_by_side(narrow: Tiers) -> None:
    for name, count in (("another", 4), ("first", 2), ("second", 2)):
        narrow.begin(name, count)
    narrow.end(narrow.redis, rest=ReadOutcome.LOADED)
    narrow.give_back()
    assert len(narrow.redis.read) == 2 + 2
    narrow.end(narrow.redis, rest=ReadOutcome.LOADED)
    assert [length for length, _ in narrow.found] == [4, 2, 2]


def test_many_parts_begin_in_slices(diskless: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other actions of the owner have their turns, and nothing is answered before the last."""
    monkeypatch.setattr(parts, "_SOME_PARTS", 2)
    diskless.look_up()
    diskless.answer_scan(5)
    assert [job.key for job in diskless.redis.read] == KEYS[:2]
    diskless.loop.run_posted()
    assert [job.key for job in diskless.redis.read] == KEYS[:4]
    for job in diskless.redis.read:
        diskless.redis.read_done(job, ReadOutcome.LOADED)
    diskless.redis.read.clear()
    diskless.loop.run_posted()
    assert diskless.found == []
    assert [job.key for job in diskless.redis.read] == KEYS[4:]
    diskless.end(diskless.redis, rest=ReadOutcome.LOADED)
    assert diskless.found == [(5, {"disk": 0, "Redis": 5})]


def test_a_part_that_another_lookup_loads_meanwhile_is_shared(
    diskless: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_SOME_PARTS", 2)
    diskless.look_up()
    diskless.look_up(hashes=HASHES[3:])
    while diskless.redis.scanned:
        diskless.answer_scan(len(diskless.redis.scanned[0][0]))
    diskless.loop.run_posted()
    assert sorted(job.key for job in diskless.redis.read) == sorted(KEYS)
    diskless.end(diskless.redis, rest=ReadOutcome.LOADED)
    assert sorted(diskless.found) == [(2, {"disk": 0, "Redis": 1}), (5, {"disk": 0, "Redis": 4})]


def test_room_that_is_gone_before_the_last_slice_ends_the_prefix(
    narrow: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_SOME_PARTS", 2)
    narrow.look_up()
    _, done = narrow.redis.scanned.pop(0)
    done(ScanResult(CallOutcome.DONE, 5))
    narrow.loop._posted.append(lambda: narrow.cache.pool.pin(narrow.hold(b"o" * 32)))
    narrow.loop.run_posted()
    narrow.loop.run_posted()
    narrow.loop.run_posted()
    assert len(narrow.redis.read) == 4
    narrow.end(narrow.redis, rest=ReadOutcome.LOADED)
    assert narrow.found == [(4, {"disk": 0, "Redis": 4})]
    narrow.cache.pool.unpin(narrow.cache.pool.get(FORM.key(b"o" * 32)))  # type: ignore[arg-type]


def test_the_deadline_ends_the_wait(narrow: Tiers) -> None:
    narrow.hold(HASHES[0])
    narrow.begin("another", 4)
    waiting = narrow.look_up(within_s=0.05)
    narrow.answer_scan(4)
    behind = narrow.begin("a third", 5)
    narrow.run(lambda: narrow.found)
    assert narrow.found == [(1, {"disk": 0, "Redis": 0})]
    assert waiting.end.reasons == {"the host pool was full", "the lookup deadline passed"}
    behind.cancel()
    narrow.end(narrow.redis, rest=ReadOutcome.LOADED)
    assert not len(narrow.cache.waiting)


# ------------------------------------------------------------- worth loading


def measured(tiers: Tiers, bytes_per_s: float, ago_s: float = 0.0) -> None:
    """Redis has delivered this many bytes per second."""
    now_s = time.monotonic() - ago_s
    (_, rate) = tiers.cache.rates
    rate.begun(int(bytes_per_s), now_s - 1.0)
    rate.ended(int(bytes_per_s), now_s, arrived=True)


def computing(chunk_s: float, busy_s: float = 0.0) -> Computing:
    found = Computing()
    found.told(chunk_s / 16, busy_s, (), time.monotonic())
    return found


def test_what_is_faster_computed_is_not_loaded_but_probed(tiers: Tiers) -> None:
    measured(tiers, FORM.chunk_bytes / 2.0, ago_s=60.0)
    tiers.hold(HASHES[0])
    engine = computing(1.0)
    lookup = tiers.look_up(computing=engine)
    tiers.answer_scan(4)
    assert tiers.found == [(1, {"disk": 0, "Redis": 0})]
    assert lookup.end.reasons == {"computing was faster"}
    assert tiers.counted() == {"miss_slower": 4, "probes": 1}
    (_, rate) = tiers.cache.rates
    assert rate.is_slow
    tiers.look_up(computing=computing(1.0))
    assert tiers.found[1:] == [(1, {"disk": 0, "Redis": 0})]
    assert tiers.redis.scanned == [], "what would not be loaded is not asked for"
    assert [job.key for job in tiers.redis.read] == [KEYS[1]], "one probe in ten seconds"
    # The probe arrives at once.
    tiers.end(tiers.redis, rest=ReadOutcome.LOADED)
    for _ in range(20):
        measured(tiers, FORM.chunk_bytes * 1e6)
    tiers.look_up(computing=engine)
    tiers.answer_scan(3)
    assert len(tiers.redis.read) == 3
    assert not rate.is_slow
    tiers.end(tiers.redis, rest=ReadOutcome.LOADED)
    assert tiers.found[-1] == (5, {"disk": 0, "Redis": 3})


def test_loading_while_others_are_computed_costs_nothing(tiers: Tiers) -> None:
    """A chunk is loaded in two seconds and computed in one. Two of them fit in the queue's time."""
    measured(tiers, FORM.chunk_bytes / 2.0)
    tiers.look_up(computing=computing(1.0, busy_s=4.5))
    tiers.answer_scan(5)
    assert [job.key for job in tiers.redis.read] == KEYS[:2]
    tiers.end(tiers.redis, rest=ReadOutcome.LOADED)
    assert tiers.found == [(2, {"disk": 0, "Redis": 2})]


def test_a_load_that_falls_behind_is_cut(diskless: Tiers) -> None:
    measured(diskless, FORM.chunk_bytes * 1000.0)
    lookup = diskless.look_up(computing=computing(0.05))
    diskless.answer_scan(5)
    diskless.end(diskless.redis, ReadOutcome.LOADED, ReadOutcome.LOADED)
    began_s = time.monotonic()
    diskless.run(lambda: diskless.found)
    assert time.monotonic() - began_s < 10
    assert diskless.found == [(2, {"disk": 0, "Redis": 2})]
    assert lookup.end.reasons == {"loading took too long"}
    assert diskless.counted("lookups_") == {"lookups_cut": 1}
    assert diskless.counted("miss_") == {"miss_slower": 3}
    assert sorted(job.key for job in diskless.redis.cancelled) == sorted(KEYS[2:])
    diskless.end(diskless.redis, rest=ReadOutcome.CANCELLED)
    # The rate has the time in which nothing arrived.
    diskless.cache.pool.clear()
    diskless.look_up(computing=computing(1e-7))
    assert diskless.redis.scanned == []
    assert diskless.found[1:] == [(0, {"disk": 0, "Redis": 0})]


def test_a_tier_that_does_not_answer_is_given_up(tiers: Tiers) -> None:
    tiers.look_up(computing=computing(0.01))
    tiers.run(lambda: tiers.found)
    assert tiers.found == [(0, {"disk": 0, "Redis": 0})]
    assert tiers.counted() == {"lookups_failed": 1, "miss_redis_silent": 5}
    # The answer comes late, and the next lookup has a rate.
    tiers.answer_scan(5)
    assert [job.key for job in tiers.redis.read] == [KEYS[0]]
    tiers.end(tiers.redis, rest=ReadOutcome.LOADED)
    (_, rate) = tiers.cache.rates
    assert rate.per_second() > 0
    assert tiers.found == [(0, {"disk": 0, "Redis": 0})]


def test_a_tier_that_is_usually_as_slow_as_that_is_slow(tiers: Tiers) -> None:
    (_, rate) = tiers.cache.rates
    rate.answered(60.0)
    rate.is_slow = True  # it is asked all the same: its rate is not known
    tiers.look_up(computing=computing(0.01))
    tiers.run(lambda: tiers.found)
    assert tiers.counted() == {"lookups_cut": 1, "miss_slower": 5}


@pytest.mark.parametrize(
    ("operation", "is_silence", "counter"),
    [
        (Operation.LOAD, True, "miss_redis_silent"),
        (Operation.ASK, False, "miss_redis_error"),
        (Operation.STORE, True, "miss_slower"),
    ],
)
def test_a_tier_whose_reads_fail_is_not_slow(
    tiers: Tiers, operation: Operation, is_silence: bool, counter: str
) -> None:
    """What was not worth loading from it, because it delivers nothing."""
    measured(tiers, FORM.chunk_bytes / 2.0, ago_s=60.0)
    tiers.redis.errors = (LastError(operation, "no", 1, 0.0, is_silence),)
    tiers.look_up(computing=computing(1.0))
    tiers.answer_scan(5)
    tiers.look_up(computing=computing(1.0))
    assert tiers.redis.scanned == [], "it is not even asked"
    assert tiers.counted("miss_") == {counter: 10}
    failed = 2 * (counter != "miss_slower")
    assert tiers.counted("lookups_") == ({"lookups_failed": failed} if failed else {})
    # Of the probe.
    tiers.end(tiers.redis, rest=ReadOutcome.TIMED_OUT)
    late = "miss_deadline" if counter == "miss_slower" else counter
    assert tiers.counted("miss_") == {counter: 10 + (late == counter)} | (
        {late: 1} if late != counter else {}
    )


def test_a_lookup_that_was_cancelled_asks_nothing(tiers: Tiers) -> None:
    tiers.redis.is_probed = False
    tiers.look_up().cancel()
    tiers.redis.is_probed = True
    tiers.pass_time(1)
    assert tiers.redis.scanned == []


def test_a_tier_that_has_answered_is_not_given_up_later(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up: list[float] = []
    monkeypatch.setattr(TransferRate, "gave_up", lambda _, now_s: given_up.append(now_s))
    tiers.look_up(computing=computing(0.01))
    tiers.answer_scan(0)
    assert [length for length, _ in tiers.found] == [0]
    tiers.pass_time(120)
    assert given_up == []


def test_one_chunk_shows_the_rate_and_the_rest_follows(diskless: Tiers) -> None:
    diskless.look_up(computing=computing(100.0))
    diskless.answer_scan(5)
    assert [job.key for job in diskless.redis.read] == KEYS[:1]
    diskless.end(diskless.redis, ReadOutcome.LOADED)
    assert [job.key for job in diskless.redis.read] == KEYS[1:]
    diskless.end(diskless.redis, rest=ReadOutcome.LOADED)
    assert diskless.found == [(5, {"disk": 0, "Redis": 4})]
    assert diskless.counted("probes") == {"probes": 1}


def test_what_a_store_is_gathering_is_waited_for(diskless: Tiers) -> None:
    """It says nothing of a tier, and needs none."""
    entry = diskless.cache.reserve(FORM, HASHES[0])
    assert entry is not None
    diskless.look_up(computing=computing(1.0), hashes=HASHES[:1])
    assert (diskless.found, diskless.redis.scanned) == ([], [])
    diskless.cache.publish(entry)
    assert diskless.found == [(1, {"disk": 0, "Redis": 0})]


def test_lookups_side_by_side_wait_for_one_chunk(diskless: Tiers) -> None:
    for name in ("one", "two"):
        diskless.look_up(computing=computing(100.0), hashes=block_hashes(name, 2))
        diskless.answer_scan(2)
    assert len(diskless.redis.read) == 1
    diskless.end(diskless.redis, ReadOutcome.LOADED)
    assert len(diskless.redis.read) == 3
    diskless.end(diskless.redis, rest=ReadOutcome.LOADED)
    assert [length for length, _ in diskless.found] == [2, 2]


def test_a_chunk_that_fails_to_show_the_rate_is_not_tried_again(diskless: Tiers) -> None:
    """The engine is busy, so it could be waited for."""
    engine = computing(1.0, busy_s=60.0)
    diskless.look_up(computing=engine)
    diskless.answer_scan(5)
    diskless.end(diskless.redis, ReadOutcome.UNAVAILABLE)
    assert diskless.found == [(0, {"disk": 0, "Redis": 0})]
    diskless.end(diskless.redis, rest=ReadOutcome.LOADED)


def test_room_is_waited_for_as_long_as_computing_takes(narrow: Tiers) -> None:
    measured(narrow, FORM.chunk_bytes * 1e6)
    narrow.begin("another", 5)
    narrow.end(narrow.redis, rest=ReadOutcome.LOADED)
    waiting = narrow.look_up(computing=computing(0.02))
    narrow.answer_scan(5)
    narrow.run(waiting.end.reasons.copy)
    assert len(narrow.found) == 1
    narrow.run(lambda: len(narrow.found) == 2)
    assert narrow.found[1] == (0, {"disk": 0, "Redis": 0})
    assert narrow.counted("lookups_") == {"lookups_cut": 1}
    (_, rate) = narrow.cache.rates
    assert rate.per_second() > 0, "it says nothing about Redis"


def test_what_was_given_up_is_loaded_anew(diskless: Tiers) -> None:
    """A cancelled load may take long to end, and delivers nothing."""
    first = diskless.look_up()
    diskless.answer_scan(5)
    first.cancel()
    diskless.look_up()
    diskless.answer_scan(5)
    assert [job.key for job in diskless.redis.read] == [*KEYS, *KEYS]
    diskless.end(diskless.redis, *[ReadOutcome.CANCELLED] * 5)
    assert diskless.found == []
    diskless.end(diskless.redis, rest=ReadOutcome.LOADED)
    assert diskless.found == [(5, {"disk": 0, "Redis": 5})]
