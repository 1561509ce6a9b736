"""Figures, what each is compared with, and the targets."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_redis.bench.gpu.shapes import KIB

GATHER, SCATTER = "gather", "scatter"
STORE, RETRIEVE = "store", "retrieve"
RETRIEVE_P50, RETRIEVE_P99 = "retrieve p50", "retrieve p99"
DECODE = "decode step"

_LARGE_PAGE_BYTES = 16 * KIB
_TARGET_LARGE, _TARGET_SMALL = 0.85, 0.60
_TARGET_AGENT = 0.90
_TARGET_DECODE = 1.02


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: the median of ``rounds``, and of its ratios to the reference.

    value, reference: GB/s (both directions of a device copy counted), or milliseconds for times.
    ratio: value to reference; of throughput it should be high, of times low. worst: the
    round that was furthest from the target. target: None where the issue names none.
    """

    what: str
    case: str
    page_kib: float
    chunks: int
    value: float
    unit: str
    against: str
    reference: float
    ratio: float
    worst: float
    target: float | None
    rounds: int
    of_peak: float | None = None
    torch_alone: float | None = None
    launch_us: float | None = None

    @property
    def high_is_good(self) -> bool:
        return self.unit == "GB/s"

    @property
    def met(self) -> bool | None:
        """Whether the median meets the target; None where there is none."""
        if self.target is None:
            return None
        return self.ratio >= self.target if self.high_is_good else self.ratio <= self.target

    def verdict(self) -> str:
        if self.target is None:
            return "no target"
        sign = "at least" if self.high_is_good else "at most"
        return f"{sign} {self.target:.2f}: {'met' if self.met else 'NOT MET'}"


def kernel_target(page_bytes: int) -> float:
    """Of the device's copy bandwidth: 85 % for pages of 16 KiB and more, 60 % below."""
    return _TARGET_LARGE if page_bytes >= _LARGE_PAGE_BYTES else _TARGET_SMALL


def target_of(what: str) -> float | None:
    """The target of what goes through the agent."""
    if what in (STORE, RETRIEVE):
        return _TARGET_AGENT
    return _TARGET_DECODE if what == DECODE else None


def ratio_of(values: Sequence[float], references: Sequence[float]) -> list[float]:
    """Round by round: what slows a whole round down slows both."""
    return [value / reference for value, reference in zip(values, references, strict=True)]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that so many per cent of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, -(-len(ordered) * percent // 100) - 1)]


def unmet(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.met is False]
