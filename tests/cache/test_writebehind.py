# SPDX-License-Identifier: Apache-2.0
"""Write-behind: when chunks are written to a tier, and what is pinned meanwhile."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest

from lmcache_redis.cache import doubted, schedule, writebehind
from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.pool import Entry
from lmcache_redis.cache.writebehind import WriteBehind
from lmcache_redis.chunks.keys import share_rank
from lmcache_redis.chunks.names import ChunkForm, ChunkNames, opaque_pages
from lmcache_redis.tier_kinds import REDIS
from lmcache_redis.tiers import (
    Backing,
    CallOutcome,
    ExistsResult,
    ReadOutcome,
    RemoveResult,
    WriteOutcome,
)
from tests.cache.played import FORM, HASHES, PlayedTier, World
from tests.harness import block_hashes


class Queue(World):
    """A cache over a tier whose answers the test decides, with `HASHES` in the pool."""

    def __init__(self) -> None:
        self.tier = PlayedTier("Redis")
        super().__init__([(self.tier, REDIS)], write_limit_bytes=1000)
        self.entries = [self.hold(name) for name in HASHES]

    @property
    def writes(self) -> WriteBehind:
        return self.cache.queues[0]

    def enqueue(self, delay_s: float = 0.0) -> None:
        for entry in self.entries:
            self.cache.write_behind(entry, delay_s)
        self.loop.run_due()

    def answer(self, result: ExistsResult) -> None:
        _, done = self.tier.refreshed.pop()
        done(result)
        self.loop.run_posted()

    def end(self, outcome: WriteOutcome) -> None:
        for job in self.tier.written:
            self.tier.write_done(job, outcome)
        self.loop.run_posted()
        assert (len(self.writes), self.writes.queued_bytes) == (0, 0)

    def load(self, name: bytes, outcome: ReadOutcome = ReadOutcome.MISSING) -> None:
        """Loads a chunk that is not in the pool, in vain."""
        job = self.cache.prepare_load(FORM, name, 0, math.inf)
        assert job is not None
        self.cache.begin_loads([job])
        self.tier.read_done(job, outcome)
        self.loop.run_posted()

    def written(self) -> list[Entry]:
        return [job.entry for job in self.tier.written]


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue()
    yield queue
    queue.close()


def test_a_tier_is_asked_once_about_all_due_chunks(queue: Queue) -> None:
    told = queue.listen()
    queue.enqueue()
    chunks = [(FORM.key(name), FORM.stripe_count) for name in HASHES]
    assert [asked for asked, _ in queue.tier.refreshed] == [chunks]
    assert queue.written() == []
    queue.answer(ExistsResult(CallOutcome.DONE, [True, False, True, False, False]))
    assert queue.written() == [queue.entries[n] for n in (1, 3, 4)]
    assert told == [(FORM.key(name), 0, n in (0, 2)) for n, name in enumerate(HASHES)]
    assert queue.writes.queued_bytes == 3 * FORM.chunk_bytes
    queue.end(WriteOutcome.STORED)
    assert queue.counted() == {
        "stored_chunks": 3,
        "stored_bytes": 3 * FORM.chunk_bytes,
        "plain_bytes": 3 * FORM.chunk_bytes,
        "skipped_chunks": 2,
    }
    queue.enqueue()  # the tier may have lost it since
    queue.answer(ExistsResult(CallOutcome.DONE, [True] * 4 + [False]))
    assert told[-5:] == [(FORM.key(name), 0, n < 4) for n, name in enumerate(HASHES)]
    assert queue.written()[3:] == [queue.entries[4]]
    queue.tier.write_done(queue.tier.written[3], WriteOutcome.STORED)
    queue.loop.run_posted()
    assert len(queue.writes) == 0


def test_what_others_have_claimed_is_asked_about_again(queue: Queue) -> None:
    queue.enqueue()
    absent = [False] * len(HASHES)
    queue.answer(ExistsResult(CallOutcome.DONE, absent, [True, False, False, None, False]))
    asked_s = queue.writes._backing.ask_timeout_s
    assert queue.tier.claimed_s == [asked_s + schedule._MOST_CLAIM_S], "the rate is not known"
    assert queue.written() == queue.entries[:1]
    assert queue.tier.written[0].deadline < time.monotonic() + schedule._MOST_CLAIM_S
    assert len(queue.writes) == len(HASHES), "none is dropped"
    queue.pass_time(1.0)
    queue.answer(ExistsResult(CallOutcome.DONE, [True, False, True, True], [True] * 4))
    assert queue.written() == [queue.entries[n] for n in (0, 2)]
    queue.end(WriteOutcome.STORED)
    assert queue.counted("skipped") == {"skipped_chunks": 3}


def test_a_tier_is_told_of_the_shares_of_what_it_transfers(queue: Queue) -> None:
    names, share = ChunkNames(bytes(32)), opaque_pages(64)
    form = ChunkForm.of(names, "m", share_rank(4, 1), share, 64, of_share=share)
    queue.cache.write_behind(queue.hold(HASHES[0], form), 0.0)
    queue.loop.run_due()
    queue.answer(ExistsResult(CallOutcome.DONE, [False]))
    load = queue.cache.prepare_load(form, HASHES[1], 0, math.inf)
    assert load is not None
    queue.cache.begin_loads([load])
    (write,), (read,) = queue.tier.written, queue.tier.read
    assert form.shares is not None
    assert write.shares is form.shares
    assert read.shares is form.shares
    queue.end(WriteOutcome.STORED)
    queue.tier.read_done(read, ReadOutcome.MISSING)
    queue.loop.run_posted()


def test_a_chunk_in_the_queue_is_not_enqueued_again(queue: Queue) -> None:
    queue.enqueue(delay_s=60.0)
    queue.enqueue()
    assert len(queue.writes) == len(HASHES)
    queue.writes.begin_all()
    queue.answer(ExistsResult(CallOutcome.DONE, [True] * len(HASHES)))


def test_a_removal_waits_for_the_write_of_its_key(queue: Queue) -> None:
    results: list[RemoveResult] = []
    queue.enqueue()
    queue.answer(ExistsResult(CallOutcome.DONE, [False] * len(HASHES)))
    key = FORM.key(HASHES[0])
    there: list[bool] = []
    queue.cache.pool.on_change = lambda of, _, is_there: there.extend([is_there] * (of == key))
    queue.writes.remove(key, math.inf, results.append)
    assert queue.tier.cancelled == queue.tier.written[:1]
    assert (queue.tier.removed, queue.writes.is_removing(key)) == ([], True)
    for number, job in enumerate(queue.tier.written):
        # The first one had ended before.
        queue.tier.write_done(job, WriteOutcome.CANCELLED if number else WriteOutcome.STORED)
    queue.run(lambda: queue.tier.removed)
    ((removed, done),) = queue.tier.removed
    assert (removed, results, len(queue.writes)) == (key, [], 1)
    done(RemoveResult(CallOutcome.DONE, 1))
    queue.loop.run_posted()
    assert results == [RemoveResult(CallOutcome.DONE, 1)]
    assert (len(queue.writes), queue.writes.is_removing(key)) == (0, False)
    assert there == [False, True, False], "as the listener is told"
    queue.writes.remove(key, math.inf, results.append)
    assert len(queue.tier.removed) == 2, "nothing waits for a change that has ended"
    queue.tier.removed[1][1](RemoveResult(CallOutcome.DONE, 0))
    queue.loop.run_posted()


NOT_KNOWN = [
    ExistsResult(CallOutcome.TIMED_OUT),
    ExistsResult(CallOutcome.UNAVAILABLE),
    ExistsResult(CallOutcome.DONE, [None] * len(HASHES)),
]


@pytest.mark.parametrize("result", NOT_KNOWN)
def test_a_tier_that_does_not_say_is_asked_again_not_written(
    queue: Queue, caplog: pytest.LogCaptureFixture, result: ExistsResult
) -> None:
    queue.enqueue()
    for _ in range(writebehind._MOST_QUESTIONS):
        assert len(queue.writes) == len(HASHES)
        queue.answer(result)
        queue.pass_time(writebehind._MOST_PAUSE_S)
        assert queue.written() == []
    assert (len(queue.writes), queue.writes.queued_bytes) == (0, 0)
    assert queue.counted() == {"drop_redis_error": len(HASHES)}
    assert caplog.text.count("it does not say whether it has them") == 1
    assert all(FORM.key(name) in queue.cache.pool for name in HASHES)
    queue.enqueue()  # the next store does so
    assert len(queue.tier.refreshed) == 1
    queue.answer(ExistsResult(CallOutcome.DONE, [True] * len(HASHES)))


def test_only_what_is_not_known_is_asked_again(queue: Queue) -> None:
    told = queue.listen()
    queue.enqueue()
    queue.answer(ExistsResult(CallOutcome.DONE, [None, False, True, None, None]))
    assert queue.written() == [queue.entries[1]]
    assert told == [(FORM.key(HASHES[1]), 0, False), (FORM.key(HASHES[2]), 0, True)]
    assert queue.cache.clear([FORM.key(HASHES[3])]) == 1  # not asked about any more
    queue.pass_time(writebehind._MOST_PAUSE_S)
    assert [key for key, _ in queue.tier.refreshed[0][0]] == [FORM.key(HASHES[n]) for n in (0, 4)]
    queue.answer(ExistsResult(CallOutcome.DONE, [False, True]))
    assert queue.written() == [queue.entries[n] for n in (1, 0)]
    queue.end(WriteOutcome.STORED)
    assert queue.counted("drop_") == {}


@pytest.mark.parametrize("is_up", [True, False])
def test_nobody_asks_a_tier_that_is_down_or_at_the_end_again(queue: Queue, is_up: bool) -> None:
    queue.enqueue()
    queue.tier.is_up = is_up
    if is_up:
        queue.cache.begin_writes()
    queue.answer(ExistsResult(CallOutcome.UNAVAILABLE))
    assert (queue.written(), len(queue.writes)) == ([], 0)
    assert queue.counted() == {"drop_redis_error": len(HASHES)}


def test_chunks_asked_about_when_the_owner_stops_are_counted(queue: Queue) -> None:
    queue.enqueue()
    queue.answer(ExistsResult(CallOutcome.CANCELLED))
    assert queue.written() == []
    queue.end(WriteOutcome.CANCELLED)
    assert queue.counted() == {"drop_shutdown": len(HASHES)}


def test_a_chunk_that_is_cleared_is_not_written(queue: Queue) -> None:
    """While it waits, while the tier is asked, and while it is being written."""
    queue.enqueue(delay_s=60)
    assert queue.cache.clear([FORM.key(HASHES[0])]) == 1
    assert len(queue.writes) == len(HASHES) - 1
    queue.cache.begin_writes()
    assert queue.cache.clear([FORM.key(HASHES[1])]) == 1
    queue.answer(ExistsResult(CallOutcome.DONE, [False] * (len(HASHES) - 1)))
    assert queue.written() == queue.entries[2:]
    assert queue.cache.clear([FORM.key(HASHES[2])]) == 1
    assert queue.tier.cancelled[-1] is queue.tier.written[0]
    queue.tier.write_done(queue.tier.written.pop(0), WriteOutcome.CANCELLED)
    queue.end(WriteOutcome.STORED)
    assert queue.counted("drop_") == {}


def test_a_delay_ends_by_itself_or_when_the_owner_stops(queue: Queue) -> None:
    queue.enqueue(delay_s=5.0)
    assert queue.tier.refreshed == []
    queue.pass_time(5.0)
    queue.answer(ExistsResult(CallOutcome.DONE, [False] * len(HASHES)))
    queue.end(WriteOutcome.UNAVAILABLE)
    queue.tier.written.clear()
    queue.enqueue(delay_s=60)
    assert queue.tier.refreshed == []
    queue.cache.begin_writes()
    assert [len(keys) for keys, _ in queue.tier.refreshed] == [len(HASHES)]
    queue.answer(ExistsResult(CallOutcome.DONE, [True] * len(HASHES)))


def test_a_write_that_ends_makes_room_for_the_next(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "IN_FLIGHT_BYTES", 2 * FORM.chunk_bytes)
    queue.enqueue()
    queue.answer(ExistsResult(CallOutcome.DONE, [False] * 2))
    assert queue.written() == queue.entries[:2]
    queue.tier.write_done(queue.tier.written.pop(0), WriteOutcome.STORED)
    queue.run(lambda: queue.tier.refreshed)
    queue.answer(ExistsResult(CallOutcome.DONE, [True]))
    queue.cache.begin_writes()
    queue.answer(ExistsResult(CallOutcome.DONE, [True] * 2))
    queue.end(WriteOutcome.STORED)


def test_a_full_queue_drops_what_would_be_written_last(queue: Queue) -> None:
    fits = 1000 // FORM.chunk_bytes
    names = block_hashes("other", fits + 1)
    entries = [queue.hold(name) for name in names]
    for position, entry in enumerate(entries):
        entry.position = min(position, fits - 1)  # the last one has an equal, and comes too late
        queue.cache.write_behind(entry, 60)
    assert [entry.pins for entry in entries] == [1] * fits + [0]
    queue.cache.write_behind(queue.entries[0], 60)
    assert [entry.pins for entry in entries] == [1] * (fits - 1) + [0] * 2
    assert queue.counted("drop_") == {"drop_queue_full": 2}
    assert queue.writes.queued_bytes == fits * FORM.chunk_bytes
    queue.cache.begin_writes()
    queue.answer(ExistsResult(CallOutcome.DONE, [True] * fits))


def test_a_tier_that_is_down_is_given_nothing(queue: Queue) -> None:
    queue.tier.is_up = False
    queue.enqueue()
    assert queue.counted() == {"drop_redis_error": len(HASHES)}
    assert len(queue.writes) == 0


def test_each_chunk_that_a_full_queue_drops_is_counted(queue: Queue) -> None:
    """A chunk of three stripes takes the room of several smaller ones."""
    small = ChunkForm.of(ChunkNames(bytes(32)), "test/small", 0, opaque_pages(60), 64)
    fits = 1000 // small.chunk_bytes
    for name in (names := block_hashes("small", fits)):
        entry = queue.hold(name, small)
        entry.position = 1
        queue.cache.write_behind(entry, 60)
    assert queue.counted() == {}
    queue.cache.write_behind(queue.entries[0], 60)
    dropped = queue.counted()["drop_queue_full"]
    assert dropped == 1 + len(names) - len(queue.writes) > 1
    queue.cache.begin_writes()
    queue.answer(ExistsResult(CallOutcome.DONE, [True] * len(queue.writes)))


def test_writes_wait_for_loads_but_not_for_ever(queue: Queue) -> None:
    """A tier that always loads would never store."""
    loads = queue.cache.rates[0]
    queue.enqueue()
    queue.answer(ExistsResult(CallOutcome.DONE, [False] * len(HASHES)))
    queue.end(WriteOutcome.UNAVAILABLE)
    queue.tier.written.clear()
    loads.begun(1, time.monotonic())
    queue.enqueue()
    assert queue.tier.refreshed == []
    queue.pass_time(schedule.GIVE_WAY_S)
    queue.answer(ExistsResult(CallOutcome.DONE, [False] * len(HASHES)))
    assert queue.written() == queue.entries
    queue.end(WriteOutcome.UNAVAILABLE)
    loads.ended(1, time.monotonic(), arrived=False)


def test_writes_begin_when_the_loads_have_ended(queue: Queue) -> None:
    loads = queue.cache.rates[0]
    queue.enqueue()
    queue.answer(ExistsResult(CallOutcome.DONE, [False] * len(HASHES)))
    queue.end(WriteOutcome.UNAVAILABLE)
    for begin in (lambda: queue.load(b"a chunk of its own".ljust(32)), queue.cache.begin_writes):
        queue.tier.written.clear()
        loads.begun(1, time.monotonic())
        queue.enqueue()
        assert queue.tier.refreshed == []
        loads.ended(1, time.monotonic(), arrived=False)
        begin()
        queue.answer(ExistsResult(CallOutcome.DONE, [False] * len(HASHES)))
        assert queue.written() == queue.entries
        queue.end(WriteOutcome.UNAVAILABLE)


def test_a_failure_is_said_once_and_again_after_a_success(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    ends = [WriteOutcome.FULL, WriteOutcome.FULL, WriteOutcome.STORED, WriteOutcome.FULL]
    for entry, end in zip(queue.entries, ends, strict=False):
        queue.cache.write_behind(entry)
        queue.loop.run_due()
        queue.answer(ExistsResult(CallOutcome.DONE, [False]))
        queue.tier.write_done(queue.tier.written.pop(), end)
        queue.loop.run_posted()
    assert caplog.text.count("chunks are not written to Redis: it is full") == 2


DOUBTFUL = [
    ReadOutcome.CORRUPT,
    ReadOutcome.TORN,
    ReadOutcome.INCOMPLETE,
    ReadOutcome.FOREIGN,
    ReadOutcome.NOT_OPENED,
]


@pytest.mark.parametrize("outcome", ReadOutcome)
def test_what_was_doubtful_is_written_without_asking(queue: Queue, outcome: ReadOutcome) -> None:
    if outcome is ReadOutcome.LOADED:
        return
    name = b"a chunk of its own".ljust(32)
    queue.load(name, outcome)
    for is_marked in (outcome in DOUBTFUL, outcome in DOUBTFUL, False):
        entry = queue.cache.pool.get(FORM.key(name)) or queue.hold(name)
        queue.cache.write_behind(entry)
        queue.loop.run_due()
        assert len(queue.tier.refreshed) == (not is_marked)
        if not is_marked:
            queue.answer(ExistsResult(CallOutcome.DONE, [False]))
        (job,) = queue.tier.written
        # A write that fails leaves the mark, one that does not clears it.
        failed = is_marked and not queue.counted("drop_")
        queue.tier.written.clear()
        queue.tier.write_done(job, WriteOutcome.FULL if failed else WriteOutcome.STORED)
        queue.loop.run_posted()


def test_few_keys_are_distrusted(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubted, "MOST_KEYS", 2)
    for name in HASHES[:3]:
        queue.writes.distrust(FORM.key(name))
    queue.enqueue()
    ((asked, _),) = queue.tier.refreshed
    assert [key for key, _ in asked] == [FORM.key(HASHES[n]) for n in (0, 3, 4)]
    assert queue.written() == queue.entries[1:3]
    queue.answer(ExistsResult(CallOutcome.DONE, [True] * 3))
    queue.end(WriteOutcome.STORED)


def test_what_an_index_has_is_written_if_it_is_doubtful() -> None:
    disk = PlayedTier("disk", {FORM.key(name) for name in HASHES})
    world = World([(disk, REDIS)])
    world.cache.queues[0].distrust(FORM.key(HASHES[0]))
    entries = [world.hold(name) for name in HASHES]
    for entry in entries:
        world.cache.write_behind(entry)
    world.loop.run_due()
    (job,) = disk.written
    assert job.entry is entries[0]
    disk.write_done(job, WriteOutcome.STORED)
    world.loop.run_posted()
    world.close()


# ------------------------------------------------------------- large and full queues


class Large(World):
    """A queue that `count` chunks of one stripe fill, of prompts of 100 chunks."""

    def __init__(self, count: int) -> None:
        self.tier = PlayedTier("Redis")
        self.form = ChunkForm.of(ChunkNames(bytes(32)), "test/small", 0, opaque_pages(60), 64)
        limit_bytes = count * self.form.chunk_bytes
        super().__init__([(self.tier, REDIS)], slots=count + 100, write_limit_bytes=limit_bytes)
        for number in range(count):
            self.store(number)
        self.loop.run_due()

    def store(self, number: int) -> None:
        name = number.to_bytes(32, "big")
        entry = self.hold(name, self.form)
        entry.position = 100 - number % 100
        self.cache.write_behind(entry)

    def end(self) -> None:
        """Ends what is written and begins what is next."""
        for _, done in self.tier.refreshed:
            done(ExistsResult(CallOutcome.UNAVAILABLE))
        self.tier.refreshed.clear()
        self.loop.run_posted()
        for job in self.tier.written:
            self.tier.write_done(job, WriteOutcome.STORED)
        self.tier.written.clear()
        self.loop.run_posted()
        self.loop.run_due()


def calls_in(action: Callable[[], object]) -> int:
    """How many functions an action calls, those in C included."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def test_a_full_queue_of_any_size_costs_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that does not fit, one that another makes room for, and a batch that begins."""
    monkeypatch.setattr(schedule, "IN_FLIGHT_BYTES", 600)
    costs = []
    for count in (250, 4_000):
        large = Large(count)
        assert len(large.cache.queues[0]) == count
        last, first = partial(large.store, count + 100), partial(large.store, count + 199)
        costs.append([calls_in(each) for each in (last, first, large.end)])
        assert large.counted("drop_") == {"drop_queue_full": 2}
        large.cache.begin_writes()
        large.end()
        large.close()
    small, large_costs = costs
    assert all(b < 2 * a + 50 for a, b in zip(small, large_costs, strict=True)), costs


def test_a_queue_takes_what_the_tier_writes_in_time(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 8 bytes a second, 240 bytes in 30 s: one chunk."""
    monkeypatch.setattr(schedule, "IN_FLIGHT_BYTES", FORM.chunk_bytes)
    monkeypatch.setattr(schedule, "LEAST_MEASURED_BYTES", FORM.chunk_bytes)
    queue.cache.write_behind(queue.entries[0])
    queue.loop.run_due()
    queue.answer(ExistsResult(CallOutcome.DONE, [False]))
    queue.pass_time(20.0)
    queue.end(WriteOutcome.STORED)
    queue.tier.written.clear()
    for number in (1, 2):
        queue.cache.write_behind(queue.entries[number], 60)
    assert (len(queue.writes), queue.counted("drop_")) == (1, {"drop_queue_full": 1})
    assert [entry.pins for entry in queue.entries] == [0, 1, 0, 0, 0]
    queue.cache.begin_writes()
    queue.answer(ExistsResult(CallOutcome.DONE, [True]))


def test_what_expires_in_the_queue_is_dropped_without_a_turn(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the tier does not answer what is in flight, and nothing else happens."""
    monkeypatch.setattr(schedule, "IN_FLIGHT_BYTES", FORM.chunk_bytes)
    queue.enqueue()
    assert [len(chunks) for chunks, _ in queue.tier.refreshed] == [1]
    queue.pass_time(writebehind.WRITE_DEADLINE_S + 1)
    assert [entry.pins for entry in queue.entries] == [1, 0, 0, 0, 0]
    assert queue.counted("drop_") == {"drop_queue_full": 4}
    queue.answer(ExistsResult(CallOutcome.CANCELLED))
    assert len(queue.writes) == 0


def test_a_waiting_write_is_skipped_if_discarded(queue: Queue) -> None:
    """`write` does not ask, so two of one key may be queued."""
    ends: list[WriteOutcome] = []
    for _ in range(3):
        entry = queue.entries[0]
        queue.writes.write(entry, math.inf, ends.append)
        queue.cache.pool.discard(entry)
        queue.entries[0] = queue.hold(HASHES[0])
    assert len(queue.tier.written) == 1
    queue.tier.write_done(queue.tier.written[0], WriteOutcome.STORED)
    queue.run(lambda: not len(queue.writes))
    assert len(queue.tier.written) == 1
    assert ends == [WriteOutcome.STORED, WriteOutcome.CANCELLED, WriteOutcome.CANCELLED]
    assert queue.counted("drop_") == {}


@pytest.mark.parametrize("broken", ["refresh", "store_all"])
def test_a_write_that_cannot_begin_gives_back_what_it_held(
    queue: Queue, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(queue.tier, broken, bug)
    queue.enqueue()
    if broken == "store_all":
        queue.answer(ExistsResult(CallOutcome.DONE, [False] * len(HASHES)))
    assert "a bug" in caplog.text
    assert (len(queue.writes), queue.writes.queued_bytes) == (0, 0)
    assert queue.cache.pool.pinned == 0
    assert queue.counted() == {"drop_redis_error": len(HASHES)}


class PlayedAccount:
    """Of the tenant "full", which others have filled."""

    def __init__(self) -> None:
        self.full = {"full"}
        self.drops: list[str] = []
        self.stores: list[tuple[str, int]] = []

    def digest(self, tenant: str) -> bytes:
        return tenant[:1].encode()

    def admits(self, tenant: str) -> bool:
        return tenant not in self.full

    def dropped(self, tenant: str) -> None:
        self.drops.append(tenant)

    def stored(self, tenant: str, nbytes: int) -> None:
        self.stores.append((tenant, nbytes))


class LimitedQueue(Queue):
    """The writes to the tier are limited by tenant."""

    def make_cache(self, backings: Sequence[Backing], slots: int) -> Cache:
        self.account = PlayedAccount()
        return super().make_cache([replace(backings[0], account=self.account)], slots)


def test_a_limit_is_not_passed_by_what_was_queued_before() -> None:
    queue = LimitedQueue()
    for entry in queue.entries[:2]:
        entry.tenant = "team"
    queue.enqueue(delay_s=60)
    assert len(queue.writes) == len(HASHES)
    queue.account.full.add("team")
    queue.writes.begin_all()
    assert (queue.counted("drop_"), queue.account.drops) == ({"drop_quota": 2}, ["team"] * 2)
    queue.answer(ExistsResult(CallOutcome.DONE, [False] * (len(HASHES) - 2)))
    assert queue.written() == queue.entries[2:]
    queue.end(WriteOutcome.STORED)
    queue.close()


def test_a_chunk_over_a_limit_is_counted_once() -> None:
    queue = LimitedQueue()
    (entry, *_) = queue.entries = queue.entries[:1]
    entry.tenant = "full"
    for _ in range(3):
        queue.enqueue()
    assert (queue.counted("drop_"), len(queue.writes)) == ({"drop_quota": 1}, 0)
    queue.account.full.clear()
    queue.enqueue()
    queue.answer(ExistsResult(CallOutcome.DONE, [False]))
    (write,) = queue.tier.written
    assert write.tenant == b"f"
    write.stored_bytes = 99  # packed
    queue.end(WriteOutcome.STORED)
    assert queue.account.stores == [("full", 99)]
    queue.account.full.add("full")
    queue.enqueue()
    assert queue.counted("drop_") == {"drop_quota": 2}, "another time"
    queue.close()
