"""What the connections of a gateway share: the cache, room for payloads, counters, log lines."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass

from lmcache_redis.compat.objects import ObjectCache

SILENCE_S = 10.0


@dataclass(slots=True)
class Counters:
    """Counters since the start of the server. Only the loop's thread writes them."""

    connections: int = 0  # accepted, those refused afterwards included
    refused_connections: int = 0  # not on the allow-list, or over the limit
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
    malformed: int = 0  # requests that failed, or whose connection was closed
    stalled: int = 0  # connections closed: a header, payload or reply took too long
    idle: int = 0  # connections closed: no request came, and others wanted to connect
    abandoned: int = 0  # connections that the client closed in the middle of a request
    errors: int = 0  # connections closed: a bug of ours


class QuietLog:
    """Logs one warning of a kind per `SILENCE_S` at most, and how many were suppressed."""

    def __init__(self, logger: logging.Logger, silence_s: float = SILENCE_S) -> None:
        self._logger = logger
        self._silence_s = silence_s
        self._kinds: dict[str, tuple[float, int]] = {}

    def warning(self, kind: str, message: str, *args: object) -> None:
        """kind: one of a few constants, never text of a client."""
        now_s = time.monotonic()
        until_s, left_out = self._kinds.get(kind, (0.0, 0))
        if now_s < until_s:
            self._kinds[kind] = (until_s, left_out + 1)
            return
        self._kinds[kind] = (now_s + self._silence_s, 0)
        more = f" ({left_out} more like it since the last such line)" if left_out else ""
        self._logger.warning(message + more, *args)


class Room:
    """A bound for payload bytes in flight: a semaphore of bytes, first come first served.

    The memory belongs to the cache. A payload takes all of its bytes before the first one moves,
    and nothing that holds bytes waits for more of them to give them back. The loop's thread only.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, nbytes: int) -> None:
        """Waits for `nbytes`, at most `size_bytes`. The caller gives them back."""
        if not self._waiting and self.used_bytes + nbytes <= self.size_bytes:
            self.used_bytes += nbytes
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, granted))
        try:
            await granted
        except asyncio.CancelledError:
            self.give_back(0 if granted.cancelled() else nbytes)
            raise

    def give_back(self, nbytes: int) -> None:
        self.used_bytes -= nbytes
        while self._waiting:
            wanted, granted = self._waiting[0]
            if not granted.done():
                if self.used_bytes + wanted > self.size_bytes:
                    return
                self.used_bytes += wanted
                granted.set_result(None)
            self._waiting.popleft()


@dataclass(frozen=True, slots=True)
class Shared:
    """See the module. The loop's thread only.

    room: `--buffer-bytes`. memory_bytes: capacity of the memory tier. one_list: held by a LIST
    while it collects keys.
    """

    cache: ObjectCache
    room: Room
    counters: Counters
    log: QuietLog
    memory_bytes: int
    max_payload_bytes: int
    one_list: asyncio.Lock
