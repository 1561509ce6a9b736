"""What STATUS documents of an agent show: the tables of `status`, and a frame of `top`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from lmcache_redis.agent import words
from lmcache_redis.metrics import COUNTERS

_GIB = 1 << 30
# As many as fit a terminal of 24 lines.
_MOST_MODELS = 3
_MOST_REASONS = 4
_BAR = 24
_MOVED = (
    ("to engines", "retrieved_bytes"),
    ("from engines", "gathered_bytes"),
    ("from redis", "loaded_bytes"),
    ("to redis", "stored_bytes"),
    ("from disk", "disk_loaded_bytes"),
    ("to disk", "disk_stored_bytes"),
)
# Without a terminal nothing is cut.
_NO_EDGE = 10_000


def console() -> Console:
    """Of stdout: as wide as the terminal, or as the content. Brackets are no markup: [/v1]."""
    found = Console(highlight=False, markup=False)
    if not found.is_terminal:
        found.width = _NO_EDGE
    return found


def status_tables(report: Mapping[str, Any]) -> Iterator[Table]:
    """The agent, its engines, and every counter."""
    pool, redis, queues = report["pool"], report["redis"], report["queues"]
    name, value = Column(no_wrap=True), Column(overflow="fold")
    title = f"agent {report['pid']} ({report['version']})"
    agent = Table(name, value, title=title, show_header=False)
    used, pinned, whole = _pool_gib(report)
    agent.add_row("endpoint", report["endpoint"])
    agent.add_row("up for", words.uptime(report))
    agent.add_row("Redis", f"{redis['server']}: {'up' if redis['up'] else redis['reason']}")
    of = ", ".join(f"{tier} {words.percent(share)}" for tier, share in report["hit_rate"].items())
    agent.add_row("hit rate", f"{words.percent(words.hit_rate(report))}: {of}")
    agent.add_row("saved", words.saved(report))
    agent.add_row("host pool", f"{used:.2f} of {whole:.2f} GiB, {pool['chunks']} chunks")
    agent.add_row("pinned", f"{pinned:.2f} GiB")
    if pool.get("locked_bytes") or pool.get("lock_failure"):
        locked = f"{pool['locked_bytes'] / _GIB:.2f} GiB"
        agent.add_row("locked for GPUs", ", ".join(filter(None, (locked, pool["lock_failure"]))))
    agent.add_row("to be written", f"{queues['writes']} chunks")
    for name, tier in report["loads"]["tiers"].items():
        agent.add_row(f"loads from {name}", words.load_rate(tier))
    agent.add_row("lookups that wait", f"{report['loads']['waiting']} for room in the host pool")
    agent.add_row("sessions", str(report["sessions"]))
    agent.add_row("canaries", _canaries(report))
    agent.add_row("chunk size", f"{report['chunk_size_tokens']} tokens")
    yield agent
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


@dataclass(frozen=True)
class Sample:
    """A STATUS document, and when it was read (`time.monotonic()`)."""

    report: Mapping[str, Any]
    at_s: float


def frame(before: Sample | None, now: Sample) -> RenderableType:
    """What happened between the samples, for a terminal of 80 columns or more.

    before: None, or of another process of the agent: what happened since the agent's start.
    """
    change, report = _CounterChange(before, now), now.report
    return Group(
        Text.assemble(
            ("lmcache-redis ", "bold"),
            f"{report['version']}, agent {report['pid']} at {report['endpoint']}",
            no_wrap=True, overflow="ellipsis",
        ),
        Text(f"{change.time}; up for {words.uptime(change.report)}", style="dim"),
        _overview(change),
        Text(),
        _models(change),
        Text(),
        _reasons(change),
    )  # fmt: skip


class _CounterChange:
    """What grew between two samples of one process; since its start, if they are of two."""

    def __init__(self, before: Sample | None, now: Sample) -> None:
        if before is not None and before.report["pid"] != now.report["pid"]:
            before = None
        self.report = now.report
        self.seconds = now.at_s - before.at_s if before else 0.0
        self._then: Mapping[str, Any] = before.report if before else {}

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
        hits = {tier: self.counter(f"hit_chunks_{tier}") for tier in words.TIERS}
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


def change_document(before: Sample | None, now: Sample) -> dict[str, Any]:
    """What `frame` shows, for programs."""
    change = _CounterChange(before, now)
    report, counters = change.report, change.report["counters"]
    return {
        "pid": report["pid"],
        "uptime_s": report["uptime_s"],
        "seconds": round(change.seconds, 3),
        "hit_rate": change.hit_rates(),
        "tokens_saved": change.counter("saved_tokens"),
        "redis_up": report["redis"]["up"],
        "counters": {name: grown for name in counters if (grown := change.counter(name))},
    }


def _overview(change: _CounterChange) -> RenderableType:
    report, loads = change.report, change.report["loads"]
    rates = change.hit_rates()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", min_width=8)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    of = ", ".join(f"{tier} {words.percent(share)}" for tier, share in rates.items())
    lookups = change.happened(change.counter("lookups"), " lookups")
    whole_rate = words.percent(words.hit_rate({"hit_rate": rates}))
    grid.add_row("hit rate", f"{whole_rate}: {of}; {lookups}")
    grid.add_row("saved", words.saved(report))
    moved = [f"{change.moved(change.counter(name))} {where}" for where, name in _MOVED]
    grid.add_row("bytes", ", ".join(moved[:2]))
    grid.add_row("", ", ".join(moved[2:4]))
    if report["disk"]:
        grid.add_row("", ", ".join(moved[4:]))
    used, pinned, whole = _pool_gib(report)
    full = round(_BAR * used / whole)
    bar = "█" * full + "░" * (_BAR - full)
    grid.add_row("pool", f"{bar} {used:.2f} of {whole:.2f} GiB, {pinned:.2f} pinned")
    queues = report["queues"]
    grid.add_row(
        "queues",
        f"{queues['writes']:,} chunks, {queues['write_bytes'] / 1e6:,.0f} MB for Redis; "
        f"{loads['waiting']} lookups wait for room",
    )
    redis = report["redis"]
    if redis["up"]:
        grid.add_row("redis", Text(f"up: {redis['server']}"))
    else:
        why = f"DOWN: {redis['reason']} ({redis['server']})"
        grid.add_row("redis", Text(why, "bold red"))
    if distrusted := report["canaries"]["distrusted"]:
        why = f"OTHER KV was cached than is computed: {len(distrusted)} layouts are not loaded"
        grid.add_row("canaries", Text(why, "bold red"))
    speeds = [f"{name} {words.load_rate(tier)}" for name, tier in loads["tiers"].items()]
    grid.add_row("loads", ", ".join(speeds))
    ready = sum(engine["ready"] for engine in report["engines"])
    grid.add_row(
        "engines",
        f"workers ready: {ready} of {len(report['engines'])}; requests: {report['sessions']}",
    )
    return grid


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
    columns = [list(_column(change, kind)) for kind in ("miss_", "drop_")]
    grid.add_row(Text("chunks not loaded", "bold"), "", Text("chunks not stored", "bold"), "")
    for number in range(max(1, *map(len, columns))):
        cells = [column[number] if number < len(column) else ("", "") for column in columns]
        grid.add_row(*cells[0], *cells[1])
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


def _pool_gib(report: Mapping[str, Any]) -> list[float]:
    """What of the host pool is used, and pinned, and all of it."""
    pool = report["pool"]
    names = ("used_slots", "pinned_slots", "slots")
    return [pool[name] * pool["slot_bytes"] / _GIB for name in names]


def _canaries(report: Mapping[str, Any]) -> str:
    """What has been compared, and what is distrusted."""
    counters, canaries = report["counters"], report["canaries"]
    text = f"one in {canaries['every']:,} hits" if canaries["every"] else "off"
    text += f", {counters['compared_chunks']:,} parts compared"
    text += f", {counters['differing_chunks']:,} differed"
    for each in canaries["distrusted"]:
        epoch = f" in epoch {each['epoch']}" if each["epoch"] else ""
        text += (
            f"\nlayout {each['layout'][:16]}{epoch} is not loaded, {each['agreed']} agreed since"
        )
    return text
