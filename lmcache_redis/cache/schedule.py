# SPDX-License-Identifier: Apache-2.0
"""Which writes a tier begins, and when: decisions without I/O.

Chunks at the beginning of their prompts are written first: without them no later chunk is a hit.
Few bytes are in flight, so that loads never wait for a long queue and this order matters. While
chunks are loaded from the tier no write begins; but loads are not waited for longer than a second.

Only what is not due yet is looked at one by one: the queue of a large host pool has tens of
thousands of chunks. Times are of the owner's clock.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from lmcache_redis.cache.claims import Claims
from lmcache_redis.cache.pacing import TransferRate
from lmcache_redis.cache.pool import Entry
from lmcache_redis.tiers import ChunkIO, WriteOutcome

# The writes in flight: what the tier writes in this time, but not more bytes.
IN_FLIGHT_BYTES = 32 << 20
_IN_FLIGHT_S = 0.25
# With fewer bytes in flight a write takes as long as its round trip: it tells no rate.
LEAST_MEASURED_BYTES = 1 << 20
# A batch counts as lost after this many times the time that it should take.
_CLAIM_MARGIN = 4
_LEAST_CLAIM_S = 2.0
# Also if nothing is known of the tier, or all begins at once. Others wait for longer.
_MOST_CLAIM_S = 20.0
# Loads are never waited for longer.
GIVE_WAY_S = 1.0
# Chunks that are due within this time, such as those of one prefill, begin in one batch.
_BATCH_WINDOW_S = 0.005

_RANK = attrgetter("rank")


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class PendingWrite(ChunkIO):
    """A chunk that is to be written, from `due_s` on. done: told the outcome.

    questions: those about it that the tier has not answered. rank: those with lower ones are
    written earlier: its entry's position, and its place in line.
    """

    entry: Entry
    due_s: float = 0.0
    done: Callable[[WriteOutcome], None] = lambda outcome: None
    questions: int = 0
    rank: tuple[int, int] = (0, 0)


class WriteScheduler:
    """The writes of one tier that have not begun, and how many may.

    loads: from the same tier.

    Attributes:
        rate: of the writes that the tier has been given.
        claims: on chunks.
        is_stopping: all begin now.
        limit_bytes: of the queue; may change. What is queued beyond a smaller one is still written.
    """

    def __init__(self, loads: TransferRate, limit_bytes: int) -> None:
        self.is_stopping = False
        self.limit_bytes = limit_bytes
        self.loads = loads
        self.rate = TransferRate()
        self.claims = Claims()
        self._in_flight: set[PendingWrite] = set()
        self._begun_s = -math.inf
        self._next_due_s = math.inf  # of those that were not due yet
        self._order = itertools.count()
        self._queue: list[PendingWrite] = []  # by their ranks
        self._oldest: OrderedDict[PendingWrite, None] = OrderedDict()  # also, by deadline

    def __len__(self) -> int:
        """Writes that have not begun."""
        return len(self._queue)

    def add(self, write: PendingWrite) -> None:
        """A write whose deadline is not before those of others."""
        write.rank = write.entry.position, next(self._order)
        self._oldest[write] = None
        insort(self._queue, write, key=_RANK)

    def add_again(self, writes: Sequence[PendingWrite]) -> None:
        """Writes that were begun, but not given to the tier. They keep their ranks."""
        self._in_flight.difference_update(writes)
        for write in writes:
            insort(self._queue, write, key=_RANK)
        by_deadline = sorted([*self._oldest, *writes], key=attrgetter("deadline"))
        self._oldest = OrderedDict.fromkeys(by_deadline)

    def remove(self, write: PendingWrite) -> bool:
        """Take out a write; False if it has begun."""
        if write not in self._oldest:
            return False
        del self._oldest[write]
        del self._queue[bisect_left(self._queue, write.rank, key=_RANK)]
        return True

    def after(self, position: float) -> Iterator[PendingWrite]:
        """The writes of higher positions, the last first. None may be removed meanwhile."""
        return itertools.takewhile(lambda each: each.rank[0] > position, reversed(self._queue))

    def expired(self, now_s: float) -> list[PendingWrite]:
        """Takes out the writes whose deadline has passed."""
        expired = []
        while self._oldest and (write := next(iter(self._oldest))).deadline <= now_s:
            self.remove(write)
            expired.append(write)
        return expired

    def begin(self, now_s: float) -> list[PendingWrite]:
        """The writes that begin now, in their order. They are in flight until `ended`."""
        by_s = limit = math.inf
        if not self.is_stopping:
            by_s = now_s + _BATCH_WINDOW_S
            limit = min(IN_FLIGHT_BYTES, self._bytes_within(_IN_FLIGHT_S))
        self._next_due_s = math.inf
        in_flight_bytes = sum(each.nbytes for each in self._in_flight)
        # A batch costs less for each chunk, so there is none for every write that ends.
        if self._waits_until(now_s) > now_s or in_flight_bytes > limit // 2:
            return []
        begun = []
        for write in self._queue:
            if write.due_s > by_s:
                self._next_due_s = min(self._next_due_s, write.due_s)
                continue
            if in_flight_bytes and in_flight_bytes + write.nbytes > limit:
                break
            in_flight_bytes += write.nbytes
            begun.append(write)
        for write in reversed(begun):
            self.remove(write)
        self._in_flight.update(begun)
        if begun:
            self._begun_s = now_s
        return begun

    def next_s(self, now_s: float) -> float:
        """When to call `expired` and `begin` again, if nothing ends before."""
        times = [self._next_due_s]
        if self._oldest:
            times.append(next(iter(self._oldest)).deadline)
            if (until_s := self._waits_until(now_s)) > now_s:
                times.append(until_s)
        return min(times)

    def ended(self, write: PendingWrite) -> None:
        """A write is no longer in flight."""
        self._in_flight.discard(write)

    def given(self, nbytes: int, now_s: float) -> None:
        """The tier was given a write."""
        self.rate.begun(nbytes, now_s)

    def answered(self, nbytes: int, now_s: float, *, is_stored: bool) -> None:
        """The tier has answered a write."""
        is_measured = is_stored and self.rate.in_flight_bytes >= LEAST_MEASURED_BYTES
        self.rate.ended(nbytes, now_s, arrived=is_measured)

    def claim_s(self) -> float:
        """For how long other writers are kept from the chunks that are in flight."""
        if self.is_stopping:
            return _MOST_CLAIM_S
        in_flight_bytes = sum(each.nbytes for each in self._in_flight)
        rate = self.rate.per_second()
        expected_s = _CLAIM_MARGIN * in_flight_bytes / rate if rate else _MOST_CLAIM_S
        return min(_MOST_CLAIM_S, max(_LEAST_CLAIM_S, expected_s))

    def most_bytes(self, seconds: float) -> float:
        """The limit of what is queued: no more than the tier is known to write in that time."""
        return min(self.limit_bytes, max(IN_FLIGHT_BYTES, self._bytes_within(seconds)))

    def _bytes_within(self, seconds: float) -> float:
        """What the tier writes in that time; infinity if nothing has been written yet."""
        return self.rate.per_second() * seconds or math.inf

    def _waits_until(self, now_s: float) -> float:
        """Until when no write begins because of loads; not later than now: none waits."""
        is_loading = self.loads.in_flight_bytes and not self.is_stopping
        return self._begun_s + GIVE_WAY_S if is_loading else now_s
