"""The agent by itself: a lookup's round trip, its start, and its memory.

lookup-pool   128 chunks, all in Redis and in the host pool: LOOKUP to LOOKUP_RESULT
lookup-none   128 chunks, none cached: includes one prefix scan of Redis
start         from exec to the first answered ping
memory        resident memory beyond the host pool, idle and with an engine registered
"""

from __future__ import annotations

import contextlib
import hashlib
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lmcache_redis.bench.agent import AgentServer
from lmcache_redis.client.adapter import LMCacheMPWorkerAdapter
from lmcache_redis.client.operations import LoadStoreOp
from lmcache_redis.client.scheduler import LMCacheMPSchedulerAdapter
from lmcache_redis.embedded import EmbeddedRedis
from lmcache_redis.errors import LMCacheRedisError

CHUNKS = 128
BLOCK_TOKENS = 16
CHUNK_TOKENS = 256
POOL_BYTES = 4 << 30
_MODEL = "bench/lookup"
_PATIENCE_S = 30.0


def run(rounds: int = 200) -> list[dict[str, Any]]:
    """Rows with the median and the 99th percentile of ``rounds`` lookups of each kind."""
    with (
        tempfile.TemporaryDirectory() as directory,
        EmbeddedRedis(1 << 30) as redis,
        AgentServer(
            f"ipc://{directory}/agent.sock",
            redis.url,
            Path(directory) / "agent.log",
            pool_bytes=POOL_BYTES,
        ) as agent,
    ):
        started = {"case": "start", "ms": agent.start_seconds * 1e3}
        _wait_for_arena(agent)
        idle = _memory_mib(agent)
        with simulated_engine(agent.endpoint) as (scheduler, worker):
            hashes = hashes_of("cached")
            store(agent, worker, hashes)
            pool = _round_trips(scheduler, lambda n: hashes, rounds, expect=CHUNKS)
            none = _round_trips(scheduler, lambda n: hashes_of(f"none{n}"), rounds, expect=0)
            busy = _memory_mib(agent)
    return [
        {"case": "lookup-pool", **_figures(pool)},
        {"case": "lookup-none", **_figures(none)},
        {**started, "p99_ms": None, "mib": None},
        {"case": "memory-idle", "ms": None, "p99_ms": None, "mib": idle},
        {"case": "memory-busy", "ms": None, "p99_ms": None, "mib": busy},
    ]


@contextlib.contextmanager
def simulated_engine(
    endpoint: str,
) -> Iterator[tuple[LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter]]:
    """Both halves of an engine without a model, registered; ended on exit."""
    import torch

    engine_id = uuid.uuid4().hex
    scheduler = LMCacheMPSchedulerAdapter(endpoint, _MODEL, 1, BLOCK_TOKENS, engine_id=engine_id)
    worker = LMCacheMPWorkerAdapter(endpoint, _MODEL, 1, 0, BLOCK_TOKENS, engine_id=engine_id)
    blocks = CHUNKS * CHUNK_TOKENS // BLOCK_TOKENS
    worker.register_kv_caches(
        {"layer": torch.zeros((blocks, BLOCK_TOKENS, 16))},
        num_blocks=blocks,
        dtype="float32",
        identity={},
    )
    try:
        wait_for(lambda: worker.ready and scheduler.link.online, "a registered engine")
        yield scheduler, worker
    finally:
        worker.shutdown()
        scheduler.shutdown()


def hashes_of(name: str, chunks: int = CHUNKS) -> list[bytes]:
    """Block hashes of a prompt of that many chunks."""
    blocks = chunks * CHUNK_TOKENS // BLOCK_TOKENS
    return [hashlib.sha256(f"{name}/{n}".encode()).digest() for n in range(blocks)]


def store(agent: AgentServer, worker: LMCacheMPWorkerAdapter, hashes: list[bytes]) -> None:
    """Stores a prompt and waits until it is in Redis."""
    op = LoadStoreOp(block_ids=range(len(hashes)), block_hashes=hashes)
    request_id = f"store-{time.monotonic_ns()}"
    worker.submit_store_request(request_id, op)
    wait_for(lambda: request_id in worker.get_finished({request_id})[0], "a store")
    agent.wait_idle()


def _round_trips(
    scheduler: LMCacheMPSchedulerAdapter, hashes_of: Any, rounds: int, expect: int
) -> list[float]:
    times = []
    for number in range(rounds):
        hashes = hashes_of(number)
        request_id = f"{expect}/{number}"
        started_s = time.perf_counter()
        scheduler.maybe_submit_lookup_request(request_id, block_hashes=hashes)
        tokens = None
        while tokens is None:
            tokens = scheduler.check_lookup_result(request_id, wait_s=1.0)
        times.append(time.perf_counter() - started_s)
        if tokens != expect * CHUNK_TOKENS:
            raise RuntimeError(f"a lookup found {tokens} tokens, not {expect * CHUNK_TOKENS}")
        scheduler.end_session(request_id)
    return times


def wait_for(condition: Callable[[], object], what: str, poll_s: float = 0.01) -> None:
    """Polls what tells nobody. Raises LMCacheRedisError if it takes too long."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise LMCacheRedisError(f"the benchmark waited {_PATIENCE_S:.0f} s for {what}")
        time.sleep(poll_s)


def _figures(times: list[float]) -> dict[str, Any]:
    times = sorted(times)
    return {
        "ms": statistics.median(times) * 1e3,
        "p99_ms": times[int(len(times) * 0.99)] * 1e3,
        "mib": None,
    }


def _wait_for_arena(agent: AgentServer) -> None:
    """Waits until the host pool is faulted in: until then the agent shares its time with that."""
    wait_for(lambda: _arena_and_rest_mib(agent)[0] >= POOL_BYTES * 0.99 / 2**20, "the arena")


def _memory_mib(agent: AgentServer) -> float:
    """Resident memory of the process without the host pool's arena."""
    return _arena_and_rest_mib(agent)[1]


def _arena_and_rest_mib(agent: AgentServer) -> tuple[float, float]:
    """Resident memory of the arena, which is the largest mapping, and of everything else."""
    assert agent.process is not None
    sizes, resident = [], []
    for line in Path(f"/proc/{agent.process.pid}/smaps").read_text().splitlines():
        if line.startswith("Size:"):
            sizes.append(int(line.split()[1]))
        elif line.startswith("Pss:"):
            resident.append(int(line.split()[1]))
    arena = resident[sizes.index(max(sizes))]
    return arena / 1024, (sum(resident) - arena) / 1024
