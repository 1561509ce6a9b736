# SPDX-License-Identifier: Apache-2.0
"""The driver of the tests in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmcache_redis.device import driver
from tests import cuda_driver


@pytest.fixture(autouse=True)
def _own_driver() -> Iterator[None]:
    """The library, which no test has called before."""
    if why := cuda_driver.missing():
        pytest.skip(why)
    cuda_driver.reset()
    yield
    cuda_driver.reset()


@pytest.fixture
def context() -> int:
    """The current one of this thread, of the only GPU."""
    made = driver.retain_context(0)
    driver.set_context(made)
    return made


@pytest.fixture
def stream(context: int) -> int:
    return driver.create_stream()
