# SPDX-License-Identifier: Apache-2.0
"""The plot: throughput by operation and size, scans, and CPU time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.plane.compare import best, moves_of, scans_of, sizes_of
from benchmarks.plane.peers import CEILING, GLIDE, LMCACHE, OURS, REDIS_PY
from benchmarks.plane.rows import CACHED, MOVES, Row, size_text

_LABELS = {
    OURS: "ours, defaults, checksums on",
    LMCACHE: "LMCache's C++ client, its best",
    GLIDE: "valkey-glide, its best",
    REDIS_PY: "redis-py with hiredis, its best",
}


def write_plot(path: Path, rows: Sequence[Row], caption: str) -> Path:
    """Six panels as PNG. caption: the machine and the server. Needs matplotlib."""
    title = f"Chunks to and from Redis\n{caption}"
    return plots.draw(path, title, 2, 3, partial(_draw_panels, rows))


def _draw_panels(rows: Sequence[Row], panels: Any) -> None:
    sizes = sizes_of(rows)
    names = [size_text(size) for size in sizes]
    for axes, op in zip(panels, MOVES, strict=False):
        groups = [moves_of(rows, op, size) for size in sizes]
        _draw_bars(axes, groups, lambda row: row.gb_per_s, "%.1f")
        for place, group in enumerate(groups):
            ceiling = best(group, CEILING, "socket")
            if ceiling is not None and ceiling.gb_per_s is not None:
                plots.line(axes, place, ceiling.gb_per_s, "bare sockets, their best")
        plots.name_groups(axes, op.replace("-", " "), names, "GB/s", "value size")
    _draw_scans(panels[4], rows)
    largest = max(sizes, default=0)
    ops = [op for op in MOVES if any(row.op == op for row in rows)]
    groups = [moves_of(rows, op, largest) for op in ops]
    _draw_bars(panels[5], groups, lambda row: row.cpu_s_per_gb, "%.1f")
    title = f"CPU time of the client, values of {size_text(largest)}"
    plots.name_groups(panels[5], title, [op.replace("-", "\n") for op in ops], "s/GB")


def _draw_scans(axes: Any, rows: Sequence[Row]) -> None:
    scans = scans_of(rows)[: len(CACHED)]
    _draw_bars(axes, [group for _, _, group in scans], lambda row: row.ms, "%.2g")
    keys = scans[0][0] if scans else 0
    if scans:
        axes.set_yscale("log")
        axes.set_ylim(bottom=min(row.ms or 1.0 for *_, group in scans for row in group) / 3)
    plots.name_groups(axes, f"prefix scan of {keys:,} keys", CACHED, "ms (log)", "cached")


def _draw_bars(
    axes: Any, groups: Sequence[Sequence[Row]], figure: Callable[[Row], float | None], fmt: str
) -> None:
    """Clients side by side in each group; a client without a figure has no bar."""
    there = {row.client for group in groups for row in group}
    clients = [client for client in _LABELS if client in there]
    for place, client in enumerate(clients):
        chosen = [best(group, client) for group in groups]
        plots.bars(
            axes,
            [None if row is None else figure(row) for row in chosen],
            place=place,
            places=len(clients),
            colour=plots.COLOURS[list(_LABELS).index(client)],
            label=_LABELS[client],
            fmt=fmt,
        )
