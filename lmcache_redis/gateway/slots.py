"""Memory for payloads in flight: a fixed arena, cut into slots.

A payload that is sent gets all of its slots at once, or waits. One that is received gets them as
its bytes come: `extend` gives one slot at first, then as many as it has. A client that only
announces a payload has a slot, and a slow one no more than twice of what it sent.

No two wait for each other: parts are given only as long as the largest payload would still fit.
Where it would not, a payload waits, first come first served, for all the slots that it still
needs, and then never again.

Slots that are neighbours are one buffer, of which a tier writes and reads stripes without a copy;
a payload gets neighbours where there are enough.

`try_take` and `try_extend` may be called from any thread and never wait nor overtake; everything
else belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_left
from collections import deque
from types import TracebackType

from lmcache_redis.cache.memory import Arena


class FreeRuns:
    """All of `count` slots at first. Not thread-safe."""

    def __init__(self, count: int) -> None:
        self.free = count
        self._starts = [0] * bool(count)
        self._ends = [count] * bool(count)

    def take(self, wanted: int, after: int = 0) -> list[range]:
        """So many slots, of which there must be enough: in one run, or else in a few.

        after: the slot from which on a run is looked for first.
        """
        self.free -= wanted
        if not wanted:
            return []
        first = bisect_left(self._starts, after)
        for at in (*range(first, len(self._starts)), *range(first)):
            if self._ends[at] - self._starts[at] >= wanted:
                return [self._cut(at, wanted)]
        taken: list[range] = []
        while wanted:
            at = max(range(len(self._starts)), key=lambda n: self._ends[n] - self._starts[n])
            taken.append(self._cut(at, min(wanted, self._ends[at] - self._starts[at])))
            wanted -= len(taken[-1])
        return taken

    def give_back(self, run: range) -> None:
        """A run that was taken is free again, joined with what is free beside it."""
        self.free += len(run)
        start, end = run.start, run.stop
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == end:
            end = self._ends[at]
            del self._starts[at], self._ends[at]
        if at > 0 and self._ends[at - 1] == start:
            self._ends[at - 1] = end
            return
        self._starts.insert(at, start)
        self._ends.insert(at, end)

    def _cut(self, at: int, wanted: int) -> range:
        """The first slots of a run."""
        start = self._starts[at]
        self._starts[at] = start + wanted
        if self._starts[at] == self._ends[at]:
            del self._starts[at], self._ends[at]
        return range(start, start + wanted)


class Lease:
    """Slots for `nbytes` of one payload. Memory that is not looked at is not touched."""

    def __init__(self, pool: SlotPool, runs: list[range], nbytes: int) -> None:
        self.nbytes = nbytes
        self._pool = pool
        self._runs = runs

    @property
    def views(self) -> list[memoryview]:
        """Writable, in order, together exactly `nbytes`; none after the release."""
        return self._pool.views(self._runs, self.nbytes)

    def try_extend(self, rest: int) -> list[memoryview]:
        """Views of slots for what comes next; none where there are none at once.

        rest: bytes of the payload that this does not hold yet, more than none.
        """
        more = self._pool.try_more(self.nbytes, rest, after=self._end)
        return [] if more is None else self._join(more)

    async def extend(self, rest: int) -> list[memoryview]:
        """`try_extend`, or all that is missing as soon as it is this payload's turn."""
        return self.try_extend(rest) or self._join(await self._pool.take(rest))

    def _join(self, more: Lease) -> list[memoryview]:
        views = more.views
        if more._runs[0].start == self._end:
            more._runs[0] = range(self._runs.pop().start, more._runs[0].stop)
        self._runs += more._runs
        self.nbytes += more.nbytes
        return views

    @property
    def _end(self) -> int:
        return self._runs[-1].stop if self._runs else -1

    def release(self) -> None:
        """Give the slots back; nothing may use the views any more. Idempotent."""
        runs, self._runs = self._runs, []
        self._pool.give_back(runs)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class SlotPool:
    """`size_bytes` of memory at most, in slots of `slot_bytes`. Raises as `Arena` does.

    largest_bytes: of a payload that is received in parts; without it any that fits.
    """

    def __init__(self, size_bytes: int, slot_bytes: int, largest_bytes: int | None = None) -> None:
        if slot_bytes <= 0:
            raise ValueError(f"slot_bytes is {slot_bytes}; it must be positive")
        self._slot_bytes = slot_bytes
        self.slot_count = size_bytes // slot_bytes
        self._arena = Arena(size_bytes, self.most_bytes)
        self._memory = self._arena.slot_view(0, self.most_bytes)
        self._lock = threading.Lock()
        self._free = FreeRuns(self.slot_count)
        largest_bytes = self.most_bytes if largest_bytes is None else largest_bytes
        self._reserve = self._slots_for(largest_bytes)
        self._waiting: deque[tuple[int, asyncio.Future[Lease]]] = deque()

    @property
    def used_slots(self) -> int:
        return self.slot_count - self._free.free

    @property
    def most_bytes(self) -> int:
        """The largest payload that ever fits."""
        return self.slot_count * self._slot_bytes

    @property
    def is_short(self) -> bool:
        """Whether a payload waits for slots."""
        return bool(self._waiting)

    def empty(self) -> Lease:
        """A lease to be extended."""
        return Lease(self, [], 0)

    def try_take(self, nbytes: int) -> Lease | None:
        """Slots for a payload, or None where there are none at once."""
        return self._try(nbytes)

    def try_more(self, held: int, rest: int, after: int) -> Lease | None:
        """What `Lease.try_extend` calls."""
        part = min(rest, max(held, self._slot_bytes))
        return self._try(part, self._reserve if part < rest else 0, after)

    async def take(self, nbytes: int) -> Lease:
        """Slots for a payload of at most `most_bytes`, as soon as it is this caller's turn."""
        lease = self.try_take(nbytes)
        if lease is not None:
            return lease
        waiter: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, waiter))
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                waiter.result().release()
            self.give_back([])  # the one behind may be next
            raise

    def give_back(self, runs: list[range]) -> None:
        """What `Lease.release` calls."""
        granted: list[tuple[asyncio.Future[Lease], Lease]] = []
        with self._lock:
            for run in runs:
                self._free.give_back(run)
            while self._waiting:
                nbytes, waiter = self._waiting[0]
                if not waiter.done() and self._slots_for(nbytes) > self._free.free:
                    break
                self._waiting.popleft()
                if not waiter.done():
                    granted.append((waiter, self._take(nbytes)))
        for waiter, lease in granted:
            waiter.set_result(lease)

    def views(self, runs: list[range], nbytes: int) -> list[memoryview]:
        """What `Lease` calls: the first `nbytes` of the runs in order."""
        views = []
        for run in runs:
            start = run.start * self._slot_bytes
            views.append(self._memory[start : start + min(len(run) * self._slot_bytes, nbytes)])
            nbytes -= len(views[-1])
        return views

    def close(self) -> None:
        """Give the memory back, with the last view that is out."""
        self._memory.release()
        self._arena.close()

    def _slots_for(self, nbytes: int) -> int:
        return -(-nbytes // self._slot_bytes)

    def _try(self, nbytes: int, left_over: int = 0, after: int = 0) -> Lease | None:
        """left_over: slots that have to remain."""
        with self._lock:
            if self._waiting or self._slots_for(nbytes) + left_over > self._free.free:
                return None
            return self._take(nbytes, after)

    def _take(self, nbytes: int, after: int = 0) -> Lease:
        return Lease(self, self._free.take(self._slots_for(nbytes), after), nbytes)
