# SPDX-License-Identifier: Apache-2.0
"""Starting and stopping a gateway: `lmcache-redis gateway`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time

from lmcache_redis import __version__
from lmcache_redis.cache.threads import Action, Timer
from lmcache_redis.compat.gateway.config import GatewayConfig
from lmcache_redis.compat.gateway.server import Gateway
from lmcache_redis.config import parse_address
from lmcache_redis.metrics import PREFIX
from lmcache_redis.metrics.exporter import OwnerCollector, serve_metrics
from lmcache_redis.objects.cache import DEFAULT_SPARE_BYTES, HeapMemory, ObjectCache
from lmcache_redis.objects.storage import in_memory, in_redis, on_disk, open_cache
from lmcache_redis.processes import raise_descriptor_limit
from lmcache_redis.resp import RedisOptions, RedisPlane

logger = logging.getLogger(__name__)

_LEAST_FLUSH_S = 0.1
_FLUSH_POLL_S = 0.01
_CLOSE_S = 1.0
_FIRST_PROBE_S = 5.0
# Of a write, and again of the removal that follows a failed one.
WRITE_S = 5.0
# That read from the disk, and as many that write: clients read at once, each its own chunk.
_DISK_THREADS = 16
# The counters of an agent that a gateway's cache raises too.
_TIER_COUNTERS = [
    f"{PREFIX}{name}_total"
    for name in ("loaded_chunks", "loaded_bytes", "stored_chunks", "stored_bytes", "plain_bytes")
]


def run_gateway(config: GatewayConfig) -> int:
    """Runs a gateway until SIGTERM or SIGINT; returns the exit status.

    Raises ``ConfigError`` if a setting has to change: an address in use, an invalid URL, an
    unusable directory or certificate.
    """
    raise_descriptor_limit()
    return asyncio.run(_run(config))


class LoopOwner:
    """A running asyncio loop as the `Owner` of a cache."""

    now = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def post(self, action: Action) -> None:
        if threading.get_ident() == self._thread:
            self._loop.call_soon(action)  # without a system call that wakes the loop
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed; only a hung tier posts then
            self._loop.call_soon_threadsafe(action)

    def at(self, due_s: float, action: Action) -> Timer:
        return self._loop.call_later(due_s - self.now(), action)


def open_objects(config: GatewayConfig) -> ObjectCache:
    """Memory, disk and Redis as configured, owned by the running loop.

    Waits until the disk is indexed, and up to a few seconds for Redis. Raises ConfigError.
    """
    prefix, storages = config.key_prefix, []
    if config.memory_bytes:
        storages.append(in_memory(config.memory_bytes))
    if config.disk_path is not None:
        path, limit_bytes = config.disk_path, config.disk_size
        storages.append(on_disk(path, limit_bytes, key_prefix=prefix, threads=_DISK_THREADS))
    if config.redis_url is not None:
        storages.append(in_redis(RedisOptions.of_settings(config, config.redis_url)))
    memory = HeapMemory(spare_bytes=min(config.buffer_bytes // 8, DEFAULT_SPARE_BYTES))
    objects = open_cache(storages, LoopOwner(), memory, WRITE_S)
    for tier in objects.cache.tiers:
        if isinstance(tier, RedisPlane):
            tier.wait_probed(_FIRST_PROBE_S)
    return objects


async def _run(config: GatewayConfig) -> int:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    objects, stack = open_objects(config), contextlib.ExitStack()
    cache = objects.cache
    try:
        gateway = Gateway(objects, config)
        await gateway.start()
        if config.metrics is not None:
            read = OwnerCollector(cache.owner.post, gateway.metrics)
            of_tiers = cache.metrics.registry.restricted_registry(_TIER_COUNTERS)
            stack.enter_context(serve_metrics(parse_address(config.metrics), read, of_tiers))
        tls = " with TLS" if config.tls_cert else ""
        logger.info("lmcache-redis %s serves %s%s", __version__, gateway.url, tls)
        await stopped.wait()
        deadline_s = time.monotonic() + config.shutdown_deadline_s
        logger.info("stopping: requests have %.1f s to finish", config.shutdown_deadline_s)
        await gateway.stop()
        deadline_s = max(deadline_s, time.monotonic() + _LEAST_FLUSH_S)
        while cache.backlog and time.monotonic() < deadline_s:
            await asyncio.sleep(_FLUSH_POLL_S)
        if cache.backlog:
            logger.warning("not everything that was put is stored")
        found = gateway.stats().items()
        counted_text = ", ".join(f"{name} {n}" for name, n in found if n and "buffer" not in name)
        logger.info("stopped: %s", counted_text or "no requests")
    finally:
        stack.close()
        objects.close(_CLOSE_S)
        await asyncio.sleep(0)  # runs what the tiers posted when they closed
    return 0
