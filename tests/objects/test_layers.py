# SPDX-License-Identifier: Apache-2.0
"""Several storages: write through, promote, share loads, never restore a removed chunk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_redis.chunks.names import ChunkNames
from lmcache_redis.errors import ConfigError, NotListed
from lmcache_redis.objects import ChunkBackend, in_memory, in_redis, on_disk
from lmcache_redis.resp import RedisOptions
from lmcache_redis.tiers import ReadOutcome
from tests.objects.conftest import OpenDisk
from tests.objects.redis_tiers import SLOT, plane_of, wait_until
from tests.objects.samples import key_of, same, tensor_of
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


# ------------------------------------------------------------------ no resurrection


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
    wait_until(lambda: threading.active_count() <= before, "the end of what was opened before")
