# SPDX-License-Identifier: Apache-2.0
"""Shared by all benchmarks: statistics, tables, JSON, and the facts of the machine."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

_FILE_WIDTH = 200
_T = TypeVar("_T")


def rotated(items: Sequence[_T], number: int) -> list[_T]:
    """The items, rotated so that each round starts with the next one."""
    first = number % max(1, len(items))
    return [*items[first:], *items[:first]]


def ratios(values: Sequence[float], references: Sequence[float]) -> list[float]:
    """The ratio in each round, because a slow round slows both."""
    return [value / reference for value, reference in zip(values, references, strict=True)]


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that ``percent`` per cent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, -(-len(ordered) * percent // 100) - 1)]


def is_met(figure: float, target: float | None, *, at_least: bool) -> bool | None:
    """Whether a figure meets its target; None without a target."""
    if target is None:
        return None
    return figure >= target if at_least else figure <= target


def verdict_text(met: bool | None, target: str, *, at_least: bool) -> str:
    """A target, and whether it is met, in words."""
    return f"{'at least' if at_least else 'at most'} {target}: {'met' if met else 'NOT MET'}"


def machine() -> dict[str, Any]:
    """The facts of the machine, shown with every figure."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the rows as one table; columns are the keys of the first row."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)  # rich assumes 80 columns, too few for a table
    facts = machine()
    table = Table(title=title, caption=", ".join(f"{k} {v}" for k, v in facts.items()))
    if rows:
        for name in rows[0]:
            table.add_column(name)
        for row in rows:
            table.add_row(*(_cell(value) for value in row.values()))
    console.print(table)


def write_json(
    path: Path | None, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any] | None = None
) -> None:
    """Writes ``facts`` (default: the machine) and rows, if there is a path."""
    if path is None:
        return
    document = {"machine": facts or machine(), "rows": list(rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
