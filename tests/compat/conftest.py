# SPDX-License-Identifier: Apache-2.0
"""An agent over a server of Redis that other tests use as well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import AgentServer
from tests.servers import RedisServer


@pytest.fixture
def agent(tmp_path: Path, server: RedisServer) -> Iterator[AgentServer]:
    with AgentServer(tmp_path / "agent", server.unix_url) as agent:
        yield agent
