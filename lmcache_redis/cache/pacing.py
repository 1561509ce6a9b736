"""What moves between the host pool and the tiers, and when: decisions without I/O.

Which loads are worth it. A tier and an engine are two queues. A tier loads the bytes in flight
before it loads others (`TransferRate`), an engine computes the prompts that it has before it
computes others (`Computing`). A request whose prefix is loaded has its first token when both are
ready and the rest of the prompt is computed; `prefix_worth_loading` finds the prefix for which that
is soonest. Nothing that is not measured yet counts: the first loads are begun, and measured.

Which lookup loads next, if the pool has no room for all (`Line`).

Times are those of `time.monotonic()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

from lmcache_redis.cache.pool import HostPool
from lmcache_redis.cache.threads import Owner

# What a tier did so much busy time ago, or so much idle time, counts half: as so much busy time at
# most, so that one chunk after a pause shows that the tier has become faster.
_HALF_LIFE_S = 0.15
_IDLE_HALF_LIFE_S = 2.0
_LEAST_WEIGHT_S = 0.001
# A tier that was too slow has to be so much faster than needed: else it changes with every load.
_HYSTERESIS = 1.25
_PROBE_EVERY_S = 10.0


class TransferRate:
    """The bytes per second that a tier delivers, from its loads.

    Attributes:
        in_flight_bytes: of the loads that have begun and not ended.
        is_slow: computing was faster when it was last asked.
    """

    def __init__(self) -> None:
        self.in_flight_bytes = 0
        self.is_slow = False
        self._bytes = 0.0
        self._busy_s = 0.0
        self._since_s = 0.0  # while loads are in flight: when the last one arrived
        self._probed_s = -math.inf

    def begun(self, nbytes: int, now_s: float) -> None:
        if not self.in_flight_bytes:
            kept = 0.5 ** ((now_s - self._since_s) / _IDLE_HALF_LIFE_S)
            weight_s = max(kept * _HALF_LIFE_S, _LEAST_WEIGHT_S)
            if self._busy_s > weight_s:
                self._keep(weight_s / self._busy_s)
            self._since_s = now_s
        self.in_flight_bytes += nbytes

    def ended(self, nbytes: int, now_s: float, *, arrived: bool) -> None:
        """A load has ended. What did not arrive says nothing of the rate."""
        self.in_flight_bytes -= nbytes
        if arrived:
            self._add(nbytes, now_s)
        self._since_s = now_s

    def fell_behind(self, now_s: float) -> None:
        """The loads in flight are given up because nothing has arrived for too long.

        From then on they count as if all had arrived in twice that time, until some arrive.
        """
        stalled_s = self._stalled_s(now_s)
        is_lower = self.in_flight_bytes * self._busy_s < 2 * stalled_s * self._bytes
        if stalled_s and (is_lower or not self._busy_s):
            self._bytes, self._busy_s = self.in_flight_bytes, 2 * stalled_s

    def per_second(self) -> float:
        """Bytes per second; 0.0 if nothing has arrived yet."""
        return self._bytes / self._busy_s if self._busy_s else 0.0

    def seconds(self, nbytes: int, now_s: float, *, behind: bool = True) -> float:
        """The expected time to load so many bytes, behind those in flight if ``behind``.

        If nothing has arrived for longer than all in flight should take, or without a rate: at
        least as long again.
        """
        rate, stalled_s = self.per_second(), self._stalled_s(now_s)
        if not rate:
            return stalled_s
        load_s = (nbytes + (self.in_flight_bytes if behind else 0)) / rate
        if stalled_s > self.in_flight_bytes / rate:
            load_s = max(load_s, stalled_s)
        return load_s * (_HYSTERESIS if self.is_slow else 1.0)

    def is_probe_due(self, now_s: float) -> bool:
        """Whether it is time for a load that shows whether the tier has become faster."""
        return now_s >= self._probed_s + _PROBE_EVERY_S

    def may_probe(self, now_s: float) -> bool:
        """Whether such a load may begin now. True once each time."""
        if self.in_flight_bytes or not self.is_probe_due(now_s):
            return False
        self._probed_s = now_s
        return True

    def _stalled_s(self, now_s: float) -> float:
        return now_s - self._since_s if self.in_flight_bytes else 0.0

    def _add(self, nbytes: int, now_s: float) -> None:
        busy_s = max(1e-6, now_s - self._since_s)
        self._keep(0.5 ** (busy_s / _HALF_LIFE_S))
        self._bytes += nbytes
        self._busy_s += busy_s
        self._since_s = now_s

    def _keep(self, share: float) -> None:
        """Older transfers count less; the rate is the same."""
        self._bytes *= share
        self._busy_s *= share


class Computing:
    """What an engine has to compute.

    Attributes:
        token_s: seconds per prompt token as the engine has measured them; 0.0: not yet.
    """

    def __init__(self) -> None:
        self.token_s = 0.0
        self._free_s = 0.0

    def add(self, tokens: int, now_s: float) -> None:
        """The engine has been told to compute so many tokens."""
        self._free_s = max(self._free_s, now_s) + tokens * self.token_s

    def free_in_s(self, now_s: float) -> float:
        """When it could begin to compute another prompt."""
        return max(0.0, self._free_s - now_s)


def prefix_worth_loading(
    loads: Iterable[tuple[int, float]], chunks: int, chunk_s: float, free_in_s: float
) -> int:
    """The prefix with which the first token is expected soonest; the longest one if several are.

    loads: prefixes, each with the seconds until it is loaded. chunks: of the prompt. chunk_s: the
    seconds to compute one. free_in_s: when the engine can begin.
    """
    best, best_s = 0, math.inf
    for length, load_s in loads:
        first_token_s = max(load_s, free_in_s) + (chunks - length) * chunk_s
        if (first_token_s, -length) < (best_s, -best):
            best, best_s = length, first_token_s
    return best


class _Place(NamedTuple):
    again: Callable[[], None]
    nbytes: int
    urgent: bool


class Line:
    """Lookups that wait for room in the host pool: the urgent before the others, in their order.

    They hold no pins while they wait, so no two wait for each other's memory. Owned by the owner's
    thread.
    """

    def __init__(self, owner: Owner, pool: HostPool) -> None:
        self._owner = owner
        pool.on_room = self._wake
        self._waiting: dict[Hashable, _Place] = {}  # in the order of their turns
        self._is_posted = False

    def __len__(self) -> int:
        return len(self._waiting)

    def is_turn_of(self, who: Hashable, urgent: bool = False) -> bool:
        """Whether ``who``, in the line or not yet, would be the next one."""
        for each, place in self._waiting.items():
            return each == who or (urgent and not place.urgent)
        return True

    def bytes_before(self, who: Hashable) -> int:
        """The bytes that all before ``who`` want to load."""
        total = 0
        for each, place in self._waiting.items():
            if each == who:
                break
            total += place.nbytes
        return total

    def wait(
        self, who: Hashable, nbytes: int, again: Callable[[], None], urgent: bool = False
    ) -> None:
        """Enters the line, or keeps its place. The first in it is told of more room by ``again``.

        nbytes: what it wants to load.
        """
        is_new = who not in self._waiting
        self._waiting[who] = _Place(again, nbytes, urgent)
        if urgent and is_new:
            self._waiting = dict(sorted(self._waiting.items(), key=lambda each: not each[1].urgent))

    def leave(self, who: Hashable) -> None:
        """Leaves the line, if it is in it."""
        if self._waiting.pop(who, None) is not None:
            self._wake()

    def _wake(self) -> None:
        if self._waiting and not self._is_posted:
            self._is_posted = True
            self._owner.post(self._serve)

    def _serve(self) -> None:
        self._is_posted = False
        first = next(iter(self._waiting), None)
        if first is not None:
            self._waiting[first].again()  # if it leaves, the next is served
