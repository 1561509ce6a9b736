# SPDX-License-Identifier: Apache-2.0
"""Backends on disk that are closed when a test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.objects import ChunkBackend, on_disk

OpenDisk = Callable[..., ChunkBackend]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def open_disk(directory: Path) -> Iterator[OpenDisk]:
    """Opens a backend in `directory`, by default with a limit of 1 MiB."""
    opened: list[ChunkBackend] = []

    def open_it(limit_bytes: int = 1 << 20, **options: Any) -> ChunkBackend:
        opened.append(ChunkBackend([on_disk(directory, limit_bytes, **options)]))
        return opened[-1]

    yield open_it
    for backend in opened:
        backend.close()
