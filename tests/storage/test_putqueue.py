"""Puts that nobody waits for: how many, in which order, and which are dropped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_redis.errors import ConfigError
from lmcache_redis.storage.copying import Block
from lmcache_redis.storage.disk_files import ChunkFiles
from lmcache_redis.storage.putqueue import PutQueue, QueuedPut
from tests.storage.contract import key_of, metadata_of, same, tensor_of
from tests.storage.disk_helpers import OpenTier, files_in, number_of


class Gate:
    """A store that lets nothing through before it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Event()
        self.stored: list[tuple[int, int]] = []

    def store(self, put: QueuedPut, block: Block) -> None:
        self.entered.set()
        assert self.opened.wait(30)
        if not put.dropped:
            self.stored.append((number_of(put.key), int(block[0])))


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def queue(gate: Gate) -> Iterator[PutQueue]:
    """Room for ten chunks of ten bytes."""
    queue = PutQueue(gate.store, 100, "test-queue")
    yield queue
    gate.opened.set()
    assert queue.close(30)


def offer(queue: PutQueue, number: int, value: int = 0, size: int = 10) -> bool:
    return queue.offer(key_of(number), metadata_of(size), [memoryview(bytes([value]) * size)])


def test_puts_are_stored_in_their_order(queue: PutQueue, gate: Gate) -> None:
    for number in range(10):
        assert offer(queue, number)
    gate.opened.set()
    assert queue.flush(30)
    assert gate.stored == [(number, 0) for number in range(10)]


def test_what_does_not_fit_is_refused(queue: PutQueue, gate: Gate) -> None:
    assert offer(queue, 0)
    assert gate.entered.wait(30)  # one on its way counts
    for number in range(1, 10):
        assert offer(queue, number)
    assert not offer(queue, 10)
    assert not offer(queue, 11, size=1)
    assert queue.drop(key_of(5))  # makes room at once
    assert not offer(queue, 12, size=11)
    assert offer(queue, 13)
    assert not offer(queue, 14, size=1)
    gate.opened.set()
    assert queue.flush(30)
    assert [number for number, _ in gate.stored] == [0, 1, 2, 3, 4, 6, 7, 8, 9, 13]
    assert not offer(queue, 15, size=101)
    assert offer(queue, 16, size=100)


def test_a_dropped_put_on_its_way_still_takes_its_room(queue: PutQueue, gate: Gate) -> None:
    assert offer(queue, 0, size=100)
    assert gate.entered.wait(30)
    assert queue.drop(key_of(0))
    assert not offer(queue, 1)
    gate.opened.set()
    assert queue.flush(30)
    assert gate.stored == []
    assert offer(queue, 1, size=100)


def test_a_later_put_of_a_key_drops_the_earlier(queue: PutQueue, gate: Gate) -> None:
    for value in range(50):
        assert offer(queue, 1, value)
        assert offer(queue, 2, value)
        if value == 0:
            assert gate.entered.wait(30)
    assert queue.drop(key_of(2))
    assert not queue.drop(key_of(2))
    gate.opened.set()
    assert queue.flush(30)
    assert gate.stored == [(1, 49)]
    assert not queue.drop(key_of(1))


def test_flush_waits_for_what_was_before_it(queue: PutQueue, gate: Gate) -> None:
    assert queue.flush(0)
    assert offer(queue, 1)
    assert not queue.flush(0.02)
    gate.opened.set()
    assert queue.flush(30)


def test_a_store_that_fails_does_not_end_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    def store(put: QueuedPut, block: Block) -> None:
        if number_of(put.key) == 1:
            raise AssertionError("a bug")
        stored.append(number_of(put.key))

    stored: list[int] = []
    queue = PutQueue(store, 100, "test-queue")
    for number in range(3):
        assert offer(queue, number)
    assert queue.flush(30)
    assert stored == [0, 2]
    assert "a bug" in caplog.text
    assert queue.close(30)


def test_close_drops_what_is_left_after_its_time(gate: Gate) -> None:
    queue = PutQueue(gate.store, 100, "test-queue")
    for number in range(5):
        assert offer(queue, number)
    assert gate.entered.wait(30)
    assert not queue.close(0.02)
    assert not offer(queue, 9)
    gate.opened.set()
    assert queue.close(30)
    assert gate.stored == [(0, 0)]


# ------------------------------------------------------------------ as the disk tier uses it


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Files are written, but their writing does not come back before the gate is opened."""
    gate = Gate()
    write = ChunkFiles.write

    def slowly(*arguments: object) -> None:
        write(*arguments)
        gate.entered.set()
        assert gate.opened.wait(30)

    monkeypatch.setattr(ChunkFiles, "write", slowly)
    yield gate
    gate.opened.set()


def test_a_put_removed_while_it_is_written_is_never_found(
    open_tier: OpenTier, slow_disk: Gate, directory: Path
) -> None:
    tier = open_tier()
    assert tier.put(key_of(1), tensor_of(1, (100,)), blocking=False)
    assert slow_disk.entered.wait(30)
    assert not tier.contains(key_of(1))
    assert tier.remove(key_of(1))
    slow_disk.opened.set()
    assert tier.flush(30)
    assert tier.get(key_of(1)) is None
    assert files_in(directory) == []
    assert tier.used_bytes == 0


def test_a_put_that_blocks_overtakes_one_that_is_written(
    open_tier: OpenTier, slow_disk: Gate, directory: Path
) -> None:
    tier = open_tier()
    assert tier.put(key_of(1), tensor_of(1, (100,)), blocking=False)
    assert slow_disk.entered.wait(30)
    overtaking = threading.Thread(target=tier.put, args=(key_of(1), tensor_of(2, (50,))))
    overtaking.start()
    slow_disk.opened.set()
    overtaking.join(30)
    assert tier.flush(30)
    assert len(files_in(directory)) == 1
    # Which of the two came first is open here: the later call did not wait for the earlier.
    assert same(tier.get(key_of(1)), tensor_of(2, (50,)))


def test_a_disk_that_does_not_answer_keeps_its_directory(
    open_tier: OpenTier, slow_disk: Gate
) -> None:
    """Closed in a bounded time; nobody else may open it while a file is still to come."""
    tier = open_tier()
    assert tier.put(key_of(1), tensor_of(1, (100,)), blocking=False)
    assert slow_disk.entered.wait(30)
    tier.close(timeout_s=0.02)
    with pytest.raises(ConfigError, match="in use"):
        open_tier()
