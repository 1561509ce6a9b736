# SPDX-License-Identifier: Apache-2.0
"""A tier in the process's own memory: it answers at once, can be taken down, and damaged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

from lmcache_redis.chunks.frame import ChunkFrame
from lmcache_redis.tiers import (
    CallOutcome,
    ChunkIO,
    Done,
    ExistsResult,
    FramesResult,
    KeysResult,
    PlaneState,
    ReadDone,
    ReadOutcome,
    RemoveResult,
    ScanResult,
    TierPlace,
    WriteDone,
    WriteOutcome,
)


class _KeptChunk(NamedTuple):
    frame: ChunkFrame
    payload: bytes
    stored_unix_ms: int


class MemoryTier:
    """Chunks in a dictionary. Thread-safe.

    has_index: False: `lookup` does not know. limit: of chunks; a store beyond is FULL. now: of the
    cache's owner.

    Attributes:
        reason: why it is down; empty: it is up. damaged: keys whose chunks fail their checksum.
    """

    def __init__(
        self,
        name: str = "memory",
        *,
        has_index: bool = True,
        limit: int = 1 << 30,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.reason = ""
        self.damaged: set[bytes] = set()
        self._has_index = has_index
        self._limit = limit
        self._now = now
        self._chunks: dict[bytes, _KeptChunk] = {}
        self._claims: dict[bytes, float] = {}
        self._lock = threading.Lock()

    @property
    def state(self) -> PlaneState:
        return PlaneState(not self.reason, True, self.reason)

    @property
    def place(self) -> TierPlace:
        return TierPlace(f"memory of this process ({len(self._chunks)} chunks)")

    def lookup(self, key: bytes) -> bool | None:
        return not self.reason and key in self._chunks if self._has_index else None

    def scan(self, keys: Sequence[bytes], deadline: float, done: Done[ScanResult]) -> None:
        outcome = self._answer(deadline)
        there = takewhile(self._chunks.__contains__, keys if outcome is CallOutcome.DONE else ())
        done(ScanResult(outcome, len([*there])))

    def exists(self, keys: Sequence[bytes], deadline: float, done: Done[ExistsResult]) -> None:
        outcome = self._answer(deadline)
        present = [key in self._chunks for key in keys]
        done(ExistsResult(outcome, present if outcome is CallOutcome.DONE else ()))

    def refresh(
        self,
        chunks: Sequence[tuple[bytes, int]],
        deadline: float,
        done: Done[ExistsResult],
        claim_s: float = 0.0,
    ) -> None:
        """See the contract. Every caller is a writer of its own."""
        keys = [key for key, _ in chunks]
        if not claim_s or self._answer(deadline) is not CallOutcome.DONE:
            self.exists(keys, deadline, done)
            return
        now_s, claimed = self._now(), []
        with self._lock:
            present = [key in self._chunks for key in keys]
            for key, is_there in zip(keys, present, strict=True):
                claimed.append(not is_there and self._claims.get(key, 0.0) <= now_s)
                if claimed[-1]:
                    self._claims[key] = now_s + claim_s
        done(ExistsResult(CallOutcome.DONE, present, claimed))

    def unclaim(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._claims.pop(key, None)

    def load_all(self, jobs: Sequence[ChunkIO], done: ReadDone, /) -> None:
        for job in jobs:
            job.check(writable=True)
            done(job, self._load(job))

    def _load(self, job: ChunkIO) -> ReadOutcome:
        if (outcome := self._answer(job.deadline)) is not CallOutcome.DONE:
            return ReadOutcome[outcome.name]
        if (stored := self._chunks.get(job.key)) is None:
            return ReadOutcome.MISSING
        if stored.frame != job.frame:
            return ReadOutcome.FOREIGN
        if job.key in self.damaged:
            return ReadOutcome.CORRUPT
        at = 0
        for slot in job.slots:
            slot[:] = stored.payload[at : at + len(slot)]
            at += len(slot)
        return ReadOutcome.LOADED

    def store_all(self, jobs: Sequence[ChunkIO], done: WriteDone, /) -> None:
        for job in jobs:
            job.check(writable=False)
            done(job, self._store(job))

    def _store(self, job: ChunkIO) -> WriteOutcome:
        if (outcome := self._answer(job.deadline)) is not CallOutcome.DONE:
            return WriteOutcome[outcome.name]
        payload, now_ms = b"".join(job.slots), time.time_ns() // 1_000_000
        with self._lock:
            if job.key not in self._chunks and len(self._chunks) >= self._limit:
                return WriteOutcome.FULL
            self._chunks[job.key] = _KeptChunk(job.frame, payload, now_ms)
            self.damaged.discard(job.key)
        return WriteOutcome.STORED

    def cancel(self, job: ChunkIO, /) -> None:
        """Every job has ended before its call returned."""

    def close(self, deadline_s: float) -> bool:
        self.reason = self.reason or "it is closed"
        return True

    def describe(self, keys: Sequence[bytes], deadline: float, done: Done[FramesResult]) -> None:
        outcome = self._answer(deadline)
        found = (self._chunks.get(key) for key in keys)
        frames = [None if each is None else each.frame for each in found]
        done(FramesResult(outcome, frames if outcome is CallOutcome.DONE else ()))

    def keys(self, prefix: bytes, deadline: float, limit: int) -> KeysResult:
        if (outcome := self._answer(deadline)) is not CallOutcome.DONE:
            return KeysResult(outcome, ())
        with self._lock:
            found = [key for key in self._chunks if key.startswith(prefix)]
        is_over = len(found) > limit
        return KeysResult(CallOutcome.OVER_LIMIT if is_over else outcome, found[:limit])

    def remove(
        self,
        key: bytes,
        deadline: float,
        done: Done[RemoveResult],
        stripe_count: int = 0,
        newest_unix_ms: int | None = None,
    ) -> None:
        if (outcome := self._answer(deadline)) is not CallOutcome.DONE:
            done(RemoveResult(outcome))
            return
        with self._lock:
            stored = self._chunks.get(key)
            is_newer = newest_unix_ms is not None and (
                stored is not None and stored.stored_unix_ms > newest_unix_ms
            )
            if stored is not None and not is_newer:
                del self._chunks[key]
        removed = int(stored is not None and not is_newer)
        done(RemoveResult(outcome, removed, 0 if stored is None else stored.frame.stripe_count))

    def clear(
        self, key_prefixes: Sequence[bytes], deadline: float, done: Done[RemoveResult]
    ) -> None:
        if (outcome := self._answer(deadline)) is not CallOutcome.DONE:
            done(RemoveResult(outcome))
            return
        with self._lock:
            doomed = [key for key in self._chunks if key.startswith(tuple(key_prefixes))]
            for key in doomed:
                del self._chunks[key]
        done(RemoveResult(outcome, len(doomed)))

    def _answer(self, deadline_s: float) -> CallOutcome:
        if self.reason:
            return CallOutcome.UNAVAILABLE
        return CallOutcome.DONE if self._now() < deadline_s else CallOutcome.TIMED_OUT
