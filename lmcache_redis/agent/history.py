"""What became of the last requests: for `lmcache-redis why`.

Kept for each request: its last lookup, and how many parts of chunks were loaded, stored and
compared since. Beyond `MOST_REQUESTS` the one that came first is forgotten. Owned by the loop
thread. A lookup costs one tuple here; everything else is worked out when somebody asks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from lmcache_redis.cache.pacing import Bet

MOST_REQUESTS = 4096
RequestKey = tuple[str, str]  # engine id, request id
# Of one request: sentences that say why parts were not copied.
_MOST_REASONS = 8


class PastLookup(NamedTuple):
    """A lookup that was answered.

    at_s: `time.time()`. chunks: the numbers in the prompt of those that were asked for. hits: how
    many of them were found, by tier. reason: why not more, a counter's name without ``miss_``, or
    another of `cli.why.REASONS`; "" if all were found. because: for people. missed: the hash of the
    first chunk that was not found. layouts: of its parts.
    """

    at_s: float
    took_s: float
    chunks: range
    chunk_tokens: int
    model: str = ""
    hits: tuple[tuple[str, int], ...] = ()
    reason: str = ""
    because: tuple[str, ...] = ()
    bet: Bet | None = None
    missed: bytes = b""
    layouts: tuple[bytes, ...] = ()
    compare_only: bool = False

    @property
    def asked(self) -> int:
        return len(self.chunks)

    @property
    def hit_chunks(self) -> int:
        return sum(count for _, count in self.hits)


@dataclass(slots=True)
class PartCounts:
    """Parts of chunks of one request: one for each rank and group of layers.

    loaded, failed: copied into the engine's blocks, or not, which the engine then computes.
    stored, present, dropped: taken from its blocks; in the host pool before; not taken.
    compared: of a canary. reasons: why some failed or were dropped.
    """

    loaded: int = 0
    failed: int = 0
    stored: int = 0
    present: int = 0
    dropped: int = 0
    compared: int = 0
    load_s: float = 0.0
    reasons: set[str] = field(default_factory=set)

    def because(self, reasons: Collection[str]) -> None:
        if len(self.reasons) < _MOST_REASONS:
            self.reasons.update(reasons)


@dataclass(slots=True)
class PastRequest:
    """A request of an engine, named as a session is."""

    key: RequestKey
    began_s: float
    lookups: int = 0
    lookup: PastLookup | None = None
    parts: PartCounts = field(default_factory=PartCounts)


class RequestHistory:
    """See the module."""

    def __init__(self, most: int = MOST_REQUESTS) -> None:
        self._most = most
        self._began_s = time.time()
        self._requests: dict[RequestKey, PastRequest] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def since_s(self) -> float:
        """Since when every request is kept (Unix time): the agent's start, at first."""
        first = next(iter(self._requests.values()), None)
        return self._began_s if first is None or len(self) < self._most else first.began_s

    def looked_up(self, key: RequestKey, lookup: PastLookup) -> None:
        """A lookup was answered. A request that is looked up again keeps the last one."""
        past = self._request(key)
        past.lookups += 1
        past.lookup = lookup

    def parts_of(self, key: RequestKey) -> PartCounts:
        """The counts of a request, to be added to."""
        return self._request(key).parts

    def find(self, text: str, most: int) -> list[PastRequest]:
        """The requests with this id, or else those whose ids contain it; the newest first."""
        exact = [each for key, each in self._requests.items() if key[1] == text]
        if exact:
            return exact[::-1][:most]
        return list(islice((each for each in self if text in each.key[1]), most))

    def __iter__(self) -> Iterator[PastRequest]:
        """The newest first."""
        return reversed(self._requests.values())

    def _request(self, key: RequestKey) -> PastRequest:
        past = self._requests.get(key)
        if past is None:
            if len(self._requests) >= self._most:
                del self._requests[next(iter(self._requests))]
            past = self._requests[key] = PastRequest(key, time.time())
        return past


def document(past: PastRequest) -> dict[str, Any]:
    """A request for JSON."""
    engine_id, request_id = past.key
    parts = past.parts
    counts = {name: getattr(parts, name) for name in PartCounts.__slots__ if name != "reasons"}
    return {
        "request_id": request_id,
        "engine_id": engine_id,
        "began_s": past.began_s,
        "lookups": past.lookups,
        "lookup": None if past.lookup is None else _lookup(past.lookup),
        "parts": counts | {"because": sorted(parts.reasons)},
    }


def _lookup(lookup: PastLookup) -> dict[str, Any]:
    return {
        "at_s": lookup.at_s,
        "took_s": lookup.took_s,
        "model": lookup.model,
        "first_chunk": lookup.chunks.start,
        "asked_chunks": lookup.asked,
        "chunk_tokens": lookup.chunk_tokens,
        "found_chunks": lookup.hit_chunks,
        "hits": dict(lookup.hits),
        "compare_only": lookup.compare_only,
        "layouts": [each.hex() for each in lookup.layouts],
        "first_miss": _first_miss(lookup),
        "bet": _bet(lookup.bet),
    }


def _first_miss(lookup: PastLookup) -> dict[str, Any] | None:
    if not lookup.reason:
        return None
    chunk = lookup.chunks.start + lookup.hit_chunks
    return {
        "chunk": chunk,
        "token": chunk * lookup.chunk_tokens,
        "reason": lookup.reason,
        "because": list(lookup.because),
        "hash": lookup.missed.hex(),
    }


def _bet(bet: Bet | None) -> dict[str, Any] | None:
    """Times that are not known are null."""
    if bet is None:
        return None
    times = {"load_s": bet.load_s, "compute_s": bet.compute_s, "chosen_s": bet.chosen_s}
    known = {name: s if math.isfinite(s) else None for name, s in times.items()}
    return {"chunks": bet.chunks, **known}
