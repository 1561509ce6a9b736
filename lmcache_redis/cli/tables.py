"""The tables of `lmcache-redis status`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from lmcache_redis.metrics import COUNTERS


def status_tables(report: Mapping[str, Any]) -> Iterator[Table]:
    """The agent, its engines, and every counter that is not zero."""
    pool, redis, queues = report["pool"], report["redis"], report["queues"]
    agent = Table(title=f"agent {report['pid']} ({report['version']})", show_header=False)
    used = pool["used_slots"] * pool["slot_bytes"] / 2**30
    whole = pool["slots"] * pool["slot_bytes"] / 2**30
    agent.add_row("endpoint", report["endpoint"])
    agent.add_row("Redis", f"{redis['server']}: {'up' if redis['up'] else redis['reason']}")
    agent.add_row("host pool", f"{used:.2f} of {whole:.2f} GiB, {pool['chunks']} chunks")
    agent.add_row("pinned", f"{pool['pinned_slots'] * pool['slot_bytes'] / 2**30:.2f} GiB")
    agent.add_row("to be written", f"{queues['writes']} chunks")
    for name, tier in report["loads"]["tiers"].items():
        agent.add_row(f"loads from {name}", _rate(tier))
    agent.add_row("lookups that wait", f"{report['loads']['waiting']} for room in the host pool")
    agent.add_row("sessions", str(report["sessions"]))
    agent.add_row("chunk size", f"{report['chunk_size_tokens']} tokens")
    yield agent
    engines = Table("model", "worker", "device", "chunk", "layout", "state", title="engines")
    for engine in report["engines"]:
        engines.add_row(
            engine["model"],
            f"{engine['worker_id']} of {engine['world_size']}",
            engine["device"],
            f"{engine['chunk_tokens']} tokens, {engine['chunk_bytes'] / 2**20:.1f} MiB",
            engine["layout"][:16],
            "ready" if engine["ready"] else "waits for its scheduler or other ranks",
        )
    yield engines
    counters = Table("counter", "value", "what it counts", title="counters")
    for name, value in report["counters"].items():
        if value:
            counters.add_row(name, f"{value:,}", COUNTERS.get(name, ""))
    yield counters


def _rate(tier: Mapping[str, Any]) -> str:
    rate = tier["bytes_per_s"]
    text = f"{rate / 1e6:,.0f} MB/s" if rate else "not measured yet"
    return f"{text}: slower than computing" if tier["is_slow"] else text
