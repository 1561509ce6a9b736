"""Families that agent and gateway have in common."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

from lmcache_redis.metrics import Distribution
from lmcache_redis.metrics.exporter import Family

# Of each family, the counter for each value of its label.
ByLabel: TypeAlias = Mapping[Family, Mapping[str, str]]

TIER_FAMILIES: Final[ByLabel] = MappingProxyType(
    {
        Family("loaded_chunks", "counter", "chunks read into memory", ("tier",)): {
            "disk": "disk_loaded_chunks",
            "redis": "loaded_chunks",
        },
        Family("loaded_bytes", "counter", "payload bytes read into memory", ("tier",)): {
            "disk": "disk_loaded_bytes",
            "redis": "loaded_bytes",
        },
        Family("stored_chunks", "counter", "chunks written completely", ("tier",)): {
            "disk": "disk_stored_chunks",
            "redis": "stored_chunks",
        },
        Family("stored_bytes", "counter", "payload bytes of chunks written", ("tier",)): {
            "disk": "disk_stored_bytes",
            "redis": "stored_bytes",
        },
    }
)


def labelled(
    families: ByLabel, counters: Mapping[str, int]
) -> dict[str, Mapping[tuple[str, ...], float | Distribution]]:
    """The values of families of counters."""
    return {
        family.name: {(label,): counters[name] for label, name in labels.items()}
        for family, labels in families.items()
    }
