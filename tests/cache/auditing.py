"""The books of a host pool: every slot is free or held once, and every index agrees."""

from __future__ import annotations

from lmcache_redis.cache.pool import EntryState, HostPool


def audit(pool: HostPool) -> None:
    """Check every invariant of a host pool.

    Raises:
        RuntimeError: the books do not balance; says which.
    """
    entries = [*pool._index.values(), *pool._leaving]
    held = [slot for entry in entries for slot in entry.slots] + pool._free
    if sorted(held) != list(range(pool.slot_count)):
        raise RuntimeError("a slot is lost or held twice")
    for key, entry in pool._index.items():
        idle = entry.pins == 0
        if entry.key != key or entry.state is EntryState.DISCARDED or entry.pins < 0:
            raise RuntimeError(f"should not be in the index: {entry!r}")
        if idle and entry.state is not EntryState.READY:
            raise RuntimeError(f"unpinned but not ready: {entry!r}")
        if idle is not (pool._idle.get(key) is entry):
            raise RuntimeError(f"pins and the eviction order disagree: {entry!r}")
    for entry in pool._leaving:
        if entry.state is not EntryState.DISCARDED or entry.pins <= 0:
            raise RuntimeError(f"should not be leaving: {entry!r}")
    if not pool._idle.keys() <= pool._index.keys():
        raise RuntimeError("the eviction order names keys that are not in the index")
    if pool._idle_slots != sum(len(entry.slots) for entry in pool._idle.values()):
        raise RuntimeError("the count of evictable slots is wrong")
