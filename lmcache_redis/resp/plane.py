"""The Redis data plane: chunks between slots and Redis; every call is answered.

Each data server is a `DataNode` with threads and connections of its own: readers, writers, one
controller, one health prober. A timekeeper without a connection answers jobs that are late or
cannot be tried. Callers submit jobs from any thread without blocking. Each callback is called
exactly once, on a thread of the plane, by the job's deadline (a wait on a socket may overrun it by
milliseconds). A callback should only enqueue.

When a server goes down (`health`), all pending jobs that need it are answered UNAVAILABLE, and so
are new ones until a probe finds it up. docs/internals/data-plane.md lists the faults and their
effects.
"""

from __future__ import annotations

import logging
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from lmcache_redis import native
from lmcache_redis.chunks.frame import STORE_ID_BYTES
from lmcache_redis.resp.calls import KeyCalls
from lmcache_redis.resp.jobs import Job, Jobs, JobT, Stop, StripeTask
from lmcache_redis.resp.node import DataNodes
from lmcache_redis.resp.options import RedisOptions, parse_deployment
from lmcache_redis.resp.removals import Removals
from lmcache_redis.resp.transfers import Read, Write
from lmcache_redis.tiers import (
    ChunkIO,
    PlaneState,
    PlaneStats,
    ReadDone,
    ReadOutcome,
    WriteDone,
    WriteOutcome,
)

logger = logging.getLogger(__name__)

# Enqueued together: a thread works on these while the next are prepared.
_BATCH_STRIPES = 32


class RedisPlane(KeyCalls):
    """See the module. A tier of a cache (`lmcache_redis.tiers`) without an index.

    Every job ends by its deadline: none is ever stuck. Raises ConfigError on construction for a URL
    that names no server.
    """

    name = "Redis"

    def __init__(self, options: RedisOptions) -> None:
        self.options = options
        self.deployment = parse_deployment(options)
        jobs = Jobs()
        super().__init__(DataNodes(self.deployment, options, jobs), jobs)
        # Seeded by the operating system: no two planes give a store the same id.
        self._random = random.Random()

    def start(self) -> None:
        """Start the threads. Returns at once, whether the server is reachable or not.

        Raises RuntimeError if the process may not have the threads.
        """
        if self._jobs.started:
            raise RuntimeError("a Redis plane is started once")
        if (keys := self.options.seal_keys) is not None:
            first, *others = [key_id.hex() for key_id in keys.ids]
            more = ", ".join(others) or "no other"
            logger.info("values are sealed with the key %s, and opened with it and %s", first, more)
        if native.moves is None:
            logger.warning("Stripes are moved by Python, which is slower: %s", native.why_not)
        self._jobs.timekeeper.start()
        try:
            self._nodes.start()
        except BaseException:
            self._jobs.close(self.options.op_timeout_s)
            raise
        self._jobs.started = True

    @property
    def removals(self) -> Removals:
        """For who wants to know what servers evict and expire."""
        return self._nodes.removals

    def wait_probed(self, timeout_s: float) -> PlaneState:
        """Wait until every server was probed, at most `timeout_s`; return the state then."""
        return self._nodes.wait_probed(timeout_s)

    def close(self, deadline_s: float) -> bool:
        """Finish writes for at most `deadline_s`, cancel everything else, end all threads.

        Every callback has been called on return. Takes a little longer than `deadline_s` if Redis
        does not answer. Returns False if a thread did not end (it is a daemon).
        """
        jobs = self._jobs
        if not jobs.started or jobs.closing:
            return True
        jobs.closing = True
        deadline = time.monotonic() + deadline_s
        # Every callback is called on a thread of the plane: the timekeeper stops the jobs.
        post = jobs.post
        post(lambda: jobs.stop_all(Stop.CANCELLED, but=Write))
        jobs.wait_empty(deadline)
        post(lambda: jobs.stop_all(Stop.CANCELLED))
        timeout_s = self.options.connect_timeout_s + self.options.op_timeout_s
        left = self._nodes.close(timeout_s)
        # Jobs that were submitted in the meantime.
        post(lambda: jobs.stop_all(Stop.CANCELLED))
        left += not jobs.close(timeout_s)
        if left:
            logger.warning("%d threads of the Redis plane did not end", left)
        return not left

    @property
    def state(self) -> PlaneState:
        """Up or down, and why. A cluster is up while any of its shards is."""
        return self._nodes.state

    @property
    def where(self) -> str:
        """The servers, for messages: their addresses, without credentials."""
        return self.deployment.where

    @property
    def open_streams(self) -> int:
        return self._nodes.open_streams

    def stats(self) -> PlaneStats:
        """Counts since the start, taken at one moment."""
        jobs = self._jobs
        with jobs.lock:
            connects, connections_lost, errors = self._nodes.counts
            transfers = list(jobs.transfers.values())
            return PlaneStats(
                bytes_in=jobs.moved_bytes[ReadOutcome.LOADED],
                bytes_out=jobs.moved_bytes[WriteOutcome.STORED],
                reads={outcome: jobs.counts[outcome] for outcome in ReadOutcome},
                writes={outcome: jobs.counts[outcome] for outcome in WriteOutcome},
                connects=connects,
                connections_lost=connections_lost,
                errors=errors,
                queued_reads=sum(isinstance(job, Read) for job in transfers),
                queued_writes=sum(isinstance(job, Write) for job in transfers),
            )

    def lookup(self, key: bytes) -> None:
        """None for every key: only the servers know."""

    def load_all(self, chunks: Sequence[ChunkIO], done: ReadDone) -> None:
        """Load chunks into their slots, in this order; `done` is called for each.

        Slots belong to the plane until `done`. Many chunks at once are cheaper than one by one.
        """
        self._check(chunks, writable=True)
        for some in _batches(chunks):
            now = time.monotonic()
            accepted = self._enter(some, [Read(chunk, done, now) for chunk in some])
            for node, tasks in _by_node(accepted).items():
                node.reads.put(tasks)
            # A server may have gone down, or the plane been closed, in the meantime.
            self._jobs.refuse(accepted)

    def store_all(self, chunks: Sequence[ChunkIO], done: WriteDone) -> None:
        """Store chunks from their slots, in this order; `done` is called for each.

        Slots must not change until `done`.
        """
        self._check(chunks, writable=False)
        for some in _batches(chunks):
            now = time.monotonic()
            unix_ms = max(0, int(time.time() * 1000))
            # Chunks of one stripe cannot be torn: they share an id.
            store_id = self._new_store_id()
            jobs: list[Write] = []
            for chunk in some:
                if chunk.frame.stripe_count > 1:
                    store_id = self._new_store_id()
                jobs.append(Write(chunk, done, now, store_id, unix_ms))
            # Those that must be sealed, and whose headers have no room for it.
            is_sealed = self.options.seal_keys is not None
            unfit = [job for job in jobs if is_sealed and not job.chunk.frame.has_room_for_seal]
            accepted = self._enter(some, jobs)
            if unfit:
                self._jobs.post(partial(self._jobs.stop, unfit, WriteOutcome.NO_ROOM_FOR_SEAL))
                accepted = [job for job in accepted if job not in unfit]
            for node, tasks in _by_node(accepted).items():
                # Stripe 0 follows the others, unless it is the only one.
                node.put_writes([task for task in tasks if task[1] or len(task[0].nodes) == 1])
            self._jobs.refuse(accepted)

    def cancel(self, chunk: ChunkIO) -> None:
        """End a read or write early: CANCELLED as soon as no socket uses its slots.

        Does nothing if the chunk was answered or its outcome is known.
        """
        job = self._jobs.transfers.get(chunk)
        if job is not None:
            self._jobs.post(lambda: self._jobs.stop((job,), Stop.CANCELLED))

    def _check(self, chunks: Sequence[ChunkIO], writable: bool) -> None:
        """Raises ValueError or RuntimeError before any chunk is started."""
        for chunk in chunks:
            chunk.check(writable)
        self._jobs.check_usable()
        if len(set(chunks)) < len(chunks) or not self._jobs.transfers.keys().isdisjoint(chunks):
            raise RuntimeError("the chunk is being read or written already")

    def _enter(self, chunks: Sequence[ChunkIO], jobs: Sequence[JobT]) -> Sequence[JobT]:
        """Route and register jobs, which can be cancelled from now on; return those to queue."""
        nodes_of = self._nodes.routes.nodes_of
        for chunk, job in zip(chunks, jobs, strict=True):
            job.nodes = nodes_of(chunk.key, chunk.frame.stripe_count)
        self._jobs.transfers.update(zip(chunks, jobs, strict=True))
        return self._jobs.enter(jobs)

    def _new_store_id(self) -> bytes:
        return self._random.getrandbits(8 * STORE_ID_BYTES).to_bytes(STORE_ID_BYTES, "little")


def _by_node(jobs: Sequence[Job[Any]]) -> dict[Any, list[StripeTask]]:
    """The stripes of the jobs, in order."""
    by_node: dict[Any, list[StripeTask]] = defaultdict(list)
    for job in jobs:
        for index, node in enumerate(job.nodes):
            by_node[node].append((job, index, None))
    return by_node


def _batches(chunks: Sequence[ChunkIO]) -> Iterator[Sequence[ChunkIO]]:
    """Batches of chunks: the first is in flight while the others are prepared."""
    batch: list[ChunkIO] = []
    stripes = 0
    for chunk in chunks:
        batch.append(chunk)
        stripes += chunk.frame.stripe_count
        if stripes >= _BATCH_STRIPES:
            yield batch
            batch, stripes = [], 0
    if batch:
        yield batch
