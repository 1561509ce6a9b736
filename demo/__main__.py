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
        int, typer.Option("--prompts", min=1, max=64, help="Number of prompts.")
    ] = 4,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=512, max=32_768, help="Tokens of each prompt.")
    ] = 4097,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, max=256, help="Tokens compared per prompt.")
    ] = 16,
    metrics: Annotated[
        bool,
        typer.Option(
            "--metrics",
            help="Also run Prometheus, and show what the Grafana dashboard's queries answer.",
        ),
    ] = False,
) -> None:
    """Answer prompts cold, restart everything, and answer them again from Redis."""
    try:
        status = run_demo(output_dir, prompts, prompt_tokens, max_tokens, metrics=metrics)
    except LMCacheRedisError as error:
        print(f"demo: {error}", file=sys.stderr)
        status = 2 if isinstance(error, ConfigError) else 1
    raise typer.Exit(status)


if __name__ == "__main__":
    app(prog_name="scripts/demo")
