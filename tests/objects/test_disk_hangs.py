# SPDX-License-Identifier: Apache-2.0
"""A disk that hangs does not hold up the tiers above and below it (`tests/cache/disk`)."""

from __future__ import annotations

import contextlib
import os
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from lmcache_redis.cache.disk.tier import DiskTier
from lmcache_redis.objects import ChunkBackend, in_memory, in_redis, on_disk, storage
from tests.objects.redis_tiers import wait_until
from tests.objects.samples import fill, key_of, same, tensor_of
from tests.servers import RedisServer


class HungGet:
    """A get of chunk 1, whose file is a FIFO: opening it blocks until `end`."""

    def __init__(self, tier: ChunkBackend, directory: Path) -> None:
        (self._path,) = directory.rglob("*.lmcr")
        self._path.unlink()
        os.mkfifo(self._path)
        self.found: list[torch.Tensor | None] = []
        self._thread = threading.Thread(target=lambda: self.found.append(tier.get(key_of(1))))
        self._thread.start()

    def end(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # the tier is back, and removed it
            os.close(os.open(self._path, os.O_RDWR))
        self._thread.join(10)
        assert not self._thread.is_alive()


def test_layers_above_and_below_go_on(
    directory: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "DiskTier", partial(DiskTier, read_patience_s=0.2))
    redis = in_redis(server.url)
    lower = ChunkBackend([redis])
    disk = on_disk(directory, 1 << 20)
    with contextlib.closing(ChunkBackend([in_memory(10), disk, redis])) as backend:
        fill(backend, [1])
        assert lower.remove(key_of(1))
        hung = HungGet(backend, directory)
        wait_until(lambda: not backend.contains(key_of(1)), "a disk that is given up")
        assert lower.put(key_of(5), tensor_of(5, (100,)))
        assert same(backend.get(key_of(5)), tensor_of(5, (100,)))
        assert backend.put(key_of(6), tensor_of(6, (100,)))
        assert same(lower.get(key_of(6)), tensor_of(6, (100,)))
        assert backend.remove(key_of(6))
        assert backend.get(key_of(6)) is None
        hung.end()
    lower.close()
