"""Prefix lookups: find the available leading chunks, pin them, then answer.

    find     chunks in the host pool are pinned; each tier in order is asked about the others,
             through its index or by one scan of the rest of the prefix
    load     the chunks found are read into slots in prefix order; a chunk that a tier fails to
             deliver in time is read from the next tier
    answer   when every chunk of the prefix is READY, or at the deadline with the part that is;
             chunks beyond the prefix are unpinned

A chunk counts if every rank's part of it does. The prefix ends before chunk number ``bound``, which
shrinks when a chunk is missing, finds no room, or fails to load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from lmcache_redis.cache.cache import Cache, Load, load_of
from lmcache_redis.cache.inflight import Filled
from lmcache_redis.cache.pool import Entry, EntryState
from lmcache_redis.naming import ChunkForm
from lmcache_redis.resp.outcomes import CallOutcome, ChunkIO, ReadOutcome, ScanResult

_PROBE_POLL_S = 0.01
# Loads begin in batches: the first are in flight while slots are reserved for the next.
_BATCH_STRIPES = 32

Part = tuple[int, int]  # chunk number, rank
Wanted = tuple[Part, bytes]  # and its key


class PrefixLookup:
    """One lookup. Owned by the cache's owner thread.

    forms: one per rank. deadline_s: `time.monotonic()`. done: called once, unless the lookup is
    cancelled. It may call `take` to keep the pins; otherwise they are released after it.

    Attributes:
        bound: the length of the prefix in chunks.
        reasons: why the prefix is not longer, for a log line.
    """

    def __init__(
        self,
        cache: Cache,
        forms: Sequence[ChunkForm],
        hashes: Sequence[bytes],
        deadline_s: float,
        done: Callable[[PrefixLookup], None],
        *,
        first_chunk: int = 0,
        chunk_tokens: int = 0,
    ) -> None:
        self.bound = len(hashes)
        self.reasons: set[str] = set()
        self._cache = cache
        self._forms = forms
        self._hashes = hashes
        self._deadline_s = deadline_s
        self._done = done
        self._held: dict[Part, Entry] = {}
        self._watchers: dict[Part, partial[None]] = {}  # of those held that are being filled
        self._loads: dict[Part, Load] = {}
        self._prepared: list[ChunkIO] = []
        self._scanning = False
        self._ended = False
        self._timer = cache.owner.at(deadline_s, self._expire)

    def start(self) -> None:
        """Pins the chunks in the host pool and looks for the others."""
        missing: list[Wanted] = []
        get = self._cache.pool.get
        stems = [form.stem(len(self._hashes[0])) for form in self._forms]
        for chunk, chunk_hash in enumerate(self._hashes):
            for rank, stem in enumerate(stems):
                key = stem + chunk_hash
                entry = get(key)
                if entry is not None:
                    self._hold((chunk, rank), entry)
                else:
                    missing.append(((chunk, rank), key))
        self._find(missing, 0)
        self._check()

    def cancel(self) -> None:
        """Releases all pins without an answer."""
        if not self._ended:
            self._finish()

    def take(self) -> dict[Part, Entry]:
        """The entries of the prefix, whose pins now belong to the caller."""
        held, self._held = self._held, {}
        return held

    def loaded(self) -> dict[str, int]:
        """How many chunks of the prefix this lookup loaded from each tier, by the tier's name."""
        levels: dict[int, int] = {}
        for (chunk, _), load in self._loads.items():
            if chunk < self.bound:
                levels[chunk] = max(load.level, levels.get(chunk, 0))
        found = [*levels.values()]
        return {tier.name: found.count(level) for level, tier in enumerate(self._cache.tiers)}

    # ----------------------------------------------------------------- find

    def _find(self, wanted: list[Wanted], level: int) -> None:
        """Asks a tier for chunks, through its index or a scan; asks the next one for the rest."""
        if not wanted:
            return
        if level == len(self._cache.tiers):
            self._ends_at(wanted[0][0], "miss_absent")
            return
        lookup = self._cache.tiers[level].lookup
        if lookup(wanted[0][1]) is None:
            self._scanning = True
            self._scan(wanted, level)
            return
        here: list[Wanted] = []
        rest: list[Wanted] = []
        for each in wanted:
            (here if lookup(each[1]) else rest).append(each)
        self._bring(here, level)
        self._find(rest, level + 1)

    def _scan(self, wanted: list[Wanted], level: int) -> None:
        if self._ended:
            return
        tier, owner = self._cache.tiers[level], self._cache.owner
        if not tier.state.probed:
            # The owner has just started, and does not know yet whether the server is up.
            owner.after(_PROBE_POLL_S, partial(self._scan, wanted, level))
            return
        tier.scan(
            [key for _, key in wanted],
            self._deadline_s,
            lambda result: owner.post(partial(self._scanned, wanted, level, result)),
        )

    def _scanned(self, wanted: list[Wanted], level: int, result: ScanResult) -> None:
        if self._ended:
            return
        self._scanning = False
        found, rest = wanted[: result.prefix_length], wanted[result.prefix_length :]
        is_last = level + 1 == len(self._cache.tiers)
        if rest and is_last and result.outcome is CallOutcome.DONE:
            self._ends_at(rest[0][0], "miss_absent")
        elif rest and is_last:
            self.reasons.add(f"{self._cache.tiers[level].name} is not available")
            counter = self._cache.counters[level].misses[ReadOutcome.UNAVAILABLE]
            self._ends_at(rest[0][0], counter)
        self._bring(found, level)
        if not is_last:
            self._find(rest, level + 1)
        self._check()

    def _ends_at(self, part: Part, counter: str) -> None:
        # The prefix may already end earlier, because the host pool had no room.
        self._cache.metrics.count(counter, max(0, self.bound - part[0]))
        self._shrink(part[0])

    # ----------------------------------------------------------------- load

    def _bring(self, found: Sequence[Wanted], level: int) -> None:
        """Begins to load the chunks found, up to the end of the prefix."""
        for part, key in found:
            if part[0] >= self.bound:
                break
            entry = self._cache.pool.get(key)  # another lookup may have begun its load meanwhile
            if entry is None:
                entry = self._load_making_room(part, key, level)
            if entry is None:
                break
            self._hold(part, entry)
        self._begin_prepared()

    def _load_making_room(self, part: Part, key: bytes, level: int) -> Entry | None:
        """Begins a load; if there is no room, drops chunks from the prefix's end to make some."""
        entry = self._load(part, key, level)
        if entry is None:
            self._begin_prepared()  # a load that has not begun could not be cancelled below
        while entry is None and self.bound > part[0]:
            self._cache.metrics.count("miss_pool_full")
            self.reasons.add("the host pool was full")
            self._shrink(self.bound - 1)
            if self.bound > part[0]:
                entry = self._load(part, key, level)
        return entry

    def _load(self, part: Part, key: bytes, level: int) -> Entry | None:
        chunk, rank = part
        form = self._forms[rank]
        job = self._cache.prepare_load(form, key, self._hashes[chunk], level, self._deadline_s)
        if job is None:
            return None
        load = self._loads[part] = load_of(job)
        self._prepared.append(job)
        if len(self._prepared) * form.stripe_count >= _BATCH_STRIPES:
            self._begin_prepared()
        return load.entry

    def _begin_prepared(self) -> None:
        prepared, self._prepared = self._prepared, []
        self._cache.begin_loads(prepared)

    def _hold(self, part: Part, entry: Entry) -> None:
        self._cache.pool.pin(entry)
        self._held[part] = entry
        if entry.state is EntryState.FILLING:
            self._watchers[part] = watcher = partial(self._filled, part)
            self._cache.inflight.watch(entry, watcher)

    def _filled(self, part: Part, filled: Filled) -> None:
        self._watchers.pop(part, None)
        if filled is Filled.STUCK:
            self._bring_instead(part)
        elif filled is Filled.FAILED:
            self._failed(part)
        self._check()

    def _bring_instead(self, part: Part) -> None:
        """A tier that hangs keeps the entry's slots: loads another entry from the next tier."""
        entry = self._held.pop(part)
        self._cache.pool.unpin(entry)
        self._loads.pop(part, None)
        level = self._cache.level_of(entry.key)
        if level is None:
            self._failed(part)
        else:
            self._bring([(part, entry.key)], level)

    # --------------------------------------------------------------- answer

    def _failed(self, part: Part) -> None:
        self.reasons.add("a chunk could not be loaded")
        self._shrink(part[0])

    def _shrink(self, bound: int) -> None:
        """The prefix ends before chunk number ``bound``."""
        self.bound = min(self.bound, bound)
        self._give_back(self.bound)

    def _give_back(self, first: int) -> None:
        """Unpins the chunks from number ``first`` on."""
        for part in [each for each in self._held if each[0] >= first]:
            entry = self._held.pop(part)
            watcher = self._watchers.pop(part, None)
            if watcher is not None:
                self._cache.inflight.unwatch(entry, watcher)
            self._cache.pool.unpin(entry)

    def _expire(self) -> None:
        if self._ended:
            return
        self._cache.metrics.count("lookups_timed_out")
        self.reasons.add("the lookup deadline passed")
        self._scanning = False
        ready = self._held.keys() - self._watchers.keys()
        every = ((c, r) for c in range(self.bound) for r in range(len(self._forms)))
        first = next((part[0] for part in every if part not in ready), self.bound)
        self._cache.metrics.count("miss_deadline", self.bound - first)
        self._shrink(first)
        self._check()

    def _check(self) -> None:
        if not (self._ended or self._scanning or self._watchers):
            # Before `_finish`: if it raises, the pins are still held and `cancel` releases them.
            self._done(self)
            self._finish()

    def _finish(self) -> None:
        self._ended = True
        self._timer.cancel()
        self._give_back(0)
