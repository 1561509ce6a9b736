# SPDX-License-Identifier: Apache-2.0
"""A tier over a store whose calls block, a `tiers.Tier`: jobs on threads, and what hangs is found.

Some threads read, remove and clear, in the order of the jobs; others write. Each thread has a
buffer: what it reads is copied into the slots when it is complete, what it writes is copied from
them first. So a job that is cancelled ends at once, whatever the store does: a read is then
dropped, and a write does not become visible. No job begins after its deadline.

A call that exceeds its patience takes the tier down: nothing is found, and every job is answered
UNAVAILABLE. The tier comes back when all calls have returned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from lmcache_redis.cache.threads import HangDetector, WorkerThreads
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
    WriteDone,
    WriteOutcome,
)

Keys = Sequence[bytes]
_Bytes: TypeAlias = "npt.NDArray[np.uint8]"

T = TypeVar("T")

PATIENCE_S = 5.0
_JOIN_S = 0.25
# A larger buffer is not kept.
_KEPT_BUFFER_BYTES = 64 << 20

# A read's outcome, and what it has read.
_Read: TypeAlias = tuple[ReadOutcome, memoryview]


class StoredChunk(Protocol):
    @property
    def frame(self) -> ChunkFrame: ...


class BlockingStore(Protocol):
    """Chunks by chunk key. Thread-safe. No method raises because what it stores in fails."""

    def find(self, key: bytes) -> StoredChunk | None:
        """Looks in an index, without I/O."""

    def keys(self, prefixes: bytes | tuple[bytes, ...] = b"") -> list[bytes]:
        """Those in the index that begin with one of the prefixes. No I/O."""

    def keep(self, key: bytes) -> None:
        """The chunk has been used. No I/O."""

    def load(self, key: bytes, frame: ChunkFrame, payload: memoryview) -> ReadOutcome:
        """Fills the payload with the chunk, if it has exactly this frame and is undamaged."""

    def write(
        self,
        key: bytes,
        frame: ChunkFrame,
        payload: memoryview,
        is_cancelled: Callable[[], bool],
    ) -> WriteOutcome:
        """Makes the chunk visible, whole, in place of an earlier one; not once it is cancelled."""

    def remove(self, key: bytes) -> bool:
        """Removes a chunk; whether it was there."""

    def remove_or_keep(self, key: bytes) -> RemoveResult:
        """Removes a chunk; one that cannot be removed stays in the index."""


class BlockingTier:
    """name: see `Tier`; threads and log lines have it too. Thread-safe.

    read_patience_s: how long a read may be in flight; other calls may for `PATIENCE_S`. write_nice:
    see `nice(2)`.
    """

    def __init__(
        self,
        name: str,
        store: BlockingStore,
        *,
        read_patience_s: float = PATIENCE_S,
        read_threads: int = 2,
        write_threads: int = 1,
        write_nice: int = 10,
    ) -> None:
        self.name = name
        self._chunks = store
        self._read_patience_s = read_patience_s
        # Jobs that have not ended, with what answers them with the outcome of a name. Whoever takes
        # one out answers it.
        self._pending: dict[object, Callable[[str], None]] = {}
        self._buffers = threading.local()
        self._has_ended: bool | None = None  # None: not closed
        self._reads = WorkerThreads(f"{name}-read", read_threads)
        self._writes = WorkerThreads(f"{name}-write", write_threads, write_nice)
        self._detector = HangDetector(f"{name} tier", self._end_all)

    @property
    def state(self) -> PlaneState:
        return PlaneState(not self._why_down, True, self._why_down)

    # ----------------------------------------------------------- the contract

    def lookup(self, key: bytes) -> bool:
        return self._is_up and self._chunks.find(key) is not None

    def scan(self, keys: Keys, deadline: float, done: Done[ScanResult]) -> None:
        done(ScanResult(self._answer_now, sum(1 for _ in takewhile(self.lookup, keys))))

    def exists(self, keys: Keys, deadline: float, done: Done[ExistsResult]) -> None:
        present = [self.lookup(key) for key in keys]
        done(ExistsResult(self._answer_now, present if self._is_up else ()))

    def refresh(
        self,
        chunks: Sequence[tuple[bytes, int]],
        deadline: float,
        done: Done[ExistsResult],
        claim_s: float = 0.0,
    ) -> None:
        """See the contract. After a restart the use is forgotten."""
        for key, _ in chunks:
            self._chunks.keep(key)
        self.exists([key for key, _ in chunks], deadline, done)

    def unclaim(self, keys: Keys) -> None:
        """There are none."""

    def describe(self, keys: Keys, deadline: float, done: Done[FramesResult]) -> None:
        found = (self._chunks.find(key) for key in keys)
        frames = [file.frame if file else None for file in found]
        done(FramesResult(self._answer_now, frames if self._is_up else ()))

    def keys(self, prefix: bytes, deadline: float, limit: int) -> KeysResult:
        """See the contract. From the index, also while a call hangs."""
        found = self._chunks.keys(prefix)
        is_over = len(found) > limit
        return KeysResult(CallOutcome.OVER_LIMIT if is_over else CallOutcome.DONE, found[:limit])

    def load_all(self, jobs: Sequence[ChunkIO], done: ReadDone) -> None:
        for io in jobs:
            load, answer = partial(self._load, io), partial(_answer_load, io, done)
            self._begin(self._reads, io, io.deadline, load, answer, _not_loaded)

    def store_all(self, jobs: Sequence[ChunkIO], done: WriteDone) -> None:
        for io in jobs:
            store, answer = partial(self._store, io), partial(done, io)
            self._begin(self._writes, io, io.deadline, store, answer, WriteOutcome.__getitem__)

    def cancel(self, job: ChunkIO) -> None:
        self._end(job, "CANCELLED")

    def remove(
        self,
        key: bytes,
        deadline: float,
        done: Done[RemoveResult],
        stripe_count: int = 0,
        newest_unix_ms: int | None = None,
    ) -> None:
        """See the contract. Whole chunks have no stripes, and do not say when they were stored."""

        remove = partial(self._call, "a removal", partial(self._chunks.remove_or_keep, key))
        self._begin(self._reads, object(), deadline, remove, done, _not_removed)

    def clear(
        self, key_prefixes: Sequence[bytes], deadline: float, done: Done[RemoveResult]
    ) -> None:
        """See the contract. Goes on after its deadline: each file's removal has its patience."""

        def clear() -> RemoveResult:
            keys = self._chunks.keys(tuple(key_prefixes))
            removals = (partial(self._chunks.remove, key) for key in keys)
            removed = sum(self._call("a removal", each) or False for each in removals)
            return RemoveResult(self._answer_now, removed)

        self._begin(self._reads, object(), deadline, clear, done, _not_removed)

    def close(self, deadline_s: float) -> bool:
        """See the contract. Queued writes have half of the time, calls in flight the rest."""
        if self._has_ended is not None:
            return self._has_ended
        end_s = time.monotonic() + deadline_s
        self._has_ended = False
        self._reads.stop()
        if self._is_up:
            self._writes.drain(deadline_s / 2)
        self._writes.stop()
        ended = self._detector.close(max(0.0, end_s - time.monotonic()))
        self._end_all()
        # Threads whose calls have returned end soon; those with a call that hangs do not.
        join_s = max(_JOIN_S, end_s - time.monotonic()) if ended else _JOIN_S
        self._has_ended = self._reads.join(join_s) & self._writes.join(join_s) & ended
        return self._has_ended

    @property
    def _why_down(self) -> str:
        """Empty: it is up."""
        return self._detector.reason

    @property
    def _is_up(self) -> bool:
        return not self._why_down

    @property
    def _answer_now(self) -> CallOutcome:
        return CallOutcome.DONE if self._is_up else CallOutcome.UNAVAILABLE

    # ------------------------------------------------------------ on the threads

    def _load(self, io: ChunkIO) -> _Read | None:
        buffer = self._buffer(io.frame.chunk_bytes)
        load = partial(self._chunks.load, io.key, io.frame, buffer)
        outcome = self._detector.run(load, "a read", self._read_patience_s)
        return None if outcome is None else (outcome, buffer)

    def _store(self, io: ChunkIO) -> WriteOutcome | None:
        buffer = self._buffer(io.frame.chunk_bytes)
        for slot, piece in _pieces(io, buffer):
            np.copyto(piece, slot)
        # If it ends while its slots are copied, they may change meanwhile: it is not visible then.
        write = partial(
            self._chunks.write, io.key, io.frame, buffer, lambda: io not in self._pending
        )
        return self._call("a write", write)

    def _call(self, what: str, call: Callable[[], T]) -> T | None:
        """Changes the store; None: another call hangs, or the tier is closed."""
        return self._detector.run(call, what, PATIENCE_S)

    def _buffer(self, nbytes: int) -> memoryview:
        """Memory of this thread until its next job."""
        kept: bytearray = getattr(self._buffers, "kept", bytearray())
        if len(kept) < nbytes:
            kept = bytearray(nbytes)
            if nbytes <= _KEPT_BUFFER_BYTES:
                self._buffers.kept = kept
        return memoryview(kept)[:nbytes]

    # ---------------------------------------------------------------- their ends

    def _begin(
        self,
        threads: WorkerThreads,
        name: object,
        deadline_s: float,
        work: Callable[[], T | None],
        answer: Callable[[T], None],
        not_done: Callable[[str], T],
    ) -> None:
        """Queues work whose result is answered; if it ends before, that of ``not_done``."""

        def run() -> None:
            result = None
            try:
                if time.monotonic() > deadline_s:
                    self._end(name, "TIMED_OUT")
                elif name in self._pending:
                    result = work()
            finally:
                if result is None:
                    self._end(name, "UNAVAILABLE")  # no call was made, or a bug prevented its end
            if result is not None and self._pending.pop(name, None) is not None:
                answer(result)

        self._pending[name] = lambda outcome: answer(not_done(outcome))
        threads.put(run, dropped=partial(self._end, name))
        if not self._is_up:
            self._end(name)  # it may have been queued after `_end_all`

    def _end(self, name: object, outcome: str = "") -> None:
        """Answers a job that has not ended. By default: the tier hangs, or is closed."""
        end = self._pending.pop(name, None)
        if end is not None:
            end(outcome or ("CANCELLED" if self._is_up else "UNAVAILABLE"))

    def _end_all(self) -> None:
        for name in self._pending.copy():
            self._end(name)


def _not_loaded(outcome: str) -> _Read:
    return ReadOutcome[outcome], memoryview(b"")


def _not_removed(outcome: str) -> RemoveResult:
    return RemoveResult(CallOutcome[outcome])


def _answer_load(io: ChunkIO, done: ReadDone, result: _Read) -> None:
    outcome, buffer = result
    if outcome is ReadOutcome.LOADED:
        for slot, piece in _pieces(io, buffer):
            np.copyto(slot, piece)
    done(io, outcome)


def _pieces(io: ChunkIO, buffer: memoryview) -> Iterator[tuple[_Bytes, _Bytes]]:
    """Each slot with its piece of the buffer, as arrays: numpy copies them without the GIL."""
    at = 0
    for slot in io.slots:
        piece = buffer[at : at + len(slot)]
        at += len(slot)
        yield np.frombuffer(slot, np.uint8), np.frombuffer(piece, np.uint8)
