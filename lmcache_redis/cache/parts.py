# SPDX-License-Identifier: Apache-2.0
"""The parts of one lookup: which are held, which are missing, and where those are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, takewhile

from lmcache_redis.cache.cache import Cache, Load
from lmcache_redis.cache.pacing import Computing, Part, PrefixNeeds
from lmcache_redis.cache.pool import Entry, EntryState
from lmcache_redis.cache.threads import Action
from lmcache_redis.chunks.keys import hash_tag
from lmcache_redis.chunks.names import ChunkForm, PartNames

# Loads begin in batches: the first are in flight while slots are reserved for the next.
_BATCH_STRIPES = 32
# The parts whose loads are begun before other actions of the owner have a turn.
_SOME_PARTS = 512


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """What a lookup looks for.

    forms: one per row of this node. deadline_s: by the owner's clock. first_chunk: number of the
    first chunk in the prompt. chunk_tokens: the tokens of a chunk; may be 0 if every row needs all
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


@dataclass(slots=True, eq=False)
class PartState:
    """A part of a lookup that the host pool did not have at once.

    Attributes:
        form: None: it is remote, so it is looked for, and neither held nor loaded.
        is_needed: by the prefix. Such a part is held or missing.
        is_later: it is missing, and loaded when the engine retrieves it.
        level: a tier that has it.
        entry: it is held: the entry has a pin for it.
        watcher: of an entry that is being filled. load: by this lookup.
    """

    part: Part
    key: bytes
    form: ChunkForm | None
    is_needed: bool = False
    is_later: bool = False
    level: int | None = None
    entry: Entry | None = None
    watcher: Action | None = None
    load: Load | None = None


class LookupParts:
    """Pins, watches and loads the parts of one lookup. Owned by the cache's owner thread.

    ended: told by the pool when the filling of a held part has ended; it calls `filled`.

    Attributes:
        length: of the prefix whose parts are needed, in chunks.
        filling: the number of held parts that are being filled.
        to_load: parts whose loads are to be begun.
        has_loads: whether any load has begun.
    """

    def __init__(
        self, cache: Cache, request: LookupRequest, ended: Callable[[PartState], None]
    ) -> None:
        rows = [*request.forms, *request.remote]
        reaches = [row.reach for row in rows]
        self.needs = PrefixNeeds(reaches, request.first_chunk, request.chunk_tokens)
        self.length = len(request.hashes)
        self.filling = 0
        self.to_load: list[PartState] = []
        self.has_loads = False
        self._pooled: dict[Part, Entry] = {}  # held, without a state
        self._states: dict[Part, PartState] = {}
        self._is_taken = False
        self._cache = cache
        self._request = request
        self._stems = [row.stem(len(request.hashes[0])) for row in rows]
        self._on_ended = ended

    @property
    def last_level(self) -> int:
        return len(self._cache.tiers) - 1

    def state(self, part: Part) -> PartState:
        """The state of a part that is not among those held at once."""
        state = self._states.get(part)
        if state is None:
            chunk, row = part
            key = self._stems[row] + hash_tag(self._request.hashes[chunk])
            forms = self._request.forms
            form = forms[row] if row < len(forms) else None
            state = self._states[part] = PartState(part, key, form)
        return state

    def missing(self) -> list[PartState]:
        """The parts that the prefix needs and that are not held, in order."""
        found = [s for s in self._states.values() if s.is_needed and s.entry is None]
        return sorted(found, key=lambda state: state.part)

    def take(self) -> dict[Part, Entry]:
        """The entries that the prefix needs, whose pins now belong to the caller."""
        self._is_taken = True
        held = {part: s.entry for part, s in self._states.items() if s.entry is not None}
        return self._pooled | held if held else self._pooled

    def pooled(self, before_s: float) -> list[Entry]:
        """What was taken from the host pool and the tiers were last told to keep before then.

        Of a prefix the end is used least: if the tiers were told of it since, so were they of all.
        """
        states = self._states.values()
        entries = self._pooled | {s.part: s.entry for s in states if s.entry and not s.load}
        ends = [entries.get((self.length - 1, row)) for row in range(len(self._request.forms))]
        if all(end is not None and end.refreshed_s > before_s for end in ends):
            return []
        return [entry for entry in entries.values() if entry.refreshed_s <= before_s]

    def levels(self) -> dict[int, int]:
        """The tiers of the chunks that were not in the host pool; of several of one, the last."""
        levels: dict[int, int] = {}
        for (chunk, _), state in self._states.items():
            if chunk < self.length and (state.load is not None or state.is_later):
                levels[chunk] = max(self.level_of(state), levels.get(chunk, 0))
        return levels

    # ------------------------------------------------------------- the pool

    def hold_first(self) -> None:
        """Holds what the pool has of the rows that need all chunks."""
        hold, pooled, ready = self._cache.pool.hold, self._pooled, EntryState.READY
        local, bounded = len(self._request.forms), self.needs.bounded
        rows = [(row, stem) for row, stem in enumerate(self._stems) if row not in bounded]
        for chunk, chunk_hash in enumerate(self._request.hashes):
            tag = hash_tag(chunk_hash)
            for row, stem in rows:
                entry = hold(stem + tag) if row < local else None
                if entry is not None and entry.state is ready:
                    pooled[chunk, row] = entry
                    continue
                state = self.state((chunk, row))
                state.is_needed = True
                if entry is not None:
                    self._held(state, entry)
        if bounded:
            self._need(part for part in self.needs.parts(self.length) if part[1] in bounded)

    def hold_pooled(self, missing: Iterable[PartState]) -> None:
        """Holds those of the missing parts that the pool has."""
        for state in missing:
            if state.form is not None and (entry := self._cache.pool.hold(state.key)):
                state.is_later = False
                self._held(state, entry)

    def shrink(self, length: int) -> None:
        """Releases what a shorter prefix no longer needs; holds what it needs and the pool has."""
        if length == self.length:
            return
        dropped: list[Part] = []
        added: list[Part] = []
        for row in range(len(self._stems)):
            before, now = self.needs.first(row, self.length), self.needs.first(row, length)
            dropped += [(chunk, row) for chunk in range(max(before, length), self.length)]
            added += [(chunk, row) for chunk in range(now, min(before, length))]
        self.length = length
        for state in self._states.values():
            state.is_later = False  # the shorter prefix may fit into the pool
        for part in dropped:
            if (entry := self._pooled.pop(part, None)) is not None:
                self._cache.pool.unpin(entry)
            else:
                state = self.state(part)
                state.is_needed = False
                self._release(state)
        self.hold_pooled(self._need(added))

    def release_all(self) -> bool:
        """Releases what is held, which is missing then; returns whether anything was."""
        if self._is_taken:
            return False
        pooled, self._pooled = self._pooled, {}
        held = [state for state in self._states.values() if state.entry is not None]
        for entry in pooled.values():
            self._cache.pool.unpin(entry)
        for state in held:
            self._release(state)
        self._need(pooled)
        return bool(pooled or held)

    def release_for_good(self) -> None:
        """As `release_all`, and tells of nothing any more: so it holds its lookup no longer."""
        self.release_all()
        self._on_ended = _ignored

    def _need(self, parts: Iterable[Part]) -> list[PartState]:
        states = [self.state(part) for part in parts]
        for state in states:
            state.is_needed = True
        return states

    def _held(self, state: PartState, entry: Entry) -> None:
        state.entry = entry
        if entry.state is EntryState.FILLING:
            self.filling += 1
            state.watcher = partial(self._on_ended, state)
            self._cache.pool.watch(entry, state.watcher)

    def _release(self, state: PartState) -> None:
        watcher, entry = state.watcher, state.entry
        state.watcher = state.entry = None
        if entry is not None:
            if watcher is not None:
                self.filling -= 1
                self._cache.pool.unwatch(entry, watcher)
            self._cache.pool.unpin(entry)

    def filled(self, state: PartState) -> None:
        """The filling of a held part has ended."""
        state.watcher = None
        self.filling -= 1

    def units(self) -> tuple[int, int, int]:
        """The units of memory of the parts to be loaded now, of those held, and of a chunk."""
        units, states = self._cache.units, self._states.values()
        missing = sum(
            units(state.form)
            for state in states
            if state.form and state.is_needed and not state.is_later and state.entry is None
        )
        held = chain(self._pooled.values(), (s.entry for s in states if s.entry is not None))
        return missing, sum(each.units for each in held), sum(map(units, self._request.forms))

    def defer(self, units: int) -> None:
        """Loads the last of the missing parts later, so that the others take fewer units now."""
        for state in reversed(self.missing()):
            if units > 0 and not state.is_later and state.form is not None:
                state.is_later = True
                units -= self._cache.units(state.form)

    def is_ready(self, part: Part) -> bool:
        """Whether the part is READY in the pool; of a remote one, whether it was found."""
        if part in self._pooled:
            return True
        state = self.state(part)
        if state.entry is not None:
            return state.watcher is None
        if state.form is None:
            return state.level is not None
        entry = self._cache.pool.get(state.key)
        return entry is not None and entry.state is EntryState.READY

    # ------------------------------------------------------------ the tiers

    def look_up(self, wanted: Sequence[PartState], level: int) -> list[PartState]:
        """Notes those that are in the index of a tier; returns the others."""
        lookup, is_last = self._cache.tiers[level].lookup, level == self.last_level
        is_removing = self._cache.queues[level].is_removing
        here: list[PartState] = []
        rest: list[PartState] = []
        for state in wanted:
            is_here = lookup(state.key) and (is_last or state.form is not None)
            is_here = is_here and not is_removing(state.key)
            (here if is_here else rest).append(state)
        self.found(here, level)
        return rest

    def worth_asking(self, wanted: list[PartState]) -> list[PartState]:
        """The leading parts that are not wrong in the last tier."""
        wrong = self._cache.queues[-1].doubted.wrong
        if not wrong:
            return wanted
        return [*takewhile(lambda state: state.key not in wrong, wanted)]

    def found(self, here: Sequence[PartState], level: int) -> None:
        for state in here:
            state.level = level
        self._cache.pool.seen(level, [state.key for state in here])

    def is_found(self, part: Part) -> bool:
        """Whether the part is in memory, or a tier is known to have it."""
        if part in self._pooled:
            return True
        state = self.state(part)
        if state.entry is not None or state.level is not None:
            return True
        if state.form is None:
            return False
        if state.key in self._cache.pool:
            return True
        level = self._cache.level_of(state.key)
        if level is None or self._cache.tiers[level].lookup(state.key) is None:
            return False
        state.level = level
        return True

    def has_some_of(self, chunk: int) -> bool:
        return any(self.is_found((chunk, row)) for row in range(len(self._stems)))

    def failure_of(self, state: PartState) -> str:
        """The counter of the reason why a part was not filled."""
        load = state.load
        if load is None or load.missed is None:
            return "miss_load"  # another request's load, or a store, of the part
        return load.missed

    def level_of(self, state: PartState) -> int:
        """The tier that a part is loaded from."""
        level = state.level if state.load is None else state.load.level
        return self.last_level if level is None else level

    def awaited(self) -> list[PartState]:
        """Parts to be loaded or being loaded, in order."""
        # What cannot be cancelled comes from a store, not from a tier.
        found = [
            state
            for state in self._states.values()
            if (
                state.is_needed
                if state.entry is None
                else state.watcher is not None and state.entry.cancel is not None
            )
            and state.form is not None
        ]
        return sorted(found, key=lambda state: state.part)

    def first(self, awaited: Sequence[PartState]) -> dict[int, PartState]:
        """The first part from each tier."""
        return {self.level_of(state): state for state in reversed(awaited)}

    def bytes_left(self) -> list[int]:
        """The bytes to be loaded or being filled, by the number of the tier."""
        left = [0] * len(self._cache.tiers)
        for state in self.awaited():
            assert state.form is not None
            left[self.level_of(state)] += state.form.chunk_bytes
        return left

    def load_times(
        self, awaited: Sequence[PartState], bound: int, before: int, now_s: float
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
            return max((rates[n].expected_s(nbytes[n], now_s) for n in used), default=0.0)

        if needs.bounded:
            # A shorter prefix needs other parts: only the one that needs no loads is compared.
            yield needs.longest(bound, self.is_ready), 0.0
        next_chunk = len(self._request.hashes) if needs.bounded else 0
        for state in awaited:
            (chunk, row), level = state.part, self.level_of(state)
            if chunk >= next_chunk:
                yield chunk, load_s()
                next_chunk = chunk + 1
            used.add(level)
            if state.watcher is None:
                nbytes[level] += forms[row].chunk_bytes
        yield bound, load_s()

    def probe(self, state: PartState, level: int) -> None:
        """Begins the load of one part, which no lookup waits for, if that shows a rate."""
        chunk, row = state.part
        self._cache.probe(self._request.forms[row], self._request.hashes[chunk], level)

    def begin_some(self) -> list[PartState]:
        """Begins the next batch of loads; returns the parts that have no room any more."""
        left: list[PartState] = []
        some, self.to_load = self.to_load[:_SOME_PARTS], self.to_load[_SOME_PARTS:]
        batch: list[Load] = []
        for state in some:
            level = self.level_of(state)
            # Parts of one lookup have about as many stripes as each other.
            if batch and (
                len(batch) * len(batch[-1].slots) >= _BATCH_STRIPES or batch[0].level != level
            ):
                begun, batch = batch, []
                self._cache.begin_loads(begun)
            if not self._prepare(state, level, batch):
                left.append(state)
        self._cache.begin_loads(batch)
        return left

    def _prepare(self, state: PartState, level: int, batch: list[Load]) -> bool:
        """Holds a part, and loads it in the batch unless that has begun. False: no room is left."""
        request, (chunk, row), pool = self._request, state.part, self._cache.pool
        entry = pool.hold(state.key)
        if entry is None:
            form, chunk_hash = request.forms[row], request.hashes[chunk]
            load = self._cache.prepare_load(form, chunk_hash, level, request.deadline_s)
            if load is None:
                return False
            batch.append(load)
            state.load, self.has_loads, entry = load, True, load.entry
            pool.hold(state.key)
        self._held(state, entry)
        return True


def _ignored(part: PartState) -> None:
    pass
