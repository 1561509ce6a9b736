"""One line a minute about what the agent did, from its counters then and now."""

from __future__ import annotations

import logging
from collections.abc import Mapping

Line = tuple[int, str]

# What ordinary work and ordinary eviction never cause.
_SERIOUS = ("miss_corrupt", "miss_foreign", "wire_errors")
_REASONS = ("lookups_timed_out", "sessions_timed_out", "retrieves_failed", "wire_errors")


def summary(before: Mapping[str, int], after: Mapping[str, int]) -> Line | None:
    """A log level and a line; None where nothing happened.

    before, after: two snapshots of the agent's `Metrics`.
    """
    grown = {name: n - before[name] for name, n in after.items() if n > before[name]}
    parts = []
    if "lookups" in grown:
        hits = {place: grown.get(f"hit_chunks_{place}", 0) for place in ("pool", "disk", "redis")}
        parts.append(
            f"{sum(hits.values())} of {grown.get('lookup_chunks', 0)} chunks hit in "
            f"{grown['lookups']} lookups (host pool {hits['pool']}, disk {hits['disk']}, "
            f"Redis {hits['redis']})"
        )
    for counter, done in (
        ("retrieved_chunks", "retrieved"),
        ("gathered_chunks", "gathered"),
        ("stored_chunks", "stored in Redis"),
        ("disk_stored_chunks", "stored on disk"),
    ):
        if counter in grown:
            parts.append(f"{grown[counter]} {done}")
    parts += [
        f"{name} {n}"
        for name, n in grown.items()
        if name.startswith(("miss_", "drop_")) or name in _REASONS
    ]
    if not parts:
        return None
    level = logging.WARNING if any(name in grown for name in _SERIOUS) else logging.INFO
    return level, "since the last such line: " + ", ".join(parts)
