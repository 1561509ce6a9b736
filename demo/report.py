"""The results of the demo as a table, a plot and JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

PLOT_NAME = "time-to-first-token.png"
RESULTS_NAME = "results.json"


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One prompt, answered cold by engine one and warm by engine two.

    Times are those of a request for one token, from its submission to its answer. Tokens and
    bytes are the agent's counts of what it read from Redis and copied into the engine's blocks.
    """

    prompt_tokens: int
    whole_chunk_tokens: int
    cold_s: float
    warm_s: float
    redis_bytes: int
    loaded_tokens: int
    loaded_bytes: int
    cold_output: tuple[int, ...]
    warm_output: tuple[int, ...]

    @property
    def identical(self) -> bool:
        return self.cold_output == self.warm_output

    @property
    def loaded(self) -> bool:
        """Whether the warm engine loaded every whole chunk, from Redis."""
        return (
            self.loaded_tokens >= self.whole_chunk_tokens > 0
            and self.redis_bytes >= self.loaded_bytes > 0
        )

    @property
    def gigabytes_per_s(self) -> float:
        """Bytes loaded over the whole warm time to first token."""
        return self.loaded_bytes / self.warm_s / 1e9


def result_table(results: Sequence[PromptResult]) -> Table:
    """One row a prompt, and the medians."""
    table = Table(
        title=f"Time to the first token of {results[0].prompt_tokens:,}-token prompts: "
        "computed (cold), loaded from Redis (warm)"
    )
    for name in ("prompt", "cold s", "warm s", "times faster", "tokens loaded", "MB", "GB/s"):
        table.add_column(name, justify="right")
    table.add_column("outputs identical")
    for number, r in enumerate(results, start=1):
        table.add_row(
            str(number),
            f"{r.cold_s:.3f}",
            f"{r.warm_s:.3f}",
            f"{r.cold_s / r.warm_s:.1f}",
            f"{r.loaded_tokens:,}",
            f"{r.loaded_bytes / 1e6:,.0f}",
            f"{r.gigabytes_per_s:.2f}",
            _yes_or_no(r.identical),
        )
    cold_s = statistics.median(r.cold_s for r in results)
    warm_s = statistics.median(r.warm_s for r in results)
    speed = statistics.median(r.gigabytes_per_s for r in results)
    tokens = sum(r.loaded_tokens for r in results)
    megabytes = sum(r.loaded_bytes for r in results) / 1e6
    table.add_section()
    table.add_row(
        "median", f"{cold_s:.3f}", f"{warm_s:.3f}", f"{cold_s / warm_s:.1f}", "", "", f"{speed:.2f}"
    )
    identical = _yes_or_no(all(r.identical for r in results))
    table.add_row("all", "", "", "", f"{tokens:,}", f"{megabytes:,.0f}", "", identical)
    return table


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "NO"


def write_results(directory: Path, results: Sequence[PromptResult]) -> Path:
    """Everything measured, outputs included, as JSON."""
    path = directory / RESULTS_NAME
    document = {
        "prompts": [
            {**asdict(r), "identical": r.identical, "loaded": r.loaded} for r in results
        ],
        "identical": all(r.identical for r in results),
        "loaded": all(r.loaded for r in results),
    }  # fmt: skip
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def write_plot(directory: Path, results: Sequence[PromptResult]) -> Path:
    """Cold and warm times side by side, as PNG."""
    # The figure is drawn without pyplot: that would look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = range(len(results))
    series = (
        ("computed (cold)", [r.cold_s for r in results], -0.2, "#8a8f98"),
        ("loaded from Redis (warm)", [r.warm_s for r in results], 0.2, "#c6302b"),
    )
    for label, times, shift, colour in series:
        bars = axes.bar([p + shift for p in places], times, width=0.4, label=label, color=colour)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
    axes.set_xticks(list(places), [f"prompt {p + 1}" for p in places])
    axes.set_ylabel("time to first token, s")
    axes.set_title(
        f"{results[0].prompt_tokens:,}-token prompts, "
        f"{results[0].loaded_bytes / 1e6:,.0f} MB of KV each",
        fontsize=11,
    )
    axes.spines[["top", "right"]].set_visible(False)
    # Below the bars: between them it would cover one.
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False
    )
    path = directory / PLOT_NAME
    figure.savefig(path)
    return path
