"""Chunks from Redis into slots.

Stripes are taken from one queue in chunk order, so that the stripes of a chunk arrive over all
connections at once. One GET is outstanding on each: a server that has to queue copies of values is
slower. A chunk is LOADED if all its stripes are good and of one store. A reader deletes nothing:
whoever computes the chunk that it missed stores it again.

A value counts only if its header is exactly the expected one and its payload has the checksum that
the header names. A wrong value that is ours beyond doubt, because it has a damaged header with our
magic and version, is CORRUPT. Any other is FOREIGN: another type, another magic or version, another
layout or chunk, cut into stripes otherwise, no header at all.

A reader with keys expects sealed values, one without keys plain ones. A payload is opened in its
slot, by the thread that received it, while the kernel receives others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from lmcache_redis.chunks.frame import (
    HEADER_BYTES,
    MAGIC,
    STORE_ID,
    ChunkFrame,
    Verdict,
)
from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.errors import (
    RedisError,
    RedisRedirect,
    RedisUnavailable,
    RedisWriteRefused,
)
from lmcache_redis.resp.bulk import MOST_TASKS, End, Packed, StripeFailure, is_other_type
from lmcache_redis.resp.jobs import ChunkJob, Stop, StripeTask
from lmcache_redis.resp.lanes import BulkWorker, Lane
from lmcache_redis.resp.net.wire import get_command, value_head
from lmcache_redis.seal import Opened, SealKeys
from lmcache_redis.tiers import ChunkIO, ReadDone, ReadOutcome

# Stripes that are received, then opened together: meanwhile the kernel receives the next.
_OPENED_TOGETHER = 4
# The rest of an unused reply arrives within this time, or the connection is closed.
_DROP_WITHIN_S = 0.1


class Verified(NamedTuple):
    """The verdict on what was found for a stripe.

    outcome: None if the stripe is good; store_id is its store then.
    """

    outcome: ReadOutcome | None
    store_id: bytes = b""


def verify(
    frame: ChunkFrame,
    index: int,
    failure: StripeFailure,
    payload: memoryview,
    checksums: bool = True,
    is_sealed: bool = False,
) -> Verified | None:
    """Judge what was found for stripe `index` of a chunk; None if the failure is not the value's.

    checksums: whether to compare the payload's checksum, too. is_sealed: whether the value must be
    sealed; a mover that found the expected header has not failed.
    """
    end, _, data = failure
    if end == End.NOTHING:
        return Verified(ReadOutcome.INCOMPLETE)
    if is_other_type(failure):
        return Verified(ReadOutcome.FOREIGN)
    if end not in (End.MISMATCH, End.OTHER_LENGTH):
        return None
    check = frame.check_header(data, index, is_sealed)
    if check.ok and end == End.MISMATCH and not is_sealed:
        if not checksums or xxh3_64_intdigest(payload) == check.checksum:
            return Verified(None, check.store_id)
        return Verified(ReadOutcome.CORRUPT)
    if check.verdict in (Verdict.NOT_SEALED, Verdict.SEALED):
        return Verified(ReadOutcome.NOT_OPENED)
    # A header cut short before the version is CORRUPT_HEADER, too: the magic decides.
    if check.ok or (check.verdict is Verdict.CORRUPT_HEADER and data[: len(MAGIC)] == MAGIC):
        return Verified(ReadOutcome.CORRUPT)
    return Verified(ReadOutcome.FOREIGN)


def _judge_opened(opened: Opened, header: bytes) -> Verified:
    """Judge a stripe whose header is the expected one, after an attempt to open its payload."""
    if opened is Opened.OK:
        return Verified(None, header[STORE_ID])
    unknown = opened is Opened.UNKNOWN_KEY
    return Verified(ReadOutcome.NOT_OPENED if unknown else ReadOutcome.CORRUPT)


class Read(ChunkJob[ReadOutcome]):
    """One chunk being read."""

    __slots__ = ("_first_is_there", "_has_gap", "_store_id")
    good = ReadOutcome.LOADED

    def __init__(self, chunk: ChunkIO, done: ReadDone, now: float) -> None:
        super().__init__(chunk, done, now)
        self._store_id = b""
        self._first_is_there = False
        # A stripe is missing, and nothing is known of stripe 0.
        self._has_gap = False

    def pack(self, index: int, is_sealed: bool, ttl_s: int) -> Packed:
        """What a mover needs to load stripe `index`. ttl_s: see `wire.get_command`."""
        chunk = self.chunk
        payload = chunk.slots[index]
        header = chunk.frame.bare_header(index, is_sealed=is_sealed)
        expected = value_head(HEADER_BYTES + payload.nbytes) + header
        return get_command(stripe_key(chunk.key, index), ttl_s), expected, payload, b""

    def loaded(self, index: int, store_id: bytes) -> None:
        """Under the lock: stripe `index` was in flight, and is in its slot, undamaged."""
        is_only = self.steps_left == 1 and not self._store_id and not self._has_gap
        if is_only or (store_id == self._store_id and index):
            self.in_flight -= 1
            self.advance()
        else:
            self.ended(index, Verified(None, store_id))

    def ended(self, index: int, verified: Verified) -> None:
        """Under the lock: stripe `index` was in flight, and has ended, well or not."""
        outcome, store_id = verified
        if outcome is None and not self._store_id:
            self._store_id = store_id
        elif outcome is None and store_id != self._store_id:
            outcome = ReadOutcome.TORN
        elif outcome is ReadOutcome.INCOMPLETE and index == 0:
            outcome = ReadOutcome.MISSING
        elif outcome is ReadOutcome.INCOMPLETE and not self._first_is_there:
            # MISSING if stripe 0 is, too: a store may be in flight.
            self._has_gap, outcome = True, None
        if index == 0 and outcome is not ReadOutcome.MISSING:
            self._first_is_there = True
            if outcome is None and self._has_gap:
                outcome = ReadOutcome.INCOMPLETE
        self.in_flight -= 1
        self.advance(outcome)


class Reader(BulkWorker):
    """A thread with GET connections."""

    _is_load = True
    # Receives what is left of unused replies.
    _scratch = memoryview(b"")

    @property
    def _seal_keys(self) -> SealKeys | None:
        return self._server.options.seal_keys

    @property
    def _checksums(self) -> bool:
        # A sealed payload is verified by its tag.
        return self._server.options.verify_checksums and self._seal_keys is None

    @property
    def _most_tasks(self) -> int:
        return MOST_TASKS if self._seal_keys is None else _OPENED_TOGETHER

    def _pack(self, task: StripeTask) -> Packed:
        job, index, _ = task
        options = self._server.options
        # A server that takes no writes takes no GETEX either.
        refreshes = options.ttl_refresh and self._server.write_state.refusal is None
        ttl_s = options.ttl_s if refreshes else 0
        packed: Packed = job.pack(index, options.seal_keys is not None, ttl_s)
        return packed

    def _succeeded(self, done: Sequence[tuple[StripeTask, bytes]]) -> None:
        if self._seal_keys is not None:
            self._open_all(self._seal_keys, done)
            return
        with self._jobs.lock:
            for (job, index, _), store_id in done:
                job.loaded(index, store_id)
        self._jobs.conclude([job for (job, _, _), _ in done])

    def _open_all(self, keys: SealKeys, done: Sequence[tuple[StripeTask, bytes]]) -> None:
        """The headers are the expected ones; the payloads are in their slots, still sealed."""
        for (job, index, _), header in done:
            chunk: ChunkIO = job.chunk
            key, payload = stripe_key(chunk.key, index), chunk.slots[index]
            verified = _judge_opened(keys.open(key, header, payload), header)
            with self._jobs.lock:
                job.ended(index, verified)
            self._jobs.conclude((job,))

    def _failed(
        self, lane: Lane, task: StripeTask, failure: StripeFailure, error: RedisError | None
    ) -> None:
        job, index, _ = task
        verified = verify(
            job.chunk.frame,
            index,
            failure,
            job.chunk.slots[index],
            self._checksums,
            self._seal_keys is not None,
        )
        if verified is not None:
            with self._jobs.lock:
                job.ended(index, verified)
            self._jobs.conclude((job,))
        elif error is not None:
            self._lost(lane, task, error)

    def _lost(self, lane: Lane, task: StripeTask, error: RedisError) -> None:
        job = task[0]
        self._jobs.release((job,))
        if isinstance(error, RedisRedirect):
            if not self._server.redirect(task, error):
                self._health.note(error)
                self._jobs.stop((job,), Stop.UNAVAILABLE)
            return
        if isinstance(error, RedisWriteRefused) and self._server.options.ttl_refresh:
            # It refuses the GETEX: a GET follows.
            self._server.refuses_writes(error)
            self._queue.put((task,), urgent=True)
            return
        self._judge(error, lane.connection)
        if isinstance(error, RedisUnavailable) and self._may_retry(job, lane.connection):
            self._queue.put((task,), urgent=True)
            return
        self._jobs.stop((job,), self._stop_for(error))

    def _release_ended(self, now: float) -> None:
        ended: list[Read] = []
        for lane in self._lanes.busy:
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
