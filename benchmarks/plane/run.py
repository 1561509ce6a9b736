# SPDX-License-Identifier: Apache-2.0
"""The whole run: a server, a worker for each available client, the plan, the report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

from msgspec.structs import replace as replaced

from benchmarks import plots
from benchmarks.plane.cases import Bench, Plan
from benchmarks.plane.compare import (
    connection_table,
    median_table,
    ratio_table,
    scan_table,
    sealed_table,
    verdicts,
)
from benchmarks.plane.messages import Setting
from benchmarks.plane.peers import OURS, why_left_out
from benchmarks.plane.plot import write_plot
from benchmarks.plane.process import WorkerProcess
from benchmarks.plane.rows import Row
from benchmarks.plane.server import Server
from benchmarks.report import machine, show, write_json
from benchmarks.servers import own_server


def settings_of_ours(
    connections: Sequence[int],
    own: Sequence[int] = (),
    threads: Sequence[int] = (),
    slot_bytes: Sequence[int] = (),
    sealed: bool = False,
) -> list[Setting]:
    """Every combination of the values given; if none is, the defaults and each of ``connections``.

    The latter with checksums, then without. own: connections, instead. sealed: instead of the
    latter, each combination, or the defaults, followed by the same with sealed values.
    """
    default = Setting()
    if not sealed and not (own or threads or slot_bytes):
        with_checksums = list(dict.fromkeys([default, *(Setting(n) for n in connections)]))
        return [*with_checksums, *(replaced(s, checksums=False) for s in with_checksums)]
    values = product(
        own or (default.connections,),
        threads or (default.threads,),
        slot_bytes or (default.slot_bytes,),
    )
    settings = [Setting(*each) for each in values]
    return [each for s in settings for each in ((s, replaced(s, sealed=True)) if sealed else (s,))]


def measure(plan: Plan, url: str | None, say: Callable[[str], None]) -> tuple[list[Row], str]:
    """The rows, and the product and version of the server.

    url: the server to use (it is FLUSHed); None starts one. Missing peers are left out with a
    line. Raises ConfigError if there is no server, RedisUnavailable if it or our client fails.
    """
    with contextlib.ExitStack() as stack:
        if url is None:
            url = stack.enter_context(own_server())
        server = stack.enter_context(contextlib.closing(Server(url)))
        version = server.version()
        reasons = {
            name: None if name == OURS else why_left_out(name, url) for name in plan.settings
        }
        for name, reason in reasons.items():
            if reason is not None:
                say(f"{name}: left out: {reason}")
        there = {name: s for name, s in plan.settings.items() if reasons[name] is None}
        workers = {name: stack.enter_context(WorkerProcess(name, url)) for name in there}
        rows = Bench(replace(plan, settings=there), server, workers, say).run().rows()
        server.flush()
        return rows, version


def report(plan: Plan, rows: Sequence[Row], server: str, plot: Path) -> None:
    """Prints the tables and draws the plot."""
    facts = machine()
    show(f"medians of {plan.rounds} rounds, (connections); {server}", median_table(rows))
    if any(row.ms is not None for row in rows):
        show("prefix scans", scan_table(rows))
    ours = plan.settings[OURS]
    if any(setting.sealed for setting in ours):
        show("ours, sealed values beside plain ones", sealed_table(rows))
    elif len(ours) > 1 and len({(s.threads, s.slot_bytes) for s in ours}) == 1:
        show("ours by connections", connection_table(rows))
    elif len(ours) > 1:
        show("ours", [asdict(row) for row in rows if row.client == OURS])
    if found := verdicts(rows):
        show("ours at its defaults, against each at its best", ratio_table(found))
    caption = f"{server}, {facts['processor']}, {facts['cores']} cores, loopback, medians"
    plots.report(lambda: write_plot(plot, rows, caption))


def run(plan: Plan, url: str | None, plot: Path, json: Path | None) -> None:
    """Measures, writes the rows as JSON if asked to, and reports."""
    started_s = time.monotonic()
    rows, server = measure(plan, url, lambda line: print(line, flush=True))
    print(f"measured in {time.monotonic() - started_s:.0f} s")
    write_json(json, [asdict(row) for row in rows])
    report(plan, rows, server, plot)
