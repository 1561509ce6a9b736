# SPDX-License-Identifier: Apache-2.0
"""Tiers that are closed when a test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cache.disk.directory import Disk


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def open_tier(directory: Path) -> Iterator[Callable[..., Disk]]:
    """Opens the tier in `directory`, by default with a limit of 1 MiB."""
    opened: list[Disk] = []

    def open_it(*limit_bytes: int, **settings: Any) -> Disk:
        opened.append(Disk(directory, *limit_bytes, **settings))
        return opened[-1]

    yield open_it
    for disk in opened:
        disk.close()
