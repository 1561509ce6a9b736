"""What the gateway counts, and log lines of which no client can cause many."""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass

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
    not_stored: int = 0  # a tier could not, for lack of room or of a server
    hits: int = 0
    misses: int = 0
    payload_bytes_in: int = 0
    payload_bytes_out: int = 0
    malformed: int = 0  # requests that had to fail, or whose connection had to be closed
    stalled: int = 0  # connections closed because a message did not go on
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
