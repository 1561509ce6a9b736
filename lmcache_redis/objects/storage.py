# SPDX-License-Identifier: Apache-2.0
"""Where a backend keeps chunks: memory, a directory, Redis or Valkey."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real

from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.disk.tier import DiskTier
from lmcache_redis.cache.threads import Owner
from lmcache_redis.chunks.frame import FINGERPRINT_BYTES
from lmcache_redis.chunks.names import ChunkNames
from lmcache_redis.config import COMPRESSIONS, DEFAULT_SLOT_BYTES
from lmcache_redis.errors import ConfigError
from lmcache_redis.metrics import Metrics
from lmcache_redis.objects.cache import HeapMemory, ObjectCache
from lmcache_redis.resp import RedisOptions, RedisPlane
from lmcache_redis.tier_kinds import DISK, REDIS
from lmcache_redis.tiers import Backing

# A write may wait for others; a call that hangs is given up earlier (`DiskTier`).
_DISK_DEADLINE_S = 60.0
_LONGEST_S = 86_400.0
# A backend bounds what waits.
_NO_LIMIT_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class ChunkStorage:
    """Memory, or a tier that is not open yet.

    memory_bytes: payload that stays in memory. open_tier: may raise ConfigError; None for memory.
    deadline_s: of a call, and of the write of a put. stripe_bytes: the largest payload of a stripe
    that is written.
    """

    memory_bytes: int = 0
    open_tier: Callable[[], Backing] | None = None
    names: ChunkNames = field(default_factory=ChunkNames)
    deadline_s: float = 5.0
    stripe_bytes: int = DEFAULT_SLOT_BYTES


def in_memory(limit_bytes: int) -> ChunkStorage:
    """Memory of this process, up to a byte limit, with LRU eviction.

    limit_bytes: the most payload to hold. In addition there may be one block per call in flight,
    and 128 MiB of spare memory. Raises ConfigError unless it is positive.
    """
    if not isinstance(limit_bytes, Integral) or limit_bytes <= 0:
        raise ConfigError(f"limit_bytes is {limit_bytes!r}; it must be positive, and an int")
    return ChunkStorage(limit_bytes)


def on_disk(
    directory: str | os.PathLike[str],
    limit_bytes: int,
    *,
    layout: bytes | None = None,
    key_prefix: bytes = b"",
    threads: int | None = None,
) -> ChunkStorage:
    """Files of a directory, created if needed, that no other tier uses.

    limit_bytes: what the files may take. layout, key_prefix: the fingerprint (32 bytes) of an
    engine's KV cache and the key prefix of its agent, to share the chunks that the agent keeps in
    this directory. threads: that read, and as many that write; by default two and one.

    Raises ConfigError if a value is invalid, or when it is opened: if the directory cannot be used
    or is in use by another tier, of this process or another.
    """

    def open_tier() -> Backing:
        readers, writers = threads or 2, threads or 1
        disk = DiskTier(
            directory, limit_bytes, write_nice=0, read_threads=readers, write_threads=writers
        )
        return Backing(disk, DISK, _NO_LIMIT_BYTES)

    names = _names_of(layout, key_prefix)
    return ChunkStorage(0, open_tier, names, _DISK_DEADLINE_S)


def in_redis(
    redis: RedisOptions | str,
    *,
    deadline_s: float = 5.0,
    slot_bytes: int = DEFAULT_SLOT_BYTES,
    layout: bytes | None = None,
    compress: str | None = None,
) -> ChunkStorage:
    """Redis or Valkey: one server, a Sentinel's master, or a cluster.

    Connects in the background. Every call, and each step of an iterator, ends within `deadline_s`,
    including name resolution and connecting. While the server is down all calls return at once:
    False, None or an empty list. In addition to the plane's commands
    (docs/internals/data-plane.md), the server must allow GETRANGE and SCAN.

    redis: a URL, or options with one. slot_bytes: the largest payload of a stripe that is written;
    stripes of any size are read. layout: the fingerprint (32 bytes) of an engine's KV cache, to
    share the chunks of its agents. Agents can read a chunk put here if its shape, dtype and format
    (MemoryFormat.PAGES) are those of their own chunks, and slot_bytes is theirs. compress: "off" or
    "lossless", instead of the options' own.

    Raises ConfigError if a number is invalid, or when it is opened: if the URL names no server.
    """
    if not isinstance(deadline_s, Real) or not 0.01 <= deadline_s <= _LONGEST_S:
        raise ConfigError(f"deadline_s is {deadline_s!r}; it must be from 0.01 to {_LONGEST_S:g}")
    if not isinstance(redis, (str, RedisOptions)):
        raise ConfigError(f"redis is a URL or RedisOptions, not {type(redis).__name__}")
    if slot_bytes < 64:
        raise ConfigError("slot_bytes is at least 64")
    options = RedisOptions(redis) if isinstance(redis, str) else redis
    if compress is not None:
        if compress not in COMPRESSIONS:
            known = ", ".join(COMPRESSIONS)
            raise ConfigError(f"compress is {compress!r}: choose one of {known}")
        options = replace(options, compress=compress)

    def open_tier() -> Backing:
        plane = RedisPlane(options)
        plane.start()
        return Backing(plane, REDIS, _NO_LIMIT_BYTES)

    names = _names_of(layout, options.key_prefix)
    return ChunkStorage(0, open_tier, names, deadline_s, slot_bytes)


def open_cache(
    storages: Sequence[ChunkStorage], owner: Owner, memory: HeapMemory, write_s: float
) -> ObjectCache:
    """A cache over the storages, the fastest first.

    Raises ConfigError for storages that cannot be opened, or not together.
    """
    if not storages or any(each.memory_bytes for each in storages[1:]):
        raise ConfigError("there is one storage or several; memory, if any, is the first")
    opening = [(each.open_tier, each.names) for each in storages if each.open_tier is not None]
    found = {(names.common, names.fingerprint): names for _, names in opening}
    if len(found) > 1:
        raise ConfigError("the storages of a backend have one layout and one key_prefix")
    with contextlib.ExitStack() as opened:
        backings = []
        for open_tier, _ in opening:
            backings.append(open_tier())
            opened.callback(backings[-1].tier.close, 0.0)
        cache = Cache(owner, memory, backings, Metrics(), storages[0].memory_bytes)
        opened.pop_all()
    stripe_bytes = min(each.stripe_bytes for each in storages)
    return ObjectCache(cache, next(iter(found.values()), ChunkNames()), stripe_bytes, write_s)


def _names_of(layout: bytes | None, key_prefix: bytes) -> ChunkNames:
    """Raises ConfigError if layout is not a fingerprint."""
    if layout is not None and len(layout) != FINGERPRINT_BYTES:
        raise ConfigError(f"layout is a fingerprint of {FINGERPRINT_BYTES} bytes")
    return ChunkNames(layout, key_prefix)
