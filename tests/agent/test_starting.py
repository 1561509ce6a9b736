# SPDX-License-Identifier: Apache-2.0
"""What this machine refuses an agent at its start is one sentence, and leaves nothing behind."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from lmcache_redis.agent import main
from lmcache_redis.agent.main import run_agent
from lmcache_redis.config import AgentConfig
from lmcache_redis.errors import StartError
from tests import forks

pytestmark = pytest.mark.servers

TIMEOUT_S = 60.0  # of what hung for ever
SMALL = ("--redis-url", "unix:///nowhere", "--pool-bytes", "64MiB")


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield f"127.0.0.1:{held.getsockname()[1]}"


def words(directory: Path, *more: str) -> list[str]:
    directory.chmod(0o700)
    return ["agent", "--endpoint", f"ipc://{directory}/agent.sock", *SMALL, *more]


def last_line(done: subprocess.CompletedProcess[str], directory: Path) -> str:
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert not [*directory.iterdir()]
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("metrics", "says"),
    [("", "choose another port"), ("192.0.2.1:9464", "choose an address of this machine")],
)
def test_metrics_that_cannot_be_bound(tmp_path: Path, taken: str, metrics: str, says: str) -> None:
    given = words(tmp_path, "--metrics", metrics or taken)
    line = last_line(forks.run(given, os.environ, TIMEOUT_S), tmp_path)
    assert line.startswith("lmcache-redis: --metrics")
    assert line.endswith(says)


def test_a_pool_larger_than_any_address_space(tmp_path: Path) -> None:
    given = words(tmp_path, "--pool-bytes", "900TiB")
    line = last_line(forks.run(given, os.environ, TIMEOUT_S), tmp_path)
    assert line.endswith("set another --pool-bytes")


@pytest.mark.parametrize("descriptors", [8, 12])
def test_too_few_descriptors(tmp_path: Path, descriptors: int) -> None:
    """Whatever it opens last."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    done = subprocess.run(
        [sys.executable, "-m", "lmcache_redis", *words(tmp_path)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        preexec_fn=limit,
    )
    assert "LimitNOFILE" in last_line(done, tmp_path)


@pytest.mark.parametrize("refused", [OSError(24, "no file"), MemoryError(), zmq.ZMQError(24)])
@pytest.mark.parametrize(
    "step", ["bind_router", "_arena", "RedisPlane", "Service", "_exporter", "_log_ready"]
)
def test_whatever_step_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, refused: Exception
) -> None:
    """In this process, where what is left would be seen."""

    def refuse(*_: object) -> None:
        raise refused

    tmp_path.chmod(0o700)
    monkeypatch.setattr(main, step, refuse)
    monkeypatch.setattr(main, "raise_descriptor_limit", lambda: None)
    monkeypatch.setattr(main, "_on_signals", lambda *_: None)
    config = AgentConfig(
        endpoint=f"ipc://{tmp_path}/agent.sock",
        redis_url="unix:///nowhere",
        pool_bytes=64 << 20,
        metrics="127.0.0.1:0",
    )
    ended: list[Exception] = []

    def start() -> None:
        try:
            run_agent(config)
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    (error,) = ended
    assert isinstance(error, StartError)
    assert "the agent cannot start" in str(error)
    assert not [*tmp_path.iterdir()]
