# SPDX-License-Identifier: Apache-2.0
"""An agent: what it consists of, the document that answers STATUS, and one log line a minute."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lmcache_redis import __version__
from lmcache_redis.agent.copies import CopyThreads
from lmcache_redis.agent.limits import TenantLimits
from lmcache_redis.agent.peers import LayoutTrust, Peers
from lmcache_redis.agent.sessions import Sessions
from lmcache_redis.agent.sharing import sharing
from lmcache_redis.agent.sights import ChunkSights
from lmcache_redis.cache.arena import Arena
from lmcache_redis.cache.blocking import PATIENCE_S
from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.disk.tier import DiskTier
from lmcache_redis.cache.sharing import SharingTier
from lmcache_redis.cache.threads import OwnerLoop
from lmcache_redis.cache.warming import Warming
from lmcache_redis.chunks.frame import parsed_metadata
from lmcache_redis.chunks.names import ChunkForm, ShareKeys
from lmcache_redis.config import AgentConfig
from lmcache_redis.device.pinning import PoolPinning
from lmcache_redis.metrics import Metrics
from lmcache_redis.resp.options import user_of
from lmcache_redis.resp.plane import RedisPlane
from lmcache_redis.tenants import parse_limits
from lmcache_redis.tier_kinds import DISK, HOST, KINDS, REDIS
from lmcache_redis.tiers import Backing, LastError
from lmcache_redis.transport import Wakeup

Line = tuple[int, str]

# Normal operation, eviction included, never increments these.
_SERIOUS = (
    *("miss_corrupt", "miss_foreign", "miss_sealed", "wire_errors"),
    *("differing_chunks", "failed_removals"),
)
# Counters of the log's line, beside misses and drops.
_SAID = {
    *("lookups", "lookup_chunks", "retrieved_chunks", "gathered_chunks", "compared_chunks"),
    *("saved_tokens", "retrieves_failed", "lookups_timed_out", "lookups_failed"),
    *("sessions_timed_out", "differing_chunks", "failed_removals", "wire_errors"),
    *(kind.hits for kind in KINDS),
    *(kind.counter("stored_chunks") for kind in KINDS if kind is not HOST),
}


@dataclass(frozen=True)
class Agent:
    """Owned by the loop thread, which other threads wake through ``wakeup``.

    redis: the plane as a tier of the cache.
    """

    config: AgentConfig
    wakeup: Wakeup
    loop: OwnerLoop
    arena: Arena
    plane: RedisPlane
    redis: SharingTier
    disk: DiskTier | None
    cache: Cache
    copies: CopyThreads
    sessions: Sessions
    peers: Peers
    pinning: PoolPinning
    trust: LayoutTrust

    @staticmethod
    def of(
        config: AgentConfig,
        arena: Arena,
        plane: RedisPlane,
        more: Sequence[Backing] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> Agent:
        """more: tiers between the disk and Redis. now: the loop's clock.

        Raises ``ConfigError`` if the disk tier's directory cannot be used.
        """
        limit_bytes = config.write_queue_limit_bytes
        refresh_s = min(60.0, config.ttl_s / 4) if config.ttl_s else 60.0
        keys = plane.options.seal_keys
        peers = Peers(b"" if keys is None else keys.tenants)
        of_redis = limit_bytes, config.op_timeout_s, refresh_s, peers.tenants
        backings = [*more, Backing(plane, REDIS, *of_redis)]
        disk = None
        if config.disk_path is not None:
            # At most half of a lookup's time is for the disk; the rest is for Redis.
            patience_s = min(PATIENCE_S, config.lookup_deadline_s / 2)
            disk = DiskTier(
                config.disk_path,
                config.disk_size,
                read_patience_s=patience_s,
                in_background=True,
            )
            backings.insert(0, Backing(disk, DISK, limit_bytes))
        tiers = [SharingTier(each.tier, config.key_prefix) for each in backings]
        backings = [replace(each, tier=tier) for each, tier in zip(backings, tiers, strict=True)]
        wakeup = Wakeup()
        loop = OwnerLoop(wakeup.set, now)
        if config.tenant_bytes is not None:
            limits = parse_limits(config.tenant_bytes)
            peers.tenants.limits = TenantLimits(limits, plane, loop, config.ttl_s)
        cache = Cache(loop, arena, backings, Metrics())
        if config.warm_bytes:
            first = ShareKeys(config.key_prefix).first
            cache.warming = Warming(cache, plane.rank, config.warm_bytes, first)
        copies = CopyThreads(config.copy_threads, wakeup.set)
        sights = ChunkSights(config.store_after) if config.store_after > 1 else None
        return Agent(
            config,
            wakeup,
            loop,
            arena,
            plane,
            tiers[-1],
            disk,
            cache,
            copies,
            Sessions(cache.pool, cache.metrics, sights),
            peers,
            PoolPinning(
                arena.base_address,
                arena.capacity,
                arena.slot_stride_bytes,
                lambda: arena.prefaulted_bytes,
                copies.lose,
            ),
            LayoutTrust(),
        )


def status_report(agent: Agent) -> dict[str, Any]:
    config, peers, pool, queues = agent.config, agent.peers, agent.cache.pool, agent.cache.queues
    metrics, plane = agent.cache.metrics, agent.plane.stats()
    metrics.raise_to("redis_connects", plane.connects)
    metrics.raise_to("redis_reconnects", plane.connections_lost)
    metrics.raise_to("redis_errors", plane.errors)
    counters, tiers = metrics.snapshot(), _tiers(agent)
    return {
        "version": __version__,
        "pid": os.getpid(),
        "uptime_s": round(time.monotonic() - metrics.since_s, 3),
        "endpoint": config.endpoint,
        "chunk_size_tokens": config.chunk_size_tokens,
        "write_queue_bytes": queues[-1].schedule.limit_bytes,
        "redis": _redis(agent),
        "pool": {
            "slots": pool.capacity,
            "slot_bytes": agent.arena.slot_bytes,
            "used_slots": pool.used,
            "pinned_slots": pool.pinned,
            "chunks": len(pool),
            "evictions": counters["evictions"],
            "locked_bytes": agent.pinning.pinned_bytes,
            "lock_failure": agent.pinning.failure,
        },
        "queues": {
            "writes": len(queues[-1]),
            "write_bytes": queues[-1].queued_bytes,
            "copies": agent.copies.backlog,
            "jobs": sum(session.busy for session in agent.sessions),
            "disk_writes": tiers["disk"]["writes"] if "disk" in tiers else 0,
            "removals": agent.cache.failed_removals,
        },
        "tiers": tiers,
        "warm": None if agent.cache.warming is None else agent.cache.warming.report(),
        "disk": _disk(agent),
        "loads": _loads(agent),
        "canaries": {"every": config.canary_every, "distrusted": agent.trust.report()},
        "sessions": len(agent.sessions),
        "engines": [
            {
                "engine_id": peer.engine_id,
                "unnamed": peer.hello.unnamed,
                "pid": peer.registration.storages[0].pid,
                "model": peer.hello.model_name,
                "worker_id": peer.hello.worker_id,
                "world_size": peer.hello.world_size,
                "chunk_tokens": peer.registration.chunk_tokens,
                "chunk_bytes": sum(form.chunk_bytes for form in peer.registration.forms),
                "layout": peer.registration.forms[0].fingerprint.hex(),
                "groups": [*map(_group, peer.registration.forms)],
                "device": peer.registration.device.layouts[0].device,
                # False while its scheduler or another of its ranks is missing.
                "ready": peers.complete(peer),
            }
            for peer in peers
            if peer.registration is not None
        ],
        "sharing": sharing(peer for peer in peers if peer.registration is not None),
        "models": {name: asdict(use) for name, use in peers.models.items()},
        "tenants": peers.tenants.report(),
        **_worth(agent.peers, counters),
        "counters": counters,
    }


def _worth(peers: Peers, counters: Mapping[str, float]) -> dict[str, Any]:
    """What the cache is good for since the start: hit rates by tier, and what loads have saved.

    A rate is None before the first lookup. The seconds are None while they are known of none of the
    tokens; below 0, loads have taken longer than computing would have.
    """
    asked, saved = counters["lookup_chunks"], counters["saved_tokens"]
    untimed = counters["saved_untimed_tokens"]
    is_known = not saved or untimed < saved
    return {
        "hit_rate": {
            kind.name: round(counters[kind.hits] / asked, 4) if asked else None for kind in KINDS
        },
        "tokens_saved": saved,
        "tokens_saved_untimed": untimed,
        "prefill_s_saved": round(peers.saved_prefill_s, 3) if is_known else None,
    }


def _group(form: ChunkForm) -> dict[str, Any]:
    return {
        "layout": form.fingerprint.hex(),
        "kv_rank": form.kv_rank,
        "part_bytes": form.chunk_bytes,
        "reach": form.reach.kind,
        "reach_tokens": form.reach.tokens,
        "dtypes": sorted({*parsed_metadata(form.metadata).dtype_names}),
    }


def _disk(agent: Agent) -> dict[str, Any] | None:
    disk = agent.disk
    if disk is None:
        return None
    return {
        "directory": disk.directory,
        "up": disk.state.up,
        "reason": disk.state.reason,
        "limit_bytes": disk.store.limit_bytes,
        "used_bytes": disk.store.used_bytes,
    }


def _tiers(agent: Agent) -> dict[str, Any]:
    """The state of each tier by name, in the order in which they are asked."""
    cache = agent.cache
    return {
        kind.name: {
            **tier.place._asdict(),
            "up": (state := tier.state).up,
            "reason": state.reason,
            "last_error": _last_error(state.errors),
            "writes": len(queue),
            "write_bytes": queue.queued_bytes,
        }
        for kind, tier, queue in zip(cache.kinds, cache.tiers, cache.queues, strict=True)
    }


def _loads(agent: Agent) -> dict[str, Any]:
    """What decides whether a hit is loaded, by tier; and the lookups that wait for room."""
    cache = agent.cache
    tiers = {
        kind.name: {
            "bytes_per_s": round(rate.per_second()),
            "in_flight_bytes": rate.in_flight_bytes,
            # A tier whose operations fail is not slow.
            "is_slow": rate.is_slow and tier.state.read_error is None,
        }
        for kind, tier, rate in zip(cache.kinds, cache.tiers, cache.rates, strict=True)
    }
    engines = {
        peer.engine_id: round(1 / peer.computing.token_s)
        for peer in agent.peers
        if peer.computing.token_s
    }
    return {"tiers": tiers, "waiting": len(cache.waiting), "prefill_tokens_per_s": engines}


def _redis(agent: Agent) -> dict[str, Any]:
    state, stats = agent.plane.state, agent.plane.stats()
    return {
        "server": agent.plane.deployment.url,
        # Empty if only its credential provider knows it.
        "user": user_of(agent.plane.deployment.server.credentials),
        "commands": [each.name for each in agent.plane.commands],
        "key_prefix": agent.config.key_prefix.decode("utf-8", "backslashreplace"),
        "compress": "lossless" if agent.plane.options.packs else "off",
        "up": state.up,
        "reason": state.reason,
        "last_error": _last_error(state.errors),
        "bytes_in": stats.bytes_in,
        "bytes_out": stats.bytes_out,
        "reads": {outcome.name.lower(): n for outcome, n in stats.reads.items()},
        "writes": {outcome.name.lower(): n for outcome, n in stats.writes.items()},
        "connects": stats.connects,
        "connections_lost": stats.connections_lost,
        "errors": stats.errors,
        "refused": dict(stats.refused),
        # Why routers are not told what it evicts and expires; empty also if none wants to know.
        "removals_untold": agent.plane.removals.why_silent,
    }


def _last_error(errors: Sequence[LastError]) -> dict[str, Any] | None:
    """None while operations work."""
    if not errors:
        return None
    error = errors[0]
    seconds_ago = round(time.monotonic() - error.at_s, 3)
    return {"text": error.text, "count": error.count, "seconds_ago": seconds_ago}


def summary(before: Mapping[str, float], after: Mapping[str, float]) -> Line | None:
    """A log level and a line; None if nothing happened.

    before, after: two snapshots of the agent's `Metrics`.
    """
    grown = {
        name: n - before[name]
        for name, n in after.items()
        if n > before[name] and (name in _SAID or name.startswith(("miss_", "drop_")))
    }
    if not grown:
        return None
    level = logging.WARNING if any(name in grown for name in _SERIOUS) else logging.INFO
    counted = ", ".join(f"{name} {n}" for name, n in grown.items())
    return level, f"since the last such line: {counted}"
