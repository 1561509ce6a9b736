"""The parts of one lookup: which of them a prefix needs, which are held, and where the others are.

A lookup has rows, one for each rank and group of layers; a chunk has one part in each row. How far
back an engine still reads a row's tokens after a prefix is the row's `Reach`:

    chunk                       0   1   2   3   4   5   prefix of 6 chunks
    row 0: all                  n   n   n   n   n   n   n: the part is needed
    row 1: window, 1.5 chunks   .   .   .   .   n   n
    row 2: state                .   .   .   .   .   n

Chunks count from the first one of the lookup, which is chunk ``first_chunk`` of the prompt. The
engine has those before it: they are never needed. Windows count from the prompt's beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from lmcache_redis.cache.cache import Cache, Load, load_of
from lmcache_redis.cache.pool import Entry, EntryState, Filled
from lmcache_redis.cache.refreshing import PooledChunk
from lmcache_redis.chunks.names import ChunkForm, PartNames, Reach
from lmcache_redis.tiers import ChunkIO

# Loads begin in batches: the first are in flight while slots are reserved for the next.
_BATCH_STRIPES = 32

Part = tuple[int, int]  # chunk, row
Wanted = tuple[Part, bytes]  # and its key


class PrefixNeeds:
    """What the prefixes of one lookup need.

    reaches: of each row. chunk_tokens: may be 0 if every row needs all tokens.

    Raises ValueError for rows whose needs cannot be told: they need a ``chunk_tokens``.
    """

    def __init__(self, reaches: Sequence[Reach], first_chunk: int = 0, chunk_tokens: int = 0):
        # Rows that need only some of a prefix's parts.
        self.bounded = [row for row, reach in enumerate(reaches) if reach.kind != "all"]
        if first_chunk < 0 or chunk_tokens < bool(self.bounded):
            raise ValueError(f"first chunk {first_chunk}, chunks of {chunk_tokens} tokens")
        self._reaches = reaches
        self._first_chunk = first_chunk
        self._chunk_tokens = chunk_tokens

    def first(self, row: int, length: int) -> int:
        """A prefix of ``length`` chunks needs the row's parts from this chunk to its end.

        Never decreases with ``length``; ``length`` itself if it needs none.
        """
        reach, before = self._reaches[row], self._first_chunk
        if reach.kind == "all":
            return 0
        return max(0, reach.first_chunk(before + length, self._chunk_tokens) - before)

    def parts(self, length: int) -> Iterator[Part]:
        """The parts that a prefix of ``length`` chunks needs."""
        for row in range(len(self._reaches)):
            for chunk in range(self.first(row, length), length):
                yield chunk, row

    def between(self, longer: int, shorter: int) -> tuple[list[Part], list[Part]]:
        """What changes if a prefix of ``longer`` chunks shrinks to ``shorter``.

        Returns the parts that are no longer needed, and those that are needed from then on. From
        the shorter prefix to the empty one, all parts are of the first kind.
        """
        dropped: list[Part] = []
        added: list[Part] = []
        for row in range(len(self._reaches)):
            before, now = self.first(row, longer), self.first(row, shorter)
            dropped += [(chunk, row) for chunk in range(max(before, shorter), longer)]
            added += [(chunk, row) for chunk in range(now, min(before, shorter))]
        return dropped, added

    def parts_of_any(self, length: int) -> Iterator[Part]:
        """The parts of the bounded rows that some prefix of at most ``length`` chunks needs."""
        chunks: dict[Reach, list[int]] = {}  # most rows have the reach of another
        for row in self.bounded:
            reach = self._reaches[row]
            if reach not in chunks:
                # If a longer prefix needs a part, so does the one that ends with its chunk.
                chunks[reach] = [n for n in range(length) if self.first(row, n + 1) <= n]
            for chunk in chunks[reach]:
                yield chunk, row

    def longest(self, limit: int, has: Callable[[Part], bool]) -> int:
        """The longest prefix of at most ``limit`` chunks all of whose needed parts are there.

        If a needed part is not, neither are the prefixes that end after its chunk possible: those
        up to ``limit`` need it too, because `first` does not decrease. Asks ``has`` at most once
        about each part.
        """
        length = limit
        rows = range(len(self._reaches))
        seen = [limit for _ in rows]  # the row's parts from here to the end of the prefix are there
        before = limit + 1
        while length < before:
            before = length
            for row in rows:
                first = self.first(row, length)
                for chunk in range(first, min(length, seen[row])):
                    if not has((chunk, row)):
                        length = chunk
                        break
                seen[row] = first
        return length


class LookupParts:
    """Pins, watches and loads the parts of one lookup. Owned by the cache's owner thread.

    Rows with a form are of this node. The other ones are remote: their parts are looked for, and
    neither held nor loaded. filled: told how the filling of a held part has ended.

    Attributes:
        held: the entries of parts, each with a pin.
        filling: those held that are being filled, with their watchers.
        missing: parts that the prefix needs and that are not held.
        later: those missing that are to be loaded when the engine retrieves them.
        levels: tiers that have the parts, of those not in the host pool and of all remote ones.
        loads: of those that this lookup loads or has loaded.
    """

    def __init__(
        self,
        cache: Cache,
        forms: Sequence[ChunkForm],
        remote: Sequence[PartNames],
        hashes: Sequence[bytes],
        needs: PrefixNeeds,
        deadline_s: float,
        filled: Callable[[Part, Filled], None],
    ) -> None:
        self.held: dict[Part, Entry] = {}
        self.filling: dict[Part, partial[None]] = {}
        self.missing: set[Part] = set()
        self.later: set[Part] = set()
        self.levels: dict[Part, int] = {}
        self.loads: dict[Part, Load] = {}
        self._cache = cache
        self._forms = forms
        self._rows: Sequence[PartNames] = [*forms, *remote]
        self._hashes = hashes
        self._needs = needs
        self._deadline_s = deadline_s
        self._on_filled = filled
        self._prepared: list[ChunkIO] = []
        self._units = [*(cache.units(form) for form in forms), *(0 for _ in remote)]

    def key(self, part: Part) -> bytes:
        """The part's name in the pool and in tiers."""
        chunk, row = part
        return self._rows[row].key(self._hashes[chunk])

    def is_remote(self, part: Part) -> bool:
        """Whether another node loads the part."""
        return part[1] >= len(self._forms)

    # ------------------------------------------------------------- the pool

    def hold_first(self) -> list[Wanted]:
        """Holds what the pool has of the rows that need all chunks; returns the rest in order."""
        wanted: list[Wanted] = []
        get = self._cache.pool.get
        nbytes = len(self._hashes[0])
        bounded = self._needs.bounded
        stems = [(r, row.stem(nbytes)) for r, row in enumerate(self._rows) if r not in bounded]
        local = [each for each in stems if each[0] < len(self._forms)]
        remote = stems[len(local) :]
        for chunk, chunk_hash in enumerate(self._hashes):
            for row, stem in local:
                key = stem + chunk_hash
                entry = get(key)
                if entry is not None:
                    self._hold((chunk, row), entry)
                else:
                    wanted.append(((chunk, row), key))
            wanted += [((chunk, row), stem + chunk_hash) for row, stem in remote]
        if bounded:
            self.missing = {*self._needs.parts(len(self._hashes))} - self.held.keys()
        else:
            self.missing = {part for part, _ in wanted}
        return wanted

    def hold_pooled(self, missing: Iterable[Part]) -> None:
        """Holds those of the missing parts that the pool has."""
        for part in [each for each in missing if not self.is_remote(each)]:
            entry = self._cache.pool.get(self.key(part))
            if entry is not None:
                self.missing.remove(part)
                self.later.discard(part)
                self._hold(part, entry)

    def shrink(self, longer: int, shorter: int) -> None:
        """Releases what a shorter prefix no longer needs; holds what it needs and the pool has."""
        if longer == shorter:
            return
        dropped, added = self._needs.between(longer, shorter)
        self.missing.difference_update(dropped)
        self.later.difference_update(dropped)
        for part in dropped:
            self.release(part)
        self.missing.update(added)
        self.hold_pooled(added)

    def release(self, part: Part) -> None:
        """Releases the pin of a part, if it is held. A load without watchers is cancelled."""
        entry = self.held.pop(part, None)
        if entry is not None:
            watcher = self.filling.pop(part, None)
            if watcher is not None:
                self._cache.pool.unwatch(entry, watcher)
            self._cache.pool.unpin(entry)

    def let_go(self) -> None:
        """Releases all that is held: it is missing then."""
        for part in [*self.held]:
            self.release(part)
            self.missing.add(part)

    def _hold(self, part: Part, entry: Entry) -> None:
        self._cache.pool.pin(entry)
        if not entry.wanted:
            entry.wanted = True
            if entry.pins > 1:
                self._cache.pool.on_wanted(entry)
        self.held[part] = entry
        if entry.state is EntryState.FILLING:
            self.filling[part] = watcher = partial(self._filled, part)
            self._cache.pool.watch(entry, watcher)

    def _filled(self, part: Part, filled: Filled) -> None:
        self.filling.pop(part, None)
        self._on_filled(part, filled)

    def units(self) -> tuple[int, int, int]:
        """The units of memory of the parts to be loaded now, of those held, and of a chunk."""
        missing = sum(self._units[row] for _, row in self.missing - self.later)
        held = sum(entry.units for entry in self.held.values()) if missing else 0
        return missing, held, sum(self._units)

    def defer(self, units: int) -> None:
        """Loads the last of the missing parts later, so that the others take fewer units now."""
        for part in sorted(self.missing - self.later, reverse=True):
            if units > 0 and not self.is_remote(part):
                self.later.add(part)
                units -= self._units[part[1]]

    def is_ready(self, part: Part) -> bool:
        """Whether the part is READY in the pool; of a remote one, whether it was found."""
        if part in self.held:
            return part not in self.filling
        if self.is_remote(part):
            return part in self.levels
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
        self.levels.update((part, level) for part, _ in here)
        self._cache.pool.seen(level, (key for _, key in here))
        return rest

    def is_found(self, part: Part) -> bool:
        """Whether the part is in memory, or a tier is known to have it."""
        if part in self.held or part in self.levels:
            return True
        if self.is_remote(part):
            return False
        key = self.key(part)
        if key in self._cache.pool:
            return True
        level = self._cache.level_of(key)
        if level is None or self._cache.tiers[level].lookup(key) is None:
            return False
        self.levels[part] = level
        return True

    def awaited(self) -> Iterator[tuple[int, Part, int]]:
        """Parts to be loaded or being filled, in order: number of the tier, part, bytes."""
        last = len(self._cache.tiers) - 1
        for part in sorted({*self.missing, *self.filling}):
            if not self.is_remote(part):
                load = self.loads.get(part)
                level = self.levels.get(part, last) if load is None else load.level
                yield level, part, self._forms[part[1]].chunk_bytes

    def awaited_bytes(self) -> list[int]:
        """The bytes of these parts by number of the tier."""
        nbytes = [0] * len(self._cache.tiers)
        for level, _, part_bytes in self.awaited():
            nbytes[level] += part_bytes
        return nbytes

    def load_times(self, bound: int, before: int, now_s: float) -> Iterator[tuple[int, float]]:
        """Prefixes that may be worth loading, with the seconds until each is loaded.

        bound: the longest, which is the last. before: bytes that the last tier loads before.
        """
        rates, needs = self._cache.rates, self._needs
        nbytes = [0] * len(rates)
        if rates:
            nbytes[-1] = before
        load_s = 0.0
        if needs.bounded:
            # A shorter prefix needs other parts: only the one that needs no loads is compared.
            yield needs.longest(bound, self.is_ready), load_s
        for level, part, part_bytes in self.awaited():
            if not needs.bounded:
                yield part[0], load_s
            if part in self.missing:
                nbytes[level] += part_bytes
            load_s = max(load_s, rates[level].seconds(nbytes[level], now_s))
        yield bound, load_s

    def probe(self, part: Part, level: int) -> None:
        chunk, row = part
        self._cache.probe(self._forms[row], self.key(part), self._hashes[chunk], level)

    def pooled(self, held: Mapping[Part, Entry], before_s: float) -> list[PooledChunk]:
        """What the host pool had of ``held`` and the tiers were last told to keep before then."""
        return [
            PooledChunk(self._forms[row], self._hashes[chunk], entry)
            for (chunk, row), entry in held.items()
            if entry.refreshed_s <= before_s and (chunk, row) not in self.loads
        ]

    def load_missing(self) -> bool:
        """Begins to load what is missing; returns False if there is no room."""
        now = self.missing - self.later
        missing = [part for part in sorted(now) if not self.is_remote(part)]
        for level in sorted({self.levels[part] for part in missing}):
            for part in [part for part in missing if self.levels[part] == level]:
                entry = self._load(part, level)
                if entry is None:
                    self._begin_prepared()
                    return False
                self.missing.remove(part)
                self._hold(part, entry)
            self._begin_prepared()  # a batch is from one tier
        return True

    def _load(self, part: Part, level: int) -> Entry | None:
        chunk, row = part
        form = self._forms[row]
        job = self._cache.prepare_load(
            form, self.key(part), self._hashes[chunk], level, self._deadline_s
        )
        if job is None:
            return None
        load = self.loads[part] = load_of(job)
        self._prepared.append(job)
        if len(self._prepared) * form.stripe_count >= _BATCH_STRIPES:
            self._begin_prepared()
        return load.entry

    def _begin_prepared(self) -> None:
        prepared, self._prepared = self._prepared, []
        self._cache.begin_loads(prepared)
