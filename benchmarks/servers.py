# SPDX-License-Identifier: Apache-2.0
"""Processes that a benchmark starts and ends, on free loopback ports."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from lmcache_redis.agent.embedded import find_server_binary
from lmcache_redis.errors import LMCacheRedisError
from lmcache_redis.processes import end_process

_WAIT_S = 60.0
_STOP_S = 15.0


class ServerFailed(LMCacheRedisError):
    """A server did not start, or failed."""


def wait_for(condition: Callable[[], object], what: str, poll_s: float = 0.01) -> None:
    """Polls a condition. Raises LMCacheRedisError after a minute."""
    deadline_s = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise LMCacheRedisError(f"the benchmark waited {_WAIT_S:.0f} s for {what}")
        time.sleep(poll_s)


def free_port() -> int:
    """A TCP port that nothing listened on a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    """Whether something accepts connections on a loopback port."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


class RedisProcess:
    """A redis-server without persistence. A context manager: started on entry, killed on exit.

    After a kill and a new start it is empty and has the same address. Raises ConfigError if no
    redis-server is installed.
    """

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self._words = [find_server_binary(), "--port", str(self.port), "--bind", "127.0.0.1"]
        self._words += ["--save", "", "--appendonly", "no", "--dir", str(directory)]
        self._words += ["--maxmemory-policy", "allkeys-lru"]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """Starts the server; returns when it accepts connections."""
        self._process = subprocess.Popen(self._words, stdout=subprocess.DEVNULL)
        wait_for(self._ended_or_listens, "redis-server", 0.002)
        if self._process.poll() is not None:
            raise LMCacheRedisError("the redis-server did not start")

    def send(self, number: signal.Signals) -> None:
        """Sends a signal. After SIGKILL it waits for the process to end."""
        self._process.send_signal(number)
        if number is signal.SIGKILL:
            self._process.wait()

    def _ended_or_listens(self) -> bool:
        return self._process.poll() is not None or listens(self.port)

    def __enter__(self) -> RedisProcess:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.send(signal.SIGKILL)


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """The URL of a redis-server that runs during the block."""
    with tempfile.TemporaryDirectory() as directory, RedisProcess(Path(directory)) as server:
        yield server.url


@contextlib.contextmanager
def running_module(
    name: str, words: Sequence[str], port: int, log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m WORDS...` during the block, which begins when it listens on a loopback port.

    Raises ServerFailed with the end of the log if it does not start.
    """
    command = [sys.executable, "-m", *words]
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=os.environ | environment
        )
    try:
        wait_for(lambda: process.poll() is not None or listens(port), f"{name} to start", 0.05)
        if process.poll() is not None:
            tail = log.read_text(errors="replace").splitlines()[-10:]
            raise ServerFailed("\n".join([f"{name} did not start; the end of {log}:", *tail]))
        yield process
    finally:
        end_process(process, _STOP_S)


def cpu_s(pid: int) -> float:
    """CPU seconds that a process and the processes below it have used since their start."""
    below: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            below.setdefault(int(fields[1]), []).append(int(path.parent.name))
            ticks[int(path.parent.name)] = int(fields[11]) + int(fields[12])
    total, left = 0, [pid]
    while left:
        each = left.pop()
        total += ticks.get(each, 0)
        left += below.get(each, [])
    return total / os.sysconf("SC_CLK_TCK")
