# SPDX-License-Identifier: Apache-2.0
"""The agent alone: the round trip of a lookup, the agent's start, and its memory.

lookup-pool   128 chunks, all in Redis and in the host pool: LOOKUP to LOOKUP_RESULT
lookup-none   128 chunks, none cached: includes one prefix scan of Redis
start         from exec to the first answered ping
memory        resident memory beyond the host pool, idle and with an engine registered
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine import CHUNK_TOKENS, Engine, Shape
from benchmarks.report import percentile
from benchmarks.servers import wait_for
from lmcache_redis.agent.embedded import embedded_redis
from testkit.agent import AgentServer

CHUNKS = 128
SMALL = Shape("small", segments=1, page_bytes=1024, blocks_per_chunk=16)
POOL_BYTES = 4 << 30


def run(rounds: int = 200, pool_bytes: int = POOL_BYTES) -> list[dict[str, Any]]:
    """Rows with the median and the 99th percentile of ``rounds`` lookups of each kind."""
    with (
        tempfile.TemporaryDirectory() as directory,
        embedded_redis(1 << 30) as url,
        AgentServer(
            f"ipc://{directory}/agent.sock",
            url,
            Path(directory) / "agent.log",
            pool_bytes=pool_bytes,
        ) as agent,
    ):
        # Faulting in the host pool takes CPU time from the agent.
        wait_for(lambda: _resident_mib(agent)[0] >= pool_bytes * 0.99 / 2**20, "the host pool")
        idle_mib = _resident_mib(agent)[1]
        with contextlib.closing(Engine(agent, SMALL, CHUNKS)) as engine:
            stored = engine.store()[1]
            agent.wait_idle()
            pool_ms = _round_trips(engine, lambda: stored, rounds, expect=CHUNKS)
            none_ms = _round_trips(engine, engine.new_hashes, rounds, expect=0)
            busy_mib = _resident_mib(agent)[1]
    return [
        _row("lookup-pool", statistics.median(pool_ms), percentile(pool_ms, 99)),
        _row("lookup-none", statistics.median(none_ms), percentile(none_ms, 99)),
        _row("start", agent.start_seconds * 1e3),
        _row("memory-idle", mib=idle_mib),
        _row("memory-busy", mib=busy_mib),
    ]


def _row(
    case: str, ms: float | None = None, p99_ms: float | None = None, mib: float | None = None
) -> dict[str, Any]:
    return {"case": case, "ms": ms, "p99_ms": p99_ms, "mib": mib}


def _round_trips(
    engine: Engine, hashes_of: Callable[[], list[bytes]], rounds: int, expect: int
) -> list[float]:
    """Milliseconds of each."""
    times = []
    for number in range(rounds):
        hashes = hashes_of()
        request_id = f"{expect}/{number}"
        started_s = time.perf_counter()
        engine.ask(request_id, hashes)
        tokens = engine.answer(request_id)
        times.append((time.perf_counter() - started_s) * 1e3)
        if tokens != expect * CHUNK_TOKENS:
            raise RuntimeError(f"a lookup found {tokens} tokens, not {expect * CHUNK_TOKENS}")
        engine.scheduler.end_session(request_id)
    return times


def _resident_mib(agent: AgentServer) -> tuple[float, float]:
    """Resident memory of the arena (the largest mapping), and of everything else."""
    sizes, resident = [], []
    for line in Path(f"/proc/{agent.process.pid}/smaps").read_text().splitlines():
        if line.startswith("Size:"):
            sizes.append(int(line.split()[1]))
        elif line.startswith("Pss:"):
            resident.append(int(line.split()[1]))
    arena = resident[sizes.index(max(sizes))]
    return arena / 1024, (sum(resident) - arena) / 1024
