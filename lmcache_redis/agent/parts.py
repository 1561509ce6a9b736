"""The parts of an agent and their construction."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_redis.agent.copies import CopyThreads
from lmcache_redis.agent.peers import Peers, Sessions
from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.disk.tier import DEFAULT_PATIENCE_S, DiskTier
from lmcache_redis.cache.memory import Arena
from lmcache_redis.cache.threads import OwnerLoop
from lmcache_redis.cache.tier import DISK_COUNTERS, REDIS_COUNTERS, Backing
from lmcache_redis.config import AgentConfig
from lmcache_redis.device.context import PinnedPool
from lmcache_redis.metrics import Metrics
from lmcache_redis.resp.plane import RedisPlane
from lmcache_redis.transport import Wakeup


@dataclass(frozen=True)
class Agent:
    """Owned by the loop thread, which other threads wake through ``wakeup``."""

    config: AgentConfig
    wakeup: Wakeup
    loop: OwnerLoop
    arena: Arena
    plane: RedisPlane
    disk: DiskTier | None
    cache: Cache
    copies: CopyThreads
    sessions: Sessions
    peers: Peers
    pinned_pool: PinnedPool

    @property
    def tier_letters(self) -> tuple[str, ...]:
        """What messages call the cache's tiers, see `messages.TIER_NAMES`."""
        return tuple("r" if each.is_remote else "d" for each in self.cache.counters)

    @staticmethod
    def of(config: AgentConfig, arena: Arena, plane: RedisPlane) -> Agent:
        """Raises ``ConfigError`` if the disk tier's directory cannot be used."""
        limit_bytes = config.write_queue_limit_bytes
        backings = [Backing(plane, REDIS_COUNTERS, limit_bytes, config.op_timeout_s)]
        disk = None
        if config.disk_path is not None:
            # At most half of a lookup's time is for the disk; the rest is for Redis.
            patience_s = min(DEFAULT_PATIENCE_S, config.lookup_deadline_s / 2)
            disk = DiskTier(config.disk_path, config.disk_size, read_patience_s=patience_s)
            backings.insert(0, Backing(disk, DISK_COUNTERS, limit_bytes))
        wakeup = Wakeup()
        loop = OwnerLoop(wakeup.set)
        cache = Cache(loop, arena, backings, Metrics())
        return Agent(
            config,
            wakeup,
            loop,
            arena,
            plane,
            disk,
            cache,
            CopyThreads(config.copy_threads),
            Sessions(cache.pool, config.session_timeout_s),
            Peers(),
            PinnedPool(arena.base_address, arena.size_bytes),
        )
