"""What is measured: one client with large chunks, then many clients with smaller ones.

    put         PUTs of all chunks, and the EXIST after the last: all are there then
    get         the same chunks, which both servers have in memory
    get, many   many clients at once, each with GETs of its own: throughput, median and p99

The servers take turns, who begins changes with the round. Ours keeps every chunk in Redis as well,
and answers the EXIST when the last one is there too.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_redis.bench.lm.client import LmClient, key_text
from lmcache_redis.bench.lm.load import LOAD_NAME
from lmcache_redis.bench.lm.servers import OURS, LmServer, ServerFailed, lmcache_server, our_gateway
from lmcache_redis.bench.plane.server import own_server

MIB = 1 << 20
_MEMORY_BYTES = 1 << 30
_LOAD_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is moved: chunks of one client, and of many clients, each with GETs of its own."""

    rounds: int = 5
    clients: int = 64
    large_bytes: int = 32 * MIB
    large_chunks: int = 8
    many_bytes: int = 2 * MIB
    many_chunks: int = 64
    many_gets: int = 16


def run(plan: Plan, say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Rows by server and operation: GB/s, median and p99 in ms, the server's peak memory."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis_url = stack.enter_context(own_server())
        servers = [
            stack.enter_context(our_gateway(redis_url, _MEMORY_BYTES, directory / "ours.log"))
        ]
        try:
            servers.append(stack.enter_context(lmcache_server(directory / "lmcache.log")))
        except ServerFailed as error:
            say(f"lmcache: left out: {error}")
        samples: dict[tuple[str, str], list[float]] = {}
        gets_s: dict[str, list[float]] = {}
        for server in servers:
            _fill_for_many(server, plan)
        for number in range(plan.rounds):
            say(f"round {number + 1} of {plan.rounds}")
            for server in servers[number % len(servers) :] + servers[: number % len(servers)]:
                for op, gb_per_s in _one_client(server, plan).items():
                    samples.setdefault((server.name, op), []).append(gb_per_s)
                gb_per_s, seconds = _many_clients(server, plan)
                samples.setdefault((server.name, "get, many"), []).append(gb_per_s)
                gets_s.setdefault(server.name, []).extend(seconds)
        return [
            _row(server, op, samples, gets_s, plan)
            for op in ("put", "get", "get, many")
            for server in servers
        ]


def _row(
    server: LmServer,
    op: str,
    samples: dict[tuple[str, str], list[float]],
    gets_s: dict[str, list[float]],
    plan: Plan,
) -> dict[str, Any]:
    many = op == "get, many"
    ms = sorted(each * 1e3 for each in gets_s[server.name]) if many else []
    ours = statistics.median(samples[OURS, op])
    speed = statistics.median(samples[server.name, op])
    return {
        "server": server.name,
        "op": op,
        "value_mib": (plan.many_bytes if many else plan.large_bytes) / MIB,
        "clients": plan.clients if many else 1,
        "gb_per_s": speed,
        "ours_times": ours / speed,
        "median_ms": statistics.median(ms) if many else None,
        "p99_ms": ms[len(ms) * 99 // 100] if many else None,
        "peak_rss_mib": server.peak_rss_mib(),
        "rounds": len(samples[server.name, op]),
    }


def _one_client(server: LmServer, plan: Plan) -> dict[str, float]:
    payload = memoryview(bytearray(plan.large_bytes))
    keys = [key_text("one", number) for number in range(plan.large_chunks)]
    moved = plan.large_bytes * plan.large_chunks / 1e9
    with LmClient(server.port) as client:
        started = time.perf_counter()
        for number, key in enumerate(keys):
            payload[:8] = number.to_bytes(8, "little")
            client.put(key, payload)
        if not client.exists(keys[-1]):
            raise ServerFailed(f"{server.name} did not keep a chunk")
        put_s = time.perf_counter() - started
        started = time.perf_counter()
        for number, key in enumerate(keys):
            client.get_into(key, payload)
            if payload[:8] != number.to_bytes(8, "little"):
                raise ServerFailed(f"{server.name} gave another chunk than was stored")
        get_s = time.perf_counter() - started
    return {"put": moved / put_s, "get": moved / get_s}


def _fill_for_many(server: LmServer, plan: Plan) -> None:
    payload = memoryview(bytearray(plan.many_bytes))
    with LmClient(server.port) as client:
        for number in range(plan.many_chunks):
            client.put(key_text(LOAD_NAME, number), payload)
        client.exists(key_text(LOAD_NAME, 0))


def _many_clients(server: LmServer, plan: Plan) -> tuple[float, list[float]]:
    """GB/s, and the seconds of every GET."""
    numbers = (server.port, plan.clients, plan.many_gets, plan.many_bytes, plan.many_chunks)
    words = [sys.executable, "-m", "lmcache_redis.bench.lm.load", *map(str, numbers)]
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, timeout=_LOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ServerFailed(f"{server.name} did not serve within {_LOAD_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise ServerFailed(f"{server.name}: not all of {plan.clients} clients were served")
    found = json.loads(done.stdout)
    moved = plan.clients * plan.many_gets * plan.many_bytes / 1e9
    return moved / found["elapsed_s"], found["gets_s"]
