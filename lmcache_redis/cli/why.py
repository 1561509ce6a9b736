# SPDX-License-Identifier: Apache-2.0
"""`why`: why a request missed, and why two engines do not share. What is printed is pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

import typer

from lmcache_redis.cli.options import (
    AsJson,
    Endpoint,
    Timeout,
    Url,
    agent_anywhere,
    number,
    print_found,
    reads_document,
)
from lmcache_redis.errors import ConfigError, LMCacheRedisError
from lmcache_redis.tenants import NONE
from lmcache_redis.tier_kinds import HOST, KINDS

# By `first_miss.reason`. Most are the counters `miss_*` of `status`.
REASONS = MappingProxyType(
    {
        "absent": "absent: neither in the host pool nor in any tier",
        "in_part": "in part: of some ranks or groups of layers its parts are there, of others not",
        "incomplete": "in part: some of its stripes are missing, evicted or never written",
        "slower": "slower: loading it was expected to take longer than computing it",
        "redis_error": "Redis failed, or could not be reached",
        "redis_silent": "Redis had not answered when computing had to begin",
        "deadline": "late: the lookup deadline passed (--lookup-deadline-s)",
        "pool_full": "no room: the host pool was full of chunks in use (--pool-bytes)",
        "mixed_stores": "torn: its stripes came from two different stores",
        "corrupt": "corrupt: a checksum was wrong",
        "foreign": "foreign: the value in Redis is of another layout, chunk or version",
        "sealed": "sealed with a key that this agent does not have, or not sealed",
        "load": "another request was loading it, and that failed",
        "distrusted": "distrusted: a canary has found other KV in this layout, and behind a local "
        "prefix nothing is compared (`lmcache-redis trust`)",
        "not_registered": "no worker of its engine had registered its KV cache yet",
        "mapping": "the agent was still mapping the memory of its engine",
        "layouts_differ": "engines without ids and with different layouts are registered: the "
        "agent cannot tell whose request this is",
        # Of the tiers whose misses are not told apart.
        **{
            kind.name: f"the {kind.title} tier could not deliver it"
            for kind in KINDS
            if kind is not HOST and not kind.misses
        },
    }
)
_TIERS = {kind.name: kind.title for kind in KINDS} | {HOST.name: f"the {HOST.title}"}
_SHOWN = 16


def why(
    request: Annotated[
        str | None,
        typer.Argument(
            metavar="REQUEST_ID",
            help="The id of a request as vLLM logs or returns it, or a part of the id.",
            show_default=False,
        ),
    ] = None,
    last: Annotated[bool, typer.Option("--last", help="The last request.")] = False,
    as_list: Annotated[
        bool, typer.Option("--list", help="The last requests, one a line, the newest first.")
    ] = False,
    layouts: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B",
            help="What differs between two layouts, as `status` shows them, or their beginnings.",
            show_default=False,
        ),
    ] = None,
    most: Annotated[int, number("--most", int, (1, 4096), "Requests that --list shows.")] = 20,
    endpoint: Endpoint = None,
    url: Url = None,
    timeout_s: Timeout = 5.0,
    as_json: AsJson = False,
) -> None:
    """Say why a request missed, or why two engines do not share.

    Examples:

      lmcache-redis why chatcmpl-9c1fd9d1

      lmcache-redis why --last

      lmcache-redis why --layouts 24aa4509 b096a0ed
    """
    if sum((request is not None, last, as_list, layouts is not None)) != 1:
        raise ConfigError("give one of REQUEST_ID, --last, --list and --layouts A B")
    agent = agent_anywhere(endpoint, url, timeout_s)
    with reads_document(agent):
        if layouts is not None:
            wanted = [each.strip().lower() for each in layouts]
            compared = compare(agent.layouts(*wanted), *wanted)
            print_found(as_json, compared, comparison_lines(compared))
            return
        report = agent.why(request or "", 1 if last else most)
        if not report["requests"] and not as_list:
            raise LMCacheRedisError(unknown(report, request))
        several = as_list or len(report["requests"]) > 1
        lines = list_lines(report, time.time()) if several else request_lines(report, time.time())
        print_found(as_json, report, lines)


# Requests


def unknown(report: Mapping[str, Any], request: str | None) -> str:
    """Why nothing is known of a request."""
    tokens = report["chunk_size_tokens"]
    kept = f"the agent has {report['kept']:,} since {_clock(report['since_s'])}"
    what = "no request" if request is None else f"no request whose id contains {request!r}"
    return (
        f"{what} is known: {kept}. A prompt is never asked for if it has fewer than {tokens:,} "
        "tokens beside those in vLLM's own prefix cache"
    )


def list_lines(report: Mapping[str, Any], now_s: float) -> Iterator[str]:
    """One line a request."""
    yield f"{report['kept']:,} requests since {_clock(report['since_s'])}"
    for each in report["requests"]:
        lookup = each["lookup"]
        what = "never asked"
        if lookup is not None:
            what = f"{lookup['found_chunks']} of {lookup['asked_chunks']} chunks hit"
            if (miss := lookup["first_miss"]) is not None:
                what += f", {miss['reason']}"
            if each["parts"]["failed"]:
                what += f", {each['parts']['failed']} parts failed to load"
        yield f"{_ago(now_s - each['began_s']):>12}  {each['request_id']}  {what}"


def request_lines(report: Mapping[str, Any], now_s: float) -> Iterator[str]:
    """What became of the one request of the report."""
    (request,) = report["requests"]
    lookup, parts = request["lookup"], request["parts"]
    began_s = request["began_s"]
    yield f"request {request['request_id']}"
    yield _row("engine", f"{request['engine_id']}, {_clock(began_s)}, {_ago(now_s - began_s)}")
    if (tenant := request.get("tenant", NONE)) != NONE:
        yield _row("tenant", tenant)
    if lookup is None:
        tokens = report["chunk_size_tokens"]
        yield _row(
            "asked",
            f"nothing: a prompt below {tokens:,} tokens is never asked, nor is one that may not be "
            "loaded",
        )
    else:
        yield from _lookup_lines(lookup, request["lookups"])
        yield from _miss_lines(lookup)
    yield from _part_lines(parts, lookup)
    if parts["loaded"] and (canaries := report.get("canaries")):
        yield _row("canaries", canaries)


def _lookup_lines(lookup: Mapping[str, Any], times: int) -> Iterator[str]:
    asked, tokens = lookup["asked_chunks"], lookup["chunk_tokens"]
    first = lookup["first_chunk"]
    behind = f", behind {first * tokens:,} tokens that vLLM had itself" if first else ""
    again = f"; asked {times} times, this is the last" if times > 1 else ""
    yield _row("model", f"{lookup['model']}, layout {_layouts(lookup['layouts'])}")
    yield _row("asked", f"{asked} chunks of {tokens:,} tokens{behind}{again}")
    hits = ", ".join(f"{n} from {_TIERS[tier]}" for tier, n in lookup["hits"].items())
    found = f"{lookup['found_chunks']} chunks" + (f": {hits}" if hits else "")
    yield _row("hit", f"{found}, known after {_seconds(lookup['took_s'])}")
    if lookup["compare_only"]:
        yield _row("", "they are only compared: a canary has found other KV in this layout")


def _miss_lines(lookup: Mapping[str, Any]) -> Iterator[str]:
    miss, bet = lookup["first_miss"], lookup["bet"]
    if miss is not None:
        reason = REASONS.get(miss["reason"], miss["reason"])
        yield _row("missed", f"chunk {miss['chunk']}, from token {miss['token']:,} on")
        yield _row("because", reason)
        yield from (_row("", each) for each in miss["because"])
        yield from _place_lines(miss, lookup)
    if bet is not None:
        yield _row("the bet", _bet(bet))
    elif miss is not None and miss["reason"] == "slower":
        took = _seconds(lookup["took_s"])
        yield _row("the bet", f"given up after {took}: computing takes less than the wait")


def _place_lines(miss: Mapping[str, Any], lookup: Mapping[str, Any]) -> Iterator[str]:
    """Where the missed chunk is now. Nothing if that was not asked."""
    if (others := miss.get("other_layouts")) is None:
        return
    own = lookup["layouts"]
    if others:
        yield _row("", f"it is there under another layout: {_layouts(others)}, see")
        yield _row("", f"lmcache-redis why --layouts {own[0][:_SHOWN]} {others[0][:_SHOWN]}")
    there = sum(place is not None for place in miss["now"])
    if there == len(own):
        yield _row("", "under its own layout it is there now: stored since")
    elif there:
        yield _row("", f"{there} of its {len(own)} parts are there now")
    if not miss["redis_answered"]:
        yield _row("", "Redis does not answer now, so other layouts were not looked for there")


def _bet(bet: Mapping[str, Any]) -> str:
    text = f"to compute {bet['chunks']} chunks: {_seconds(bet['compute_s'])}; to load them: "
    if (load_s := bet["load_s"]) is None:
        return text + "not known yet, the first loads of a tier show its rate"
    text += _seconds(load_s)
    chosen_s = bet["chosen_s"]
    is_less = chosen_s is not None and chosen_s < load_s
    return text + (f"; what was chosen: {_seconds(chosen_s)}" if is_less else "")


def _part_lines(parts: Mapping[str, Any], lookup: Mapping[str, Any] | None) -> Iterator[str]:
    """Parts: of each chunk one for each rank and group of layers."""
    hits = 0 if lookup is None else lookup["found_chunks"]
    if parts["loaded"]:
        took = _seconds(parts["load_s"])
        yield _row("loaded", f"{parts['loaded']} parts into vLLM's blocks in {took}")
    elif hits and not parts["compared"] and not parts["failed"]:
        yield _row("loaded", "nothing: vLLM has not asked for the chunks that were found")
    if parts["failed"]:
        yield _row("failed", f"{parts['failed']} parts were not loaded, and computed instead")
    if parts["compared"]:
        yield _row("compared", f"{parts['compared']} parts of a canary, which loads nothing")
    stored = f"{parts['stored']} parts"
    if parts["present"]:
        stored += f", {parts['present']} were in the host pool before"
    if parts["dropped"]:
        stored += f", {parts['dropped']} were dropped"
    yield _row("stored", stored)
    yield from (_row("", each) for each in parts["because"])


# Layouts


def compare(known: Mapping[str, Any], *wanted: str) -> dict[str, Any]:
    """The two layouts that the wanted ones begin, and the pairs that differ.

    to_share: what would have to change in each of them. models: the names of the models that have
    it, if both are one. They are in keys too.
    Raises ``ConfigError`` if one of them begins no layout or several.
    """
    from lmcache_redis.integrations.vllm.identity.advice import advice

    rows: Sequence[Mapping[str, Any]] = known["layouts"]
    first, second = (_only(rows, each, known.get("redis_listed", True)) for each in wanted)
    ours, theirs = first["pairs"], second["pairs"]
    differing, to_share = None, {}
    if ours is not None and theirs is not None:
        named = {"model": first["model"], **ours}, {"model": second["model"], **theirs}
        names = [*named[0], *(name for name in named[1] if name not in named[0])]
        differing = {
            name: [pairs.get(name) for pairs in named]
            for name in names
            if named[0].get(name) != named[1].get(name)
        }
        to_share = {name: advice(name, differing) for name in differing}
    same = first["layout"] == second["layout"]
    models = sorted({each["model"] for each in rows if same and each["layout"] == first["layout"]})
    return {
        "layouts": [first, second],
        "differing": differing,
        "to_share": to_share,
        "models": models,
    }


def _only(rows: Sequence[Mapping[str, Any]], wanted: str, redis_listed: bool) -> Mapping[str, Any]:
    found = {each["layout"]: each for each in rows[::-1] if each["layout"].startswith(wanted)}
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise ConfigError(f"--layouts: several layouts begin with {wanted!r}: {_layouts(found)}")
    known = _layouts({each["layout"]: None for each in rows}) if rows else "none"
    in_redis = (
        "Redis has no description of one: agents write it a minute after an engine has registered"
        if redis_listed
        else "Redis did not list its descriptions in time: `lmcache-redis status` shows its state"
    )
    raise ConfigError(
        f"--layouts: no engine is registered with a layout that begins with {wanted!r}, and "
        f"{in_redis}. Known are: {known}"
    )


def comparison_lines(compared: Mapping[str, Any]) -> Iterator[str]:
    """The pairs that differ, with both values."""
    first, second = compared["layouts"]
    for name, row in zip("AB", (first, second), strict=True):
        where = "known from Redis: no engine with it is registered with this agent"
        if row["engine_id"] is not None:
            where = f"worker {row['worker_id']} of engine {row['engine_id']}"
            where += f", group {row['group']}" if row["group"] else ""
        yield f"{name}  {row['layout']}"
        yield f"   {row['model']}, {where}"
    differing = compared["differing"]
    if differing is None:
        lacking = [each["layout"][:_SHOWN] for each in (first, second) if each["pairs"] is None]
        yield f"Redis has lost the description of {' and '.join(lacking)}"
        yield "an agent writes it again within a minute while an engine has that layout"
    elif not differing:
        yield "they are one layout: engines that have it share, if they name the model alike"
        yield f"models with it: {', '.join(compared['models'])}"
    else:
        yield f"they differ in {len(differing)}:"
        for name, values in differing.items():
            yield from _pair_lines(name, values)
            if change := compared["to_share"][name]:
                yield f"    to share: {change}"


def _pair_lines(name: str, values: Sequence[str | None]) -> Iterator[str]:
    from lmcache_redis.integrations.vllm.identity.pairs import PAIRS

    about = PAIRS.get(name)
    yield f"  {name}" + (f": {about.content}" if about is not None else "")
    for which, value in zip("AB", values, strict=True):
        yield f"    {which}  {'(has no such pair)' if value is None else value or '(empty)'}"


# Words


def _row(name: str, text: str) -> str:
    return f"  {name:<9} {text}"


def _layouts(layouts: Iterable[str]) -> str:
    """Each once: the shares of a chunk have one."""
    return ", ".join(dict.fromkeys(each[:_SHOWN] for each in layouts)) or "not known"


def _clock(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


def _ago(seconds: float) -> str:
    from lmcache_redis.units import shown_age

    return f"{shown_age(max(0.0, seconds))} ago"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
