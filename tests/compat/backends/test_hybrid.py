"""The hybrid: writes through, promotes, shares loads, never restores a removed chunk."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.compat.backends.disk import LMCLocalDiskBackend
from lmcache_redis.compat.backends.hybrid import LMCHybridBackend
from lmcache_redis.compat.backends.interface import Allocate
from lmcache_redis.compat.backends.local import LMCLocalBackend
from lmcache_redis.compat.backends.remote import LMCPipelinedRemoteBackend, LMCRemoteBackend
from lmcache_redis.errors import ConfigError, FormatError
from tests.compat.backends.contract import (
    Buffers,
    MakeBackend,
    TierContract,
    key_of,
    raw_of,
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


class Watched(LMCLocalBackend):
    """Memory that counts loads and can hold them back.

    entered: set when a load begins. It waits for `go_on`, after the payload was copied (`late`) or
    before.
    """

    def __init__(self, limit_bytes: int = ROOM, late: bool = True) -> None:
        super().__init__(limit_bytes)
        self.loads: list[ObjectKey] = []
        self.late = late
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def get_bytes(self, key: ObjectKey, allocate: Allocate) -> RemoteMetadata | None:
        self.loads.append(key)
        if not self.late:
            self._hold()
        found = super().get_bytes(key, allocate)
        if self.late:
            self._hold()
        return found

    def hold(self) -> None:
        self.entered.clear()
        self.go_on.clear()

    def _hold(self) -> None:
        self.entered.set()
        assert self.go_on.wait(10)


class Broken(LMCLocalBackend):
    """Stores nothing, like a tier whose server is down."""

    def put_bytes(
        self,
        key: ObjectKey,
        metadata: RemoteMetadata,
        payload: Sequence[memoryview],
        blocking: bool = True,
    ) -> bool:
        return False


class Hybrid:
    """A hybrid of two memory tiers, and threads that call it."""

    def __init__(self, upper: LMCLocalBackend, lower: LMCLocalBackend, **settings: Any) -> None:
        self.upper = upper
        self.lower = lower
        self.backend = LMCHybridBackend((upper, lower), **settings)
        self.found: list[torch.Tensor | None] = []
        self._threads: list[threading.Thread] = []

    def begin(self, call: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=call)
        self._threads.append(thread)
        thread.start()
        return thread

    def begin_get(self, number: int) -> threading.Thread:
        return self.begin(lambda: self.found.append(self.backend.get(key_of(number))))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()


def hybrid_with(
    upper: LMCLocalBackend, lower: LMCLocalBackend, **settings: Any
) -> tuple[Hybrid, torch.Tensor]:
    """A hybrid with a chunk under key 1 that only the lower tier has."""
    hybrid = Hybrid(upper, lower, **settings)
    chunk = tensor_of(1, (1000,))
    assert lower.put(key_of(1), chunk)
    return hybrid, chunk


# ------------------------------------------------------------------ through and back


def test_a_put_goes_to_all_tiers() -> None:
    upper, lower = LMCLocalBackend(ROOM), LMCLocalBackend(ROOM)
    backend = LMCHybridBackend((upper, lower))
    for blocking in (True, False):
        chunk = tensor_of(int(blocking), (100,))
        assert backend.put(key_of(blocking), chunk, blocking)
        assert backend.flush(5)
        assert same(upper.get(key_of(blocking)), chunk)
        assert same(lower.get(key_of(blocking)), chunk)
    assert backend.remove(key_of(0))
    assert not upper.contains(key_of(0))
    assert not lower.contains(key_of(0))
    assert lower.put(key_of(5), tensor_of(5, (5,)))
    assert set(backend.list()) == {key_of(1), key_of(5)}
    backend.close()
    with pytest.raises(RuntimeError):
        lower.list()


def test_a_get_fills_all_tiers_above() -> None:
    tiers = [LMCLocalBackend(ROOM) for _ in range(3)]
    backend = LMCHybridBackend(tiers)
    chunk = tensor_of(1, (3, 4), "bfloat16")
    assert tiers[2].put(key_of(1), chunk)
    assert same(backend.get(key_of(1)), chunk)
    for tier in tiers:
        assert same(tier.get(key_of(1)), chunk)
    assert backend.get(key_of(2)) is None
    backend.close()


def test_what_is_filled_is_a_copy() -> None:
    hybrid, chunk = hybrid_with(LMCLocalBackend(ROOM), LMCLocalBackend(ROOM))
    found = hybrid.backend.get(key_of(1))
    assert found is not None
    found.zero_()
    assert same(hybrid.backend.get(key_of(1)), chunk)


def test_no_room_at_the_caller_is_a_miss_and_asked_once() -> None:
    hybrid, chunk = hybrid_with(LMCLocalBackend(ROOM), LMCLocalBackend(ROOM))
    asked: list[RemoteMetadata] = []

    def refuse(metadata: RemoteMetadata) -> None:
        asked.append(metadata)

    assert hybrid.backend.get_bytes(key_of(1), refuse) is None
    assert len(asked) == 1
    assert not hybrid.upper.contains(key_of(1))
    assert same(hybrid.backend.get(key_of(1)), chunk)


def test_buffers_that_are_wrong_raise_and_leave_nothing() -> None:
    hybrid, chunk = hybrid_with(LMCLocalBackend(ROOM), LMCLocalBackend(ROOM))
    with pytest.raises(ValueError, match="bytes"):
        hybrid.backend.get_bytes(key_of(1), Buffers(5))
    assert same(hybrid.backend.get(key_of(1)), chunk)
    with pytest.raises(FormatError):
        hybrid.backend.put_bytes(
            key_of(1), RemoteMetadata(3, [(3,)], ["uint8"], MemoryFormat.UNDEFINED), []
        )
    assert same(hybrid.backend.get(key_of(1)), chunk)


# ------------------------------------------------------------------ tiers that fail


def test_a_tier_that_takes_nothing_keeps_nothing_old() -> None:
    for upper, lower in (
        (LMCLocalBackend(ROOM), Broken(ROOM)),
        (Broken(ROOM), LMCLocalBackend(ROOM)),
    ):
        hybrid = Hybrid(upper, lower)
        old, new = tensor_of(1, (100,)), tensor_of(2, (100,))
        broken, good = (upper, lower) if isinstance(upper, Broken) else (lower, upper)
        metadata = RemoteMetadata(100, [(100,)], ["uint8"], upper.fmt)
        assert LMCLocalBackend.put_bytes(broken, key_of(1), metadata, [memoryview(raw_of(old))])
        assert hybrid.backend.put(key_of(1), new)
        assert same(good.get(key_of(1)), new)
        assert not broken.contains(key_of(1))
        assert same(hybrid.backend.get(key_of(1)), new)
    hybrid = Hybrid(Broken(ROOM), Broken(ROOM))
    assert not hybrid.backend.put(key_of(1), new)


def test_a_chunk_too_large_for_the_first_tier() -> None:
    upper, lower = LMCLocalBackend(1000), LMCLocalBackend(ROOM)
    backend = LMCHybridBackend((upper, lower))
    big, small = tensor_of(1, (5000,)), tensor_of(2, (500,))
    assert backend.put(key_of(1), small)
    assert backend.put(key_of(1), big)
    assert same(backend.get(key_of(1)), big)
    assert not upper.contains(key_of(1))
    assert same(backend.get(key_of(1)), big)


@pytest.mark.servers
def test_a_redis_that_dies_does_not_fail_the_memory(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        remote = LMCRemoteBackend(server.url, slot_bytes=SLOT, deadline_s=2.0)
        upper = LMCLocalBackend(ROOM)
        backend = LMCHybridBackend((upper, remote))
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
        upper.remove(key_of(2))
        wait_until(lambda: remote.contains(key_of(2)) or backend.put(key_of(2), chunks[2]))
        backend.close()


# ------------------------------------------------------------------ one load


@pytest.mark.parametrize("upper_bytes", [ROOM, 10])
def test_concurrent_readers_share_one_load(upper_bytes: int) -> None:
    """Also if the first tier does not store the chunk: then they get copies."""
    lower = Watched()
    hybrid, chunk = hybrid_with(LMCLocalBackend(upper_bytes), lower)
    lower.loads.clear()
    lower.hold()
    hybrid.begin_get(1)
    assert lower.entered.wait(10)
    for _ in range(7):
        hybrid.begin_get(1)
    wait_until(lambda: flight_of(hybrid).followers == 7)
    assert hybrid.found == []
    lower.go_on.set()
    hybrid.join()
    assert len(hybrid.found) == 8
    assert all(same(found, chunk) for found in hybrid.found)
    assert len({found.data_ptr() for found in hybrid.found if found is not None}) == 8
    assert lower.loads == [key_of(1)]


def flight_of(hybrid: Hybrid) -> Any:
    return hybrid.backend._loads._loads[key_of(1)]


def test_readers_of_what_is_not_there_are_one_load() -> None:
    lower = Watched()
    hybrid, _ = hybrid_with(LMCLocalBackend(ROOM), lower)
    assert lower.remove(key_of(1))
    lower.hold()
    for _ in range(5):
        hybrid.begin_get(1)
    wait_until(lambda: lower.entered.is_set() and flight_of(hybrid).followers == 4)
    lower.go_on.set()
    hybrid.join()
    assert hybrid.found == [None] * 5
    assert lower.loads == [key_of(1)]


def test_a_leader_without_room_does_not_decide_for_others() -> None:
    lower = Watched(late=False)
    hybrid, chunk = hybrid_with(LMCLocalBackend(ROOM), lower)
    lower.hold()
    refused: list[object] = []
    hybrid.begin(lambda: refused.append(hybrid.backend.get_bytes(key_of(1), lambda _: None)))
    assert lower.entered.wait(10)
    hybrid.begin_get(1)
    wait_until(lambda: flight_of(hybrid).followers == 1)
    lower.go_on.set()
    hybrid.join()
    assert refused == [None]
    assert len(hybrid.found) == 1
    assert same(hybrid.found[0], chunk)


def test_a_leader_that_fails_does_not_decide_for_others() -> None:
    lower = Watched(late=False)
    hybrid, chunk = hybrid_with(LMCLocalBackend(ROOM), lower)
    lower.hold()
    raised: list[BaseException] = []

    def fail() -> None:
        def allocate(metadata: RemoteMetadata) -> None:
            raise LookupError("of the caller")

        try:
            hybrid.backend.get_bytes(key_of(1), allocate)
        except LookupError as error:
            raised.append(error)

    hybrid.begin(fail)
    assert lower.entered.wait(10)
    hybrid.begin_get(1)
    wait_until(lambda: flight_of(hybrid).followers == 1)
    lower.go_on.set()
    hybrid.join()
    assert len(raised) == 1
    assert same(hybrid.found[0], chunk)


def test_followers_wait_for_a_bounded_time() -> None:
    lower = Watched(late=False)
    hybrid, chunk = hybrid_with(LMCLocalBackend(ROOM), lower, wait_s=0.1)
    lower.hold()
    leader = hybrid.begin_get(1)
    assert lower.entered.wait(10)
    follower = hybrid.begin_get(1)
    wait_until(lambda: len(lower.loads) == 2, "it loads for itself")
    assert leader.is_alive()
    assert follower.is_alive()
    lower.go_on.set()
    hybrid.join()
    assert all(same(found, chunk) for found in hybrid.found)


def test_a_batch_is_loaded_ahead_and_may_be_abandoned() -> None:
    lower = Watched(late=False)
    hybrid = Hybrid(LMCLocalBackend(ROOM), lower, read_ahead=3)
    chunks = {n: tensor_of(n, (1000 + n,)) for n in range(10)}
    for number, chunk in chunks.items():
        assert lower.put(key_of(number), chunk)
    found = hybrid.backend.batched_get(key_of(n) for n in range(10))
    assert same(next(found), chunks[0])
    wait_until(lambda: len(lower.loads) == 3)
    assert same(next(found), chunks[1])
    wait_until(lambda: hybrid.upper.contains(key_of(2)) and hybrid.upper.contains(key_of(3)))
    lower.hold()
    assert same(next(found), chunks[2])
    wait_until(lambda: lower.entered.is_set())
    started = time.monotonic()
    found.close()  # type: ignore[attr-defined]
    assert time.monotonic() - started < 8  # of ten
    lower.go_on.set()
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("lmcr-hybrid")])
    wanted = [3, 3, 99, 9, 0, 3]
    again = list(hybrid.backend.batched_get([key_of(n) for n in wanted]))
    assert all(same(a, chunks.get(n)) for a, n in zip(again, wanted, strict=True))
    assert not [t for t in threading.enumerate() if t.name.startswith("lmcr-hybrid")]


# ------------------------------------------------------------------ no resurrection


def test_a_removal_during_a_load_is_not_undone() -> None:
    lower = Watched()
    hybrid, _ = hybrid_with(LMCLocalBackend(ROOM), lower)
    lower.hold()
    hybrid.begin_get(1)
    assert lower.entered.wait(10)
    # The leader has the bytes already.
    assert hybrid.backend.remove(key_of(1))
    hybrid.begin_get(1)  # begun after the removal: it must not follow that leader
    lower.go_on.set()
    hybrid.join()
    assert [found is None for found in sorted(hybrid.found, key=lambda f: f is None)] == [
        False,
        True,
    ]
    assert not hybrid.upper.contains(key_of(1))
    assert not hybrid.backend.contains(key_of(1))
    assert hybrid.backend.get(key_of(1)) is None


def test_a_put_during_a_load_is_not_undone() -> None:
    lower = Watched()
    hybrid, _ = hybrid_with(LMCLocalBackend(ROOM), lower)
    lower.hold()
    hybrid.begin_get(1)
    assert lower.entered.wait(10)
    new = tensor_of(2, (777,))
    assert hybrid.backend.put(key_of(1), new)
    lower.go_on.set()
    hybrid.join()
    assert same(hybrid.upper.get(key_of(1)), new)
    assert same(hybrid.lower.get(key_of(1)), new)


def test_a_load_that_begins_within_a_removal_is_not_undone() -> None:
    """It found the chunk in the lower tier before the removal reached that tier."""
    removing, go_on = threading.Event(), threading.Event()

    class Slow(LMCLocalBackend):
        def remove(self, key: ObjectKey) -> bool:
            removing.set()
            assert go_on.wait(10)
            return super().remove(key)

    hybrid, chunk = hybrid_with(LMCLocalBackend(ROOM), Slow(ROOM))
    hybrid.begin(lambda: hybrid.backend.remove(key_of(1)))
    assert removing.wait(10)
    assert same(hybrid.backend.get(key_of(1)), chunk)
    go_on.set()
    hybrid.join()
    assert not hybrid.backend.contains(key_of(1))


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


# ------------------------------------------------------------------ the end


def test_all_tiers_are_closed_though_one_fails() -> None:
    class Failing(LMCLocalBackend):
        def close(self) -> None:
            super().close()
            raise OSError("the disk is gone")

    upper, lower = Failing(ROOM), LMCLocalBackend(ROOM)
    backend = LMCHybridBackend((upper, lower))
    with pytest.raises(OSError, match="gone"):
        backend.close()
    with pytest.raises(RuntimeError):
        lower.list()


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ConfigError):
        LMCHybridBackend(())
    with pytest.raises(ConfigError):
        LMCHybridBackend((LMCLocalBackend(1),), wait_s=-1)
    with pytest.raises(ConfigError):
        LMCHybridBackend((LMCLocalBackend(1),), read_ahead=0)
