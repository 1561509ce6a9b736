# SPDX-License-Identifier: Apache-2.0
"""Sessions: what the agent holds for one request of an engine, from its lookup to its end.

A session gives up each pin exactly once: to the retrieve that uses it, when the engine asks for it,
or when the session ends or times out.

Its load saves something when every worker of its engine has the hit in its blocks: its tokens, and
the seconds in which the engine would have computed them, less those that its request has waited for
the lookup and the load. A load of which any part fails saves nothing, nor does a hit that the
engine does not load. Workers with other agents, on other nodes, are not seen. For an engine that
has not measured itself yet, only tokens are counted.

What became of a request is known for a while after its session has ended (`RequestHistory`).
Everything here is owned by the loop thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from lmcache_redis.agent.sights import ChunkSights
from lmcache_redis.cache.pool import Entry, HostPool
from lmcache_redis.chunks.keys import hash_tag
from lmcache_redis.chunks.names import Reach
from lmcache_redis.errors import WireError
from lmcache_redis.metrics import Metrics
from lmcache_redis.tenants import NONE

MAX_SESSIONS = 1 << 16
MAX_CHUNKS = 1 << 32  # of a prompt
MOST_REQUESTS = 4096
# After which the chunks that a request has pinned are released.
SESSION_TIMEOUT_S = 60.0

SessionKey = tuple[str, str]  # engine id, request id
PartKey = tuple[int, int]  # worker id, group


@dataclass
class HitLoad:
    """The load of one hit: a retrieve of each worker and group. Times are of the loop's clock.

    workers: of which no retrieve has ended yet. first_chunk: of the lookup. token_s: seconds in
    which the engine computes a token; 0.0: not measured. waited_s: for the lookup. is_local: behind
    a prefix that the engine had itself, so that no canary could have compared it.
    """

    workers: set[int]
    first_chunk: int
    chunk_tokens: int
    token_s: float
    waited_s: float
    began_s: float = 0.0
    in_flight: int = 0
    failed: bool = False
    tokens: int | None = None
    is_local: bool = False

    def begun(self, now_s: float) -> None:
        self.began_s = self.began_s or now_s
        self.in_flight += 1

    def ended(
        self, worker_id: int, tokens: int | None, now_s: float
    ) -> tuple[int, float | None] | None:
        """A retrieve has ended. tokens: that it copied; None if any chunk was not copied.

        Returns the tokens and seconds that the load has saved when it was the last one; None if it
        failed. The seconds are None if they are not known, and below 0 if computing was faster.
        """
        self.in_flight -= 1
        self.workers.discard(worker_id)
        if tokens is None:
            self.failed = True
        else:
            # A sliding window knows only the most that it may be.
            self.tokens = tokens if self.tokens is None else min(self.tokens, tokens)
        if self.failed or self.in_flight or self.workers or not self.tokens:
            return None
        waited_s = self.waited_s + now_s - self.began_s
        saved_s = self.tokens * self.token_s - waited_s if self.token_s else None
        return self.tokens, saved_s

    def tokens_of(self, reach: Reach, chunks: Iterable[int], skipped_tokens: int) -> int:
        """The tokens that a retrieve of these chunks of the prompt stands for.

        What reaches back to all tokens moves each of them. Of others, those before it count too:
        the engine has no need of them.
        """
        numbers = list(chunks)
        first, skipped = self.first_chunk, 0
        if reach.kind == "all":
            first, skipped = min(numbers), skipped_tokens
        return max(0, (max(numbers) + 1 - first) * self.chunk_tokens - skipped)


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


class PastLookup(msgspec.Struct, kw_only=True):
    """A lookup that was answered.

    at_s: `time.time()`. hits: chunks found, by tier. layouts: of its parts, in hexadecimal.
    kv_ranks: which name these. bet: the fields of a `cache.pacing.Bet`.
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
    kv_ranks: tuple[int, ...] = ()
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
        self.because = sorted({*self.because, *reasons})


class PastRequest(msgspec.Struct):
    """What became of a request: its last lookup, and the parts that were copied since.

    tenant: as `tenants.shown`.
    """

    request_id: str
    engine_id: str
    began_s: float
    lookups: int = 0
    lookup: PastLookup | None = None
    parts: PartCounts = msgspec.field(default_factory=PartCounts)
    tenant: str = NONE


class RequestHistory:
    """The last `MOST_REQUESTS` requests, by their first lookup or copy: for `lmcache-redis why`."""

    def __init__(self, most: int = MOST_REQUESTS) -> None:
        self._most = most
        self._began_s = time.time()
        self._requests: dict[SessionKey, PastRequest] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def since_s(self) -> float:
        """Since when every request is kept (Unix time): the agent's start, at first."""
        first = next(iter(self._requests.values()), None)
        return self._began_s if first is None or len(self) < self._most else first.began_s

    def find(self, text: str, most: int) -> list[PastRequest]:
        """The requests with this id, or else those whose ids contain it; the newest first."""
        exact = [each for each in self if each.request_id == text]
        like = (each for each in self if text in each.request_id)
        return exact[:most] or [*islice(like, most)]

    def __iter__(self) -> Iterator[PastRequest]:
        """The newest first."""
        return reversed(self._requests.values())

    def request(self, key: SessionKey) -> PastRequest:
        """What is kept of a request, to be added to."""
        past = self._requests.get(key)
        if past is None:
            if len(self._requests) >= self._most:
                del self._requests[next(iter(self._requests))]
            engine_id, request_id = key
            past = self._requests[key] = PastRequest(request_id, engine_id, time.time())
        return past


class Session:
    """The pins of one request."""

    def __init__(self, key: SessionKey, pool: HostPool, history: RequestHistory) -> None:
        self.key = key
        self.expires_s = 0.0
        self.ended = False
        self.busy = 0  # stores and retrieves in progress
        self.cancel_lookup: Callable[[], None] | None = None
        self.positions: dict[bytes, int] = {}  # of the prompt's chunks, by hash
        self.stems: Sequence[bytes] = ()  # of the keys of their parts
        self.load: HitLoad | None = None  # of its last lookup, until it has ended
        self.agreed: set[bytes] = set()  # layouts in which a canary has found no difference
        self._pool = pool
        self._history = history
        self._pins: dict[bytes, dict[PartKey, Entry]] = {}  # by chunk hash

    def hold(self, chunk_hash: bytes, part: PartKey, entry: Entry) -> None:
        """Takes over one pin of ``entry``; releases one of the same part that it already holds."""
        parts = self._pins.setdefault(chunk_hash, {})
        if part in parts:
            self._pool.unpin(parts[part])
        parts[part] = entry

    def take(self, chunk_hash: bytes, part: PartKey) -> Entry | None:
        """The entry, whose pin now belongs to the caller; None if the session does not hold it."""
        parts = self._pins.get(chunk_hash, {})
        entry = parts.pop(part, None)
        if not parts:
            self._pins.pop(chunk_hash, None)
        return entry

    def release(self, chunk_hash: bytes) -> int:
        """Releases all pins of a chunk's parts; returns how many there were."""
        parts = self._pins.pop(chunk_hash, {})
        for entry in parts.values():
            self._pool.unpin(entry)
        return len(parts)

    def release_all(self) -> None:
        """Cancels a lookup in flight, which would add pins, and releases every pin."""
        if self.cancel_lookup is not None:
            cancel, self.cancel_lookup = self.cancel_lookup, None
            cancel()
        for chunk_hash in [*self._pins]:
            self.release(chunk_hash)

    def keep_beginning(self) -> None:
        """Makes the end of the prompt the first to be evicted: without its beginning it is a miss.

        Copies and pins end in the order of the prompt, which would be evicted in that order.
        """
        tags = map(hash_tag, reversed(self.positions))
        self._pool.touch_all([stem + tag for tag in tags for stem in self.stems])

    @property
    def has_pins(self) -> bool:
        return bool(self._pins)

    @property
    def past(self) -> PartCounts:
        return self._history.request(self.key).parts


class Sessions:
    """All sessions, by engine and request.

    history: of requests, ended ones included. sights: of their chunks; None: all are written.
    """

    def __init__(
        self,
        pool: HostPool,
        metrics: Metrics,
        sights: ChunkSights | None = None,
    ) -> None:
        self.history = RequestHistory()
        self.sights = sights
        self._pool = pool
        self._metrics = metrics
        self._sessions: dict[SessionKey, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def get(self, key: SessionKey) -> Session | None:
        return self._sessions.get(key)

    def open(self, key: SessionKey, now_s: float, *, for_lookup: bool = True) -> Session:
        """The session of a request, created if needed; its timeout starts again.

        An engine ends the session of a lookup. A store or retrieve without a lookup, or after the
        session has ended, gets a session that ends with it.

        Raises ``WireError`` if a session would be created beyond ``MAX_SESSIONS``.
        """
        session = self._sessions.get(key)
        if session is None:
            if len(self._sessions) >= MAX_SESSIONS:
                raise WireError(f"{MAX_SESSIONS} requests are open and have not been ended")
            self._metrics.count("sessions_opened")
            session = self._sessions[key] = Session(key, self._pool, self.history)
            session.ended = not for_lookup
        session.ended = session.ended and not for_lookup
        session.expires_s = now_s + SESSION_TIMEOUT_S
        return session

    def end(self, session: Session) -> None:
        session.ended = True
        session.release_all()
        self._settle(session)

    def finish(self, session: Session) -> None:
        session.busy -= 1
        self._settle(session)

    def _settle(self, session: Session) -> None:
        if session.ended and not session.busy and self._sessions.get(session.key) is session:
            session.keep_beginning()
            del self._sessions[session.key]

    def expired(self, now_s: float) -> list[Session]:
        return [s for s in self._sessions.values() if s.expires_s <= now_s and not s.busy]
