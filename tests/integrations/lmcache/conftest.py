# SPDX-License-Identifier: Apache-2.0
"""LMCache from its wheel; without it these tests are skipped, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fetch import find_package
from benchmarks.lmcache_l2 import import_lmcache


@pytest.fixture(scope="session")
def wheel() -> Path:
    package = find_package()
    if package is None:
        pytest.skip("needs LMCache's wheel, which scripts/setup fetches")
    return package


@pytest.fixture(scope="session")
def lmcache(wheel: Path) -> None:
    """In the test's own process."""
    import_lmcache()
