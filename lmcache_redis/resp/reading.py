"""Chunks from Redis into slots.

Stripes are taken from one queue in chunk order, so that the stripes of a chunk arrive over all
connections at once. One GET is outstanding on each: a server that has to queue copies of values is
slower. A chunk is LOADED if all its stripes are good and of one store. Otherwise what was found is
removed, if it is ours.

A value counts only if its header is exactly the expected one and its payload has the checksum that
the header names. A wrong value is ours beyond doubt if it has a whole header of this very chunk
(cut into stripes otherwise, or moved), or a damaged one with our magic and version. Then its chunk
is removed. Any other may belong to other clients, and stays: another type, another magic or
version, another layout or chunk, no header at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from lmcache_redis.errors import (
    FormatError,
    RedisError,
    RedisRedirect,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.keys import stripe_key
from lmcache_redis.resp.bulk import Call, End, Failure, Moved, Packed, is_other_type
from lmcache_redis.resp.jobs import Job, Jobs, Stop
from lmcache_redis.resp.lanes import BulkWorker, Lane
from lmcache_redis.resp.net.wire import get_command, value_head
from lmcache_redis.resp.outcomes import ChunkIO, ReadDone, ReadOutcome
from lmcache_redis.resp.worker import Task
from lmcache_redis.stripe import HEADER_BYTES, MAGIC, ChunkFrame, Verdict, describe_header

# Called with a chunk key and a stripe count.
Remove = Callable[[bytes, int], None]
# A header that names this chunk, but not this stripe of it.
_OF_THIS_CHUNK = frozenset({Verdict.WRONG_SIZE, Verdict.WRONG_STRIPE})
# The rest of an unused reply arrives within this time, or the connection is closed.
_DROP_WITHIN_S = 0.1


class Verified(NamedTuple):
    """The verdict on what was found for a stripe.

    outcome: None if the stripe is good; store_id is its store then. remove_stripes: how many
    stripes of the chunk to remove.
    """

    outcome: ReadOutcome | None
    store_id: bytes = b""
    remove_stripes: int = 0


def verify(
    frame: ChunkFrame, index: int, failure: Failure, payload: memoryview, checksums: bool = True
) -> Verified | None:
    """Judge what was found for stripe `index` of a chunk; None if the failure is not the value's.

    checksums: whether to compare the payload's checksum, too.
    """
    end, _, data = failure
    if end == End.NOTHING:
        return Verified(ReadOutcome.INCOMPLETE, remove_stripes=frame.stripe_count)
    if is_other_type(failure):
        return Verified(ReadOutcome.FOREIGN)
    if end not in (End.MISMATCH, End.OTHER_LENGTH):
        return None
    check = frame.check_header(data, index)
    if check.ok and end == End.MISMATCH:
        if not checksums or xxh3_64_intdigest(payload) == check.checksum:
            return Verified(None, check.store_id)
        return Verified(ReadOutcome.CORRUPT, remove_stripes=frame.stripe_count)
    if check.verdict in _OF_THIS_CHUNK:
        return Verified(ReadOutcome.FOREIGN, remove_stripes=_stripes(frame, data))
    # A header cut short before the version is CORRUPT_HEADER, too: the magic decides.
    if check.ok or (check.verdict is Verdict.CORRUPT_HEADER and data[: len(MAGIC)] == MAGIC):
        return Verified(ReadOutcome.CORRUPT, remove_stripes=frame.stripe_count)
    return Verified(ReadOutcome.FOREIGN)


def _stripes(frame: ChunkFrame, header: bytes) -> int:
    """How many stripes the chunk has at most, by its frame or by the header found."""
    try:
        return max(frame.stripe_count, describe_header(header).stripe_count)
    except FormatError:
        return frame.stripe_count


class Read(Job[ReadOutcome]):
    """One chunk being read; a step is a stripe. ttl_s: see `wire.get_command`."""

    __slots__ = (
        "_done",
        "_first_is_there",
        "_hole",
        "_remove",
        "_remove_stripes",
        "_store_id",
        "_ttl_s",
        "chunk",
    )
    good = ReadOutcome.LOADED

    def __init__(self, chunk: ChunkIO, done: ReadDone, remove: Remove, now: float, ttl_s: int):
        super().__init__(chunk.frame.stripe_count, chunk.deadline, now)
        self.chunk = chunk
        self._done = done
        self._remove = remove
        self._ttl_s = ttl_s
        self._store_id = b""
        self._first_is_there = False
        self._hole = 0  # stripes to remove if stripe 0 exists, but another one does not
        self._remove_stripes = 0

    def pack(self, index: int) -> Packed:
        """What a mover needs to load stripe `index`."""
        chunk = self.chunk
        payload = chunk.slots[index]
        expected = value_head(HEADER_BYTES + payload.nbytes) + chunk.frame.unsealed_header(index)
        return get_command(stripe_key(chunk.key, index), self._ttl_s), expected, payload, b""

    def loaded(self, index: int, store_id: bytes) -> None:
        """Under the lock: stripe `index` was in flight, and is in its slot, undamaged."""
        is_only = self.steps_left == 1 and not self._store_id and not self._hole
        if is_only or (store_id == self._store_id and index):
            self.in_flight -= 1
            self.advance()
        else:
            self.ended(index, Verified(None, store_id))

    def ended(self, index: int, verified: Verified) -> None:
        """Under the lock: stripe `index` was in flight, and has ended, well or not."""
        outcome, store_id, remove_stripes = verified
        if outcome is None and not self._store_id:
            self._store_id = store_id
        elif outcome is None and store_id != self._store_id:
            outcome, remove_stripes = ReadOutcome.TORN, self.chunk.frame.stripe_count
        elif outcome is ReadOutcome.INCOMPLETE:
            outcome, remove_stripes = self._one_is_missing(index, remove_stripes)
        if index == 0 and outcome is not ReadOutcome.MISSING:
            self._first_is_there = True
            if outcome is None and self._hole:
                outcome, remove_stripes = ReadOutcome.INCOMPLETE, self._hole
        self._remove_stripes = max(self._remove_stripes, remove_stripes)
        self.in_flight -= 1
        self.advance(outcome)

    def _one_is_missing(self, index: int, remove_stripes: int) -> tuple[ReadOutcome | None, int]:
        """It is a hole only if stripe 0 exists: otherwise a store may be in flight."""
        if index == 0:
            return ReadOutcome.MISSING, 0
        if self._first_is_there:
            return ReadOutcome.INCOMPLETE, remove_stripes
        self._hole = remove_stripes
        return None, 0

    def leave(self, jobs: Jobs) -> None:
        jobs.transfers.pop(self.chunk, None)
        outcome = self.outcome
        if outcome is not None:
            jobs.reads[outcome] += 1
        if outcome is ReadOutcome.LOADED:
            jobs.bytes_in += self.chunk.frame.chunk_bytes

    def answer(self, outcome: ReadOutcome) -> None:
        chunk = self.chunk
        del self.chunk  # a queue may still hold the job, but must not hold a slot
        try:
            # Before the callback, which may store the chunk again.
            if self._remove_stripes:
                self._remove(chunk.key, self._remove_stripes)
        finally:
            self._done(chunk, outcome)


class Reader(BulkWorker):
    """A thread with GET connections."""

    # Receives what is left of unused replies.
    _scratch = memoryview(b"")

    def _pack(self, task: Task) -> Packed:
        job, index, _ = task
        packed: Packed = job.pack(index)
        return packed

    def _transfer(self, call: Call) -> Moved:
        return self._mover.load(call._replace(verify=self._server.options.verify_checksums))

    def _sent(self, jobs: Collection[Any]) -> bool:
        return False

    def _succeeded(self, done: Sequence[tuple[Task, bytes]]) -> None:
        with self._jobs.lock:
            for (job, index, _), store_id in done:
                job.loaded(index, store_id)
        self._jobs.conclude([job for (job, _, _), _ in done])

    def _failed(self, lane: Lane, task: Task, failure: Failure, error: RedisError | None) -> None:
        job, index, _ = task
        checksums = self._server.options.verify_checksums
        verified = verify(job.chunk.frame, index, failure, job.chunk.slots[index], checksums)
        if verified is not None:
            with self._jobs.lock:
                job.ended(index, verified)
            self._jobs.conclude((job,))
        elif error is not None:
            self._lost(lane, task, error)

    def _lost(self, lane: Lane, task: Task, error: RedisError) -> None:
        job = task[0]
        self._jobs.release((job,))
        if isinstance(error, RedisRedirect):
            if not self._server.redirect(task, error):
                self._health.note(error)
                self._jobs.stop((job,), Stop.UNAVAILABLE)
            return
        self._judge(error, lane.connection)
        if isinstance(error, RedisUnavailable) and self._may_retry(job, lane.connection):
            self._queue.put((task,), urgent=True)
            return
        late = isinstance(error, RedisTimeout)
        self._jobs.stop((job,), Stop.TIMED_OUT if late else Stop.UNAVAILABLE)

    def _release_ended(self, now: float) -> None:
        ended: list[Read] = []
        for lane in self._busy:
            if lane.task is None:
                continue
            job = lane.task[0]
            if job.outcome is None and job.deadline > now:
                continue
            command, header, slot, end = lane.packed
            if self._scratch.nbytes < slot.nbytes:
                self._scratch = memoryview(bytearray(slot.nbytes))
            lane.packed = command, header, self._scratch[: slot.nbytes], end
            lane.task = None
            lane.until = min(lane.until, now + _DROP_WITHIN_S)
            ended.append(job)
        if not ended:
            return
        self._jobs.stop(ended, Stop.TIMED_OUT)
        if any(job.deadline <= now for job in ended):
            self._health.suspect(self._late)
        self._jobs.release(ended)
