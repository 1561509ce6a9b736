# SPDX-License-Identifier: Apache-2.0
"""What a plan shows: the columns of its rows, what follows from them, and an HTML page.

The page has plots as inline SVG. It loads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import compress, islice
from types import MappingProxyType

from lmcache_redis.plan.figures import PlanRow, best_row

_GIB = 1 << 30
_COLOURS = ("#c6302b", "#3b6ea5", "#7aa874", "#8d6a9f", "#b58a2e", "#5f6b7a")
_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 28, 28, 44
_LEGEND_LINE = 16  # below the axis
_LABEL_WIDTH = 34
_TICKS = 5
_MOST_LINES = 6

# Of a page and of a picture by itself, light or dark as the reader's screen.
_THEME = """
:root{color-scheme:light dark;--ink:#222;--soft:#555;--line:#e4e6ea;--paper:#fff;--even:#f4f5f7;
--best:#fbeceb}
@media(prefers-color-scheme:dark){:root{--ink:#e3e5e8;--soft:#a9afb8;--line:#363a42;--paper:#16181c;
--even:#1e2126;--best:#43201f}}
svg{font:11px system-ui,sans-serif;background:var(--paper);max-width:100%;height:auto}
svg text{fill:var(--soft)}svg text.title{fill:var(--ink);font-weight:600}
svg .grid{stroke:var(--line)}svg .key{stroke-width:3px}
"""
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:1180px;padding:0 1em;
color:var(--ink);background:var(--paper)}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:1.6em}.rows{overflow-x:auto}
table{border-collapse:collapse;font-size:13px}td,th{padding:3px 9px;text-align:right}
th{border-bottom:2px solid #999;vertical-align:bottom}tr:nth-child(even){background:var(--even)}
tr.best{background:var(--best);font-weight:600}.plots{display:flex;flex-wrap:wrap;gap:1em}
dl{display:grid;grid-template-columns:max-content auto;gap:2px 1.2em}dt{color:var(--soft)}
dd{margin:0}
"""


def gib(nbytes: float) -> str:
    """A size in GiB, short."""
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
        "store after": lambda row: str(row.store_after),
        "hit rate": lambda row: f"{row.hit_rate:.1%}",
        "pool": lambda row: f"{row.hit_rate_pool:.1%}",
        "disk": lambda row: f"{row.hit_rate_disk:.1%}",
        "Redis": lambda row: f"{row.hit_rate_redis:.1%}",
        "stored GiB": lambda row: gib(row.stored_bytes),
        "GPU s saved": lambda row: f"{row.gpu_s_saved:,.0f}",
        "first token saved s": lambda row: f"{row.first_token_s_saved:.2f}",
        "engines busy": lambda row: _if_known(row.busy_share, ".0%"),
        "link MB/s": lambda row: _if_known(
            row.link_bytes_per_s and row.link_bytes_per_s / 1e6, ",.0f"
        ),
        "link at peak": lambda row: _if_known(row.link_peak_share, ".0%"),
        "$ a month": lambda row: f"{row.usd_per_month:,.0f}",
        "$ saved": lambda row: _if_known(row.usd_saved_per_month, ",.0f"),
        "$ net": lambda row: _if_known(row.usd_net_per_month, ",.0f"),
    }
)


def sentence(rows: Sequence[PlanRow]) -> str:
    """What to take from the rows."""
    row = best_row(rows)
    if row is None:
        return (
            "No prompt repeats the beginning of an earlier one: a cache of any size saves nothing."
        )
    highest = max(each.hit_rate for each in rows)
    tiers = {"host pool": row.pool_bytes, "disk": row.disk_bytes, "Redis": row.redis_bytes}
    parts = [f"{gib(n)} GiB of {tier}" for tier, n in tiers.items() if n or tier == "host pool"]
    others = {
        "replicas": row.replicas,
        "tokens in a chunk": row.chunk_size_tokens,
        "requests before a chunk is stored": row.store_after,
    }
    names = ("replicas", "chunk_size_tokens", "store_after")
    for name, (words, value) in zip(names, others.items(), strict=True):
        if len({getattr(each, name) for each in rows}) > 1:
            parts.append(f"{value} {words}")
    reached = f"a hit rate of {row.hit_rate:.1%}, where the highest is {highest:.1%}."
    saved, net = row.usd_saved_per_month, row.usd_net_per_month
    if saved is None or net is None:
        said = (
            f"Cheapest of what has 95 % of the highest hit rate: {' and '.join(parts)}, {reached}"
        )
    elif net <= 0:
        said = "At these prices no row saves more than it costs."
    else:
        said = (
            f"What nets the most: {' and '.join(parts)}, ${net:,.0f} a month (saves ${saved:,.0f} "
            f"of GPU time, costs ${row.usd_per_month:,.0f}), and {reached}"
        )
    if row.link_peak_share is not None and row.link_peak_share > 1:
        said += " At its busiest the link to Redis cannot carry that."
    if row.busy_share is not None and row.busy_share > 1:
        said += " The replicas cannot compute the rest in the time of the trace: add some."
    return said


def admission(row: PlanRow, less: PlanRow) -> str:
    """What is saved and lost if chunks are stored after two requests."""
    saved = 1 - less.stored_bytes / max(1, row.stored_bytes)
    return (
        f"With --store-after {less.store_after} agents would write {saved:.0%} less to a Redis of "
        f"{gib(row.redis_bytes)} GiB ({gib(less.stored_bytes)} GiB instead of "
        f"{gib(row.stored_bytes)}), and the hit rate would be {less.hit_rate:.1%} instead of "
        f"{row.hit_rate:.1%}."
    )


def warnings(rows: Sequence[PlanRow]) -> list[str]:
    """The warnings of all rows together."""
    slower = max((row.slower_tokens / max(1, row.asked_tokens) for row in rows), default=0.0)
    if slower < 0.01:
        return []
    return [
        f"Up to {slower:.0%} of the tokens were found and not loaded: computing them was faster "
        "than this link."
    ]


# By name: GiB of host pool of each replica, and a value.
_Lines = dict[str, list[tuple[float, float]]]


def page(
    title: str, assumed: Mapping[str, str], notes: Sequence[str], rows: Sequence[PlanRow]
) -> str:
    """The whole document."""
    best = best_row(rows)
    facts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in assumed.items())
    said = "".join(f"<p>{escape(note)}</p>" for note in (sentence(rows), *notes))
    head = "".join(f"<th>{escape(title)}</th>" for title in COLUMNS)
    body = "".join(
        f"<tr{' class=best' if row is best else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in (of(row) for of in COLUMNS.values()))
        + "</tr>"
        for row in rows
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8>"
        f'<meta name=viewport content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1>{said}"
        f"<div class=plots>{''.join(plots(rows))}</div><h2>Every row</h2>"
        f"<div class=rows><table><tr>{head}</tr>{body}</table></div>"
        f"<h2>Assumed</h2><dl>{facts}</dl></html>\n"
    )


def plots(rows: Sequence[PlanRow]) -> list[str]:
    """As SVG: the hit rate by host pool and, if the trace has times, the dollars."""
    rates = _by_pool(rows, lambda row: row.hit_rate)
    found = [_plot("Hit rate by host pool", rates, lambda rate: f"{rate:.0%}")]
    if money := _by_pool(rows, lambda row: row.usd_net_per_month):
        what = "Dollars a month: GPU time saved, less the cache"
        found.append(_plot(what, money, lambda dollars: f"{dollars:,.0f}"))
    return found


def _by_pool(rows: Sequence[PlanRow], value: Callable[[PlanRow], float | None]) -> _Lines:
    """A line for each of the rest, named by what differs. Without rows that have no value."""
    lines: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for row in rows:
        names = (
            f"Redis {gib(row.redis_bytes)} GiB",
            f"disk {gib(row.disk_bytes)} GiB",
            f"{row.replicas} replicas",
            f"chunks of {row.chunk_size_tokens}",
            f"stored after {row.store_after}",
        )
        if (y := value(row)) is not None:
            lines.setdefault(names, []).append((row.pool_bytes / _GIB, y))
    varied = [len(set(column)) > 1 for column in zip(*lines, strict=True)]
    return {
        ", ".join(compress(names, varied)): sorted(points)
        for names, points in islice(lines.items(), _MOST_LINES)
    }


def _plot(title: str, lines: _Lines, text: Callable[[float], str]) -> str:
    """An SVG: sizes by their logarithm, values from 0 on, or from the lowest. text: of a value."""
    xs, ys = ([point[n] for points in lines.values() for point in points] for n in (0, 1))
    low, high = min(0.0, *ys), max(0.01, *ys)
    step_y = _step(high - low)
    lowest = math.floor(low / step_y) * step_y
    span_y = math.ceil(high / step_y) * step_y - lowest
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    # Nothing is shown where half of the smallest size would be.
    smallest = min(filter(None, xs), default=1.0)
    first, last = (math.log2(x or smallest / 2) for x in (min(xs), max(xs)))

    def across(x: float) -> float:
        share = (math.log2(x or smallest / 2) - first) / ((last - first) or 1.0)
        return _LEFT + 24 + share * (right - _LEFT - 24)

    def up(y: float) -> float:
        return bottom - (y - lowest) / span_y * (bottom - _TOP)

    parts = [f'<text x="{_LEFT}" y="16" class="title">{escape(title)}</text>']
    for tick in range(round(span_y / step_y) + 1):
        y = lowest + tick * step_y
        parts.append(f'<path class="grid" d="M{_LEFT},{up(y):.1f}H{right}"/>')
        parts.append(_text(_LEFT - 6, up(y) + 4, text(y), "end"))
    labelled = -math.inf
    for x in sorted(set(xs)):
        if across(x) - labelled >= _LABEL_WIDTH:
            labelled = across(x)
            parts.append(_text(labelled, bottom + 16, gib(x * _GIB), "middle"))
    parts.append(_text(right, bottom + 32, "GiB of host pool of each replica", "end"))
    height = _HEIGHT
    for number, (name, points) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        places = "L".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
        parts.append(f'<path d="M{places}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in points:
            dot = f'cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{colour}"'
            what = f"{gib(x * _GIB)} GiB: {text(y)}"
            parts.append(f"<circle {dot}><title>{what}</title></circle>")
        if len(lines) > 1:
            parts.append(f'<path class="key" d="M{_LEFT},{height}h20" stroke="{colour}"/>')
            parts.append(_text(_LEFT + 28, height + 4, name, "start"))
            height += _LEGEND_LINE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img" aria-label="{escape(title)}">'
        f"<style>{_THEME}</style>{''.join(parts)}</svg>"
    )


def _step(most: float) -> float:
    """Between two marks of an axis: 1, 2 or 5 times a power of ten."""
    rough = (most or 1.0) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= rough * 0.999)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text {where}>{escape(text)}</text>"
