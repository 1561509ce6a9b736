# SPDX-License-Identifier: Apache-2.0
"""The disk tier's limit, its order of use, restarts, and what is forced to the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.cache.disk.files import ChunkFiles
from lmcache_redis.cache.disk.format import disk_bytes
from tests.cache.disk.directory import (
    FILE_BYTES,
    Disk,
    disk_use,
    files_in,
    fill,
    held,
    key_of,
    payload_of,
)


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


def test_the_order_is_found_after_a_restart(
    open_tier: Callable[..., Disk],
) -> None:
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
