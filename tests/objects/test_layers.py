# SPDX-License-Identifier: Apache-2.0
"""Several storages: write through, promote, share loads, never restore a removed chunk."""

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
from lmcache_redis.chunks.names import ChunkNames
from lmcache_redis.errors import ConfigError, FormatError, NotListed
from lmcache_redis.objects import ChunkBackend, in_memory, in_redis, on_disk
from lmcache_redis.objects import backend as backends
from lmcache_redis.resp import RedisOptions
from lmcache_redis.tiers import ReadOutcome
from tests.objects.conftest import OpenDisk
from tests.objects.redis_tiers import SLOT, plane_of, wait_until
from tests.objects.samples import Buffers, key_of, same, tensor_of
from tests.servers import RedisServer

ROOM = 128 << 20


class Stacked:
    """Memory over Redis, a backend of Redis alone, and threads that call the former."""

    def __init__(self, server: RedisServer, upper_bytes: int = ROOM) -> None:
        redis = in_redis(server.url, slot_bytes=SLOT)
        self.lower = ChunkBackend([redis])
        self.backend = ChunkBackend([in_memory(upper_bytes), redis])
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
        return plane_of(self.backend).stats().reads[ReadOutcome.LOADED]

    @property
    def in_memory(self) -> int:
        return self.backend._objects.cache.pool.idle


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
        stacked.lower.close()


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
    assert set(stacked.backend.stored_keys()) == {key_of(1), key_of(5)}


def test_a_get_fills_all_tiers_above(server: RedisServer, tmp_path: Path) -> None:
    redis = in_redis(server.url)
    remote = ChunkBackend([redis])
    backend = ChunkBackend([in_memory(ROOM), on_disk(tmp_path, ROOM), redis])
    disk = backend._objects.cache.tiers[0]
    chunk = tensor_of(1, (3, 4), "bfloat16")
    assert remote.put(key_of(1), chunk)
    found = backend.get(key_of(1))
    assert same(found, chunk)
    assert found is not None
    found.zero_()
    wait_until(lambda: disk.lookup(ChunkNames().chunk_key(key_of(1))))
    assert remote.remove(key_of(1))
    assert same(backend.get(key_of(1)), chunk), "from memory"
    assert backend.get(key_of(2)) is None
    backend.close()
    backend = ChunkBackend([on_disk(tmp_path, ROOM)])
    assert same(backend.get(key_of(1)), chunk)
    backend.close()
    remote.close()


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
    wait_until(lambda: stacked.in_memory == 1000)  # its thread has still to let go of it


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
        redis = in_redis(server.url, slot_bytes=SLOT, deadline_s=2.0)
        remote, backend = ChunkBackend([redis]), ChunkBackend([in_memory(ROOM), redis])
        chunks = {n: tensor_of(n, (10_000,)) for n in range(4)}
        assert backend.batched_put((key_of(n), chunks[n]) for n in (0, 1)) == 2
        server.kill()
        started = time.monotonic()
        assert backend.put(key_of(2), chunks[2])
        assert backend.put(key_of(3), chunks[3], blocking=False)
        assert all(same(backend.get(key_of(n)), chunks[n]) for n in chunks)
        assert backend.get(key_of(9)) is None
        assert backend.contains(key_of(2))
        with pytest.raises(NotListed):  # Redis may have others
            backend.stored_keys()
        assert backend.remove(key_of(1))
        assert backend.flush(5)
        assert time.monotonic() - started < 5
        server.start()
        wait_until(lambda: backend.put(key_of(2), chunks[2]) and remote.contains(key_of(2)))
        assert same(remote.get(key_of(2)), chunks[2])
        backend.close()
        remote.close()


def test_what_no_tier_takes_is_not_counted(tmp_path: Path) -> None:
    backend = ChunkBackend([in_memory(1000), on_disk(tmp_path, 8192)])
    sizes = [500, 50_000, 400, 50_000, 50_000]
    pairs = [(key_of(n), tensor_of(n, (size,))) for n, size in enumerate(sizes)]
    assert backend.batched_put(pairs) == 2
    backend.close()


# ------------------------------------------------------------------ one load


def test_concurrent_readers_share_one_load(
    stack: Callable[..., Stacked], own_server: RedisServer
) -> None:
    stacked, chunk = stack(), tensor_of(1, (1000,))
    assert stacked.lower.put(key_of(1), chunk)
    own_server.stop()
    for _ in range(8):
        stacked.begin_get(1)
    wait_until(lambda: len(stacked.backend._thread.calls) == 8)
    own_server.cont()
    stacked.join()
    assert len(stacked.found) == 8
    assert all(same(found, chunk) for found in stacked.found)
    assert len({found.data_ptr() for found in stacked.found if found is not None}) == 8
    assert stacked.loads == 1


def test_a_batch_is_loaded_ahead_and_may_be_abandoned(
    stack: Callable[..., Stacked], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "WINDOW_CHUNKS", 3)
    stacked = stack()
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
        wait_until(lambda: stacked.backend._thread.calls)
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
    backend = ChunkBackend([in_memory(20_000), in_redis(server.url, slot_bytes=SLOT)])
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


def test_which_storages_fit_together(directory: Path, open_disk: OpenDisk) -> None:
    memory, other_memory = in_memory(1), in_memory(1)
    redis = in_redis("redis://127.0.0.1:1")
    other = in_redis("redis://127.0.0.1:1", layout=bytes(32))
    prefixed = in_redis(RedisOptions("redis://127.0.0.1:1", key_prefix=b"a"))
    before = threading.active_count()
    for storages in (
        [],
        [redis, memory],
        [memory, other_memory],
        [redis, other],
        [redis, prefixed],
    ):
        with pytest.raises(ConfigError, match="storage"):
            ChunkBackend(storages)
    disk = open_disk()
    with pytest.raises(ConfigError, match="in use"):
        ChunkBackend([redis, on_disk(directory, 1 << 20)])
    disk.close()
    wait_until(lambda: threading.active_count() == before, "the end of what was opened before")
