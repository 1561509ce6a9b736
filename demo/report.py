# SPDX-License-Identifier: Apache-2.0
"""The results of the demo as tables, a plot and JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

PLOT_NAME = "time-to-first-token.png"
RESULTS_NAME = "results.json"
COLD, WARM = "computed (cold)", "from Redis (warm)"


@dataclass(frozen=True, slots=True)
class Result:
    """One question, answered cold by engine one and warm by engine two.

    Times are those from sending a question to the first token of its streamed answer. Tokens and
    bytes are the agent's counts of what it read from Redis and copied into the engine's blocks.
    """

    question: str
    prompt_tokens: int
    whole_chunk_tokens: int
    cold_s: float
    warm_s: float
    redis_bytes: int
    loaded_tokens: int
    loaded_bytes: int
    cold_answer: str
    warm_answer: str

    @property
    def identical(self) -> bool:
        return self.cold_answer == self.warm_answer

    @property
    def loaded(self) -> bool:
        """Whether the warm engine loaded every whole chunk, from Redis."""
        return (
            self.loaded_tokens >= self.whole_chunk_tokens > 0
            and self.redis_bytes >= self.loaded_bytes > 0
        )


@dataclass(frozen=True, slots=True)
class Stored:
    """What engine one left in Redis, with headers aside. plain_bytes: before it was packed."""

    stored_bytes: int
    plain_bytes: int

    def __str__(self) -> str:
        smaller = 1 - self.stored_bytes / self.plain_bytes
        return (
            f"{self.stored_bytes / 1e6:,.0f} MB of KV: {smaller:.0%} smaller than the "
            f"{self.plain_bytes / 1e6:,.0f} MB of the engine, without loss"
        )


def answer_table(results: Sequence[Result]) -> Table:
    """Questions and both answers, side by side."""
    table = Table(title="Answers", show_lines=True)
    for name in ("question", COLD, WARM, "identical"):
        table.add_column(name)
    for r in results:
        row = (r.question, r.cold_answer.strip(), r.warm_answer.strip())
        table.add_row(*row, _yes_or_no(r.identical))
    return table


def time_table(results: Sequence[Result]) -> Table:
    """One row a question, and the medians and sums."""
    table = Table(title="Seconds to the first token")
    for name in ("question", "prompt tokens", "cold", "warm", "times faster", "loaded", "MB"):
        table.add_column(name, justify="right")
    for number, r in enumerate(results, start=1):
        table.add_row(
            str(number), f"{r.prompt_tokens:,}", *_times(r.cold_s, r.warm_s),
            f"{r.loaded_tokens:,}", f"{r.loaded_bytes / 1e6:,.0f}",
        )  # fmt: skip
    cold_s = statistics.median(r.cold_s for r in results)
    warm_s = statistics.median(r.warm_s for r in results)
    tokens = sum(r.loaded_tokens for r in results)
    megabytes = sum(r.loaded_bytes for r in results) / 1e6
    table.add_section()
    table.add_row("median", "", *_times(cold_s, warm_s))
    table.add_row("all", "", "", "", "", f"{tokens:,}", f"{megabytes:,.0f}")
    return table


def saved(results: Sequence[Result]) -> str:
    """What engine two did not have to do again."""
    tokens = sum(r.loaded_tokens for r in results)
    asked = sum(r.prompt_tokens for r in results)
    seconds = sum(r.cold_s - r.warm_s for r in results)
    return (
        f"saved: {tokens:,} of {asked:,} prompt tokens were not computed again, "
        f"and their users waited {seconds:.1f} s less"
    )


def _times(cold_s: float, warm_s: float) -> tuple[str, str, str]:
    return f"{cold_s:.3f}", f"{warm_s:.3f}", f"{cold_s / warm_s:.1f}"


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "NO"


def write_results(directory: Path, model: str, stored: Stored, results: Sequence[Result]) -> Path:
    """Everything measured, answers included, as JSON."""
    path = directory / RESULTS_NAME
    document = {
        "model": model,
        **asdict(stored),
        "questions": [
            {**asdict(r), "identical": r.identical, "loaded": r.loaded} for r in results
        ],
        "identical": all(r.identical for r in results),
        "loaded": all(r.loaded for r in results),
    }  # fmt: skip
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def write_plot(directory: Path, model: str, results: Sequence[Result]) -> Path:
    """Cold and warm times side by side, as PNG."""
    # The figure is drawn without pyplot: that would look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = range(len(results))
    series = (
        (COLD, [r.cold_s for r in results], -0.2, "#8a8f98"),
        (WARM, [r.warm_s for r in results], 0.2, "#c6302b"),
    )
    for label, times, shift, colour in series:
        bars = axes.bar([p + shift for p in places], times, width=0.4, label=label, color=colour)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
    axes.set_xticks(list(places), [f"question {p + 1}" for p in places])
    axes.set_ylabel("time to first token, s")
    tokens = statistics.mean(r.prompt_tokens for r in results)
    megabytes = statistics.mean(r.loaded_bytes for r in results) / 1e6
    axes.set_title(
        f"{model}: texts of {tokens:,.0f} tokens, {megabytes:,.0f} MB of KV each", fontsize=11
    )
    axes.spines[["top", "right"]].set_visible(False)
    # Below the bars: between them it would cover one.
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False
    )
    path = directory / PLOT_NAME
    figure.savefig(path)
    return path
