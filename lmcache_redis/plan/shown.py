"""The rows of a plan as text: the columns that table and page share, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lmcache_redis.plan.figures import PlanRow, enough

_GIB = 1 << 30
_NONE = "-"


class ShownColumn(NamedTuple):
    """A column, and what it shows of a row."""

    title: str
    text: Callable[[PlanRow], str]


def gib(nbytes: float) -> str:
    """In GiB, short."""
    value = nbytes / _GIB
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


COLUMNS = (
    ShownColumn("replicas", lambda row: str(row.replicas)),
    ShownColumn("chunk", lambda row: str(row.chunk_size_tokens)),
    ShownColumn("policy", lambda row: row.policy),
    ShownColumn("pool GiB", lambda row: gib(row.pool_bytes)),
    ShownColumn("disk GiB", lambda row: gib(row.disk_bytes)),
    ShownColumn("Redis GiB", lambda row: gib(row.redis_bytes)),
    ShownColumn("hit rate", lambda row: f"{row.hit_rate:.1%}"),
    ShownColumn("pool", lambda row: f"{row.hit_rate_pool:.1%}"),
    ShownColumn("disk", lambda row: f"{row.hit_rate_disk:.1%}"),
    ShownColumn("Redis", lambda row: f"{row.hit_rate_redis:.1%}"),
    ShownColumn("GPU s saved", lambda row: f"{row.gpu_s_saved:,.0f}"),
    ShownColumn("first token saved s", lambda row: f"{row.first_token_s_saved:.2f}"),
    ShownColumn("engines busy", lambda row: _share(row.busy_share)),
    ShownColumn("link MB/s", lambda row: _mega(row.link_bytes_per_s)),
    ShownColumn("link at peak", lambda row: _share(row.link_peak_share)),
    ShownColumn("$ a month", lambda row: f"{row.usd_per_month:,.0f}"),
    ShownColumn("$ saved", lambda row: _dollars(row.usd_saved_per_month)),
)


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{value:.0%}"


def _mega(value: float | None) -> str:
    return _NONE if value is None else f"{value / 1e6:,.0f}"


def _dollars(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.0f}"


def cells(row: PlanRow) -> list[str]:
    return [column.text(row) for column in COLUMNS]


def sentence(rows: Sequence[PlanRow]) -> str:
    """What to take from the rows."""
    row = enough(rows)
    if row is None:
        return (
            "No prompt repeats the beginning of an earlier one: a cache of any size saves nothing."
        )
    highest = max(each.hit_rate for each in rows)
    parts = [f"{gib(row.pool_bytes)} GiB of host pool"]
    if row.disk_bytes:
        parts.append(f"{gib(row.disk_bytes)} GiB of disk")
    if row.redis_bytes:
        parts.append(f"{gib(row.redis_bytes)} GiB of Redis")
    said = (
        f"{' and '.join(parts)} reach a hit rate of {row.hit_rate:.1%}; the best row has "
        f"{highest:.1%}."
    )
    if row.link_peak_share is not None and row.link_peak_share > 1:
        said += " At its busiest the link to Redis cannot carry that."
    if row.busy_share is not None and row.busy_share > 1:
        said += " The replicas cannot compute the rest in the time of the trace: add some."
    return said


def warnings(rows: Sequence[PlanRow]) -> list[str]:
    """Of all rows together."""
    slower = max((row.slower_tokens / max(1, row.asked_tokens) for row in rows), default=0.0)
    if slower < 0.01:
        return []
    return [
        f"Up to {slower:.0%} of the tokens were found and not loaded: computing them was faster "
        "than this link."
    ]
