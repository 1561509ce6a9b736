"""One load for all simultaneous readers of a chunk.

The first reader leads, the others follow and wait for it. A put or a removal marks the flight as
outdated. Later readers do not join an outdated flight, because it may bring the older chunk.
"""

from __future__ import annotations

import enum
import threading

from lmcache_redis.backends.copying import Block
from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import RemoteMetadata


class End(enum.Enum):
    """What the leader found, as far as it concerns its followers."""

    ABSENT = "no tier has the chunk"
    KEPT = "the chunk, which is in the first tier now"
    COPIED = "the chunk, of which the flight has a copy"
    UNKNOWN = "nothing that says anything: everybody for themselves"


class Flight:
    """A load under way. copy: the payload, where the end is COPIED; metadata: what it is."""

    def __init__(self) -> None:
        self.end = End.UNKNOWN
        self.copy: tuple[RemoteMetadata, Block] | None = None
        self.followers = 0
        self.is_outdated = False
        self.has_ended = threading.Event()


class Flights:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[ObjectKey, Flight] = {}

    def join(self, key: ObjectKey) -> tuple[Flight, bool]:
        """The flight for a key, and whether it is the caller's to lead."""
        with self._lock:
            flight = self._flights.get(key)
            if flight is not None:
                flight.followers += 1
                return flight, False
            flight = self._flights[key] = Flight()
            return flight, True

    def outdate(self, key: ObjectKey) -> None:
        """The chunk was put or removed: what is on its way is not what is stored."""
        with self._lock:
            flight = self._flights.pop(key, None)
            if flight is not None:
                flight.is_outdated = True

    def take_off_list(self, key: ObjectKey, flight: Flight) -> bool:
        """Ends joining; returns whether another reader has joined."""
        with self._lock:
            if self._flights.get(key) is flight:
                del self._flights[key]
            return flight.followers > 0
