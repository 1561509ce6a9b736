# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.dashboard import find
from tests.servers import RedisServer


@pytest.fixture(autouse=True)
def _prometheus_is_installed(request: pytest.FixtureRequest) -> None:
    needed = request.node.get_closest_marker("servers")
    if needed and (find("prometheus") is None or find("promtool") is None):
        pytest.skip("prometheus is not installed")


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server
