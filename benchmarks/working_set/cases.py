# SPDX-License-Identifier: Apache-2.0
"""The cases: what stands between the engine and Redis, and starting it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import redis

from benchmarks.lmcache_mp import running_lmcache
from benchmarks.servers import RedisProcess, cpu_s
from testkit.agent import AgentServer

_COUNTED = ("lookup", "hit_", "miss_", "drop_")


@dataclass(frozen=True, slots=True)
class Case:
    """pool: how many times the host pool holds the set; 0 for no connector.

    blocks: how many times vLLM's own blocks hold it.
    """

    name: str
    label: str
    pool: float
    disk: bool = False
    lmcache: bool = False
    blocks: float = 0.5


CASES = {
    case.name: case
    for case in (
        Case("none", "no connector", 0),
        Case("own", "vLLM's cache holds all", 0, blocks=2),
        Case("large", "large pool", 2),
        Case("small", "small pool", 0.25),
        Case("disk", "small pool, disk", 0.25, disk=True),
        Case("lmcache-large", "LMCache, large pool", 2, lmcache=True),
        Case("lmcache-small", "LMCache, small pool", 0.25, lmcache=True),
    )
}


class Cache(Protocol):
    """What serves an engine's connector."""

    @property
    def pid(self) -> int: ...

    @property
    def kv_transfer(self) -> Mapping[str, Any]: ...

    @property
    def environment(self) -> Mapping[str, str]: ...

    def wait_engine(self) -> None: ...

    def wait_idle(self) -> None: ...

    def counters(self) -> dict[str, int]: ...


class OurAgent:
    """An agent as a `Cache`."""

    environment: Mapping[str, str] = {}

    def __init__(self, agent: AgentServer) -> None:
        self._agent = agent
        self.pid = agent.process.pid
        self.wait_engine = agent.wait_engine
        self.wait_idle = agent.wait_idle

    @property
    def kv_transfer(self) -> dict[str, Any]:
        return {
            "kv_connector": "LMCacheRedisConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"endpoint": self._agent.endpoint},
        }

    def counters(self) -> dict[str, int]:
        counters = self._agent.counters()
        return {name: count for name, count in counters.items() if name.startswith(_COUNTED)}


class Stack:
    """The cache of a case, None for no connector, and its Redis."""

    def __init__(self, cache: Cache | None, server: RedisProcess) -> None:
        self.cache = cache
        self.server = server
        self._redis = redis.Redis.from_url(server.url)

    def wait_idle(self) -> None:
        if self.cache is not None:
            self.cache.wait_idle()

    def stored_bytes(self) -> int:
        """The lengths of all values in Redis."""
        keys = list(self._redis.scan_iter(count=1000))
        with self._redis.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.strlen(key)
            return sum(pipeline.execute())

    def usage(self) -> dict[str, float]:
        """CPU seconds and bytes sent, since the start."""
        sent = self._redis.info("stats")["total_net_output_bytes"]
        counters = {} if self.cache is None else self.cache.counters()
        return {
            "agent_cpu_s": 0.0 if self.cache is None else cpu_s(self.cache.pid),
            "redis_cpu_s": cpu_s(self.server.pid),
            "from_redis_mib": sent / (1 << 20),
            **counters,
        }


@contextlib.contextmanager
def running(case: Case, set_bytes: int, chunk_tokens: int, log: Path) -> Iterator[Stack]:
    """What a case needs beside an engine, during the block. Raises LMCacheRedisError."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(RedisProcess(directory))
        cache: Cache | None = None
        pool_bytes = int(case.pool * set_bytes)
        if case.lmcache:
            sizes = (server.port, pool_bytes, log)
            lmcache = running_lmcache(*sizes, chunk_tokens=chunk_tokens, buffer=case.pool < 1)
            cache = stack.enter_context(lmcache)
        elif pool_bytes:
            settings: dict[str, Any] = {
                "pool_bytes": pool_bytes,
                "chunk_size_tokens": chunk_tokens,
            }
            if case.disk:
                settings |= {"disk_path": directory / "disk", "disk_size": 2 * set_bytes}
            agent = AgentServer(f"ipc://{directory}/agent.sock", server.url, log, **settings)
            cache = OurAgent(stack.enter_context(agent))
        yield Stack(cache, server)
