"""A tier of a cache, with its counters and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lmcache_redis.tiers import ReadOutcome, Tier, WriteOutcome


@dataclass(frozen=True, slots=True)
class TierCounters:
    """Names of counters, and of the histograms of loads: a chunk's time, and the tier's rate.

    misses, drops: by the outcome of a read or write. queue_full: for a chunk that does not fit the
    write-behind queue. is_remote: chunks that the tier already had and cleared keys are counted
    too; drops and failed clears are logged.
    """

    loaded_chunks: str
    loaded_bytes: str
    load_seconds: str
    load_rate: str
    stored_chunks: str
    stored_bytes: str
    misses: Mapping[ReadOutcome, str]
    drops: Mapping[WriteOutcome, str]
    queue_full: str
    is_remote: bool


REDIS_COUNTERS = TierCounters(
    loaded_chunks="loaded_chunks",
    loaded_bytes="loaded_bytes",
    load_seconds="redis_load_seconds",
    load_rate="redis_load_rate",
    stored_chunks="stored_chunks",
    stored_bytes="stored_bytes",
    misses={
        ReadOutcome.MISSING: "miss_absent",
        ReadOutcome.INCOMPLETE: "miss_incomplete",
        ReadOutcome.TORN: "miss_mixed_stores",
        ReadOutcome.FOREIGN: "miss_foreign",
        ReadOutcome.CORRUPT: "miss_corrupt",
        ReadOutcome.NOT_OPENED: "miss_sealed",
        ReadOutcome.TIMED_OUT: "miss_deadline",
        ReadOutcome.UNAVAILABLE: "miss_redis_error",
        ReadOutcome.CANCELLED: "miss_deadline",
    },
    drops={
        WriteOutcome.FULL: "drop_redis_full",
        WriteOutcome.TIMED_OUT: "drop_redis_error",
        WriteOutcome.UNAVAILABLE: "drop_redis_error",
        WriteOutcome.REJECTED: "drop_redis_error",
        WriteOutcome.NO_ROOM_FOR_SEAL: "drop_redis_error",
        WriteOutcome.CANCELLED: "drop_shutdown",
    },
    queue_full="drop_queue_full",
    is_remote=True,
)

DISK_COUNTERS = TierCounters(
    loaded_chunks="disk_loaded_chunks",
    loaded_bytes="disk_loaded_bytes",
    load_seconds="disk_load_seconds",
    load_rate="disk_load_rate",
    stored_chunks="disk_stored_chunks",
    stored_bytes="disk_stored_bytes",
    misses={each: "miss_disk" for each in ReadOutcome if each is not ReadOutcome.CANCELLED},
    drops=dict.fromkeys(WriteOutcome, "drop_disk"),
    queue_full="drop_disk",
    is_remote=False,
)


@dataclass(frozen=True, slots=True)
class Backing:
    """A tier of a cache.

    write_limit_bytes: of its queue. ask_timeout_s: of one `refresh`. refresh_every_s: how often at
    most the tier is told to keep a chunk that lookups find in the host pool.
    """

    tier: Tier
    counters: TierCounters
    write_limit_bytes: int
    ask_timeout_s: float = 1.0
    refresh_every_s: float = 60.0
