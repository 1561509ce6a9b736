"""What holds for every test."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.servers import RedisServer

# The first text that hypothesis makes in a fresh checkout takes seconds: it builds its tables.
settings.register_profile("tests", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


def pytest_configure() -> None:
    """Servers are looked for beside the interpreter too, and SIGINT is what it always is.

    `scripts/setup` links a server there where the machine has none on its PATH; a PATH of the
    machine's own comes first. A shell starts what it runs in the background with SIGINT ignored,
    and so would be the processes that tests interrupt.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    beside = str(Path(sys.executable).parent)
    if beside not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), beside])


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    """A server with nothing in it, shared by tests that do not stop or configure it."""
    shared_server.command("FLUSHALL")
    return shared_server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that the test may stop, kill and configure."""
    with RedisServer(tmp_path) as server:
        yield server
