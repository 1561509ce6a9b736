# SPDX-License-Identifier: Apache-2.0
"""A cache on the test's own loop, and tiers whose answers the test decides."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from lmcache_redis.cache.arena import Arena
from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.lookup import PrefixLookup
from lmcache_redis.cache.pool import Entry
from lmcache_redis.cache.threads import OwnerLoop
from lmcache_redis.chunks.names import ChunkForm, ChunkNames, opaque_pages
from lmcache_redis.metrics import Metrics
from lmcache_redis.tier_kinds import TierKind
from lmcache_redis.tiers import (
    Backing,
    CallOutcome,
    ChunkIO,
    ExistsResult,
    FramesResult,
    KeysResult,
    LastError,
    PlaneState,
    ReadDone,
    RemoveResult,
    ScanResult,
    Tier,
    TierPlace,
    WriteDone,
)
from tests.cache.auditing import audit
from tests.harness import block_hashes

FORM = ChunkForm.of(ChunkNames(bytes(32)), "test/model", 0, opaque_pages(160), 64)
HASHES = block_hashes("prompt", 5)


class PlayedTier:
    """Records its calls. index: what `lookup` finds; None: no index."""

    def __init__(self, name: str, index: set[bytes] | None = None) -> None:
        self.name = name
        self.index = index
        self.now = time.monotonic
        self.is_up = True
        self.options = SimpleNamespace(seal_keys=None)
        self.is_probed = True
        self.errors: tuple[LastError, ...] = ()
        self.asked: list[tuple[Sequence[bytes], Callable[[ExistsResult], None]]] = []
        self.refreshed: list[
            tuple[Sequence[tuple[bytes, int]], Callable[[ExistsResult], None]]
        ] = []
        self.claimed_s: list[float] = []
        self.unclaimed: list[bytes] = []
        self.scanned: list[tuple[Sequence[bytes], Callable[[ScanResult], None]]] = []
        self.described: list[tuple[bytes, Callable[[FramesResult], None]]] = []
        self.removed: list[tuple[bytes, Callable[[RemoveResult], None]]] = []
        self.removed_as: list[tuple[int, int | None]] = []
        self.cleared: list[tuple[Sequence[bytes], float, Callable[[RemoveResult], None]]] = []
        self.read: list[ChunkIO] = []
        self.written: list[Any] = []
        self.cancelled: list[ChunkIO] = []

    @property
    def state(self) -> PlaneState:
        return PlaneState(self.is_up, self.is_probed, "", self.errors)

    @property
    def place(self) -> TierPlace:
        return TierPlace(self.name)

    def lookup(self, key: bytes) -> bool | None:
        return None if self.index is None else self.is_up and key in self.index

    def scan(
        self, keys: Sequence[bytes], deadline: float, done: Callable[[ScanResult], None]
    ) -> None:
        self.scanned.append((keys, done))

    def exists(
        self, keys: Sequence[bytes], deadline: float, done: Callable[[ExistsResult], None]
    ) -> None:
        assert self.now() < deadline
        self.asked.append((keys, done))

    def refresh(
        self,
        chunks: Sequence[tuple[bytes, int]],
        deadline: float,
        done: Callable[[ExistsResult], None],
        claim_s: float = 0.0,
    ) -> None:
        assert self.now() < deadline
        self.claimed_s.append(claim_s)
        self.refreshed.append((chunks, done))

    def unclaim(self, keys: Sequence[bytes]) -> None:
        self.unclaimed += keys

    def load_all(self, jobs: Sequence[ChunkIO], done: ReadDone) -> None:
        for job in jobs:
            job.check(writable=True)
        self.read += jobs
        self.read_done = done

    def store_all(self, jobs: Sequence[ChunkIO], done: WriteDone) -> None:
        for job in jobs:
            job.check(writable=False)
        self.written += jobs
        self.write_done = done

    def cancel(self, job: ChunkIO) -> None:
        self.cancelled.append(job)

    def describe(
        self, keys: Sequence[bytes], deadline: float, done: Callable[[FramesResult], None]
    ) -> None:
        (key,) = keys
        self.described.append((key, done))

    def keys(self, prefix: bytes, deadline: float, limit: int) -> KeysResult:
        found = [key for key in self.index or () if key.startswith(prefix)]
        return KeysResult(CallOutcome.DONE, found[:limit])

    def remove(
        self,
        key: bytes,
        deadline: float,
        done: Callable[[RemoveResult], None],
        stripe_count: int = 0,
        newest_unix_ms: int | None = None,
    ) -> None:
        self.removed.append((key, done))
        self.removed_as.append((stripe_count, newest_unix_ms))

    def clear(
        self, key_prefixes: Sequence[bytes], deadline: float, done: Callable[[RemoveResult], None]
    ) -> None:
        self.cleared.append((key_prefixes, deadline, done))

    def close(self, deadline_s: float) -> bool:
        return True


def loaded_from(lookup: PrefixLookup) -> dict[str, int]:
    """How many chunks of the prefix come from each tier, by the tier's name."""
    found = [*lookup.parts.levels().values()]
    return {tier.name: found.count(level) for level, tier in enumerate(lookup._cache.tiers)}


def run_until(loop: OwnerLoop, until: Callable[[], object]) -> None:
    """Run a loop, on this thread, until a condition holds."""
    deadline_s = time.monotonic() + 30
    while not until():
        assert time.monotonic() < deadline_s
        loop.run_posted()
        loop.run_due()
        time.sleep(0.001)


class World:
    """A cache of 64 slots of 64 bytes over some tiers."""

    def __init__(
        self,
        tiers: Sequence[tuple[Tier, TierKind]],
        *,
        slots: int = 64,
        write_limit_bytes: int = 1 << 20,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.loop = OwnerLoop(lambda: None, now)
        self.metrics = Metrics()
        backings = [Backing(tier, kind, write_limit_bytes) for tier, kind in tiers]
        self.cache = self.make_cache(backings, slots)

    def make_cache(self, backings: Sequence[Backing], slots: int) -> Cache:
        return Cache(self.loop, Arena(slots * 4096, 64), backings, self.metrics)

    def hold(self, chunk_hash: bytes, form: ChunkForm = FORM) -> Entry:
        """A READY chunk in the host pool, whose bytes its hash decides."""
        entry = self.cache.reserve(form, chunk_hash)
        assert entry is not None
        for view in self.cache.views(entry):
            view[:] = chunk_hash[:1] * len(view)
        assert self.cache.publish(entry)
        return entry

    def counted(self, beginning: str = "") -> dict[str, int]:
        """Counters that are not zero."""
        found = self.metrics.snapshot()
        return {name: n for name, n in found.items() if n and name.startswith(beginning)}

    def listen(self) -> list[tuple[bytes, int | None, bool]]:
        """What the pool tells of changes from now on."""
        told: list[tuple[bytes, int | None, bool]] = []
        self.cache.pool.on_change = lambda *change: told.append(change)
        return told

    def pass_time(self, seconds: float) -> None:
        """For the owner it is so much later from now on, and what is due then has run."""
        now = self.loop.now
        self.loop.now = lambda: now() + seconds
        self.loop.run_due()

    def release(self, held: Iterable[Entry]) -> None:
        for entry in held:
            self.cache.pool.unpin(entry)

    def run(self, until: Callable[[], object]) -> None:
        run_until(self.loop, until)

    def close(self) -> None:
        """Check that no pin is left."""
        assert self.cache.pool.pinned == 0
        audit(self.cache.pool)
