"""What an agent is made of. A job does not get all of it, but `Jobs`."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from lmcache_redis.agent.copies import CopyThreads
from lmcache_redis.agent.copyjob import Jobs
from lmcache_redis.agent.peers import Peers
from lmcache_redis.agent.sessions import Sessions
from lmcache_redis.cache import counters
from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.disk.tier import DEFAULT_PATIENCE_S, DiskTier
from lmcache_redis.cache.memory import Arena
from lmcache_redis.cache.owner import OwnerLoop
from lmcache_redis.cache.redis import RedisTier
from lmcache_redis.cache.writebehind import Backing
from lmcache_redis.config import AgentConfig
from lmcache_redis.device.context import DeviceContext, PinnedArena, pin_for
from lmcache_redis.metrics import Metrics
from lmcache_redis.resp.plane import RedisPlane
from lmcache_redis.transport import Wakeup


class Loop(OwnerLoop):
    """The owner of the agent's cache: a thread that polls sockets and ``wakeup``."""

    def __init__(self) -> None:
        self.wakeup = Wakeup()
        super().__init__(self.wakeup.set)

    def run_posted(self) -> None:
        self.wakeup.clear()
        super().run_posted()


class PinnedPool:
    """The host pool's memory, pinned once a device gains by it. Thread-safe."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self._pinned: PinnedArena | None = None

    def pin(self, device: DeviceContext) -> None:
        """Slow. Raises ``DeviceError`` where the device refuses."""
        with self._lock:
            if self._pinned is None:
                self._pinned = pin_for(device, self._arena.base_address, self._arena.size_bytes)

    def unpin(self) -> None:
        """Before the arena goes. Raises ``DeviceError`` where the device refuses."""
        with self._lock:
            pinned, self._pinned = self._pinned, None
            if pinned is not None:
                pinned.close()


@dataclass(frozen=True)
class Agent:
    """See the module. Owned by the loop thread."""

    config: AgentConfig
    loop: Loop
    arena: Arena
    plane: RedisPlane
    disk: DiskTier | None
    jobs: Jobs
    peers: Peers
    pinned_pool: PinnedPool

    @staticmethod
    def of(config: AgentConfig, arena: Arena, plane: RedisPlane) -> Agent:
        """Raises ``ConfigError`` where the disk tier's directory cannot be used."""
        loop, limit_bytes = Loop(), config.write_queue_limit_bytes
        backings = [
            Backing(RedisTier(plane), counters.REDIS, limit_bytes, config.op_timeout_s),
        ]
        disk = None
        if config.disk_path is not None:
            # Of the time of a lookup Redis has the other half.
            patience_s = min(DEFAULT_PATIENCE_S, config.lookup_deadline_s / 2)
            disk = DiskTier(config.disk_path, config.disk_size, read_patience_s=patience_s)
            backings.insert(0, Backing(disk, counters.DISK, limit_bytes))
        cache = Cache(loop, arena, backings, Metrics())
        jobs = Jobs(
            cache,
            CopyThreads(config.copy_threads),
            Sessions(cache.pool, config.session_timeout_s),
        )
        return Agent(config, loop, arena, plane, disk, jobs, Peers(), PinnedPool(arena))
