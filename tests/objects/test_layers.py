# SPDX-License-Identifier: Apache-2.0
"""Several storages: write through, promote, and go on without one of them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_redis.chunks.names import ChunkNames
from lmcache_redis.errors import ConfigError, NotListed
from lmcache_redis.objects import ChunkBackend, in_memory, in_redis, on_disk
from lmcache_redis.resp import RedisOptions
from tests.objects.conftest import OpenDisk
from tests.objects.redis_tiers import SLOT, wait_until
from tests.objects.samples import key_of, same, tensor_of
from tests.servers import RedisServer

ROOM = 128 << 20


@contextlib.contextmanager
def stacked(
    server: RedisServer, upper_bytes: int = ROOM, deadline_s: float = 5.0
) -> Iterator[tuple[ChunkBackend, ChunkBackend]]:
    """Memory over Redis, and a backend of Redis alone."""
    redis = in_redis(server.url, slot_bytes=SLOT, deadline_s=deadline_s)
    upper, lower = ChunkBackend([in_memory(upper_bytes), redis]), ChunkBackend([redis])
    with contextlib.closing(upper), contextlib.closing(lower):
        yield upper, lower


def test_a_get_fills_all_tiers_above(server: RedisServer, tmp_path: Path) -> None:
    redis = in_redis(server.url)
    chunk = tensor_of(1, (3, 4), "bfloat16")
    with contextlib.closing(ChunkBackend([redis])) as remote:
        backend = ChunkBackend([in_memory(ROOM), on_disk(tmp_path, ROOM), redis])
        disk = backend._objects.cache.tiers[0]
        assert remote.put(key_of(1), chunk)
        assert same(backend.get(key_of(1)), chunk)
        wait_until(lambda: disk.lookup(ChunkNames().chunk_key(key_of(1))))
        assert remote.remove(key_of(1))
        assert same(backend.get(key_of(1)), chunk), "from memory"
        assert remote.put(key_of(2), chunk)
        assert set(backend.stored_keys()) == {key_of(1), key_of(2)}
        assert backend.remove(key_of(2))
        assert remote.get(key_of(2)) is None
        backend.close()
    with contextlib.closing(ChunkBackend([on_disk(tmp_path, ROOM)])) as backend:
        assert same(backend.get(key_of(1)), chunk)


def test_a_chunk_too_large_for_the_first_tier(server: RedisServer) -> None:
    with stacked(server, upper_bytes=1000) as (backend, _):
        big, small = tensor_of(1, (5000,)), tensor_of(2, (500,))
        assert backend.put(key_of(1), small)
        assert backend.put(key_of(1), big)
        assert same(backend.get(key_of(1)), big)
        assert backend._objects.cache.pool.idle == 0


def test_what_no_tier_takes_is_not_counted(tmp_path: Path) -> None:
    sizes = [500, 50_000, 400, 50_000, 50_000]
    pairs = [(key_of(n), tensor_of(n, (size,))) for n, size in enumerate(sizes)]
    with contextlib.closing(ChunkBackend([in_memory(1000), on_disk(tmp_path, 8192)])) as backend:
        assert backend.batched_put(pairs) == 2


def test_a_redis_that_dies_does_not_fail_the_memory(own_server: RedisServer) -> None:
    with stacked(own_server, deadline_s=2.0) as (backend, remote):
        chunks = {n: tensor_of(n, (10_000,)) for n in range(4)}
        assert backend.batched_put((key_of(n), chunks[n]) for n in (0, 1)) == 2
        own_server.kill()
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
        own_server.start()
        wait_until(lambda: backend.put(key_of(2), chunks[2]) and remote.contains(key_of(2)))
        assert same(remote.get(key_of(2)), chunks[2])


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
