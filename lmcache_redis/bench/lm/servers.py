"""Both servers, each in a process of its own on a free loopback port."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmcache_redis.bench.plane.fetch import find_package
from lmcache_redis.errors import LMCacheRedisError

OURS, LMCACHE = "ours", "lmcache"
_START_S = 60.0
_STOP_S = 15.0


class ServerFailed(LMCacheRedisError):
    """A server did not come up."""


class LmServer:
    """A server that runs. port: of `lm://127.0.0.1`."""

    def __init__(self, name: str, port: int, pid: int) -> None:
        self.name = name
        self.port = port
        self._pid = pid

    def peak_rss_mib(self) -> float:
        """The most memory that it has had, shared pages included (VmHWM)."""
        for line in Path(f"/proc/{self._pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
        raise ServerFailed(f"{self.name} has ended")


@contextlib.contextmanager
def our_gateway(redis_url: str, memory_bytes: int, log: Path) -> Iterator[LmServer]:
    """`lmcache-redis gateway` with memory before a Redis."""
    port = _free_port()
    words = [sys.executable, "-m", "lmcache_redis.cli", "gateway", "--redis-url", redis_url]
    words += ["--listen", f"lm://127.0.0.1:{port}", "--memory-bytes", str(memory_bytes)]
    with _running(OURS, words, port, log, {}) as server:
        yield server


@contextlib.contextmanager
def lmcache_server(log: Path) -> Iterator[LmServer]:
    """LMCache's own server, which keeps chunks in its memory, from the wheel that was fetched."""
    package = find_package()
    if package is None:
        raise ServerFailed("LMCache is not here: `python -m lmcache_redis.bench.plane.fetch`")
    port = _free_port()
    words = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port), "cpu"]
    with _running(LMCACHE, words, port, log, {"PYTHONPATH": str(package)}) as server:
        yield server


@contextlib.contextmanager
def _running(
    name: str, words: Sequence[str], port: int, log: Path, environment: dict[str, str]
) -> Iterator[LmServer]:
    with log.open("ab") as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            env=os.environ | environment,
        )  # fmt: skip
    try:
        _wait_for(process, name, port, log)
        yield LmServer(name, port, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(process: subprocess.Popen[bytes], name: str, port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace").splitlines()[-10:]
            raise ServerFailed("\n".join([f"{name} did not start; the end of {log}:", *tail]))
        time.sleep(0.05)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
