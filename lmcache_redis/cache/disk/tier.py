"""The disk tier, a `tiers.Tier`: jobs on threads, and detection of a disk that hangs.

Two threads read, remove and clear, in the order of the jobs; one thread at a low priority writes.
Each thread has a buffer: what it reads is copied into the slots when it is complete, what it writes
is copied from them first. So a job whose time is up, or that is cancelled, ends at once, whatever
the disk does: a read is then dropped, and a write does not become visible.

A call that exceeds its patience takes the tier down: nothing is found, and every job is answered
UNAVAILABLE. The tier comes back when all calls have returned. Clears requested meanwhile are
carried out before anything is found again.

A directory belongs to one tier at a time. A tier that is closed while a call hangs keeps its
directory locked, because the call may still change it.
"""

from __future__ import annotations

import enum
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from lmcache_redis.cache.disk.files import SYNC_POLICIES, ChunkFiles, Sync, lock_directory
from lmcache_redis.cache.disk.scan import Scan
from lmcache_redis.cache.disk.store import DiskStore
from lmcache_redis.cache.threads import Action, HangDetector, WorkerThreads
from lmcache_redis.errors import ConfigError
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

logger = logging.getLogger(__name__)

Keys = Sequence[bytes]
_Bytes: TypeAlias = "npt.NDArray[np.uint8]"

T = TypeVar("T")

# Calls that may hang.
READ, WRITE, REMOVAL = "a read", "a write", "a removal"

DEFAULT_PATIENCE_S = 5.0
_JOIN_S = 0.25
# A larger buffer is not kept.
_KEPT_BUFFER_BYTES = 64 << 20


class _Pending(NamedTuple):
    """A job that has not ended. end: answers it with the outcome of that name."""

    deadline_s: float
    end: Callable[[str], None]


class DiskTier:
    """Chunks in files of a directory, created if needed, that no other tier uses.

    Thread-safe. Slots may have any sizes. `scan`, `exists` and `describe` answer at once. Callers
    that may block use `store` through `run`.

    Opening reads one page of every file: in the constructor, or if `in_background` on a thread. The
    tier is then down until that has ended.

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
        in_background: bool = False,
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
            if in_background:
                os.scandir(path).close()
            else:
                self.store.take_over(Scan(path))
        except OSError as error:
            os.close(self._lock_fd)
            raise ConfigError(
                f"the directory {path} cannot be read ({error}): make it readable or choose another"
            ) from error
        self._pending: dict[object, _Pending] = {}  # whoever takes one out answers it
        self._buffers = threading.local()
        self._uncleared: dict[object, bytes] = {}
        self._has_ended: bool | None = None  # None: not closed
        self._reads = WorkerThreads("disk-read", read_threads)
        self._writes = WorkerThreads("disk-write", write_threads, write_nice)
        self._detector = HangDetector("disk tier", self._end_late, self._next_clear)
        if in_background:
            up = self._detector.hold_down("its files are being read")
            self._writes.put(partial(self._read_directory, path, up), dropped=up)

    @property
    def limit_bytes(self) -> int:
        return self.store.limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: int) -> None:
        """The next write evicts what is beyond a smaller one."""
        self.store.limit_bytes = limit_bytes

    @property
    def used_bytes(self) -> int:
        """What the files take, including those being written or removed."""
        return self.store.used_bytes

    @property
    def state(self) -> PlaneState:
        """See the contract. Down while a call hangs."""
        reason = self._detector.reason
        return PlaneState(not reason, True, reason, self._detector.since_s)

    # ----------------------------------------------------------- the contract

    def lookup(self, key: bytes) -> bool:
        return self._is_up and self.store.find(key) is not None

    def scan(self, keys: Keys, deadline: float, done: Done[ScanResult]) -> None:
        done(ScanResult(self._answer_now, sum(1 for _ in takewhile(self.lookup, keys))))

    def exists(self, keys: Keys, deadline: float, done: Done[ExistsResult]) -> None:
        present = [self.lookup(key) for key in keys]
        done(ExistsResult(self._answer_now, present if self._is_up else ()))

    def refresh(
        self, chunks: Sequence[tuple[bytes, int]], deadline: float, done: Done[ExistsResult]
    ) -> None:
        """See the contract. No I/O: after a restart the use is forgotten."""
        for key, _ in chunks:
            self.store.keep(key)
        self.exists([key for key, _ in chunks], deadline, done)

    def describe(self, keys: Keys, deadline: float, done: Done[FramesResult]) -> None:
        found = ((key, self.store.find(key)) for key in keys)
        frames = [file.cut.frame(key) if file else None for key, file in found]
        done(FramesResult(self._answer_now, frames if self._is_up else ()))

    def keys(self, prefix: bytes, deadline: float, limit: int) -> KeysResult:
        """See the contract. From the index, also while a call hangs."""
        found = self.store.keys(prefix)
        is_over = len(found) > limit
        return KeysResult(CallOutcome.OVER_LIMIT if is_over else CallOutcome.DONE, found[:limit])

    def load_all(self, jobs: Sequence[ChunkIO], done: ReadDone) -> None:
        for io in jobs:
            self._begin_job(self._reads, io, partial(self._load, io, done), done, ReadOutcome)

    def store_all(self, jobs: Sequence[ChunkIO], done: WriteDone) -> None:
        for io in jobs:
            self._begin_job(self._writes, io, partial(self._store, io, done), done, WriteOutcome)

    def cancel(self, job: ChunkIO) -> None:
        """See the contract."""
        self._end(job, "CANCELLED")

    def remove(self, key: bytes, deadline: float, done: Done[RemoveResult]) -> None:
        me = object()

        def remove() -> None:
            removed = self.run(REMOVAL, partial(self.store.remove, key))
            if removed is None:
                self._end(me)
            else:
                self._answer(me, done, RemoveResult(CallOutcome.DONE, int(removed)))

        self._begin(self._reads, me, deadline, remove, partial(_end_removal, done))

    def clear(self, key_prefix: bytes, deadline: float, done: Done[RemoveResult]) -> None:
        """See the contract. Goes on after its deadline: each file's removal has its patience."""
        me = object()

        def clear() -> None:
            removals = (partial(self.store.remove, key) for key in self.store.keys(key_prefix))
            removed = sum(self.run(REMOVAL, each) or False for each in removals)
            if self._is_up:
                self._uncleared.pop(me, None)
            self._answer(me, done, RemoveResult(self._answer_now, removed))

        self._uncleared[me] = key_prefix
        if self._detector.is_hung():
            done(RemoveResult(CallOutcome.UNAVAILABLE))
        else:
            self._begin(self._reads, me, deadline, clear, partial(_end_removal, done))

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
        for name in self._pending.copy():
            self._end(name)
        self._has_ended = self._reads.join(_JOIN_S) & self._writes.join(_JOIN_S) & ended
        if self._has_ended:
            self.store.forget()
            os.close(self._lock_fd)
        else:
            # A file may still be renamed into the directory.
            logger.warning("the disk does not answer: its directory stays locked by this process")
        return self._has_ended

    def run(self, what: str, call: Callable[[], T]) -> T | None:
        """Make a blocking call to `store` on this thread.

        what: READ, WRITE or REMOVAL, which selects the patience. Returns None if the call was not
        made, because another hangs or the tier is closed.
        """
        return self._detector.run(call, what, self._patience_s[what])

    @property
    def _is_up(self) -> bool:
        return not self._detector.reason

    @property
    def _answer_now(self) -> CallOutcome:
        return CallOutcome.DONE if self._is_up else CallOutcome.UNAVAILABLE

    # ------------------------------------------------------------ on the threads

    def _read_directory(self, path: Path, up: Action) -> None:
        try:
            scan = Scan(path, is_stopped=lambda: self._has_ended is not None)
            if self._has_ended is None:
                self.store.take_over(scan)
        except OSError as error:
            reason = f"the directory {path} cannot be read ({error})"
            logger.error("the disk tier stays down: %s", reason)
            self._detector.stay_down(reason)
        else:
            up()

    def _load(self, io: ChunkIO, done: ReadDone) -> None:
        if io not in self._pending:
            return
        buffer = self._buffer(io.frame.chunk_bytes)
        load = partial(self.store.load, io.key, io.frame, [buffer])
        outcome = self.run(READ, load) or ReadOutcome.UNAVAILABLE
        if self._pending.pop(io, None) is not None:
            if outcome is ReadOutcome.LOADED:
                for slot, piece in _pieces(io, buffer):
                    np.copyto(slot, piece)
            done(io, outcome)

    def _store(self, io: ChunkIO, done: WriteDone) -> None:
        if io not in self._pending:
            return
        buffer = self._buffer(io.frame.chunk_bytes)
        for slot, piece in _pieces(io, buffer):
            np.copyto(piece, slot)
        # If it ends while its slots are copied, they may change meanwhile: it is not visible then.
        write = partial(
            self.store.write, io.key, io.frame, [buffer], lambda: io not in self._pending
        )
        outcome = self.run(WRITE, write) or WriteOutcome.UNAVAILABLE
        if self._pending.pop(io, None) is not None:
            done(io, outcome)

    def _buffer(self, nbytes: int) -> memoryview:
        """Memory of this thread until its next job."""
        kept: bytearray = getattr(self._buffers, "kept", bytearray())
        if len(kept) < nbytes:
            kept = bytearray(nbytes)
            if nbytes <= _KEPT_BUFFER_BYTES:
                self._buffers.kept = kept
        return memoryview(kept)[:nbytes]

    # ---------------------------------------------------------------- their ends

    def _begin_job(
        self,
        threads: WorkerThreads,
        io: ChunkIO,
        run: Action,
        done: Callable[[ChunkIO, Any], None],
        outcomes: type[enum.Enum],
    ) -> None:
        self._begin(threads, io, io.deadline, run, lambda name: done(io, outcomes[name]))

    def _begin(
        self,
        threads: WorkerThreads,
        name: object,
        deadline_s: float,
        run: Action,
        end: Callable[[str], None],
    ) -> None:
        self._pending[name] = _Pending(deadline_s, end)
        threads.put(partial(self._run, run, name), partial(self._end, name), name=name)
        self._detector.look_at(deadline_s)
        if not self._is_up:
            self._end(name)  # it may have been queued after `_end_late`

    def _run(self, run: Action, name: object) -> None:
        try:
            run()
        finally:
            self._end(name, "UNAVAILABLE")  # only if a bug kept it from its end

    def _answer(self, name: object, done: Done[T], result: T) -> None:
        if self._pending.pop(name, None) is not None:
            done(result)

    def _end(self, name: object, outcome: str = "") -> None:
        """Answers a job that has not ended. By default: the tier hangs, or is closed."""
        pending = self._pending.pop(name, None)
        if pending is not None:
            pending.end(outcome or ("CANCELLED" if self._is_up else "UNAVAILABLE"))
            self._reads.cancel(name)
            self._writes.cancel(name)

    def _end_late(self, now_s: float) -> float:
        """Answers what is late; everything if a call hangs. Returns the next deadline."""
        for name, pending in self._pending.copy().items():
            if not self._is_up:
                self._end(name)
            elif pending.deadline_s <= now_s:
                self._end(name, "TIMED_OUT")
        left = self._pending.copy().values()
        return min((pending.deadline_s for pending in left), default=math.inf)

    def _next_clear(self) -> Action | None:
        """Before the tier comes back: the next clear to carry out, or None."""
        pending = list(self._uncleared.items())
        return partial(self._clear_now, *pending[0]) if pending else None

    def _clear_now(self, me: object, prefix: bytes) -> None:
        for key in self.store.keys(prefix):
            self.store.remove(key)
        self._uncleared.pop(me, None)


def _end_removal(done: Done[RemoveResult], outcome: str) -> None:
    done(RemoveResult(CallOutcome[outcome]))


def _pieces(io: ChunkIO, buffer: memoryview) -> Iterator[tuple[_Bytes, _Bytes]]:
    """Each slot with its piece of the buffer, as arrays: numpy copies them without the GIL."""
    at = 0
    for slot in io.slots:
        piece = buffer[at : at + len(slot)]
        at += len(slot)
        yield np.frombuffer(slot, np.uint8), np.frombuffer(piece, np.uint8)
