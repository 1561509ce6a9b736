# SPDX-License-Identifier: Apache-2.0
"""The agent alone: the round trip of a lookup, the agent's start, and its memory.

lookup-pool   128 chunks, all in Redis and in the host pool: LOOKUP to LOOKUP_RESULT
lookup-none   128 chunks, none cached: includes one prefix scan of Redis
lookup-redis  128 chunks of 16 KiB in Redis, or 16 of 2 MiB (large), until the host pool has them
start         from exec to the first answered ping
memory        resident memory beyond the host pool, idle and with an engine registered

With ``shares``, an engine whose chunks are cut into eight shares asks in turn: `shared-pool`, ...
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.engine import CHUNK_TOKENS, Engine, Shape
from benchmarks.report import percentile, rotated
from benchmarks.servers import wait_for
from lmcache_redis.agent.embedded import embedded_redis
from testkit.agent import AgentServer

CHUNKS = 128
SMALL = Shape("small", segments=1, page_bytes=1024, blocks_per_chunk=16)
LARGE = Shape("large", segments=16, page_bytes=8192, blocks_per_chunk=16)
LARGE_CHUNKS = 16
POOL_BYTES = 4 << 30
_SHARES = 8
# Prompts that are stored, to be found in Redis by a new agent.
_MOST_STORED = 20


def run(
    rounds: int = 200, pool_bytes: int = POOL_BYTES, shares: bool = False
) -> list[dict[str, Any]]:
    """Rows with the median and the 99th percentile of ``rounds`` lookups of each kind."""
    kinds = ("lookup", "shared") if shares else ("lookup",)
    with (
        tempfile.TemporaryDirectory() as directory,
        embedded_redis(2 << 30) as url,
        AgentServer(
            f"ipc://{directory}/agent.sock",
            url,
            Path(directory) / "agent.log",
            pool_bytes=pool_bytes,
        ) as agent,
    ):
        start_ms = agent.start_seconds * 1e3
        # Faulting in the host pool takes CPU time from the agent.
        wait_for(lambda: _resident_mib(agent)[0] >= pool_bytes * 0.99 / 2**20, "the host pool")
        idle_mib = _resident_mib(agent)[1]
        times: dict[str, list[float]] = {}
        busy_mib = _times(agent, kinds, SMALL, CHUNKS, rounds, "", times)
        _times(agent, kinds, LARGE, LARGE_CHUNKS, 0, "-large", times)
    rows = [_row(case, statistics.median(ms), percentile(ms, 99)) for case, ms in times.items()]
    return [
        *rows,
        _row("start", start_ms),
        _row("memory-idle", mib=idle_mib),
        _row("memory-busy", mib=busy_mib),
    ]


def _times(
    agent: AgentServer,
    kinds: Sequence[str],
    shape: Shape,
    chunks: int,
    rounds: int,
    suffix: str,
    times: dict[str, list[float]],
) -> float:
    """Adds those of engines of these kinds, in turns; the agent's memory before it restarts."""
    with contextlib.ExitStack() as stack:
        engines = {
            kind: stack.enter_context(
                contextlib.closing(
                    Engine(agent, replace(shape, shares=_SHARES * (kind != "lookup")), chunks)
                )
            )
            for kind in kinds
        }
        stored: dict[str, list[list[bytes]]] = {kind: [] for kind in kinds}
        for kind in [*kinds] * _MOST_STORED:
            stored[kind].append(engines[kind].store()[1])
            agent.wait_idle()  # what is to be written stays in the pool
        for number in range(rounds):
            for kind in rotated(kinds, number):
                engine = engines[kind]
                for case, hashes, expect in (
                    (f"{kind}-pool", stored[kind][0], chunks),
                    (f"{kind}-none", engine.new_hashes(), 0),
                ):
                    times.setdefault(case, []).append(_round_trip(engine, case, hashes, expect))
        busy_mib = _resident_mib(agent)[1]
        agent.restart()
        for engine in engines.values():
            engine.wait_registered(agent)
        for number in range(_MOST_STORED):
            for kind in rotated(kinds, number):
                case = f"{kind}-redis{suffix}"
                ms = _round_trip(engines[kind], case, stored[kind][number], chunks)
                times.setdefault(case, []).append(ms)
    return busy_mib


def _row(
    case: str, ms: float | None = None, p99_ms: float | None = None, mib: float | None = None
) -> dict[str, Any]:
    return {"case": case, "ms": ms, "p99_ms": p99_ms, "mib": mib}


def _round_trip(engine: Engine, case: str, hashes: Sequence[bytes], expect: int) -> float:
    """Milliseconds of one."""
    request_id = f"{case}/{hashes[0].hex()}"
    started_s = time.perf_counter()
    engine.ask(request_id, [*hashes])
    tokens = engine.answer(request_id)
    took_s = time.perf_counter() - started_s
    if tokens != expect * CHUNK_TOKENS:
        raise RuntimeError(f"a lookup found {tokens} tokens, not {expect * CHUNK_TOKENS}")
    engine.scheduler.end_session(request_id)
    return took_s * 1e3


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
