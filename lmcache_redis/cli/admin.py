"""`inspect`, `purge` and `doctor`: looking after the Redis behind the cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmcache_redis.cli.options import agent_config
from lmcache_redis.errors import ConfigError

if TYPE_CHECKING:
    from lmcache_redis.admin.purge import Pace, Plan, Removal
    from lmcache_redis.admin.server import Server
    from lmcache_redis.resp.options import RedisOptions

RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        envvar="LMCACHE_REDIS_URL",
        show_envvar=True,
        help="URL of the server, as for the agent; a password may come from "
        "LMCACHE_REDIS_PASSWORD or LMCACHE_REDIS_PASSWORD_FILE.",
    ),
]
RedisUsername = Annotated[
    str | None, typer.Option("--redis-username", help="ACL user, if not in the URL.")
]
KeyPrefix = Annotated[
    str | None, typer.Option("--key-prefix", help="What the agents put before every key.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def inspect(
    key: Annotated[
        str | None,
        typer.Argument(
            help="A key: hex, text with \\xNN, or as redis-cli prints it; of a stripe, or of a "
            "chunk without its stripe index.",
            show_default="all chunks, by model and layout",
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Look at every key instead of a sample.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Read payloads too and compare their checksums; before Redis 7.2 that counts "
            "as a use.",
        ),
    ] = False,
    redis_url: RedisUrl = None,
    redis_username: RedisUsername = None,
    key_prefix: KeyPrefix = None,
    as_json: AsJson = False,
) -> None:
    """Explain a key, or show what the cache holds by model and layout.

    Examples:

      lmcache-redis inspect

      lmcache-redis inspect '"lmcr1:..."'
    """
    if key is not None and everything:
        raise ConfigError("--all goes without a KEY: leave one of them out")
    from lmcache_redis.admin import names, report, text
    from lmcache_redis.admin.inspect import explain, summarise

    with _server(redis_url, redis_username, key_prefix) as (server, options):
        if key is not None:
            found = explain(server, names.read_key(key), options.key_prefix, verify)
            _print(as_json, report.chunk_json, text.chunk_lines, found)
        else:
            summary = summarise(server, options.key_prefix, everything=everything, verify=verify)
            _print(as_json, report.summary_json, text.summary_lines, summary)


def purge(
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Of this model; may be given again.")
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option("--layout", help="Of this layout, as `inspect` shows it; may be given again."),
    ] = None,
    idle_longer_than: Annotated[
        str | None,
        typer.Option("--idle-longer-than", help="Not read from Redis for that long: 12h, 7d, 2w."),
    ] = None,
    stored_longer_than: Annotated[
        str | None,
        typer.Option("--stored-longer-than", help="Stored so long ago, whoever reads it."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--everything", help="All chunks under the key prefix.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be removed, and end.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    keys_per_second: Annotated[
        float, typer.Option("--keys-per-second", help="Remove at most so many keys a second.")
    ] = 2000,
    redis_url: RedisUrl = None,
    redis_username: RedisUsername = None,
    key_prefix: KeyPrefix = None,
    as_json: AsJson = False,
) -> None:
    """Remove chunks by model, layout or age, at a bounded rate; conditions add up.

    Only keys whose value has a whole header of ours that agrees with the key are removed.
    Agents may run beside it: a chunk that vanishes is a miss.

    Examples:

      lmcache-redis purge --model org/old-model --dry-run

      lmcache-redis purge --idle-longer-than 7d --yes
    """
    from lmcache_redis.admin import names, report, text
    from lmcache_redis.admin.purge import Pace, Removal, Selection, choose

    namespaces = [names.read_layout(each) for each in layout or ()]
    selection = Selection(
        models=frozenset(model or ()),
        namespaces=frozenset().union(*namespaces) if namespaces else None,
        idle_longer_than_s=names.read_age("--idle-longer-than", idle_longer_than),
        stored_longer_than_s=names.read_age("--stored-longer-than", stored_longer_than),
        everything=everything,
    )
    pace = Pace(keys_per_second)
    if not (yes or dry_run or _on_terminal()):
        raise ConfigError(
            "there is no terminal to ask on: give --yes to remove without asking, or --dry-run"
        )
    with _server(redis_url, redis_username, key_prefix) as (server, options):
        plan = choose(server, options.key_prefix, selection)
        if dry_run or not plan.chunks:
            _print(as_json, report.plan_json, lambda p: text.plan_lines(p, server.where), plan)
            return
        if not as_json:
            print(*text.plan_lines(plan, server.where), sep="\n")
        if not yes and not typer.confirm("Remove them?", err=as_json):
            raise typer.Exit(1)
        removal = Removal()
        try:
            _remove(server, plan, pace, removal)
        finally:
            # Also where it was interrupted or the server went away: what was done is done.
            _print(as_json, report.removal_json, text.removal_lines, removal)


def doctor(
    bandwidth: Annotated[
        bool,
        typer.Option(
            "--bandwidth/--no-bandwidth",
            help="Write and read 8 MiB under temporary keys to measure it.",
        ),
    ] = True,
    kv_bytes_per_token: Annotated[
        int, typer.Option("--kv-bytes-per-token", min=1, help="Of the model; 131072 is an 8B's.")
    ] = 128 << 10,
    prefill_tokens_per_s: Annotated[
        float, typer.Option("--prefill-tokens-per-s", min=1, help="Of all engines together.")
    ] = 8000,
    redis_url: RedisUrl = None,
    redis_username: RedisUsername = None,
    key_prefix: KeyPrefix = None,
    as_json: AsJson = False,
) -> None:
    """Look at a server and say what to change, and why, the most important first.

    Changes nothing. Exit status: 0 where nothing is critical and nothing warns, 1 else, 2 for
    a wrong option.
    """
    from lmcache_redis.admin import report, text
    from lmcache_redis.admin.doctor import diagnose
    from lmcache_redis.admin.findings import Need

    need = Need(kv_bytes_per_token, prefill_tokens_per_s)
    with _server(redis_url, redis_username, key_prefix) as (server, options):
        diagnosis = diagnose(server, options.key_prefix, need, bandwidth=bandwidth)
    _print(as_json, report.diagnosis_json, text.diagnosis_lines, diagnosis)
    raise typer.Exit(diagnosis.exit_status)


@contextmanager
def _server(
    url: str | None, username: str | None, key_prefix: str | None
) -> Iterator[tuple[Server, RedisOptions]]:
    """The server that options and environment name, by the agent's own rules."""
    config = agent_config({"redis_url": url, "redis_username": username, "key_prefix": key_prefix})
    if not config.redis_url:
        raise ConfigError(
            "no server is named: give --redis-url or set LMCACHE_REDIS_URL (of an agent with an "
            "embedded Redis, `lmcache-redis status` shows it)"
        )
    from lmcache_redis.admin.server import open_server
    from lmcache_redis.resp.options import RedisOptions

    options = RedisOptions(
        url=config.redis_url,
        key_prefix=config.key_prefix,
        username=config.redis_username,
        password=config.redis_password,
    )
    with open_server(options) as server:
        yield server, options


def _print(
    as_json: bool,
    to_json: Callable[[Any], dict[str, Any]],
    to_lines: Callable[[Any], Iterable[str]],
    found: Any,
) -> None:
    if as_json:
        print(json.dumps(to_json(found), indent=2))
        return
    for line in to_lines(found):
        print(line)


def _remove(server: Server, plan: Plan, pace: Pace, removal: Removal) -> None:
    """Remove, with a counter on a terminal."""
    from lmcache_redis.admin.purge import remove

    shown = sys.stderr.isatty()

    def progress(keys: int) -> None:
        if shown:
            print(f"\r{keys:,} of {plan.stripes:,} keys", end="", file=sys.stderr, flush=True)

    try:
        remove(server, plan, pace, removal, progress)
    finally:
        if shown:
            print(file=sys.stderr)


def _on_terminal() -> bool:
    return sys.stdin.isatty()
