# SPDX-License-Identifier: Apache-2.0
"""An agent whose loop is a thread of this process, so that a test sees its objects."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from lmcache_redis.agent.agent import Agent
from lmcache_redis.agent.service import Service
from lmcache_redis.cache.arena import Arena
from lmcache_redis.config import AgentConfig
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.resp.plane import RedisPlane
from lmcache_redis.tiers import Backing
from lmcache_redis.transport import bind_router

_STOP_S = 10.0


class AgentHere:
    """Serves from entry to exit, with a small host pool. options: of `AgentConfig`.

    more: tiers beside disk and Redis.
    """

    def __init__(
        self, directory: Path, redis_url: str, more: Sequence[Backing] = (), **options: Any
    ) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.endpoint = f"ipc://{directory}/agent.sock"
        small = {"pool_bytes": 8 << 20, "slot_bytes": 64 << 10, "chunk_size_tokens": 64}
        small["canary_every"] = 0
        self.config = AgentConfig(endpoint=self.endpoint, redis_url=redis_url, **small | options)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = bind_router(self._context, self.endpoint)
        self.arena = Arena(self.config.pool_bytes, self.config.slot_bytes)
        self.plane = RedisPlane(RedisOptions.of_agent(self.config, redis_url))
        self.agent = Agent.of(self.config, self.arena, self.plane, more)
        self.service = Service(self.agent, self._router)
        self._thread = threading.Thread(target=self.service.serve, name="agent", daemon=True)

    def counter(self, name: str) -> float:
        return self.agent.cache.metrics.snapshot()[name]

    def __enter__(self) -> AgentHere:
        self.plane.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.service.stop()
        self._thread.join(_STOP_S)
        self.service.drain(time.monotonic())
        assert self.agent.copies.close(_STOP_S)
        assert self.agent.cache.close(_STOP_S)
        self.agent.loop.run_posted()
        self.agent.pinning.close()
        self.agent.wakeup.close()
        self.arena.close()
        self._router.close(0)
        self._context.term()
