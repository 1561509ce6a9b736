"""Which writes a tier begins, and when: decisions without I/O.

Chunks that a lookup has asked for are written first; then those at the beginning of their prompts,
without which no later chunk is a hit. Few bytes are in flight, so that loads never wait for a long
queue and this order matters. While chunks are loaded from the tier no write begins; but loads are
not waited for longer than a second.

Nothing here looks at all that is queued: a queue of a large host pool has tens of thousands of
chunks. Times are those of `time.monotonic()`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lmcache_redis.cache.pacing import TransferRate
from lmcache_redis.cache.pool import Entry
from lmcache_redis.tiers import ChunkIO, WriteOutcome

# The writes in flight: what the tier writes in this time, but not more bytes.
IN_FLIGHT_BYTES = 32 << 20
_IN_FLIGHT_S = 0.25
# Loads are never waited for longer.
GIVE_WAY_S = 1.0
# Chunks that are due within this time, such as those of one prefill, begin in one batch.
_BATCH_WINDOW_S = 0.005

# Lower ranks are written earlier: not wanted, position.
Rank = tuple[bool, int]


@dataclass(slots=True, eq=False)
class PendingWrite:
    """A chunk that is to be written. done: told the outcome. queue: None: the write has begun."""

    entry: Entry
    job: ChunkIO
    done: Callable[[WriteOutcome], None] | None = None
    rank: Rank = (False, 0)
    queue: RankedWrites | None = None

    @property
    def nbytes(self) -> int:
        return self.job.frame.chunk_bytes


def rank_of(entry: Entry) -> Rank:
    """Entries with lower ranks are written earlier."""
    return not entry.wanted, entry.position


class RankedWrites:
    """Writes by rank; those of one rank in the order in which they were added."""

    def __init__(self) -> None:
        self._ranks: list[Rank] = []  # sorted
        self._writes: dict[Rank, OrderedDict[PendingWrite, None]] = {}

    def add(self, write: PendingWrite) -> None:
        write.queue, write.rank = self, rank_of(write.entry)
        if write.rank not in self._writes:
            insort(self._ranks, write.rank)
            self._writes[write.rank] = OrderedDict()
        self._writes[write.rank][write] = None

    def remove(self, write: PendingWrite) -> None:
        write.queue = None
        writes = self._writes[write.rank]
        del writes[write]
        if not writes:
            del self._writes[write.rank]
            del self._ranks[bisect_left(self._ranks, write.rank)]

    def first(self) -> PendingWrite | None:
        return next(iter(self._writes[self._ranks[0]])) if self._ranks else None

    def after(self, rank: Rank) -> Iterator[PendingWrite]:
        """Those of higher ranks, the last first."""
        for each in reversed(self._ranks):
            if each <= rank:
                return
            yield from reversed(self._writes[each])


class WriteScheduler:
    """The writes of one tier that have not begun, and how many may.

    Attributes:
        loads: from the same tier.
        is_stopping: all begin now.
        limit_bytes: of the queue; may change.
    """

    def __init__(self, loads: TransferRate, limit_bytes: int) -> None:
        self.is_stopping = False
        self.limit_bytes = limit_bytes
        self.loads = loads
        self._rate = TransferRate()
        self._in_flight: set[PendingWrite] = set()
        self._begun_s = -math.inf
        self._due: list[tuple[float, int, PendingWrite]] = []  # a heap; of those waiting
        self._numbers = itertools.count()
        self._waiting = RankedWrites()
        self._ready = RankedWrites()
        self._oldest: OrderedDict[PendingWrite, None] = OrderedDict()  # all, by their deadlines

    def __len__(self) -> int:
        """Writes that have not begun."""
        return len(self._oldest)

    def add(self, write: PendingWrite, due_s: float) -> None:
        """A write that may begin at ``due_s``; its deadline is not before those of others."""
        self._waiting.add(write)
        self._oldest[write] = None
        heapq.heappush(self._due, (due_s, next(self._numbers), write))

    def remove(self, write: PendingWrite) -> bool:
        """Take out a write; False if it has begun."""
        if write.queue is None:
            return False
        write.queue.remove(write)
        del self._oldest[write]
        return True

    def rank_again(self, write: PendingWrite) -> None:
        """The rank of its entry has changed."""
        if (queue := write.queue) is not None:
            queue.remove(write)
            queue.add(write)

    def after(self, rank: Rank) -> Iterator[PendingWrite]:
        """The writes of higher ranks, the last first. None may be removed meanwhile."""
        later = self._waiting.after(rank), self._ready.after(rank)
        return heapq.merge(*later, key=lambda write: write.rank, reverse=True)

    def expired(self, now_s: float) -> list[PendingWrite]:
        """Takes out the writes whose deadline has passed."""
        expired = []
        while self._oldest and (write := next(iter(self._oldest))).job.deadline <= now_s:
            self.remove(write)
            expired.append(write)
        return expired

    def begin(self, now_s: float) -> list[PendingWrite]:
        """The writes that begin now, in their order. They are in flight until `ended`."""
        by_s = math.inf if self.is_stopping else now_s + _BATCH_WINDOW_S
        while self._due and self._due[0][0] <= by_s:
            write = heapq.heappop(self._due)[2]
            if write.queue is self._waiting:
                self._waiting.remove(write)
                self._ready.add(write)
        limit = (
            math.inf if self.is_stopping else min(IN_FLIGHT_BYTES, self._bytes_within(_IN_FLIGHT_S))
        )
        in_flight_bytes = sum(each.nbytes for each in self._in_flight)
        # A batch costs less for each chunk, so there is none for every write that ends.
        if self._waits_until(now_s) > now_s or in_flight_bytes > limit // 2:
            return []
        begun = []
        while (first := self._ready.first()) is not None:
            if in_flight_bytes and in_flight_bytes + first.nbytes > limit:
                break
            self.remove(first)
            in_flight_bytes += first.nbytes
            begun.append(first)
        self._in_flight.update(begun)
        if begun:
            self._begun_s = now_s
        return begun

    def next_s(self, now_s: float) -> float:
        """When to call `expired` and `begin` again, if nothing ends before."""
        times = [self._due[0][0]] if self._due else []
        if self._oldest:
            times.append(next(iter(self._oldest)).job.deadline)
            if (until_s := self._waits_until(now_s)) > now_s:
                times.append(until_s)
        return min(times, default=math.inf)

    def written(self, nbytes: int, now_s: float) -> None:
        """The tier has been given a chunk."""
        self._rate.begun(nbytes, now_s)

    def stored(self, nbytes: int, now_s: float, *, is_stored: bool) -> None:
        """The tier has answered."""
        self._rate.ended(nbytes, now_s, arrived=is_stored)

    def ended(self, write: PendingWrite) -> bool:
        """A write is no longer in flight; returns whether it was."""
        was_in_flight = write in self._in_flight
        self._in_flight.discard(write)
        return was_in_flight

    def most_bytes(self, seconds: float) -> float:
        """The limit of what is queued: no more than the tier is known to write in that time."""
        return min(self.limit_bytes, max(IN_FLIGHT_BYTES, self._bytes_within(seconds)))

    def _bytes_within(self, seconds: float) -> float:
        """What the tier writes in that time; infinity if nothing has been written yet."""
        return self._rate.per_second() * seconds or math.inf

    def _waits_until(self, now_s: float) -> float:
        """Until when no write begins because of loads; not later than now: none waits."""
        is_loading = self.loads.in_flight_bytes and not self.is_stopping
        return self._begun_s + GIVE_WAY_S if is_loading else now_s
