"""Write-behind: chunks of the host pool are written to a tier in the background.

Each tier has one queue, bounded in bytes. A chunk that does not fit, or that the tier does not
store, stays in the host pool and is counted; the next store of the chunk enqueues it again.

    waiting   until its delay has passed; then one call asks the tier which of the due chunks it
              has: those are not written again
    ready     until it is its turn (`pacing`)
    writing   by the tier. If the tier did not answer that call, the outcome of the write says why

A chunk is pinned, and counts against the limit, from when it is enqueued until the tier is done.

A full queue drops what would be written last.

`write` replaces what the tier has under the key and `remove` removes it, both without asking first.
Writes and removals of one key run one after the other, in the order of the calls (`KeyLock`). A
write whose entry is discarded before it begins is skipped.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from lmcache_redis.cache.backing import Backing
from lmcache_redis.cache.pacing import TransferRate, Turns, order
from lmcache_redis.cache.pool import Entry, EntryState, HostPool
from lmcache_redis.cache.threads import Action, KeyLock, Owner, Timer
from lmcache_redis.metrics import Metrics
from lmcache_redis.tiers import (
    CallOutcome,
    ChunkIO,
    Done,
    ExistsResult,
    RemoveResult,
    WriteOutcome,
)

logger = logging.getLogger(__name__)

# Chunks that are due within this time, such as those of one prefill, go to the tier in one batch.
_BATCH_WINDOW_S = 0.005


class WriteBehind:
    """The queue from the host pool to tier number ``index``. Owned by the owner's thread.

    loads: those from the tier, which its writes give way to. limit_bytes: may change; what is
    queued beyond a smaller one is still written.
    """

    def __init__(
        self,
        backing: Backing,
        index: int,
        owner: Owner,
        pool: HostPool,
        metrics: Metrics,
        loads: TransferRate,
    ) -> None:
        self.queued_bytes = 0
        self.limit_bytes = backing.write_limit_bytes
        self._backing = backing
        self._tier = backing.tier
        self._counters = backing.counters
        self._index = index
        self._bit = 1 << index
        self._owner = owner
        self._pool = pool
        self._metrics = metrics
        self._jobs: dict[Entry, ChunkIO] = {}
        # Those of them that the tier was not asked about yet, with their due times.
        self._waiting: dict[Entry, tuple[ChunkIO, float]] = {}
        self._turns = Turns(loads)
        self._timer: Timer | None = None  # for the end of their waiting
        self._is_stopping = False
        self._locks = KeyLock(owner)
        self._writing: dict[bytes, ChunkIO] = {}  # by key
        self._done_calls: dict[Entry, Callable[[WriteOutcome], None]] = {}  # of `write`
        self._removing: Counter[bytes] = Counter()  # keys of removals
        self._warned_of: WriteOutcome | None = None

    def __len__(self) -> int:
        """Writes and removals that have not ended."""
        return len(self._jobs) + self._removing.total()

    def admits(self, entry: Entry, nbytes: int) -> bool:
        """Whether to enqueue a READY entry. Counts a chunk that is dropped.

        False if it is already enqueued, if the tier is known to have it, or if it is dropped.
        """
        known = self._tier.lookup(entry.key)
        if entry in self._jobs or (entry.stored_in & self._bit if known is None else known):
            return False
        return self._has_room(nbytes, entry)

    def enqueue(self, entry: Entry, job: ChunkIO, delay_s: float) -> None:
        """Pins an admitted entry; its job is due in ``delay_s`` seconds."""
        self._hold(entry, job)
        self._waiting[entry] = (job, time.monotonic() + delay_s)
        self._owner.after(delay_s, self._begin_due)

    def write(self, entry: Entry, job: ChunkIO, done: Callable[[WriteOutcome], None]) -> None:
        """Writes a READY entry without delay, in place of what the tier has under its key.

        done: called once, while the entry is still pinned. UNAVAILABLE also if the write is
        dropped.
        """
        if not self._has_room(job.frame.chunk_bytes):
            done(WriteOutcome.UNAVAILABLE)
            return
        self._hold(entry, job)
        self._done_calls[entry] = done
        self._write([job])

    def remove(self, key: bytes, deadline_s: float, done: Done[RemoveResult]) -> None:
        """Removes a chunk from the tier after earlier writes of it; cancels one in flight."""
        writing = self._writing.get(key)
        if writing is not None:
            self._tier.cancel(writing)
        self._removing[key] += 1

        def begin() -> None:
            try:
                self._tier.remove(
                    key, deadline_s, lambda result: self._owner.post(partial(end, result))
                )
            except Exception:
                end(RemoveResult(CallOutcome.UNAVAILABLE))  # our own bug; the owner logs it
                raise

        def end(result: RemoveResult) -> None:
            self._removing[key] -= 1
            if not self._removing[key]:
                del self._removing[key]
            self._locks.release(key)
            done(result)

        self._locks.acquire(key, begin)

    def is_removing(self, key: bytes) -> bool:
        """Whether a removal is in flight: the tier may still find the chunk."""
        return key in self._removing

    def wait_for(self, key: bytes, when_ended: Callable[[Action], None]) -> None:
        """Holds the key's lock until ``when_ended`` calls the action that it is given."""
        self._locks.acquire(key, partial(when_ended, partial(self._locks.release, key)))

    def cancel(self, entry: Entry) -> None:
        """Cancels the write of a discarded entry."""
        job = self._jobs.get(entry)
        if job is None:
            return
        if self._take_back(job):
            self._written(job, WriteOutcome.CANCELLED)
        else:
            self._tier.cancel(job)

    def begin_all(self) -> None:
        """Starts all writes now, because the owner is stopping."""
        self._is_stopping = True
        self._begin(list(self._waiting))
        self.begin_ready()

    def _begin_due(self) -> None:
        by_s = time.monotonic() + _BATCH_WINDOW_S
        self._begin([entry for entry, (_, due_s) in self._waiting.items() if due_s <= by_s])

    def _begin(self, entries: list[Entry]) -> None:
        """Asks the tier which of the chunks it has; writes the others."""
        if not entries:
            return
        jobs = [self._waiting.pop(entry)[0] for entry in entries]
        with self._released_on_error(jobs):
            keys = [job.key for job in jobs]
            if self._tier.lookup(keys[0]) is not None:
                present = [bool(self._tier.lookup(key)) for key in keys]
                self._asked(jobs, ExistsResult(CallOutcome.DONE, present))
                return
            self._tier.exists(
                keys,
                time.monotonic() + self._backing.exists_timeout_s,
                lambda result: self._owner.post(partial(self._asked, jobs, result)),
            )

    def _asked(self, jobs: Sequence[ChunkIO], result: ExistsResult) -> None:
        for job, present in zip(jobs, result.present or [False] * len(jobs), strict=True):
            if present:
                self._skip(job)
            elif (
                result.outcome is CallOutcome.CANCELLED
                or _entry_of(job).state is EntryState.DISCARDED
            ):
                self._written(job, WriteOutcome.CANCELLED)
            else:
                self._turns.ready[_entry_of(job)] = job
        self.begin_ready()

    def begin_ready(self) -> None:
        """Begins the writes whose turn it is. The cache calls this when loads have ended."""
        now_s = time.monotonic()
        jobs = self._turns.begin_all() if self._is_stopping else self._turns.begin(now_s)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._turns.ready and (until_s := self._turns.waits_until(now_s)) > now_s:
            self._timer = self._owner.at(until_s, self.begin_ready)
        for job in jobs:
            if _entry_of(job).state is EntryState.DISCARDED:
                self._written(job, WriteOutcome.CANCELLED)
        self._write([job for job in jobs if _entry_of(job).state is not EntryState.DISCARDED])

    def _write(self, jobs: Sequence[ChunkIO]) -> None:
        """Begins the writes whose keys are unlocked now, and the others when they are."""
        free: list[ChunkIO] = []
        for job in jobs:
            if self._locks.try_acquire(job.key):
                free.append(job)
            else:
                self._locks.wait(job.key, partial(self._acquired, job))
        if free:
            self._begin_writes(free)

    def _acquired(self, job: ChunkIO) -> None:
        """A waiting write has the lock of its key."""
        if _entry_of(job).state is EntryState.DISCARDED:
            self._writing[job.key] = job
            self._written(job, WriteOutcome.CANCELLED)
        else:
            self._begin_writes((job,))

    def _begin_writes(self, jobs: Sequence[ChunkIO]) -> None:
        for job in jobs:
            self._writing[job.key] = job
        with self._released_on_error(jobs):
            self._tier.store_all(jobs, self._done)

    @contextmanager
    def _released_on_error(self, jobs: Sequence[ChunkIO]) -> Iterator[None]:
        """After a bug of ours, which the owner logs, releases pins and queue bytes of the jobs."""
        try:
            yield
        except Exception:
            for job in jobs:
                if self._jobs.get(_entry_of(job)) is job:
                    self._written(job, WriteOutcome.UNAVAILABLE)
            raise

    # On a thread of the tier.

    def _done(self, job: ChunkIO, outcome: WriteOutcome) -> None:
        self._owner.post(partial(self._written, job, outcome))

    def _skip(self, job: ChunkIO) -> None:
        """The tier has the chunk."""
        self._pool.known_in(_entry_of(job), self._index)
        self._release(job)
        if self._counters.is_remote:
            self._metrics.count("skipped_chunks")

    def _written(self, job: ChunkIO, outcome: WriteOutcome) -> None:
        entry = _entry_of(job)
        if outcome is WriteOutcome.STORED:
            self._pool.known_in(entry, self._index)
            self._metrics.count(self._counters.stored_chunks)
            self._metrics.count(self._counters.stored_bytes, job.frame.chunk_bytes)
            self._warned_of = None
        elif entry.state is not EntryState.DISCARDED:
            self._metrics.count(self._counters.drops[outcome])
            if self._counters.is_remote and self._warned_of is not outcome:
                self._warned_of = outcome
                logger.warning(
                    "chunks are not written to %s: %s (they are counted, and logged once)",
                    self._tier.name,
                    outcome.value,
                )
        if self._writing.get(job.key) is not job:
            self._release(job)
            return
        del self._writing[job.key]
        try:
            if entry in self._done_calls:
                self._done_calls.pop(entry)(outcome)
        finally:
            self._locks.release(job.key)
            self._release(job)

    def _has_room(self, nbytes: int, entry: Entry | None = None) -> bool:
        """Whether the tier is up and the queue has room. Counts what is dropped.

        entry: makes room for it by dropping others that would be written after it.
        """
        if not self._tier.state.up:
            self._metrics.count(self._counters.drops[WriteOutcome.UNAVAILABLE])
            return False
        lacking = self.queued_bytes + nbytes - self.limit_bytes
        if lacking <= 0:
            return True
        later: list[Entry] = []
        if entry is not None:
            queued, own = (*self._turns.ready, *self._waiting), order(entry)
            later = [each for each in queued if order(each) > own]
        if sum(self._jobs[each].frame.chunk_bytes for each in later) < lacking:
            self._metrics.count(self._counters.queue_full)
            return False
        later.sort(key=order)
        while lacking > 0:
            job = self._jobs[later.pop()]
            lacking -= job.frame.chunk_bytes
            self._metrics.count(self._counters.queue_full)
            self._take_back(job)
            self._release(job)
        return True

    def _take_back(self, job: ChunkIO) -> bool:
        """Takes a job that has not begun out of the queue; False if it has."""
        entry = _entry_of(job)
        was_waiting = self._waiting.pop(entry, None) is not None
        return self._turns.ready.pop(entry, None) is not None or was_waiting

    def _hold(self, entry: Entry, job: ChunkIO) -> None:
        self._pool.pin(entry)
        self._jobs[entry] = job
        self.queued_bytes += job.frame.chunk_bytes

    def _release(self, job: ChunkIO) -> None:
        """The tier is done with the entry: undoes `_hold`."""
        entry = _entry_of(job)
        del self._jobs[entry]
        self.queued_bytes -= job.frame.chunk_bytes
        self._pool.unpin(entry)
        self._turns.ended(job, time.monotonic(), is_stored=bool(entry.stored_in & self._bit))
        if self._turns.ready:
            self._owner.post(self.begin_ready)


def _entry_of(job: ChunkIO) -> Entry:
    assert isinstance(job.tag, Entry)
    return job.tag
