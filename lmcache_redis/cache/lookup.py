"""Prefix lookups: find the available leading chunks, pin them, then answer.

    find     chunks in the host pool are pinned; each tier in order is asked about the others,
             through its index or by one scan of the rest of the prefix
    settle   how much of the prefix is worth loading (`pacing`; what a tier was found too slow
             for is not even looked for), and whether the pool has room: until it has, the lookup
             waits in a line and pins nothing (`Line`). If the prefix is larger than the pool, its
             end is only found: the engine's retrieve loads it in pieces
    load     the parts that the prefix needs are read into slots in prefix order; a part that a
             tier fails to deliver in time is read from the next tier
    answer   when every part of the prefix is READY; with those that are, at the deadline or when
             the rest would take longer than computing it; what is beyond the prefix is unpinned

A chunk has one part in each row (rank and group of layers, see `parts`). It counts if every part
of it does that the prefix needs. The prefix ends before chunk number ``bound``, which shrinks when
a needed part is missing, is not worth loading, or fails to load. A shorter prefix may need other
parts of bounded rows, those that do not need all chunks: then the lookup settles again.

A tier without an index gets at most three questions, unless parts are evicted from the pool while
the lookup waits in the line:

    1   a scan of the rows that need all chunks: how long the prefix can be
    2   a scan of the parts that the bounded rows need for that prefix
    3   only if some are missing, or if the prefix shrinks later: which parts of those rows exist

Rows of an engine's workers on other nodes are remote: their nodes load the parts. Only the last
tier, which all nodes share, is asked whether it has them; this host pool does not count, even if a
row of this node has the same parts.

Results and the counters of lookups are chunks of the prefix, also for chunks with several parts: a
miss counts the chunks by which the prefix becomes shorter, and `loaded` the chunks of which at
least one part was read from a tier. A chunk of which the prefix needs no part counts as found. The
counters of reads (``loaded_chunks``, and misses of reads that fail) are parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.pacing import Computing, prefix_worth_loading
from lmcache_redis.cache.parts import LookupParts, Part, PrefixNeeds, Wanted
from lmcache_redis.cache.pool import Entry, Filled
from lmcache_redis.cache.threads import Timer
from lmcache_redis.chunks.names import ChunkForm, PartNames
from lmcache_redis.tiers import CallOutcome, ExistsResult, ReadOutcome, ScanResult

_PROBE_POLL_S = 0.01
# A load is not given up before, whatever was expected of it.
_SHORTEST_LOAD_S = 0.02
_LONGEST_WAIT_S = 60.0


class PrefixLookup:
    """One lookup. Owned by the cache's owner thread.

    forms: one per row. deadline_s: `time.monotonic()`. done: called once, unless the lookup is
    cancelled. It may call `take` to keep the pins; otherwise they are released after it.
    first_chunk: the number in the prompt of the first chunk. chunk_tokens: the tokens of a chunk;
    may be 0 if every row needs all chunks. remote: further rows, whose parts must exist in the last
    tier and are not loaded. computing: of the engine; None: everything is worth loading. urgent:
    waits for room before those that are not: the engine holds blocks for its chunks.

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
        remote: Sequence[PartNames] = (),
        computing: Computing | None = None,
        urgent: bool = False,
    ) -> None:
        self.bound = len(hashes)
        self.reasons: set[str] = set()
        self._cache = cache
        self._hashes = hashes
        self._deadline_s = deadline_s
        self._done = done
        reaches = [row.reach for row in (*forms, *remote)]
        self._needs = PrefixNeeds(reaches, first_chunk, chunk_tokens)
        self._parts = LookupParts(
            cache, forms, remote, hashes, self._needs, deadline_s, self._filled
        )
        self._asking = False
        self._ended = False
        self._is_settled = False
        self._settled_for = self.bound  # the prefix whose parts are those held and missing
        self._is_scanned = self._is_all_known = False  # what `_settle` asks about
        self._gap = "miss_absent"  # the counter of chunks lost because a part is not there
        self._computing = computing
        self._urgent = urgent
        self._chunk_tokens = chunk_tokens
        self._chunk_s = computing.token_s * chunk_tokens if computing is not None else 0.0
        self._timer = cache.owner.at(deadline_s, self._expire)
        self._bet_timer: Timer | None = None  # looks again at what is expected of the load

    def start(self) -> None:
        """Pins the chunks in the host pool and looks for the others."""
        if self._computing is not None:
            # A tier that takes so long to answer is given up.
            free_in_s = self._computing.free_in_s(time.monotonic())
            self._look_again_in(free_in_s + self.bound * self._chunk_s)
        wanted = self._parts.hold_first()
        now_s, slow = time.monotonic(), [rate for rate in self._cache.rates if rate.is_slow]
        if slow and not any(rate.is_probe_due(now_s) for rate in slow) and self._decide():
            # No tier is asked about what would not be loaded.
            wanted = [each for each in wanted if each[0][0] < self.bound]
        self._find(wanted, 0)
        self._check()

    def cancel(self) -> None:
        """Ends the lookup and releases all pins; without an answer, if there was none yet."""
        self._ended = True
        self._timer.cancel()
        if self._bet_timer is not None:
            self._bet_timer.cancel()
        self._parts.let_go()
        self._cache.line.leave(self)

    def take(self) -> dict[Part, Entry]:
        """The entries that the prefix needs, whose pins now belong to the caller."""
        held, self._parts.held = self._parts.held, {}
        return held

    def levels(self) -> dict[int, int]:
        """The tiers of the chunks that were not in the host pool; of several of one, the last."""
        levels: dict[int, int] = {}
        parts = [(part, load.level) for part, load in self._parts.loads.items()]
        parts += [(part, self._parts.levels.get(part, 0)) for part in self._parts.later]
        for (chunk, _), level in parts:
            if chunk < self.bound:
                levels[chunk] = max(level, levels.get(chunk, 0))
        return levels

    # ----------------------------------------------------------------- find

    def _find(self, wanted: list[Wanted], level: int) -> None:
        """Asks a tier for chunks, through its index or a scan; asks the next one for the rest."""
        if not wanted:
            return
        if level == len(self._cache.tiers):
            self._ends_at(wanted[0][0][0], "miss_absent")
        elif self._cache.tiers[level].lookup(wanted[0][1]) is None:
            self._scan(wanted, level)
        else:
            self._find(self._parts.look_up(wanted, level), level + 1)

    def _scan(self, wanted: list[Wanted], level: int) -> None:
        if self._ended:
            return
        self._asking = True
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
        self._asking = False
        found, rest = wanted[: result.prefix_length], wanted[result.prefix_length :]
        self._cache.pool.seen(level, (key for _, key in found))
        if rest and result.outcome is CallOutcome.DONE:
            self._cache.pool.seen(level, (rest[0][1],), there=False)
        self._parts.levels.update((part, level) for part, _ in found)
        if level + 1 < len(self._cache.tiers):
            self._find(rest, level + 1)
        elif rest:
            self._ends_at(rest[0][0][0], self._miss(level, result.outcome))
        self._check()

    def _miss(self, level: int, outcome: CallOutcome) -> str:
        """The counter of chunks that a question with this outcome did not find."""
        if outcome is CallOutcome.DONE:
            return "miss_absent"
        self.reasons.add(f"{self._cache.tiers[level].name} is not available")
        return self._cache.counters[level].misses[ReadOutcome.UNAVAILABLE]

    def _ends_at(self, chunk: int, counter: str) -> None:
        # The prefix may already end earlier, because the host pool had no room.
        self._cache.metrics.count(counter, max(0, self.bound - chunk))
        self._shrink(chunk)

    # --------------------------------------------------------------- settle

    def _settle(self) -> None:
        """Decides the length of the prefix, and asks for or loads exactly the parts it needs.

        A part that nothing is known about may exist, until a prefix needs it. Then a tier is asked,
        and its answer settles again. Ends, because ``bound`` decreases and questions run out.

        Counts the room before it loads anything, so that a full pool loses no load that has begun.
        Loads that are being cancelled still take theirs.
        """
        pool, line, parts = self._cache.pool, self._cache.line, self._parts
        parts.hold_pooled(parts.missing)
        while True:
            if self._is_all_known:
                self._ends_at(self._needs.longest(self.bound, parts.is_found), self._gap)
            parts.shrink(self._settled_for, self.bound)
            self._settled_for = self.bound
            units, held, units_per_chunk = parts.units()
            lacking = units - pool.free - pool.idle
            can_wait = not parts.loads  # else it would give those up
            too_many = units + held - pool.capacity
            if too_many > 0 and units_per_chunk > pool.capacity:
                self._no_room(self.bound)
            elif too_many > 0:
                parts.defer(too_many)
            elif lacking > 0 and not can_wait:
                # At least so many: a chunk that is dropped gives back its own parts at most.
                self._no_room(-(-lacking // units_per_chunk))
            elif unknown := [part for part in parts.missing if not parts.is_found(part)]:
                self._ask(unknown)
                if self._asking:
                    return
            elif self._decide():
                pass
            elif units and can_wait and (lacking > 0 or not line.is_turn_of(self, self._urgent)):
                self._wait_in_line()
                return
            elif parts.load_missing():
                self._is_settled = True
                line.leave(self)
                self._look_again_in(1.25 * self._left_s())
                return
            else:
                self._no_room()

    def _decide(self) -> bool:
        """Ends the prefix before what is not worth loading; returns whether that made it shorter.

        What a tier has not been asked about yet counts as found.
        """
        computing = self._computing
        if computing is None or not self._chunk_s:
            return False
        now_s = time.monotonic()
        worth = prefix_worth_loading(
            self._load_times(now_s), len(self._hashes), self._chunk_s, computing.free_in_s(now_s)
        )
        first: dict[int, Part] = {}  # to be loaded, by tier
        for level, part, _ in self._parts.awaited():
            first.setdefault(level, part)
        for level, part in first.items():
            self._cache.rates[level].is_slow = is_slow = part[0] >= worth
            if is_slow:
                self._parts.probe(part, level)
        if worth == self.bound:
            return False
        self._ends_at(worth, "miss_slower")
        self.reasons.add("computing was faster")
        return True

    def _load_times(self, now_s: float) -> Iterator[tuple[int, float]]:
        before = self._cache.line.bytes_before(self)
        return self._parts.load_times(self.bound, before, now_s)

    def _left_s(self) -> float:
        """The seconds until the prefix is loaded."""
        *_, (_, load_s) = self._load_times(time.monotonic())
        return load_s

    def _wait_in_line(self) -> None:
        """Waits for room, without pins: others may need theirs."""
        self.reasons.add("the host pool was full")
        if self._parts.held:
            self._parts.let_go()
            self._is_all_known = False
        nbytes = sum(self._parts.awaited_bytes())
        self._cache.line.wait(self, nbytes, self._check, self._urgent)
        self._look_again_in(1.25 * self._left_s())

    def _ask(self, unknown: list[Part]) -> None:
        """Asks the tier without an index, if there is one; see the module."""
        tiers, owner, some_key = self._cache.tiers, self._cache.owner, self._parts.key(unknown[0])
        level = next((n for n, tier in enumerate(tiers) if tier.lookup(some_key) is None), None)
        if level is None:
            self._is_all_known = True
            return
        if not self._is_scanned:
            self._is_scanned = True
            self._scan([(part, self._parts.key(part)) for part in sorted(unknown)], level)
            return
        self._asking = True
        every = self._needs.parts_of_any(self.bound)
        parts = sorted({*unknown, *(part for part in every if not self._parts.is_found(part))})
        tiers[level].exists(
            [self._parts.key(part) for part in parts],
            self._deadline_s,
            lambda result: owner.post(partial(self._answered, parts, level, result)),
        )

    def _answered(self, parts: list[Part], level: int, result: ExistsResult) -> None:
        if self._ended:
            return
        self._asking = False
        self._is_all_known = True
        self._gap = self._miss(level, result.outcome)
        if result.outcome is CallOutcome.DONE:
            found = zip(parts, result.present, strict=True)
            self._parts.levels.update((part, level) for part, is_there in found if is_there)
        self._check()

    def _no_room(self, chunks: int = 1) -> None:
        self._cache.metrics.count("miss_pool_full", chunks)
        self.reasons.add("the host pool was full")
        self._shrink(self.bound - chunks)

    def _filled(self, part: Part, filled: Filled) -> None:
        if filled is not Filled.READY:
            self.reasons.add("a chunk could not be loaded")
            self._shrink(part[0])
        if self._is_settled:
            self._check()
        else:
            # Posted: loads often fail together, also in the middle of `begin_loads`.
            self._cache.owner.post(self._check)

    # --------------------------------------------------------------- answer

    def _shrink(self, bound: int) -> None:
        """The prefix ends before chunk number ``bound``."""
        self.bound = min(self.bound, bound)
        self._is_settled = False

    def _expire(self) -> None:
        self._end_now("lookups_timed_out", "miss_deadline", "the lookup deadline passed")

    def _end_now(self, event: str, miss: str, reason: str) -> None:
        """Answers with the parts that are READY. event, miss: counters of lookups and chunks."""
        self._cache.metrics.count(event)
        self.reasons.add(reason)
        self._asking = False
        self._ends_at(self._needs.longest(self.bound, self._parts.is_ready), miss)
        self._check()

    def _look_again_in(self, wait_s: float) -> None:
        """Looks again whether to wait, when the load should have ended."""
        if self._chunk_s:
            if self._bet_timer is not None:
                self._bet_timer.cancel()
            wait_s = min(max(wait_s, _SHORTEST_LOAD_S), _LONGEST_WAIT_S)
            self._bet_timer = self._cache.owner.after(wait_s, self._look_again)

    def _look_again(self) -> None:
        """Gives up what has not been loaded if computing it is faster now."""
        assert self._computing is not None, "else nothing is looked at again"
        now_s = time.monotonic()
        loads = [*zip(self._cache.rates, self._parts.awaited_bytes(), strict=True)]
        if self._is_settled:
            # What was in flight before has ended, and what is behind does not count.
            times_s = [rate.seconds(nbytes, now_s, behind=False) for rate, nbytes in loads]
            load_s = max(times_s, default=0.0)
        else:
            load_s = self._left_s()
        chunks = self.bound - self._needs.longest(self.bound, self._parts.is_ready)
        compute_s = self._computing.free_in_s(now_s) + chunks * self._chunk_s
        if not self._asking and load_s <= compute_s:
            self._look_again_in(load_s / 2)
            return
        for rate, nbytes in loads:
            if nbytes and self._is_settled:  # else the line or a question was too slow
                rate.fell_behind(now_s)
        self._end_now("lookups_cut", "miss_slower", "loading fell behind")

    def _check(self) -> None:
        if self._ended or self._asking:
            return
        if not self._is_settled:
            self._settle()
        if self._is_settled and not self._parts.filling:
            if self._computing is not None:
                chunks = len(self._hashes) - self.bound
                self._computing.add(chunks * self._chunk_tokens, time.monotonic())
            # If it raises, the pins are still held, and the caller's `cancel` releases them.
            held = self._parts.held
            self._done(self)
            self.cancel()
            # After the answer, which does not wait for it.
            self._cache.keep(self._parts.pooled(held, self._cache.refreshed_before_s))
