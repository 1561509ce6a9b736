"""The document that STATUS answers with."""

from __future__ import annotations

import os
from typing import Any

from lmcache_redis.agent.core import Core
from lmcache_redis.agent.peers import Peers
from lmcache_redis.agent.writes import Writes
from lmcache_redis.version import __version__


def status_report(core: Core, peers: Peers, writes: Writes) -> dict[str, Any]:
    """Everything somebody who looks after the agent wants to see, ready for JSON."""
    pool, config = core.pool, core.config
    slot_bytes = core.arena.slot_bytes
    return {
        "version": __version__,
        "pid": os.getpid(),
        "endpoint": config.endpoint,
        "chunk_size_tokens": config.chunk_size_tokens,
        "redis": _redis(core),
        "pool": {
            "slots": pool.slot_count,
            "slot_bytes": slot_bytes,
            "used_slots": pool.used_slots,
            "pinned_slots": pool.pinned_slots,
            "chunks": len(pool),
            "evictions": pool.evictions,
        },
        "queues": {
            "writes": len(writes),
            "write_bytes": writes.queued_bytes,
            "copies": core.copies.backlog,
            "jobs": sum(session.busy for session in core.sessions),
            "disk_writes": core.disk.backlog if core.disk is not None else 0,
        },
        "disk": _disk(core),
        "sessions": len(core.sessions),
        "engines": [
            {
                "engine_id": peer.engine_id,
                "model": peer.hello.model_name,
                "worker_id": peer.hello.worker_id,
                "world_size": peer.hello.world_size,
                "chunk_bytes": peer.registration.form.chunk_bytes,
                "layout": peer.registration.form.fingerprint.hex(),
                "device": peer.registration.device.layout.device,
                # False while its scheduler or another of its ranks is not there yet.
                "ready": peers.complete(peer.engine_id),
            }
            for peer in peers
            if peer.registration is not None
        ],
        "counters": core.metrics.snapshot(),
    }


def _disk(core: Core) -> dict[str, Any] | None:
    """None without a disk tier."""
    disk = core.disk
    if disk is None:
        return None
    return {
        "directory": disk.directory,
        "up": disk.is_up,
        "reason": disk.reason,
        "limit_bytes": disk.limit_bytes,
        "used_bytes": disk.used_bytes,
    }


def _redis(core: Core) -> dict[str, Any]:
    state, stats = core.plane.state, core.plane.stats()
    return {
        "server": core.plane.where,
        "up": state.up,
        "reason": state.reason,
        "bytes_in": stats.bytes_in,
        "bytes_out": stats.bytes_out,
        "reads": {outcome.name.lower(): n for outcome, n in stats.reads.items()},
        "writes": {outcome.name.lower(): n for outcome, n in stats.writes.items()},
        "connects": stats.connects,
        "connections_lost": stats.connections_lost,
        "errors": stats.errors,
    }
