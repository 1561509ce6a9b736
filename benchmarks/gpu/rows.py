# SPDX-License-Identifier: Apache-2.0
"""Layouts and options; the figures, their references and targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.engine import Engine, Shape
from benchmarks.report import is_met, ratios, verdict_text
from lmcache_redis.errors import ConfigError

KIB = 1 << 10
MIB = 1 << 20

# Separate K and V, heads of 128, blocks of 16 tokens: 32 layers of 8 KV heads; then 80 layers of
# one KV head for each of eight ranks. MLA: 61 layers of 576 elements, blocks of 64.
LLAMA_8B = Shape("8B, bf16", 64, 32 * KIB, 16)
TP8_70B = Shape("70B TP8, bf16", 160, 4 * KIB, 16)
# Chunks of 3 MiB, so that the agent moves several in one call: 48 layers of one KV head.
TP4_30B = Shape("30B-A3B TP4, fp8", 96, 2 * KIB, 16)
SHAPES = (
    LLAMA_8B,
    Shape("8B, fp8", 64, 16 * KIB, 16),
    TP8_70B,
    Shape("70B TP8, fp8", 160, 2 * KIB, 16),
    Shape("MLA, bf16", 61, 72 * KIB, 4),
)
KERNELS, AGENT, DECODING = PARTS = ("kernels", "agent", "decode")
GATHER, SCATTER = "gather", "scatter"
STORE, RETRIEVE = "store", "retrieve"
RETRIEVE_P50, RETRIEVE_P99 = "retrieve p50", "retrieve p99"
DECODE = "decode step"

_TARGETS = {STORE: 0.90, RETRIEVE: 0.90, DECODE: 1.02}
_LARGE_PAGE_BYTES = 16 * KIB
_TARGET_LARGE, _TARGET_SMALL = 0.85, 0.60


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure. Raises ConfigError for parts that do not exist.

    chunks: moved at a time through the agent. retrieves: for p50 and p99. seconds: of decode
    steps, with stores and without, in each round; a step is ``layers`` times a ``batch`` by a
    square matrix of ``width``. cold_bytes: touched before a kernel touches the same memory again,
    several times the GPU's cache. peak_bytes: of the copy that ``of_peak`` compares with.
    """

    parts: Sequence[str] = PARTS
    rounds: int = 5
    shapes: Sequence[Shape] = SHAPES
    agent_shapes: Sequence[Shape] = (LLAMA_8B, TP8_70B, TP4_30B)
    chunk_counts: Sequence[int] = (1, 4, 16, 64)
    chunks: int = 64
    retrieves: int = 100
    seconds: float = 2.0
    layers: int = 32
    width: int = 8192
    batch: int = 64
    cold_bytes: int = 512 * MIB
    peak_bytes: int = 2048 * MIB

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise ConfigError(f"no part {part!r}: there are {', '.join(PARTS)}")


QUICK = Options(
    rounds=2,
    agent_shapes=(LLAMA_8B,),
    chunk_counts=(1, 16),
    chunks=16,
    retrieves=20,
    seconds=0.5,
)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: the median of ``rounds``, and of its ratios to the reference.

    value, reference: GB/s (both directions of a device copy counted), or milliseconds for times.
    ratio: value to reference; high is good for throughput, low for times. worst: the round with
    the worst ratio. target: of the ratio, or None.
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
    launch_us: float | None = None

    @property
    def high_is_good(self) -> bool:
        return self.unit == "GB/s"

    @property
    def met(self) -> bool | None:
        """Whether the median meets the target; None without a target."""
        return is_met(self.ratio, self.target, at_least=self.high_is_good)

    def verdict(self) -> str:
        if self.target is None:
            return "no target"
        return verdict_text(self.met, f"{self.target:.2f}", at_least=self.high_is_good)


def row_of(
    what: str,
    shape: Shape,
    chunks: int,
    values: Sequence[float],
    references: Sequence[float],
    against: str,
    **more: float | None,
) -> Row:
    """A row of throughput in GB/s, compared round by round."""
    each = ratios(values, references)
    return Row(
        what=what,
        case=shape.name,
        page_kib=shape.page_bytes / KIB,
        chunks=chunks,
        value=median(values),
        unit="GB/s",
        against=against,
        reference=median(references),
        ratio=median(each),
        worst=min(each),
        target=target_of(what, shape),
        rounds=len(values),
        **more,
    )


def time_row_of(
    engine: Engine,
    what: str,
    value_s: float,
    reference_s: float,
    against: str,
    *,
    ratio: float,
    worst: float,
    rounds: int,
    detail: str = "",
) -> Row:
    """A row of the time of an engine's transfers or steps."""
    return Row(
        what=what,
        case=engine.shape.name + detail,
        page_kib=engine.shape.page_bytes / KIB,
        chunks=engine.chunks,
        value=value_s * 1e3,
        unit="ms",
        against=against,
        reference=reference_s * 1e3,
        ratio=ratio,
        worst=worst,
        target=target_of(what, engine.shape),
        rounds=rounds,
    )


def target_of(what: str, shape: Shape) -> float | None:
    """The target of a ratio. Of kernels it depends on the page size."""
    if what in (GATHER, SCATTER):
        return _TARGET_LARGE if shape.page_bytes >= _LARGE_PAGE_BYTES else _TARGET_SMALL
    return _TARGETS.get(what)


def unmet(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.met is False]
