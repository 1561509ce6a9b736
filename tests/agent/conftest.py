# SPDX-License-Identifier: Apache-2.0
"""A Redis and an agent for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import AgentServer
from tests.servers import RedisServer


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


@pytest.fixture
def agent(tmp_path: Path, redis_server: RedisServer) -> Iterator[AgentServer]:
    with AgentServer(tmp_path / "agent", redis_server.unix_url) as server:
        yield server
