# SPDX-License-Identifier: Apache-2.0
"""The gateway beside LMCache's own server for its `lm://` protocol, with the same client.

    put         PUTs of all chunks, and an EXIST that is answered when all are received
    get         the same chunks, which both servers have in memory
    get, many   many clients at once, each with GETs of its own: throughput, median and p99

The servers take turns; the first one changes with the round. Ours also writes every chunk to Redis;
all but the last are there when the EXIST is answered.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.fetch import HOW_TO_FETCH, find_server
from benchmarks.lm_client import LOAD_NAME, LmClient, key_text
from benchmarks.report import percentile, rotated
from benchmarks.servers import ServerFailed, free_port, own_server, running_module
from lmcache_redis.errors import LMCacheRedisError

OURS, BEFORE, LMCACHE = "ours", "before", "lmcache"
PUT, GET, MANY = "put", "get", "get, many"
MIB = 1 << 20
_MEMORY_BYTES = 1 << 30
_LOAD_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is moved: by one client, and by many clients, each with its own GETs.

    before: another checkout of this project, whose gateway takes part.
    """

    rounds: int = 5
    before: Path | None = None
    clients: int = 64
    large_bytes: int = 32 * MIB
    large_chunks: int = 8
    many_bytes: int = 2 * MIB
    many_chunks: int = 64
    many_gets: int = 16


@dataclass(frozen=True, slots=True)
class LmServer:
    """A running server. port: of `lm://127.0.0.1`."""

    name: str
    port: int
    pid: int

    def peak_rss_mib(self) -> float:
        """Its peak resident memory (VmHWM), shared pages included."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
        raise ServerFailed(f"{self.name} has ended")


def run(plan: Plan, say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Rows by server and operation: GB/s, median and p99 in ms, the server's peak memory."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis_url = stack.enter_context(own_server())
        servers = [stack.enter_context(_gateway(OURS, ROOT, redis_url, directory))]
        if plan.before is not None:
            servers.append(
                stack.enter_context(_gateway(BEFORE, plan.before.resolve(), redis_url, directory))
            )
        try:
            servers.append(stack.enter_context(_lmcache_server(directory / "lmcache.log")))
        except LMCacheRedisError as error:
            say(f"lmcache: left out: {error}")
        speeds: dict[tuple[str, str], list[float]] = {}
        gets_ms: dict[str, list[float]] = {}
        for server in servers:
            _fill_for_many(server, plan)
        for number in range(plan.rounds):
            say(f"round {number + 1} of {plan.rounds}")
            for server in rotated(servers, number):
                measured = _one_client(server, plan)
                measured[MANY], ms = _many_clients(server, plan)
                for op, gb_per_s in measured.items():
                    speeds.setdefault((server.name, op), []).append(gb_per_s)
                gets_ms.setdefault(server.name, []).extend(ms)
        return [
            _row(plan, server, op, speeds, gets_ms) for op in (PUT, GET, MANY) for server in servers
        ]


def _row(
    plan: Plan,
    server: LmServer,
    op: str,
    speeds: dict[tuple[str, str], list[float]],
    gets_ms: dict[str, list[float]],
) -> dict[str, Any]:
    many = op == MANY
    ms = gets_ms[server.name]
    speed = statistics.median(speeds[server.name, op])
    return {
        "server": server.name,
        "op": op,
        "value_mib": (plan.many_bytes if many else plan.large_bytes) / MIB,
        "clients": plan.clients if many else 1,
        "gb_per_s": speed,
        "ours_times": statistics.median(speeds[OURS, op]) / speed,
        "median_ms": statistics.median(ms) if many else None,
        "p99_ms": percentile(ms, 99) if many else None,
        "peak_rss_mib": server.peak_rss_mib(),
        "rounds": len(speeds[server.name, op]),
    }


# -------------------------------------------------------------------- measuring


def _one_client(server: LmServer, plan: Plan) -> dict[str, float]:
    """GB/s by operation."""
    payload = memoryview(bytearray(plan.large_bytes))
    keys = [key_text("one", number) for number in range(plan.large_chunks)]
    moved = plan.large_bytes * plan.large_chunks / 1e9
    with LmClient(server.port) as client:
        started_s = time.perf_counter()
        for number, key in enumerate(keys):
            payload[:8] = number.to_bytes(8, "little")
            client.put(key, payload)
        if not client.exists(keys[-1]):
            raise ServerFailed(f"{server.name} did not keep a chunk")
        put_s = time.perf_counter() - started_s
        started_s = time.perf_counter()
        for number, key in enumerate(keys):
            client.get_into(key, payload)
            if payload[:8] != number.to_bytes(8, "little"):
                raise ServerFailed(f"{server.name} gave another chunk than was stored")
        get_s = time.perf_counter() - started_s
    return {PUT: moved / put_s, GET: moved / get_s}


def _fill_for_many(server: LmServer, plan: Plan) -> None:
    payload = memoryview(bytearray(plan.many_bytes))
    with LmClient(server.port) as client:
        for number in range(plan.many_chunks):
            client.put(key_text(LOAD_NAME, number), payload)
        client.exists(key_text(LOAD_NAME, 0))


def _many_clients(server: LmServer, plan: Plan) -> tuple[float, list[float]]:
    """GB/s, and the milliseconds of every GET."""
    numbers = (server.port, plan.clients, plan.many_gets, plan.many_bytes, plan.many_chunks)
    words = [sys.executable, "-m", "benchmarks.lm_client", *map(str, numbers)]
    try:
        done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, timeout=_LOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ServerFailed(f"{server.name} did not serve within {_LOAD_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise ServerFailed(f"{server.name}: not all of {plan.clients} clients were served")
    found = json.loads(done.stdout)
    moved = plan.clients * plan.many_gets * plan.many_bytes / 1e9
    return moved / found["elapsed_s"], [each * 1e3 for each in found["gets_s"]]


# ---------------------------------------------------------------------- servers


def _gateway(
    name: str, checkout: Path, redis_url: str, directory: Path
) -> AbstractContextManager[LmServer]:
    """`lmcache-redis gateway` of a checkout, with a memory tier and Redis."""
    port = free_port()
    words = ["lmcache_redis.cli", "gateway", "--redis-url", redis_url]
    words += ["--listen", f"lm://127.0.0.1:{port}", "--memory-bytes", str(_MEMORY_BYTES)]
    return _running(name, words, port, directory / f"{name}.log", PYTHONPATH=str(checkout))


def _lmcache_server(log: Path) -> AbstractContextManager[LmServer]:
    """LMCache's own server, which keeps chunks in memory, from the downloaded wheel."""
    package = find_server()
    if package is None:
        raise ServerFailed(HOW_TO_FETCH)
    port = free_port()
    words = ["lmcache.v1.server", "127.0.0.1", str(port), "cpu"]
    return _running(LMCACHE, words, port, log, PYTHONPATH=str(package))


@contextlib.contextmanager
def _running(
    name: str, words: Sequence[str], port: int, log: Path, **environment: str
) -> Iterator[LmServer]:
    with running_module(name, words, port, log, environment) as process:
        yield LmServer(name, port, process.pid)
