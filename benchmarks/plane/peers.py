# SPDX-License-Identifier: Apache-2.0
"""The clients that are compared: their interface, their settings, and what they need."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from redis.connection import parse_url

from benchmarks.fetch import HOW_TO_FETCH, find_client
from benchmarks.plane.messages import Setting
from benchmarks.plane.values import Values

OURS = "ours"
LMCACHE = "lmcache"
REDIS_PY = "redis-py"
GLIDE = "valkey-glide"
CEILING = "ceiling"
PEERS = (LMCACHE, REDIS_PY, GLIDE, CEILING)


class Client(ABC):
    """One client at one setting. Values are prepared before they are moved and timed.

    Any exception ends its process. brings_values: a load returns what was stored, and can be
    checked.
    """

    brings_values = True

    @abstractmethod
    def prepare(self, name: str, values: Values) -> None:
        """Creates the keys for the following stores and loads."""

    @abstractmethod
    def store(self, fresh: bool) -> None:
        """Stores all prepared values; returns when the server has acknowledged them."""

    @abstractmethod
    def load(self) -> None:
        """Loads all prepared values into their memory."""

    @abstractmethod
    def close(self) -> None:
        """Closes its connections and ends its threads."""


class ScanningClient(Client):
    """A client that can look up keys."""

    @abstractmethod
    def prepare_scan(self, count: int) -> Sequence[bytes]:
        """Creates the keys for the following scans; returns them as the server stores them."""

    @abstractmethod
    def scan_prepared(self) -> int:
        """How many of the keys exist, from the first on without a gap."""


class Threads:
    """Work split between ``count`` threads: thread n takes every count-th item from the n-th on."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(count)

    def run(self, work: Callable[[int, Iterator[int]], None], items: int) -> None:
        """Calls ``work`` with the number of a thread and its items; raises what it raises."""
        shares = [iter(range(n, items, self._count)) for n in range(self._count)]
        for _ in self._pool.map(work, range(self._count), shares):
            pass

    def close(self) -> None:
        self._pool.shutdown()


def settings_of(peer: str, connections: Sequence[int]) -> list[Setting]:
    """The settings of a peer, of which the best counts. connections: the numbers to try."""
    if peer == REDIS_PY:
        # One thread: its parsing holds the GIL.
        return [Setting(1, how=how) for how in ("pipelined", "one by one")]
    if peer == CEILING:
        sockets = [Setting(n, how="socket") for n in connections if n <= 4]
        return [*sockets, Setting(1, how="memcpy")]
    return [Setting(n) for n in connections]


def why_left_out(peer: str, url: str) -> str | None:
    """Why a peer cannot take part, with the command that helps; None if it can."""
    if peer == LMCACHE:
        if find_client() is None:
            return HOW_TO_FETCH
        if importlib.util.find_spec("torch") is None:
            return "its C++ client needs torch: run `pip install torch`"
        options = parse_url(url)
        if not url.startswith("redis://") or options.get("db", 0) != 0:
            return "it supports only TCP without TLS, and database 0"
    if peer == REDIS_PY and importlib.util.find_spec("hiredis") is None:
        return "run `pip install hiredis`"
    if peer == GLIDE:
        if importlib.util.find_spec("glide_sync") is None:
            return "run `pip install -r benchmarks/requirements.txt`"
        if not url.startswith("redis://"):
            return "the benchmark uses it only over TCP without TLS"
    return None
