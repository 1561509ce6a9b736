"""Warming: chunks are loaded into the free part of the host pool before a lookup asks for them.

`lmcache-redis warm` names them, a batch at a time, and names the next batch when one is answered:
when the command ends, so does the warming. Engines come first:

- A chunk takes free slots only. Nothing is evicted for it.
- Its load begins only while no lookup loads or waits for room, and while the disk tier's queue has
  room for the stores of engines. A batch that takes too long is answered with the rest "busy".
- Until an engine asks for it, it is evicted before all chunks of engines (`Entry.is_ahead`).

A chunk is loaded as for a lookup: under the same key, cut for this agent's slots, from disk or from
Redis, with all checks, and from Redis it goes to disk too. The message gives its layout's
fingerprint and its size. Every header is compared with both, and the fingerprint covers the size
(`KVLayout.fingerprint`): a lookup never finds a chunk of another size than its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from lmcache_redis import messages as m
from lmcache_redis.agent.agent import Agent
from lmcache_redis.agent.transfers import Reply
from lmcache_redis.cache.cache import load_of
from lmcache_redis.cache.pool import Filled
from lmcache_redis.cache.threads import Timer
from lmcache_redis.chunks.metadata import RemoteMetadata
from lmcache_redis.chunks.names import ChunkForm, ChunkNames
from lmcache_redis.errors import FormatError, WireError
from lmcache_redis.tiers import ChunkIO, ReadOutcome

# In flight at a time, or one larger chunk: a lookup that comes in between waits for no more.
_WINDOW_BYTES = 8 << 20
_POLL_S = 0.01
# A batch is answered after the sum of both at the latest.
_BEGIN_WITHIN_S = 5.0
_LOAD_DEADLINE_S = 10.0
# Of the write queue of a disk tier: the rest is for stores.
_DISK_QUEUE_SHARE = 0.5

_OUTCOMES: dict[ReadOutcome | None, m.WarmOutcome] = {
    ReadOutcome.MISSING: "missing",
    ReadOutcome.INCOMPLETE: "missing",
    ReadOutcome.TORN: "damaged",
    ReadOutcome.CORRUPT: "damaged",
    ReadOutcome.FOREIGN: "damaged",
    ReadOutcome.NOT_OPENED: "damaged",
}


class Warming:
    """Begins batches. Owned by the loop thread. in_flight_bytes: of the loads of all batches."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.in_flight_bytes = 0

    def warm(self, question: m.Warm, reply: Reply) -> None:
        """Answers when the batch has ended. Raises ``WireError`` for chunks that cannot exist."""
        config = self.agent.config
        forms: dict[tuple[bytes, str, int, bytes], ChunkForm] = {}
        chunks = []
        for each in question.chunks:
            which = (each.fingerprint, each.model_name, each.kv_rank, each.metadata)
            try:
                if which not in forms:
                    names = ChunkNames(each.fingerprint, config.key_prefix)
                    metadata = RemoteMetadata.deserialize(each.metadata)
                    forms[which] = ChunkForm.of(
                        names, each.model_name, each.kv_rank, metadata, config.slot_bytes
                    )
            except FormatError as error:
                raise WireError(f"a chunk to warm: {error}") from error
            chunks.append((forms[which], each.chunk_hash))
        _Batch(self, chunks, reply).run()

    def must_wait(self, nbytes: int) -> bool:
        """Whether a load of so many bytes must not begin now."""
        cache = self.agent.cache
        loading = sum(rate.in_flight_bytes for rate in cache.rates)
        disk_is_behind = any(
            queue.queued_bytes + self.in_flight_bytes > queue.limit_bytes * _DISK_QUEUE_SHARE
            for queue in cache.queues[:-1]
        )
        return (
            loading > self.in_flight_bytes  # lookups load
            or len(cache.waiting) > 0
            or disk_is_behind
            or (self.in_flight_bytes > 0 and self.in_flight_bytes + nbytes > _WINDOW_BYTES)
        )


class _Batch:
    """The chunks of one question."""

    def __init__(
        self, warming: Warming, chunks: Sequence[tuple[ChunkForm, bytes]], reply: Reply
    ) -> None:
        self._warming = warming
        self._cache = warming.agent.cache
        self._chunks = chunks
        self._reply = reply
        self._outcomes: dict[int, m.WarmOutcome] = {}
        self._loading = 0
        self._until_s = time.monotonic() + _BEGIN_WITHIN_S
        self._waiting: Timer | None = None

    def run(self) -> None:
        """Begins loads until all have begun or one has to wait; answers when all have ended."""
        for number in range(len(self._outcomes) + self._loading, len(self._chunks)):
            outcome = self._begin(number)
            if outcome == "busy" and time.monotonic() < self._until_s:
                self._waiting = self._cache.owner.after(_POLL_S, self._resume)
                return
            if outcome in ("busy", "full"):
                self._outcomes |= dict.fromkeys(range(number, len(self._chunks)), outcome)
                break
            if outcome is not None:
                self._outcomes[number] = outcome
        self._answer()

    def _resume(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
            self.run()

    def _begin(self, number: int) -> m.WarmOutcome | None:
        """Begins a load; the outcome if there is nothing to load, or not now."""
        cache, (form, chunk_hash) = self._cache, self._chunks[number]
        key = form.key(chunk_hash)
        if key in cache.pool:
            return "held"
        if cache.units(form) > cache.pool.free:
            return "full"
        level = cache.level_of(key)
        if level is None:
            return "failed"
        if self._warming.must_wait(form.chunk_bytes):
            return "busy"
        deadline_s = time.monotonic() + _LOAD_DEADLINE_S
        job = cache.prepare_load(form, key, chunk_hash, level, deadline_s)
        if job is None:
            return "full"
        entry = load_of(job).entry
        entry.is_ahead = True
        cache.pool.watch(entry, lambda filled: self._filled(number, job, filled))
        self._loading += 1
        self._warming.in_flight_bytes += form.chunk_bytes
        cache.begin_loads((job,))
        return None

    def _filled(self, number: int, job: ChunkIO, filled: Filled) -> None:
        self._loading -= 1
        self._warming.in_flight_bytes -= job.frame.chunk_bytes
        if filled is Filled.READY:
            self._cache.metrics.count("warmed_chunks")
            self._outcomes[number] = "loaded"
        else:
            self._outcomes[number] = _OUTCOMES.get(load_of(job).outcome, "failed")
        if self._waiting is None:
            self._answer()
        else:
            self._cache.owner.post(self._resume)  # loads may end in the middle of `begin_loads`

    def _answer(self) -> None:
        if len(self._outcomes) == len(self._chunks):
            self._reply(m.Warmed(0, tuple(self._outcomes[n] for n in range(len(self._chunks)))))
