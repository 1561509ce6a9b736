# SPDX-License-Identifier: Apache-2.0
"""A Redis, an agent and an engine for each test, and a way to start more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.agent.starts import Starts
from tests.harness import AgentServer, Engine
from tests.servers import RedisServer

if TYPE_CHECKING:
    from tests.agent.joining import Joining
    from tests.agent.on_gpus import Node


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


@pytest.fixture
def agent(tmp_path: Path, redis_server: RedisServer) -> Iterator[AgentServer]:
    with AgentServer(tmp_path / "agent", redis_server.unix_url) as server:
        yield server


@pytest.fixture
def engine(agent: AgentServer) -> Iterator[Engine]:
    with Engine(agent.endpoint) as engine:
        yield engine


@pytest.fixture
def start(tmp_path: Path, redis_server: RedisServer) -> Iterator[Starts]:
    with ExitStack() as stack:
        yield Starts(stack, tmp_path, redis_server.unix_url)


@pytest.fixture
def node(tmp_path: Path, redis_server: RedisServer) -> Iterator[Node]:
    from tests.agent import on_gpus  # which imports torch

    with on_gpus.new_node(tmp_path, redis_server.unix_url) as node:
        yield node


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Joining]]:
    """Makes an agent's handlers, and an engine whose memory they map when the test says so."""
    from lmcache_redis.agent import registering
    from tests.agent.joining import Joining

    with ExitStack() as stack:

        def make(**options: Any) -> Joining:
            made = Joining(**options)
            stack.callback(made.close)
            monkeypatch.setattr(registering, "open_device", made.open_device)
            return made

        yield make


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """Of an agent that seals."""
    path = tmp_path / "seal.keys"
    path.write_text("11" * 32 + "\n")
    path.chmod(0o600)
    return path
