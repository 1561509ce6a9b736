# SPDX-License-Identifier: Apache-2.0
"""`status`: an agent in about ten lines. What is printed is pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmcache_redis.cli.options import (
    AsJson,
    Endpoint,
    Timeout,
    Url,
    agent_anywhere,
    reads_document,
)
from lmcache_redis.tier_kinds import HOST

if TYPE_CHECKING:
    from rich.console import Console

_Report = Mapping[str, Any]  # a STATUS document
# What a line is about, what it says, and whether that is bad.
_Row = tuple[str, str, bool]
_MOST_LAYOUTS = 4


def status(
    everything: Annotated[
        bool,
        typer.Option("--all", help="Also engines, queues, canaries, and every counter with zeros."),
    ] = False,
    endpoint: Endpoint = None,
    url: Url = None,
    timeout_s: Timeout = 3.0,
    as_json: AsJson = False,
) -> None:
    """Show hit rate, what was saved, tiers, engines, and what is wrong, in about ten lines."""
    agent = agent_anywhere(endpoint, url, timeout_s)
    report = agent.status()
    if as_json:
        print(json.dumps(report, indent=2))
        return
    from lmcache_redis.cli.shown import all_rows, console, status_tables

    with reads_document(agent):
        found = [*rows(report), *(all_rows(report) if everything else ())]
        tables = [*status_tables(report)] if everything else []
    out = console()
    _print_rows(out, found)
    for table in tables:
        out.print(table)


def _print_rows(out: Console, found: list[_Row]) -> None:
    """Of a terminal's width; elsewhere a line is as long as what it says."""
    from rich.table import Table
    from rich.text import Text

    from lmcache_redis.cli.shown import LABEL_WIDTH

    if not out.is_terminal:
        for label, text, _ in found:
            print(f"{label:<{LABEL_WIDTH}}{text}")
        return

    grid = Table.grid()
    grid.add_column(style="bold", width=LABEL_WIDTH, no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text, is_bad in found:
        grid.add_row(label, Text(text, "bold red" if is_bad else ""))
    out.print(grid)


def rows(report: _Report) -> Iterator[_Row]:
    from lmcache_redis.agent.reports import words

    agent = f"{report['version']}, process {report['pid']}, up for {words.uptime(report)}"
    yield "agent", agent, False
    yield "", report["endpoint"], False
    counters = report["counters"]
    by_tier = ", ".join(
        f"{tier} {words.percent(share)}"
        for tier, share in report["hit_rate"].items()
        if tier == HOST.name or tier in report["tiers"]
    )
    asked = f"{counters['lookup_chunks']:,} chunks in {counters['lookups']:,} lookups"
    yield "hit rate", f"{words.percent(words.hit_rate(report))} of {asked}: {by_tier}", False
    yield "saved", words.saved(report), False
    yield from _tiers(report)
    yield from _engines(report)
    yield "misses", _reasons(report, "miss_"), False
    stored = ", ".join(
        f"{counters[kind.counter('stored_chunks')]:,} chunks {kind.place}"
        for kind, _ in words.tiers_of(report)
    )
    yield "stored", f"{stored}; not stored: {_reasons(report, 'drop_')}", False
    if saved := words.saved_of_redis(counters):
        yield "packed", saved, False
    if not_compared := words.not_compared(report["canaries"]["every"], counters):
        yield "canaries", not_compared, False
    for number, text in enumerate(words.troubles(report)):
        yield "" if number else "wrong", text, True


def _tiers(report: _Report) -> Iterator[_Row]:
    from lmcache_redis.agent.reports import words
    from lmcache_redis.units import shown_bytes

    pool, loads = report["pool"], report["loads"]
    used, whole, pinned = (
        shown_bytes(pool[name] * pool["slot_bytes"])
        for name in ("used_slots", "slots", "pinned_slots")
    )
    waiting = f"; {loads['waiting']:,} lookups wait for room" if loads["waiting"] else ""
    yield "pool", f"up: {used} of {whole}, {pinned} pinned{waiting}", False
    for kind, tier in words.tiers_of(report):
        queued = f"; {tier['writes']:,} chunks wait to be written" if tier["writes"] else ""
        if not tier["up"]:
            yield kind.title, f"DOWN: {tier['reason']} ({tier['where']})", True
        elif failing := words.failing(tier):
            yield kind.title, f"up, and FAILS: {failing}; {tier['where']}", True
        else:
            rate = words.load_rate(loads["tiers"][kind.name])
            yield kind.title, f"up: {words.used(tier)}, loads: {rate}{queued}", False


def _engines(report: _Report) -> Iterator[_Row]:
    from lmcache_redis.agent.reports import words

    engines = report["engines"]
    if not engines:
        yield "engines", "none is connected", False
        return
    ready = sum(each["ready"] for each in engines)
    waits = "" if ready == len(engines) else ": others wait for their scheduler or other ranks"
    yield "engines", f"{ready} of {len(engines)} workers ready{waits}", False
    sharing = report["sharing"]
    for each in sharing[:_MOST_LAYOUTS]:
        yield "", words.sharing(each, sharing), False
    if len(sharing) > _MOST_LAYOUTS:
        yield "", f"and {len(sharing) - _MOST_LAYOUTS} more layouts: see --all", False


def _reasons(report: _Report, kind: str) -> str:
    from lmcache_redis.agent.reports import words

    found = words.reasons(report, kind)
    return ", ".join(f"{name} {count:,}" for name, count in found.items()) or "none"
