# SPDX-License-Identifier: Apache-2.0
"""Shared by the plots: panels, bars side by side, dashed lines, and the file."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

COLOURS = ("#c6302b", "#3b6ea5", "#7aa874", "#b3b7bd", "#8d6a9f")
GROUP_WIDTH = 0.8


def draw(
    path: Path, title: str, rows: int, columns: int, draw_panels: Callable[[Any], None]
) -> Path:
    """A file (PNG, SVG) of panels that ``draw_panels`` fills, with one legend. Needs matplotlib."""
    # Drawn without pyplot, which would look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    draw_panels(panels)
    handles: dict[str, Any] = {}
    for axes in panels:
        handles |= {label: h for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.margins(y=0.1)
        axes.grid(axis="y", color="#e4e6ea")
        if axes.get_yscale() == "linear":
            axes.set_ylim(bottom=0)
    figure.suptitle(title, fontsize=11)
    if handles:
        # Below all panels: inside a panel it would cover bars.
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def report(write: Callable[[], Path]) -> None:
    """Writes a plot and prints its path, or how to install matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        print("plot: left out: run `pip install matplotlib`")
    else:
        print(f"plot: {write()}")


def bars(
    axes: Any,
    values: Sequence[float | None],
    *,
    place: int = 0,
    places: int = 1,
    colour: str,
    label: str | None = None,
    fmt: str,
) -> None:
    """One bar in each group, the ``place``-th of ``places``; none for a None."""
    width = GROUP_WIDTH / max(2, places)
    shift = (place - (places - 1) / 2) * width
    found = [(group + shift, value) for group, value in enumerate(values) if value is not None]
    if found:
        drawn = axes.bar(*zip(*found, strict=True), width=width, color=colour, label=label)
        axes.bar_label(drawn, fmt=fmt, padding=1, fontsize=7)


def line(axes: Any, group: float, value: float, label: str | None = None) -> None:
    """A dashed line across a group of bars."""
    half = GROUP_WIDTH / 2 + 0.05
    style = {"colors": "black", "linestyles": "dashed", "linewidth": 1.2, "label": label}
    axes.hlines(value, group - half, group + half, **style)


def name_groups(
    axes: Any, title: str, names: Sequence[str], unit: str = "", what: str = ""
) -> None:
    """Titles of a panel, its axes and its groups."""
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(unit)
    axes.set_xlabel(what)
    axes.set_xticks(range(len(names)), names, fontsize=8)
