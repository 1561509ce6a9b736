# SPDX-License-Identifier: Apache-2.0
"""The reports of the admin tools, as JSON and as lines of text.

Names come from keys that any client may have written: control characters are escaped.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from lmcache_redis.admin.doctor import HERE, Diagnosis
from lmcache_redis.admin.forms import Sizes
from lmcache_redis.admin.inspect import ChunkReport, LayoutSummary, Spread, Summary
from lmcache_redis.admin.names import show_key, table
from lmcache_redis.admin.node import NodeFacts
from lmcache_redis.admin.purge import Plan, PurgeResult
from lmcache_redis.admin.rules import Severity
from lmcache_redis.admin.stripes import Stripe, StripeState
from lmcache_redis.resp.net.endpoint import Transport
from lmcache_redis.units import printable, shown_age, shown_bytes

_CLOCKS_DIFFER_S = 86_400

# The JSON fields of a type; NAME=PATH for another attribute. Other types: all fields.
_FIELDS: dict[type, str] = {
    ChunkReport: "chunk_key_hex=name.chunk_key key_prefix=name.shown_prefix "
    "model=name.key.model_name layout=name.layout chunk_hash=name.key.chunk_hash "
    "world_size=name.ranks.world_size rank=name.ranks.rank "
    "local_world_size=name.ranks.local_world_size local_rank=name.ranks.local_rank "
    "stripe_asked verdict verified opened sealed_with=header.sealed_with tenant=header.tenant "
    "stripe_count stripes_present=present chunk_bytes=header.chunk_bytes value_bytes=sizes.stored "
    "plain_bytes=sizes.plain fingerprint=header.fingerprint "
    "memory_format=header.metadata.fmt.name shapes=header.metadata.shapes "
    "dtypes=header.metadata.dtype_names stored_unix_s=headed.stored_unix_s stripes",
    Stripe: "index state detail value_bytes payload_bytes=header.payload_bytes "
    "store_id=header.store_id stored_unix_s "
    "idle_s expires_in_s",
    Summary: "whole=survey.whole keys_looked_at=survey.looked_at "
    "database_keys=survey.database_keys other_keys=survey.other_keys verified groups",
    LayoutSummary: "model layout workers chunks stripes value_bytes=sizes.stored "
    "plain_bytes=sizes.plain chunks_of_unknown_size incomplete without_stripe_0 damaged idle_s",
    Plan: "chunks=chunk_count stripes value_bytes=sizes.stored plain_bytes=sizes.plain groups",
    PurgeResult: "chunks stripes value_bytes=sizes.stored plain_bytes=sizes.plain vanished "
    "used_again stored_again left left_examples seconds",
    Diagnosis: "exit_status findings facts rights node",
    NodeFacts: "version gpus agent engines shm_bytes shm_free_bytes clock_ahead_s",
}


def as_json(found: Any) -> Any:
    """A report as `json.dumps` takes it: enums as words, bytes as hex, sets as their size."""
    if isinstance(found, Transport):
        return found.value
    if isinstance(found, enum.Enum):
        return found.name.lower()
    if isinstance(found, bytes):
        return found.hex()
    if isinstance(found, (set, frozenset)):
        return len(found)
    if isinstance(found, Mapping):
        return {name: as_json(value) for name, value in found.items()}
    if isinstance(found, Spread):
        low_to_high = sorted(found)
        names = {"min": 0, "median": len(found) // 2, "max": -1}
        return {name: low_to_high[at] for name, at in names.items()} if found else None
    if isinstance(found, (list, tuple)):
        return [as_json(each) for each in found]
    if not dataclasses.is_dataclass(found):
        return found
    words = _FIELDS.get(type(found), "").split() or [f.name for f in dataclasses.fields(found)]
    pairs = [(name, path or name) for name, _, path in (word.partition("=") for word in words)]
    return {name: as_json(_at(found, path)) for name, path in pairs}


def _at(found: Any, path: str) -> Any:
    """The attribute at a dotted path; None if an attribute on the path is None."""
    for name in path.split("."):
        found = None if found is None else getattr(found, name)
    return found


def chunk_lines(report: ChunkReport) -> Iterator[str]:
    """`inspect KEY`."""
    name, headed, header = report.name, report.headed, report.header
    world, rank, local_world, local_rank = name.ranks
    yield _line("chunk", show_key(name.chunk_key))
    if report.stripe_asked is not None:
        yield _line("asked for", f"stripe {report.stripe_asked}")
    yield _line("model", printable(name.key.model_name))
    yield _line("rank", f"{rank} of {world}; on its node {local_rank} of {local_world}")
    yield _line("layout", name.layout)
    yield _line("hash", name.key.chunk_hash.hex())
    if headed is not None and header is not None:
        when = _when(header.created_unix_ms)
        holds = ", ".join(
            f"{dtype} {list(shape)}"
            for dtype, shape in zip(
                header.metadata.dtype_names, header.metadata.shapes, strict=True
            )
        )
        size = f"{shown_bytes(header.chunk_bytes)} as {header.metadata.fmt.name}"
        if report.sizes.stored < report.sizes.plain:
            size += f"; packed, in Redis {_size(report.sizes)}"
        yield _line("size", size)
        yield _line("holds", holds)
        yield _line("stored", f"{when}, as {header.store_id.hex()}")
        idle_s, unknown = headed.idle_s, "unknown: the server does not say"
        yield _line("last used", unknown if idle_s is None else f"{shown_age(idle_s)} ago")
        if header.tenant is not None:
            yield _line("tenant", f"{header.tenant.hex()}, a digest of its name")
        if header.sealed_with is not None:
            yield _line("sealed", f"with the key {header.sealed_with.hex()}")
        if headed.expires_in_s is not None:
            yield _line("expires", f"in {shown_age(headed.expires_in_s)}")
    elif report.present:
        yield _line("stored", "unknown: there is no whole header")
    of = f"of {report.stripe_count} " if report.stripe_count else ""
    checked = "headers read, payloads not (--verify)"
    if report.verified:
        checked = "payloads compared with their checksums"
        if report.opened:
            checked += " and opened"
        elif header is not None and header.sealed_with is not None:
            checked += ", not opened (--seal-key-file)"
    yield _line("stripes", f"{report.present} {of}present, {checked}")
    yield _line("verdict", report.verdict.value)
    for stripe in report.stripes:
        if stripe.state is not StripeState.WHOLE:
            yield _line("", f"stripe {stripe.index}: {stripe.detail}")


def summary_lines(summary: Summary) -> Iterator[str]:
    """`inspect` without a key."""
    found = summary.survey
    if not summary.groups:
        yield "no chunks are here" + ("" if found.whole else " among the keys looked at")
    else:
        rows = [["model", "layout", "workers", "chunks", "size", "incomplete", "last used"]]
        rows += (_row(group, "" if summary.verified else "about ") for group in summary.groups)
        if summary.verified:
            damaged = ("damaged", *(str(group.damaged) for group in summary.groups))
            rows = [[*row, cell] for row, cell in zip(rows, damaged, strict=True)]
        yield from table(rows)
    if not found.whole:
        of = share = ""
        if found.database_keys is not None:
            share = f" ({found.looked_at / max(1, found.database_keys):.0%})"
            of = f" of {found.database_keys:,}"
        yield (
            f"a sample: about {found.looked_at:,}{of} keys{share} were looked at; "
            "--all looks at every one"
        )
    if found.other_keys:
        keys = counted(len(found.other_keys), "key")
        example = show_key(min(found.other_keys))
        yield f"{keys} named like ours but naming no chunk, such as {example}"


def plan_lines(plan: Plan, where: str) -> Iterator[str]:
    if not plan.chunks:
        yield f"nothing to remove from {where}: no chunk matches (see `lmcache-redis inspect`)"
        return
    size = f", {_size(plan.sizes, 'about ')}" if plan.sizes else ""
    chunks, keys = counted(plan.chunk_count, "chunk"), counted(plan.stripes, "key")
    yield f"to remove from {where}: {chunks} ({keys}{size})"
    rows = [[printable(g["model"]), g["layout"], f"{g['chunks']:,}"] for g in plan.groups]
    yield from table([["model", "layout", "chunks"], *rows])


def removal_lines(removal: PurgeResult) -> Iterator[str]:
    chunks, keys = counted(removal.chunks, "chunk"), counted(removal.stripes, "key")
    size = _size(removal.sizes)
    yield f"removed {chunks} ({keys}, {size}) in {removal.seconds:.1f} s"
    if removal.vanished:
        yield f"{counted(removal.vanished, 'key')} had already gone"
    if removal.used_again:
        yield f"{counted(removal.used_again, 'chunk')} used in the meantime: left"
    if removal.stored_again:
        yield f"{counted(removal.stored_again, 'key')} stored again in the meantime: left"
    for reason, number in removal.left.most_common():
        yield f"{counted(number, 'key')} left: {reason}"
    yield from (f"  {key}" for key in removal.left_examples)


def diagnosis_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """`doctor`."""
    places = [each.where for each in diagnosis.facts]
    places += [each.where for each in diagnosis.rights if each.where not in places]
    if diagnosis.node is not None:
        places.append(HERE)
    counts = dict.fromkeys(Severity, 0)
    for finding in diagnosis.findings:
        severity = finding.severity
        counts[severity] += 1
        label = severity.name if severity <= Severity.WARNING else severity.name.lower()
        at = f"{finding.where}: " if len(places) > 1 else ""
        yield f"{label:<9} {at}{finding.topic}: {finding.seen}"
        if finding.why:
            yield f"{'':<12}why     {finding.why}"
        for number, change in enumerate(finding.change):
            yield f"{'':<12}{'' if number else 'change':<8}{change}"
    said = ", ".join(f"{number} {severity.name.lower()}" for severity, number in counts.items())
    yield f"{', '.join(places)}: {said}"


def counted(number: int, noun: str) -> str:
    """A number and its noun: 1 chunk, 2,000 chunks."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _line(label: str, text: str) -> str:
    return f"{label:<11}{text}"


def _size(sizes: Sizes, estimated: str = "") -> str:
    """estimated: a word for what packed values take, if that is not counted."""
    if sizes.stored == sizes.plain:
        return shown_bytes(sizes.stored)
    return f"{estimated}{shown_bytes(sizes.stored)} (plain {shown_bytes(sizes.plain)})"


def _row(group: LayoutSummary, estimated: str) -> list[str]:
    size = _size(group.sizes, estimated)
    if group.chunks_of_unknown_size:
        size = "unknown" if group.chunks_of_unknown_size == group.chunks else f"more than {size}"
    workers, chunks, incomplete = len(group.workers), group.chunks, group.incomplete
    counts = (str(workers), f"{chunks:,}", size, f"{incomplete:,}")
    return [printable(group.model), group.layout, *counts, _ages(group.idle_s)]


def _ages(ages_s: Sequence[float]) -> str:
    if not ages_s:
        return "unknown"
    least, most = shown_age(min(ages_s)), shown_age(max(ages_s))
    return f"{least} ago" if least == most else f"{least} to {most} ago"


def _when(unix_ms: int) -> str:
    """The time and the age of a store; a forged or damaged header may tell any time."""
    age_s = time.time() - unix_ms / 1000
    if age_s < -_CLOCKS_DIFFER_S:
        return f"{unix_ms:,} ms after 1970, which is to come: by a wrong clock, damaged or forged"
    when = datetime.fromtimestamp(unix_ms / 1000, timezone.utc)
    return f"{when:%Y-%m-%d %H:%M:%S UTC}, {shown_age(max(0.0, age_s))} ago"
