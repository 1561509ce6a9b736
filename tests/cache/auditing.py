# SPDX-License-Identifier: Apache-2.0
"""The invariants of a host pool: all memory is free or held once, and all indexes agree."""

from __future__ import annotations

from lmcache_redis.cache.arena import Arena
from lmcache_redis.cache.pool import EntryState, HostPool

PAGE = 4096


def slots(count: int) -> Arena:
    """An arena of `count` slots."""
    return Arena(count * PAGE, 64)


def audit(pool: HostPool) -> None:
    """Check every invariant of a host pool.

    Raises:
        RuntimeError: names the invariant that is broken.
    """
    entries = [*pool._index.values(), *pool._outside]
    if isinstance(pool.memory, Arena):
        held = [slot for entry in entries for slot in entry.block] + pool.memory._free
        if sorted(held) != list(range(pool.capacity)):
            raise RuntimeError("a slot is lost or held twice")
    if pool.used != sum(entry.units for entry in entries):
        raise RuntimeError("memory is lost or held twice")
    for key, entry in pool._index.items():
        idle = entry.pins == 0
        if entry.key != key or entry.state is EntryState.DISCARDED or entry.pins < 0:
            raise RuntimeError(f"should not be in the index: {entry!r}")
        if idle and entry.state is not EntryState.READY:
            raise RuntimeError(f"unpinned but not ready: {entry!r}")
        if idle is not (pool._idle.get(key) is entry):
            raise RuntimeError(f"pins and the eviction order disagree: {entry!r}")
    for entry in pool._outside:
        is_reserved = entry.state is EntryState.FILLING and not entry.key
        if not (is_reserved or entry.state is EntryState.DISCARDED) or entry.pins <= 0:
            raise RuntimeError(f"should not be outside of the index: {entry!r}")
    if not pool._idle.keys() <= pool._index.keys():
        raise RuntimeError("the eviction order names keys that are not in the index")
    if pool.idle != sum(entry.units for entry in pool._idle.values()):
        raise RuntimeError("the count of evictable units is wrong")
    if pool.idle > pool.idle_limit:
        raise RuntimeError("more is kept than may stay")
