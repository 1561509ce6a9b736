"""The figures as a picture: throughput by operation and size, scans, and CPU time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lmcache_redis.bench.plane.peers import CEILING, GLIDE, LMCACHE, OURS, REDIS_PY
from lmcache_redis.bench.plane.ratios import best, sizes_of
from lmcache_redis.bench.plane.rows import MOVES, SCAN, Row, size_text

_COLOURS = {OURS: "#c6302b", LMCACHE: "#3b6ea5", GLIDE: "#7aa874", REDIS_PY: "#b3b7bd"}
_LABELS = {
    OURS: "ours, defaults, checksums on",
    LMCACHE: "LMCache's C++ client, its best",
    GLIDE: "valkey-glide, its best",
    REDIS_PY: "redis-py with hiredis, its best",
}
_CACHED = ("none", "half", "all")
_GROUP_WIDTH = 0.8


def write_plot(path: Path, rows: Sequence[Row], caption: str) -> Path:
    """Six panels as PNG. caption: the machine and the server. Needs matplotlib."""
    # The figure is drawn without pyplot: that would look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 3).flat
    clients = [client for client in _COLOURS if any(row.client == client for row in rows)]
    sizes = sizes_of(rows)
    for axes, op in zip(panels, MOVES, strict=False):
        _draw_moves(axes, rows, clients, sizes, op)
    _draw_scans(panels[4], rows, clients)
    _draw_cpu(panels[5], rows, clients, sizes)
    handles: dict[str, Any] = {}
    for axes in panels:
        handles |= {label: h for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.margins(y=0.1)
    figure.suptitle(f"Chunks to and from Redis\n{caption}", fontsize=11)
    # Below all panels: inside one it would lie on bars.
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def _draw_moves(
    axes: Any, rows: Sequence[Row], clients: Sequence[str], sizes: Sequence[int], op: str
) -> None:
    groups = [[r for r in rows if (r.op, r.value_bytes) == (op, size)] for size in sizes]
    _draw_bars(axes, groups, clients, lambda row: row.gb_per_s, "%.1f")
    for place, group in enumerate(groups):
        ceiling = best(group, CEILING, "socket")
        if ceiling is not None and ceiling.gb_per_s is not None:
            half = _GROUP_WIDTH / 2 + 0.05
            axes.hlines(
                ceiling.gb_per_s,
                place - half,
                place + half,
                colors="black",
                linestyles="dashed",
                linewidth=1.2,
                label="bare sockets, their best",
            )
    _dress(axes, op.replace("-", " "), "GB/s", [size_text(size) for size in sizes], "value size")
    axes.set_ylim(bottom=0)


def _draw_scans(axes: Any, rows: Sequence[Row], clients: Sequence[str]) -> None:
    scans = [row for row in rows if row.op == SCAN]
    keys = min((row.items for row in scans), default=0)
    groups = [[r for r in scans if (r.items, r.cached) == (keys, cached)] for cached in _CACHED]
    scanners = [client for client in clients if any(row.client == client for row in scans)]
    _draw_bars(axes, groups, scanners, lambda row: row.ms, "%.2g")
    if scans:
        axes.set_yscale("log")
        axes.set_ylim(bottom=min(row.ms or 1.0 for row in scans) / 3)
    _dress(axes, f"prefix scan of {keys:,} keys", "ms (log)", list(_CACHED), "cached")


def _draw_cpu(axes: Any, rows: Sequence[Row], clients: Sequence[str], sizes: Sequence[int]) -> None:
    size = max(sizes, default=0)
    ops = [op for op in MOVES if any(row.op == op for row in rows)]
    groups = [[r for r in rows if (r.op, r.value_bytes) == (op, size)] for op in ops]
    _draw_bars(axes, groups, clients, lambda row: row.cpu_s_per_gb, "%.1f")
    names = [op.replace("-", "\n") for op in ops]
    _dress(axes, f"CPU time of the client, values of {size_text(size)}", "s/GB", names, "")


def _draw_bars(
    axes: Any,
    groups: Sequence[Sequence[Row]],
    clients: Sequence[str],
    figure: Callable[[Row], float | None],
    fmt: str,
) -> None:
    """Clients side by side in each group; none where one has no figure."""
    width = _GROUP_WIDTH / max(1, len(clients))
    for number, client in enumerate(clients):
        shift = (number - (len(clients) - 1) / 2) * width
        found = [
            (place + shift, value)
            for place, value in enumerate(_values(groups, client, figure))
            if value is not None
        ]
        if found:
            places, values = zip(*found, strict=True)
            bars = axes.bar(
                places, values, width=width, color=_COLOURS[client], label=_LABELS[client]
            )
            axes.bar_label(bars, fmt=fmt, padding=1, fontsize=7)


def _values(
    groups: Iterable[Sequence[Row]], client: str, figure: Callable[[Row], float | None]
) -> list[float | None]:
    chosen = [best(group, client) for group in groups]
    return [None if row is None else figure(row) for row in chosen]


def _dress(axes: Any, title: str, unit: str, names: Sequence[str], what: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(unit)
    axes.set_xlabel(what)
    axes.set_xticks(range(len(names)), names)
    axes.grid(axis="y", color="#e4e6ea")
