"""One HTML page of a plan: what was assumed, plots as inline SVG, and the rows. Loads nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from lmcache_redis.plan.figures import NamedCurve, PlanRow, enough
from lmcache_redis.plan.shown import COLUMNS, cells, sentence

COLOURS = ("#c6302b", "#3b6ea5", "#7aa874", "#8d6a9f", "#b58a2e", "#5f6b7a")
_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 28, 44
_GIB = 1 << 30
_TICKS = 5
_MOST_LINES = 6

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:1180px;padding:0 1em;color:#222}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:1.6em}
table{border-collapse:collapse;font-size:13px}td,th{padding:3px 9px;text-align:right}
th{border-bottom:2px solid #999;vertical-align:bottom}tr:nth-child(even){background:#f4f5f7}
tr.enough{background:#fbeceb;font-weight:600}.plots{display:flex;flex-wrap:wrap;gap:1em}
dl{display:grid;grid-template-columns:max-content auto;gap:2px 1.2em}dt{color:#666}dd{margin:0}
svg{font:11px system-ui,sans-serif;background:#fff}
"""


class Series(NamedTuple):
    """A line of a plot. is_steps: a value holds until the next point."""

    name: str
    points: Sequence[tuple[float, float]]
    is_steps: bool = False


class Axis(NamedTuple):
    """How an axis is named, where it ends, and how its numbers are written."""

    name: str
    most: float
    text: Callable[[float], str]


def page(
    title: str,
    assumed: Mapping[str, str],
    notes: Sequence[str],
    rows: Sequence[PlanRow],
    curves: Sequence[NamedCurve],
) -> str:
    """The whole document."""
    best = enough(rows)
    facts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in assumed.items())
    said = "".join(f"<p>{escape(note)}</p>" for note in (sentence(rows), *notes))
    plots = "".join(plot for plot in (curve_plot(curves), hit_plot(rows), money_plot(rows)) if plot)
    head = "".join(f"<th>{escape(column.title)}</th>" for column in COLUMNS)
    body = "".join(
        f"<tr{' class=enough' if row is best else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells(row))
        + "</tr>"
        for row in rows
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1>{said}"
        f"<div class=plots>{plots}</div><h2>Every row</h2><table><tr>{head}</tr>{body}</table>"
        f"<h2>Assumed</h2><dl>{facts}</dl></html>\n"
    )


def curve_plot(curves: Sequence[NamedCurve]) -> str:
    """Hit rate by the size of one cache that all share: how much any cache of that size can do."""
    most = max((each.curve.sizes_bytes[-1] for each in curves), default=0)
    if not most:
        return ""
    series = [
        Series(
            each.name,
            [
                (size / _GIB, rate)
                for size, rate in zip(each.curve.sizes_bytes, each.curve.hit_rates, strict=True)
            ],
            is_steps=True,
        )
        for each in curves
    ]
    title = "Hit rate by the size of one shared LRU cache"
    return plot(title, series, Axis("GiB", most / _GIB, _number), _shares(series))


def hit_plot(rows: Sequence[PlanRow]) -> str:
    """Hit rate by size of the pool, a line for each of the rest."""
    series = _by_pool(rows, lambda row: row.hit_rate)
    most = max((row.pool_bytes for row in rows), default=0) / _GIB
    title = "Hit rate by host pool"
    return plot(title, series, Axis("GiB of each replica", most, _number), _shares(series))


def money_plot(rows: Sequence[PlanRow]) -> str:
    """Dollars a month of GPU time saved, less what the cache costs."""
    known = [row for row in rows if row.usd_saved_per_month is not None]
    series = _by_pool(known, lambda row: (row.usd_saved_per_month or 0.0) - row.usd_per_month)
    values = [y for line in series for _, y in line.points]
    if not values:
        return ""
    most = max(row.pool_bytes for row in known) / _GIB
    y_axis = Axis("$", max(0.0, *values), lambda value: f"{value:,.0f}")
    title = "Dollars a month: GPU time saved, less the cache"
    return plot(title, series, Axis("GiB of host pool of each replica", most, _number), y_axis)


def _by_pool(rows: Sequence[PlanRow], value: Callable[[PlanRow], float]) -> list[Series]:
    lines: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    keys = ("redis_bytes", "disk_bytes", "replicas", "chunk_size_tokens", "policy")
    for row in rows:
        key = tuple(getattr(row, name) for name in keys)
        lines.setdefault(key, []).append((row.pool_bytes / _GIB, value(row)))
    varied = [len({key[n] for key in lines}) > 1 for n in range(len(keys))]
    named = []
    for key, points in [*lines.items()][:_MOST_LINES]:
        redis, disk, replicas, chunk, policy = key
        words = (
            f"Redis {_number(float(str(redis)) / _GIB)} GiB",
            f"disk {_number(float(str(disk)) / _GIB)} GiB",
            f"{replicas} replicas",
            f"chunks of {chunk}",
            str(policy),
        )
        name = ", ".join(word for word, is_varied in zip(words, varied, strict=True) if is_varied)
        named.append(Series(name, sorted(points)))
    return named


def _shares(series: Sequence[Series]) -> Axis:
    most = max((y for line in series for _, y in line.points), default=0.0)
    return Axis("", max(most, 0.01), lambda value: f"{value:.0%}")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plot(title: str, series: Sequence[Series], x_axis: Axis, y_axis: Axis) -> str:
    """An SVG. The axes begin at 0, or at the lowest value below."""
    low = min((y for line in series for _, y in line.points), default=0.0)
    step_x, step_y = _step(x_axis.most), _step(y_axis.most - min(0.0, low))
    span_x = math.ceil(x_axis.most / step_x) * step_x
    lowest = math.floor(min(0.0, low) / step_y) * step_y
    span_y = math.ceil(y_axis.most / step_y) * step_y - lowest

    def at(x: float, y: float) -> str:
        across = _LEFT + x / span_x * (_WIDTH - _LEFT - _RIGHT)
        up = _HEIGHT - _BOTTOM - (y - lowest) / span_y * (_HEIGHT - _TOP - _BOTTOM)
        return f"{across:.1f},{up:.1f}"

    parts = [f'<text x="{_LEFT}" y="16" font-weight="600">{escape(title)}</text>']
    for tick in range(round(span_y / step_y) + 1):
        y = lowest + tick * step_y
        (left, up), (right, _) = (at(x, y).split(",") for x in (0.0, span_x))
        parts.append(f'<path d="M{left},{up}H{right}" stroke="#e4e6ea"/>')
        parts.append(_text(float(left) - 6, float(up) + 4, y_axis.text(y), "end"))
    for tick in range(round(span_x / step_x) + 1):
        across = float(at(tick * step_x, lowest).split(",")[0])
        parts.append(_text(across, _HEIGHT - _BOTTOM + 16, x_axis.text(tick * step_x), "middle"))
    parts.append(_text(_WIDTH - _RIGHT, _HEIGHT - _BOTTOM + 32, x_axis.name, "end"))
    for number, line in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(
            f'<path d="{_path(line, at)}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        if not line.is_steps:
            for x, y in line.points:
                cx, cy = at(x, y).split(",")
                what = escape(f"{x_axis.text(x)} GiB: {y_axis.text(y)}")
                dot = f'cx="{cx}" cy="{cy}" r="3" fill="{colour}"'
                parts.append(f"<circle {dot}><title>{what}</title></circle>")
        if len(series) > 1:
            row = _HEIGHT - _BOTTOM - 8 - 15 * (len(series) - 1 - number)
            parts.append(f'<path d="M{_WIDTH - 38},{row - 4}h20" stroke="{colour}"/>')
            parts.append(_text(_WIDTH - 44, row, line.name, "end"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def _step(most: float) -> float:
    """Between two marks of an axis: 1, 2 or 5 times a power of ten."""
    rough = (most or 1.0) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= rough * 0.999)


def _path(line: Series, at: Callable[[float, float], str]) -> str:
    places = [at(x, y) for x, y in line.points]
    if not line.is_steps:
        return "M" + "L".join(places)
    steps = [f"H{place.split(',')[0]}V{place.split(',')[1]}" for place in places[1:]]
    return f"M{places[0]}{''.join(steps)}"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#555"'
    return f"<text {where}>{escape(text)}</text>"
