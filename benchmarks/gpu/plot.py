# SPDX-License-Identifier: Apache-2.0
"""The plot: each ratio as a bar, with its target as a line."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.gpu.rows import GATHER, RETRIEVE, SCATTER, STORE, Row


def write_plot(path: Path, rows: Sequence[Row], caption: str) -> Path:
    """Four panels as PNG. caption: the machine. Needs matplotlib."""
    return plots.draw(path, f"The GPU path\n{caption}", 2, 2, partial(_draw_panels, rows))


def _draw_panels(rows: Sequence[Row], panels: Any) -> None:
    for axes, what in zip(panels, (GATHER, SCATTER), strict=False):
        _draw_kernels(axes, [row for row in rows if row.what == what], what)
    moved = [row for row in rows if row.what in (STORE, RETRIEVE)]
    _draw_ratios(panels[2], moved, "through the agent, of a plain copy's throughput")
    times = [row for row in rows if not row.high_is_good]
    _draw_ratios(panels[3], times, "time, of what it is compared with")


def _draw_kernels(axes: Any, rows: Sequence[Row], what: str) -> None:
    """Layouts in groups, counts of chunks side by side."""
    cases = list(dict.fromkeys(row.case for row in rows))
    counts = sorted({row.chunks for row in rows})
    for number, chunks in enumerate(counts):
        ratio_of = {row.case: row.ratio for row in rows if row.chunks == chunks}
        plots.bars(
            axes,
            [ratio_of.get(case) for case in cases],
            place=number,
            places=len(counts),
            colour=plots.COLOURS[number % len(plots.COLOURS)],
            label=f"{chunks} chunks",
            fmt="%.2f",
        )
    target_of = {row.case: row.target for row in rows}
    _draw_targets(axes, [target_of[case] for case in cases])
    plots.name_groups(axes, f"{what}, of a device copy's bandwidth (dashed: target)", cases)


def _draw_ratios(axes: Any, rows: Sequence[Row], title: str) -> None:
    plots.bars(axes, [row.ratio for row in rows], colour=plots.COLOURS[1], fmt="%.3f")
    _draw_targets(axes, [row.target for row in rows])
    plots.name_groups(axes, title, [f"{row.what}\n{row.case}" for row in rows])


def _draw_targets(axes: Any, targets: Sequence[float | None]) -> None:
    for group, target in enumerate(targets):
        if target is not None:
            plots.line(axes, group, target)
