"""What the connections of a gateway share: the cache, the budgets, counters, log lines."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from dataclasses import dataclass

from lmcache_redis.cache.objects import ObjectCache
from lmcache_redis.gateway.budget import Budget

SILENCE_S = 10.0


@dataclass(slots=True)
class Counters:
    """Counters only grow, from the start of the server; the loop's thread writes them."""

    connections: int = 0  # accepted, also those that were refused then
    refused_connections: int = 0  # not on the allow-list, or one too many
    failed_handshakes: int = 0
    puts: int = 0
    gets: int = 0
    exists: int = 0
    lists: int = 0
    healths: int = 0
    stored: int = 0
    not_stored: int = 0  # no tier took it, for lack of room or of a server
    hits: int = 0
    misses: int = 0
    payload_bytes_in: int = 0
    payload_bytes_out: int = 0
    malformed: int = 0  # requests that had to fail, or whose connection had to be closed
    stalled: int = 0  # connections closed because a message made too little progress
    idle: int = 0  # connections closed because no request came
    abandoned: int = 0  # connections that their client ended in the middle of a request
    errors: int = 0  # connections closed because of a fault of our own

    def snapshot(self) -> dict[str, int]:
        """All counters by name."""
        return dataclasses.asdict(self)


class QuietLog:
    """Logs at most one warning of a kind in `SILENCE_S`, with the number of those left out."""

    def __init__(self, logger: logging.Logger, silence_s: float = SILENCE_S) -> None:
        self._logger = logger
        self._silence_s = silence_s
        self._kinds: dict[str, tuple[float, int]] = {}

    def warning(self, kind: str, message: str, *args: object) -> None:
        """kind: one of few words of the program, never of a client."""
        now_s = time.monotonic()
        until_s, left_out = self._kinds.get(kind, (0.0, 0))
        if now_s < until_s:
            self._kinds[kind] = (until_s, left_out + 1)
            return
        self._kinds[kind] = (now_s + self._silence_s, 0)
        more = f" ({left_out} more like it since the last such line)" if left_out else ""
        self._logger.warning(message + more, *args)


@dataclass(frozen=True, slots=True)
class Shared:
    """See the module. The loop's thread only.

    budget: `--buffer-bytes`. Beside it, in bytes of memory: lent: what may be sent from the memory
    tier without a share of the budget; reused: what payloads that are still being received may have
    of memory that was used before. memory_bytes: what the memory tier keeps.
    """

    cache: ObjectCache
    budget: Budget
    lent: Budget
    reused: Budget
    counters: Counters
    log: QuietLog
    memory_bytes: int
    max_payload_bytes: int
    one_list: asyncio.Lock  # a LIST may take long and much memory: one at a time
