"""The commands. Each imports what it needs when it runs, so that `--help` is fast."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from lmcache_redis import __version__
from lmcache_redis.cli import admin
from lmcache_redis.cli.options import AsJson, Endpoint, config_from, takes_options_of
from lmcache_redis.cli.size import size
from lmcache_redis.cli.top import top
from lmcache_redis.compat.gateway.config import GatewayConfig
from lmcache_redis.config import AgentConfig, default_endpoint
from lmcache_redis.errors import ConfigError, LMCacheRedisError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help=(
        "A KV cache for vLLM in Redis or Valkey.\n\n"
        "Run one [bold]agent[/bold] per node, and start vLLM with [bold]--kv-transfer-config "
        '\'{"kv_connector":"LMCacheRedisConnector","kv_role":"kv_both"}\'[/bold]: prompt prefixes '
        "that any replica has computed are loaded instead of computed again."
    ),
)

TimeoutOption = Annotated[float, typer.Option("--timeout-s", help="Deadline for the answer.")]


@app.command()
@takes_options_of(AgentConfig)
def agent(**options: object) -> None:
    """Run this node's agent, which caches KV in Redis for all vLLM engines of the node.

    Examples:

      lmcache-redis agent

      lmcache-redis agent --redis-url redis://cache.example:6379 --pool-bytes 16GiB

      lmcache-redis agent --config /etc/lmcache-redis/agent.conf
    """
    config = config_from(AgentConfig, options)
    _log_to_stderr(config.log_level)
    from lmcache_redis.agent.main import run_agent

    again = partial(config_from, AgentConfig, options) if options["config"] is not None else None
    raise typer.Exit(run_agent(config, again))


@app.command()
@takes_options_of(GatewayConfig)
def gateway(**options: object) -> None:
    """Serve chunks to LMCache clients over TCP (lm://), from memory, disk and Redis.

    Examples:

      lmcache-redis gateway --redis-url redis://cache.example:6379

      lmcache-redis gateway --listen lm://0.0.0.0:65432 --allowed-peers 10.0.0.0/8 --redis-url ...
    """
    config = config_from(GatewayConfig, options)
    _log_to_stderr(config.log_level)
    from lmcache_redis.compat.gateway.main import run_gateway

    raise typer.Exit(run_gateway(config))


@app.command()
def status(
    endpoint: Endpoint = None, timeout_s: TimeoutOption = 2.0, as_json: AsJson = False
) -> None:
    """Show what the agent holds, the state of Redis, and all counters."""
    from lmcache_redis.cli.shown import status_tables
    from lmcache_redis.client.control import ControlClient

    report = ControlClient(endpoint or default_endpoint(), timeout_s).status()
    if as_json:
        print(json.dumps(report, indent=2))
        return
    console = Console()
    for table in status_tables(report):
        console.print(table)


@app.command()
def ping(endpoint: Endpoint = None, timeout_s: TimeoutOption = 2.0) -> None:
    """Check that the agent answers, and show the round trip."""
    from lmcache_redis.client.control import ControlClient

    pong, took_s = ControlClient(endpoint or default_endpoint(), timeout_s).ping()
    print(f"lmcache-redis {pong.package_version}, process {pong.agent_pid}: {took_s * 1e3:.2f} ms")


@app.command()
def trust(endpoint: Endpoint = None, timeout_s: TimeoutOption = 2.0) -> None:
    """Have the agent load again what it has distrusted since a canary found other KV.

    First find out why, and remove what is wrong with `lmcache-redis purge`.
    """
    from lmcache_redis.client.control import ControlClient

    count = ControlClient(endpoint or default_endpoint(), timeout_s).trust()
    print(f"layouts trusted again: {count}")


app.command()(top)
app.command()(admin.inspect)
app.command()(admin.purge)
app.command()(admin.doctor)
app.command()(size)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def run() -> None:
    """Runs a command. A known error prints one sentence; a wrong setting has exit status 2."""
    try:
        app()
    except ConfigError as error:
        _fail(error, 2)
    except LMCacheRedisError as error:
        _fail(error, 1)


def _fail(error: Exception, status: int) -> None:
    print(f"lmcache-redis: {error}", file=sys.stderr)
    sys.exit(status)


def _log_to_stderr(level: str) -> None:
    import logging

    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
