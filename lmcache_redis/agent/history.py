"""What became of the last requests: for `lmcache-redis why`.

Kept for each request: its last lookup, and how many parts of chunks were loaded, stored and
compared since. Beyond `MOST_REQUESTS` the one that came first is forgotten. Owned by the loop
thread. The structs are what the answer to WHY holds of a request.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

MOST_REQUESTS = 4096
RequestKey = tuple[str, str]  # engine id, request id
# Of one request: sentences that say why parts were not copied.
_MOST_REASONS = 8


class FirstMiss(msgspec.Struct, frozen=True):
    """The first chunk that a lookup did not find, and the token that it begins with.

    reason: a counter's name without ``miss_``, or another of `cli.why.REASONS`. because: for
    people. hash: in hexadecimal.
    """

    chunk: int
    token: int
    reason: str
    because: tuple[str, ...]
    hash: str


class PastLookup(msgspec.Struct, frozen=True, kw_only=True):
    """A lookup that was answered.

    at_s: `time.time()`. hits: chunks found, by tier. layouts: of its parts, in hexadecimal. bet:
    the fields of a `cache.pacing.Bet`.
    """

    at_s: float = msgspec.field(default_factory=time.time)
    took_s: float = 0.0
    model: str
    first_chunk: int
    asked_chunks: int
    chunk_tokens: int
    found_chunks: int = 0
    hits: dict[str, int] = {}
    compare_only: bool = False
    layouts: tuple[str, ...] = ()
    first_miss: FirstMiss | None = None
    bet: dict[str, float] | None = None


class PartCounts(msgspec.Struct):
    """Parts of chunks of one request: one for each rank and group of layers.

    loaded, failed: copied into the engine's blocks, or not, which the engine then computes.
    stored, present, dropped: taken from its blocks; in the host pool before; not taken.
    compared: of a canary. because: why some failed or were dropped.
    """

    loaded: int = 0
    failed: int = 0
    stored: int = 0
    present: int = 0
    dropped: int = 0
    compared: int = 0
    load_s: float = 0.0
    because: list[str] = []

    def add_reasons(self, reasons: Iterable[str]) -> None:
        if len(self.because) < _MOST_REASONS:
            self.because = sorted({*self.because, *reasons})


class PastRequest(msgspec.Struct):
    """A request of an engine, named as a session is."""

    request_id: str
    engine_id: str
    began_s: float
    lookups: int = 0
    lookup: PastLookup | None = None
    parts: PartCounts = msgspec.field(default_factory=PartCounts)


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
        exact = [each for each in self if each.request_id == text]
        like = (each for each in self if text in each.request_id)
        return exact[:most] or [*islice(like, most)]

    def __iter__(self) -> Iterator[PastRequest]:
        """The newest first."""
        return reversed(self._requests.values())

    def _request(self, key: RequestKey) -> PastRequest:
        past = self._requests.get(key)
        if past is None:
            if len(self._requests) >= self._most:
                del self._requests[next(iter(self._requests))]
            engine_id, request_id = key
            past = self._requests[key] = PastRequest(request_id, engine_id, time.time())
        return past
