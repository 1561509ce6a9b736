# SPDX-License-Identifier: Apache-2.0
"""Compares our client at its default setting with each peer at its best, and with the targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.plane.messages import MIB
from benchmarks.plane.peers import CEILING, GLIDE, LMCACHE, OURS, REDIS_PY
from benchmarks.plane.rows import CACHED, MOVES, SCAN, Row, size_text
from benchmarks.report import is_met, verdict_text


@dataclass(frozen=True, slots=True)
class Verdict:
    """One comparison. ours, theirs: GB/s, or ms for scans; theirs is None for a limit in ms.

    what: operation and size. client: the peer, at its best setting. figure: how many times faster
    ours is, or its ms. target: the minimum of a ratio or the maximum of ms; None: no target.
    """

    what: str
    client: str
    ours: float
    theirs: float | None
    figure: float
    target: float | None

    @property
    def met(self) -> bool | None:
        """None without a target."""
        return is_met(self.figure, self.target, at_least=self.theirs is not None)


def best(rows: Iterable[Row], client: str, how: str | None = None) -> Row | None:
    """The fastest of a client's rows; of ours, the first at the default setting.

    rows: of one operation and size. Ours has no row at its defaults if it was set otherwise: then
    its first row is compared. how: only rows of this variant.
    """
    own = [row for row in rows if row.client == client and how in (None, row.how)]
    if client == OURS:
        return next((row for row in own if row.default), own[0] if own else None)
    return max(own, key=_speed, default=None)


def moves_of(rows: Iterable[Row], op: str, value_bytes: int) -> list[Row]:
    return [row for row in rows if (row.op, row.value_bytes) == (op, value_bytes)]


def scans_of(rows: Sequence[Row]) -> list[tuple[int, str, list[Row]]]:
    """Scans by the number of keys, and by how many of them are cached."""
    scans = [row for row in rows if row.op == SCAN]
    return [
        (keys, cached, [row for row in scans if (row.items, row.cached) == (keys, cached)])
        for keys in sorted({row.items for row in scans})
        for cached in CACHED
    ]


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """All comparisons that the rows allow."""
    return [*_move_verdicts(rows), *_scan_verdicts(rows)]


def _move_verdicts(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for value_bytes in sizes_of(rows):
        for op in MOVES:
            group = moves_of(rows, op, value_bytes)
            ours = best(group, OURS)
            for client in (LMCACHE, REDIS_PY, GLIDE, CEILING):
                theirs = best(group, client, "socket" if client == CEILING else None)
                if ours is None or theirs is None:
                    continue
                a, b = ours.gb_per_s or 0.0, theirs.gb_per_s or 0.0
                what = f"{op} {size_text(value_bytes)}"
                target = move_target(op, value_bytes, client)
                found.append(Verdict(what, client, a, b, a / b, target))
    return found


def _scan_verdicts(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for keys, cached, group in scans_of(rows):
        ours = best(group, OURS)
        if ours is None or ours.ms is None:
            continue
        what = f"scan of {keys:,}, {cached} cached"
        limit_ms = {1_000: 0.6, 10_000: 6.0}.get(keys)
        found.append(Verdict(what, OURS, ours.ms, None, ours.ms, limit_ms))
        for client in (LMCACHE, REDIS_PY):
            theirs = best(group, client)
            if theirs is not None and theirs.ms is not None:
                target = 20.0 if (client, keys) == (LMCACHE, 1_000) else None
                found.append(Verdict(what, client, ours.ms, theirs.ms, theirs.ms / ours.ms, target))
    return found


def move_target(op: str, value_bytes: int, client: str) -> float | None:
    """The minimum ratio of our default to a peer's best."""
    if client == LMCACHE and value_bytes <= 2 * MIB:
        return 1.0
    if client == LMCACHE and value_bytes == 32 * MIB:
        return 2.7 if op == "load" else 1.8
    if client == REDIS_PY and value_bytes == 32 * MIB:
        return 4.0
    return None


# ------------------------------------------------------------------- as tables


def median_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Medians by operation and size: ours at its defaults, peers at their best, and CPU time."""
    table = []
    columns = _columns(rows)
    for op in MOVES:
        for value_bytes in sizes_of(rows):
            group = moves_of(rows, op, value_bytes)
            chosen = [best(group, client, how) for client, how in columns]
            if not any(chosen):
                continue
            line: dict[str, Any] = {"GB/s": op, "value": size_text(value_bytes)}
            for (client, how), row in zip(columns, chosen, strict=True):
                line[how or client] = _cell(row, lambda r: r.gb_per_s)
            for (client, _), row in zip(columns, chosen, strict=True):
                if client != CEILING:
                    line[f"{client} CPU s/GB"] = None if row is None else row.cpu_s_per_gb
            table.append(line)
    return table


def scan_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Medians of scans in ms."""
    table = []
    for keys, cached, group in scans_of(rows):
        line: dict[str, Any] = {"scan, ms": f"{keys:,} keys", "cached": cached}
        for client in (OURS, LMCACHE, REDIS_PY):
            line[client] = _cell(best(group, client), lambda r: r.ms)
        table.append(line)
    return table


def connection_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Our GB/s by the number of connections, with checksums and without."""
    ours = [row for row in rows if row.client == OURS and row.op in MOVES]
    counts = sorted({row.connections for row in ours})
    kinds = [(op, True) for op in MOVES] + [(op, False) for op in MOVES]
    table = []
    for op, checksum in kinds:
        for value_bytes in sizes_of(ours):
            case = (op, checksum, value_bytes)
            group = [row for row in ours if (row.op, row.checksum, row.value_bytes) == case]
            figures = {row.connections: row.gb_per_s for row in group}
            what = op if checksum else f"{op}, no checksums"
            line: dict[str, Any] = {"ours, GB/s": what, "value": size_text(value_bytes)}
            if group:
                table.append(line | {str(count): figures.get(count) for count in counts})
    return table


def sealed_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each of our settings with plain and with sealed values."""
    table = []
    sealed = [row for row in rows if row.client == OURS and row.op in MOVES and row.sealed]
    for row in sealed:
        same = dataclasses.replace(row, sealed=False)
        plain = next(each for each in rows if _case(each) == _case(same))
        speeds = plain.gb_per_s or 0.0, row.gb_per_s or 0.0
        cpu = plain.cpu_s_per_gb or 0.0, row.cpu_s_per_gb or 0.0
        table.append(
            {
                "ours": row.op,
                "value": size_text(row.value_bytes),
                "connections": row.connections,
                "threads": row.threads,
                "plain, GB/s": speeds[0],
                "sealed, GB/s": speeds[1],
                "sealed / plain": round(speeds[1] / speeds[0], 2),
                "plain, CPU s/GB": cpu[0],
                "sealed, CPU s/GB": cpu[1],
            }
        )
    return table


def _case(row: Row) -> tuple[object, ...]:
    """What two rows have in common that are compared."""
    place = row.client, row.op, row.value_bytes, row.stripe_bytes
    return *place, row.connections, row.threads, row.checksum, row.sealed


def ratio_table(found: Sequence[Verdict]) -> list[dict[str, Any]]:
    """A line for each operation and size: ratios, the targets and whether they are met."""
    lines: dict[str, dict[str, Any]] = {}
    against = dict.fromkeys(verdict.client for verdict in found if verdict.theirs)
    columns = {c: "of bare sockets" if c == CEILING else f"times {c}" for c in against}
    for verdict in found:
        empty = {"ours": verdict.what, "figure": None, **dict.fromkeys(columns.values())}
        line = lines.setdefault(verdict.what, empty)
        if verdict.theirs is None:
            line["figure"] = f"{verdict.ours:.2f} ms{_target_text(verdict)}"
        else:
            line["figure"] = line["figure"] or f"{verdict.ours:.2f} GB/s"
            line[columns[verdict.client]] = f"{verdict.figure:.2f}{_target_text(verdict)}"
    return list(lines.values())


def sizes_of(rows: Iterable[Row]) -> list[int]:
    return sorted({row.value_bytes for row in rows if row.op in MOVES})


def _columns(rows: Sequence[Row]) -> list[tuple[str, str | None]]:
    there = {(row.client, row.how if row.client == CEILING else None) for row in rows}
    order = [(OURS, None), (LMCACHE, None), (REDIS_PY, None), (GLIDE, None)]
    return [c for c in [*order, (CEILING, "socket"), (CEILING, "memcpy")] if c in there]


def _speed(row: Row) -> float:
    return row.gb_per_s if row.gb_per_s is not None else -(row.ms or 0.0)


def _cell(row: Row | None, figure: Callable[[Row], float | None]) -> str | None:
    """The figure, and its setting."""
    value = None if row is None else figure(row)
    if row is None or value is None:
        return None
    return f"{value:.2f} ({row.how if row.client == REDIS_PY else row.connections})"


def _target_text(verdict: Verdict) -> str:
    if verdict.target is None:
        return ""
    at_least = verdict.theirs is not None
    return f" ({verdict_text(verdict.met, f'{verdict.target:g}', at_least=at_least)})"
