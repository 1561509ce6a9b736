# SPDX-License-Identifier: Apache-2.0
"""Chunks of any size by key: found, loaded once, replaced, removed; no change is undone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from lmcache_redis.cache.cache import Cache
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.chunks.names import ChunkNames
from lmcache_redis.errors import FormatError
from lmcache_redis.objects.cache import Found, HeapMemory, HeldChunk, ObjectCache
from lmcache_redis.tier_kinds import DISK, REDIS
from lmcache_redis.tiers import (
    Backing,
    CallOutcome,
    ExistsResult,
    FramesResult,
    ReadOutcome,
    RemoveResult,
    WriteOutcome,
)
from tests.cache.played import PlayedTier, World

STRIPE_BYTES = 1024
KEEPS = 10_000
NAMES = ChunkNames()


def key_of(number: int) -> ObjectKey:
    return ObjectKey(number.to_bytes(8, "big"), "org/model", 7)


def metadata_of(length: int) -> RemoteMetadata:
    return RemoteMetadata(length, [(length,)], ["uint8"], MemoryFormat.UNDEFINED)


A, B = key_of(1), key_of(2)
A_KEY = NAMES.chunk_key(A)


class Objects(World):
    """An object cache that keeps `KEEPS` bytes, over tiers whose answers the test decides."""

    def __init__(self, *tiers: PlayedTier, keeps: int = KEEPS, capacity: int = 100_000) -> None:
        self.keeps = keeps
        self.capacity = capacity
        counted = [(tier, DISK if tier.index is not None else REDIS) for tier in tiers]
        super().__init__(counted)
        self.objects = ObjectCache(self.cache, NAMES, STRIPE_BYTES, 5.0)

    def make_cache(self, backings: Sequence[Backing], slots: int) -> Cache:
        memory = HeapMemory()
        memory.capacity = self.capacity
        return Cache(self.loop, memory, backings, self.metrics, self.keeps)

    def reserve(self, payload: bytes, key: ObjectKey = A) -> HeldChunk:
        held = self.objects.reserve(key, metadata_of(len(payload)))
        assert held is not None
        held.payload[:] = payload
        return held

    def put(self, key: ObjectKey, payload: bytes) -> list[bool]:
        """The list gets the argument of `written`."""
        written: list[bool] = []
        self.objects.publish(key, self.reserve(payload, key), written.append)
        return written

    def in_memory(self, key: ObjectKey) -> bytes | None:
        held = self.objects.hold(key)
        if held is None:
            return None
        payload = bytes(held.payload)
        self.objects.release(held)
        return payload

    def find(self, key: ObjectKey, first: int = 0) -> list[Found | None]:
        found: list[Found | None] = []
        self.objects.find(key, time.monotonic() + 10, found.append, first)
        self.loop.run_posted()
        return found

    def load(self, key: ObjectKey, found: Found | None) -> list[HeldChunk | None]:
        assert found is not None
        loaded: list[HeldChunk | None] = []
        self.objects.load(key, found, time.monotonic() + 10, loaded.append)
        return loaded

    def remove(self, key: ObjectKey) -> list[bool]:
        removed: list[bool] = []
        self.objects.remove(key, time.monotonic() + 10, removed.append)
        return removed

    def contains(self, key: ObjectKey) -> list[bool]:
        found: list[bool] = []
        self.objects.contains(key, time.monotonic() + 10, found.append)
        return found

    # What the tiers answer.

    def describe(self, tier: PlayedTier, payload: bytes | None, key: ObjectKey = A) -> None:
        """Answer a `describe`: the frame of this payload, or None."""
        chunk_key, done = tier.described.pop(0)
        assert chunk_key == NAMES.chunk_key(key)
        frame = payload and NAMES.frame(key, metadata_of(len(payload)), 100)
        done(FramesResult(CallOutcome.DONE, [frame or None]))
        self.loop.run_posted()

    def end_read(self, tier: PlayedTier, payload: bytes | None) -> None:
        job = tier.read.pop(0)
        if payload is not None:
            whole = memoryview(payload)
            for view in job.slots:
                view[:] = whole[: len(view)]
                whole = whole[len(view) :]
            assert not whole
        tier.read_done(job, ReadOutcome.MISSING if payload is None else ReadOutcome.LOADED)
        self.loop.run_posted()

    def end_write(self, tier: PlayedTier, outcome: WriteOutcome = WriteOutcome.STORED) -> bytes:
        """What was written."""
        job = tier.written.pop(0)
        payload = b"".join(job.slots)
        tier.write_done(job, outcome)
        self.loop.run_posted()
        self.loop.run_posted()
        return payload

    def end_removal(self, tier: PlayedTier, removed: int = 0) -> None:
        _, done = tier.removed.pop(0)
        done(RemoveResult(CallOutcome.DONE, removed))
        self.loop.run_posted()
        self.loop.run_posted()

    def loaded_from(self, tier: PlayedTier, payload: bytes, key: ObjectKey = A) -> HeldChunk:
        (found,) = self.found_in(tier, payload, key)
        loaded = self.load(key, found)
        self.end_read(tier, payload)
        (held,) = loaded
        assert held is not None
        return held

    def found_in(self, tier: PlayedTier, payload: bytes, key: ObjectKey = A) -> list[Found | None]:
        """What a `find` says of a tier that has it."""
        found = self.find(key)
        self.describe(tier, payload, key)
        return found


Make = Callable[..., Objects]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Objects] = []

    def make(*tiers: PlayedTier, **settings: Any) -> Objects:
        made.append(Objects(*tiers, **settings))
        return made[-1]

    yield make
    for objects in made:
        objects.close()


def redis() -> PlayedTier:
    return PlayedTier("Redis")


# ------------------------------------------------------------------ memory alone


def test_a_put_is_found_with_its_metadata_and_cannot_be_written(make: Make) -> None:
    objects = make()
    held = objects.reserve(b"abc")
    assert objects.in_memory(A) is None
    assert objects.contains(A) == [False]
    written: list[bool] = []
    objects.objects.publish(A, held, written.append)
    assert written == [True]
    found = objects.objects.hold(A)
    assert found is not None
    assert (found.metadata, bytes(found.payload)) == (metadata_of(3), b"abc")
    assert found.payload.readonly
    objects.objects.release(found)
    assert objects.contains(A) == [True]
    assert objects.in_memory(B) is None


@pytest.mark.parametrize("change", ["replace", "remove", "evict"])
def test_what_is_held_stays_whole(make: Make, change: str) -> None:
    """At a size whose memory is reused."""
    size = 100_000
    objects = make(keeps=3 * size, capacity=100 * size)
    objects.put(A, b"a" * size)
    held = objects.objects.hold(A)
    assert held is not None
    if change == "remove":
        assert objects.remove(A) == [True]
    for number in range(10, 20):
        objects.put(A if change == "replace" else key_of(number), bytes([number]) * size)
        assert held.payload == b"a" * size
    if change == "replace":
        assert objects.in_memory(A) == bytes([19]) * size
    else:
        assert objects.contains(A) == [change == "evict"], "what is held is not evicted"
    objects.objects.release(held)


def test_what_is_abandoned_leaves_nothing(make: Make) -> None:
    objects = make()
    objects.put(A, b"old")
    objects.objects.abandon(objects.reserve(b"new"))
    assert objects.in_memory(A) == b"old"
    assert objects.cache.pool.used == 3


def test_more_than_may_stay_is_evicted_least_recently_used_first(make: Make) -> None:
    objects = make()
    for number in range(4):
        assert objects.put(key_of(number), bytes(2500)) == [True]
    assert objects.in_memory(key_of(0)) is not None
    assert objects.contains(key_of(1)) == [True]  # does not count as a use
    objects.put(key_of(4), bytes(2500))
    there = [number for number in range(5) if objects.contains(key_of(number)) == [True]]
    assert there == [0, 2, 3, 4]
    assert objects.put(A, bytes(KEEPS + 1)) == [False]
    assert objects.in_memory(A) is None


def test_where_nothing_stays_a_held_chunk_is_there(make: Make) -> None:
    objects = make(tier := redis(), keeps=0)
    written = objects.put(A, b"abc")
    assert objects.in_memory(A) == b"abc"
    assert objects.end_write(tier) == b"abc"
    assert written == [True]
    assert objects.in_memory(A) is None
    assert objects.cache.pool.used == 0


def test_no_room_beside_what_is_held(make: Make) -> None:
    objects = make(capacity=1000)
    objects.put(A, bytes(600))
    held = objects.reserve(bytes(900))  # evicts
    assert objects.in_memory(A) is None
    assert objects.objects.reserve(A, metadata_of(101)) is None
    assert objects.objects.reserve(A, metadata_of(0)) is None
    objects.objects.abandon(held)


def test_a_chunk_without_an_encoding_changes_nothing(make: Make) -> None:
    objects = make(tier := redis())
    objects.objects = ObjectCache(objects.cache, NAMES, 1, 5.0)
    objects.put(A, b"old")
    objects.end_write(tier)
    with pytest.raises(FormatError):
        objects.reserve(bytes(70_000))  # more stripes than can be numbered
    assert objects.in_memory(A) == b"old"


# ------------------------------------------------------------------ tiers


def test_a_put_is_written_through_in_stripes(make: Make) -> None:
    disk, below = PlayedTier("disk", {A_KEY}), redis()
    objects = make(disk, below)
    payload = bytes(range(250)) * 10
    written = objects.put(A, payload)
    assert [len(view) for view in below.written[0].slots] == [1024, 1024, 452]
    assert below.written[0].frame == NAMES.frame(A, metadata_of(2500), 1024)
    assert objects.end_write(below) == payload
    assert written == []
    assert objects.end_write(disk) == payload
    assert written == [True]
    assert objects.cache.pool.pinned == 0


def test_a_tier_that_takes_no_chunk_forgets_the_one_before(make: Make) -> None:
    disk, below = PlayedTier("disk", set()), redis()
    objects = make(disk, below)
    written = objects.put(A, b"abc")
    objects.end_write(below, WriteOutcome.FULL)
    objects.end_write(disk)
    assert below.removed[0][0] == A_KEY
    assert objects.find(A, first=1) == [None], "what Redis has is being removed"
    assert written == []
    objects.end_removal(below)
    assert written == [True]
    assert objects.counted("drop") == {"drop_redis_full": 1}


def test_a_put_that_fails_removes_at_once_or_not_at_all(make: Make) -> None:
    """Others may store meanwhile."""
    objects = make(tier := redis(), keeps=0)
    tier.is_up = False
    written = objects.put(A, b"abc")
    ((_, done),) = tier.removed
    tier.removed.clear()
    assert objects.find(A) == [None]
    done(RemoveResult(CallOutcome.UNAVAILABLE))
    objects.loop.run_posted()
    assert written == [False]
    tier.is_up = True
    assert (objects.cache.failed_removals, objects.cache.backlog) == (0, 0)
    objects.objects.release(objects.loaded_from(tier, b"from another process"))


def test_found_and_loaded_from_the_first_tier_that_has_it(make: Make) -> None:
    disk, below = PlayedTier("disk", set()), redis()
    objects = make(disk, below)
    payload = bytes(range(250))
    found = objects.find(A)
    assert disk.described == []
    objects.describe(below, payload)
    (each,) = found
    assert each is not None
    assert (each.metadata, each.level) == (metadata_of(250), 1)
    loaded = objects.load(A, each)
    assert [len(view) for view in below.read[0].slots] == [100, 100, 50]
    objects.end_read(below, payload)
    (held,) = loaded
    assert held is not None
    assert (held.metadata, bytes(held.payload)) == (metadata_of(250), payload)
    assert held.payload.readonly
    # The disk gets it too.
    objects.loop.run_due()
    objects.loop.run_posted()
    assert objects.end_write(disk) == payload
    objects.objects.release(held)
    assert objects.in_memory(A) == payload


def test_nothing_is_found_that_is_not_ours(make: Make) -> None:
    objects = make(tier := redis())
    for frame in (
        None,
        ChunkNames(bytes(32)).frame(A, metadata_of(5), 5),
        NAMES.frame(B, metadata_of(5), 5),
    ):
        found = objects.find(A)
        (_, done) = tier.described.pop()
        done(FramesResult(CallOutcome.DONE, [frame]))
        objects.loop.run_posted()
        assert found == [None]
    found = objects.find(A)
    tier.described.pop()[1](FramesResult(CallOutcome.TIMED_OUT))
    objects.loop.run_posted()
    assert found == [None]


def test_tiers_are_told_to_keep_what_memory_serves(make: Make) -> None:
    """Now and then, in the stripes that they have. What one has lost: `cache/test_keeping`."""
    objects = make(tier := redis())
    objects.put(A, b"abc")
    objects.end_write(tier)
    objects.objects.release(objects.loaded_from(tier, b"x" * 250, B))
    assert (objects.in_memory(A), objects.in_memory(B)) == (b"abc", b"x" * 250)
    assert not tier.refreshed, "the tier has just had them"
    for entry in objects.cache.pool:
        entry.refreshed_s = -1000.0
    for _ in range(3):
        objects.in_memory(A)
    objects.in_memory(B)
    for key, stripes in ((A_KEY, 1), (NAMES.chunk_key(B), 3)):
        (chunks, done) = tier.refreshed.pop(0)
        assert chunks == [(key, stripes)], "of 100 bytes, as it was found"
        done(ExistsResult(CallOutcome.DONE, [True]))


def test_one_load_is_shared(make: Make) -> None:
    objects = make(tier := redis())
    found = [objects.find(A) for _ in range(5)]
    for _ in range(5):
        objects.describe(tier, b"abc")
    loaded = [objects.load(A, each) for (each,) in found]
    assert len(tier.read) == 1
    objects.end_read(tier, b"abc")
    for (held,) in loaded:
        assert held is not None
        assert held.payload == b"abc"
        objects.objects.release(held)
    assert objects.find(B) == []
    objects.describe(tier, None, B)


def test_what_a_tier_lost_is_read_from_the_next_by_its_frame(make: Make) -> None:
    disk, below = PlayedTier("disk", {A_KEY}), redis()
    objects = make(disk, below)
    found = objects.found_in(disk, b"abc")
    (first,) = found
    assert first is not None
    loaded = objects.load(A, first)
    disk.index = set()
    objects.end_read(disk, None)
    objects.end_read(below, b"abc")
    check_loaded(objects, loaded, b"abc", disk)


def check_loaded(objects: Objects, loaded: list[Any], payload: bytes, disk: PlayedTier) -> None:
    """A chunk that was loaded from below is also written to the disk."""
    (held,) = loaded
    assert held is not None
    assert held.payload == payload
    objects.objects.release(held)
    objects.run(lambda: disk.written)
    objects.end_write(disk)


def test_a_chunk_of_another_size_in_the_next_tier_is_a_miss(make: Make) -> None:
    disk, below = PlayedTier("disk", {A_KEY}), redis()
    objects = make(disk, below)
    found = objects.found_in(disk, b"abc")
    loaded = objects.load(A, found[0])
    disk.index = set()
    objects.end_read(disk, None)
    below.read_done(below.read.pop(), ReadOutcome.FOREIGN)
    objects.loop.run_posted()
    assert loaded == [None]
    (found_below,) = objects.found_in(below, b"other")
    loaded = objects.load(A, found_below)
    objects.end_read(below, b"other")
    check_loaded(objects, loaded, b"other", disk)


def test_a_load_without_room_is_a_miss(make: Make) -> None:
    objects = make(tier := redis(), capacity=100)
    found = objects.found_in(tier, bytes(101))
    assert objects.load(A, found[0]) == [None]


# ------------------------------------------------------------------ nothing is undone


def test_a_put_during_a_load_wins(make: Make) -> None:
    objects = make(tier := redis())
    found = objects.found_in(tier, b"old")
    loaded = objects.load(A, found[0])
    (job,) = tier.read
    written = objects.put(A, b"new")
    assert tier.cancelled == [job]
    assert objects.end_write(tier) == b"new"
    objects.end_read(tier, b"old")
    (held,) = loaded
    assert held is not None
    assert held.payload == b"new"
    objects.objects.release(held)
    assert written == [True]
    assert objects.in_memory(A) == b"new"


def test_a_removal_during_a_load_wins(make: Make) -> None:
    objects = make(tier := redis())
    found = objects.found_in(tier, b"old")
    loaded = objects.load(A, found[0])
    removed = objects.remove(A)
    assert len(tier.removed) == 1
    objects.end_read(tier, b"old")
    assert loaded == [None]
    assert objects.contains(A) == [False], "it is being removed"
    assert objects.load(A, found[0]) == [None]
    assert objects.find(A) == [None]
    objects.end_removal(tier, 1)
    assert removed == [True]
    assert objects.in_memory(A) is None


def test_a_question_from_before_a_change_is_not_joined_after_it(make: Make) -> None:
    objects = make(tier := redis(), keeps=0)
    before = objects.find(A)
    objects.put(A, b"new")
    objects.end_write(tier)
    after = objects.find(A)
    objects.describe(tier, None)
    assert (before, after) == ([None], [])
    objects.describe(tier, b"new")
    assert after[0] is not None


def test_changes_of_a_key_are_carried_out_one_after_the_other(make: Make) -> None:
    objects = make(tier := redis())
    first, second = objects.put(A, b"1"), objects.put(A, b"2")
    third = objects.put(A, b"3")
    other = objects.put(B, b"b")
    assert len(tier.written) == 2, "of each key one"
    assert objects.end_write(tier) == b"1"
    # The second was replaced before it got the lock, and is skipped.
    objects.run(lambda: len(tier.written) == 2)
    assert objects.end_write(tier) == b"b"
    assert (first, second, third, other) == ([True], [True], [], [True])
    removed = objects.remove(A)
    assert len(tier.cancelled) == 1
    fourth = objects.put(A, b"4")
    assert tier.removed == []
    assert objects.end_write(tier, WriteOutcome.CANCELLED) == b"3"
    assert (third, removed, tier.written) == ([True], [], [])
    objects.end_removal(tier, 1)
    assert removed == [True]
    assert objects.end_write(tier) == b"4"
    assert fourth == [True]
    assert objects.in_memory(A) == b"4"


# ------------------------------------------------------------------ keys, flush


def test_contains_asks_the_tiers_in_their_order(make: Make) -> None:
    disk, below = PlayedTier("disk", {A_KEY}), redis()
    objects = make(disk, below)
    assert objects.contains(A) == [True]
    disk.index = set()
    found = objects.contains(A)
    below.asked.pop()[1](ExistsResult(CallOutcome.DONE, [True]))
    objects.loop.run_posted()
    assert found == [True]
    found = objects.contains(A)
    below.asked.pop()[1](ExistsResult(CallOutcome.UNAVAILABLE))
    objects.loop.run_posted()
    assert found == [False]


def test_keys_of_memory_and_of_all_tiers(make: Make) -> None:
    disk = PlayedTier("disk", {A_KEY, NAMES.chunk_key(key_of(3)), NAMES.common + b"else"})
    objects = make(disk)
    objects.put(B, b"b")
    objects.end_write(disk)
    held = objects.reserve(b"not yet")
    pooled, deadline = objects.objects.pooled_keys(), time.monotonic() + 10
    listed = [objects.objects.listed(pooled, deadline, limit) for limit in (4, 3)]
    assert not listed[0].why_not
    assert sorted(listed[0].keys) == [A, B, key_of(3)]
    assert listed[1].why_not == "there is more than the caller can take"
    objects.objects.abandon(held)


def test_the_backlog_has_writes_and_removals(make: Make) -> None:
    objects = make(tier := redis())
    cache = objects.objects.cache
    assert cache.backlog == 0
    objects.put(A, b"a")
    objects.remove(B)
    objects.put(key_of(3), b"c")
    assert cache.backlog == 3
    objects.end_write(tier)
    objects.end_removal(tier)
    assert cache.backlog == 1
    objects.end_write(tier)
    assert cache.backlog == 0
