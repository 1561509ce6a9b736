# SPDX-License-Identifier: Apache-2.0
"""Lookups of chunks with one part per group of layers: what they find, ask for and load."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmcache_redis.cache.arena import Arena
from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.disk.tier import DiskTier
from lmcache_redis.cache.lookup import PrefixLookup
from lmcache_redis.cache.pacing import Part, PrefixNeeds
from lmcache_redis.cache.parts import LookupRequest
from lmcache_redis.cache.pool import Entry, EntryState
from lmcache_redis.chunks.names import ChunkForm, ChunkNames, Reach, opaque_pages
from lmcache_redis.resp import RedisOptions, RedisPlane
from lmcache_redis.tier_kinds import DISK, REDIS
from lmcache_redis.tiers import (
    Backing,
    CallOutcome,
    ChunkIO,
    ExistsResult,
    ReadDone,
    ReadOutcome,
    ScanResult,
    WriteDone,
    WriteOutcome,
)
from tests.cache.auditing import audit
from tests.cache.played import PlayedTier, World, loaded_from
from tests.harness import block_hashes, wait_until
from tests.servers import RedisServer

CHUNK = 256
PART_BYTES, SLOT_BYTES = 10_000, 4096
HASHES = block_hashes("prompt", 16)
ALL, STATE, WINDOW = Reach(), Reach("state"), Reach("window", 512)
GEMMA = [ALL, *[WINDOW] * 5]


def forms_of(
    reaches: Sequence[Reach], part_bytes: int = 64, slot_bytes: int = 64
) -> list[ChunkForm]:
    """Rows with a namespace each, as the groups of a model have."""
    return [
        ChunkForm.of(
            ChunkNames(bytes([row]) * 32), "m", 0, opaque_pages(part_bytes), slot_bytes, reach
        )
        for row, reach in enumerate(reaches)
    ]


class StoredTier(PlayedTier):
    """Answers from `stored`, at once unless it is told to wait.

    unsaid: keys of which it does not say whether it has them. broken: how reads of these keys end.
    waits: `end_reads` ends reads. silent_from: the number of the first question that gets no
    answer.
    """

    def __init__(self, name: str, stored: set[bytes], *, indexed: bool = False) -> None:
        super().__init__(name, stored if indexed else None)
        self.stored = stored
        self.unsaid: set[bytes] = set()
        self.broken: dict[bytes, ReadOutcome] = {}
        self.fails = CallOutcome.DONE
        self.waits = False
        self.silent_from = 1 << 30
        self.questions: list[tuple[str, list[bytes]]] = []
        self.loaded: list[bytes] = []

    def scan(
        self, keys: Sequence[bytes], deadline: float, done: Callable[[ScanResult], None]
    ) -> None:
        self.questions.append(("scan", [*keys]))
        gap = next((n for n, key in enumerate(keys) if self.says(key) is not True), len(keys))
        if len(self.questions) < self.silent_from:
            is_known = gap == len(keys) or self.says(keys[gap]) is not None
            outcome = self.fails if is_known else CallOutcome.UNAVAILABLE
            done(ScanResult(outcome, gap if self.fails is CallOutcome.DONE else 0))

    def exists(
        self, keys: Sequence[bytes], deadline: float, done: Callable[[ExistsResult], None]
    ) -> None:
        self.questions.append(("exists", [*keys]))
        present = [self.says(key) for key in keys]
        if len(self.questions) < self.silent_from:
            done(ExistsResult(self.fails, present if self.fails is CallOutcome.DONE else ()))

    def says(self, key: bytes) -> bool | None:
        return None if key in self.unsaid else key in self.stored

    def load_all(self, jobs: Sequence[ChunkIO], done: ReadDone) -> None:
        super().load_all(jobs, done)
        if not self.waits:
            self.end_reads()

    def store_all(self, jobs: Sequence[ChunkIO], done: WriteDone) -> None:
        for job in jobs:
            done(job, WriteOutcome.STORED)

    def end_reads(self, count: int = 1 << 30) -> None:
        """Ends the first `count` reads that are in flight."""
        jobs, self.read = self.read[:count], self.read[count:]
        for job in jobs:
            outcome = self.broken.get(job.key, ReadOutcome.LOADED)
            if job.key not in self.stored:
                outcome = ReadOutcome.MISSING
            if outcome is ReadOutcome.LOADED:
                for slot in job.slots:
                    slot[:] = job.frame.chunk_hash[:1] * len(slot)
                self.loaded.append(job.key)
            self.read_done(job, ReadOutcome.CANCELLED if job in self.cancelled else outcome)


def later_parts(lookup: PrefixLookup) -> list[Part]:
    return [part for part, state in lookup.parts._states.items() if state.is_later]


class Model(World):
    """Groups of layers, a disk with an index and Redis, in which nothing is stored yet."""

    def __init__(self, reaches: Sequence[Reach], *, slots: int = 256) -> None:
        self.reaches = [*reaches]
        self.forms = forms_of(reaches)
        self.disk = StoredTier("disk", set(), indexed=True)
        self.redis = StoredTier("Redis", set())
        super().__init__([(self.disk, DISK), (self.redis, REDIS)], slots=slots)
        self.answers: list[tuple[int, dict[Part, Entry], dict[str, int]]] = []

    def key(self, chunk: int, row: int) -> bytes:
        return self.forms[row].key(HASHES[chunk])

    def keys(self, *parts: Part) -> list[bytes]:
        return [self.key(*part) for part in parts]

    def store(self, row: int, chunks: Sequence[int]) -> None:
        self.redis.stored.update(self.key(chunk, row) for chunk in chunks)

    def begin(self, *, first_chunk: int = 0, chunks: int = 16) -> PrefixLookup:
        def done(found: PrefixLookup) -> None:
            needs = PrefixNeeds(self.reaches, first_chunk, CHUNK)
            held, later = found.parts.take(), later_parts(found)
            assert sorted([*held, *later]) == sorted(needs.parts(found.bound)), "and no more"
            assert not later or len(held) + len(later) > self.cache.pool.capacity
            for (chunk, _), entry in held.items():
                assert (entry.state, entry.pins > 0) == (EntryState.READY, True)
                (view,) = self.cache.views(entry)
                assert bytes(view) == HASHES[chunk][:1] * 64
            self.answers.append((found.bound, held, loaded_from(found)))

        deadline_s = time.monotonic() + 60.0
        request = LookupRequest(self.forms, HASHES[:chunks], deadline_s, first_chunk, CHUNK)
        lookup = PrefixLookup(self.cache, request, done)
        lookup.start()
        return lookup

    def settle(self) -> None:
        while self.loop._posted or self.cache.backlog:
            self.loop.run_posted()
            self.loop.run_due()

    def look_up(self, *, first_chunk: int = 0, chunks: int = 16) -> int:
        """The length found; its pins are released."""
        self.begin(first_chunk=first_chunk, chunks=chunks)
        self.settle()
        return self.answer()

    def answer(self) -> int:
        ((length, held, _),) = self.answers
        self.answers.clear()
        for entry in held.values():
            self.cache.pool.unpin(entry)
        self.check_no_pins()
        return length

    def check_no_pins(self) -> None:
        assert self.cache.pool.pinned == 0
        audit(self.cache.pool)


# ------------------------------------------------------- what is asked and loaded


def test_redis_is_asked_for_exactly_what_the_prefix_needs() -> None:
    model = Model([ALL, WINDOW, STATE])
    for row in range(3):
        model.store(row, range(12))
    assert model.look_up() == 12
    assert model.redis.questions == [
        ("scan", model.keys(*[(chunk, 0) for chunk in range(16)])),
        ("scan", model.keys((10, 1), (11, 1), (11, 2))),
    ]
    every = [*[(chunk, 0) for chunk in range(12)], (10, 1), (11, 1), (11, 2)]
    assert sorted(model.redis.loaded) == sorted(model.keys(*every))
    assert model.counted("miss_") == {"miss_absent": 4}


def test_a_hit_of_windows_moves_a_third_of_the_bytes() -> None:
    model = Model(GEMMA)
    for row in range(6):
        model.store(row, range(16))
    assert model.look_up() == 4096 // CHUNK
    assert len(model.redis.loaded) == 16 + 5 * 2
    assert model.counted()["loaded_bytes"] * 3 <= 16 * 6 * 64


def test_a_window_that_exists_only_at_chunk_nine_answers_nine() -> None:
    model = Model([ALL, WINDOW])
    model.store(0, range(16))
    model.store(1, [7, 8])
    told: list[tuple[bytes, int | None, bool]] = []
    model.cache.pool.on_change = lambda *change: told.append(change)
    assert model.look_up() == 9
    absent = {key for key, tier, is_there in told if tier == 1 and not is_there}
    assert absent == {*model.keys(*[(chunk, 1) for chunk in range(15) if chunk not in (7, 8)])}
    _, scan_window, rest = model.redis.questions
    assert scan_window == ("scan", model.keys((14, 1), (15, 1)))
    # Chunk 14 is missing: no prefix of 15 or 16 chunks is possible.
    assert rest == ("exists", model.keys(*[(chunk, 1) for chunk in range(14)]))
    every = [*[(chunk, 0) for chunk in range(9)], (7, 1), (8, 1)]
    assert sorted(model.redis.loaded) == sorted(model.keys(*every))
    assert model.counted("miss_") == {"miss_absent": 7}


def test_the_last_question_leaves_out_what_is_known() -> None:
    model = Model([ALL, WINDOW])
    model.store(0, range(16))
    model.hold(HASHES[3], model.forms[1])
    model.disk.stored.update(model.keys((4, 1)))
    model.store(1, [9, 10, 14])
    assert model.look_up() == 11
    # Chunk 14 was found by the scan, which ended at chunk 15.
    unknown = [chunk for chunk in range(14) if chunk not in (3, 4)]
    assert model.redis.questions[2] == ("exists", model.keys(*[(chunk, 1) for chunk in unknown]))


def test_without_the_window_there_is_no_prefix() -> None:
    model = Model([ALL, WINDOW])
    model.store(0, range(16))
    assert model.look_up() == 0
    assert model.redis.loaded == []
    assert model.counted("miss_") == {"miss_absent": 16}


def test_states_with_gaps_end_the_prefix_at_a_common_one() -> None:
    model = Model([STATE, STATE])
    model.store(0, [3, 7, 11])
    model.store(1, [3, 11, 15])
    assert model.look_up() == 12
    assert [kind for kind, _ in model.redis.questions] == ["scan", "exists"], "no row needs all"
    assert sorted(model.redis.loaded) == sorted(model.keys((11, 0), (11, 1)))


def test_a_prefix_without_chunks_costs_one_question() -> None:
    model = Model(GEMMA)
    for row in range(1, 6):
        model.store(row, range(16))
    assert model.look_up() == 0
    assert len(model.redis.questions) == 1


def test_what_is_in_memory_or_on_disk_is_not_asked_for() -> None:
    model = Model([ALL, WINDOW, STATE])
    for chunk in range(16):
        model.hold(HASHES[chunk], model.forms[0])
    model.hold(HASHES[14], model.forms[1])
    model.disk.stored.update(model.keys((15, 1)))
    model.store(2, [15])
    model.begin()
    model.settle()
    ((length, _, loaded),) = model.answers
    assert (length, loaded) == (16, {"disk": 0, "Redis": 1}), "the last tier that a chunk came from"
    assert model.redis.questions == [("scan", model.keys((15, 2)))]
    assert model.disk.loaded == model.keys((15, 1))
    model.answer()


def test_everything_in_memory_asks_nothing() -> None:
    model = Model([ALL, WINDOW])
    for chunk in range(16):
        model.hold(HASHES[chunk], model.forms[0])
    for chunk in (14, 15):
        model.hold(HASHES[chunk], model.forms[1])
    assert model.look_up() == 16
    assert (model.redis.questions, model.counted()) == ([], {})


def test_parts_that_the_prefix_does_not_need_keep_their_age() -> None:
    """Otherwise each lookup would keep windows in memory that no one will read again."""
    model = Model([ALL, WINDOW])
    old = model.hold(HASHES[3], model.forms[1])
    for chunk in range(16):
        model.hold(HASHES[chunk], model.forms[0])
    model.store(1, [14, 15])
    assert model.look_up() == 16
    assert next(iter(model.cache.pool._idle)) == old.key


def test_chunks_that_the_engine_has_are_not_needed() -> None:
    model = Model([ALL, WINDOW])
    model.store(0, range(16))
    model.store(1, [0])
    assert model.look_up(first_chunk=7, chunks=1) == 1
    assert model.look_up(first_chunk=0, chunks=1) == 1


# ------------------------------------------------------------------ it shrinks


@pytest.mark.parametrize("outcome", [ReadOutcome.MISSING, ReadOutcome.CORRUPT])
def test_after_a_failed_load_a_shorter_prefix_is_loaded(outcome: ReadOutcome) -> None:
    model = Model([ALL, WINDOW])
    for row in range(2):
        model.store(row, range(16))
    model.redis.broken[model.key(10, 0)] = outcome
    assert model.look_up() == 10
    assert [kind for kind, _ in model.redis.questions] == ["scan", "scan", "exists"]
    # Of the window: for a prefix of 16, and then of 10.
    assert {*model.keys((8, 1), (9, 1))} <= {*model.redis.loaded}
    assert not {*model.keys((7, 1), (10, 1))} & {*model.redis.loaded}


def test_a_window_that_fails_too_makes_the_prefix_shorter_still() -> None:
    model = Model([ALL, WINDOW])
    model.store(0, range(16))
    model.store(1, [2, 3, 8, 9, 14, 15])
    model.redis.broken = dict.fromkeys(model.keys((15, 1), (9, 1)), ReadOutcome.TORN)
    assert model.look_up() == 4
    assert [kind for kind, _ in model.redis.questions].count("exists") == 1, "it is known by then"
    assert model.counted("miss_") == {"miss_mixed_stores": 2, "miss_absent": 5 + 5}


def test_a_prefix_larger_than_the_pool_is_loaded_in_order() -> None:
    model = Model([ALL, WINDOW, WINDOW], slots=10)
    for row in range(3):
        model.store(row, range(16))
    assert model.look_up() == 16
    assert model.counted("miss_") == {}
    assert model.redis.loaded == model.keys(*[(chunk, 0) for chunk in range(10)])
    assert model.redis.questions[1:] == [
        ("scan", model.keys((14, 1), (14, 2), (15, 1), (15, 2)))
    ], "what is loaded later must be there"


def test_a_prefix_that_just_exceeds_the_pool_does_not_wait() -> None:
    model = Model([ALL], slots=15)
    model.store(0, range(16))
    assert model.look_up() == 16
    assert model.redis.loaded == model.keys(*[(chunk, 0) for chunk in range(15)])


def test_memory_that_others_hold_is_waited_for() -> None:
    model = Model([ALL, STATE], slots=8)
    others = [model.hold(name, forms_of([ALL])[0]) for name in block_hashes("another", 5)]
    for entry in others:
        model.cache.pool.pin(entry)
    for row in range(2):
        model.store(row, range(16))
    model.begin()
    model.settle()
    assert model.answers == []
    for entry in others:
        model.cache.pool.unpin(entry)
    model.settle()
    assert model.answer() == 16
    assert len(model.redis.loaded) == 8


def test_what_leaves_the_pool_during_the_wait_is_asked_for() -> None:
    """Although all was known before."""
    model = Model([ALL, STATE], slots=6)
    others = [model.hold(name, model.forms[0]) for name in block_hashes("another", 3)]
    for entry in others:
        model.cache.pool.pin(entry)
    first = model.hold(HASHES[0], model.forms[0])
    model.store(0, range(5))
    model.store(1, [3])
    model.begin(chunks=5)
    model.settle()
    assert model.answers == []
    assert model.redis.questions[-1][0] == "exists"
    model.cache.pool.discard(first)
    for entry in others:
        model.cache.pool.unpin(entry)
    model.settle()
    assert model.answer() == 4


def test_a_pool_without_any_room_answers_nothing() -> None:
    model = Model([ALL, WINDOW], slots=1)
    entry = model.hold(block_hashes("another", 1)[0], model.forms[0])
    model.cache.pool.pin(entry)
    for row in range(2):
        model.store(row, range(16))
    model.begin()
    model.settle()
    model.cache.pool.unpin(entry)
    assert model.answer() == 0


def test_the_deadline_leaves_the_longest_ready_prefix() -> None:
    model = Model([ALL, WINDOW])
    for row in range(2):
        model.store(row, range(16))
    for chunk in (3, 4):
        model.hold(HASHES[chunk], model.forms[1])
    lookup = model.begin()
    model.redis.waits = True
    model.settle()
    model.redis.end_reads(8)  # of the rows' parts in the order of chunks
    model.settle()
    assert model.answers == []
    lookup._expire()
    assert model.redis.cancelled != []
    model.redis.end_reads()
    model.settle()
    assert model.answer() == 5
    # Those that it cancels are not counted again.
    assert model.counted("miss_")["miss_deadline"] == 11


@pytest.mark.parametrize("question", [1, 2, 3])
def test_the_deadline_during_a_question_leaves_what_is_in_memory(question: int) -> None:
    model = Model([ALL, STATE])
    model.store(0, range(6, 16))
    model.store(1, [12])
    for chunk in range(6):
        model.hold(HASHES[chunk], model.forms[0])
    model.hold(HASHES[3], model.forms[1])
    model.redis.silent_from = question
    lookup = model.begin()
    model.settle()
    assert (len(model.redis.questions), model.answers) == (question, [])
    lookup._expire()
    assert model.answer() == 4
    assert model.counted("lookups_") == {"lookups_failed": 1}
    missed = model.counted("miss_")
    assert missed == {"miss_redis_silent": 12 - missed.get("miss_absent", 0), **missed}
    assert set(missed) <= {"miss_redis_silent", "miss_absent"}


@pytest.mark.parametrize(
    ("outcome", "counter"),
    [
        (CallOutcome.UNAVAILABLE, "miss_redis_error"),
        (CallOutcome.TIMED_OUT, "miss_redis_silent"),
    ],
)
def test_a_tier_that_cannot_be_asked_leaves_what_is_in_memory(
    outcome: CallOutcome, counter: str
) -> None:
    model = Model([ALL, STATE])
    for chunk in range(6):
        model.hold(HASHES[chunk], model.forms[0])
    model.hold(HASHES[3], model.forms[1])
    model.redis.fails = outcome
    assert model.look_up() == 4
    assert model.counted() == {counter: 12, "lookups_failed": 1}


@pytest.mark.parametrize("row", [0, 1])
def test_what_is_not_known_ends_the_prefix_but_is_not_absent(row: int) -> None:
    model = Model([ALL, STATE])
    model.store(0, range(16))
    model.store(1, [4, 9])
    model.redis.unsaid = {model.key(10 if row == 0 else 9, row)}
    told: list[tuple[bytes, int | None, bool]] = []
    model.cache.pool.on_change = lambda *change: told.append(change)
    assert model.look_up() == (10 if row == 0 else 5)
    absent = {"miss_absent": 1} if row else {}
    assert model.counted("miss_") == {"miss_redis_error": 10 if row else 6} | absent
    assert not [key for key, _, there in told if key in model.redis.unsaid and not there]


def test_a_tier_that_breaks_keeps_the_memory_of_what_it_took(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model([ALL, WINDOW])
    for chunk in range(5):
        model.hold(HASHES[chunk], model.forms[0])
    model.store(0, range(16))
    model.store(1, range(15))
    model.redis.waits = True
    load_all = model.redis.load_all

    def bug(jobs: Sequence[ChunkIO], done: ReadDone) -> None:
        load_all(jobs, done)
        raise RuntimeError("a bug")

    monkeypatch.setattr(model.redis, "load_all", bug)
    lookup = model.begin()
    model.settle()
    assert "a bug" in caplog.text
    lookup._expire()
    assert model.cache.pool.pinned == len(model.redis.read), "the tier may still write to it"
    model.redis.end_reads()
    model.settle()
    assert model.answer() == 0


# ---------------------------------------------------------------- it is cancelled


@pytest.mark.parametrize("state", ["first scan", "second scan", "exists", "loading", "shrunk"])
def test_a_cancelled_lookup_leaves_no_pins(state: str) -> None:
    model = Model([ALL, WINDOW])
    model.hold(HASHES[0], model.forms[0])
    model.hold(HASHES[15], model.forms[1])
    model.store(0, range(16))
    model.store(1, [4, 5] if state == "exists" else range(16))
    questions = ["first scan", "second scan", "exists", "shrunk"]
    if state in questions:
        model.redis.silent_from = min(3, 1 + questions.index(state))
    model.redis.broken[model.key(6, 0)] = ReadOutcome.CORRUPT
    model.redis.waits = True
    lookup = model.begin()
    model.settle()
    if state == "shrunk":
        model.redis.end_reads(6)
        model.settle()
        assert model.redis.questions[-1][0] == "exists"
    assert (model.redis.read != []) is (state in ("loading", "shrunk"))
    assert model.answers == []
    lookup.cancel()
    model.redis.end_reads()
    model.settle()
    assert model.answers == []
    model.check_no_pins()


def test_a_closed_cache_asks_no_further_tier() -> None:
    model = Model([ALL])
    model.store(0, range(4))
    model.disk.stored.update(model.redis.stored)
    model.disk.broken = dict.fromkeys(model.disk.stored, ReadOutcome.UNAVAILABLE)
    model.disk.waits = True
    model.begin(chunks=4)
    model.settle()
    model.cache.close(0.0)
    model.disk.end_reads()
    model.settle()
    assert model.redis.read == model.redis.loaded == []
    assert model.answer() == 0


# ------------------------------------------------------------------ anything else

REACHES = st.one_of(
    st.just(ALL),
    st.just(STATE),
    st.integers(1, 1200).map(lambda tokens: Reach("window", tokens)),
    st.sampled_from([200, 512, 768, 1024]).map(lambda tokens: Reach("local", tokens)),
)
PLACES = ("nowhere", "pool", "disk", "redis", "redis", "redis", "broken")


@given(
    st.lists(REACHES, min_size=1, max_size=4),
    st.integers(0, 3),
    st.sampled_from([256, 256, 12, 5]),
    st.randoms(use_true_random=False),
    st.sampled_from([0.0, 0.05, 0.3]),
)
def test_the_answer_is_held_and_as_long_as_it_can_be(
    reaches: list[Reach], first_chunk: int, slots: int, random: Random, gaps: float
) -> None:
    """And it ends, with at most three questions, without a pin too many."""
    chunks = 10
    model = Model(reaches, slots=slots)
    there: set[Part] = set()
    damaged: set[Part] = set()
    for chunk in range(chunks):
        for row in range(len(reaches)):
            place = random.choice(PLACES)
            if random.random() < gaps:
                place = "broken" if place == "broken" else "nowhere"
            elif place in ("broken", "nowhere"):
                place = "redis"
            key = model.key(chunk, row)
            if place == "pool" and model.cache.pool.free:
                model.hold(HASHES[chunk], model.forms[row])
            elif place == "disk":
                model.disk.stored.add(key)
            elif place != "nowhere":
                model.redis.stored.add(key)
            if place == "broken":
                model.redis.broken[key] = ReadOutcome.CORRUPT
                damaged.add((chunk, row))
            elif place != "nowhere":
                there.add((chunk, row))
    pooled = {entry.key for entry in model.cache.pool}
    needs = PrefixNeeds(reaches, first_chunk, CHUNK)
    length = model.look_up(first_chunk=first_chunk, chunks=chunks)
    # Of a prefix larger than the pool, what is left for the retrieve is only known to exist.
    found = there if slots == 256 else there | damaged
    assert length <= needs.longest(chunks, found.__contains__)
    assert len(model.redis.questions) <= 3
    has_bounded = any(reach.kind != "all" for reach in reaches)
    if not model.redis.broken and has_bounded:
        fitting = [n for n in range(chunks + 1) if {*needs.parts(n)} <= there]
        assert length == max(fitting)
        wanted = {model.key(*part) for part in needs.parts(length)} - pooled
        loaded = {*model.redis.loaded, *model.disk.loaded}
        assert loaded <= wanted
        assert loaded == wanted or len([*needs.parts(length)]) > slots
    elif slots == 256:
        assert length == needs.longest(chunks, there.__contains__)


def has_ended(lookup: PrefixLookup) -> bool:
    return lookup._state.name == "ENDED"


@given(
    st.lists(REACHES, min_size=1, max_size=3),
    st.sampled_from([64, 14, 7]),
    st.sets(st.integers(0, 29), max_size=6),
    st.lists(st.integers(0, 9), max_size=40),
)
@example([Reach("window", 1026), ALL, Reach("window", 1026)], 7, {15}, [7])  # fits once it is cut
def test_lookups_side_by_side_end_in_any_order_of_events(
    reaches: list[Reach], slots: int, broken: set[int], steps: list[int]
) -> None:
    """Two lookups share loads while reads end, fail, or are overtaken by a deadline or a cancel."""
    model = Model(reaches, slots=slots)
    model.redis.waits = True
    every = [(chunk, row) for chunk in range(10) for row in range(len(reaches))]
    model.redis.stored.update(model.keys(*every))
    model.redis.broken = {
        model.key(*every[n % len(every)]): ReadOutcome.CORRUPT for n in sorted(broken)
    }
    model.disk.stored.update(model.keys(*every[::7]))
    lookups = [model.begin(chunks=10), model.begin(chunks=9)]
    ended = 0
    for step in steps:
        if step < 6:
            model.redis.end_reads(step)
        elif step == 6 and not has_ended(lookups[0]):
            lookups[0]._expire()
        elif step == 7 and not has_ended(lookups[1]):
            lookups[1].cancel()
            ended = 1
        else:
            model.settle()
    released = 0
    for _ in range(2):  # one may wait until the other's pins are released
        while model.redis.read or model.loop._posted or model.cache.backlog:
            model.redis.end_reads()
            model.settle()
        for _, held, _ in model.answers[released:]:
            for entry in held.values():
                model.cache.pool.unpin(entry)
        released = len(model.answers)
    assert all(map(has_ended, lookups))
    assert len(model.answers) == 2 - ended
    model.check_no_pins()


# ------------------------------------------------------------------ a real server


class Served(World):
    """The rows over a directory and Redis."""

    def __init__(self, directory: Path, server: RedisServer, reaches: Sequence[Reach]) -> None:
        self.plane = RedisPlane(RedisOptions(server.url))
        self.plane.start()
        assert self.plane.wait_probed(10).up
        self.forms = forms_of(reaches, PART_BYTES, SLOT_BYTES)
        self.disk = DiskTier(directory, 64 << 20)
        super().__init__([(self.disk, DISK), (self.plane, REDIS)])

    def make_cache(self, backings: Sequence[Backing], slots: int) -> Cache:
        return Cache(self.loop, Arena(8 << 20, SLOT_BYTES), backings, self.metrics)

    def store(self, row: int, chunks: Sequence[int], *, levels: int | None = None) -> None:
        """To the disk and Redis, or only to the disk (1)."""
        for chunk in chunks:
            entry = self.hold(HASHES[chunk], self.forms[row])
            self.cache.write_behind(entry, levels=levels)
        self.run(lambda: not self.cache.backlog)

    def forget(self) -> None:
        """As another node finds it: nothing in memory or on disk."""
        self.cache.pool.clear()
        for form in self.forms:
            self.disk.clear([form.names.common], time.monotonic() + 10, lambda result: None)
        wait_until(
            lambda: not any(self.disk.keys(f.names.common, 0.0, 99).keys for f in self.forms)
        )

    def look_up(self) -> tuple[int, dict[str, int]]:
        found: list[tuple[int, dict[str, int]]] = []

        def done(lookup: PrefixLookup) -> None:
            for (chunk, _), entry in lookup.parts.take().items():
                payload = b"".join(self.cache.views(entry))
                assert payload == HASHES[chunk][:1] * PART_BYTES
                self.cache.pool.unpin(entry)
            found.append((lookup.bound, loaded_from(lookup)))

        deadline_s = time.monotonic() + 15
        request = LookupRequest(self.forms, HASHES, deadline_s, chunk_tokens=CHUNK)
        PrefixLookup(self.cache, request, done).start()
        self.run(lambda: found)
        self.run(lambda: not self.cache.backlog)
        return found[0]


@pytest.fixture
def gemma(tmp_path: Path, server: RedisServer) -> Iterator[Served]:
    served = Served(tmp_path / "disk", server, GEMMA)
    yield served
    assert served.cache.close(5.0)
    served.loop.run_posted()
    served.close()


def calls_of(server: RedisServer, command: str) -> int:
    with server.client() as client:
        stats = client.info("commandstats").get(f"cmdstat_{command}", {})
    return int(stats.get("calls", 0))


def test_a_hit_of_4096_tokens_in_redis(gemma: Served, server: RedisServer) -> None:
    for row in range(6):
        gemma.store(row, range(16))
    gemma.forget()
    server.command("CONFIG", "RESETSTAT")
    assert gemma.look_up() == (16, {"disk": 0, "Redis": 16})
    # Of 16 chunks with six parts each: 16 parts of the full row, and two of each window.
    assert gemma.counted("loaded_") == {"loaded_chunks": 26, "loaded_bytes": 26 * PART_BYTES}
    assert 26 * 3 <= 16 * 6
    assert calls_of(server, "get") == 26 * gemma.forms[0].stripe_count
    assert calls_of(server, "exists") == 2, "16 keys, and ten"
    # The second hit needs no server: what it reports to the tiers is behind its answer.
    server.command("CLIENT", "PAUSE", "200", "ALL")
    assert gemma.look_up() == (16, {"disk": 0, "Redis": 0})
    assert calls_of(server, "get") == 26 * gemma.forms[0].stripe_count


def test_windows_that_a_server_has_for_an_earlier_prompt_only(gemma: Served) -> None:
    gemma.store(0, range(16))
    for row in range(1, 6):
        gemma.store(row, [7, 8, 12])
    gemma.forget()
    assert gemma.look_up() == (9, {"disk": 0, "Redis": 9})
    assert gemma.counted("miss_") == {"miss_absent": 7}


@pytest.mark.parametrize("damage", ["corrupt", "deleted"])
def test_a_part_lost_after_the_scan_brings_the_windows_before_it(
    gemma: Served, server: RedisServer, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for row in range(6):
        gemma.store(row, range(16))
    gemma.forget()
    name = gemma.forms[0].key(HASHES[10]) + b"\0\1"
    if damage == "corrupt":
        with server.client() as client:
            client.setrange(name, int(client.strlen(name)) - 1, b"?")
    else:
        begin_loads = gemma.cache.begin_loads

        def delete_first(jobs: Sequence[ChunkIO]) -> None:
            server.command("DEL", name)
            begin_loads(jobs)

        monkeypatch.setattr(gemma.cache, "begin_loads", delete_first)
    assert gemma.look_up() == (10, {"disk": 0, "Redis": 10})
    counted = gemma.counted("miss_")
    assert counted["miss_corrupt" if damage == "corrupt" else "miss_incomplete"] == 1


def test_parts_from_the_disk_and_from_redis(gemma: Served, server: RedisServer) -> None:
    for row in range(3):
        gemma.store(row, range(16))
    gemma.forget()
    for row in range(3, 6):
        gemma.store(row, range(16), levels=1)
    gemma.cache.pool.clear()
    server.command("CONFIG", "RESETSTAT")
    assert gemma.look_up() == (16, {"disk": 0, "Redis": 16})
    assert gemma.counted("loaded_chunks") == {"loaded_chunks": 16 + 2 * 2}
    assert gemma.counted("disk_loaded_chunks") == {"disk_loaded_chunks": 3 * 2}
    assert calls_of(server, "get") == 20 * gemma.forms[0].stripe_count
