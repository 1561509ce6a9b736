"""Warming waits for engines, takes free memory only, and answers for every chunk."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lmcache_redis import messages as m
from lmcache_redis.agent import warming
from lmcache_redis.agent.warming import Warming
from lmcache_redis.cache.backing import DISK_COUNTERS, REDIS_COUNTERS
from lmcache_redis.cache.lookup import PrefixLookup
from lmcache_redis.cache.parts import LookupRequest
from lmcache_redis.chunks.names import opaque_pages
from lmcache_redis.errors import WireError
from lmcache_redis.tiers import CallOutcome, ReadOutcome, ScanResult, WriteOutcome
from tests.cache.played import FORM, HASHES, PlayedTier, World

KEYS = [FORM.key(each) for each in HASHES]
QUEUE_BYTES = 4 * FORM.chunk_bytes


def chunk(chunk_hash: bytes) -> m.WarmChunk:
    return m.WarmChunk("test/model", 0, FORM.fingerprint, chunk_hash, FORM.metadata)


CHUNKS = [chunk(each) for each in HASHES]


class Warmed(World):
    """A cache over Redis, with a disk before it if there is to be one, and what warms it."""

    def __init__(self, *, slots: int = 64, disk: PlayedTier | None = None) -> None:
        self.redis = PlayedTier("Redis")
        tiers: list[Any] = [(self.redis, REDIS_COUNTERS)]
        if disk is not None:
            tiers.insert(0, (disk, DISK_COUNTERS))
        super().__init__(tiers, slots=slots, write_limit_bytes=QUEUE_BYTES)
        config = SimpleNamespace(key_prefix=b"", slot_bytes=64, write_queue_limit_bytes=QUEUE_BYTES)
        agent: Any = SimpleNamespace(config=config, cache=self.cache)
        self.warming = Warming(agent)
        self.answers: list[Any] = []

    def warm(self, *chunks: m.WarmChunk) -> None:
        self.warming.warm(m.Warm(1, chunks), self.answers.append)

    def arrive(self, outcome: ReadOutcome = ReadOutcome.LOADED) -> bytes:
        """The oldest read ends; its hash."""
        job = self.redis.read.pop(0)
        self.redis.read_done(job, outcome)
        self.loop.run_posted()
        self.loop.run_posted()
        return job.frame.chunk_hash

    def run_polls(self) -> None:
        """What waits looks again."""
        now = time.monotonic()
        while time.monotonic() < now + 3 * warming._POLL_S:
            self.loop.run_due()
            self.loop.run_posted()

    @property
    def reading(self) -> list[bytes]:
        return [job.frame.chunk_hash for job in self.redis.read]

    @property
    def outcomes(self) -> Sequence[str]:
        (answer,) = self.answers
        assert isinstance(answer, m.Warmed)
        return answer.outcomes

    def close(self) -> None:
        assert self.warming.in_flight_bytes == 0
        super().close()


@pytest.fixture
def world() -> Iterator[Warmed]:
    world = Warmed()
    yield world
    world.close()


def test_chunks_are_loaded_in_order(world: Warmed) -> None:
    world.warm(*CHUNKS)
    assert world.reading == HASHES
    for each in HASHES:
        assert not world.answers
        assert world.arrive() == each
    assert world.outcomes == ("loaded",) * 5
    assert [key for key in KEYS if key in world.cache.pool] == KEYS
    assert world.counted() == {
        "loaded_chunks": 5, "loaded_bytes": 5 * FORM.chunk_bytes, "warmed_chunks": 5
    }  # fmt: skip


def test_nothing_to_do(world: Warmed) -> None:
    world.warm()
    assert world.outcomes == ()


def test_what_the_pool_has_is_left_as_it_is(world: Warmed) -> None:
    entry = world.hold(HASHES[0])
    world.warm(CHUNKS[0], CHUNKS[1], CHUNKS[1])
    world.arrive()
    assert world.outcomes == ("held", "loaded", "held")
    assert world.cache.pool.peek(KEYS[0]) is entry


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (ReadOutcome.MISSING, "missing"),
        (ReadOutcome.INCOMPLETE, "missing"),
        (ReadOutcome.TORN, "damaged"),
        (ReadOutcome.CORRUPT, "damaged"),
        (ReadOutcome.FOREIGN, "damaged"),
        (ReadOutcome.TIMED_OUT, "failed"),
        (ReadOutcome.UNAVAILABLE, "failed"),
    ],
)
def test_a_chunk_that_does_not_arrive(world: Warmed, outcome: ReadOutcome, said: str) -> None:
    world.warm(*CHUNKS[:2])
    world.arrive(outcome)
    world.arrive()
    assert world.outcomes == (said, "loaded")
    assert KEYS[0] not in world.cache.pool


def test_a_chunk_that_is_cleared_while_it_is_loaded(world: Warmed) -> None:
    world.warm(CHUNKS[0])
    world.cache.clear([FORM.names.common])
    world.arrive()
    assert world.outcomes == ("failed",)
    assert world.counted("warmed") == {}


def test_a_server_that_is_down(world: Warmed) -> None:
    world.redis.index, world.redis.is_up = set(), False  # it has nothing for anyone
    world.warm(*CHUNKS)
    assert world.outcomes == ("failed",) * 5


def test_only_free_memory_is_taken() -> None:
    world = Warmed(slots=3 * 3 + 2)  # three chunks, and less than a fourth
    engine = world.hold(HASHES[4])
    world.warm(*CHUNKS[:4])
    world.arrive()
    world.arrive()
    assert world.outcomes == ("loaded", "loaded", "full", "full")
    assert world.cache.pool.evictions == 0
    assert world.cache.pool.peek(KEYS[4]) is engine
    world.close()


def test_engines_evict_what_was_warmed_first_the_least_used_of_it() -> None:
    world = Warmed(slots=5 * 3)
    world.hold(HASHES[4])
    world.warm(*CHUNKS[:4])
    for _ in range(4):
        world.arrive()
    # An engine has asked for one of them.
    assert world.cache.pool.get(KEYS[3]) is not None
    for number, gone in enumerate((2, 1, 0, 4, 3)):
        world.hold(bytes([number]) * 32)
        assert KEYS[gone] not in world.cache.pool, gone
    world.close()


def test_loads_wait_while_a_lookup_loads(world: Warmed) -> None:
    found: list[PrefixLookup] = []
    request = LookupRequest([FORM], HASHES[:2], time.monotonic() + 60)
    lookup = PrefixLookup(world.cache, request, found.append)
    lookup.start()
    ((_, scanned),) = world.redis.scanned
    scanned(ScanResult(CallOutcome.DONE, 2))
    world.loop.run_posted()
    assert world.reading == HASHES[:2]
    world.warm(*CHUNKS)
    world.run_polls()
    assert world.reading == HASHES[:2]
    world.arrive()
    world.arrive()
    assert len(found) == 1
    world.run_polls()
    assert world.reading == HASHES[2:]
    for _ in range(3):
        world.arrive()
    assert world.outcomes == ("held", "held", "loaded", "loaded", "loaded")


def test_a_lookup_joins_a_load_that_was_begun_to_warm(world: Warmed) -> None:
    world.warm(CHUNKS[0])
    found: list[int] = []
    request = LookupRequest([FORM], HASHES[:1], time.monotonic() + 60)
    PrefixLookup(world.cache, request, lambda done: found.append(done.bound)).start()
    world.arrive()
    assert found == [1]
    assert world.outcomes == ("loaded",)
    entry = world.cache.pool.peek(KEYS[0])
    assert entry is not None
    assert not entry.is_ahead


def test_loads_wait_while_lookups_wait_for_room(world: Warmed) -> None:
    world.cache.waiting.wait("a lookup", 1, lambda: None)
    world.warm(CHUNKS[0])
    world.run_polls()
    assert world.reading == []
    world.cache.waiting.leave("a lookup")
    world.run_polls()
    world.arrive()
    assert world.outcomes == ("loaded",)


def test_who_waits_too_long_is_told(world: Warmed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "_BEGIN_WITHIN_S", 0.0)
    world.warm(CHUNKS[0])
    world.cache.waiting.wait("a lookup", 1, lambda: None)
    world.arrive()
    world.answers.clear()
    world.warm(*CHUNKS)
    assert world.outcomes == ("held", "busy", "busy", "busy", "busy")
    world.cache.waiting.leave("a lookup")


def test_few_bytes_are_in_flight_at_a_time(world: Warmed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "_WINDOW_BYTES", 2 * FORM.chunk_bytes)
    world.warm(*CHUNKS[:3])
    world.warm(*CHUNKS[3:])
    assert world.reading == HASHES[:2]
    for _ in HASHES:
        world.arrive()
        world.run_polls()
        assert len(world.reading) <= 2
    assert [answer.outcomes for answer in world.answers] == [("loaded",) * 3, ("loaded",) * 2]
    # A chunk that is larger than that has no other beside it.
    monkeypatch.setattr(warming, "_WINDOW_BYTES", 1)
    world.cache.pool.clear()
    world.warm(*CHUNKS[:2])
    assert len(world.reading) == 1
    world.arrive()
    world.arrive()


def test_chunks_go_to_disk_and_leave_room_in_its_queue_for_stores() -> None:
    disk = PlayedTier("disk", set())
    world = Warmed(disk=disk)  # its queue takes four chunks, half of it is for stores
    world.warm(*CHUNKS)
    written = 0
    while not world.answers:
        world.run_polls()
        if world.reading:
            world.arrive()
        elif len(disk.written) > written:
            disk.write_done(disk.written[written], WriteOutcome.STORED)
            written += 1
        assert world.cache.queues[0].queued_bytes <= QUEUE_BYTES - FORM.chunk_bytes
    assert 0 < written < 5, "it has waited for the disk"
    while world.cache.backlog:
        disk.write_done(disk.written[written], WriteOutcome.STORED)
        written += 1
        world.run_polls()
    assert [job.key for job in disk.written] == KEYS
    assert world.counted("drop") == {}
    assert world.outcomes == ("loaded",) * 5
    world.close()


def test_what_the_disk_has_is_loaded_from_there() -> None:
    disk = PlayedTier("disk", {KEYS[0]})
    world = Warmed(disk=disk)
    world.warm(CHUNKS[0])
    (job,) = disk.read
    disk.read_done(job, ReadOutcome.CORRUPT)
    world.loop.run_posted()
    world.arrive()
    assert world.outcomes == ("loaded",)
    world.run_polls()
    world.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"metadata": b"no metadata"},
        {"metadata": opaque_pages(0).serialize()},
        {"metadata": opaque_pages(1 << 40).serialize()},
        {"kv_rank": -1},
        {"model_name": ""},
    ],
)
def test_a_chunk_that_cannot_exist(world: Warmed, wrong: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="a chunk to warm"):
        world.warm(CHUNKS[0], msgspec.structs.replace(CHUNKS[1], **wrong))
    assert world.reading == []


def test_another_size_is_another_frame(world: Warmed) -> None:
    """What Redis has is compared with it, so a wrong size is a miss and no chunk of that size."""
    metadata = opaque_pages(FORM.chunk_bytes + 64).serialize()
    world.warm(msgspec.structs.replace(CHUNKS[0], metadata=metadata))
    (job,) = world.redis.read
    assert job.key == KEYS[0]
    assert job.frame.chunk_bytes == FORM.chunk_bytes + 64
    assert job.frame.fingerprint == FORM.fingerprint
    world.arrive(ReadOutcome.FOREIGN)
    assert world.outcomes == ("damaged",)
