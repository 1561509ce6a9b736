# SPDX-License-Identifier: Apache-2.0
"""The plot: time to first token, throughput, CPU time and what came from Redis, by case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.working_set.cases import CASES

_GREY, _RED, _BLUE, _GREEN, _VIOLET = (plots.COLOURS[n] for n in (3, 0, 1, 2, 4))
# In the order of the cases.
_COLOURS = (_GREY, "#7d838a", _RED, "#e08a86", _VIOLET, _BLUE, _GREEN)
_PANELS = {
    "first_token_mean_s": ("mean time to first token", "s (log)", "%.2f"),
    "first_token_worst_s": ("worst time to first token", "s (log)", "%.2f"),
    "requests_per_s": ("requests a second", "1/s", "%.1f"),
    "agent_cpu_s": ("CPU time of agent or LMCache's server", "s a round", "%.2f"),
    "redis_cpu_s": ("CPU time of Redis", "s a round", "%.2f"),
    "from_redis_mib": ("sent by Redis", "MiB a round", "%.0f"),
}


def write_plot(path: Path, rows: Sequence[Mapping[str, Any]], caption: str) -> Path:
    """Six panels as PNG. caption: the machine. Needs matplotlib."""
    title = f"A working set that vLLM's own cache cannot hold, all requests at once\n{caption}"
    return plots.draw(path, title, 2, 3, partial(_draw_panels, rows))


def _draw_panels(rows: Sequence[Mapping[str, Any]], panels: Any) -> None:
    scenarios = list(dict.fromkeys(row["scenario"] for row in rows))
    there = {row["case"] for row in rows}
    cases = [case for case in CASES.values() if case.name in there]
    figures = {(row["scenario"], row["case"]): row for row in rows}
    for axes, (name, (title, unit, fmt)) in zip(panels, _PANELS.items(), strict=True):
        for place, case in enumerate(cases):
            found = [figures.get((scenario, case.name), {}).get(name) for scenario in scenarios]
            plots.bars(
                axes,
                found,
                place=place,
                places=len(cases),
                colour=_COLOURS[list(CASES).index(case.name)],
                label=case.label,
                fmt=fmt,
            )
        plots.name_groups(axes, title, scenarios, unit)
        if "log" in unit:
            axes.set_yscale("log")
            axes.set_ylim(bottom=min(row[name] for row in rows) / 3)
