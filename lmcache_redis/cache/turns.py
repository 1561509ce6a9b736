"""Which writes a tier begins, and when: no I/O.

Chunks that a lookup has asked for are written first; then those at the beginning of their prompts,
without which no later chunk is a hit. Few bytes are in flight, so that loads never wait for a long
queue and this order matters. While chunks are loaded from the tier no write begins; but loads are
not waited for longer than a second.

Times are those of `time.monotonic()`.
"""

from __future__ import annotations

import math

from lmcache_redis.cache.bet import TransferRate
from lmcache_redis.cache.pool import Entry
from lmcache_redis.resp.outcomes import ChunkIO

# The writes in flight: what the tier writes in this time, but not more bytes.
_IN_FLIGHT_S = 0.25
_IN_FLIGHT_BYTES = 32 << 20
# Loads are never waited for longer.
GIVE_WAY_S = 1.0


def order(entry: Entry) -> tuple[bool, int]:
    """Entries with lower values are written earlier."""
    return not entry.wanted, entry.position


class Turns:
    """The writes of one tier that are ready or in flight. loads: from the same tier.

    Attributes:
        ready: writes that have not begun.
    """

    def __init__(self, loads: TransferRate) -> None:
        self.ready: dict[Entry, ChunkIO] = {}
        self._loads = loads
        self._rate = TransferRate()
        self._in_flight: set[ChunkIO] = set()
        self._begun_s = -math.inf

    def begin(self, now_s: float) -> list[ChunkIO]:
        """The writes that begin now, which are in flight from then on."""
        if self.waits_until(now_s) > now_s:
            return []
        rate, limit = self._rate.per_second(), _IN_FLIGHT_BYTES
        if rate:
            limit = min(limit, int(rate * _IN_FLIGHT_S))
        # A batch costs less for each chunk, so there is none for every write that ends.
        if not self.ready or self._rate.in_flight_bytes > limit // 2:
            return []
        begun = []
        for entry in sorted(self.ready, key=order):
            nbytes = self.ready[entry].frame.chunk_bytes
            if self._rate.in_flight_bytes and self._rate.in_flight_bytes + nbytes > limit:
                break
            job = self.ready.pop(entry)
            self._in_flight.add(job)
            self._rate.begun(nbytes, now_s)
            begun.append(job)
        if begun:
            self._begun_s = now_s
        return begun

    def begin_all(self) -> list[ChunkIO]:
        """All that are ready, whatever is in flight."""
        jobs = [*self.ready.values()]
        self.ready.clear()
        return jobs

    def waits_until(self, now_s: float) -> float:
        """Until when no write begins because of loads; not later than now: none waits."""
        return self._begun_s + GIVE_WAY_S if self._loads.in_flight_bytes else now_s

    def ended(self, job: ChunkIO, now_s: float, *, is_stored: bool) -> None:
        """A write is no longer in flight. Does nothing if it was not."""
        if job in self._in_flight:
            self._in_flight.remove(job)
            self._rate.ended(job.frame.chunk_bytes, now_s, arrived=is_stored)
