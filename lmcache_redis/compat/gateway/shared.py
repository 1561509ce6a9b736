"""What the connections of a gateway share: the cache, room for payloads, counters, log lines."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from lmcache_redis import __version__
from lmcache_redis.compat.objects import ObjectCache
from lmcache_redis.metrics.exporter import gauge, labelled

SILENCE_S = 10.0

# Since the start: name and meaning for Prometheus, label; for each of its values, the name here.
COUNTERS: Final[tuple[tuple[str, str, list[str], dict[str, str]], ...]] = (
    ("connections", "connections accepted", [], {"": "connections"}),
    (
        "requests", "requests, by command", ["command"],
        {"put": "puts", "get": "gets", "exist": "exists", "list": "lists", "health": "healths"},
    ),
    ("puts", "PUTs, by outcome", ["outcome"], {"stored": "stored", "not_stored": "not_stored"}),
    ("gets", "GETs answered, by outcome", ["outcome"], {"hit": "hits", "miss": "misses"}),
    (
        "payload_bytes", "payload moved", ["direction"],
        {"in": "payload_bytes_in", "out": "payload_bytes_out"},
    ),
    (
        "malformed_requests", "requests that failed, or whose connection was closed", [],
        {"": "malformed"},
    ),
    (
        "closed_connections",
        "connections closed before their client ended them properly, by reason", ["reason"],
        {
            "refused": "refused_connections", "handshake": "failed_handshakes",
            "stalled": "stalled", "idle": "idle", "abandoned": "abandoned", "error": "errors",
        },
    ),
)  # fmt: skip


class QuietLog:
    """Logs one warning of a kind per `SILENCE_S` at most."""

    def __init__(self, logger: logging.Logger, silence_s: float = SILENCE_S) -> None:
        self._logger = logger
        self._silence_s = silence_s
        self._until_s: dict[str, float] = {}

    def warning(self, kind: str, message: str, *args: object) -> None:
        """kind: one of a few constants, never text of a client."""
        now_s = time.monotonic()
        if now_s >= self._until_s.get(kind, 0.0):
            self._until_s[kind] = now_s + self._silence_s
            self._logger.warning(message, *args)


class Room:
    """A bound for payload bytes in flight: a semaphore of bytes, first come first served.

    The memory belongs to the cache. A payload takes all of its bytes before the first one moves,
    and nothing that holds bytes waits for more of them to give them back. The loop's thread only.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self._turn = asyncio.Lock()
        self._given_back = asyncio.Event()

    async def take(self, nbytes: int) -> None:
        """Waits for `nbytes`, at most `size_bytes`. The caller gives them back."""
        async with self._turn:
            while self.used_bytes + nbytes > self.size_bytes:
                self._given_back.clear()
                await self._given_back.wait()
            self.used_bytes += nbytes

    def give_back(self, nbytes: int) -> None:
        self.used_bytes -= nbytes
        self._given_back.set()


@dataclass(frozen=True, slots=True)
class Shared:
    """See the module. The loop's thread only.

    room: `--buffer-bytes`. one_list: held by a LIST while it collects keys.
    """

    cache: ObjectCache
    room: Room
    max_payload_bytes: int
    log: QuietLog
    counters: dict[str, int] = field(
        default_factory=lambda: {name: 0 for *_, values in COUNTERS for name in values.values()}
    )
    one_list: asyncio.Lock = field(default_factory=asyncio.Lock)


def exposed(stats: dict[str, int], is_up: bool) -> Iterator[Metric]:
    """What a gateway exposes to Prometheus beside the counts of its tiers."""
    for name, meaning, labels, values in COUNTERS:
        found = {(value,) if value else (): stats[of] for value, of in values.items()}
        yield labelled(CounterMetricFamily, f"gateway_{name}", meaning, labels, found)
    version = {(__version__,): 1}
    about = "1; the version of the gateway"
    yield labelled(GaugeMetricFamily, "gateway_info", about, ["version"], version)
    yield gauge("gateway_open_connections", "clients now", stats["open_connections"])
    yield gauge("gateway_buffer_size_bytes", "`--buffer-bytes`", stats["buffer_bytes"])
    yield gauge("gateway_buffer_used_bytes", "payload in flight", stats["buffer_used_bytes"])
    yield gauge("gateway_up", "1 if the last tier answers, as the command HEALTH says", is_up)
