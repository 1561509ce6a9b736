# SPDX-License-Identifier: Apache-2.0
"""What tests of GPUs share. Examples may take their time: no test here is about speed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from lmcache_redis.device import driver
from tests import cuda_driver
from tests.device.gpu_calls import Host, View, viewed
from tests.device.gpu_exporter import PIECE_BYTES, GpuExporter

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(scope="module")
def engine() -> Iterator[GpuExporter]:
    with GpuExporter(PIECE_BYTES, None, cuda_driver.environment()) as started:
        yield started


@pytest.fixture
def memory(engine: GpuExporter) -> Iterator[tuple[View, Host]]:
    with viewed(engine) as both:
        yield both


@pytest.fixture
def batch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the driver has a call for many copies."""
    if not request.param:
        monkeypatch.setattr(driver, "has", lambda name: name != "cuMemcpyBatchAsync")
    return bool(request.param)
