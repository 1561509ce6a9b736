"""`bench`: how fast chunks move between this machine and a server."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lmcache_redis.cli.options import (
    AsJson,
    KeyPrefix,
    RedisUrl,
    RedisUsername,
    SealKeyFile,
    redis_options,
    size_of,
)
from lmcache_redis.config import format_size

ConnectionsOption = Annotated[
    int | None, typer.Option(help="As for the agent.", show_default="the agent's default")
]


def bench(
    chunk_bytes: Annotated[
        str,
        typer.Option(
            "--chunk-bytes",
            metavar="SIZE",
            help="Size of a chunk: 256 tokens of an 8B model are 32MiB, of a 1B model 8MiB.",
        ),
    ] = "8MiB",
    chunks: Annotated[
        int, typer.Option("--chunks", min=1, max=10_000, help="Chunks to write and read together.")
    ] = 16,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=1000, help="Number of rounds.")] = 5,
    get_connections: ConnectionsOption = None,
    set_connections: ConnectionsOption = None,
    redis_url: RedisUrl = None,
    redis_username: RedisUsername = None,
    seal_key_file: SealKeyFile = None,
    key_prefix: KeyPrefix = None,
    as_json: AsJson = False,
) -> None:
    """Measure writes, reads and lookups of chunks against a server, as an agent makes them.

    Figures are medians; other work on this machine or the server distorts them. The keys are
    removed after each round, and expire after ten minutes if the command is killed. They take
    --chunks times --chunk-bytes of the server's memory: a full server evicts that amount.

    Examples:

      lmcache-redis bench --redis-url redis://cache.example:6379

      lmcache-redis bench --chunk-bytes 32MiB --chunks 8 --get-connections 8
    """
    from lmcache_redis.bench.run import Plan, measure

    options = redis_options(
        redis_url=redis_url,
        redis_username=redis_username,
        seal_key_file=seal_key_file,
        key_prefix=key_prefix,
        get_connections=get_connections,
        set_connections=set_connections,
    )
    found = measure(options, Plan(size_of("--chunk-bytes", chunk_bytes), chunks, rounds))
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table(title=f"{found['server']}: medians of {rounds} rounds")
    for name in ("operation", "chunks", "of", "GB/s", "ms"):
        table.add_column(name, justify="left" if name == "operation" else "right")
    for row in found["rows"]:
        speed = "" if row["gb_per_s"] is None else f"{row['gb_per_s']:.2f}"
        size = format_size(row["chunk_bytes"])
        table.add_row(row["op"], f"{row['chunks']:,}", size, speed, f"{row['ms']:.2f}")
    Console().print(table)
