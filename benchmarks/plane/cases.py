# SPDX-License-Identifier: Apache-2.0
"""What is measured, and in which order.

A turn is one client at one setting with values of one size, on a server emptied for it:

    first-store  keys that do not exist; the server faults fresh memory in
    overwrite    the same keys again
    load         the same keys; every page is checked
    steady       new keys, with the server at its memory limit (allkeys-lru), full of values of
                 this client: each store evicts one

Without checksums, a setting of our client, only loads are measured: stores do not differ.

In each round every client has a turn at every setting; the first client changes with the round. A
turn of scans is a few in a row. A peer that fails or hangs is dropped; its earlier samples stay.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.plane.messages import (
    MIB,
    Batch,
    Load,
    Measured,
    PrepareScan,
    Request,
    Scan,
    Setting,
    Store,
)
from benchmarks.plane.peers import CEILING, GLIDE, LMCACHE, OURS
from benchmarks.plane.process import WorkerFailed, WorkerProcess
from benchmarks.plane.rows import CACHED, SCAN, Case, Samples, size_text
from benchmarks.plane.server import Server
from benchmarks.plane.values import PAGE_BYTES
from benchmarks.report import rotated
from lmcache_redis.errors import ConfigError, RedisUnavailable

# The length of our keys, which the rows of scans name as their size.
KEY_BYTES = 73
_MOST_FILLS = 4
_WARM_UP = Batch(value_bytes=64 << 10, items=32)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. Raises ConfigError for sizes that are not whole pages.

    settings: of each client that takes part, in the order of turns. sizes: of values, in bytes.
    moved_bytes: payload of one measurement, which is at least `least_items` values. scans: how
    many keys, and how often a round.
    """

    settings: Mapping[str, Sequence[Setting]]
    sizes: Sequence[int] = (256 << 10, 2 * MIB, 8 * MIB, 32 * MIB)
    moved_bytes: int = 128 * MIB
    least_items: int = 8
    rounds: int = 5
    scans: Sequence[tuple[int, int]] = ((1_000, 10), (10_000, 1))

    def __post_init__(self) -> None:
        for size in self.sizes:
            if size <= 0 or size % PAGE_BYTES:
                raise ConfigError(f"values of {size / MIB:g} MiB: choose a multiple of 4 KiB")

    def batch(self, value_bytes: int) -> Batch:
        """What one measurement of values of this size moves."""
        return Batch(value_bytes, max(self.least_items, self.moved_bytes // value_bytes))


class Bench:
    """Measures a plan. say: gets a line for each round."""

    def __init__(
        self,
        plan: Plan,
        server: Server,
        workers: Mapping[str, WorkerProcess],
        say: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._server = server
        self._workers = dict(workers)
        self._say = say
        self._samples = Samples()
        self._limits = True
        self._started_s = time.monotonic()

    def run(self) -> Samples:
        """Raises RedisUnavailable if our own client fails."""
        self._warm_up()
        for value_bytes in self._plan.sizes:
            self._moves(value_bytes)
        for keys, times in self._plan.scans:
            self._scans(keys, times)
        return self._samples

    # ------------------------------------------------------------------ moves

    def _warm_up(self) -> None:
        """Imports modules, opens connections and starts threads before the first sample."""
        self._say("starting the clients")
        for client, setting in self._turns(0):
            for name in ("x", "y"):
                self._ask(client, Store(setting, _WARM_UP, name, fresh=True))
                self._ask(client, Load(setting, _WARM_UP, name))

    def _moves(self, value_bytes: int) -> None:
        batch = self._plan.batch(value_bytes)
        for number in range(self._plan.rounds):
            self._say_round(f"{batch.items} values of {size_text(value_bytes)}", number)
            for client, setting in self._turns(number):
                if client in self._workers:
                    self._turn(client, setting, batch)

    def _turn(self, client: str, setting: Setting, batch: Batch) -> None:
        def sample(op: str, request: Request) -> None:
            measured = self._ask(client, request)
            if measured is not None:
                case = Case(client, setting, op, batch.value_bytes, batch.items)
                self._samples.add(case, measured)

        self._server.flush()
        if not setting.checksums:
            # Its stores do not differ from those with checksums.
            self._ask(client, Store(setting, batch, "a", fresh=True))
            sample("load", Load(setting, batch, "a"))
            return
        sample("first-store", Store(setting, batch, "a", fresh=True))
        sample("overwrite", Store(setting, batch, "a", fresh=False))
        sample("load", Load(setting, batch, "a"))
        if client == CEILING or not self._limits:
            return
        # The server needs room for the values that it receives concurrently.
        room_bytes = setting.connections * batch.value_bytes * 5 // 4 + 16 * MIB
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._server.full(room_bytes))
            except RedisUnavailable as error:
                self._limits = False
                self._say(f"steady: left out: {error}")
                return
            if self._fill(client, setting, batch):
                sample("steady", Store(setting, batch, "b", fresh=True))

    def _fill(self, client: str, setting: Setting, batch: Batch) -> bool:
        """Stores until the server evicts. False if it never does, or if the client failed."""
        before = self._server.evicted_keys()
        for number in range(_MOST_FILLS):
            if self._ask(client, Store(setting, batch, f"fill-{number}", fresh=True)) is None:
                return False
            if self._server.evicted_keys() > before:
                return True
        return False

    # ------------------------------------------------------------------ scans

    def _scans(self, keys: int, times: int) -> None:
        # Settings of the other clients do not change how they scan.
        scanners = [
            (client, setting)
            for client, settings in self._plan.settings.items()
            if client in self._workers and client not in (CEILING, GLIDE)
            for setting in (settings if client == LMCACHE else settings[:1])
        ]
        for cached, present in zip(CACHED, (0, keys // 2, keys), strict=True):
            self._server.flush()
            for client, setting in scanners:
                self._ask(client, PrepareScan(setting, keys, present))
            for number in range(self._plan.rounds):
                self._say_round(f"scan of {keys:,} keys, {cached} cached", number)
                for client, setting in scanners:
                    case = Case(client, setting, SCAN, KEY_BYTES, keys, cached)
                    for _ in range(times):
                        measured = self._ask(client, Scan(setting, present))
                        if measured is not None:
                            self._samples.add(case, measured)

    # ----------------------------------------------------------------- inside

    def _turns(self, number: int) -> list[tuple[str, Setting]]:
        """Clients and settings in the order of this round."""
        turns = [
            (client, setting)
            for client, settings in self._plan.settings.items()
            if client in self._workers
            for setting in settings
        ]
        return rotated(turns, number * len(turns) // self._plan.rounds)

    def _ask(self, client: str, request: Request) -> Measured | None:
        """None if the client was dropped, now or before."""
        worker = self._workers.get(client)
        if worker is None:
            return None
        try:
            return worker.ask(request)
        except WorkerFailed as error:
            if client == OURS:
                raise RedisUnavailable(f"our client failed: {error}") from None
            self._say(f"{client}: dropped: {error}")
            self._workers.pop(client).close()
            return None

    def _say_round(self, what: str, number: int) -> None:
        elapsed_s = time.monotonic() - self._started_s
        self._say(f"{elapsed_s:4.0f} s  {what}, round {number + 1} of {self._plan.rounds}")
