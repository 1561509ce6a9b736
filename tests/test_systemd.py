# SPDX-License-Identifier: Apache-2.0
"""What a service manager is told, on its own kind of socket, and the unit that it would start."""

from __future__ import annotations

import configparser
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmcache_redis.config import AgentConfig
from lmcache_redis.sources import config_from
from lmcache_redis.systemd import ServiceManager
from tests.harness import StartedAgent
from tests.servers import RedisServer

WAIT_S = 60.0
UNITS = Path(__file__).parent.parent / "deploy" / "systemd"


@contextmanager
def manager(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as received:
        received.bind(address.replace("@", "\0", 1))
        received.settimeout(WAIT_S)
        yield received


def lines(received: socket.socket) -> dict[str, str]:
    return dict(line.split("=", 1) for line in received.recv(4096).decode().split("\n"))


def other_than(name: str, received: socket.socket) -> dict[str, str]:
    while name in (found := lines(received)):
        pass
    return found


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_one_datagram_each(tmp_path: Path, kind: str) -> None:
    address = str(tmp_path / "notify") if kind == "path" else f"@lmcache-redis-{os.getpid()}"
    with manager(address) as received:
        told = ServiceManager({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "3000000"})
        assert told.watchdog_s == 3.0
        told.ready("serving")
        assert received.recv(4096) == b"READY=1\nSTATUS=serving"
        before = time.monotonic_ns() // 1000
        told.reloading()
        found = lines(received)
        assert found.pop("RELOADING") == "1"
        assert before <= int(found.pop("MONOTONIC_USEC")) <= time.monotonic_ns() // 1000
        told.stopping(2.5)
        assert lines(received) == {"STOPPING": "1", "EXTEND_TIMEOUT_USEC": "2500000"}
        told.alive()
        assert received.recv(4096) == b"WATCHDOG=1"


@pytest.mark.parametrize(
    "environment",
    [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1"}, {"NOTIFY_SOCKET": "/no/such"}],
)
def test_without_a_manager_nothing_fails(environment: Mapping[str, str]) -> None:
    told = ServiceManager(environment)
    told.ready("serving")
    told.stopping(1.0)
    assert told.watchdog_s is None


def test_the_watchdog_of_another_process_is_not_fed() -> None:
    mine = {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getpid())}
    assert ServiceManager(mine).watchdog_s == 1.0
    assert ServiceManager(mine | {"WATCHDOG_PID": "1"}).watchdog_s is None
    for usec in ("0", "", "-1", "soon"):
        assert ServiceManager({"WATCHDOG_USEC": usec}).watchdog_s is None


@pytest.mark.servers
def test_an_agent_tells_its_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "agent.conf"
    settings.write_text("log-level = info\n")
    monkeypatch.setenv("NOTIFY_SOCKET", f"{tmp_path}/notify")
    monkeypatch.setenv("WATCHDOG_USEC", "600000")
    with RedisServer(tmp_path) as server, manager(f"{tmp_path}/notify") as received:
        agent = StartedAgent(tmp_path / "agent", server.unix_url, config=settings)
        try:
            agent.spawn()
            found = lines(received)
            assert found == {"READY": "1", "STATUS": f"serving {agent.endpoint}"}
            assert agent.status()["redis"]["up"], "ready, so it serves"
            for _ in range(3):
                assert lines(received) == {"WATCHDOG": "1"}
            settings.write_text("log-level = debug\n")
            agent.process.send_signal(signal.SIGHUP)
            assert set(other_than("WATCHDOG", received)) == {"RELOADING", "MONOTONIC_USEC"}
            assert other_than("WATCHDOG", received)["READY"] == "1"
            assert "reloaded --log-level: debug" in agent.log
            # A loop that does not turn feeds no watchdog.
            agent.stop()
            received.settimeout(1.0)
            while select.select([received], [], [], 0)[0]:
                received.recv(4096)  # what was under way
            with pytest.raises(TimeoutError):
                received.recv(4096)
            agent.cont()
            received.settimeout(WAIT_S)
            agent.process.terminate()
            found = other_than("WATCHDOG", received)
            assert found["STOPPING"] == "1"
            assert int(found["EXTEND_TIMEOUT_USEC"]) > 5_000_000
            assert agent.process.wait(WAIT_S) == 0
        finally:
            agent.end()


# ---------------------------------------------------------------------- unit


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string((UNITS / "lmcache-redis-agent.service").read_text())
    return parser


def test_the_unit_starts_the_agent_with_its_file() -> None:
    service = unit()["Service"]
    words = service["ExecStart"].split()
    assert words[1:3] == ["agent", "--config"]
    path = words[3]
    assert path.startswith(f"/etc/{service['ConfigurationDirectory']}/")
    config: AgentConfig = config_from(AgentConfig, {"config": str(UNITS / "agent.conf")})
    assert config.endpoint == f"ipc:///run/{service['RuntimeDirectory']}/agent.sock"
    assert service["RuntimeDirectoryMode"] == "0700"
    assert config.metrics == "127.0.0.1:9464"
    # An embedded server is where `status` says, not in a /tmp that only the unit sees.
    assert service["PrivateTmp"] == "yes"
    assert service["Environment"] == "TMPDIR=%t/lmcache-redis"


def test_the_settings_that_the_file_shows_are_right(tmp_path: Path) -> None:
    """Each line that is commented out, without its #."""
    text = re.sub(r"^#(?=[a-z])", "", (UNITS / "agent.conf").read_text(), flags=re.M)
    (tmp_path / "agent.conf").write_text(text)
    config: AgentConfig = config_from(AgentConfig, {"config": str(tmp_path / "agent.conf")})
    assert config.disk_path == f"/var/cache/{unit()['Service']['CacheDirectory']}"
    assert config.redis_url is not None


@pytest.mark.servers
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    # With a program that is there, and a user that is known.
    text = (UNITS / "lmcache-redis-agent.service").read_text()
    program = unit()["Service"]["ExecStart"].split()[0]
    copy = tmp_path / "lmcache-redis-agent.service"
    copy.write_text(text.replace(program, "/bin/true").replace("User=lmcache", "User=root"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", copy],
        capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if "lmcache-redis-agent" in line]
    assert (done.returncode, said) == (0, [])
