# SPDX-License-Identifier: Apache-2.0
"""An hour of an agent's counters, for the page at `/`: a ring of fixed size.

One sample is taken every `SAMPLE_S` while there is a page. A minute is the sum of what grew between
its samples.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from lmcache_redis.tier_kinds import KINDS

SAMPLE_S: Final = 15.0
MINUTES: Final = 60
# The samples of an hour, the one before them, and one for timers that run early.
_SAMPLES: Final = round(MINUTES * 60 / SAMPLE_S) + 2
_MINUTE_S = 60.0


class Minute(NamedTuple):
    """What happened in a minute; as a sample: since the start. hits: by kind of tier."""

    asked_chunks: float = 0.0
    to_engines_bytes: float = 0.0
    from_engines_bytes: float = 0.0
    saved_tokens: float = 0.0
    saved_prefill_s: float = 0.0
    hits: tuple[float, ...] = (0.0,) * len(KINDS)

    @classmethod
    def of(cls, sums: Sequence[float]) -> Minute:
        """sums: what each of `_COUNTERS` grew by."""
        asked, to_engines, from_engines, tokens, seconds, *hits = sums
        return cls(asked, to_engines, from_engines, tokens, seconds, tuple(hits))

    @classmethod
    def sum(cls, minutes: Sequence[Minute]) -> Minute:
        rows = ((*each[:-1], *each.hits) for each in minutes)
        return cls.of([*map(sum, zip(*rows, strict=True))])


_COUNTERS: Final = (
    *("lookup_chunks", "retrieved_bytes", "gathered_bytes", "saved_tokens"),
    "saved_prefill_seconds",
    *(kind.hits for kind in KINDS),
)
_FIELDS: Final = 1 + len(_COUNTERS)


class History:
    """The samples of the last hour. Owned by the loop thread. Times are of its clock."""

    def __init__(self) -> None:
        self._values = array("d", bytes(8 * _FIELDS * _SAMPLES))
        self._taken = 0

    @property
    def nbytes(self) -> int:
        return len(self._values) * self._values.itemsize

    def take(self, counters: Mapping[str, float], now_s: float) -> None:
        """counters: a snapshot of the agent's `Metrics`."""
        first = self._taken % _SAMPLES * _FIELDS
        self._values[first : first + _FIELDS] = array("d", _sample(counters, now_s))
        self._taken += 1

    def minutes(self, counters: Mapping[str, float], now_s: float) -> list[Minute]:
        """Of the last hour, the oldest first; the last one is the minute that has begun."""
        samples = [*self._samples(), _sample(counters, now_s)]
        found = [[0.0] * len(_COUNTERS) for _ in range(MINUTES)]
        last = _minute(now_s)
        for before, after in pairwise(samples):
            ago = last - _minute(after[0])
            if ago < MINUTES:
                sums = found[-1 - ago]
                for number, (then, now) in enumerate(zip(before[1:], after[1:], strict=True)):
                    sums[number] += now - then
        return [Minute.of(sums) for sums in found]

    def _samples(self) -> Iterator[Sequence[float]]:
        """The oldest first."""
        for number in range(max(0, self._taken - _SAMPLES), self._taken):
            first = number % _SAMPLES * _FIELDS
            yield self._values[first : first + _FIELDS]


def _sample(counters: Mapping[str, float], now_s: float) -> Sequence[float]:
    return (now_s, *(counters[name] for name in _COUNTERS))


def _minute(at_s: float) -> int:
    """The one that ends at or after a time."""
    return math.ceil(at_s / _MINUTE_S)
