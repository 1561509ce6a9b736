"""Chunks of a tier in memory without a copy: whole for as long as anybody has them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lmcache_redis.backends import local
from lmcache_redis.backends.disk import LMCLocalDiskBackend
from lmcache_redis.backends.hybrid import LMCHybridBackend
from lmcache_redis.backends.local import LMCLocalBackend
from lmcache_redis.errors import FormatError
from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import RemoteMetadata
from tests.backends.contract import get_raw, key_of, metadata_of

SIZE = 100_000  # large enough for memory that is used again
LIMIT = 10 * SIZE
Tier = LMCLocalBackend | LMCHybridBackend


@pytest.fixture(params=["memory", "memory over memory"])
def tier(request: pytest.FixtureRequest) -> Iterator[Tier]:
    upper = LMCLocalBackend(LIMIT)
    backend: Tier = upper
    if request.param != "memory":
        backend = LMCHybridBackend((upper, LMCLocalBackend(100 * LIMIT)))
    yield backend
    backend.close()


def put(backend: Tier, number: int, fill: int) -> None:
    assert backend.put_bytes(key_of(number), metadata_of(SIZE), [memoryview(bytes([fill]) * SIZE)])


def no_care() -> None:
    pass


def test_what_is_lent_is_the_chunk_and_cannot_be_written(tier: Tier) -> None:
    assert tier.borrow(key_of(1)) is None
    put(tier, 1, 7)
    lent = tier.borrow(key_of(1))
    assert lent is not None
    assert lent.metadata == metadata_of(SIZE)
    assert lent.payload == bytes([7]) * SIZE
    assert lent.payload.readonly


@pytest.mark.parametrize("change", ["replace", "remove", "evict", "close"])
def test_what_is_lent_stays_whole(tier: Tier, change: str) -> None:
    put(tier, 1, 7)
    lent = tier.borrow(key_of(1))
    assert lent is not None
    if change == "remove":
        assert tier.remove(key_of(1))
    for number in range(30):
        # Everything that is free is used again, and all else evicted.
        put(tier, 1 if change == "replace" else number + 10, 9)
    if change == "close":
        tier.close()
    part = lent.payload[5:]
    del lent
    if change != "close":
        put(tier, 2, 8)
    assert part == bytes([7]) * (SIZE - 5)


def test_borrowing_is_using() -> None:
    tier = LMCLocalBackend(LIMIT)
    for number in range(10):
        put(tier, number, number)
    assert tier.borrow(key_of(0)) is not None
    assert tier.contains(key_of(1))
    put(tier, 10, 10)
    assert tier.contains(key_of(0))
    assert not tier.contains(key_of(1))


def test_what_was_written_into_room_is_kept_where_it_is(tier: Tier) -> None:
    room = tier.room(metadata_of(SIZE))
    assert room is not None
    assert len(room) == SIZE
    room[:] = bytes([5]) * SIZE
    assert tier.list() == []
    seen: list[bool] = []
    assert tier.keep(
        key_of(1), metadata_of(SIZE), room, lambda: seen.append(tier.contains(key_of(1)))
    )
    assert seen == [True]
    lent = tier.borrow(key_of(1))
    assert lent is not None
    room[0] = 6  # which nobody may do; it shows that this is the memory
    assert lent.payload[0] == 6
    assert get_raw(tier, key_of(1)) == bytes([6]) + bytes([5]) * (SIZE - 1)


def test_room_that_is_given_up_leaves_nothing() -> None:
    tier = LMCLocalBackend(LIMIT)
    room = tier.room(metadata_of(SIZE))
    assert room is not None
    assert tier.used_bytes == 0
    del room
    assert tier._blocks.taken_bytes == 0
    assert tier.list() == []


def test_no_more_room_than_a_quarter_of_the_tier() -> None:
    """Or 128 MiB, and what is given up can be had again."""
    tier = LMCLocalBackend(1 << 30)
    metadata = metadata_of(64 << 20)
    rooms = [tier.room(metadata) for _ in range(8)]
    assert [room is not None for room in rooms] == [True] * 5 + [False] * 3
    assert tier.put_bytes(key_of(1), metadata_of(9), (memoryview(bytes(9)),))
    rooms.clear()
    assert tier.room(metadata) is not None
    tier.close()


def test_no_room_for_what_is_not_kept(tier: Tier) -> None:
    assert tier.room(metadata_of(LIMIT + 1)) is None
    assert tier.room(metadata_of(0)) is None
    room = tier.room(metadata_of(SIZE))
    assert room is not None
    with pytest.raises(FormatError):
        tier.keep(key_of(1), metadata_of(SIZE + 1), room, no_care)
    assert tier.list() == []


def test_a_chunk_that_is_kept_takes_the_place_of_another(tier: Tier) -> None:
    put(tier, 1, 1)
    for number in range(20):
        room = tier.room(metadata_of(SIZE))
        assert room is not None
        room[:] = bytes([number]) * SIZE
        assert tier.keep(key_of(1), metadata_of(SIZE), room, no_care)
        del room
        assert get_raw(tier, key_of(1)) == bytes([number]) * SIZE
    assert tier.list() == [key_of(1)]


def test_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that are gone and still lent take memory beside the limit: at most so much."""
    monkeypatch.setattr(local, "_LEAST_UNLISTED_BYTES", 0)
    tier = LMCLocalBackend(LIMIT)
    lent = []
    for number in range(20):
        put(tier, number, number)
        lent.append(tier.borrow(key_of(number)))
    gone = [each for each in lent if each is not None]
    assert 10 < len(gone) < 16
    assert tier.borrow(key_of(19)) is None
    assert get_raw(tier, key_of(19)) == bytes([19]) * SIZE
    lent.clear()
    gone.clear()
    assert tier.borrow(key_of(19)) is not None


def test_after_close(tier: Tier) -> None:
    room = tier.room(metadata_of(SIZE))
    assert room is not None
    tier.close()
    for call in (
        lambda: tier.borrow(key_of(1)),
        lambda: tier.room(metadata_of(SIZE)),
        lambda: tier.keep(key_of(1), metadata_of(SIZE), room, no_care),
    ):
        with pytest.raises(RuntimeError):
            call()


class Slow(LMCLocalBackend):
    """Puts wait until `go_on`; `takes` is whether they store anything then."""

    def __init__(self) -> None:
        super().__init__(100 * LIMIT)
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.takes = True

    def put_bytes(
        self,
        key: ObjectKey,
        metadata: RemoteMetadata,
        payload: Sequence[memoryview],
        blocking: bool = True,
    ) -> bool:
        self.entered.set()
        assert self.go_on.wait(10)
        return self.takes and super().put_bytes(key, metadata, payload, blocking)


class Keeping:
    """A `keep` on a thread, over a tier that is slow."""

    def __init__(self, lower: Slow) -> None:
        self.backend = LMCHybridBackend((LMCLocalBackend(LIMIT), lower))
        self.visible = threading.Event()
        self.results: list[bool] = []
        self._thread = threading.Thread(target=self._keep)

    def _keep(self) -> None:
        room = self.backend.room(metadata_of(SIZE))
        assert room is not None
        room[:] = bytes([5]) * SIZE
        kept = self.backend.keep(key_of(1), metadata_of(SIZE), room, self.visible.set)
        self.results.append(kept)

    def begin(self) -> None:
        self._thread.start()
        assert self.visible.wait(10)

    def end(self) -> list[bool]:
        self._thread.join(10)
        assert not self._thread.is_alive()
        return self.results


def test_it_is_visible_before_it_is_below() -> None:
    lower = Slow()
    keeping = Keeping(lower)
    keeping.begin()
    assert keeping.backend.borrow(key_of(1)) is not None
    assert get_raw(keeping.backend, key_of(1)) == bytes([5]) * SIZE
    assert not lower.contains(key_of(1))
    assert keeping.results == []
    lower.go_on.set()
    assert keeping.end() == [True]
    assert get_raw(lower, key_of(1)) == bytes([5]) * SIZE


def test_a_tier_below_that_does_not_take_it_forgets_the_one_before() -> None:
    lower = Slow()
    lower.go_on.set()
    keeping = Keeping(lower)
    assert lower.put_bytes(key_of(1), metadata_of(3), [memoryview(b"old")])
    lower.takes = False
    keeping.begin()
    assert keeping.end() == [True]
    assert not lower.contains(key_of(1))


def test_a_removal_comes_after_all_of_it() -> None:
    lower = Slow()
    keeping = Keeping(lower)
    keeping.begin()
    assert lower.entered.wait(10)
    removed: list[bool] = []
    remover = threading.Thread(target=lambda: removed.append(keeping.backend.remove(key_of(1))))
    remover.start()
    assert removed == []
    lower.go_on.set()
    keeping.end()
    remover.join(10)
    assert removed == [True]
    assert keeping.backend.list() == []


def test_a_first_tier_that_does_not_lend(tmp_path: Path) -> None:
    backend = LMCHybridBackend((LMCLocalDiskBackend(tmp_path, LIMIT), LMCLocalBackend(LIMIT)))
    put(backend, 1, 1)
    assert backend.borrow(key_of(1)) is None
    assert backend.room(metadata_of(SIZE)) is None
    with pytest.raises(RuntimeError):
        backend.keep(key_of(1), metadata_of(1), memoryview(bytearray(1)), no_care)
    backend.close()
