# SPDX-License-Identifier: Apache-2.0
"""Prefix lookups: find the available leading chunks, pin them, then answer.

    find     chunks in the host pool are pinned; each tier in order is asked about the others,
             through its index or by one scan of the rest of the prefix
    settle   how much of the prefix is worth loading (`pacing.WorthLoading`), and whether the pool
             has room: until it has, the lookup waits and pins nothing (`pacing.WaitQueue`). If the
             prefix is larger than the pool, its end is only found: the engine's retrieve loads it
    load     the parts that the prefix needs are read into slots in prefix order; a part that a
             tier fails to deliver in time is read from the next tier
    answer   when every part of the prefix is READY; with those that are, at the deadline or when
             the rest would take longer than computing it

A chunk has one part in each row (rank and group of layers, see `pacing`). It counts if every part
of it does that the prefix needs. The prefix ends before chunk number ``bound``, which shrinks when
a needed part is missing, is not worth loading, or fails to load. A shorter prefix may need other
parts of bounded rows, those that do not need all chunks: then the lookup settles again.

Only the last tier may have no index. It gets at most three questions, unless parts are evicted from
the pool while the lookup waits for room:

    1   a scan of the rows that need all chunks: how long the prefix can be
    2   a scan of the parts that the bounded rows need for that prefix
    3   only if some are missing, or if the prefix shrinks later: which parts of those rows exist

Rows of workers on other nodes are remote: their nodes load the parts. Only the last tier, which all
nodes share, is asked for them; this host pool does not count, even if it has the same parts.

The counters of lookups are chunks of the prefix: a miss counts those by which it becomes shorter.
The counters of reads (``loaded_chunks``, and misses of reads that fail) are parts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.pacing import Bet, WorthLoading
from lmcache_redis.cache.parts import LookupParts, LookupRequest, PartState
from lmcache_redis.cache.pool import EntryState
from lmcache_redis.cache.threads import Action, Timer, posting
from lmcache_redis.tiers import CallOutcome, ExistsResult, ReadOutcome, ScanResult

_PROBE_POLL_S = 0.01
# A load is not given up before, whatever was expected of it.
_SHORTEST_LOAD_S = 0.02
_LONGEST_WAIT_S = 60.0
# How often the rate of loads is looked at, and what makes a difference.
_SHORTEST_LOOK_S = 0.005
_SLOWER = 0.8
# A tier that takes this many times its usual time to answer is silent, not slow.
_SILENT = 4.0
_FAILS = "what a tier was asked for before has failed"


class _Stage(Enum):
    ASKING = "a tier has not answered yet"
    SETTLING = "the prefix may change, or waits for room or for the rate of a tier"
    LOADING = "every part that the prefix needs is held, and some may be being filled"
    ENDED = "answered or cancelled"


@dataclass(slots=True)
class PrefixEnd:
    """Why a prefix is not longer. reasons: for a log line. counter: of the chunks it has cost."""

    reasons: set[str] = field(default_factory=set)
    counter: str = ""


class PrefixLookup:
    """One lookup. Owned by the cache's owner thread.

    done: called once, unless the lookup is cancelled. It may call `LookupParts.take` to keep the
    pins; otherwise they are released after it.

    Attributes:
        bound: the length of the prefix in chunks. end: why it is not longer.
        missed: the chunks by which it became shorter, by counter: counted when the lookup ends.
    """

    def __init__(
        self, cache: Cache, request: LookupRequest, done: Callable[[PrefixLookup], None]
    ) -> None:
        self.bound = len(request.hashes)
        self.end = PrefixEnd()
        self.missed: Counter[str] = Counter()
        self._cache = cache
        self._now = cache.owner.now
        self._request = request
        self._done = done
        self.parts = LookupParts(cache, request, self._filled)
        self._state = _Stage.SETTLING
        self._questions = 0  # that `_ask` may leave out: 1: the scan; 2: all is known
        self._gap = "miss_absent"  # the counter of chunks lost because a part is not there
        engine, self._worth = request.computing, None
        if engine is not None and engine.token_s and request.chunk_tokens:
            self._worth = WorthLoading(engine, self.bound, request.chunk_tokens)
        self._deadline = cache.owner.at(request.deadline_s, self._expire)
        self._wake: Timer | None = None

    def start(self) -> None:
        """Pins the chunks in the host pool and looks for the others."""
        if self._cache.warming is not None:
            self._cache.warming.give_way()
        self.parts.hold_first()
        bounded, worth, now_s = self.parts.needs.bounded, self._worth, self._now()
        wanted = [each for each in self.parts.missing() if each.part[1] not in bounded]
        if worth is not None:
            slow = [rate for rate in self._cache.rates if not worth.is_quick(rate)]
            asks = not slow or any(rate.may_probe(now_s) for rate in slow)
            if not asks and self._decide(self.parts.awaited(), asks=True):
                # No tier is asked about what would not be loaded.
                wanted = [each for each in wanted if each.part[0] < self.bound]
        self._find(wanted)
        self._check()

    def cancel(self) -> None:
        """Ends the lookup and releases all pins; without an answer, if there was none yet."""
        self._state = _Stage.ENDED
        for counter, chunks in self.missed.items():
            self._cache.metrics.count(counter, chunks)
        self.missed.clear()
        self._deadline.cancel()
        if self._wake is not None:
            self._wake.cancel()
        self.parts.release_for_good()
        self._cache.waiting.leave(self)

    @property
    def bet(self) -> Bet | None:
        """What was expected of loading and of computing; None if they were not compared."""
        return None if self._worth is None else self._worth.bet

    # ----------------------------------------------------------------- find

    def _find(self, wanted: list[PartState]) -> None:
        """Looks for parts in the indexes of the tiers, and asks the last one if it has none."""
        for level, tier in enumerate(self._cache.tiers):
            if wanted and tier.lookup(wanted[0].key) is None:
                self._ask_in_time()
                self._scan(wanted)
                return
            wanted = self.parts.look_up(wanted, level)
        if wanted:
            self._ends_at(wanted[0].part[0], "miss_absent")

    def _ask_in_time(self) -> None:
        """The last tier is asked, and given up if it takes too long to answer."""
        self._state = _Stage.ASKING
        if self._worth is not None:
            rate = self._cache.rates[-1]
            patience_s = self._worth.patience_s(rate, self._now())
            give_up = partial(self._give_up, self.parts.last_level, waited_s=patience_s)
            self._wake_in(patience_s, give_up)

    def _scan(self, wanted: list[PartState]) -> None:
        if self._state is not _Stage.ASKING:
            return
        tier, owner = self._cache.tiers[-1], self._cache.owner
        now_s = owner.now()
        if not tier.state.probed:
            # The owner has just started, and does not know yet whether the server is up.
            owner.at(now_s + _PROBE_POLL_S, partial(self._scan, wanted))
            return
        asked = [each.key for each in self.parts.worth_asking(wanted)]
        if asked:
            done = posting(owner, partial(self._scanned, wanted, now_s))
            tier.scan(asked, self._request.deadline_s, done)
        else:
            owner.post(partial(self._scanned, wanted, None, ScanResult(CallOutcome.DONE)))

    def _scanned(self, wanted: list[PartState], asked_s: float | None, result: ScanResult) -> None:
        found, rest = wanted[: result.prefix_length], wanted[result.prefix_length :]
        if result.outcome is CallOutcome.DONE:
            if asked_s is not None:
                self._cache.rates[-1].answered(self._now() - asked_s)
            if rest:
                self._cache.pool.seen(self.parts.last_level, (rest[0].key,), there=False)
        self.parts.found(found, self.parts.last_level)
        if self._state is _Stage.ASKING:
            self._state = _Stage.SETTLING
            if rest:
                self._ends_at(rest[0].part[0], self._miss(result.outcome))
            self._check()
        elif found and self._worth is not None and found[0].form is not None:
            # It took too long for this lookup: the next one knows better.
            self.parts.probe(found[0], self.parts.last_level)

    def _miss(self, outcome: CallOutcome) -> str:
        """The counter of chunks that a question with this outcome did not find."""
        if outcome is CallOutcome.DONE:
            return "miss_absent"
        name, counters = self._cache.tiers[-1].name, self._cache.backings[-1].counters
        is_silent = outcome is CallOutcome.TIMED_OUT
        self.end.reasons.add(f"{name} {'has not answered' if is_silent else 'is not available'}")
        return counters.silent if is_silent else counters.misses[ReadOutcome.UNAVAILABLE]

    def _late(self, levels: Iterable[int], otherwise: str, waited_s: float = 0.0) -> str:
        """The counter of what these tiers did not deliver in time.

        waited_s: for an answer. A tier that takes much longer than as a rule, or that has never
        answered, is silent.
        """
        cache, last = self._cache, self.parts.last_level
        for level in levels:
            if (counter := cache.failure_of(level)) is not None:
                return counter
            is_asked = self._state is _Stage.ASKING and level == last
            if is_asked and waited_s >= _SILENT * cache.rates[level].latency_s:
                return cache.backings[level].counters.silent
        return otherwise

    def _ends_at(self, chunk: int, counter: str) -> None:
        # The prefix may already end earlier, because the host pool had no room.
        self.missed[counter] += max(0, self.bound - chunk)
        self._shrink(chunk, counter)

    # --------------------------------------------------------------- settle

    def _settle(self) -> None:
        """Decides the length of the prefix, and asks for or loads exactly the parts it needs.

        A part that nothing is known about may exist, until a prefix needs it. Then a tier is asked,
        and its answer settles again. Ends, because ``bound`` decreases and questions run out.

        Counts the room before it loads anything, so that a full pool loses no load that has begun.
        Loads that are being cancelled still take theirs.
        """
        pool, waiting, parts = self._cache.pool, self._cache.waiting, self.parts
        urgent, missing = self._request.urgent, parts.missing()
        parts.hold_pooled(missing)
        while True:
            if self._questions == 2:
                self._ends_at(parts.needs.longest(self.bound, parts.is_found), self._gap)
            length = parts.length
            parts.shrink(self.bound)
            if missing or parts.length != length:
                missing = parts.missing()
            if not missing and not parts.filling:
                self._load([])
                return
            units, held, units_per_chunk = parts.units()
            lacking = units - pool.free - pool.idle
            can_wait = not parts.has_loads  # else it would give those up
            too_many = units + held - pool.capacity
            if too_many > 0 and units_per_chunk > pool.capacity:
                self._no_room(self.bound)
            elif too_many > 0:
                parts.defer(too_many)
            elif lacking > 0 and not can_wait:
                # Round up: dropping a chunk frees at most its own parts.
                self._no_room(-(-lacking // units_per_chunk))
            elif unknown := [each for each in missing if not parts.is_found(each.part)]:
                self._ask(unknown)
                if self._state is _Stage.ASKING:
                    return
            elif self._is_measuring(awaited := parts.awaited()):
                return
            elif self._decide(awaited):
                pass
            elif units and can_wait and (lacking > 0 or not waiting.is_turn_of(self, urgent)):
                self._wait_for_room()
                return
            else:
                self._load(awaited)
                return

    def _load(self, awaited: list[PartState]) -> None:
        """Begins to load what is missing, from one tier after the other."""
        missing = [each for each in awaited if each.entry is None and not each.is_later]
        self.parts.to_load = sorted(missing, key=self.parts.level_of)
        self._state = _Stage.LOADING
        self._cache.waiting.leave(self)
        if awaited and self._worth is not None:
            rates = [rate.per_second() for rate in self._cache.rates]
            self._watch(self._worth, self._now() + 1.25 * self._worth.expected_s, rates)
        self._load_some()

    def _load_some(self) -> None:
        if self._state is _Stage.LOADING:
            for part in self.parts.begin_some():
                self._ended(part)
            if self.parts.to_load:
                self._cache.owner.post(self._load_some)
            else:
                self._check()

    def _is_measuring(self, awaited: list[PartState]) -> bool:
        """Whether to wait for the first load from a tier whose rate is not known."""
        worth, now_s, waits = self._worth, self._now(), False
        if worth is None:
            return False
        for level, first in self.parts.first(awaited).items():
            rate = self._cache.rates[level]
            if rate.per_second():
                continue
            if worth.measured_until_s is None:
                self.parts.probe(first, level)
            if worth.waits_for(rate, now_s):
                rate.when_one_ends(lambda: self._cache.owner.post(self._check))
                waits = True
        if waits and worth.measured_until_s is not None:
            self._wake_in(worth.measured_until_s - now_s, self._check)
        return waits

    def _decide(self, awaited: list[PartState], *, asks: bool = False) -> bool:
        """Ends the prefix before what is not worth loading; whether that made it shorter.

        asks: what no tier was asked about counts as found, after a question.
        """
        if self._worth is None:
            return False
        now_s = self._now()
        before = self._cache.waiting.bytes_before(self)
        loads = self.parts.load_times(awaited, self.bound, before, now_s)
        if asks:
            question_s = max(rate.latency_s for rate in self._cache.rates)
            loads = ((length, load_s and load_s + question_s) for length, load_s in loads)
        length = self._worth.prefix(loads, now_s)
        late = [self.parts.last_level] if asks else []
        for level, first in self.parts.first(awaited).items():
            self._cache.rates[level].is_slow = is_slow = first.part[0] >= length
            if is_slow:
                late.append(level)
                self.parts.probe(first, level)
        if length == self.bound:
            return False
        miss = self._late(late, "miss_slower")
        self._ends_at(length, miss)
        self.end.reasons.add("computing was faster" if miss == "miss_slower" else _FAILS)
        return True

    def _wait_for_room(self) -> None:
        """Waits for room, without pins: others may need theirs."""
        self.end.reasons.add("the host pool was full")
        if self.parts.release_all():
            self._questions = min(self._questions, 1)
        nbytes = sum(self.parts.bytes_left())
        self._cache.waiting.wait(self, nbytes, self._check, self._request.urgent)
        if self._worth is not None:
            self._wake_in(self._worth.compute_s(self.bound, self._now()), self._give_up)

    def _ask(self, unknown: list[PartState]) -> None:
        """Asks the last tier, if it has no index; see the module."""
        tiers, parts = self._cache.tiers, self.parts
        if not tiers or tiers[-1].lookup(unknown[0].key) is not None:
            self._questions = 2
            return
        self._ask_in_time()
        if not self._questions:
            self._questions = 1
            self._scan(unknown)
            return
        every = parts.needs.parts_of_any(self.bound)
        also = {parts.state(part) for part in every if not parts.is_found(part)}
        wanted = sorted(also.union(unknown), key=lambda each: each.part)
        done = posting(self._cache.owner, partial(self._answered, wanted))
        tiers[-1].exists([each.key for each in wanted], self._request.deadline_s, done)

    def _answered(self, wanted: list[PartState], result: ExistsResult) -> None:
        if result.outcome is CallOutcome.DONE:
            level, is_removing = self.parts.last_level, self._cache.queues[-1].is_removing
            answers = [
                (each, is_there and not is_removing(each.key))
                for each, is_there in zip(wanted, result.present, strict=True)
            ]
            self.parts.found([each for each, is_there in answers if is_there], level)
            absent = [each.key for each, is_there in answers if is_there is False]
            self._cache.pool.seen(level, absent, there=False)
        if self._state is _Stage.ASKING:
            self._state = _Stage.SETTLING
            self._questions = 2
            is_known = None not in result.present
            self._gap = self._miss(result.outcome if is_known else CallOutcome.UNAVAILABLE)
            self._check()

    def _no_room(self, chunks: int) -> None:
        self.end.reasons.add("the host pool was full")
        self._ends_at(self.bound - chunks, "miss_pool_full")

    def _filled(self, part: PartState) -> None:
        self.parts.filled(part)
        self._ended(part)

    def _ended(self, part: PartState) -> None:
        """A part is not being filled any more, or has no room."""
        if part.entry is None or part.entry.state is not EntryState.READY:
            self.end.reasons.add("a chunk could not be loaded")
            self._shrink(part.part[0], self.parts.failure_of(part))
        if self._state is _Stage.LOADING:
            self._check()
        else:
            # Posted: loads often fail together, also in the middle of `begin_loads`.
            self._cache.owner.post(self._check)

    # --------------------------------------------------------------- answer

    def _shrink(self, bound: int, counter: str) -> None:
        """The prefix ends before chunk ``bound``. counter: of the misses that this causes."""
        if bound < self.bound:
            self.bound, self.end.counter = bound, counter
        if self._state is _Stage.LOADING:
            self._state = _Stage.SETTLING

    def _expire(self) -> None:
        levels = self.parts.first(self.parts.awaited()) or [self.parts.last_level]
        miss = self._late(levels, "miss_deadline", math.inf)
        self._end_now("lookups_timed_out", miss, "the lookup deadline passed")

    def _end_now(self, event: str, miss: str, reason: str) -> None:
        """Answers with the parts that are READY. event, miss: counters of lookups and chunks."""
        if self._state is _Stage.ENDED:
            return
        if not self._cache.is_failure(miss):  # those are counted with the answer
            self._cache.metrics.count(event)
        self.end.reasons.add(reason)
        self._state = _Stage.SETTLING
        self._ends_at(self.parts.needs.longest(self.bound, self.parts.is_ready), miss)
        self._check()

    def _wake_in(self, wait_s: float, action: Action) -> None:
        """Replaces the pending wake-up."""
        if self._wake is not None:
            self._wake.cancel()
        due_s = self._now() + min(wait_s, _LONGEST_WAIT_S)
        self._wake = self._cache.owner.at(due_s, action)

    def _watch(self, worth: WorthLoading, until_s: float, rates: list[float]) -> None:
        """Checks again when the prefix should be loaded, or before if a tier is slower than then.

        rates: of the tiers when that was expected. One load may have shown too high a rate: what a
        network had saved up for it.
        """
        now_s, known = self._now(), zip(self._cache.rates, rates, strict=True)
        if now_s >= until_s or any(rate.per_second() < _SLOWER * was for rate, was in known):
            self._recheck(worth)
        else:
            look_s = max(worth.expected_s / 8, _SHORTEST_LOOK_S)
            again = partial(self._watch, worth, until_s, rates)
            self._wake_in(min(look_s, until_s - now_s), again)

    def _recheck(self, worth: WorthLoading) -> None:
        """Ends the prefix if computing the rest is faster."""
        now_s, left = self._now(), self.parts.bytes_left()
        late = [level for level, nbytes in enumerate(left) if nbytes]
        rates = self._cache.rates
        left_s = max((rates[level].seconds(left[level], now_s) for level in late), default=0.0)
        ready = self.parts.needs.longest(self.bound, self.parts.is_ready)
        if left_s <= worth.compute_s(self.bound - ready, now_s):
            self._wake_in(max(left_s / 2, _SHORTEST_LOAD_S), partial(self._recheck, worth))
        else:
            self._give_up(*late)

    def _give_up(self, *levels: int, waited_s: float = 0.0) -> None:
        """Waits for nothing any more; ``levels`` are those of tiers that took too long."""
        miss = self._late(levels, "miss_slower", waited_s)
        for level in levels:
            self._cache.rates[level].gave_up(self._now())
        self._end_now("lookups_cut", miss, "loading took too long")

    def _check(self) -> None:
        if self._state is _Stage.SETTLING:
            self._settle()
        if self._state is _Stage.LOADING and not (self.parts.filling or self.parts.to_load):
            if self._cache.is_failure(self.end.counter):
                self._cache.metrics.count("lookups_failed")
            # If it raises, the pins are still held, and the caller's `cancel` releases them.
            self._done(self)
            self.cancel()
            # After the answer, which does not wait for it.
            self._cache.owner.post(self._keep)

    def _keep(self) -> None:
        if entries := self.parts.pooled(self._cache.refreshed_before_s):
            self._cache.keep(entries)
