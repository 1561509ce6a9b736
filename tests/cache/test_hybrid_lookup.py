# SPDX-License-Identifier: Apache-2.0
"""Lookups of chunks with one part per group of layers, of this node and of others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmcache_redis.cache.lookup import PrefixLookup
from lmcache_redis.cache.pacing import Part, PrefixNeeds
from lmcache_redis.cache.parts import LookupRequest
from lmcache_redis.cache.pool import Entry, EntryState
from lmcache_redis.chunks.names import ChunkForm, ChunkNames, PartNames, Reach, opaque_pages
from lmcache_redis.tier_kinds import DISK, REDIS
from lmcache_redis.tiers import (
    CallOutcome,
    ChunkIO,
    ExistsResult,
    ReadDone,
    ReadOutcome,
    ScanResult,
    WriteDone,
    WriteOutcome,
)
from tests.cache.played import PlayedTier, World, loaded_from
from tests.harness import block_hashes

CHUNK = 256
HASHES = block_hashes("prompt", 16)
ALL, STATE, WINDOW = Reach(), Reach("state"), Reach("window", 512)


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


class Model(World):
    """Groups of layers, a disk with an index and Redis, in which nothing is stored yet.

    remote: groups of another node, which loads their parts itself: rows after the others.
    """

    def __init__(
        self, reaches: Sequence[Reach], remote: Sequence[Reach] = (), *, slots: int = 256
    ) -> None:
        self.reaches = [*reaches, *remote]
        self.forms = [  # in a namespace each
            ChunkForm.of(ChunkNames(bytes([row]) * 32), "m", 0, opaque_pages(64), 64, reach)
            for row, reach in enumerate(self.reaches)
        ]
        self.local = len(reaches)
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

    def hold_all(self, row: int, chunks: int) -> None:
        for chunk_hash in HASHES[:chunks]:
            self.hold(chunk_hash, self.forms[row])

    def begin(self, *, first_chunk: int = 0, chunks: int = 16) -> PrefixLookup:
        def done(found: PrefixLookup) -> None:
            needs = PrefixNeeds(self.reaches, first_chunk, CHUNK).parts(found.bound)
            held, states = found.parts.take(), found.parts._states
            later = [part for part, state in states.items() if state.is_later]
            assert sorted([*held, *later]) == sorted(part for part in needs if part[1] < self.local)
            assert not later or len(held) + len(later) > self.cache.pool.capacity
            for (chunk, _), entry in held.items():
                assert (entry.state, entry.pins > 0) == (EntryState.READY, True)
                (view,) = self.cache.views(entry)
                assert bytes(view) == HASHES[chunk][:1] * 64
            self.answers.append((found.bound, held, loaded_from(found)))

        deadline_s = time.monotonic() + 60.0
        remote = [
            PartNames(form.names, form.model_name, form.kv_rank, reach=form.reach)
            for form in self.forms[self.local :]
        ]
        request = LookupRequest(
            self.forms[: self.local], HASHES[:chunks], deadline_s, first_chunk, CHUNK, remote
        )
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
        self.release(held.values())
        self.close()
        return length


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


def test_a_window_that_exists_only_at_chunk_nine_answers_nine() -> None:
    model = Model([ALL, WINDOW])
    model.store(0, range(16))
    model.store(1, [7, 8])
    told = model.listen()
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


def test_a_prefix_without_chunks_costs_one_question() -> None:
    model = Model([ALL, *[WINDOW] * 5])
    for row in range(1, 6):
        model.store(row, range(16))
    assert model.look_up() == 0
    assert len(model.redis.questions) == 1


def test_what_is_in_memory_or_on_disk_is_not_asked_for() -> None:
    model = Model([ALL, WINDOW, STATE])
    model.hold_all(0, 16)
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
    assert model.look_up() == 16
    assert len(model.redis.questions) == 1, "now all is in memory"


def test_parts_that_the_prefix_does_not_need_keep_their_age() -> None:
    """Otherwise each lookup would keep windows in memory that no one will read again."""
    model = Model([ALL, WINDOW])
    old = model.hold(HASHES[3], model.forms[1])
    model.hold_all(0, 16)
    model.store(1, [14, 15])
    assert model.look_up() == 16
    assert next(iter(model.cache.pool._idle)) == old.key


# ------------------------------------------------------------------ it shrinks


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
    model.release(others)
    model.settle()
    assert model.answer() == 4


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
    model.hold_all(0, 6)
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
    ("outcome", "miss"),
    [
        (CallOutcome.UNAVAILABLE, "miss_redis_error"),
        (CallOutcome.TIMED_OUT, "miss_redis_silent"),
    ],
)
def test_questions_that_fail_leave_what_is_in_memory(outcome: CallOutcome, miss: str) -> None:
    model = Model([ALL, STATE])
    model.hold_all(0, 6)
    model.hold(HASHES[3], model.forms[1])
    model.redis.fails = outcome
    assert model.look_up() == 4
    assert [kind for kind, _ in model.redis.questions] == ["scan", "scan", "exists"]
    assert model.counted() == {miss: 12, "lookups_failed": 1}


@pytest.mark.parametrize("row", [0, 1])
def test_what_is_not_known_ends_the_prefix_but_is_not_absent(row: int) -> None:
    model = Model([ALL, STATE])
    model.store(0, range(16))
    model.store(1, [4, 9])
    model.redis.unsaid = {model.key(10 if row == 0 else 9, row)}
    told = model.listen()
    assert model.look_up() == (10 if row == 0 else 5)
    absent = {"miss_absent": 1} if row else {}
    assert model.counted("miss_") == {"miss_redis_error": 10 if row else 6} | absent
    assert not [key for key, _, there in told if key in model.redis.unsaid and not there]


# ---------------------------------------------------------------- it is cancelled


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
            model.release(held.values())
        released = len(model.answers)
    assert all(map(has_ended, lookups))
    assert len(model.answers) == 2 - ended
    model.close()


# ------------------------------------------------------------------ other nodes


def test_one_scan_asks_for_the_missing_and_the_remote() -> None:
    nodes = Model([ALL], [ALL])
    nodes.store(0, range(8))
    nodes.store(1, range(6))
    assert nodes.look_up(chunks=8) == 6
    every = [(chunk, row) for chunk in range(8) for row in range(2)]
    assert nodes.redis.questions == [("scan", nodes.keys(*every))]
    assert nodes.redis.loaded == nodes.keys(*((chunk, 0) for chunk in range(6)))
    assert nodes.counted("miss_") == {"miss_absent": 2}


def test_what_this_node_has_does_not_count_for_others() -> None:
    """The other node cannot load it before it is in Redis, even if the bytes are the same."""
    nodes = Model([ALL], [ALL])
    nodes.forms[1] = nodes.forms[0]
    nodes.hold_all(0, 8)
    nodes.disk.stored.update(nodes.keys(*((chunk, 0) for chunk in range(8))))
    assert nodes.look_up(chunks=8) == 0
    nodes.store(1, range(5))
    assert nodes.look_up(chunks=8) == 5
    assert nodes.redis.loaded == nodes.disk.loaded == []


def test_windows_of_other_nodes_are_asked_about_not_loaded() -> None:
    nodes = Model([ALL, WINDOW], [ALL, WINDOW, STATE])
    for row in range(4):
        nodes.store(row, range(8))
    nodes.store(4, [2, 5])
    assert nodes.look_up(chunks=8) == 6
    assert [kind for kind, _ in nodes.redis.questions] == ["scan", "scan", "exists"]
    loaded = [(chunk, 0) for chunk in range(6)] + [(4, 1), (5, 1)]
    assert sorted(nodes.redis.loaded) == sorted(nodes.keys(*loaded))


def test_a_lookup_without_an_answer_ends_at_its_deadline() -> None:
    for reaches in ([ALL], [ALL, WINDOW]):
        nodes = Model(reaches, reaches)
        for row in range(len(reaches)):
            nodes.hold_all(row, 8)
        nodes.redis.silent_from = 0
        lookup = nodes.begin(chunks=8)
        nodes.settle()
        lookup._expire()
        assert nodes.answer() == 0


def test_a_node_without_workers_only_asks() -> None:
    for reaches in ([ALL], [ALL, WINDOW]):
        nodes = Model([], reaches)
        for row in range(len(reaches)):
            nodes.store(row, range(7))
        assert nodes.look_up(chunks=8) == 7
        assert nodes.redis.loaded == []


SOME_REACHES = st.lists(st.sampled_from([ALL, STATE, WINDOW]), min_size=1, max_size=2)


@given(SOME_REACHES, SOME_REACHES, st.data())
def test_the_prefix_is_the_longest_that_every_node_can_have(
    local: list[Reach], remote: list[Reach], data: st.DataObject
) -> None:
    nodes = Model(local, remote)
    chunks = st.lists(st.sampled_from(range(8)), max_size=8) | st.just([*range(8)])
    found: set[Part] = set()
    for row in range(len(nodes.reaches)):
        stored, held = data.draw(chunks), data.draw(chunks)
        nodes.store(row, stored)
        for chunk in set(held):
            nodes.hold(HASHES[chunk], nodes.forms[row])
        found |= {(chunk, row) for chunk in stored}
        found |= {(chunk, row) for chunk in held if row < nodes.local}
    needs = PrefixNeeds(nodes.reaches, 0, CHUNK)
    assert nodes.look_up(chunks=8) == max(n for n in range(9) if {*needs.parts(n)} <= found)
