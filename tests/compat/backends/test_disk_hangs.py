"""A disk that hangs does not hold up the tiers above and below it (`tests/cache/disk`)."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lmcache_redis.compat.backends import (
    LMCHybridBackend,
    LMCLocalBackend,
    LMCLocalDiskBackend,
    LMCRemoteBackend,
)
from lmcache_redis.errors import ConfigError
from tests.compat.backends.contract import key_of, same, tensor_of
from tests.compat.backends.disk_helpers import OpenTier, fill
from tests.compat.backends.redis_tiers import wait_until
from tests.servers import RedisServer


class HungGet:
    """A get of chunk 1, whose file is a FIFO: opening it blocks until `end`."""

    def __init__(self, tier: LMCLocalDiskBackend, directory: Path) -> None:
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


@pytest.fixture
def tier(open_tier: OpenTier) -> LMCLocalDiskBackend:
    tier = open_tier(patience_s=0.2)
    fill(tier, [1])
    return tier


@pytest.fixture
def hung(tier: LMCLocalDiskBackend, directory: Path) -> Iterator[HungGet]:
    hung = HungGet(tier, directory)
    wait_until(lambda: not tier.contains(key_of(1)), "a disk that is given up")
    yield hung
    hung.end()


def test_tiers_above_and_below_go_on(
    tier: LMCLocalDiskBackend, hung: HungGet, server: RedisServer
) -> None:
    lower = LMCRemoteBackend(server.url)
    backend = LMCHybridBackend((LMCLocalBackend(1 << 20), tier, lower))
    assert lower.put(key_of(5), tensor_of(5, (100,)))
    assert same(backend.get(key_of(5)), tensor_of(5, (100,)))
    assert backend.put(key_of(6), tensor_of(6, (100,)))
    assert same(lower.get(key_of(6)), tensor_of(6, (100,)))
    assert backend.remove(key_of(6))
    assert backend.get(key_of(6)) is None
    hung.end()
    backend.close()


def test_patience_that_makes_no_sense(directory: Path) -> None:
    with pytest.raises(ConfigError, match="patience_s"):
        LMCLocalDiskBackend(directory, 1 << 20, patience_s=0)
