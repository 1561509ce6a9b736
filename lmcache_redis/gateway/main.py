"""Starting and stopping a gateway: `lmcache-redis gateway`."""

from __future__ import annotations

import asyncio
import importlib
import logging
import signal
import time

from lmcache_redis import __version__
from lmcache_redis.gateway.config import GatewayConfig
from lmcache_redis.gateway.server import Gateway
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.backends.interface import LMCBackendInterface

logger = logging.getLogger(__name__)

_LEAST_FLUSH_S = 0.1


def run_gateway(config: GatewayConfig) -> int:
    """Runs a gateway until SIGTERM or SIGINT; returns the exit status.

    Raises ``ConfigError`` where a setting has to change: an address in use, a URL that is none,
    a directory or certificate that cannot be used.
    """
    loop = new_loop()
    try:
        return loop.run_until_complete(_run(config))
    finally:
        loop.close()


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop of uvloop where that is installed, of asyncio otherwise."""
    try:
        module = importlib.import_module("uvloop")
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = module.new_event_loop()
    return loop


def open_tiers(config: GatewayConfig) -> LMCBackendInterface:
    """Memory, disk and Redis, as many as the settings name, the nearest first."""
    tiers: list[LMCBackendInterface] = []
    try:
        if config.memory_bytes:
            from lmcache_redis.backends.local import LMCLocalBackend

            tiers.append(LMCLocalBackend(config.memory_bytes))
        if config.disk_path is not None:
            from lmcache_redis.backends.disk import LMCLocalDiskBackend

            tiers.append(LMCLocalDiskBackend(config.disk_path, config.disk_size))
        if config.redis_url is not None:
            from lmcache_redis.backends.remote import LMCRemoteBackend

            tiers.append(LMCRemoteBackend(_redis_options(config, config.redis_url)))
        if len(tiers) == 1:
            return tiers[0]
        from lmcache_redis.backends.hybrid import LMCHybridBackend

        return LMCHybridBackend(tiers)
    except BaseException:
        for tier in tiers:
            tier.close()
        raise


def _redis_options(config: GatewayConfig, url: str) -> RedisOptions:
    return RedisOptions(
        url=url,
        key_prefix=config.key_prefix,
        username=config.redis_username,
        password=config.redis_password,
    )


async def _run(config: GatewayConfig) -> int:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    backend = open_tiers(config)
    try:
        gateway = Gateway(backend, config)
        await gateway.start()
        logger.info(
            "lmcache-redis %s serves %s%s: %s",
            __version__, gateway.url, " with TLS" if config.tls_cert else "", _tiers_text(config),
        )  # fmt: skip
        await stopped.wait()
        deadline_s = time.monotonic() + config.shutdown_deadline_s
        logger.info("stopping: requests have %.1f s to finish", config.shutdown_deadline_s)
        await gateway.stop()
        if not backend.flush(max(_LEAST_FLUSH_S, deadline_s - time.monotonic())):
            logger.warning("not everything that was put is stored")
        logger.info("stopped: %s", _counted(gateway.stats()))
    finally:
        backend.close()
    return 0


def _tiers_text(config: GatewayConfig) -> str:
    tiers = [
        f"memory of {config.memory_bytes / 2**30:.1f} GiB" if config.memory_bytes else "",
        f"{config.disk_size / 2**30:.1f} GiB in {config.disk_path}" if config.disk_path else "",
        "Redis" if config.redis_url else "",
    ]
    return ", ".join(filter(None, tiers))


def _counted(stats: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in stats.items() if value) or "nothing done"
