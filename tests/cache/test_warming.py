# SPDX-License-Identifier: Apache-2.0
"""Filling a host pool before anybody asks: what comes first, what is given up, where it ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from lmcache_redis.cache import warming as module
from lmcache_redis.cache.lookup import PrefixLookup
from lmcache_redis.cache.parts import LookupRequest
from lmcache_redis.cache.pool import Entry
from lmcache_redis.cache.warming import Warming
from lmcache_redis.chunks.names import ChunkForm, ChunkNames, opaque_pages
from lmcache_redis.resp.ranking import RankedKeys
from lmcache_redis.tier_kinds import DISK, REDIS
from lmcache_redis.tiers import (
    CallOutcome,
    ChunkIO,
    ExistsResult,
    ReadOutcome,
    RemoveResult,
    ScanResult,
    WriteOutcome,
)
from tests.cache.played import FORM, HASHES, PlayedTier, World
from tests.harness import block_hashes

CHUNK_SLOTS = FORM.stripe_count
OTHER_RANK = ChunkForm.of(ChunkNames(bytes(32)), "test/model", 1, opaque_pages(160), 64)


class Warmed(World):
    """A cache over a Redis that the test plays, and the warming of it."""

    def __init__(self, slots: int = 64, size_bytes: int = 1 << 20, has_disk: bool = False) -> None:
        self.redis, self.disk = PlayedTier("Redis"), PlayedTier("disk", set())
        tiers = [(self.disk, DISK), (self.redis, REDIS)]
        super().__init__(tiers[not has_disk :], slots=slots)
        self.ranks: list[tuple[Sequence[bytes], Any]] = []
        self.warming = Warming(self.cache, self._rank, size_bytes)
        self.cache.warming = self.warming

    def _rank(self, prefixes: Sequence[bytes], limit: int, deadline_s: float, done: Any) -> None:
        assert deadline_s > self.loop.now()
        self.ranks.append((prefixes, done))

    def warm(self, *hashes: bytes, refused: str = "", form: ChunkForm = FORM) -> None:
        """A worker comes, and Redis ranks its chunks."""
        self.warming.warm([form])
        self.rank(*hashes, refused=refused, form=form)

    def rank(self, *hashes: bytes, refused: str = "", form: ChunkForm = FORM) -> None:
        self.run(lambda: self.ranks)
        _, done = self.ranks.pop()
        done(RankedKeys(CallOutcome.DONE, [form.key(each) for each in hashes], refused))
        self.run(lambda: not self.warming._is_ranking)

    def arrive(self, *jobs: ChunkIO, outcome: ReadOutcome = ReadOutcome.LOADED) -> None:
        for job in jobs or [*self.redis.read]:
            self.redis.read.remove(job)
            self.redis.read_done(job, outcome)
        self.turn()

    def arrive_all(self) -> None:
        """Until it has ended."""
        while not self.warming.report()["done"]:
            self.run(lambda: self.redis.read or self.warming.report()["done"])
            self.arrive()

    def turn(self) -> None:
        turns = iter(range(5))
        self.run(lambda: next(turns, None) is None)

    @property
    def reading(self) -> list[bytes]:
        return [job.frame.chunk_hash for job in self.redis.read]

    @property
    def held(self) -> list[bytes]:
        return [each for each in HASHES if FORM.key(each) in self.cache.pool]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TOGETHER_S", 0.0)


@pytest.fixture
def warmed() -> Iterator[Warmed]:
    warmed = Warmed()
    yield warmed
    warmed.close()


def test_the_most_used_chunks_are_loaded_and_evicted_last(
    warmed: Warmed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pool = warmed.cache.pool
    warmed.hold(b"asked for")
    warmed.warm(*HASHES[:3])
    assert "the most used of 3 chunks" in caplog.text
    assert "are not known" not in caplog.text
    assert warmed.reading == HASHES[:1], "no rate is known yet"
    assert not warmed.warming.report()["done"]
    warmed.arrive_all()
    assert warmed.warming.report() == {
        "chunks": 3,
        "bytes": 3 * FORM.chunk_bytes,
        "left_chunks": 0,
        "done": True,
    }
    order = []
    while len(pool):
        before = {*pool}
        pool.reserve(None, pool.free + 1)
        (gone,) = before - {*pool}
        order.append(gone.chunk_hash)
    assert order == [HASHES[2], HASHES[1], HASHES[0], b"asked for"]
    for entry in [*pool._outside]:
        pool.discard(entry)
        pool.unpin(entry)


def test_it_asks_once_for_workers_that_come_together(warmed: Warmed) -> None:
    warmed.warming.warm([FORM])
    warmed.warm()
    warmed.warming.warm([FORM])
    warmed.turn()
    assert not warmed.ranks
    assert warmed.warming.report()["done"]


def test_no_more_than_its_size_and_nothing_is_evicted_for_it() -> None:
    of_two = Warmed(size_bytes=2 * FORM.chunk_bytes)
    of_two.warm(*HASHES)
    of_two.arrive_all()
    assert of_two.held == HASHES[:2]
    of_two.close()
    full = Warmed(slots=3 * CHUNK_SLOTS)
    asked = full.hold(b"asked for")
    full.warm(*HASHES)
    full.arrive_all()
    assert full.held == HASHES[:2]
    assert asked.key in full.cache.pool
    assert full.warming.report()["done"]
    full.close()


def test_a_lookup_comes_first(warmed: Warmed) -> None:
    """What is in flight is given up, and loaded when the lookup's loads have ended."""
    warmed.warm(*HASHES[:2])
    (ours,) = warmed.redis.read
    done: list[PrefixLookup] = []
    request = LookupRequest([FORM], HASHES[3:4], deadline_s=1e12)
    PrefixLookup(warmed.cache, request, done.append).start()
    assert warmed.redis.cancelled == [ours]
    warmed.arrive(ours, outcome=ReadOutcome.CANCELLED)
    ((_, scanned),) = warmed.redis.scanned
    scanned(ScanResult(CallOutcome.DONE, 1))
    warmed.run(lambda: HASHES[3] in warmed.reading)
    for _ in range(20):
        warmed.turn()
    assert warmed.reading == [HASHES[3]], "nothing begins while a lookup loads"
    warmed.arrive()
    assert [each.bound for each in done] == [1]
    warmed.arrive_all()
    assert warmed.held == [*HASHES[:2], HASHES[3]]
    assert warmed.warming.report()["chunks"] == 2


def test_nothing_is_loaded_while_chunks_wait_to_be_written(warmed: Warmed) -> None:
    cache = warmed.cache
    entry = warmed.hold(b"stored")
    cache.write_behind(entry, 60)
    warmed.warm(*HASHES[:1])
    warmed.turn()
    assert not warmed.reading
    cache.queues[0].cancel(entry)
    warmed.run(lambda: warmed.reading)
    warmed.arrive()


def test_what_is_gone_or_damaged_is_left_out(warmed: Warmed) -> None:
    warmed.warm(*HASHES[:3])
    warmed.arrive(outcome=ReadOutcome.MISSING)
    warmed.arrive(outcome=ReadOutcome.CORRUPT)
    warmed.arrive()
    assert warmed.held == [HASHES[2]]
    assert warmed.warming.report()["done"]


def test_it_ends_when_redis_is_down_or_the_agent_stops(warmed: Warmed) -> None:
    warmed.warm(*HASHES)
    warmed.redis.is_up = False
    warmed.arrive(outcome=ReadOutcome.UNAVAILABLE)
    assert not warmed.held
    assert warmed.warming.report()["done"]
    other = Warmed()
    other.warm(*HASHES[:1])
    other.warming.stop()
    found = other.warming.report()
    assert (found["left_chunks"], found["done"]) == (0, True)
    other.arrive(outcome=ReadOutcome.CANCELLED)
    other.turn()
    assert not other.reading
    other.close()


def test_a_server_that_does_not_tell_is_said_once(
    warmed: Warmed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    warmed.warm(refused="Redis says: NOPERM")
    (said,) = caplog.messages
    assert said == "the host pool is not filled (--warm-bytes): Redis says: NOPERM"
    assert warmed.warming.report()["done"]


def test_one_shard_that_does_not_tell_leaves_the_others(
    warmed: Warmed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    warmed.warm(HASHES[0], refused="Redis says: NOPERM")
    warmed.arrive_all()
    first, last = caplog.messages
    of_one = "filling the host pool with the most used of 1 chunks"
    assert first == f"{of_one}; others are not known: Redis says: NOPERM"
    assert "with 1 chunks" in last


def test_what_a_round_has_loaded_is_told_of_it_alone(
    warmed: Warmed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for form, hashes in ((FORM, HASHES[:2]), (OTHER_RANK, HASHES[:1])):
        warmed.warm(*hashes, form=form)
        warmed.arrive_all()
    ends = [each.split(" chunks")[0] for each in caplog.messages if each.startswith("filled")]
    assert ends == ["filled the host pool with 2", "filled the host pool with 1"]
    assert warmed.warming.report()["chunks"] == 3


def together(warmed: Warmed, hashes: Sequence[bytes]) -> list[ChunkIO]:
    """Loads in flight at one time: the rate of Redis is known."""
    rate = warmed.cache.rates[-1]
    rate.begun(1 << 30, 0.0)
    rate.ended(1 << 30, 0.001, arrived=True)
    warmed.warm(*hashes)
    warmed.run(lambda: len(warmed.redis.read) == len(hashes))
    return [*warmed.redis.read]


def test_a_round_that_follows_at_once_gives_way_too(warmed: Warmed) -> None:
    """Two loads end in one turn, and another rank waits to be ranked."""
    jobs = together(warmed, HASHES[:2])
    warmed.warming.warm([OTHER_RANK])
    warmed.arrive(*jobs)
    warmed.rank(*HASHES[:1], form=OTHER_RANK)
    assert not warmed.warming.report()["done"]
    warmed.run(lambda: warmed.redis.read)
    (ours,) = warmed.redis.read
    warmed.warming.give_way()
    assert warmed.redis.cancelled == [ours]
    warmed.arrive(ours, outcome=ReadOutcome.CANCELLED)
    warmed.arrive_all()
    assert warmed.warming.report()["chunks"] == 3


@pytest.mark.parametrize("how", ["cleared", "removed"])
def test_a_lookup_after_a_clear_stops_what_is_loaded(
    warmed: Warmed, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Or after a canary has found it wrong. Whoever waits for the chunk, too, is told."""
    cache, told = warmed.cache, list[str]()
    warmed.warm(*HASHES[:1])
    (ours,) = warmed.redis.read
    entry = cache.pool.get(ours.key)
    assert entry is not None
    if how == "cleared":
        cache.clear([ours.key])
    else:
        cache.remove(ours.key)
    cache.pool.watch(entry, lambda: told.append("after"))
    warmed.warming.give_way()
    warmed.arrive(ours, outcome=ReadOutcome.CANCELLED)
    assert told == ["after"]
    assert not caplog.records, "no action has failed"
    if how == "removed":
        _, removed = warmed.redis.removed.pop()
        removed(RemoveResult(CallOutcome.DONE, 1))
    warmed.arrive_all()


def test_a_lookup_that_begins_as_a_load_ends(
    warmed: Warmed, caplog: pytest.LogCaptureFixture
) -> None:
    """It is begun by one who waits for the same chunk, and was told before."""
    warmed.warm(*HASHES[:1])
    (ours,) = warmed.redis.read
    entry = warmed.cache.pool.get(ours.key)
    assert entry is not None
    assert entry.watchers is not None
    entry.watchers.insert(0, warmed.warming.give_way)
    told: list[str] = []
    warmed.cache.pool.watch(entry, lambda: told.append("after"))
    warmed.arrive(ours)
    assert told == ["after"]
    assert not caplog.records, "no action has failed"
    warmed.arrive_all()


def test_chunks_of_an_epoch_that_has_ended_are_left_out(warmed: Warmed) -> None:
    warmed.cache.clear([FORM.key(HASHES[1])], for_good=True)
    warmed.warm(*HASHES[:3])
    warmed.arrive_all()
    assert warmed.held == [HASHES[0], HASHES[2]]


def test_what_nobody_asked_for_is_not_written_to_the_disk() -> None:
    """And is no use of it; a lookup is both, from the host pool too."""
    warmed = Warmed(has_disk=True)
    jobs = together(warmed, HASHES[:2])
    assert not any(each.is_asked_for for each in jobs)
    warmed.arrive(*jobs)
    assert warmed.warming.report()["done"]
    assert not warmed.disk.written
    taken: list[Entry] = []
    request = LookupRequest([FORM], HASHES[:1], deadline_s=1e12)
    lookup = PrefixLookup(
        warmed.cache, request, lambda found: taken.extend(found.parts.take().values())
    )
    lookup.start()
    warmed.run(lambda: warmed.disk.refreshed)
    ((of_disk, kept),) = warmed.disk.refreshed
    assert [key for key, _ in of_disk] == [jobs[0].key]
    kept(ExistsResult(CallOutcome.DONE, [False]))
    warmed.run(lambda: warmed.disk.written)
    for write in warmed.disk.written:
        warmed.disk.write_done(write, WriteOutcome.STORED)
    warmed.turn()
    warmed.release(taken)
    warmed.close()


def test_stale_keys_take_no_long_turn(warmed: Warmed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have their turn between them."""
    turns: list[int] = []
    level_of = warmed.cache.level_of
    monkeypatch.setattr(module, "_MOST_A_TURN", 10)
    monkeypatch.setattr(warmed.cache, "level_of", lambda key: turns.append(1) or level_of(key))
    warmed.redis.lookup = lambda key: False  # type: ignore[method-assign]
    warmed.warm(*block_hashes("stale", 100))
    assert 0 < len(turns) <= 20
    warmed.run(lambda: warmed.warming.report()["done"])
    assert len(turns) == 100
