"""Lookups: what a prefix lookup of the cache finds is the session's, and the scheduler is told."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lmcache_redis import messages as m
from lmcache_redis.agent.copyjob import Reply
from lmcache_redis.agent.registration import Registration
from lmcache_redis.agent.sessions import Session
from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.lookup import PrefixLookup


def look_up(
    cache: Cache,
    session: Session,
    ranks: Sequence[Registration],
    hashes: Sequence[bytes],
    reply: Reply,
    deadline_s: float,
) -> None:
    """Begins a lookup, which the session's end cancels."""
    started_s = time.monotonic()

    def answer(found: PrefixLookup) -> None:
        # First of all: what is held is the lookup's still, and is the session's below.
        reply(m.LookupResult(0, found.bound))
        loaded, metrics, tally = found.loaded(), cache.metrics, session.tally
        from_redis, from_disk = loaded.get("Redis", 0), loaded.get("disk", 0)
        metrics.count("lookups")
        metrics.count("lookup_chunks", len(hashes))
        metrics.count("hit_chunks_redis", from_redis)
        metrics.count("hit_chunks_disk", from_disk)
        metrics.count("hit_chunks_pool", found.bound - from_redis - from_disk)
        tally.asked += len(hashes)
        tally.hit += found.bound
        tally.from_redis += from_redis
        tally.from_disk += from_disk
        tally.lookup_ms += (time.monotonic() - started_s) * 1e3
        tally.reasons |= found.reasons
        for (chunk, rank), entry in found.take().items():
            session.hold((ranks[rank].worker_id, hashes[chunk]), entry)
        if session.cancel_lookup == found.cancel:
            session.cancel_lookup = None

    lookup = PrefixLookup(cache, [each.form for each in ranks], hashes, deadline_s, answer)
    session.cancel_lookup = lookup.cancel
    lookup.start()
