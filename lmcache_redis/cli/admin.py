# SPDX-License-Identifier: Apache-2.0
"""`inspect`, `purge` and `doctor`: commands for the operators of the Redis behind the cache.

Without a URL they ask the agent of this machine which server it uses.
"""

from __future__ import annotations

import enum
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmcache_redis.cli.options import (
    AsJson,
    Endpoint,
    KeyPrefix,
    RedisUrl,
    RedisUsername,
    SealKeyFile,
    agent_at,
    choice,
    fail,
    number,
    print_found,
)
from lmcache_redis.cli.size import (
    MODEL_HELP,
    KvCacheDtype,
    PrefillRate,
    PromptTokens,
    Ranks,
    Revision,
)
from lmcache_redis.config import AgentConfig, endpoint_path, tools_endpoint
from lmcache_redis.errors import ConfigError, RedisError
from lmcache_redis.sources import config_from

if TYPE_CHECKING:
    from lmcache_redis.admin.server import PrimaryServers
    from lmcache_redis.resp import RedisOptions

NOT_CHECKED = 3  # an exit status
PROGRESS_S = 5.0


class FailOn(enum.Enum):
    """The least serious finding with which doctor's exit status is 1."""

    critical = "critical"
    warning = "warning"
    hint = "hint"


def inspect(
    key: Annotated[
        str | None,
        typer.Argument(
            help="A stripe's key, or a chunk's without the stripe index: in hex, with \\xNN "
            "escapes, or as redis-cli prints it.",
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
            help="Also read payloads and compare their checksums; with --seal-key-file open sealed "
            "ones. This counts as a use.",
        ),
    ] = False,
    seal_key_file: SealKeyFile = None,
    redis_url: RedisUrl = None,
    redis_username: RedisUsername = None,
    key_prefix: KeyPrefix = None,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Explain a key, or show what the cache holds, by model and layout.

    Examples:

      lmcache-redis inspect

      lmcache-redis inspect '"lmcr2:..."'
    """
    if key is not None and everything:
        raise ConfigError("--all cannot be combined with a KEY: leave one of them out")
    from lmcache_redis.admin import report
    from lmcache_redis.admin.inspect import explain, summarise
    from lmcache_redis.admin.names import read_key
    from lmcache_redis.seal import read_seal_keys

    keys = read_seal_keys(seal_key_file)
    wanted = None if key is None else read_key(key)
    with _server(redis_url, redis_username, key_prefix, endpoint) as (server, prefix):
        if wanted is not None:
            chunk = explain(server, wanted, prefix, verify, keys)
            print_found(as_json, report.as_json(chunk), report.chunk_lines(chunk))
            return
        summary = summarise(
            server,
            prefix,
            everything=everything,
            verify=verify,
            keys=keys,
            progress=shown_progress(),
        )
        print_found(as_json, report.as_json(summary), report.summary_lines(summary))


def purge(
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Chunks of this model; repeatable."),
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYOUT",
            help="Chunks of this layout, as `status` and `inspect` show it; repeatable.",
        ),
    ] = None,
    idle_longer_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Chunks not used for this long: 12h, 7d, 2w."),
    ] = None,
    stored_longer_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Chunks stored longer ago than this.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--everything", help="All chunks under the key prefix.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be removed, and stop.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    keys_per_second: Annotated[
        float,
        number("--keys-per-second", float, (1, 1_000_000), "Remove at most this many a second."),
    ] = 2000,
    redis_url: RedisUrl = None,
    redis_username: RedisUsername = None,
    key_prefix: KeyPrefix = None,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Remove chunks by model, layout or age, at a bounded rate. All given conditions must hold.

    Removes a key only if its value has an intact header that agrees with the key. Agents may
    run at the same time: a removed chunk is a miss.

    Examples:

      lmcache-redis purge --model org/old-model --dry-run

      lmcache-redis purge --idle-longer-than 7d --yes
    """
    from lmcache_redis.admin import report
    from lmcache_redis.admin.names import read_age, read_layout
    from lmcache_redis.admin.purge import PurgeResult, Selection, choose, remove

    selection = Selection(
        models=frozenset(model or ()),
        layouts=frozenset(map(read_layout, layout or ())),
        idle_longer_than_s=read_age("--idle-longer-than", idle_longer_than),
        stored_longer_than_s=read_age("--stored-longer-than", stored_longer_than),
        everything=everything,
    )
    if not (yes or dry_run or sys.stdin.isatty()):
        raise ConfigError(
            "there is no terminal to ask on: give --yes to remove without asking, or --dry-run"
        )
    with _server(redis_url, redis_username, key_prefix, endpoint) as (server, prefix):
        plan = choose(server, prefix, selection, shown_progress())
        ends_here = dry_run or not plan.chunks
        if ends_here or not as_json:
            found = report.as_json(plan) if as_json else None
            print_found(as_json, found, report.plan_lines(plan, server.where))
        if ends_here:
            return
        if not yes and not typer.confirm("Remove them?", err=as_json):
            print("nothing was removed", file=sys.stderr)
            raise typer.Exit(1)
        removal = PurgeResult()
        try:
            remove(server, plan, keys_per_second, removal, shown_progress())
        finally:
            # The report is also printed after an interrupt, or if the server is lost.
            print_found(as_json, report.as_json(removal), report.removal_lines(removal))


def doctor(
    bandwidth: Annotated[
        bool,
        typer.Option(
            "--bandwidth/--no-bandwidth",
            help="Measure bandwidth: write and read 8 MiB under temporary keys.",
        ),
    ] = True,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help=f"{MODEL_HELP}, or its config.json.",
            show_default="of the agent's engines, else as stored",
        ),
    ] = None,
    revision: Revision = "main",
    kv_bytes_per_token: Annotated[
        int | None,
        number(
            "--kv-bytes-per-token",
            int,
            (1, 1 << 40),
            "Of a model, instead of --model.",
            show_default="as of --model, else 131072, of an 8B model",
        ),
    ] = None,
    prompt_tokens: PromptTokens = 8192,
    prefill_tokens_per_s: PrefillRate = 8000,
    tp: Ranks = 1,
    kv_cache_dtype: KvCacheDtype = "auto",
    fail_on: Annotated[
        FailOn,
        choice("--fail-on", FailOn, "Least serious finding with which the exit status is 1."),
    ] = FailOn.warning,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Leave out what is as it should be.")
    ] = False,
    redis_url: RedisUrl = None,
    redis_username: RedisUsername = None,
    key_prefix: KeyPrefix = None,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Check a server and this node, and say what to change, and why.

    The most important comes first. Of the node: its agent, its engines, their processes and
    limits. If no agent answers, only the server is checked; with --endpoint that is an error.
    Changes nothing.

    Exit status: 1 for a finding as serious as --fail-on, 2 for a wrong option, 3 if the server
    or the agent could not be asked, else 0.
    """
    from lmcache_redis.admin import report
    from lmcache_redis.admin.doctor import examine
    from lmcache_redis.admin.facts import Need
    from lmcache_redis.admin.rules import Severity
    from lmcache_redis.admin.sizes.configs import find_model
    from lmcache_redis.admin.sizes.sizing import SizeOptions, size_model
    from lmcache_redis.client.control import AgentUnreachable

    if model is not None and kv_bytes_per_token is not None:
        raise ConfigError("--model and --kv-bytes-per-token say the same: give one of them")
    need = Need(prefill_tokens_per_s=prefill_tokens_per_s, prompt_tokens=prompt_tokens)
    try:
        status, config = _status(endpoint), config_from(AgentConfig, {})
        # An older agent does not say: it does not pack.
        compress = config.compress if status is None else status["redis"].get("compress")
        if model is not None:
            options = SizeOptions(
                tp=tp,
                kv_cache_dtype=kv_cache_dtype,
                prompt_tokens=prompt_tokens,
                prefill_tokens_per_s=prefill_tokens_per_s,
                compress=compress == "lossless",
            )
            size = size_model(*find_model(model, revision), options)
            need = replace(
                need,
                kv_bytes_per_token=max(1, size.bytes_per_token),
                memory_per_token=size.stored_bytes / prompt_tokens,
                loaded_per_token=size.loaded_bytes_per_token,
                of=size.model,
                is_known=True,
            )
        elif kv_bytes_per_token is not None:
            of = f"{kv_bytes_per_token:,} bytes a token"
            need = replace(need, kv_bytes_per_token=kv_bytes_per_token, of=of, is_known=True)
        diagnosis = examine(
            _named(redis_url, redis_username, key_prefix, endpoint),
            need,
            bandwidth=bandwidth,
            report=status,
            ttl_refresh=config.ttl_refresh,
        )
    except (AgentUnreachable, RedisError) as error:
        fail(str(error), NOT_CHECKED)
    diagnosis = replace(diagnosis, fail_on=Severity[fail_on.name.upper()])
    if quiet:
        seen = tuple(each for each in diagnosis.findings if each.severity is not Severity.OK)
        diagnosis = replace(diagnosis, findings=seen)
    print_found(as_json, report.as_json(diagnosis), report.diagnosis_lines(diagnosis))
    raise typer.Exit(diagnosis.exit_status)


def _status(endpoint: str | None) -> dict[str, Any] | None:
    """The agent's status; None if no endpoint is named and no agent answers at the default one."""
    from lmcache_redis.client.control import AgentUnreachable

    if endpoint is None and not os.path.exists(endpoint_path(tools_endpoint())):
        return None
    try:
        return agent_at(endpoint, 1.0).status()
    except AgentUnreachable:
        if endpoint is not None:
            raise
        return None


@contextmanager
def _server(
    url: str | None, username: str | None, key_prefix: str | None, endpoint: str | None
) -> Iterator[tuple[PrimaryServers, bytes]]:
    """The server that `_named` finds, and the key prefix."""
    from lmcache_redis.admin.server import open_server

    options = _named(url, username, key_prefix, endpoint)
    with open_server(options) as server:
        yield server, options.key_prefix


def _named(
    url: str | None, username: str | None, key_prefix: str | None, endpoint: str | None
) -> RedisOptions:
    """The server named by the options and the environment, else that of the agent."""
    from lmcache_redis.resp import RedisOptions

    named: dict[str, Any] = {"redis_url": url, "redis_username": username, "key_prefix": key_prefix}
    config = config_from(AgentConfig, named)
    if not config.redis_url and (report := _status(endpoint)) is not None:
        url, prefix = report["redis"]["server"], report["redis"]["key_prefix"]
        print(f"the server of the agent at {report['endpoint']}: {url}", file=sys.stderr)
        named |= {"redis_url": url, "key_prefix": config.key_prefix or prefix}
        config = config_from(AgentConfig, named)
    if not config.redis_url:
        raise ConfigError(
            "no server is named, and no agent answers that knows one: give --redis-url or set "
            "LMCACHE_REDIS_URL, or --endpoint of an agent"
        )
    return RedisOptions.of_settings(config, config.redis_url)


def shown_progress(line_s: float = PROGRESS_S) -> Callable[[str, int, int], None]:
    """A function that says on stderr, each few seconds, how far long work has come."""
    due_s = time.monotonic() + line_s

    def show(what: str, done: int, total: int) -> None:
        nonlocal due_s
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + line_s
            # 0: it is not known of how many.
            shown = f"{min(done, total):,} of {total:,}" if total else f"{done:,}"
            print(f"{what}: {shown}", file=sys.stderr, flush=True)

    return show
