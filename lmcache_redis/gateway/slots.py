"""Memory for payloads on their way: a fixed arena, slots for each payload all at once.

A payload gets all of its slots or waits, first come first served, so whoever holds slots never
waits for more and no two wait for each other. Slots that are neighbours are one buffer, and a
payload gets neighbours where there are any. `try_take` may be called from any thread and never
waits nor overtakes; everything else belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from types import TracebackType

from lmcache_redis.gateway.runs import FreeRuns
from lmcache_redis.hostpool import Arena


class Lease:
    """The slots of one payload of `nbytes`. Memory that nobody looks at is not touched."""

    def __init__(self, pool: SlotPool, runs: list[range], nbytes: int) -> None:
        self.nbytes = nbytes
        self._pool = pool
        self._runs = runs

    @property
    def views(self) -> list[memoryview]:
        """Writable, in order, together exactly `nbytes`; none after the release."""
        return self._pool.views(self._runs, self.nbytes)

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
    """`size_bytes` of memory at most, in slots of `slot_bytes`. Raises as `Arena` does."""

    def __init__(self, size_bytes: int, slot_bytes: int) -> None:
        if slot_bytes <= 0:
            raise ValueError(f"slot_bytes is {slot_bytes}; it must be positive")
        self._slot_bytes = slot_bytes
        self.slot_count = size_bytes // slot_bytes
        self._arena = Arena(size_bytes, self.most_bytes)
        self._memory = self._arena.slot_view(0, self.most_bytes)
        self._lock = threading.Lock()
        self._free = FreeRuns(self.slot_count)
        self._waiting: deque[tuple[int, asyncio.Future[Lease]]] = deque()

    @property
    def used_slots(self) -> int:
        return self.slot_count - self._free.free

    @property
    def most_bytes(self) -> int:
        """The largest payload that ever fits."""
        return self.slot_count * self._slot_bytes

    def try_take(self, nbytes: int) -> Lease | None:
        """Slots for a payload, or None where there are none at once."""
        with self._lock:
            if self._waiting or self._slots_for(nbytes) > self._free.free:
                return None
            return self._take(nbytes)

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
            self.give_back([])  # whoever waited behind may be next
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

    def _take(self, nbytes: int) -> Lease:
        return Lease(self, self._free.take(self._slots_for(nbytes)), nbytes)
