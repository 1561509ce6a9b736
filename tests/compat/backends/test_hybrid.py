"""The hybrid: writes through, promotes, shares loads, never restores a removed chunk."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.compat.backends import (
    LMCBackendInterface,
    LMCHybridBackend,
    LMCLocalBackend,
    LMCLocalDiskBackend,
    LMCPipelinedRemoteBackend,
    LMCRemoteBackend,
)
from lmcache_redis.errors import ConfigError, FormatError
from lmcache_redis.resp import ReadOutcome
from tests.compat.backends.contract import (
    Buffers,
    MakeBackend,
    TierContract,
    key_of,
    same,
    tensor_of,
)
from tests.compat.backends.redis_tiers import SLOT, wait_until
from tests.servers import RedisServer

ROOM = 128 << 20


class TestHybridContract(TierContract):
    """Memory with room for all chunks, over Redis."""

    upper_bytes = ROOM

    @pytest.fixture
    def make_backend(self, server: RedisServer) -> Iterator[MakeBackend]:
        made: list[LMCHybridBackend] = []

        def make(**options: Any) -> LMCHybridBackend:
            tiers = (
                LMCLocalBackend(self.upper_bytes, **options),
                LMCPipelinedRemoteBackend(server.url, slot_bytes=SLOT, **options),
            )
            made.append(LMCHybridBackend(tiers, **options))
            return made[-1]

        yield make
        for backend in made:
            backend.close()


class TestSmallHybridContract(TestHybridContract):
    """Memory that evicts constantly and has room for few chunks."""

    upper_bytes = 3000


class TestThreeTiersContract(TierContract):
    """Little memory, over a disk, over Redis."""

    @pytest.fixture
    def make_backend(self, server: RedisServer, tmp_path: Path) -> Iterator[MakeBackend]:
        made: list[LMCHybridBackend] = []

        def make(**options: Any) -> LMCHybridBackend:
            tiers = (
                LMCLocalBackend(100_000, **options),
                LMCLocalDiskBackend(tmp_path / str(len(made)), ROOM, **options),
                LMCRemoteBackend(server.url, **options),
            )
            made.append(LMCHybridBackend(tiers, **options))
            return made[-1]

        yield make
        for backend in made:
            backend.close()


class Stacked:
    """Memory over Redis, with the Redis backend itself, and threads that call the hybrid."""

    def __init__(self, server: RedisServer, upper_bytes: int = ROOM, **settings: Any) -> None:
        self.lower = LMCRemoteBackend(server.url, slot_bytes=SLOT)
        self.backend = LMCHybridBackend((LMCLocalBackend(upper_bytes), self.lower), **settings)
        self.found: list[torch.Tensor | None] = []
        self._threads: list[threading.Thread] = []

    def begin(self, call: Callable[[], object]) -> None:
        self._threads.append(threading.Thread(target=call))
        self._threads[-1].start()

    def begin_get(self, number: int) -> None:
        self.begin(lambda: self.found.append(self.backend.get(key_of(number))))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    @property
    def loads(self) -> int:
        return self.lower._plane.stats().reads[ReadOutcome.LOADED]

    @property
    def in_memory(self) -> int:
        return self.backend.used_bytes


@pytest.fixture
def stack(own_server: RedisServer) -> Iterator[Callable[..., Stacked]]:
    made: list[Stacked] = []

    def make(**settings: Any) -> Stacked:
        made.append(Stacked(own_server, **settings))
        return made[-1]

    yield make
    own_server.cont()
    for stacked in made:
        stacked.backend.close()


# ------------------------------------------------------------------ through and back


def test_a_put_goes_to_all_tiers(stack: Callable[..., Stacked]) -> None:
    stacked = stack()
    for blocking in (True, False):
        chunk = tensor_of(int(blocking), (100,))
        assert stacked.backend.put(key_of(blocking), chunk, blocking)
        assert stacked.backend.flush(5)
        assert same(stacked.lower.get(key_of(blocking)), chunk)
    assert stacked.in_memory == 200
    assert stacked.backend.remove(key_of(0))
    assert not stacked.lower.contains(key_of(0))
    assert stacked.lower.put(key_of(5), tensor_of(5, (5,)))
    assert set(stacked.backend.list()) == {key_of(1), key_of(5)}
    stacked.backend.close()
    with pytest.raises(RuntimeError):
        stacked.lower.list()


def test_a_get_fills_all_tiers_above(server: RedisServer, tmp_path: Path) -> None:
    disk, remote = LMCLocalDiskBackend(tmp_path, ROOM), LMCRemoteBackend(server.url)
    backend = LMCHybridBackend((LMCLocalBackend(ROOM), disk, remote))
    chunk = tensor_of(1, (3, 4), "bfloat16")
    assert remote.put(key_of(1), chunk)
    found = backend.get(key_of(1))
    assert same(found, chunk)
    assert found is not None
    found.zero_()
    wait_until(lambda: disk.contains(key_of(1)))
    assert same(disk.get(key_of(1)), chunk)
    assert remote.remove(key_of(1))
    assert disk.remove(key_of(1))
    assert same(backend.get(key_of(1)), chunk), "from memory"
    assert backend.get(key_of(2)) is None
    backend.close()


def test_wrong_buffers_raise_and_leave_nothing(stack: Callable[..., Stacked]) -> None:
    stacked, chunk = stack(), tensor_of(1, (1000,))
    assert stacked.lower.put(key_of(1), chunk)
    asked: list[RemoteMetadata] = []
    assert stacked.backend.get_bytes(key_of(1), asked.append) is None
    assert len(asked) == 1
    with pytest.raises(ValueError, match="bytes"):
        stacked.backend.get_bytes(key_of(1), Buffers(5))
    with pytest.raises(LookupError):
        stacked.backend.get_bytes(key_of(1), lambda metadata: {}[metadata])
    metadata = RemoteMetadata(3, [(3,)], ["uint8"], MemoryFormat.UNDEFINED)
    with pytest.raises(FormatError):
        stacked.backend.put_bytes(key_of(1), metadata, [])
    assert same(stacked.backend.get(key_of(1)), chunk)
    assert stacked.in_memory == 1000


# ------------------------------------------------------------------ tiers that fail


def test_a_chunk_too_large_for_the_first_tier(stack: Callable[..., Stacked]) -> None:
    stacked = stack(upper_bytes=1000)
    big, small = tensor_of(1, (5000,)), tensor_of(2, (500,))
    assert stacked.backend.put(key_of(1), small)
    assert stacked.backend.put(key_of(1), big)
    assert same(stacked.backend.get(key_of(1)), big)
    assert stacked.in_memory == 0


@pytest.mark.servers
def test_a_redis_that_dies_does_not_fail_the_memory(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        remote = LMCRemoteBackend(server.url, slot_bytes=SLOT, deadline_s=2.0)
        backend = LMCHybridBackend((LMCLocalBackend(ROOM), remote))
        chunks = {n: tensor_of(n, (10_000,)) for n in range(4)}
        assert backend.batched_put((key_of(n), chunks[n]) for n in (0, 1)) == 2
        server.kill()
        started = time.monotonic()
        assert backend.put(key_of(2), chunks[2])
        assert backend.put(key_of(3), chunks[3], blocking=False)
        assert all(same(backend.get(key_of(n)), chunks[n]) for n in chunks)
        assert backend.get(key_of(9)) is None
        assert backend.contains(key_of(2))
        assert set(backend.list()) == {key_of(n) for n in chunks}
        assert backend.remove(key_of(1))
        assert backend.flush(5)
        assert time.monotonic() - started < 5
        server.start()
        wait_until(lambda: backend.put(key_of(2), chunks[2]) and remote.contains(key_of(2)))
        assert same(remote.get(key_of(2)), chunks[2])
        backend.close()


def test_what_no_tier_takes_is_not_counted(server: RedisServer, tmp_path: Path) -> None:
    disk = LMCLocalDiskBackend(tmp_path, 8192)
    backend = LMCHybridBackend((LMCLocalBackend(1000), disk))
    sizes = [500, 50_000, 400, 50_000, 50_000]
    pairs = [(key_of(n), tensor_of(n, (size,))) for n, size in enumerate(sizes)]
    assert backend.batched_put(pairs) == 2
    backend.close()


# ------------------------------------------------------------------ one load


@pytest.mark.parametrize("upper_bytes", [ROOM, 10])
def test_concurrent_readers_share_one_load(
    stack: Callable[..., Stacked], own_server: RedisServer, upper_bytes: int
) -> None:
    """Also if memory does not keep the chunk."""
    stacked, chunk = stack(upper_bytes=upper_bytes), tensor_of(1, (1000,))
    assert stacked.lower.put(key_of(1), chunk)
    own_server.stop()
    for _ in range(8):
        stacked.begin_get(1)
    waiting = stacked.backend._objects._finds
    wait_until(lambda: [len(each) for each in waiting.values()] == [8])
    own_server.cont()
    stacked.join()
    assert len(stacked.found) == 8
    assert all(same(found, chunk) for found in stacked.found)
    assert len({found.data_ptr() for found in stacked.found if found is not None}) == 8
    assert stacked.loads == 1


def test_a_batch_is_loaded_ahead_and_may_be_abandoned(stack: Callable[..., Stacked]) -> None:
    stacked = stack(read_ahead=3)
    chunks = {n: tensor_of(n, (1000 + n,)) for n in range(10)}
    for number, chunk in chunks.items():
        assert stacked.lower.put(key_of(number), chunk)
    found = stacked.backend.batched_get(key_of(n) for n in range(10))
    assert same(next(found), chunks[0])
    wait_until(lambda: stacked.loads == 3)
    assert same(next(found), chunks[1])
    wait_until(lambda: stacked.loads == 4)
    found.close()  # type: ignore[attr-defined]
    wait_until(lambda: stacked.backend._objects.cache.pool.pinned == 0)
    wanted = [3, 3, 99, 9, 0, 3]
    again = list(stacked.backend.batched_get([key_of(n) for n in wanted]))
    assert all(same(a, chunks.get(n)) for a, n in zip(again, wanted, strict=True))


# ------------------------------------------------------------------ no resurrection


@pytest.mark.parametrize("change", ["put", "remove"])
def test_a_change_during_a_load_is_not_undone(
    stack: Callable[..., Stacked], own_server: RedisServer, change: str
) -> None:
    stacked, old, new = stack(), tensor_of(1, (100 * SLOT,)), tensor_of(2, (777,))
    for _ in range(10):
        assert stacked.lower.put(key_of(1), old)
        own_server.stop()
        stacked.begin_get(1)
        wait_until(lambda: stacked.backend._objects._finds)
        if change == "put":
            stacked.begin(lambda: stacked.backend.put(key_of(1), new))
        else:
            stacked.begin(lambda: stacked.backend.remove(key_of(1)))
        own_server.cont()
        stacked.join()
        expected = new if change == "put" else None
        assert same(stacked.backend.get(key_of(1)), expected)
        assert same(stacked.lower.get(key_of(1)), expected)
        assert all(found is None or same(found, old) or same(found, new) for found in stacked.found)
        stacked.backend.remove(key_of(1))


def test_threads_find_what_was_put_last(server: RedisServer) -> None:
    """Each thread puts and removes keys of its own; the others read them constantly."""
    upper = LMCLocalBackend(20_000)
    remote = LMCRemoteBackend(server.url, slot_bytes=SLOT)
    backend = LMCHybridBackend((upper, remote))
    failures: list[BaseException] = []
    stop_at = time.monotonic() + 1.5
    stop = threading.Event()

    def own(number: int) -> None:
        choose = random.Random(number)
        mine: dict[ObjectKey, torch.Tensor | None] = {key_of(number * 10 + n): None for n in (0, 1)}
        try:
            while time.monotonic() < stop_at:
                key = choose.choice([*mine])
                if choose.random() < 0.3:
                    assert backend.remove(key) == (mine[key] is not None)
                    mine[key] = None
                elif choose.random() < 0.6:
                    mine[key] = tensor_of(choose.randrange(1000), (choose.randrange(1, 9000),))
                    assert backend.put(key, mine[key])
                assert same(backend.get(key), mine[key])
                assert backend.contains(key) == (mine[key] is not None)
        except BaseException as error:
            failures.append(error)
            raise

    def read() -> None:
        choose = random.Random(99)
        while not stop.is_set():
            backend.get(key_of(choose.randrange(4) * 10 + choose.randrange(2)))

    owners = [threading.Thread(target=own, args=(number,)) for number in range(4)]
    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in (*owners, *readers):
        thread.start()
    for thread in owners:
        thread.join(30)
    stop.set()
    for thread in readers:
        thread.join(30)
    backend.close()
    assert not failures


# ------------------------------------------------------------------ settings


class Foreign(LMCLocalBackend):
    """A class of the user's over one of ours may be a tier."""


def test_which_tiers_a_hybrid_can_have(server: RedisServer) -> None:
    LMCHybridBackend((Foreign(10),)).close()
    remote, other = LMCRemoteBackend(server.url), LMCRemoteBackend(server.url, layout=bytes(32))
    local, second = LMCLocalBackend(1), LMCLocalBackend(1)
    wrong: list[tuple[LMCBackendInterface, ...]] = [
        (), (remote, local), (local, second), (remote, other),
        (object(),),  # type: ignore[list-item]
    ]  # fmt: skip
    for tiers in wrong:
        with pytest.raises(ConfigError):
            LMCHybridBackend(tiers)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        LMCHybridBackend((local,), wait_s=-1)
    with pytest.raises(ConfigError):
        LMCHybridBackend((local,), read_ahead=0)
    for backend in (remote, other, local, second):
        backend.close()
