# SPDX-License-Identifier: Apache-2.0
"""What STATUS documents of an agent show: tables of `status --all`, and a frame of `top`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from lmcache_redis.agent.reports import words
from lmcache_redis.metrics import COUNTERS
from lmcache_redis.tier_kinds import KINDS

_GIB = 1 << 30
# As many as fit a terminal of 24 lines.
_MOST_MODELS = 3
_MOST_REASONS = 4
_BAR = 24
LABEL_WIDTH = 10
_MOVED = (
    ("to engines", "retrieved_bytes"),
    ("from engines", "gathered_bytes"),
)
_WRITTEN = ("stored_bytes", "plain_bytes")
# Without a terminal nothing is cut.
_NO_EDGE = 10_000


def console() -> Console:
    """Of stdout: as wide as the terminal, or as the content. Brackets are no markup: [/v1]."""
    found = Console(highlight=False, markup=False)
    if not found.is_terminal:
        found.width = _NO_EDGE
    return found


def all_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """What `status --all` says beside its summary: label, text, and whether it is bad."""
    change, pool = _CounterChange(None, report), report["pool"]
    yield "bytes", ", ".join(_moved(change)), False
    yield "queues", _queues(report), False
    yield "canaries", _canaries(report).plain, False
    yield "locked", f"{pool['locked_bytes'] / _GIB:.2f} GiB of the host pool, for GPUs", False
    yield "chunks", f"of {report['chunk_size_tokens']} tokens", False


def status_tables(report: Mapping[str, Any]) -> Iterator[Table]:
    """The engines, and every counter."""
    model, layout = Column("model", overflow="fold"), Column("layout", no_wrap=True)
    engines = Table(model, "worker", "device", "chunk", layout, "state", title="engines")
    for engine in report["engines"]:
        engines.add_row(
            engine["model"],
            f"{engine['worker_id']} of {engine['world_size']}",
            engine["device"],
            f"{engine['chunk_tokens']} tokens, {engine['chunk_bytes'] / 2**20:.1f} MiB",
            engine["layout"][:16],
            "ready" if engine["ready"] else "waits for its scheduler or other ranks",
        )
    yield engines
    counters = Table(
        Column("counter", no_wrap=True),
        Column("value", justify="right", no_wrap=True),
        Column("what it counts", overflow="fold"),
        title="counters",
    )
    for name, value in report["counters"].items():
        style = None if value else "dim"
        count = f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"
        counters.add_row(name, count, COUNTERS.get(name, ""), style=style)
    yield counters


_Report = Mapping[str, Any]  # a STATUS document


def frame(before: _Report | None, now: _Report) -> RenderableType:
    """What happened between two documents, for a terminal of 80 columns or more.

    before: None, or of another process of the agent: what happened since the agent's start.
    """
    change, report = _CounterChange(before, now), now
    return Group(
        Text.assemble(
            ("lmcache-redis ", "bold"),
            f"{report['version']}, agent {report['pid']} at {report['endpoint']}",
            no_wrap=True, overflow="ellipsis",
        ),
        Text(f"{change.time}; up for {words.uptime(change.report)}", style="dim"),
        *_lines(change),
        Text(),
        _models(change),
        Text(),
        _reasons(change),
    )  # fmt: skip


class _CounterChange:
    """What grew between two documents of one process; since its start, if they are of two."""

    def __init__(self, before: _Report | None, now: _Report) -> None:
        if before is None or before["pid"] != now["pid"]:
            before = {}
        self.report = now
        self.seconds = round(now["uptime_s"] - before["uptime_s"], 3) if before else 0.0
        self._then = before

    def counter(self, name: str) -> int:
        before = self._then.get("counters", {}).get(name, 0)
        grown: int = self.report["counters"].get(name, 0) - before
        return grown

    @property
    def time(self) -> str:
        return f"in the last {self.seconds:.1f} s" if self.seconds else "since the agent's start"

    def hit_rates(self) -> dict[str, float | None]:
        """By tier, of the chunks that were asked for."""
        asked = self.counter("lookup_chunks")
        hits = {kind.name: self.counter(kind.hits) for kind in KINDS}
        return {tier: words.rate_of(count, asked) for tier, count in hits.items()}

    def model(self, model: str, name: str) -> int:
        grown: int = self.report["models"][model][name]
        return grown - int(self._then.get("models", {}).get(model, {}).get(name, 0))

    def moved(self, nbytes: int) -> str:
        """Bytes as a rate, or without a time as an amount."""
        if self.seconds:
            return f"{nbytes / self.seconds / 1e6:,.0f} MB/s"
        return f"{nbytes / 1e6:,.0f} MB"

    def happened(self, count: int, what: str = "") -> str:
        """Events as a rate, or without a time as a number."""
        if self.seconds:
            return f"{count / self.seconds:,.1f}{what}/s"
        return f"{count:,}{what}"


def change_document(before: _Report | None, now: _Report) -> dict[str, Any]:
    """What `frame` shows, for programs."""
    change = _CounterChange(before, now)
    report, counters = change.report, change.report["counters"]
    return {
        "pid": report["pid"],
        "uptime_s": report["uptime_s"],
        "seconds": change.seconds,
        "hit_rate": change.hit_rates(),
        "tokens_saved": change.counter("saved_tokens"),
        "redis_up": report["redis"]["up"],
        "counters": {name: grown for name in counters if (grown := change.counter(name))},
    }


def _lines(change: _CounterChange) -> Iterator[Text]:
    """One for each row: no column of a table, which Rich makes narrower than its labels."""
    for label, said in _overview(change):
        line = Text(no_wrap=True, overflow="ellipsis")
        yield line.append(f"{label:<{LABEL_WIDTH}}", "bold").append(said)


def _overview(change: _CounterChange) -> Iterator[tuple[str, Text]]:
    """What a line is about, and what it says."""
    report, rates = change.report, change.hit_rates()
    of = ", ".join(f"{tier} {words.percent(share)}" for tier, share in rates.items())
    yield "hit rate", Text(f"{words.percent(words.hit_rate({'hit_rate': rates}))}: {of}")
    yield "saved", Text(words.saved(report))
    moved = _moved(change)
    for first in range(0, len(moved), 2):
        yield "" if first else "bytes", Text(", ".join(moved[first : first + 2]))
    pool = report["pool"]
    names = ("used_slots", "slots", "pinned_slots")
    used, whole, pinned = (pool[name] * pool["slot_bytes"] / _GIB for name in names)
    full = round(_BAR * used / whole)
    bar = "█" * full + "░" * (_BAR - full)
    yield "pool", Text(f"{bar} {used:.2f} of {whole:.2f} GiB, {pinned:.2f} pinned")
    yield "queues", Text(_queues(report))
    for kind, tier in words.tiers_of(report):
        if not tier["up"]:
            yield kind.title, Text(f"DOWN: {tier['reason']} ({tier['where']})", "bold red")
        elif failing := words.failing(tier):
            yield kind.title, Text(f"{tier['where']}: up, and FAILS: {failing}", "bold red")
        elif kind.is_shared:
            yield kind.title, Text(f"{tier['where']}: up")
    tiers = report["loads"]["tiers"]
    yield (
        "loads",
        Text(", ".join(f"{name} {words.load_rate(tier)}" for name, tier in tiers.items())),
    )
    ready, engines = sum(each["ready"] for each in report["engines"]), len(report["engines"])
    lookups = change.happened(change.counter("lookups"), " lookups")
    requests = f"requests: {report['sessions']}; {lookups}"
    yield "engines", Text(f"workers ready: {ready} of {engines}; {requests}")
    yield "canaries", _canaries(report)


def _moved(change: _CounterChange) -> list[str]:
    """Bytes from and to engines and each tier."""
    ways = [*_MOVED]
    for kind, _ in words.tiers_of(change.report):
        grown = {name: change.counter(name) for name in map(kind.counter, _WRITTEN)}
        found = words.packed(grown, kind)
        less = f" ({words.percent(1 - found[0] / found[1])} saved)" if found else ""
        ways.append((f"from {kind.name}", kind.counter("loaded_bytes")))
        ways.append((f"to {kind.name}{less}", kind.counter("stored_bytes")))
    return [f"{change.moved(change.counter(name))} {where}" for where, name in ways]


def _queues(report: Mapping[str, Any]) -> str:
    queues, waiting = report["queues"], report["loads"]["waiting"]
    queued = f"{queues['writes']:,} chunks, {queues['write_bytes'] / 1e6:,.0f} MB for Redis"
    removals = queues.get("removals", 0)
    stays = f"; {removals:,} chunks could not be removed yet" if removals else ""
    return f"{queued}; {waiting} lookups wait for room{stays}"


def _canaries(report: Mapping[str, Any]) -> Text:
    """What has been compared, or that there is what is distrusted."""
    counters, canaries = report["counters"], report["canaries"]
    if distrusted := len(canaries["distrusted"]):
        what = f"OTHER KV was cached than is computed: {distrusted} layouts are not loaded"
        return Text(what, "bold red")
    often = f"one in {canaries['every']:,} hits" if canaries["every"] else "off"
    if text := words.not_compared(canaries["every"], counters):
        return Text(f"{often}; {text}")
    compared, differed = counters["compared_chunks"], counters["differing_chunks"]
    return Text(f"{often}, {compared:,} parts compared, {differed:,} differed")


def _models(change: _CounterChange) -> RenderableType:
    """The busiest models: those that asked for most tokens."""
    table = Table("busiest models", box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.columns[0].max_width = 32
    for name in ("hit rate", "lookups", "to engines", "from engines"):
        table.add_column(name, justify="right", no_wrap=True)
    names = sorted(change.report["models"], key=lambda name: -change.model(name, "lookup_tokens"))
    for name in names[:_MOST_MODELS]:
        asked, hit = change.model(name, "lookup_tokens"), change.model(name, "hit_tokens")
        table.add_row(
            Text(name, no_wrap=True, overflow="ellipsis"),
            words.percent(words.rate_of(hit, asked)),
            change.happened(change.model(name, "lookups")),
            change.moved(change.model(name, "retrieved_bytes")),
            change.moved(change.model(name, "gathered_bytes")),
        )
    if not names:
        table.add_row("none yet")
    return table


def _reasons(change: _CounterChange) -> RenderableType:
    """Why chunks were not loaded and not stored, most frequent first: now, and in total."""
    grid = Table.grid(padding=(0, 2))
    for _ in range(2):
        grid.add_column(width=24, no_wrap=True)
        grid.add_column(justify="right", width=11)
    columns = (_column(change, kind) for kind in ("miss_", "drop_"))
    grid.add_row(Text("chunks not loaded", "bold"), "", Text("chunks not stored", "bold"), "")
    for missed, dropped in zip_longest(*columns, fillvalue=("", "")):
        grid.add_row(*missed, *dropped)
    return grid


def _column(change: _CounterChange, kind: str) -> Iterator[tuple[str, str]]:
    totals = {kind + name: n for name, n in words.reasons(change.report, kind).items()}
    if not totals:
        yield "none", ""
    for name in sorted(totals, key=lambda name: (-change.counter(name), -totals[name]))[
        :_MOST_REASONS
    ]:
        now = f" {change.happened(change.counter(name))}" if change.seconds else ""
        yield f"{name.removeprefix(kind)}{now}", f"{totals[name]:,}"
