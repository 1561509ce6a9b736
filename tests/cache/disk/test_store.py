# SPDX-License-Identifier: Apache-2.0
"""The disk tier's index: which bytes it counts, its limit, its order of use, and restarts."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.cache.disk import files
from lmcache_redis.cache.disk.files import ChunkFiles, Scan
from lmcache_redis.cache.disk.format import disk_bytes
from lmcache_redis.cache.disk.store import DiskStore
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.errors import ConfigError
from lmcache_redis.tiers import CallOutcome, ReadOutcome, RemoveResult, WriteOutcome
from tests.cache.disk.directory import (
    FILE_BYTES,
    NAMES,
    Disk,
    disk_use,
    files_in,
    fill,
    held,
    key_of,
    metadata_of,
    payload_of,
)

LIMIT_BYTES = 4 * FILE_BYTES


class Store:
    """A store in a directory, and chunks by number."""

    def __init__(self, directory: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.store = DiskStore(ChunkFiles(directory), limit_bytes)
        self.store.take_over(Scan(directory).found)

    @property
    def used_bytes(self) -> int:
        return self.store.used_bytes

    def write(self, number: int, nbytes: int = 100, **more: Any) -> WriteOutcome:
        frame = NAMES.frame(key_of(number), metadata_of(nbytes), nbytes)
        payload = memoryview(payload_of(number, nbytes))
        return self.store.write(self.key(number), frame, payload, **more)

    def load(self, number: int, nbytes: int = 100) -> ReadOutcome:
        payload = bytearray(nbytes)
        frame = NAMES.frame(key_of(number), metadata_of(nbytes), nbytes)
        outcome = self.store.load(self.key(number), frame, memoryview(payload))
        assert (outcome is ReadOutcome.LOADED) == (payload == payload_of(number, nbytes))
        return outcome

    def key(self, number: int) -> bytes:
        return NAMES.chunk_key(key_of(number))

    def has(self, *numbers: int) -> bool:
        return sorted(self.store.keys()) == sorted(map(self.key, numbers))

    def takes_all(self) -> None:
        """No byte is counted that no file has: a chunk as large as the limit is stored."""
        assert self.write(99, self.store.limit_bytes - 4096) is WriteOutcome.STORED
        assert self.has(99)
        assert self.used_bytes == disk_use(self.directory) == self.store.limit_bytes
        assert self.write(98, self.store.limit_bytes - 4095) is WriteOutcome.FULL
        assert self.has(99)


@pytest.fixture
def store(directory: Path) -> Iterator[Store]:
    store = Store(directory)
    yield store
    store.takes_all()


def test_a_store_of_nothing(store: Store) -> None:
    assert (store.used_bytes, store.store.keys()) == (0, [])
    assert not store.store.remove(store.key(1))
    store.store.keep(store.key(1))


@pytest.mark.parametrize("limit_bytes", [0, -1])
def test_a_limit_is_positive(directory: Path, limit_bytes: int) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        Store(directory, limit_bytes)
    assert Store(directory, 1).write(1) is WriteOutcome.FULL


def test_bytes_of_chunks_replaced_and_removed(store: Store) -> None:
    for nbytes in (100, 5000, 1):
        assert store.write(1, nbytes) is WriteOutcome.STORED
        assert store.used_bytes == disk_use(store.directory)
    assert store.store.remove(store.key(1))
    assert not store.store.remove(store.key(1))
    assert store.used_bytes == disk_use(store.directory) == 0


def test_only_a_certain_file_is_removed(store: Store) -> None:
    store.write(1)
    former = store.store.find(store.key(1))
    store.write(1)
    assert not store.store.remove(store.key(1), former)
    assert store.has(1)
    assert store.store.remove(store.key(1), store.store.find(store.key(1)))


def test_evictions_are_told_and_counted_once(store: Store) -> None:
    told: list[list[bytes]] = []
    store.store.on_evicted = told.append
    for number in range(4):
        store.write(number)
    store.store.keep(store.key(0))
    assert told == []
    store.write(4, 3 * 4096)  # two files' space
    assert told == [[store.key(1), store.key(2)]]
    assert store.has(0, 3, 4)
    assert store.used_bytes == disk_use(store.directory) == 2 * FILE_BYTES + 4 * 4096
    store.store.on_evicted = None


def test_evictions_that_cannot_be_told_leave_the_books_right(store: Store) -> None:
    for number in range(5):
        store.write(number)

    def fail(_: object) -> None:
        raise RuntimeError("a bug")

    store.store.on_evicted = fail
    with pytest.raises(RuntimeError):
        store.write(5, 3 * 4096)
    store.store.on_evicted = None
    assert store.used_bytes == disk_use(store.directory)
    store.write(5, 3 * 4096)
    assert store.store.find(store.key(5)) is not None


def other_metadata(shape: tuple[int, ...], dtype: str) -> bytes:
    return RemoteMetadata(100, [shape], [dtype], MemoryFormat.UNDEFINED).serialize()


@pytest.mark.parametrize(
    "other",
    [
        {"share": 2},
        {"fingerprint": b"g" * 32},
        {"metadata": other_metadata((50, 2), "uint8")},
        {"metadata": other_metadata((50,), "bfloat16")},
    ],
)
def test_a_chunk_of_another_frame_is_no_hit_and_stays(store: Store, other: Any) -> None:
    key, payload, into = store.key(1), memoryview(payload_of(1, 100)), bytearray(100)
    frame = replace(NAMES.frame(key_of(1), metadata_of(100), 100), share=3)
    assert store.store.write(key, frame, payload) is WriteOutcome.STORED
    assert store.store.load(key, replace(frame, **other), memoryview(into)) is ReadOutcome.FOREIGN
    assert into == bytes(100)
    assert store.store.load(key, frame, memoryview(into)) is ReadOutcome.LOADED
    assert into == payload


def test_a_limit_that_is_lowered_holds_from_the_next_write_on(store: Store) -> None:
    for number in range(4):
        store.write(number)
    store.store.limit_bytes = 2 * FILE_BYTES
    store.write(4)
    assert store.has(3, 4)
    assert store.used_bytes == disk_use(store.directory) == 2 * FILE_BYTES
    store.store.limit_bytes = 3 * FILE_BYTES
    store.write(5)
    assert store.has(3, 4, 5)


def test_larger_files_that_are_evicted_leave_their_surplus(store: Store) -> None:
    store.write(1, 6 * 4096)
    store.write(2, 2 * 4096)
    assert store.has(2)
    assert store.used_bytes == disk_use(store.directory) == 3 * 4096


def test_a_file_that_cannot_be_removed_is_logged(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It counts no more: the next scan finds it, or an operator who reads the log."""
    for number in range(2):
        store.write(number)

    def fail(*_: object) -> None:
        raise PermissionError(1, "not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(ChunkFiles, "remove", fail)
        assert all(store.store.remove(store.key(number)) for number in range(2))
    assert caplog.text.count("a file could not be removed: not permitted") == 1
    assert store.used_bytes == 0
    for path in files_in(store.directory):
        path.unlink()


@pytest.mark.parametrize("error", [MemoryError(), OSError(28, "no space left")])
def test_a_write_that_fails_gives_its_space_back(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    store.write(1)
    with monkeypatch.context() as patch:
        patch.setattr(ChunkFiles, "write", fail)
        if isinstance(error, OSError):
            assert store.write(2) is WriteOutcome.UNAVAILABLE
        else:
            with pytest.raises(MemoryError):
                store.write(2)
    assert store.has(1)
    assert store.used_bytes == FILE_BYTES


def test_a_cancelled_write_leaves_the_former_chunk(store: Store) -> None:
    store.write(1)
    assert store.write(1, is_cancelled=lambda: True) is WriteOutcome.CANCELLED
    assert store.load(1) is ReadOutcome.LOADED
    assert store.used_bytes == disk_use(store.directory) == FILE_BYTES


def test_files_that_vanish_or_are_damaged_count_no_more(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        store.write(number)
    for number in range(2):
        file = store.store.find(store.key(number))
        assert file is not None
        path = Path(store.store._files.path(file.key, file.sequence))
        if number:
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        else:
            path.unlink()
    assert store.load(2, 101) is ReadOutcome.FOREIGN
    assert [store.load(number) for number in range(3)] == [
        ReadOutcome.MISSING,
        ReadOutcome.CORRUPT,
        ReadOutcome.LOADED,
    ]
    assert store.has(2)
    assert store.used_bytes == disk_use(store.directory) == FILE_BYTES
    assert "a file was removed by another process" in caplog.text
    assert "is removed: " in caplog.text


def test_a_file_that_cannot_be_removed_stays_in_the_index(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be found again after a restart."""
    store.write(1)
    store.write(2)
    used_bytes = store.used_bytes
    key, remove_file = store.key(1), files.remove_file

    def refuse(path: str) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(files, "remove_file", refuse)
    assert store.store.remove_or_keep(key) == RemoveResult(CallOutcome.UNAVAILABLE)
    assert (store.has(1, 2), store.used_bytes) == (True, used_bytes)
    assert next(iter(store.store.keys(b""))) == key, "it is the next to be evicted"
    monkeypatch.setattr(files, "remove_file", remove_file)
    assert store.store.remove_or_keep(key) == RemoveResult(CallOutcome.DONE, 1)
    assert store.store.remove_or_keep(key) == RemoveResult(CallOutcome.DONE)
    assert store.has(2)
    assert store.used_bytes == disk_use(store.directory)


# ------------------------------------------------------------------ in a tier


def test_the_least_recently_used_goes_first(
    open_tier: Callable[..., Disk], directory: Path
) -> None:
    tier = open_tier(10 * FILE_BYTES)
    fill(tier, range(10))
    assert tier.used_bytes == 10 * FILE_BYTES
    assert tier.get(key_of(0)) == payload_of(0, 100)  # touches
    assert tier.contains(key_of(1))  # does not
    fill(tier, [10, 11])
    assert held(tier) == [0, *range(3, 12)]
    assert len(files_in(directory)) == 10
    assert disk_use(directory) == tier.used_bytes == 10 * FILE_BYTES


def test_the_limit_holds(
    open_tier: Callable[..., Disk], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the files that are being removed, by two threads."""
    limit_bytes = 30 * 4096
    lock = threading.Lock()
    sizes: dict[str, int] = {}
    most = [0]
    write, remove = ChunkFiles.write, ChunkFiles.remove

    def counted_write(files: ChunkFiles, key: bytes, sequence: int, *more: Any) -> None:
        with lock:
            sizes[files.path(key, sequence)] = disk_bytes(more[0].chunk_bytes)
            most[0] = max(most[0], sum(sizes.values()))
        write(files, key, sequence, *more)

    def counted_remove(files: ChunkFiles, key: bytes, sequence: int) -> None:
        remove(files, key, sequence)
        with lock:
            del sizes[files.path(key, sequence)]

    monkeypatch.setattr(ChunkFiles, "write", counted_write)
    monkeypatch.setattr(ChunkFiles, "remove", counted_remove)
    tier = open_tier(limit_bytes)

    def put(seed: int) -> None:
        for number in range(60):
            size = (seed * 3331 + number * 977) % 20_000 + 1
            tier.put(key_of(number % 17), payload_of(number, size))
            if number % 4 == 0:
                tier.remove(key_of(number % 13))

    threads = [threading.Thread(target=put, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert limit_bytes / 2 < most[0] <= limit_bytes + 2 * disk_bytes(20_000)
    assert tier.used_bytes == sum(sizes.values()) == disk_use(directory)
    assert len(files_in(directory)) == len(tier.list())


def test_everything_is_found_after_a_restart(open_tier: Callable[..., Disk]) -> None:
    tier = open_tier(64 << 20)
    stored = {}
    for number in range(40):
        key = key_of(number, "org/ü/model" * (1 + number % 80))
        stored[key] = payload_of(number, number * 2000 + 1)
        assert tier.put(key, stored[key])
    used_bytes = tier.used_bytes
    for _ in range(2):
        tier.close()
        tier = open_tier(64 << 20)
        assert sorted(tier.list()) == sorted(stored)
        assert tier.used_bytes == used_bytes
    for key, payload in stored.items():
        assert tier.contains(key)
        assert tier.get(key) == payload


def test_the_order_is_found_after_a_restart(open_tier: Callable[..., Disk]) -> None:
    tier = open_tier(10 * FILE_BYTES)
    fill(tier, [3, 1, 4, 5, 9, 2, 6, 8, 7, 0])
    for number in (4, 3, 2):
        assert tier.get(key_of(number)) is not None
    fill(tier, [1])
    tier.close()
    tier = open_tier(10 * FILE_BYTES)
    for gone, number in enumerate([5, 9, 6, 8, 7, 0, 4, 3, 2, 1]):
        assert tier.contains(key_of(number))
        fill(tier, [100 + gone])
        assert not tier.contains(key_of(number))
    assert held(tier) == list(range(100, 110))


def test_a_lower_limit_at_a_restart_gives_up_the_oldest(
    open_tier: Callable[..., Disk], directory: Path
) -> None:
    tier = open_tier(10 * FILE_BYTES)
    fill(tier, [*range(9)])
    assert tier.put(key_of(9), payload_of(9, 4 * 4096))
    tier.close()
    tier = open_tier(4 * FILE_BYTES)
    assert held(tier) == [8, 9]
    assert disk_use(directory) == tier.used_bytes
    tier.close()
    tier = open_tier(2 * FILE_BYTES)
    assert 9 not in held(tier)
    assert disk_use(directory) == tier.used_bytes <= 2 * FILE_BYTES
