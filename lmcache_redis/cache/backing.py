"""A tier of a cache: its counters and limits, and what keeps in it what the host pool serves.

Requests for a chunk in the host pool do not reach the tiers, which would evict or expire exactly
the hottest chunks. So after a lookup the tiers are told to keep its chunks, each at most once in
`refresh_every_s`. What a tier lacks is written again; but a tier may be too small for all that the
host pools serve, so a chunk that it lacks twice in a row is looked at later each time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice

from lmcache_redis.cache.pool import Entry, EntryState
from lmcache_redis.cache.threads import Owner
from lmcache_redis.chunks.names import ChunkForm
from lmcache_redis.tiers import CallOutcome, ExistsResult, ReadOutcome, Tier, WriteOutcome

_BATCH_CHUNKS = 256
_MOST_WAITING = 16384
# A chunk is looked at again after at most 2 to this power times `refresh_every_s`.
_MOST_LOSSES = 6
_MOST_COUNTED = 65536

# Reads that found something else than the chunk, which a tier may take for it.
DOUBTFUL = frozenset(
    {
        ReadOutcome.INCOMPLETE,
        ReadOutcome.TORN,
        ReadOutcome.CORRUPT,
        ReadOutcome.FOREIGN,
        ReadOutcome.NOT_OPENED,
    }
)

# A chunk in the host pool, with what it takes to write it: its form, its hash, its entry.
PooledChunk = tuple[ChunkForm, bytes, Entry]


@dataclass(frozen=True, slots=True)
class TierCounters:
    """Names of counters, and of the histograms of loads: a chunk's time, and the tier's rate.

    misses, drops: by the outcome of a read or write. is_remote: chunks that the tier already had
    and cleared keys are counted too; drops and failed clears are logged.
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
    "loaded_chunks",
    "loaded_bytes",
    "redis_load_seconds",
    "redis_load_rate",
    "stored_chunks",
    "stored_bytes",
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
    drops=dict.fromkeys(WriteOutcome, "drop_redis_error")
    | {WriteOutcome.FULL: "drop_redis_full", WriteOutcome.CANCELLED: "drop_shutdown"},
    queue_full="drop_queue_full",
    is_remote=True,
)

DISK_COUNTERS = TierCounters(
    "disk_loaded_chunks",
    "disk_loaded_bytes",
    "disk_load_seconds",
    "disk_load_rate",
    "disk_stored_chunks",
    "disk_stored_bytes",
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


class Refresher:
    """One tier's. Owned by the owner's thread. lacked: told of READY chunks that the tier lacks."""

    def __init__(
        self, backing: Backing, owner: Owner, lacked: Callable[[PooledChunk], None]
    ) -> None:
        self._backing = backing
        self._owner = owner
        self._lacked = lacked
        self._waiting: deque[PooledChunk] = deque()
        self._is_asking = False
        self._losses: dict[bytes, int] = {}  # of a chunk, since the tier last had it

    def add(self, chunks: Iterable[PooledChunk]) -> None:
        """Chunks of a lookup. Pins nothing: what is evicted meanwhile is not written again."""
        if self._backing.tier.state.up:
            self._waiting.extend(islice(chunks, _MOST_WAITING - len(self._waiting)))
            self._ask()

    def _ask(self) -> None:
        if self._is_asking or not self._waiting:
            return
        count = min(_BATCH_CHUNKS, len(self._waiting))
        chunks = [self._waiting.popleft() for _ in range(count)]
        self._backing.tier.refresh(
            [(entry.key, form.stripe_count) for form, _, entry in chunks],
            time.monotonic() + self._backing.ask_timeout_s,
            lambda result: self._owner.post(partial(self._asked, chunks, result)),
        )
        self._is_asking = True

    def _asked(self, chunks: list[PooledChunk], result: ExistsResult) -> None:
        self._is_asking = False
        if result.outcome is CallOutcome.DONE:
            for chunk, present in zip(chunks, result.present, strict=True):
                entry = chunk[-1]
                if present:
                    self._losses.pop(entry.key, None)
                elif entry.state is EntryState.READY:
                    self._postpone(entry)
                    self._lacked(chunk)
        self._ask()

    def _postpone(self, entry: Entry) -> None:
        """The first time, the entry is looked at again when any other is."""
        losses = min(self._losses.pop(entry.key, 0) + 1, _MOST_LOSSES)
        self._losses[entry.key] = losses
        if len(self._losses) > _MOST_COUNTED:
            del self._losses[next(iter(self._losses))]
        wait_s = (2**losses - 2) * self._backing.refresh_every_s
        entry.refreshed_s = max(entry.refreshed_s, time.monotonic() + wait_s)
