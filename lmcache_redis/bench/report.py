"""Rows of a benchmark as a table, as JSON, and the machine they come from."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_FILE_WIDTH = 200


def machine() -> dict[str, Any]:
    """What to say of the machine beside every figure."""
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
        console = Console(width=_FILE_WIDTH)  # a table cut to 80 columns is of no use in a file
    facts = machine()
    table = Table(title=title, caption=", ".join(f"{k} {v}" for k, v in facts.items()))
    if rows:
        for name in rows[0]:
            table.add_column(name)
        for row in rows:
            table.add_row(*(_cell(value) for value in row.values()))
    console.print(table)


def write_json(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes machine and rows."""
    document = {"machine": machine(), "rows": list(rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
