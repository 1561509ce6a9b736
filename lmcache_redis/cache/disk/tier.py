"""The disk tier, a `cache.tier.Tier`: jobs on threads, and detection of a disk that hangs.

Two threads read, remove and clear, in the order of the jobs; one thread at a low priority writes. A
queued job is cancelled at once. One in flight uses its slots until it ends; a cancelled write does
not become visible.

A call that exceeds its patience takes the tier down: nothing is found, queued jobs are answered
UNAVAILABLE, and those in flight are `stuck`. The tier comes back when all of them have returned.
Clears requested meanwhile are carried out before anything is found again.

A directory belongs to one tier at a time. A tier that is closed while a call hangs keeps its
directory locked, because the call may still change it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

from lmcache_redis.cache.disk.files import SYNC_POLICIES, ChunkFiles, Sync, lock_directory
from lmcache_redis.cache.disk.scan import Scan
from lmcache_redis.cache.disk.store import DiskStore
from lmcache_redis.cache.threads import Action, HangDetector, WorkerThreads, nothing
from lmcache_redis.errors import ConfigError
from lmcache_redis.tiers import (
    CallOutcome,
    ChunkIO,
    Done,
    ExistsResult,
    FramesResult,
    PlaneState,
    ReadDone,
    ReadOutcome,
    RemoveResult,
    ScanResult,
    Stuck,
    WriteDone,
    WriteOutcome,
)

logger = logging.getLogger(__name__)

Keys = Sequence[bytes]

T = TypeVar("T")
OutcomeT = TypeVar("OutcomeT", ReadOutcome, WriteOutcome)

# Calls that may hang.
READ, WRITE, REMOVAL = "a read", "a write", "a removal"

DEFAULT_PATIENCE_S = 5.0
_JOIN_S = 0.25


class DiskTier:
    """Chunks in files of a directory, created if needed, that no other tier uses.

    Thread-safe. Slots may have any sizes. Opening reads one page of every file. `scan`, `exists`
    and `describe` answer at once. Callers that may block use `store` through `run`.

    limit_bytes: see `store`. sync: see `files`. read_patience_s: how long a read may be in flight;
    write_patience_s: the same for a write or a removal. read_threads, write_threads: how many.
    write_nice: see `nice(2)`.

    Raises ConfigError if a value is invalid, or if the directory cannot be used or is in use by
    another tier, of this process or another.
    """

    name = "disk"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        limit_bytes: int,
        sync: Sync = "none",
        *,
        read_patience_s: float = DEFAULT_PATIENCE_S,
        write_patience_s: float = DEFAULT_PATIENCE_S,
        read_threads: int = 2,
        write_threads: int = 1,
        write_nice: int = 10,
    ) -> None:
        if sync not in SYNC_POLICIES:
            raise ConfigError(f"sync is {sync!r}; it is one of {', '.join(SYNC_POLICIES)}")
        path = Path(directory)
        self.directory = os.fspath(path)
        self.store = DiskStore(ChunkFiles(path, sync), limit_bytes)
        writing_s = write_patience_s
        self._patience_s = {READ: read_patience_s, WRITE: writing_s, REMOVAL: writing_s}
        self._lock_fd = lock_directory(path)
        try:
            self.store.take_over(Scan(path))
        except OSError as error:
            os.close(self._lock_fd)
            raise ConfigError(
                f"the directory {path} cannot be read ({error}): make it readable or choose another"
            ) from error
        self._cancelled: dict[ChunkIO, threading.Event] = {}  # of writes
        self._uncleared: dict[object, bytes] = {}
        self._has_ended: bool | None = None  # None: not closed
        self._reads = WorkerThreads("disk-read", read_threads)
        self._writes = WorkerThreads("disk-write", write_threads, write_nice)
        self._detector = HangDetector("disk tier", self._drop, self._next_clear)

    @property
    def limit_bytes(self) -> int:
        return self.store.index.limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: int) -> None:
        """The next write evicts what is beyond a smaller one."""
        self.store.index.limit_bytes = limit_bytes

    @property
    def used_bytes(self) -> int:
        """What the files take, including those being written or removed."""
        return self.store.index.used_bytes

    @property
    def state(self) -> PlaneState:
        """See the contract. Down while a call hangs."""
        reason = self._detector.reason
        return PlaneState(not reason, True, reason, self._detector.since_s)

    # ----------------------------------------------------------- the contract

    def lookup(self, key: bytes) -> bool:
        return self._is_up and self.store.find(key) is not None

    def scan(self, keys: Keys, deadline: float, done: Done[ScanResult]) -> None:
        done(ScanResult(self._answer, sum(1 for _ in takewhile(self.lookup, keys))))

    def exists(self, keys: Keys, deadline: float, done: Done[ExistsResult]) -> None:
        present = [self.lookup(key) for key in keys]
        done(ExistsResult(self._answer, present if self._is_up else ()))

    def describe(self, keys: Keys, deadline: float, done: Done[FramesResult]) -> None:
        found = ((key, self.store.find(key)) for key in keys)
        frames = [file.cut.frame(key) if file else None for key, file in found]
        done(FramesResult(self._answer, frames if self._is_up else ()))

    def keys(self, prefix: bytes, deadline: float) -> list[bytes]:
        """See the contract. From the index, also while a call hangs."""
        return self.store.keys(prefix)

    def load_all(self, jobs: Sequence[ChunkIO], done: ReadDone, stuck: Stuck) -> None:
        for io in jobs:
            load = partial(self.store.load, io.key, io.frame, io.slots)
            call = partial(self.run, READ, load, partial(stuck, io))
            self._submit(self._reads, io, call, partial(done, io), ReadOutcome)

    def store_all(self, jobs: Sequence[ChunkIO], done: WriteDone, stuck: Stuck) -> None:

        def end(io: ChunkIO, outcome: WriteOutcome) -> None:
            del self._cancelled[io]
            done(io, outcome)

        for io in jobs:
            cancelled = self._cancelled[io] = threading.Event()
            write = partial(self.store.write, io.key, io.frame, io.slots, cancelled.is_set)
            call = partial(self.run, WRITE, write, partial(stuck, io))
            self._submit(self._writes, io, call, partial(end, io), WriteOutcome)

    def cancel(self, job: ChunkIO) -> None:
        """See the contract. A job in flight runs to its end; a write is then not visible."""
        if cancelled := self._cancelled.get(job):
            cancelled.set()
        self._reads.cancel(job)
        self._writes.cancel(job)

    def remove(self, key: bytes, deadline: float, done: Done[RemoveResult]) -> None:
        answer = _first_of(done)

        def remove() -> None:
            stuck = partial(answer, RemoveResult(CallOutcome.UNAVAILABLE))
            removed = self.run(REMOVAL, partial(self.store.remove, key), stuck)
            if removed is None:
                self._refuse(answer)
            else:
                answer(RemoveResult(CallOutcome.DONE, int(removed)))

        self._put(self._reads, object(), remove, partial(self._refuse, answer))

    def clear(self, key_prefix: bytes, deadline: float, done: Done[RemoveResult]) -> None:
        """See the contract. Has no limit as a whole: each file's removal has its own patience."""
        me = object()
        answer = _first_of(done)
        unavailable = RemoveResult(CallOutcome.UNAVAILABLE)

        def clear() -> None:
            stuck = partial(answer, unavailable)
            removals = (partial(self.store.remove, key) for key in self.store.keys(key_prefix))
            removed = sum(self.run(REMOVAL, each, stuck) or False for each in removals)
            if self._is_up:
                self._uncleared.pop(me, None)
            answer(RemoveResult(self._answer, removed))

        self._uncleared[me] = key_prefix
        if self._detector.is_hung():
            answer(unavailable)
        else:
            self._put(self._reads, me, clear, partial(self._refuse, answer))

    def close(self, deadline_s: float) -> bool:
        """See the contract. Queued writes have half of the time, calls in flight the rest."""
        if self._has_ended is not None:
            return self._has_ended
        end_s = time.monotonic() + deadline_s
        self._has_ended = False
        self._reads.stop()
        self._writes.drain(deadline_s / 2)
        self._writes.stop()
        ended = self._detector.close(max(0.0, end_s - time.monotonic()))
        self._has_ended = self._reads.join(_JOIN_S) & self._writes.join(_JOIN_S) & ended
        if self._has_ended:
            self.store.index.clear()
            os.close(self._lock_fd)
        else:
            # A file may still be renamed into the directory.
            logger.warning("the disk does not answer: its directory stays locked by this process")
        return self._has_ended

    def run(self, what: str, call: Callable[[], T], stuck: Action = nothing) -> T | None:
        """Make a blocking call to `store` on this thread.

        what: READ, WRITE or REMOVAL, which selects the patience. stuck: see `HangDetector`. Returns
        None if the call was not made, because another hangs or the tier is closed.
        """
        return self._detector.run(call, what, self._patience_s[what], stuck)

    @property
    def _is_up(self) -> bool:
        return not self._detector.reason

    @property
    def _answer(self) -> CallOutcome:
        return CallOutcome.DONE if self._is_up else CallOutcome.UNAVAILABLE

    @property
    def _refusal(self) -> str:
        """The outcome of a dropped job: the tier hangs, the job was cancelled, or it is closed."""
        return "CANCELLED" if self._is_up else "UNAVAILABLE"

    def _refuse(self, answer: Done[RemoveResult]) -> None:
        answer(RemoveResult(CallOutcome[self._refusal]))

    def _submit(
        self,
        threads: WorkerThreads,
        io: ChunkIO,
        call: Callable[[], OutcomeT | None],
        done: Callable[[OutcomeT], None],
        outcomes: type[OutcomeT],
    ) -> None:
        def run() -> None:
            outcome = outcomes["UNAVAILABLE"]
            try:
                late = time.monotonic() > io.deadline
                outcome = outcomes["TIMED_OUT"] if late else call() or outcome
            finally:
                done(outcome)

        self._put(threads, io, run, lambda: done(outcomes[self._refusal]))

    def _put(self, threads: WorkerThreads, name: object, run: Action, dropped: Action) -> None:
        threads.put(run, dropped, name=name)
        if not self._is_up:
            threads.cancel(name)  # it may have been queued after `_drop`

    def _drop(self) -> None:
        """A call hangs: drops the queued jobs, which must not wait for it."""
        self._reads.drop()
        self._writes.drop()

    def _next_clear(self) -> Action | None:
        """Before the tier comes back: the next clear to carry out, or None."""
        pending = list(self._uncleared.items())
        return partial(self._clear_now, *pending[0]) if pending else None

    def _clear_now(self, me: object, prefix: bytes) -> None:
        for key in self.store.keys(prefix):
            self.store.remove(key)
        self._uncleared.pop(me, None)


def _first_of(done: Done[T]) -> Done[T]:
    """Calls ``done`` with the first answer only: a call that hangs may give two."""
    unanswered = [done]

    def answer(result: T) -> None:
        try:
            first = unanswered.pop()
        except IndexError:
            return
        first(result)

    return answer
