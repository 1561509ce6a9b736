"""Tiers that are closed when a test ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_redis.compat.backends import LMCLocalDiskBackend
from tests.compat.backends.disk_helpers import OpenTier


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def open_tier(directory: Path) -> Iterator[OpenTier]:
    """Opens the disk backend in `directory`, by default with a limit of 1 MiB."""
    opened: list[LMCLocalDiskBackend] = []

    def open_it(limit_bytes: int = 1 << 20, **options: object) -> LMCLocalDiskBackend:
        opened.append(LMCLocalDiskBackend(directory, limit_bytes, **options))
        return opened[-1]

    yield open_it
    for tier in opened:
        tier.close()
