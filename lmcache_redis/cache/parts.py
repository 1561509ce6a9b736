"""The parts of one lookup: which are held, which are missing, and where those are.

`needs` says which parts a prefix needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from lmcache_redis.cache.cache import Cache, Load, load_of
from lmcache_redis.cache.needs import Part, PrefixNeeds
from lmcache_redis.cache.pacing import Computing
from lmcache_redis.cache.pool import Entry, EntryState, Filled
from lmcache_redis.cache.refreshing import PooledChunk
from lmcache_redis.chunks.names import ChunkForm, PartNames
from lmcache_redis.tiers import ChunkIO

# Loads begin in batches: the first are in flight while slots are reserved for the next.
_BATCH_STRIPES = 32

# Of prompts with more chunks, not every prefix is compared.
_MOST_PREFIXES = 512
# Then others of the owner's actions have a turn: a lookup may have tens of thousands of parts.
_SOME_PARTS = 512

Wanted = tuple[Part, bytes]  # and its key


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """What a lookup looks for.

    forms: one per row of this node. deadline_s: `time.monotonic()`. first_chunk: the number in the
    prompt of the first chunk. chunk_tokens: the tokens of a chunk; may be 0 if every row needs all
    chunks. remote: further rows, whose parts must exist in the last tier and are not loaded.
    computing: of the engine; None: everything is worth loading. urgent: waits for room before those
    that are not: the engine holds blocks for its chunks.
    """

    forms: Sequence[ChunkForm]
    hashes: Sequence[bytes]
    deadline_s: float
    first_chunk: int = 0
    chunk_tokens: int = 0
    remote: Sequence[PartNames] = ()
    computing: Computing | None = None
    urgent: bool = False


class PartState:
    """One part of a lookup. The defaults are those of a part that is missing.

    Attributes:
        is_needed: by the prefix. Such a part is held or missing.
        is_later: it is missing, and loaded when the engine retrieves it.
        entry: it is held: the entry has a pin for it.
        watcher: of an entry that is being filled.
        level: a tier that has it; of parts that were not in the host pool, and of remote ones.
        load: by this lookup.
    """

    is_needed = True
    is_later = False
    entry: Entry | None = None
    watcher: Callable[[Filled], None] | None = None
    level: int | None = None
    load: Load | None = None


Awaited = tuple[Part, PartState, int]  # and the number of the tier


class LookupParts:
    """Pins, watches and loads the parts of one lookup. Owned by the cache's owner thread.

    Rows with a form are of this node. The other ones are remote: their parts are looked for, and
    neither held nor loaded. filled: told how the filling of a held part has ended.

    Attributes:
        needs: what prefixes need.
        length: of the prefix whose parts are needed, in chunks.
        filling: the number of held parts that are being filled.
        to_load: parts whose loads are to be begun.
        has_loads: whether any load has begun.
    """

    def __init__(
        self, cache: Cache, request: LookupRequest, filled: Callable[[Part, Filled], None]
    ) -> None:
        rows = [*request.forms, *request.remote]
        reaches = [row.reach for row in rows]
        self.needs = PrefixNeeds(reaches, request.first_chunk, request.chunk_tokens)
        self.length = len(request.hashes)
        self.filling = 0
        self.to_load: list[Awaited] = []
        self.has_loads = False
        self._states: dict[Part, PartState] = {}
        self._is_taken = False
        self._cache = cache
        self._request = request
        self._stems = [row.stem(len(request.hashes[0])) for row in rows]
        self._units = [*map(cache.units, request.forms), *(0 for _ in request.remote)]
        self._on_filled = filled

    def key(self, part: Part) -> bytes:
        """The part's name in the pool and in tiers."""
        chunk, row = part
        return self._stems[row] + self._request.hashes[chunk]

    def is_remote(self, part: Part) -> bool:
        """Whether another node loads the part."""
        return part[1] >= len(self._request.forms)

    def missing(self) -> list[Part]:
        """The parts that the prefix needs and that are not held, in order."""
        states = self._states.items()
        found = [part for part, state in states if state.is_needed and state.entry is None]
        return sorted(found)

    def take(self) -> dict[Part, Entry]:
        """The entries held, whose pins now belong to the caller."""
        self._is_taken = True
        return {part: s.entry for part, s in self._states.items() if s.entry is not None}

    def pooled(self, before_s: float) -> list[PooledChunk]:
        """What was taken from the host pool and the tiers were last told to keep before then.

        Of a prefix the end is used least: if the tiers were told of it since, so were they of all.
        """
        forms, hashes = self._request.forms, self._request.hashes
        ends = [self._states.get((self.length - 1, row)) for row in range(len(forms))]
        if all(each and each.entry and each.entry.refreshed_s > before_s for each in ends):
            return []
        return [
            PooledChunk(forms[row], hashes[chunk], state.entry)
            for (chunk, row), state in self._states.items()
            if state.entry is not None and state.load is None
            if state.entry.refreshed_s <= before_s
        ]

    def levels(self) -> dict[int, int]:
        """The tiers of the chunks that were not in the host pool; of several of one, the last."""
        levels: dict[int, int] = {}
        for (chunk, _), state in self._states.items():
            if chunk < self.length and (state.load is not None or state.is_later):
                level = state.load.level if state.load is not None else state.level or 0
                levels[chunk] = max(level, levels.get(chunk, 0))
        return levels

    # ------------------------------------------------------------- the pool

    def hold_first(self) -> list[Wanted]:
        """Holds what the pool has of the rows that need all chunks; returns the rest in order."""
        wanted: list[Wanted] = []
        states, pool, filling = self._states, self._cache.pool, EntryState.FILLING
        get, pin = pool.get, pool.pin
        local, bounded = len(self._request.forms), self.needs.bounded
        rows = [(row, stem) for row, stem in enumerate(self._stems) if row not in bounded]
        for chunk, chunk_hash in enumerate(self._request.hashes):
            for row, stem in rows:
                part, key = (chunk, row), stem + chunk_hash
                states[part] = state = PartState()
                entry = get(key) if row < local else None
                if entry is None:
                    wanted.append((part, key))
                elif entry.state is filling or not entry.wanted:
                    self._hold(part, state, entry)
                else:
                    pin(entry)
                    state.entry = entry
        if bounded:
            self._need(self.needs.parts(self.length))
        return wanted

    def hold_pooled(self, missing: Iterable[Part]) -> None:
        """Holds those of the missing parts that the pool has."""
        get, key = self._cache.pool.get, self.key
        for part in missing:
            entry = None if self.is_remote(part) else get(key(part))
            if entry is not None:
                self._states[part].is_later = False
                self._hold(part, self._states[part], entry)

    def shrink(self, length: int) -> None:
        """Releases what a shorter prefix no longer needs; holds what it needs and the pool has."""
        if length == self.length:
            return
        dropped, added = self.needs.between(self.length, length)
        self.length = length
        for part in dropped:
            state = self._states[part]
            state.is_needed = state.is_later = False
            if state.entry is not None:
                self._release(state, state.entry)
        self._need(added)
        self.hold_pooled(added)

    def release_all(self) -> bool:
        """Releases what is held, which is missing then; returns whether anything was.

        A load without watchers is cancelled.
        """
        if self._is_taken:
            return False
        held = [(state, state.entry) for state in self._states.values()]
        for state, entry in held:
            if entry is not None:
                self._release(state, entry)
        return any(entry is not None for _, entry in held)

    def _need(self, parts: Iterable[Part]) -> None:
        for part in parts:
            self._state(part).is_needed = True

    def _state(self, part: Part) -> PartState:
        state = self._states.get(part)
        if state is None:
            state = self._states[part] = PartState()
            state.is_needed = False
        return state

    def _hold(self, part: Part, state: PartState, entry: Entry) -> None:
        self._cache.pool.hold(entry)
        state.entry = entry
        if entry.state is EntryState.FILLING:
            self.filling += 1
            state.watcher = watcher = partial(self._filled, part)
            self._cache.pool.watch(entry, watcher)

    def _release(self, state: PartState, entry: Entry) -> None:
        watcher, state.watcher, state.entry = state.watcher, None, None
        if watcher is not None:
            self.filling -= 1
            self._cache.pool.unwatch(entry, watcher)
        self._cache.pool.unpin(entry)

    def _filled(self, part: Part, filled: Filled) -> None:
        self._states[part].watcher = None
        self.filling -= 1
        self._on_filled(part, filled)

    def units(self) -> tuple[int, int, int]:
        """The units of memory of the parts to be loaded now, of those held, and of a chunk."""
        missing = held = 0
        for (_, row), state in self._states.items():
            if state.entry is not None:
                held += state.entry.units
            elif state.is_needed and not state.is_later:
                missing += self._units[row]
        return missing, held, sum(self._units)

    def defer(self, units: int) -> None:
        """Loads the last of the missing parts later, so that the others take fewer units now."""
        for part in reversed(self.missing()):
            state = self._states[part]
            if units > 0 and not state.is_later and not self.is_remote(part):
                state.is_later = True
                units -= self._units[part[1]]

    def is_ready(self, part: Part) -> bool:
        """Whether the part is READY in the pool; of a remote one, whether it was found."""
        state = self._states.get(part)
        if state is not None and state.entry is not None:
            return state.watcher is None
        if self.is_remote(part):
            return state is not None and state.level is not None
        entry = self._cache.pool.peek(self.key(part))
        return entry is not None and entry.state is EntryState.READY

    # ------------------------------------------------------------ the tiers

    def look_up(self, wanted: Sequence[Wanted], level: int) -> list[Wanted]:
        """Notes those that are in the index of a tier; returns the others."""
        lookup, is_last = self._cache.tiers[level].lookup, level + 1 == len(self._cache.tiers)
        here: list[Wanted] = []
        rest: list[Wanted] = []
        for each in wanted:
            is_here = lookup(each[1]) and (is_last or not self.is_remote(each[0]))
            (here if is_here else rest).append(each)
        self.found(here, level)
        return rest

    def found(self, here: Iterable[Wanted], level: int) -> None:
        """A tier has these parts."""
        states = self._states
        for part, _ in here:
            states[part].level = level
        self._cache.pool.seen(level, [key for _, key in here])

    def absent(self, wanted: Sequence[Wanted], level: int) -> None:
        """A tier does not have these parts."""
        self._cache.pool.seen(level, [key for _, key in wanted], there=False)

    def doubt(self, rest: Sequence[Wanted], level: int) -> None:
        """A scan of a tier has ended before these parts: what was known of them is old.

        So is what was known of the parts in the host pool behind them, which were not asked for.
        """
        first = rest[0][0][0]
        keys = [key for _, key in rest]
        for part, state in self._states.items():
            if state.entry is not None and part[0] >= first:
                keys.append(state.entry.key)
        self._cache.pool.forget(level, keys)

    def unknown(self, parts: Iterable[Part]) -> list[Part]:
        """Those that are neither in memory nor known to be in a tier."""
        states, is_found = self._states, self.is_found
        return [part for part in parts if states[part].level is None and not is_found(part)]

    def is_found(self, part: Part) -> bool:
        """Whether the part is in memory, or a tier is known to have it."""
        state = self._state(part)
        if state.entry is not None or state.level is not None:
            return True
        if self.is_remote(part):
            return False
        key = self.key(part)
        if key in self._cache.pool:
            return True
        level = self._cache.level_of(key)
        if level is None or self._cache.tiers[level].lookup(key) is None:
            return False
        state.level = level
        return True

    def awaited(self) -> list[Awaited]:
        """Parts to be loaded or being loaded, in order, with the number of their tier."""
        local, last = len(self._request.forms), len(self._cache.tiers) - 1
        found = []
        for part, state in self._states.items():
            entry = state.entry
            if entry is not None:
                # What cannot be cancelled comes from a store, not from a tier.
                is_awaited = state.watcher is not None and entry.cancel is not None
            else:
                is_awaited = state.is_needed
            if is_awaited and part[1] < local:
                level = state.level if state.load is None else state.load.level
                found.append((part, state, last if level is None else level))
        if self.needs.bounded:
            found.sort(key=lambda each: each[0])
        return found

    @staticmethod
    def first(awaited: Sequence[Awaited]) -> dict[int, Part]:
        """The first part from each tier."""
        return {level: part for part, _, level in reversed(awaited)}

    def bytes_left(self) -> list[int]:
        """The bytes to be loaded or being filled, by the number of the tier."""
        left = [0] * len(self._cache.tiers)
        for (_, row), _, level in self.awaited():
            left[level] += self._request.forms[row].chunk_bytes
        return left

    def load_times(
        self, awaited: Sequence[Awaited], bound: int, before: int, now_s: float
    ) -> Iterator[tuple[int, float]]:
        """Prefixes that may be worth loading, with the seconds until each is loaded.

        bound: the longest, which is the last. before: bytes that the last tier loads before.
        """
        rates, needs, forms = self._cache.rates, self.needs, self._request.forms
        nbytes = [rate.in_flight_bytes for rate in rates]
        if rates:
            nbytes[-1] += before
        used: set[int] = set()

        def load_s() -> float:
            return max((rates[n].seconds(nbytes[n], now_s) for n in used), default=0.0)

        if needs.bounded:
            # A shorter prefix needs other parts: only the one that needs no loads is compared.
            yield needs.longest(bound, self.is_ready), 0.0
        next_chunk = len(self._request.hashes) if needs.bounded else 0
        for (chunk, row), state, level in awaited:
            if chunk >= next_chunk:
                yield chunk, load_s()
                next_chunk = chunk + 1 + bound // _MOST_PREFIXES
            used.add(level)
            if state.watcher is None:
                nbytes[level] += forms[row].chunk_bytes
        yield bound, load_s()

    def probe(self, part: Part, level: int) -> None:
        """Begins the load of one part, which no lookup waits for, if that shows a rate."""
        chunk, row = part
        form, chunk_hash = self._request.forms[row], self._request.hashes[chunk]
        self._cache.probe(form, self.key(part), chunk_hash, level)

    def queue_loads(self, awaited: Sequence[Awaited]) -> None:
        """What is missing now is to be loaded, from one tier after the other."""
        missing = [e for e in awaited if e[1].entry is None and not e[1].is_later]
        self.to_load = sorted(missing, key=lambda each: each[2])

    def begin_some(self) -> bool:
        """Begins to load some of what is to be loaded; returns False if there is no room."""
        some, self.to_load = self.to_load[:_SOME_PARTS], self.to_load[_SOME_PARTS:]
        jobs: list[ChunkIO] = []
        stripes = jobs_level = 0
        try:
            for part, state, level in some:
                if stripes >= _BATCH_STRIPES or level != jobs_level:
                    batch, jobs = jobs, []
                    self._cache.begin_loads(batch)
                    stripes, jobs_level = 0, level
                job = self._prepare(part, state, level)
                if job is not None:
                    jobs.append(job)
                    stripes += job.frame.stripe_count
                elif state.entry is None:
                    return False
            return True
        finally:
            self._cache.begin_loads(jobs)

    def _prepare(self, part: Part, state: PartState, level: int) -> ChunkIO | None:
        """Holds a part and returns its load; None if another lookup loads it, or without room."""
        request, key = self._request, self.key(part)
        entry, job = self._cache.pool.get(key), None
        if entry is None:
            form, chunk_hash = request.forms[part[1]], request.hashes[part[0]]
            job = self._cache.prepare_load(form, key, chunk_hash, level, request.deadline_s)
            if job is None:
                return None
            state.load, self.has_loads = load_of(job), True
            entry = state.load.entry
        self._hold(part, state, entry)
        return job
