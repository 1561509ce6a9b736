# SPDX-License-Identifier: Apache-2.0
"""Simulated tiers: `MemoryTier`, which keeps the contract, behind time and faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from lmcache_redis.chunks.names import DESCRIPTIONS
from lmcache_redis.testing.memory_tier import MemoryTier
from lmcache_redis.tiers import (
    CallOutcome,
    ChunkIO,
    Done,
    ExistsResult,
    FramesResult,
    KeysResult,
    LastError,
    NumbersResult,
    Operation,
    PlaneState,
    ReadDone,
    ReadOutcome,
    RemoveResult,
    ScanResult,
    WriteDone,
    WriteOutcome,
)
from tests.simulated.world import Event, World, content, scribble

ODD = [each for each in ReadOutcome if each not in (ReadOutcome.LOADED, ReadOutcome.CANCELLED)]
KEPT_CHUNKS = 400
_CLOSED = "closed"


class SimulatedTier(MemoryTier):
    """A Redis, or with an index a disk. What it keeps outlives the agent.

    Attributes:
        probed_at_s: it is not known before whether it is up.
        slower: how many times. silent_until_s: nothing is answered. refuses: writes, with this.
        odd: how reads of a key end.
    """

    def __init__(self, world: World, name: str, has_index: bool) -> None:
        super().__init__(name, has_index=has_index, now=world.now)
        self.options = SimpleNamespace(seal_keys=None, key_prefix=b"", op_timeout_s=2.0)
        self.removals = SimpleNamespace(
            listen=self._listen, stop=lambda: self._listen(None, None), why_silent=""
        )
        self.bytes_per_s = world.random.choice([4e5, 4e6, 4e7])
        self.latency_s = world.random.choice([0.0003, 0.003, 0.03])
        self.probed_at_s = 0.0
        self.slower = 1.0
        self.silent_until_s = 0.0
        self.refuses: WriteOutcome | None = None
        self.odd: dict[bytes, ReadOutcome] = {}
        self.jobs: dict[ChunkIO, tuple[Event, Callable[[bool], None]]] = {}
        self._told: Callable[[Sequence[bytes], bool], None] | None = None
        self._numbers: dict[bytes, int] = {}
        self._calls: dict[Event, Callable[[], None]] = {}
        self._world = world
        self._free_s = 0.0  # when its link is

    @property
    def state(self) -> PlaneState:
        errors: tuple[LastError, ...] = ()
        if self.silent_until_s > self._world.now_s:
            errors = (LastError(Operation.LOAD, "silent", 1, self._world.now_s, True),)
        is_probed = self._world.now_s >= self.probed_at_s
        return PlaneState(not self.reason, is_probed, self.reason, errors)

    # What happens to it

    def heal(self) -> None:
        self.reason, self.slower, self.silent_until_s, self.refuses = "", 1.0, 0.0, None
        self.odd.clear()
        self.damaged.clear()

    def lose(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._chunks.pop(key, None)
        if self._told is not None and keys:
            self._told(keys, self._world.chance(0.5))

    def some_keys(self, most: int) -> list[bytes]:
        keys = [*self._chunks]
        return self._world.random.sample(keys, min(len(keys), most))

    def put(self, job: ChunkIO) -> None:
        """As another agent does."""
        super()._store(job)

    def claim(self, keys: Sequence[bytes]) -> None:
        self._claims |= dict.fromkeys(keys, self._world.now_s + 3.0)

    # Calls

    def scan(self, keys: Sequence[bytes], deadline: float, done: Done[ScanResult]) -> None:
        self._later(deadline, partial(super().scan, keys, deadline, done))

    def exists(self, keys: Sequence[bytes], deadline: float, done: Done[ExistsResult]) -> None:
        self._later(deadline, partial(super().exists, keys, deadline, self._unsure(done)))

    def refresh(
        self,
        chunks: Sequence[tuple[bytes, int]],
        deadline: float,
        done: Done[ExistsResult],
        claim_s: float = 0.0,
    ) -> None:
        if not claim_s:
            self.exists([key for key, _ in chunks], deadline, done)
            return
        self._later(deadline, partial(self._refresh, chunks, deadline, done, claim_s))

    def _refresh(
        self,
        chunks: Sequence[tuple[bytes, int]],
        deadline: float,
        done: Done[ExistsResult],
        claim_s: float,
    ) -> None:
        if (outcome := self._answer(deadline)) is not CallOutcome.DONE:
            done(ExistsResult(outcome))
        else:
            super().refresh(chunks, deadline, self._unsure(done), claim_s)

    def describe(self, keys: Sequence[bytes], deadline: float, done: Done[FramesResult]) -> None:
        self._later(deadline, partial(super().describe, keys, deadline, done))

    def remove(
        self,
        key: bytes,
        deadline: float,
        done: Done[RemoveResult],
        stripe_count: int = 0,
        newest_unix_ms: int | None = None,
    ) -> None:
        self._later(
            deadline, partial(super().remove, key, deadline, done, stripe_count, newest_unix_ms)
        )

    def clear(
        self, key_prefixes: Sequence[bytes], deadline: float, done: Done[RemoveResult]
    ) -> None:
        self._later(deadline, partial(super().clear, key_prefixes, deadline, done))

    def list_keys(self, prefix: bytes, deadline: float, done: Done[KeysResult], limit: int) -> None:
        self._later(deadline, lambda: done(self.keys(prefix, deadline, limit)))

    def rank(
        self, prefixes: Sequence[bytes], most: int, deadline: float, done: Callable[[Any], None]
    ) -> None:
        def answer() -> None:
            found = [key for key in self._chunks if key.startswith(tuple(prefixes))]
            done(SimpleNamespace(outcome=self._answer(deadline), keys=found[:most], refused=""))

        self._later(deadline, answer)

    def add_up(
        self,
        keys: Sequence[bytes],
        amounts: dict[bytes, int],
        ttl_s: int,
        deadline: float,
        done: Done[NumbersResult],
    ) -> None:
        def answer() -> None:
            if (outcome := self._answer(deadline)) is not CallOutcome.DONE:
                done(NumbersResult(outcome))
                return
            for key, amount in amounts.items():
                self._numbers[key] = self._numbers.get(key, 0) + amount
            done(NumbersResult(outcome, [self._numbers.get(key, 0) for key in keys]))

        self._later(deadline, answer)

    # Jobs

    def load_all(self, jobs: Sequence[ChunkIO], done: ReadDone, /) -> None:
        for job in jobs:
            job.check(writable=True)
            scribble_slots(job)
            self._begin(job, lambda cancelled, job=job: self._loaded(job, done, cancelled))  # type: ignore[misc]

    def _loaded(self, job: ChunkIO, done: ReadDone, cancelled: bool) -> None:
        outcome = ReadOutcome.CANCELLED if cancelled else self._load(job)
        if outcome is not ReadOutcome.LOADED:
            scribble_slots(job)
        self._world.note(self.name, "read", job.key, outcome.name)
        done(job, outcome)

    def _load(self, job: ChunkIO) -> ReadOutcome:
        odd = self.odd.get(job.key)
        if odd is None or self._answer(job.deadline) is not CallOutcome.DONE:
            return super()._load(job)
        if self._world.chance(0.5):
            self.lose([job.key])
        return odd

    def store_all(self, jobs: Sequence[ChunkIO], done: WriteDone, /) -> None:
        for job in jobs:
            job.check(writable=False)
            self._begin(job, lambda cancelled, job=job: self._stored(job, done, cancelled))  # type: ignore[misc]

    def _stored(self, job: ChunkIO, done: WriteDone, cancelled: bool) -> None:
        outcome = WriteOutcome.CANCELLED
        if not cancelled:
            outcome = self.refuses or self._store(job)
        elif self._world.chance(0.3):
            self._store(job)  # it becomes visible all the same
        self._world.note(self.name, "write", job.key, outcome.name)
        done(job, outcome)

    def _store(self, job: ChunkIO) -> WriteOutcome:
        frame = job.frame
        is_right = b"".join(job.slots) == content(job.key, frame.chunk_bytes)
        if frame.fingerprint != DESCRIPTIONS and not is_right:
            self._world.violated(f"{self.name} is given other bytes than those of {job.key.hex()}")
        self.odd.pop(job.key, None)
        outcome = super()._store(job)
        if len(self._chunks) > KEPT_CHUNKS:
            self.lose([next(iter(self._chunks))])
        return outcome

    def cancel(self, job: ChunkIO, /) -> None:
        if job in self.jobs:
            event, end = self.jobs[job]
            event.cancel()
            self.jobs[job] = self._world.after(self._world.soon(0.001), lambda: end(True)), end

    def forget(self) -> None:
        """Who has asked is there no longer."""
        for event in [*self._calls, *(event for event, _ in self.jobs.values())]:
            event.cancel()
        self._calls.clear()
        self.jobs.clear()

    def open(self) -> None:
        """A new agent uses it."""
        if self.reason == _CLOSED:
            self.reason = ""

    def close(self, deadline_s: float) -> bool:
        self.reason = self.reason or _CLOSED
        for event, end in [*self.jobs.values()]:
            event.cancel()
            end(True)
        while self._calls:
            event, call = self._calls.popitem()
            event.cancel()
            call()
        return True

    def _begin(self, job: ChunkIO, ended: Callable[[bool], None]) -> None:
        def end(cancelled: bool) -> None:
            del self.jobs[job]
            ended(cancelled)

        world = self._world
        took_s = job.frame.chunk_bytes / self.bytes_per_s * self.slower
        self._free_s = max(self._free_s, world.now_s) + took_s
        due_s = self._free_s + world.soon(self.latency_s)
        if self.silent_until_s > world.now_s:
            due_s = job.deadline
        due_s = max(world.now_s, min(due_s, job.deadline)) if not self.reason else world.now_s
        self.jobs[job] = world.at(due_s, lambda: end(False)), end

    def _later(self, deadline_s: float, call: Callable[[], None]) -> None:
        world = self._world
        if self.reason or world.chance(0.05):
            call()  # before the call returns
            return
        due_s = deadline_s
        if self.silent_until_s <= world.now_s:
            due_s = min(due_s, world.now_s + world.soon(self.latency_s * self.slower))

        def answer() -> None:
            del self._calls[event]
            call()

        event = world.at(max(world.now_s, due_s), answer)
        self._calls[event] = call

    def _unsure(self, done: Done[ExistsResult]) -> Done[ExistsResult]:
        """Of some keys it is not known."""
        if not self._world.chance(0.05):
            return done

        def answer(result: ExistsResult) -> None:
            present = [None if self._world.chance(0.3) else each for each in result.present]
            done(result._replace(present=present))

        return answer

    def _listen(self, told: Any, begun: Callable[[], None] | None) -> None:
        self._told = told
        if begun is not None:
            begun()


def scribble_slots(job: ChunkIO) -> None:
    for slot in job.slots:
        scribble(slot)
