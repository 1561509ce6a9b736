# SPDX-License-Identifier: Apache-2.0
"""A cache of chunks: host pool, loads in flight, tiers and their queues; on the owner's thread."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from lmcache_redis.cache.arena import PoolMemory
from lmcache_redis.cache.clearing import Clears
from lmcache_redis.cache.pacing import TransferRate, WaitQueue
from lmcache_redis.cache.pool import Entry, HostPool
from lmcache_redis.cache.threads import Owner, posting
from lmcache_redis.cache.writebehind import WriteBehind
from lmcache_redis.chunks.names import ChunkForm
from lmcache_redis.metrics import Metrics
from lmcache_redis.tier_kinds import TierKind
from lmcache_redis.tiers import (
    DOUBTFUL,
    Backing,
    ChunkIO,
    ReadOutcome,
)

logger = logging.getLogger(__name__)

_PROBE_DEADLINE_S = 30.0


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Load(ChunkIO):
    """A chunk that is being read into an entry, from tier ``level``.

    missed: the counter of why a read failed.
    """

    entry: Entry
    level: int
    begun_s: float = 0.0
    missed: str | None = None


class PoolFiller(Protocol):
    """What fills the pool before anybody asks: `warming`, where the methods are described."""

    def warm(self, forms: Sequence[ChunkForm]) -> None: ...
    def give_way(self) -> None: ...
    def stop(self) -> None: ...
    def report(self) -> dict[str, Any]: ...


class Cache:
    """See the package.

    backings: the tiers, in the order in which they are asked. idle_limit: see `HostPool`.

    Attributes:
        rates: of the tiers' loads. waiting: lookups that wait for room in the pool. warming: fills
            the pool before anybody asks.
    """

    def __init__(
        self,
        owner: Owner,
        memory: PoolMemory,
        backings: Sequence[Backing],
        metrics: Metrics,
        idle_limit: int | None = None,
    ) -> None:
        self.owner = owner
        self.metrics = metrics
        self._is_closed = False
        self.pool = HostPool(memory, idle_limit)
        self.warming: PoolFiller | None = None
        self.pool.on_evicted = partial(metrics.count, "evictions")
        self.waiting = WaitQueue(owner, self.pool)
        self.tiers = tuple(backing.tier for backing in backings)
        self.rates = tuple(TransferRate() for _ in backings)
        self.backings = tuple(backings)
        self.queues = tuple(
            WriteBehind(backing, level, owner, self.pool, metrics, self.rates[level])
            for level, backing in enumerate(backings)
        )
        self.clears = Clears(owner, self.pool, backings, self.queues, metrics, self._discard)
        self._refresh_every_s = min((each.refresh_every_s for each in backings), default=math.inf)

    @property
    def kinds(self) -> list[TierKind]:
        """The kinds of the tiers."""
        return [backing.kind for backing in self.backings]

    def close(self, deadline_s: float) -> bool:
        """Closes the tiers in ``deadline_s`` seconds. False: one still uses slots, so the memory
        must stay mapped. The owner runs what they post before it stops.
        """
        self._is_closed = True
        end_s = self.owner.now() + deadline_s
        closed = [tier.close(max(0.1, end_s - self.owner.now())) for tier in self.tiers]
        return all(closed)

    # --------------------------------------------------------------- memory

    def reserve(
        self, form: ChunkForm, chunk_hash: bytes, *, is_hidden: bool = False
    ) -> Entry | None:
        """A pinned entry to fill, until `publish` or `abandon`; None if there is no room.

        is_hidden: it is not in the index, see `HostPool.reserve`.
        """
        key = None if is_hidden else form.key(chunk_hash)
        entry = self.pool.reserve(key, self.units(form))
        if entry is not None:
            entry.form, entry.chunk_hash = form, chunk_hash
        return entry

    def units(self, form: ChunkForm) -> int:
        """The units of the pool's memory that a chunk takes."""
        return self.pool.memory.units(form.stripe_sizes)

    def views(self, entry: Entry) -> list[memoryview]:
        """The entry's memory as one view per stripe, each of exactly the stripe's bytes."""
        return self.pool.memory.views(entry.block, entry.form.stripe_sizes)

    def publish(self, entry: Entry) -> bool:
        """A reserved entry is filled, and found from now on. False: it was discarded meanwhile."""
        return self.pool.end(entry, is_filled=True)

    def abandon(self, entry: Entry) -> None:
        """The entry will not be filled: it leaves the pool. Does nothing after `publish`."""
        if entry.watchers is not None:
            self.pool.end(entry, is_filled=False)

    # --------------------------------------------------------------- writes

    def write_behind(self, entry: Entry, delay_s: float = 0.0, levels: int | None = None) -> None:
        """Enqueues a READY entry for each tier, or each of the first ``levels``, that lacks it."""
        for queue in self.queues[:levels]:
            queue.enqueue(entry, delay_s)

    @property
    def refreshed_before_s(self) -> float:
        """Chunks in the pool that the tiers were told to keep before then are to be kept again."""
        return self.owner.now() - self._refresh_every_s

    def keep(self, entries: Sequence[Entry]) -> None:
        """Tells the tiers to keep chunks that the pool has served. What one lacks is enqueued."""
        now_s = self.owner.now()
        for entry in entries:
            entry.refreshed_s = now_s
        for queue in self.queues:
            queue.keep(entries)

    @property
    def backlog(self) -> int:
        """Writes and removals that have not ended."""
        return sum(map(len, self.queues))

    @property
    def failed_removals(self) -> int:
        """Wrong chunks that wait for another attempt to remove them."""
        return sum(len(queue.doubted) for queue in self.queues)

    def say_what_stays(self) -> None:
        """After `close`, and what it has posted: logs the wrong chunks that were not removed."""
        for queue in self.queues:
            queue.doubted.say_what_stays()

    def begin_writes(self) -> None:
        """Starts all writes now, because the owner is stopping."""
        for queue in self.queues:
            queue.begin_all()

    # ---------------------------------------------------------------- loads

    def level_of(self, key: bytes, first: int = 0) -> int | None:
        """The first tier, from ``first`` on, that may have the chunk and does not remove it."""
        for level in range(first, len(self.tiers)):
            may_have_it = self.tiers[level].lookup(key) is not False
            if may_have_it and not self.queues[level].is_removing(key):
                return level
        return None

    def prepare_load(
        self,
        form: ChunkForm,
        chunk_hash: bytes,
        level: int,
        deadline_s: float,
        *,
        is_asked_for: bool = True,
    ) -> Load | None:
        """A job for `begin_loads`, which the entry's watchers await.

        is_asked_for: see `ChunkIO`. None if there is no room, or what the tier has is wrong.
        """
        wrong = self.queues[level].doubted.wrong
        if wrong and form.key(chunk_hash) in wrong:
            return None
        entry = self.reserve(form, chunk_hash)
        if entry is None:
            return None
        frame, views = form.frame(chunk_hash), self.views(entry)
        load = Load(entry.key, frame, views, deadline_s, entry=entry, level=level)
        load.is_asked_for, load.shares = is_asked_for, form.shares
        entry.cancel = lambda: self.tiers[load.level].cancel(load)
        return load

    def begin_loads(self, loads: Sequence[Load]) -> None:
        """Begins prepared loads, all from one tier: a batch costs less per chunk."""
        if not loads:
            return
        level, now_s = loads[0].level, self.owner.now()
        for load in loads:
            load.begun_s = now_s
            self.rates[level].begun(load.nbytes, now_s)
        try:
            self.tiers[level].load_all(loads, posting(self.owner, self._loaded))
        except BaseException:
            # Our own bug. The tier may have taken some of the jobs: their slots stay pinned until
            # it is done.
            for load in loads:
                self._measure(load, arrived=False)
                self.pool.pin(load.entry)
                self.pool.end(load.entry, is_filled=False)
            raise

    def probe(self, form: ChunkForm, chunk_hash: bytes, level: int) -> None:
        """Loads a chunk that no lookup waits for, now and then, to learn a slow tier's rate."""
        now_s, key = self.owner.now(), form.key(chunk_hash)
        if key in self.pool or len(self.waiting) or not self.rates[level].may_probe(now_s):
            return
        load = self.prepare_load(form, chunk_hash, level, now_s + _PROBE_DEADLINE_S)
        if load is not None:
            self.metrics.count("probes")
            self.pool.watch(load.entry, lambda: None)  # it is not abandoned
            self.begin_loads((load,))

    def _loaded(self, load: Load, outcome: ReadOutcome) -> None:
        """A read has ended: the entry becomes READY, is read from the next tier, or is dropped."""
        entry, counters = load.entry, self.backings[load.level].counters
        if entry.watchers is None:
            self.pool.unpin(entry)  # it was taken by a tier that broke
            return
        self._measure(load, arrived=outcome is ReadOutcome.LOADED)
        if outcome is ReadOutcome.LOADED:
            self.pool.seen(load.level, (entry.key,))
            self.metrics.count(counters.loaded_chunks)
            self.metrics.count(counters.loaded_bytes, load.nbytes)
            if self.publish(entry) and load.level and load.is_asked_for:
                self.write_behind(entry, levels=load.level)
            return
        self._missed(load, outcome)
        # What a closed tier did not load is not asked of the next one, which is closed too.
        level = None if self._is_closed else self.level_of(entry.key, load.level + 1)
        if level is None or outcome is ReadOutcome.CANCELLED:
            self.pool.end(entry, is_filled=False)
        else:
            load.level = level
            self.begin_loads((load,))

    def _measure(self, load: Load, *, arrived: bool) -> None:
        now_s, rate, counters = (
            self.owner.now(),
            self.rates[load.level],
            self.backings[load.level].counters,
        )
        rate.ended(load.nbytes, now_s, arrived=arrived)
        if arrived:
            self.metrics.observe(counters.load_seconds, now_s - load.begun_s)
            self.metrics.observe(counters.load_rate, rate.per_second())

    def _missed(self, load: Load, outcome: ReadOutcome) -> None:
        level, key = load.level, load.key
        load.missed = self.backings[level].counters.misses.get(outcome)
        if outcome is ReadOutcome.TIMED_OUT:
            load.missed = self.failure_of(level) or load.missed
        if load.missed is not None:
            self.metrics.count(load.missed)
        if outcome in DOUBTFUL:
            self.queues[level].distrust(key)
        if outcome in DOUBTFUL or outcome is ReadOutcome.MISSING:
            self.pool.seen(level, (key,), there=False)
        logger.debug(
            "chunk %s was not loaded from %s: %s",
            load.frame.chunk_hash.hex()[:16], self.tiers[level].name, outcome.value,
        )  # fmt: skip

    def failure_of(self, level: int) -> str | None:
        """The counter of misses from a tier whose reads fail now: it is not that it is slow."""
        error, counters = self.tiers[level].state.read_error, self.backings[level].counters
        if error is None:
            return None
        return counters.silent if error.is_silence else counters.misses[ReadOutcome.UNAVAILABLE]

    def is_failure(self, counter: str) -> bool:
        """Whether it counts what a tier failed to say or to deliver."""
        unavailable = ReadOutcome.UNAVAILABLE
        counted = (backing.counters for backing in self.backings)
        return any(counter in (each.silent, each.misses[unavailable]) for each in counted)

    def remove(self, key: bytes, stripe_count: int = 0) -> None:
        """A chunk is wrong: it leaves the pool at once, and the tiers in the background.

        stripe_count: 0: not known.
        """
        entry = self.pool.get(key)
        if entry is not None:
            self.pool.cancel(entry)
            self._discard(entry)
        for queue in self.queues:
            queue.doubted.remove(key, stripe_count)

    def _discard(self, entry: Entry) -> None:
        self.pool.discard(entry)
        for queue in self.queues:
            queue.cancel(entry)

    def clear(self, prefixes: Sequence[bytes], *, for_good: bool = False) -> int:
        """See `Clears`."""
        return self.clears.clear(prefixes, for_good=for_good)
