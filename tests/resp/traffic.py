# SPDX-License-Identifier: Apache-2.0
"""Reads, writes, scans and cancels at random, with the books of what must come back."""

from __future__ import annotations

import random
import threading
import time

from lmcache_redis.resp import RedisPlane
from lmcache_redis.tiers import ChunkIO, ReadOutcome, WriteOutcome
from tests.resp.helpers import Chunk, chunk_key

CHUNKS = 20
SIZE = 30_000
SLOT = 4096
# Generous for a machine that does other things; without deadlines it would be for ever.
LATE_S = 5.0


class Traffic:
    """Submits reads, writes, scans and cancels, and keeps the books."""

    def __init__(self, plane: RedisPlane, seed: int) -> None:
        self._plane = plane
        self._random = random.Random(seed)
        self._contents = [Chunk(n, SIZE, SLOT, seed=n).content for n in range(CHUNKS)]
        self._lock = threading.Lock()
        self._pending: dict[object, float] = {}
        self.outcomes: set[object] = set()
        self.problems: list[str] = []
        self.answers = 0
        self.loaded = 0

    def some(self) -> None:
        for _ in range(self._random.randrange(1, 10)):
            number = self._random.randrange(CHUNKS)
            stores = self._random.random() < 0.5
            chunk = Chunk(number, SIZE, SLOT, seed=number if stores else None)
            io = chunk.io(self._random.choice([0.05, 0.2, 1.0, 3.0]))
            self._expect(io, io.deadline)
            if stores:
                self._plane.store_all((io,), self._written)
            else:
                self._plane.load_all((io,), self._read)
            if self._random.random() < 0.1:
                self._plane.cancel(io)
        token = object()
        deadline = time.monotonic() + 0.5
        self._expect(token, deadline)
        keys = [chunk_key(number) for number in range(CHUNKS)]
        self._plane.scan(keys, deadline, lambda result: self._answered(token, result.outcome))

    @property
    def pending(self) -> int:
        with self._lock:
            return len(self._pending)

    def _expect(self, token: object, deadline: float) -> None:
        with self._lock:
            self._pending[token] = deadline

    def _answered(self, token: object, outcome: object) -> None:
        with self._lock:
            deadline = self._pending.pop(token, None)
            self.answers += 1
            self.loaded += outcome is ReadOutcome.LOADED
        self.outcomes.add(outcome)
        if deadline is None:
            self.problems.append(f"{outcome} came a second time")
        elif time.monotonic() > deadline + LATE_S:
            self.problems.append(f"{outcome} came late")

    def _written(self, io: ChunkIO, outcome: WriteOutcome) -> None:
        self._answered(io, outcome)

    def _read(self, io: ChunkIO, outcome: ReadOutcome) -> None:
        chunk = io.tag
        assert isinstance(chunk, Chunk)
        if outcome is ReadOutcome.LOADED and chunk.content != self._contents[chunk.number]:
            self.problems.append(f"chunk {chunk.number} has wrong bytes")
        self._answered(io, outcome)
