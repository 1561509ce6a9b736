"""The whole run: a server, a worker for each client that is there, the plan, the report."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from msgspec.structs import replace

from lmcache_redis.bench.plane.cases import Bench, Plan
from lmcache_redis.bench.plane.messages import DEFAULT_SLOT_BYTES, MIB, Setting
from lmcache_redis.bench.plane.peers import OURS, PEERS, settings_of, why_left_out
from lmcache_redis.bench.plane.plot import write_plot
from lmcache_redis.bench.plane.process import WorkerProcess
from lmcache_redis.bench.plane.ratios import (
    connection_table,
    median_table,
    ratio_table,
    scan_table,
    verdicts,
)
from lmcache_redis.bench.plane.rows import Row
from lmcache_redis.bench.plane.server import Server, own_server
from lmcache_redis.bench.plane.values import PAGE_BYTES
from lmcache_redis.bench.report import machine, show, write_json
from lmcache_redis.errors import ConfigError

DEFAULT_SIZES_MIB = (0.25, 2.0, 8.0, 32.0)
DEFAULT_CONNECTIONS = (1, 2, 4, 8)
QUICK_CONNECTIONS = (1, 4)
# How many keys, and how often a round.
DEFAULT_SCANS = ((1_000, 10), (10_000, 1))
QUICK_SCANS = ((1_000, 5), (10_000, 1))


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure. Raises ConfigError for sizes that are no whole pages.

    ours: settings of our client; the first is compared with the peers. connections: those
    that a peer's best is chosen from. moved_bytes: payload of one measurement, but at least
    `least_items` values. scans: how many keys, and how often a round.
    """

    ours: Sequence[Setting]
    rounds: int = 5
    sizes_mib: Sequence[float] = DEFAULT_SIZES_MIB
    moved_bytes: int = 128 * MIB
    least_items: int = 8
    connections: Sequence[int] = DEFAULT_CONNECTIONS
    peers: Sequence[str] = PEERS
    scans: Sequence[tuple[int, int]] = DEFAULT_SCANS

    def __post_init__(self) -> None:
        for mib in self.sizes_mib:
            if mib <= 0 or mib * MIB % PAGE_BYTES:
                raise ConfigError(f"values of {mib} MiB: choose a multiple of 4 KiB")

    @property
    def sizes(self) -> list[int]:
        return [int(mib * MIB) for mib in self.sizes_mib]


def settings_of_ours(
    gets: Sequence[int] = (),
    sets: Sequence[int] = (),
    threads: Sequence[int] = (),
    slot_bytes: Sequence[int] = (),
    connections: Sequence[int] = DEFAULT_CONNECTIONS,
) -> list[Setting]:
    """Every combination of what is given; else the defaults, then so many connections.

    The latter with checksums, then without.
    """
    default = Setting()
    if not (gets or sets or threads or slot_bytes):
        with_checksums = list(dict.fromkeys([default, *(Setting(n, n) for n in connections)]))
        return [*with_checksums, *(replace(s, checksums=False) for s in with_checksums)]
    return [
        Setting(*values)
        for values in product(
            gets or (default.get_connections,),
            sets or (default.set_connections,),
            threads or (default.threads,),
            slot_bytes or (DEFAULT_SLOT_BYTES,),
        )
    ]


def measure(options: Options, url: str | None, say: Callable[[str], None]) -> tuple[list[Row], str]:
    """The rows, and which server they come from.

    url: a server to use (it is FLUSHed); None starts one. Peers that are missing are left
    out with a line. Raises ConfigError where there is no server, RedisUnavailable where it
    or our client fails.
    """
    with contextlib.ExitStack() as stack:
        if url is None:
            url = stack.enter_context(own_server())
        server = stack.enter_context(contextlib.closing(Server(url)))
        version = server.version()
        settings: dict[str, Sequence[Setting]] = {OURS: options.ours}
        for peer in options.peers:
            reason = why_left_out(peer, url)
            if reason is None:
                settings[peer] = settings_of(peer, options.connections)
            else:
                say(f"{peer}: left out: {reason}")
        workers = {name: stack.enter_context(WorkerProcess(name, url)) for name in settings}
        plan = Plan(
            settings,
            options.sizes,
            options.moved_bytes,
            options.least_items,
            options.rounds,
            options.scans,
        )
        rows = Bench(plan, server, workers, say).run().rows()
        server.flush()
        return rows, version


def report(options: Options, rows: Sequence[Row], server: str, plot: Path) -> None:
    """Prints the tables and draws the plot."""
    facts = machine()
    show(f"medians of {options.rounds} rounds, (connections); {server}", median_table(rows))
    if any(row.ms is not None for row in rows):
        show("prefix scans", scan_table(rows))
    if len(options.ours) > 1 and len({(s.threads, s.slot_bytes) for s in options.ours}) == 1:
        show("ours by connections", connection_table(rows))
    elif len(options.ours) > 1:
        show("ours", [asdict(row) for row in rows if row.client == OURS])
    if found := verdicts(rows):
        show("ours at its defaults, against each at its best", ratio_table(found))
    if importlib.util.find_spec("matplotlib") is None:
        print("plot: left out: run `pip install matplotlib`")
        return
    caption = f"{server}, {facts['processor']}, {facts['cores']} cores, loopback, medians"
    print(f"plot: {write_plot(plot, rows, caption)}")


def run(options: Options, url: str | None, plot: Path, json: Path | None) -> None:
    """Measures, writes the rows as JSON where it is asked for, and reports."""
    started_s = time.monotonic()
    rows, server = measure(options, url, lambda line: print(line, flush=True))
    print(f"measured in {time.monotonic() - started_s:.0f} s")
    if json is not None:
        write_json(json, [asdict(row) for row in rows])
    report(options, rows, server, plot)
