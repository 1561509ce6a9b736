"""The rows of a plan as text: the columns that table and page share, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from lmcache_redis.plan.figures import PlanRow, enough

_GIB = 1 << 30


def gib(nbytes: float) -> str:
    """In GiB, short."""
    value = nbytes / _GIB
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _if_known(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


# By the title, what a column shows of a row.
COLUMNS: Mapping[str, Callable[[PlanRow], str]] = MappingProxyType(
    {
        "replicas": lambda row: str(row.replicas),
        "chunk": lambda row: str(row.chunk_size_tokens),
        "pool GiB": lambda row: gib(row.pool_bytes),
        "disk GiB": lambda row: gib(row.disk_bytes),
        "Redis GiB": lambda row: gib(row.redis_bytes),
        "hit rate": lambda row: f"{row.hit_rate:.1%}",
        "pool": lambda row: f"{row.hit_rate_pool:.1%}",
        "disk": lambda row: f"{row.hit_rate_disk:.1%}",
        "Redis": lambda row: f"{row.hit_rate_redis:.1%}",
        "GPU s saved": lambda row: f"{row.gpu_s_saved:,.0f}",
        "first token saved s": lambda row: f"{row.first_token_s_saved:.2f}",
        "engines busy": lambda row: _if_known(row.busy_share, ".0%"),
        "link MB/s": lambda row: _if_known(
            row.link_bytes_per_s and row.link_bytes_per_s / 1e6, ",.0f"
        ),
        "link at peak": lambda row: _if_known(row.link_peak_share, ".0%"),
        "$ a month": lambda row: f"{row.usd_per_month:,.0f}",
        "$ saved": lambda row: _if_known(row.usd_saved_per_month, ",.0f"),
    }
)


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
