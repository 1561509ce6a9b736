"""The clients that are compared: which there are, how they are set, and what is missing.

Each has a module of its own, imported in its worker alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from redis.connection import parse_url

from lmcache_redis.bench.plane.fetch import find_client
from lmcache_redis.bench.plane.messages import Setting
from lmcache_redis.bench.plane.peers.base import Client

OURS = "ours"
LMCACHE = "lmcache"
REDIS_PY = "redis-py"
GLIDE = "valkey-glide"
CEILING = "ceiling"
PEERS = (LMCACHE, REDIS_PY, GLIDE, CEILING)


def make_client(name: str, url: str, setting: Setting) -> Client:
    """Connects a client. Imports what it needs, which for LMCache's is torch."""
    if name == OURS:
        from lmcache_redis.bench.plane.peers.ours import OurClient

        return OurClient(url, setting)
    if name == LMCACHE:
        from lmcache_redis.bench.plane.peers.lmcache import LMCacheClient

        return LMCacheClient(url, setting)
    if name == REDIS_PY:
        from lmcache_redis.bench.plane.peers.redis_py import RedisPyClient

        return RedisPyClient(url, setting)
    if name == GLIDE:
        from lmcache_redis.bench.plane.peers.glide import GlideClient

        return GlideClient(url, setting)
    from lmcache_redis.bench.plane.peers import ceiling

    return ceiling.MemoryCopy() if setting.how == "memcpy" else ceiling.BareSocket(setting)


def settings_of(peer: str, connections: Sequence[int]) -> list[Setting]:
    """The settings of a peer to choose the best from. connections: how many it may use."""
    if peer == REDIS_PY:
        # One thread: its parsing holds the GIL.
        return [Setting(1, 1, how=how) for how in ("pipelined", "one by one")]
    if peer == CEILING:
        sockets = [Setting(n, n, how="socket") for n in connections if n <= 4]
        return [*sockets, Setting(1, 1, how="memcpy")]
    return [Setting(n, n) for n in connections]


def why_left_out(peer: str, url: str) -> str | None:
    """Why a peer cannot take part, with the command that helps; None where it can."""
    if peer == LMCACHE:
        if find_client() is None:
            return (
                "run `python -m lmcache_redis.bench.plane.fetch`, "
                "which is `pip download --no-deps lmcache` and takes one file from it"
            )
        if importlib.util.find_spec("torch") is None:
            return "its C++ client needs torch: run `pip install torch`"
        options = parse_url(url)
        if not url.startswith("redis://") or options.get("db", 0) != 0:
            return "it speaks TCP without TLS to database 0 alone"
    if peer == REDIS_PY and importlib.util.find_spec("hiredis") is None:
        return "run `pip install hiredis`"
    if peer == GLIDE:
        if importlib.util.find_spec("glide_sync") is None:
            return "run `pip install valkey-glide-sync`"
        if not url.startswith("redis://"):
            return "it is used over TCP without TLS here"
    return None
