"""Measures rounds of writes, reads and lookups against a server in use.

    write         new chunks, all together
    read          the same chunks into memory that was wiped; every page is checked
    read one      one of them alone: the latency of a hit
    lookup, all   one prefix scan of these chunks
    lookup, none  one prefix scan of 1,000 chunks that do not exist

Figures are medians. The first round is not counted: it opens connections, and the server faults
memory in. Each round removes its keys. No agent uses their names, and they expire in case the run
is killed.
"""

from __future__ import annotations

import contextlib
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmcache_redis.bench.client import PlaneClient
from lmcache_redis.bench.values import PAGE_BYTES, Arena, Values
from lmcache_redis.config import DEFAULT_SLOT_BYTES, machine_share
from lmcache_redis.errors import ConfigError, RedisUnavailable
from lmcache_redis.resp import RedisOptions

ABSENT_CHUNKS = 1000
EXPIRE_S = 600
_LOOKUPS = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """``chunks`` of ``chunk_bytes`` at a time. Raises ConfigError for sizes that do not fit."""

    chunk_bytes: int
    chunks: int
    rounds: int

    def __post_init__(self) -> None:
        if self.chunk_bytes <= 0 or self.chunk_bytes % PAGE_BYTES:
            raise ConfigError(f"--chunk-bytes is {self.chunk_bytes}: choose a multiple of 4KiB")
        if self.chunk_bytes * self.chunks > machine_share(1 << 50):
            raise ConfigError("--chunks need over a quarter of this machine's memory: choose fewer")


def measure(options: RedisOptions, plan: Plan) -> dict[str, Any]:
    """The server, and a row of medians for each operation: ``gb_per_s`` of payload, and ``ms``.

    Both are of ``chunks`` together; lookups have ms alone. Raises RedisUnavailable.
    """
    options = replace(options, ttl_s=EXPIRE_S)
    memory = Arena(plan.chunk_bytes * plan.chunks)
    run = f"lmcache-redis bench {secrets.token_hex(8)}"
    seconds: dict[tuple[str, int], list[float]] = {}
    with contextlib.closing(PlaneClient(options, DEFAULT_SLOT_BYTES)) as client:
        for number in range(plan.rounds + 1):
            for case, taken_s in _round(client, plan, memory, f"{run}/{number}").items():
                seconds.setdefault(case, []).extend([taken_s] if number else [])
        rows = [_row(plan, op, chunks, taken) for (op, chunks), taken in seconds.items()]
        return {"server": client.where, "rows": rows}


def _round(
    client: PlaneClient, plan: Plan, memory: Arena, name: str
) -> dict[tuple[str, int], float]:
    """Seconds by operation and number of chunks."""
    values = memory.values(plan.chunk_bytes, plan.chunks, DEFAULT_SLOT_BYTES)
    client.prepare(name, values)
    stored = client.keys()
    absent = client.absent_keys(f"{name}/absent", ABSENT_CHUNKS)
    seconds: dict[tuple[str, int], float] = {}
    try:
        seconds["write", plan.chunks] = _timed(client.store)
        seconds["read", plan.chunks] = _load(client, values)
        first = memory.values(plan.chunk_bytes, 1, DEFAULT_SLOT_BYTES)
        client.prepare(name, first)
        seconds["read one", 1] = _load(client, first)
        seconds["lookup, all", plan.chunks] = _lookup(client, stored, plan.chunks)
        seconds["lookup, none", ABSENT_CHUNKS] = _lookup(client, absent, 0)
    except BaseException:
        # The first failure is reported; if the keys cannot be removed either, they expire.
        with contextlib.suppress(RedisUnavailable):
            _remove(client, name, values)
        raise
    _remove(client, name, values)
    return seconds


def _remove(client: PlaneClient, name: str, values: Values) -> None:
    client.prepare(name, values)
    client.remove()


def _load(client: PlaneClient, values: Values) -> float:
    values.wipe()
    seconds = _timed(client.load)
    values.check()
    return seconds


def _lookup(client: PlaneClient, keys: Sequence[bytes], present: int) -> float:
    found: set[int] = set()
    seconds = [_timed(lambda: found.add(client.scan(keys))) for _ in range(_LOOKUPS)]
    if found != {present}:
        raise RedisUnavailable(f"lookups found {sorted(found)} of {present} chunks")
    return statistics.median(seconds)


def _timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def _row(plan: Plan, op: str, chunks: int, seconds: list[float]) -> dict[str, Any]:
    median_s = statistics.median(seconds)
    gigabytes = None if op.startswith("lookup") else chunks * plan.chunk_bytes / 1e9
    return {
        "op": op,
        "chunks": chunks,
        "chunk_bytes": plan.chunk_bytes,
        "gb_per_s": None if gigabytes is None else round(gigabytes / median_s, 3),
        "ms": round(median_s * 1e3, 3),
        "rounds": len(seconds),
    }
