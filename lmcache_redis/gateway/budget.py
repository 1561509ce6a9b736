"""The budget of payload bytes in flight, counted in grains. The memory is the cache's.

A payload that is sent or loaded takes its whole share at once, or waits. One that is received
takes it as its bytes arrive: `extend` grants one grain first, then as much again as the payload
has. A client that only announces a payload holds a grain, a slow one at most twice what it sent.

No two payloads wait for each other: a part is granted only if the largest payload would still fit
beside it. Otherwise the payload waits, first come first served, for all that it still needs, and
then never again.

`try_take` and `try_extend` may be called from any thread; they neither wait nor overtake a payload
that waits. Everything else belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque


class Share:
    """What one payload has of a budget. nbytes: how much of the payload that covers."""

    __slots__ = ("_budget", "_grains", "nbytes")

    def __init__(self, budget: Budget, nbytes: int, grains: int) -> None:
        self.nbytes = nbytes
        self._budget = budget
        self._grains = grains

    def try_extend(self, rest: int) -> int:
        """Bytes by which the share has grown; 0 where nothing can be granted at once.

        rest: bytes of the payload that the share does not cover yet, more than none.
        """
        part = min(rest, max(self.nbytes, self._budget.grain_bytes))
        return self._join(self._budget.try_part(part, is_last=part == rest))

    async def extend(self, rest: int) -> int:
        """`try_extend`, or all that is missing when it is this payload's turn."""
        return self.try_extend(rest) or self._join(await self._budget.take(rest))

    def release(self) -> None:
        """Gives everything back. Idempotent."""
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
    """`size_bytes`, as far as they fill grains of `grain_bytes`.

    largest_bytes: of a payload that is received in parts; None: `most_bytes`.
    """

    def __init__(self, size_bytes: int, grain_bytes: int, largest_bytes: int | None = None) -> None:
        self.grain_bytes = grain_bytes
        self.grain_count = size_bytes // grain_bytes
        self._free = self.grain_count
        self._kept_back = self._grains_for(
            self.most_bytes if largest_bytes is None else largest_bytes
        )
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, asyncio.Future[Share]]] = deque()

    @property
    def used_grains(self) -> int:
        return self.grain_count - self._free

    @property
    def most_bytes(self) -> int:
        """The largest payload that ever fits."""
        return self.grain_count * self.grain_bytes

    @property
    def is_short(self) -> bool:
        """Whether a payload waits."""
        return bool(self._waiting)

    def empty(self) -> Share:
        """A share to be extended."""
        return Share(self, 0, 0)

    def try_take(self, nbytes: int) -> Share | None:
        """A share for a whole payload, or None where it cannot be granted at once."""
        return self.try_part(nbytes, is_last=True)

    def try_part(self, nbytes: int, *, is_last: bool) -> Share | None:
        """As `try_take`; a part that is not a payload's last leaves room for the largest one."""
        needed = self._grains_for(nbytes)
        with self._lock:
            if self._waiting or needed + (0 if is_last else self._kept_back) > self._free:
                return None
            self._free -= needed
        return Share(self, nbytes, needed)

    async def take(self, nbytes: int) -> Share:
        """A share of at most `most_bytes`, when it is this caller's turn."""
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
            self.give_back(0)  # the next one may fit
            raise

    def give_back(self, grains: int) -> None:
        """Returns grains; payloads that wait get them, in order of arrival."""
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
