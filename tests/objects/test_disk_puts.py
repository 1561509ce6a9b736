# SPDX-License-Identifier: Apache-2.0
"""Non-blocking puts on disk: their limit, and which are dropped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_redis.cache.disk.files import ChunkFiles
from lmcache_redis.chunks.frame import ChunkFrame
from lmcache_redis.errors import ConfigError
from lmcache_redis.objects import ChunkBackend, backend, on_disk
from tests.cache.disk.directory import files_in
from tests.objects.conftest import OpenDisk
from tests.objects.redis_tiers import wait_until
from tests.objects.samples import get_raw, key_of, metadata_of


class Gate:
    """Blocks writes of files until the gate is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Event()
        self.written: list[tuple[int, int]] = []  # number and first byte of each chunk

    def write(
        self, files: ChunkFiles, key: bytes, sequence: int, frame: ChunkFrame, payload: memoryview
    ) -> None:
        _really_write(files, key, sequence, frame, payload)
        self.entered.set()
        assert self.opened.wait(30)
        number = int.from_bytes(frame.chunk_hash, "big")
        self.written.append((number, payload[0]))


_really_write = ChunkFiles.write


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(ChunkFiles, "write", lambda *call: gate.write(*call))
    yield gate
    gate.opened.set()


@pytest.fixture
def tier(gate: Gate, open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> ChunkBackend:
    """A backend with room for ten queued puts of ten bytes."""
    monkeypatch.setattr(backend, "QUEUE_BYTES", 100)
    return open_disk()


def put(tier: ChunkBackend, number: int, value: int = 0, size: int = 10) -> bool:
    payload = [memoryview(bytes([value]) * size)]
    return tier.put_bytes(key_of(number), metadata_of(size), payload, blocking=False)


def test_what_does_not_fit_is_refused(tier: ChunkBackend, gate: Gate) -> None:
    assert put(tier, 0)
    assert gate.entered.wait(30)  # one in flight counts
    for number in range(1, 10):
        assert put(tier, number)
    assert not put(tier, 10)
    assert not put(tier, 11, size=1)
    assert tier.remove(key_of(5))
    assert not put(tier, 12, size=11)
    wait_until(lambda: put(tier, 13), "the room of the put that was dropped")
    assert not put(tier, 14, size=1)
    gate.opened.set()
    assert tier.flush(30)
    assert [number for number, _ in gate.written] == [0, 1, 2, 3, 4, 6, 7, 8, 9, 13]
    assert put(tier, 15, size=101), "one alone always has room"


def test_a_put_dropped_in_flight_takes_no_room(tier: ChunkBackend, gate: Gate) -> None:
    assert put(tier, 0, size=100)
    assert gate.entered.wait(30)
    assert tier.remove(key_of(0))
    wait_until(lambda: put(tier, 1))
    gate.opened.set()
    assert tier.flush(30)
    assert tier.stored_keys() == [key_of(1)]


def test_a_later_put_of_a_key_drops_the_earlier(gate: Gate, open_disk: OpenDisk) -> None:
    tier = open_disk()
    for value in range(50):
        assert put(tier, 1, value)
        assert put(tier, 2, value)
        if value == 0:
            assert gate.entered.wait(30)
    assert tier.remove(key_of(2))
    assert not tier.remove(key_of(2))
    gate.opened.set()
    assert tier.flush(30)
    assert gate.written == [(1, 0), (1, 49)]
    assert get_raw(tier, key_of(1)) == bytes([49]) * 10
    assert tier.stored_keys() == [key_of(1)]


def test_flush_waits_for_what_was_before_it(tier: ChunkBackend, gate: Gate) -> None:
    assert tier.flush(0)
    assert put(tier, 1)
    assert put(tier, 2)
    assert gate.entered.wait(30)
    assert tier.remove(key_of(2)), "ends before the other"
    assert not tier.flush(0.02)
    gate.opened.set()
    assert tier.flush(30)


def test_close_drops_what_is_left_after_its_time(
    gate: Gate, open_disk: OpenDisk, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the put in flight has ended, no other tier may open the directory."""
    monkeypatch.setattr(backend, "CLOSE_S", 0.02)
    tier = open_disk()
    for number in range(5):
        assert put(tier, number)
    assert gate.entered.wait(30)
    tier.close()
    with pytest.raises(ConfigError, match="in use"):
        ChunkBackend([on_disk(directory, 1 << 20)])
    with pytest.raises(RuntimeError):
        put(tier, 9)
    gate.opened.set()
    assert len(files_in(directory)) <= 1


def test_no_put_in_flight_keeps_a_backend(gate: Gate, directory: Path) -> None:
    tier = ChunkBackend([on_disk(directory, 1 << 20)])
    assert put(tier, 0)
    assert gate.entered.wait(30)
    thread, opening = tier._thread._thread, threading.Timer(0.05, gate.opened.set)
    opening.start()
    del tier  # closes it, on this thread
    assert not thread.is_alive()
    opening.join()
    assert gate.written == [(0, 0)]
