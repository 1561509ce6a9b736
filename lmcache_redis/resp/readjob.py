"""A chunk on its way in, and small ones that come together."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from lmcache_redis.keys import stripe_key
from lmcache_redis.resp.bundles import Bundle, Single
from lmcache_redis.resp.jobs import JobRegistry, Stop
from lmcache_redis.resp.moving import LEAST_PAYLOAD_BYTES, Packed
from lmcache_redis.resp.outcomes import ChunkIO, ReadOutcome
from lmcache_redis.resp.routes import Hop
from lmcache_redis.resp.verify import Verified
from lmcache_redis.resp.wire import (
    end_of_command,
    get_command,
    get_command_without_end,
    value_head,
)
from lmcache_redis.stripe import HEADER_BYTES

ReadDone = Callable[[ChunkIO, ReadOutcome], None]
# Called with a finished read's chunk, its outcome and how many stripes are to be removed.
ReadSettled = Callable[[ChunkIO, ReadOutcome, int], None]
# Called with chunks of a bundle: nothing of them is to be removed.
ReadsSettled = Callable[[Sequence[ChunkIO], ReadOutcome], None]

_INDEX_BYTES = 2
_INDEX = struct.Struct(">H")
_FIRST_STRIPE = stripe_key(b"", 0)


class ReadJob(Single[ReadOutcome]):
    """One chunk on its way in; a step is a stripe."""

    __slots__ = (
        "_chunk",
        "_command_end",
        "_command_head",
        "_done",
        "_first_is_there",
        "_hole",
        "_remove_stripes",
        "_settled",
        "_store_id",
        "frame",
        "key",
    )

    def __init__(
        self,
        chunk: ChunkIO,
        done: ReadDone,
        settled: ReadSettled,
        registry: JobRegistry,
        refresh_ttl_s: int = 0,
    ) -> None:
        self._chunk: ChunkIO | None = chunk
        self._done: ReadDone | None = done
        self._settled: ReadSettled | None = settled
        self.key = chunk.key
        self.frame = chunk.frame
        # All GETs of the chunk but for the index of the stripe, with which the key ends.
        key = stripe_key(chunk.key, 0)
        self._command_head = get_command_without_end(key, _INDEX_BYTES, refresh_ttl_s)
        self._command_end = end_of_command(refresh_ttl_s)
        self._store_id = b""
        self._first_is_there = False
        self._hole = 0  # stripes to remove if there is a stripe 0 beside a missing one
        self._remove_stripes = 0
        super().__init__(chunk.frame.stripe_count, ReadOutcome.LOADED, chunk.deadline, registry)

    @property
    def chunk(self) -> ChunkIO:
        """Only between `begin` and the end of that step, when it cannot have been let go."""
        if self._chunk is None:
            raise RuntimeError("the chunk of a read was given back while a step used it")
        return self._chunk

    def has(self, chunk: ChunkIO) -> bool:
        """See `Single.has`."""
        return self._chunk is chunk

    def command(self, index: int) -> bytes:
        """The packed GET of a stripe."""
        return self._command_head + _INDEX.pack(index) + self._command_end

    def pack(self, index: int) -> Packed | None:
        """A stripe for the compiled part, if it is for that; where `chunk` may be asked for."""
        chunk = self.chunk
        payload = chunk.slots[index]
        if payload.nbytes < LEAST_PAYLOAD_BYTES:
            return None
        expected = value_head(HEADER_BYTES + payload.nbytes) + chunk.frame.unsealed_header(index)
        return self.command(index), expected, payload, b""

    def tasks(self) -> list[AnyRead]:
        """The stripes in order."""
        return [(self, index, None) for index in range(self.frame.stripe_count)]

    def moved(self, indices: Sequence[int], store_ids: Sequence[bytes]) -> None:
        """The compiled part has received these stripes and found them good."""
        for index, store_id in zip(indices, store_ids, strict=True):
            self.end_stripe(index, Verified(None, store_id))

    def end_stripe(self, index: int, verified: Verified) -> None:
        """Stripe `index` is in its slot, or is not: see `verified`."""
        outcome, store_id, remove_stripes = verified
        if outcome is None and store_id == self._store_id and index:
            self.end()
            return
        with self._lock:
            if outcome is None and not self._store_id:
                self._store_id = store_id
            elif outcome is None and store_id != self._store_id:
                outcome = ReadOutcome.TORN
                remove_stripes = self.chunk.frame.stripe_count
            elif outcome is ReadOutcome.INCOMPLETE:
                outcome, remove_stripes = self._one_is_missing(index, remove_stripes)
            if index == 0 and outcome is not ReadOutcome.MISSING:
                self._first_is_there = True
                if outcome is None and self._hole:
                    outcome, remove_stripes = ReadOutcome.INCOMPLETE, self._hole
            self._remove_stripes = max(self._remove_stripes, remove_stripes)
        self.end(outcome)

    def _one_is_missing(self, index: int, remove_stripes: int) -> tuple[ReadOutcome | None, int]:
        """Only beside a stripe 0 is it a hole: without one, a store may be under way."""
        if index == 0:
            return ReadOutcome.MISSING, 0
        if self._first_is_there:
            return ReadOutcome.INCOMPLETE, remove_stripes
        self._hole = remove_stripes
        return None, 0

    def _answer(self, outcome: ReadOutcome) -> None:
        chunk, done, settled = self._chunk, self._done, self._settled
        self._chunk = self._done = self._settled = None
        if chunk is None or done is None or settled is None:
            raise RuntimeError("a read is answered twice")
        settled(chunk, outcome, self._remove_stripes)
        done(chunk, outcome)


class ReadBundle(Bundle[ReadOutcome, ReadJob]):
    """Chunks of one stripe each on their way in."""

    __slots__ = ("_done", "_refresh_ttl_s", "_settled", "_settled_all")

    def __init__(
        self,
        chunks: Sequence[ChunkIO],
        done: ReadDone,
        settled: ReadSettled,
        settled_all: ReadsSettled,
        registry: JobRegistry,
        refresh_ttl_s: int = 0,
    ) -> None:
        super().__init__(chunks, ReadOutcome.LOADED, registry)
        self._done = done
        self._settled = settled
        self._settled_all = settled_all
        self._refresh_ttl_s = refresh_ttl_s

    def tasks(self) -> list[AnyRead]:
        """The chunks in order."""
        return [(self, step, None) for step in range(len(self._all))]

    def pack(self, step: int) -> Packed | None:
        """A chunk for the compiled part, if it is for that; its step has begun."""
        chunk = self.chunk(step)
        (payload,) = chunk.slots
        if payload.nbytes < LEAST_PAYLOAD_BYTES:
            return None
        command = get_command(chunk.key + _FIRST_STRIPE, self._refresh_ttl_s)
        expected = value_head(HEADER_BYTES + payload.nbytes) + chunk.frame.unsealed_header(0)
        return command, expected, payload, b""

    def moved(self, steps: Sequence[int], store_ids: Sequence[bytes]) -> None:
        """The compiled part has received these chunks and found them good."""
        self.end_well(steps, begun=True)

    def _make_single(self, chunk: ChunkIO, step: int) -> ReadJob:
        return ReadJob(chunk, self._done, self._settled, self._registry, self._refresh_ttl_s)

    def _make_ended(self, step: int) -> ReadJob:
        chunk = self.answered(step)
        job = ReadJob(chunk, _nobody, _nobody, self._registry, self._refresh_ttl_s)
        job.stop(Stop.CANCELLED)
        return job

    def _settle(self, chunks: Sequence[ChunkIO], outcome: ReadOutcome) -> None:
        self._settled_all(chunks, outcome)
        for chunk in chunks:
            self._tell(self._done, chunk, outcome)


def _nobody(*_: object) -> None:
    """Told what nobody waits for."""


# A stripe to get: the job of its chunk, its index, and the redirection it has followed, if any.
ReadTask = tuple[ReadJob, int, Hop | None]
# Or a chunk of a bundle, and its step.
AnyRead = ReadTask | tuple[ReadBundle, int, None]
