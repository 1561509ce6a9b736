# SPDX-License-Identifier: Apache-2.0
"""The commands. Each imports what it needs when it runs, so that `--help` is fast."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from lmcache_redis import __version__
from lmcache_redis.cli import admin
from lmcache_redis.cli.gateway import GatewayConfig, run_gateway
from lmcache_redis.cli.options import (
    AsJson,
    Endpoint,
    Timeout,
    WrongOption,
    agent_at,
    fail,
    print_in_any_encoding,
    takes_options_of,
)
from lmcache_redis.cli.plan import plan
from lmcache_redis.cli.size import size
from lmcache_redis.cli.status import status
from lmcache_redis.cli.top import top
from lmcache_redis.cli.why import why
from lmcache_redis.config import AgentConfig, TierSettings
from lmcache_redis.errors import ConfigError, LMCacheRedisError, StartError
from lmcache_redis.settings import option_name
from lmcache_redis.sources import config_from, misspelt_variables, removed

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,  # Rich cuts long names, and reads :FACTORY: as a picture
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "A KV cache for vLLM in Redis or Valkey.\n\n"
        "Run one agent per node, and start vLLM with --kv-transfer-config\n\n"
        '  \'{"kv_connector":"LMCacheRedisConnector","kv_role":"kv_both"}\'\n\n'
        "Prompt prefixes that any replica has computed are loaded instead of computed again."
    ),
)

_Config = TypeVar("_Config", bound=TierSettings)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options_of_all(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
@takes_options_of(AgentConfig)
def agent(**options: Any) -> None:
    """Run this node's agent, which caches KV in Redis for all vLLM engines of the node.

    Examples:

      lmcache-redis agent

      lmcache-redis agent --redis-url redis://cache:6379 --pool-bytes 16GiB

      lmcache-redis agent --config /etc/lmcache-redis/agent.conf
    """
    config = _config_of(AgentConfig, options)
    from lmcache_redis.agent.main import SettingsFile, run_agent

    path = options["config"]
    again = partial(config_from, AgentConfig, options)
    raise typer.Exit(run_agent(config, SettingsFile(Path(path), again) if path else None))


@app.command()
@takes_options_of(GatewayConfig)
def gateway(**options: Any) -> None:
    """Serve chunks to LMCache clients over TCP (lm://), from memory, disk and Redis.

    Examples:

      lmcache-redis gateway --redis-url redis://cache.example:6379

      lmcache-redis gateway --listen lm://0.0.0.0:65432 --allowed-peers fd00::/8
    """
    raise typer.Exit(run_gateway(_config_of(GatewayConfig, options)))


def _config_of(of: type[_Config], options: dict[str, Any]) -> _Config:
    """The config of a service that logs; with --check, prints what was checked and ends."""
    if options["check"]:
        from lmcache_redis.cli.checked import print_checked

        print_checked(of, options, options["as_json"])
        raise typer.Exit
    if options["connect"]:
        raise ConfigError("--connect is for --check: give that as well, or leave it out")
    config = config_from(of, options)
    handler = logging.StreamHandler(sys.stderr)
    as_text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(_JsonLines() if config.log_format == "json" else as_text)
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    for said in misspelt_variables(AgentConfig, GatewayConfig):
        logging.warning("%s", said)
    return config


class _JsonLines(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, and exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc)
        found = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False)


@app.command()
def settings(
    of: Annotated[
        str, typer.Option(help="Whose: agent, gateway or engine.", metavar="NAME")
    ] = "agent",
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the list of the docs instead.")
    ] = False,
) -> None:
    """Print all settings as a JSON schema (draft 7), for editors, charts and checks."""
    from lmcache_redis.cli.checked import KINDS
    from lmcache_redis.settings import json_schema, markdown_list

    if of not in KINDS:
        raise ConfigError(f"--of is {of!r}: choose one of {', '.join(KINDS)}")
    if markdown:
        print(markdown_list(KINDS[of], as_fields=of == "engine"))
    else:
        print(json.dumps(json_schema(KINDS[of]), indent=2))


@app.command()
def ping(endpoint: Endpoint = None, timeout_s: Timeout = 2.0, as_json: AsJson = False) -> None:
    """Check that the agent answers, and show the round trip."""
    pong, took_s = agent_at(endpoint, timeout_s).ping()
    version, pid = pong.package_version, pong.agent_pid
    found = {"version": version, "pid": pid, "took_s": took_s}
    text = f"lmcache-redis {version}, process {pid}: {took_s * 1e3:.2f} ms"
    print(json.dumps(found) if as_json else text)


@app.command()
def trust(endpoint: Endpoint = None, timeout_s: Timeout = 2.0, as_json: AsJson = False) -> None:
    """Have the agent load again what it has distrusted since a canary found other KV.

    First find out why, and remove what is wrong with `lmcache-redis purge`.
    """
    count = agent_at(endpoint, timeout_s).trust()
    print(json.dumps({"layouts": count}) if as_json else f"layouts trusted again: {count}")


app.command()(status)
app.command()(top)
app.command()(why)
app.command()(admin.inspect)
app.command()(admin.purge)
app.command()(admin.doctor)
app.command()(plan)
app.command()(size)


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the version."""
    print(json.dumps({"version": __version__}) if as_json else __version__)


# Typer has no name of its own for it.
_UsageError: Any = typer.BadParameter.__base__


def run() -> None:
    """Runs a command. An error prints one sentence; a wrong setting or option has status 2.

    With `--json` the sentence is in a JSON object.
    """
    print_in_any_encoding()
    try:
        status = app(prog_name="lmcache-redis", standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except StartError as error:
        fail(str(error), 1)  # the same settings may do later: not the status of wrong ones
    except (ConfigError, WrongOption) as error:
        fail(str(error), 2)
    except LMCacheRedisError as error:
        fail(str(error), 1)
    except typer.Abort:
        fail("interrupted", 130)
    except _UsageError as error:
        if not error.args or type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            sys.exit(2)
        # Else an option is proposed that looks like it.
        option = getattr(error, "option_name", None) or ""
        command = getattr(getattr(error, "ctx", None), "info_name", None)
        name = option.removeprefix("--").replace("-", "_")
        do = removed(name, option_name, "leave it out") if command in ("agent", "gateway") else ""
        if do:
            fail(f"{option} is no option any more: {do}", 2)
        message = str(error.format_message())
        fail(message[0].lower() + message[1:].rstrip("."), 2)
