"""The budget of payload bytes in flight, counted in grains. The memory belongs to the cache.

A payload that is sent or loaded takes its whole share at once, or waits. A payload that is received
takes its share as the bytes arrive: one grain first, then as much again as it has. A client that
only announces a payload holds one grain; a slow client holds at most twice what it has sent.

Payloads cannot deadlock: a part is granted only if the largest payload would still fit beside it.
Otherwise the payload waits, first come first served, for all that it still needs, and then never
waits again.

`try_take` and `try_extend` may be called on any thread; they neither wait nor overtake a waiting
payload. Everything else belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque


class Share:
    """The part of a budget that one payload holds. nbytes: payload bytes that it covers."""

    __slots__ = ("_budget", "_grains", "nbytes")

    def __init__(self, budget: Budget, nbytes: int, grains: int) -> None:
        self.nbytes = nbytes
        self._budget = budget
        self._grains = grains

    def try_extend(self, rest: int) -> int:
        """Extends the share; returns by how many bytes, 0 if nothing can be granted now.

        rest: bytes of the payload that the share does not cover yet; positive.
        """
        part = min(rest, max(self.nbytes, self._budget.grain_bytes))
        return self._join(self._budget.try_part(part, is_last=part == rest))

    async def extend(self, rest: int) -> int:
        """As `try_extend`; waits, if it must, for the whole rest."""
        return self.try_extend(rest) or self._join(await self._budget.take(rest))

    def release(self) -> None:
        """Returns all grains. Idempotent."""
        grains, self._grains = self._grains, 0
        if grains:
            self._budget.give_back(grains)

    def _join(self, more: Share | None) -> int:
        if more is None:
            return 0
        self.nbytes += more.nbytes
        self._grains += more._grains
        return more.nbytes


class Budget:
    """`size_bytes`, rounded down to whole grains of `grain_bytes`.

    largest_bytes: of a payload that is received in parts; None: of the whole budget.
    """

    def __init__(self, size_bytes: int, grain_bytes: int, largest_bytes: int | None = None) -> None:
        self.grain_bytes = grain_bytes
        self.grain_count = size_bytes // grain_bytes
        self._free = self.grain_count
        self._kept_back = self.grain_count
        if largest_bytes is not None:
            self._kept_back = self._grains_for(largest_bytes)
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, asyncio.Future[Share]]] = deque()

    @property
    def used_grains(self) -> int:
        return self.grain_count - self._free

    @property
    def is_short(self) -> bool:
        return bool(self._waiting)

    def empty(self) -> Share:
        """An empty share, to be extended."""
        return Share(self, 0, 0)

    def try_take(self, nbytes: int) -> Share | None:
        """A share for a whole payload; None if it cannot be granted now."""
        return self.try_part(nbytes, is_last=True)

    def try_part(self, nbytes: int, *, is_last: bool) -> Share | None:
        """As `try_take`; a part that is not the last leaves room for the largest payload."""
        needed = self._grains_for(nbytes)
        with self._lock:
            if self._waiting or needed + (0 if is_last else self._kept_back) > self._free:
                return None
            self._free -= needed
        return Share(self, nbytes, needed)

    async def take(self, nbytes: int) -> Share:
        """A share of at most the whole budget, first come first served."""
        share = self.try_take(nbytes)
        if share is not None:
            return share
        waiter: asyncio.Future[Share] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, waiter))
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                waiter.result().release()
            self.give_back(0)  # the next payload may fit
            raise

    def give_back(self, grains: int) -> None:
        """Returns grains and grants them to waiting payloads, in order of arrival."""
        with self._lock:
            self._free += grains
            while self._waiting:
                nbytes, waiter = self._waiting[0]
                needed = self._grains_for(nbytes)
                if not waiter.done():
                    if needed > self._free:
                        break
                    self._free -= needed
                    waiter.set_result(Share(self, nbytes, needed))
                self._waiting.popleft()

    def _grains_for(self, nbytes: int) -> int:
        return -(-nbytes // self.grain_bytes)
