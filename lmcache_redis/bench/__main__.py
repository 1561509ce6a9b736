"""`scripts/bench`, `lmcache-redis bench`: measures this machine and prints tables.

Each benchmark can write its rows as JSON (machine included) with --json FILE.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from lmcache_redis.bench.report import show, write_json
from lmcache_redis.errors import LMCacheRedisError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measures this machine. Figures are medians; other programs on the machine spoil them.",
)

JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")]
RoundsOption = Annotated[int, typer.Option("--rounds", min=1, max=1000)]


@app.command(name="data-plane")
def data_plane(
    rounds: RoundsOption = 5,
    url: Annotated[str | None, typer.Option(help="A server to use; it is flushed.")] = None,
    json: JsonOption = None,
) -> None:
    """Chunks between slots and Redis, and prefix scans, beside redis-py. About two minutes."""
    from lmcache_redis.bench import data_plane as benchmark

    _report("data plane", [asdict(row) for row in benchmark.run(url, rounds=rounds)], json)


@app.command()
def lookup(rounds: RoundsOption = 200, json: JsonOption = None) -> None:
    """A lookup's round trip through the agent; the agent's start and memory. Seconds."""
    from lmcache_redis.bench import lookups as benchmark

    _report("agent", benchmark.run(rounds), json)


@app.command(name="main-job")
def main_job(
    rounds: RoundsOption = 5,
    prompt_tokens: Annotated[int, typer.Option(min=512, max=32_768)] = 4097,
    output_dir: Annotated[Path, typer.Option(help="Logs and the model.")] = Path("bench-output"),
    json: JsonOption = None,
) -> None:
    """Time to first token of a real vLLM: cold, from the host pool, from Redis. Minutes."""
    from lmcache_redis.bench import main_job as benchmark

    rows = benchmark.run(output_dir, rounds, prompt_tokens)
    _report(f"main job, prompts of {prompt_tokens} tokens", rows, json)


def _report(title: str, rows: Sequence[Mapping[str, Any]], json: Path | None) -> None:
    show(title, rows)
    if json is not None:
        write_json(json, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a benchmark; returns the exit status."""
    try:
        app(args=list(arguments) if arguments is not None else None, standalone_mode=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except LMCacheRedisError as error:
        print(f"lmcache-redis bench: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
