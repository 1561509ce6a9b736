# SPDX-License-Identifier: Apache-2.0
"""A figure, what is good, and how it is written. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

COLUMNS = ("part", "figure", "value", "criterion")
Row = dict[str, Any]  # of a figure: the columns, and ``good``
_MARK = "FIGURE "


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a part. good: whether it meets its criterion; None: it has none."""

    part: str
    name: str
    value: Any
    criterion: str = ""
    good: bool | None = None

    @property
    def verdict(self) -> str:
        if self.good is None:
            return self.criterion
        return f"{self.criterion}: {'good' if self.good else 'NOT GOOD'}"

    def row(self) -> Row:
        shown = f"{self.value:.4g}" if isinstance(self.value, float) else self.value
        cells = (self.part, self.name, shown, self.verdict)
        return {**dict(zip(COLUMNS, cells, strict=True)), "good": self.good}


def judged(
    part: str, name: str, value: Any, criterion: str, is_good: Callable[[Any], bool]
) -> Figure:
    return Figure(part, name, value, criterion, is_good(value))


def zero(part: str, name: str, value: int) -> Figure:
    """A count of what must not happen."""
    return Figure(part, name, value, "0", value == 0)


def at_most(part: str, name: str, value: float, most: float, unit: str) -> Figure:
    return Figure(part, f"{name}, {unit}", value, f"at most {most:g}", value <= most)


def at_least(part: str, name: str, value: float, least: float, unit: str) -> Figure:
    return Figure(part, f"{name}, {unit}", value, f"at least {least:g}", value >= least)


def failed(part: str, name: str, value: Any, criterion: str) -> Figure:
    return Figure(part, name, value, criterion, good=False)


def not_good(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["good"] is False]


def line_of(figure: Figure) -> str:
    """How a part's process tells a figure."""
    return _MARK + json.dumps(figure.row())


def row_in(line: str) -> Row | None:
    """The figure of a line; None where it is something else."""
    if not line.startswith(_MARK):
        return None
    row: Row = json.loads(line[len(_MARK) :])
    return row


def cells_of(row: Row) -> list[str]:
    return [" ".join(str(row[name]).split()) for name in COLUMNS]


def table_row(cells: Iterable[str]) -> str:
    """Of a table in Markdown."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
