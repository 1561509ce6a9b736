"""`warm`: fills the host pool of a new agent with the most used chunks of its Redis."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmcache_redis.cli.admin import print_report, progress_line
from lmcache_redis.cli.options import (
    AsJson,
    Endpoint,
    RedisUrl,
    RedisUsername,
    redis_options,
    size_of,
)
from lmcache_redis.config import default_endpoint
from lmcache_redis.errors import ConfigError, RedisUnavailable

if TYPE_CHECKING:
    from lmcache_redis.admin.warm import Choice
    from lmcache_redis.cli.warming import WarmReport
    from lmcache_redis.messages import WarmChunk
    from lmcache_redis.resp import RedisOptions

_REASONS = {
    "held": "in the host pool already",
    "missing": "no longer in Redis, or incomplete",
    "damaged": "not loaded: damaged, or of something else",
    "failed": "not loaded: Redis or the disk was too slow, or failed",
}


def warm(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="Chunks of this model; repeatable.", show_default="all"),
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            "--layout",
            help="Chunks of this layout, as `status` and `inspect` show it; repeatable.",
            show_default="all",
        ),
    ] = None,
    limit_bytes: Annotated[
        str | None,
        typer.Option(
            "--limit-bytes",
            metavar="SIZE",
            help="Load at most so much.",
            show_default="the free part of the host pool",
        ),
    ] = None,
    bytes_per_second: Annotated[
        str,
        typer.Option("--bytes-per-second", metavar="SIZE", help="Load at most so much a second."),
    ] = "256MiB",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be loaded, and stop.")
    ] = False,
    endpoint: Endpoint = None,
    redis_url: RedisUrl = None,
    redis_username: RedisUsername = None,
    as_json: AsJson = False,
) -> None:
    """Load the most used chunks from Redis into the host pool of this node's agent.

    For an agent that has just started: its first requests then hit the host pool. Run it beside
    the agent, with the URL of the agent's Redis. The agent evicts nothing for these chunks, and
    loads them only while no request loads. Chunks go to its disk tier too. Ctrl-C ends it; what
    is loaded stays.

    Examples:

      lmcache-redis warm --redis-url redis://cache.example:6379 --dry-run

      lmcache-redis warm --model org/model --limit-bytes 8GiB --bytes-per-second 100MiB
    """
    from lmcache_redis.admin.names import read_layout
    from lmcache_redis.admin.pace import Pace
    from lmcache_redis.admin.report import as_json as to_json
    from lmcache_redis.admin.report import choice_lines
    from lmcache_redis.admin.server import open_server
    from lmcache_redis.admin.warm import choose
    from lmcache_redis.cli.warming import WarmReport, warm_agent
    from lmcache_redis.client.control import ControlClient

    limit = None if limit_bytes is None else size_of("--limit-bytes", limit_bytes)
    rate = size_of("--bytes-per-second", bytes_per_second)
    if rate < 1 << 10:
        raise ConfigError(f"--bytes-per-second is {rate}: set it to 1KiB or more")
    pace = Pace(rate)
    namespaces = frozenset().union(*map(read_layout, layout)) if layout else None
    agent = ControlClient(endpoint or default_endpoint())
    status = agent.status()
    options = _redis_of(status, redis_url, redis_username)
    pool = status["pool"]
    with open_server(options) as server:
        where = server.where
        choice = choose(server, options.key_prefix, pool["slot_bytes"], model or (), namespaces)
    fitting = choice.first(pool["slots"] - pool["used_slots"], limit)
    if dry_run:
        print_report(as_json, fitting, choice_lines(fitting, choice, where))
        return
    report = WarmReport()
    try:
        with progress_line() as show:
            chunks = _chunks(choice)
            warm_agent(agent, chunks, limit, pace, report, lambda: show(_progress(report, fitting)))
    finally:
        # The report is also printed after an interrupt, or if the agent is lost.
        found = {**to_json(report), "unfit": choice.unfit}
        print_report(as_json, found, _lines(report, choice, where))


def _redis_of(status: Mapping[str, Any], url: str | None, username: str | None) -> RedisOptions:
    """The server that the options name, with the agent's key prefix.

    Says on stderr if the agent knows its server under another name. Raises ``ConfigError``, and
    RedisUnavailable if the agent's server is down.
    """
    from lmcache_redis.resp.net.endpoint import parse_deployment

    redis = status["redis"]
    if not redis["up"]:
        raise RedisUnavailable(f"the agent cannot use its Redis: {redis['reason']}")
    options = redis_options(
        redis_url=url, redis_username=username, key_prefix=redis.get("key_prefix")
    )
    where = parse_deployment(options).where
    if where != redis["server"]:
        print(
            f"lmcache-redis: the agent loads from {redis['server']}, and the chunks are chosen at "
            f"{where}: is that the same Redis?",
            file=sys.stderr,
        )
    return options


def _chunks(choice: Choice) -> Iterator[WarmChunk]:
    from lmcache_redis.messages import WarmChunk

    for each in choice.candidates:
        key = each.name.key
        yield WarmChunk(
            key.model_name, key.kv_rank, each.fingerprint, key.chunk_hash, each.metadata
        )


def _progress(report: WarmReport, fitting: Choice) -> str:
    from lmcache_redis.admin.names import shown_bytes

    done, whole = shown_bytes(report.loaded_bytes), shown_bytes(fitting.chunk_bytes)
    waits = ", the agent is busy" if report.is_waiting else ""
    return f"{done} of {whole}{waits}".ljust(60)


def _lines(report: WarmReport, choice: Choice, where: str) -> Iterator[str]:
    from lmcache_redis.admin.names import shown_bytes
    from lmcache_redis.admin.report import counted, unfit_lines

    if not choice.candidates:
        yield f"nothing to load from {where}: no chunk matches (see `lmcache-redis inspect`)"
    else:
        chunks, size = counted(report.chunks["loaded"], "chunk"), shown_bytes(report.loaded_bytes)
        yield f"loaded {chunks} ({size}) from {where} in {report.seconds:.1f} s"
    for outcome, reason in _REASONS.items():
        if report.chunks[outcome]:
            yield f"{counted(report.chunks[outcome], 'chunk')} {reason}"
    yield from unfit_lines(choice)
    if report.left:
        why = "the host pool is full" if report.is_full else "the limit is reached"
        if not (report.is_full or report.is_limited):
            why = "the warming ended early"
        yield f"{counted(report.left, 'less used chunk')} left: {why}"
