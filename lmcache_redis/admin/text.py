"""What the admin tools found, for people: lines of text, nothing cut off.

Names come from keys that anybody may have written: what a terminal would act on is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone

from lmcache_redis.admin.doctor import Diagnosis
from lmcache_redis.admin.findings import Severity
from lmcache_redis.admin.inspect import ChunkReport, Group, OtherKey, Summary
from lmcache_redis.admin.names import show_key
from lmcache_redis.admin.purge import Plan, Removal
from lmcache_redis.admin.sizes import shown_age, shown_bytes
from lmcache_redis.admin.stripes import State, Use

_LABEL_WIDTH = 11


def chunk_lines(report: ChunkReport | OtherKey) -> Iterator[str]:
    """`inspect KEY`."""
    if isinstance(report, OtherKey):
        size = "" if report.value_bytes is None else f" of {shown_bytes(report.value_bytes)}"
        found = "nothing" if report.kind == "none" else f"a {report.kind}{size}"
        yield _line("key", show_key(report.key))
        yield _line("not ours", report.reason)
        yield _line("there is", found)
        return
    name, headed = report.name, report.headed
    world, rank, local_world, local_rank = name.ranks
    yield _line("chunk", show_key(name.chunk_key))
    if report.stripe_index is not None:
        yield _line("asked for", f"stripe {report.stripe_index}")
    yield _line("model", printable(name.key.model_name))
    yield _line("rank", f"{rank} of {world}; on its node {local_rank} of {local_world}")
    yield _line("layout", name.layout)
    yield _line("hash", name.key.chunk_hash.hex())
    if headed is not None and headed.header is not None:
        header = headed.header
        yield _line("size", f"{shown_bytes(header.chunk_bytes)} as {header.metadata.fmt.name}")
        stored_s = header.created_unix_ms / 1000
        ago = shown_age(max(0.0, report.read_at_unix_s - stored_s))
        yield _line("stored", f"{_time(stored_s)}, {ago} ago, as {header.store_id.hex()}")
        yield _line("last used", _use(headed.use))
        if headed.expires_in_s is not None:
            yield _line("expires", f"in {shown_age(headed.expires_in_s)}")
    elif report.present:
        yield _line("stored", "unknown: no whole header is there to say so")
    of = f"of {report.stripe_count} " if report.stripe_count else ""
    yield _line("stripes", f"{report.present} {of}present{_checked(report)}")
    yield _line("verdict", report.verdict.value)
    for stripe in report.stripes:
        if stripe.state is not State.WHOLE:
            yield _line("", f"stripe {stripe.index}: {stripe.detail}")


def summary_lines(summary: Summary) -> Iterator[str]:
    """`inspect` without a key."""
    found = summary.survey
    if not summary.groups:
        yield "no chunks of ours are here" + ("" if found.whole else " among the keys looked at")
    else:
        header = ["model", "layout", "workers", "chunks", "size", "incomplete", "last used"]
        rows = [_row(group) for group in summary.groups]
        if summary.headers_read:
            header.append("stored")
            for row, group in zip(rows, summary.groups, strict=True):
                row.append(_stored(group, summary.read_at_unix_s))
        if summary.verified:
            header.append("damaged")
            for row, group in zip(rows, summary.groups, strict=True):
                row.append(str(group.damaged))
        yield from _table(header, rows)
    if not found.whole:
        share = found.looked_at / max(1, found.database_keys)
        yield (
            f"a sample: about {found.looked_at:,} of {found.database_keys:,} keys "
            f"({share:.0%}) were looked at; --all looks at every one"
        )
    if found.other_keys:
        (example, *_) = sorted(found.other_keys)
        keys = _count(len(found.other_keys), "key")
        yield f"{keys} with a name like ours that names nothing, as {show_key(example)}"
    if summary.groups and not summary.headers_read:
        yield (
            "sizes are of memory, and store times are not shown: before Redis 7.2 reading them "
            "would count as a use; `lmcache-redis inspect KEY` does that to one chunk"
        )


def plan_lines(plan: Plan, where: str) -> Iterator[str]:
    """What a purge would remove."""
    if not plan.chunks:
        yield f"nothing to remove from {where}: no chunk matches (see `lmcache-redis inspect`)"
        return
    size = f", {shown_bytes(plan.value_bytes)}" if plan.value_bytes else ""
    yield (
        f"to remove from {where}: {_count(len(plan.chunks), 'chunk')} "
        f"({_count(plan.stripes, 'key')}{size})"
    )
    rows = [
        [printable(model), layout, f"{chunks:,}"]
        for (model, layout), chunks in sorted(plan.by_group().items())
    ]
    yield from _table(["model", "layout", "chunks"], rows)


def removal_lines(removal: Removal) -> Iterator[str]:
    """What a purge removed."""
    yield (
        f"removed {_count(removal.chunks, 'chunk')} ({_count(removal.stripes, 'key')}, "
        f"{shown_bytes(removal.value_bytes)}) in {removal.seconds:.1f} s"
    )
    if removal.vanished:
        yield f"{_count(removal.vanished, 'key')} had gone already"
    if removal.used_again:
        yield f"{_count(removal.used_again, 'chunk')} used meanwhile: left"
    if removal.stored_again:
        yield f"{_count(removal.stored_again, 'key')} stored anew meanwhile: left"
    for reason, keys in removal.left.most_common():
        yield f"{_count(keys, 'key')} left: {reason}"
    for key in removal.examples:
        yield f"  {show_key(key)}"


def diagnosis_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """`doctor`."""
    several = len(diagnosis.facts) > 1
    for finding in diagnosis.findings:
        at = f"{finding.where}: " if several else ""
        yield f"{_severity(finding.severity):<9} {at}{finding.topic}: {finding.seen}"
        if finding.why:
            yield f"{'':<9}   why     {finding.why}"
        for number, change in enumerate(finding.change):
            yield f"{'':<9}   {'change' if not number else '':<8}{change}"
    counts = [
        f"{sum(f.severity is severity for f in diagnosis.findings)} {severity.name.lower()}"
        for severity in Severity
    ]
    yield f"{', '.join(each.where for each in diagnosis.facts)}: {', '.join(counts)}"


def printable(text: str) -> str:
    """The text with everything that a terminal would act on escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _severity(severity: Severity) -> str:
    return severity.name if severity <= Severity.WARNING else severity.name.lower()


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL_WIDTH}}{text}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        yield "  ".join(cells).rstrip()


def _row(group: Group) -> list[str]:
    size = shown_bytes(group.value_bytes)
    if group.unknown_size:
        size = "unknown" if group.unknown_size == group.chunks else f"more than {size}"
    return [
        printable(group.model),
        group.layout,
        str(len(group.workers)),
        f"{group.chunks:,}",
        size,
        f"{group.incomplete:,}",
        _last_used(group),
    ]


def _last_used(group: Group) -> str:
    if group.idle_s:
        least, most = (shown_age(s) for s in (min(group.idle_s), max(group.idle_s)))
        return f"{least} ago" if least == most else f"{least} to {most} ago"
    if group.frequencies:
        return f"LFU counters {min(group.frequencies)} to {max(group.frequencies)}"
    return "unknown"


def _stored(group: Group, now_unix_s: float) -> str:
    if not group.stored_unix_s:
        return "unknown"
    newest, oldest = (
        shown_age(max(0.0, now_unix_s - s))
        for s in (max(group.stored_unix_s), min(group.stored_unix_s))
    )
    return f"{newest} ago" if newest == oldest else f"{newest} to {oldest} ago"


def _use(use: Use) -> str:
    if use.idle_s is not None:
        return f"{shown_age(use.idle_s)} ago"
    if use.frequency is not None:
        return f"unknown: the server counts uses (LFU), here {use.frequency} of 255"
    return "unknown: the server does not say"


def _checked(report: ChunkReport) -> str:
    if not report.verified:
        return ", headers read, payloads not (--verify)"
    return ", payloads compared with their checksums"


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
