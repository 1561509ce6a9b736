"""Sessions: the pins held for one request, from its lookup to its end.

A session owns pins of host pool entries. It gives up each exactly once: to the retrieve that uses
it, when the engine asks for it, or when the session ends or times out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lmcache_redis.cache.pool import Entry, HostPool
from lmcache_redis.errors import WireError

logger = logging.getLogger(__name__)

MAX_SESSIONS = 1 << 16
MAX_CHUNKS = 1 << 32  # of a prompt

SessionKey = tuple[str, str]  # engine id, request id
PinKey = tuple[int, int, bytes]  # worker id, group, chunk hash


@dataclass
class Tally:
    """What happened to the chunks of one request, for its log line."""

    asked: int = 0
    hit: int = 0
    from_redis: int = 0
    from_disk: int = 0
    stored: int = 0
    dropped: int = 0
    lookup_ms: float = 0.0
    reasons: set[str] = field(default_factory=set)

    def sentence(self, request_id: str) -> str | None:
        """The log line, or None if nothing happened."""
        parts = []
        if self.asked:
            from_disk = f", {self.from_disk} from disk" if self.from_disk else ""
            parts.append(
                f"{self.hit} of {self.asked} chunks hit "
                f"({self.from_redis} loaded from Redis{from_disk}) in {self.lookup_ms:.1f} ms"
            )
        if self.stored:
            parts.append(f"{self.stored} stored")
        if self.dropped:
            parts.append(f"{self.dropped} dropped")
        if self.reasons:
            parts.append("because " + ", ".join(sorted(self.reasons)))
        return f"request {request_id}: {', '.join(parts)}" if parts else None


class Session:
    """The pins of one request."""

    def __init__(self, key: SessionKey, pool: HostPool) -> None:
        self.key = key
        self.expires_s = 0.0
        self.ended = False
        self.busy = 0  # stores and retrieves in progress
        self.tally = Tally()
        self.cancel_lookup: Callable[[], None] | None = None
        self.positions: dict[bytes, int] = {}  # of the prompt's chunks, by hash
        self._pool = pool
        self._pins: dict[PinKey, Entry] = {}

    def hold(self, pin: PinKey, entry: Entry) -> None:
        """Takes over one pin of ``entry``; releases one of the same chunk that it already holds."""
        if pin in self._pins:
            self._pool.unpin(self._pins[pin])
        self._pins[pin] = entry

    def take(self, pin: PinKey) -> Entry | None:
        """The entry, whose pin now belongs to the caller; None if the session does not hold it."""
        return self._pins.pop(pin, None)

    def release(self, chunk_hash: bytes) -> int:
        """Releases all pins of a chunk's parts; returns how many there were."""
        found = [pin for pin in self._pins if pin[2] == chunk_hash]
        for pin in found:
            self._pool.unpin(self._pins.pop(pin))
        return len(found)

    def release_all(self) -> None:
        """Cancels a lookup in flight, which would add pins, and releases every pin."""
        if self.cancel_lookup is not None:
            cancel, self.cancel_lookup = self.cancel_lookup, None
            cancel()
        for entry in self._pins.values():
            self._pool.unpin(entry)
        self._pins.clear()

    @property
    def pinned_chunks(self) -> int:
        return len(self._pins)


class Sessions:
    """All sessions, by engine and request."""

    def __init__(self, pool: HostPool, timeout_s: float) -> None:
        self._pool = pool
        self.timeout_s = timeout_s
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
            session = self._sessions[key] = Session(key, self._pool)
            session.ended = not for_lookup
        session.ended = session.ended and not for_lookup
        session.expires_s = now_s + self.timeout_s
        return session

    def end(self, session: Session) -> None:
        """Releases all pins; the session is removed when its last store or retrieve has ended."""
        session.ended = True
        session.release_all()
        self._settle(session)

    def finish(self, session: Session) -> None:
        """One store or retrieve of the session has ended."""
        session.busy -= 1
        self._settle(session)

    def _settle(self, session: Session) -> None:
        """Removes an ended session that has no jobs in flight, and logs its line."""
        if not session.ended or session.busy or self._sessions.get(session.key) is not session:
            return
        del self._sessions[session.key]
        line = session.tally.sentence(session.key[1])
        if line is not None:
            logger.debug("%s", line)  # at info level, one line a minute sums up all sessions

    def expired(self, now_s: float) -> list[Session]:
        """Sessions without jobs in flight that have timed out."""
        return [s for s in self._sessions.values() if s.expires_s <= now_s and not s.busy]
