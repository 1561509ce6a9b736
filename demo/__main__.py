# SPDX-License-Identifier: Apache-2.0
"""`scripts/demo`: the options of the demo."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from demo.run import run_demo
from lmcache_redis.errors import ConfigError, LMCacheRedisError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    output_dir: Annotated[
        Path, typer.Option("--output-dir", help="Directory for results, plot and logs.")
    ] = Path("demo-output"),
    prompts: Annotated[
        int,
        typer.Option("--prompts", min=1, max=500, help="Number of texts and questions."),
    ] = 4,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=512, max=7500, help="Tokens of a text, about.")
    ] = 5000,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, max=256, help="Tokens of an answer, at most.")
    ] = 32,
    metrics: Annotated[
        bool,
        typer.Option(
            "--metrics",
            help="Also run Prometheus, and show what the Grafana dashboard's queries answer.",
        ),
    ] = False,
) -> None:
    """Ask vLLM about long texts, restart everything but Redis, and ask again."""
    try:
        status = run_demo(output_dir, prompts, prompt_tokens, max_tokens, metrics=metrics)
    except LMCacheRedisError as error:
        print(f"demo: {error}", file=sys.stderr)
        status = 2 if isinstance(error, ConfigError) else 1
    raise typer.Exit(status)


if __name__ == "__main__":
    app(prog_name="scripts/demo")
