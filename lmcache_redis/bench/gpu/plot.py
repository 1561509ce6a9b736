"""The ratios as a picture: each bar beside the line that it should reach."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmcache_redis.bench.gpu.rows import GATHER, RETRIEVE, SCATTER, STORE, Row

_COLOURS = ("#c6302b", "#3b6ea5", "#7aa874", "#b3b7bd", "#8d6a9f")
_GROUP_WIDTH = 0.8


def write_plot(path: Path, rows: Sequence[Row], caption: str) -> Path:
    """Four panels as PNG. caption: the machine. Needs matplotlib."""
    # The figure is drawn without pyplot: that would look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2).flat
    for axes, what in zip(panels, (GATHER, SCATTER), strict=False):
        _draw_kernels(axes, [row for row in rows if row.what == what], what)
    moved = [row for row in rows if row.what in (STORE, RETRIEVE)]
    _draw_ratios(panels[2], moved, "through the agent, of a plain copy's throughput")
    times = [row for row in rows if not row.high_is_good]
    _draw_ratios(panels[3], times, "time, of what it is compared with")
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color="#e4e6ea")
        axes.set_ylim(bottom=0)
    # Below all panels: inside one it would lie on bars.
    labelled = panels[0].get_legend_handles_labels()
    if labelled[0]:
        figure.legend(*labelled, loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(f"The GPU path\n{caption}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def _draw_kernels(axes: Any, rows: Sequence[Row], what: str) -> None:
    """Layouts in groups, counts of chunks side by side."""
    cases = list(dict.fromkeys(row.case for row in rows))
    counts = sorted({row.chunks for row in rows})
    width = _GROUP_WIDTH / max(1, len(counts))
    for number, chunks in enumerate(counts):
        shift = (number - (len(counts) - 1) / 2) * width
        found = [row for row in rows if row.chunks == chunks]
        places = [cases.index(row.case) + shift for row in found]
        bars = axes.bar(
            places,
            [row.ratio for row in found],
            width=width,
            color=_COLOURS[number % len(_COLOURS)],
            label=f"{chunks} chunks",
        )
        axes.bar_label(bars, fmt="%.2f", padding=1, fontsize=7)
    for place, case in enumerate(cases):
        targets = [row.target for row in rows if row.case == case and row.target is not None]
        if targets:
            _draw_target(axes, place, targets[0])
    axes.set_title(f"{what}, of a device copy's bandwidth (dashed: target)", fontsize=10)
    axes.set_xticks(range(len(cases)), cases, fontsize=8)


def _draw_ratios(axes: Any, rows: Sequence[Row], title: str) -> None:
    bars = axes.bar(
        range(len(rows)), [row.ratio for row in rows], width=_GROUP_WIDTH / 2, color=_COLOURS[1]
    )
    axes.bar_label(bars, fmt="%.3f", padding=1, fontsize=8)
    for place, row in enumerate(rows):
        if row.target is not None:
            _draw_target(axes, place, row.target)
    axes.set_title(title, fontsize=10)
    axes.set_xticks(range(len(rows)), [f"{row.what}\n{row.case}" for row in rows], fontsize=8)


def _draw_target(axes: Any, place: float, target: float) -> None:
    half = _GROUP_WIDTH / 2 + 0.05
    axes.hlines(target, place - half, place + half, colors="black", linestyles="dashed", lw=1.2)
