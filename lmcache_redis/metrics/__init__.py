"""The agent's counters and histograms: closed sets of names, each with a description.

A counter only grows, from the start of the process. The sets and their order are fixed, so that a
misspelled name raises. STATUS and the log lines report `Metrics.snapshot()`; `/metrics` reports
histograms too.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

COUNTERS: Final = MappingProxyType(
    {
        # engines and sessions
        "registrations": "KV caches registered by engine workers",
        "unregistrations": "KV caches unregistered, by their engine or because it went away",
        "heartbeat_losses": "engine workers dropped: silent for too long, or ended",
        "sessions_opened": "sessions (one a request) opened by a lookup",
        "sessions_ended": "sessions ended by their engine",
        "sessions_timed_out": "sessions that the agent ended because their engine did not",
        "wire_errors": "messages refused because they broke the protocol",
        # lookups
        "lookups": "lookups answered",
        "lookup_chunks": "chunks asked for by lookups",
        "hit_chunks_pool": "chunks found in the host pool",
        "hit_chunks_redis": "chunks found in Redis and loaded into the host pool",
        "hit_chunks_disk": "chunks found on disk and loaded into the host pool",
        "lookups_cut": "lookups answered with fewer chunks than found: loading took too long",
        "lookups_timed_out": "lookups answered with fewer chunks than found: the deadline passed",
        # misses by cause
        "miss_absent": "chunks neither in the host pool nor in Redis",
        "miss_incomplete": "chunks with missing stripes (evicted, or only partly written)",
        "miss_mixed_stores": "chunks whose stripes came from two different stores",
        "miss_corrupt": "chunks with a wrong checksum, a damaged header or a wrong size",
        "miss_foreign": "chunks of another layout, another key or an unknown format version",
        "miss_sealed": "chunks sealed with a key that is not in the key file, or not sealed",
        "miss_redis_error": "chunks not loaded because Redis failed or could not be reached",
        "miss_deadline": "chunks not loaded before the lookup deadline",
        "miss_pool_full": "chunks not loaded because every slot of the host pool was in use",
        "miss_slower": "chunks not loaded because computing them was expected to be faster",
        "probes": "chunks loaded to learn the rate of a tier",
        # Redis to host pool
        "loaded_chunks": "chunks read from Redis into the host pool",
        "loaded_bytes": "payload bytes of the chunks read from Redis",
        "warmed_chunks": "chunks loaded before anyone asked for them, by `lmcache-redis warm`",
        # disk to host pool, and back
        "disk_loaded_chunks": "chunks read from disk into the host pool",
        "disk_loaded_bytes": "payload bytes of the chunks read from disk",
        "disk_stored_chunks": "chunks written to disk",
        "disk_stored_bytes": "payload bytes of the chunks written to disk",
        "miss_disk": "chunks whose file could not be loaded; Redis was asked instead",
        "drop_disk": "chunks not written to disk: its queue was full, or the disk failed",
        # host pool to engine
        "retrieves": "retrieve jobs finished",
        "retrieves_failed": "retrieve jobs with at least one chunk not delivered",
        "retrieved_chunks": "chunks scattered into blocks of an engine",
        "retrieved_bytes": "bytes scattered into blocks of an engine",
        # engine to host pool
        "stores": "store jobs finished",
        "gathered_chunks": "chunks gathered from blocks of an engine",
        "gathered_bytes": "bytes gathered from blocks of an engine",
        # canaries: chunks that an engine computed although they were cached
        "compared_chunks": "parts of chunks compared with what an engine has computed",
        "differing_chunks": "parts of chunks that were not what an engine has computed",
        "uncompared_chunks": "parts of canaries not compared: no longer in the host pool, not read "
        "in time, or without numbers",
        # host pool to Redis
        "stored_chunks": "chunks written to Redis completely",
        "stored_bytes": "payload bytes of the chunks written to Redis",
        "skipped_chunks": "chunks not stored again because the host pool or Redis had them",
        # drops by cause
        "drop_queue_full": "chunks not written because the write queue was full",
        "drop_pool_full": "chunks not stored because every slot of the host pool was in use",
        "drop_redis_error": "chunks not written because Redis failed or could not be reached",
        "drop_redis_full": "chunks not written because Redis was at its memory limit",
        "drop_lease": "chunks not stored because their blocks were read too late",
        "drop_device_error": "chunks not stored because an engine's blocks could not be read",
        "drop_shutdown": "chunks not stored because the agent was shut down",
        # host pool and connections
        "evictions": "chunks evicted from the host pool to make room",
        "clears": "CLEAR requests carried out in the host pool",
        "clears_failed": "CLEAR requests that failed in Redis",
        "cleared_keys": "keys removed from Redis by CLEAR requests",
        "redis_connects": "connections to Redis made",
        "redis_reconnects": "connections to Redis lost; they are made again",
        "redis_errors": "failed Redis operations of any kind",
    }
)


_SECONDS: Final = tuple(n * 10.0**power for power in range(-4, 2) for n in (1, 2.5, 5))
_BYTES_PER_SECOND: Final = tuple(n * 10.0**power for power in range(6, 11) for n in (1, 2.5, 5))
_DISTANCES: Final = tuple(n * 10.0**power for power in range(-4, 1) for n in (1, 2.5, 5))
_CHUNKS: Final = tuple(float(1 << power) for power in range(13))

# The upper bounds of the buckets of each histogram; the last bucket has none.
HISTOGRAMS: Final = MappingProxyType(
    {
        "lookup_seconds": _SECONDS,
        "hit_chunks": _CHUNKS,
        "redis_load_seconds": _SECONDS,
        "disk_load_seconds": _SECONDS,
        "redis_load_rate": _BYTES_PER_SECOND,
        "disk_load_rate": _BYTES_PER_SECOND,
        "store_seconds": _SECONDS,
        "retrieve_seconds": _SECONDS,
        "canary_distance": _DISTANCES,
    }
)


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a histogram has seen. counts: of each bucket alone, the one without a bound last."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Metrics:
    """Counters and histograms of one process. Every method may be called from any thread."""

    __slots__ = ("_buckets", "_lock", "_totals", "_values")

    def __init__(self) -> None:
        self._values = dict.fromkeys(COUNTERS, 0)
        self._buckets = {name: [0] * (len(each) + 1) for name, each in HISTOGRAMS.items()}
        self._totals = dict.fromkeys(HISTOGRAMS, 0.0)
        self._lock = threading.Lock()

    def observe(self, name: str, value: float) -> None:
        """Adds a value to the histogram `name`, which must be one of HISTOGRAMS."""
        bucket = bisect_left(HISTOGRAMS[name], value)
        with self._lock:
            self._buckets[name][bucket] += 1
            self._totals[name] += value

    def distributions(self) -> dict[str, Distribution]:
        """Every histogram at one moment, in the order of HISTOGRAMS."""
        with self._lock:
            return {
                name: Distribution(bounds, tuple(self._buckets[name]), self._totals[name])
                for name, bounds in HISTOGRAMS.items()
            }

    def count(self, name: str, n: int = 1) -> None:
        """Adds `n` (zero or more) to the counter `name`, which must be one of COUNTERS."""
        if n < 0:
            raise ValueError(f"counter {name} only grows, it cannot take {n}")
        with self._lock:
            self._values[name] += n

    def snapshot(self) -> dict[str, int]:
        """Every counter at one moment, in the order of COUNTERS."""
        with self._lock:
            return dict(self._values)
