"""The Redis data plane: chunks between slots and Redis; every call is answered.

Each data server is a `Node` with threads and connections of its own: readers, writers, one
controller, one health prober. A timekeeper without a connection answers jobs that are late or
cannot be tried. Callers submit jobs from any thread and never wait. Each callback is called exactly
once, on a thread of the plane, by the job's deadline (a wait on a socket may overrun it by
milliseconds), and must only enqueue.

When a server goes down (`health`), all pending jobs that need it are answered UNAVAILABLE, and so
are new ones until a probe finds it up. docs/data-plane.md lists the faults and what follows.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from lmcache_redis import native
from lmcache_redis.keys import stripe_key
from lmcache_redis.resp.calls import KeyCalls
from lmcache_redis.resp.control import Removal
from lmcache_redis.resp.jobs import Jobs, Stop, TaskQueue
from lmcache_redis.resp.net.endpoint import parse_deployment
from lmcache_redis.resp.net.options import RedisOptions
from lmcache_redis.resp.node import Node, Nodes
from lmcache_redis.resp.outcomes import (
    ChunkIO,
    PlaneState,
    PlaneStats,
    ReadOutcome,
    WriteOutcome,
)
from lmcache_redis.resp.reading import Read
from lmcache_redis.resp.worker import Task
from lmcache_redis.resp.writing import Write
from lmcache_redis.stripe import STORE_ID_BYTES

logger = logging.getLogger(__name__)

# Enqueued together: a thread starts on these while the next are being prepared.
_BATCH_STRIPES = 32


class RedisPlane(KeyCalls):
    """See the module. Raises ConfigError on construction for a URL that names no server."""

    def __init__(self, options: RedisOptions) -> None:
        self.options = options
        self.deployment = parse_deployment(options)
        jobs = Jobs()
        super().__init__(Nodes(self.deployment, options, jobs), jobs)
        # Seeded by the operating system: no two planes give a store the same id.
        self._random = random.Random()

    # ------------------------------------------------------------- life cycle

    def start(self) -> None:
        """Start the threads; returns at once, whether the server is there or not."""
        if self._jobs.started:
            raise RuntimeError("a Redis plane is started once")
        self._jobs.started = True
        if native.moves is None:
            logger.warning("Stripes are moved by Python, which is slower: %s", native.why_not)
        self._jobs.timekeeper.start()
        self._nodes.start()

    def wait_probed(self, timeout_s: float) -> PlaneState:
        """Wait until every server was asked once, or the time is over; the state then."""
        return self._nodes.wait_probed(timeout_s)

    def close(self, deadline_s: float) -> bool:
        """Finish writes for at most `deadline_s`, cancel everything else, end all threads.

        Every callback has been called on return. Takes a little longer than `deadline_s`
        when Redis does not answer; False if a thread could not be ended (it is a daemon).
        """
        jobs = self._jobs
        if not jobs.started or jobs.closing:
            return True
        jobs.closing = True
        deadline = time.monotonic() + deadline_s
        # Every callback is called on a thread of the plane: the timekeeper stops the jobs.
        post = jobs.timekeeper.post
        post(lambda: jobs.stop_all(Stop.CANCELLED, but=(Write, Removal)))
        jobs.wait_empty(deadline)
        post(lambda: jobs.stop_all(Stop.CANCELLED))
        timeout_s = self.options.connect_timeout_s + self.options.op_timeout_s
        left = self._nodes.close(timeout_s)
        # What was submitted meanwhile.
        post(lambda: jobs.stop_all(Stop.CANCELLED))
        jobs.closed = True
        left += not jobs.timekeeper.close(timeout_s)
        if left:
            logger.warning("%d threads of the Redis plane did not end", left)
        return not left

    # ------------------------------------------------------------ what it is

    @property
    def state(self) -> PlaneState:
        """Up or down, and why. A cluster is up as long as any of its shards is."""
        return self._nodes.state

    @property
    def where(self) -> str:
        """The servers, for messages: their addresses, without credentials."""
        return self.deployment.where

    @property
    def open_streams(self) -> int:
        """Connections that are open."""
        return self._nodes.open_streams

    def stats(self) -> PlaneStats:
        """Counts since the start, all of one moment."""
        jobs = self._jobs
        with jobs.lock:
            connects, connections_lost, errors = self._nodes.counts
            transfers = list(jobs.transfers.values())
            return PlaneStats(
                bytes_in=jobs.bytes_in,
                bytes_out=jobs.bytes_out,
                reads=dict(jobs.reads),
                writes=dict(jobs.writes),
                calls=dict(jobs.calls),
                keys_scanned=jobs.keys_scanned,
                keys_removed=jobs.keys_removed,
                connects=connects,
                connections_lost=connections_lost,
                errors=errors,
                queued_reads=sum(isinstance(job, Read) for job in transfers),
                queued_writes=sum(isinstance(job, Write) for job in transfers),
            )

    # ---------------------------------------------------------------- chunks

    def read(self, chunk: ChunkIO, done: Callable[[ChunkIO, ReadOutcome], None]) -> None:
        """Load a chunk into its slots, which are the plane's until `done`."""
        self.read_all((chunk,), done)

    def read_all(
        self, chunks: Sequence[ChunkIO], done: Callable[[ChunkIO, ReadOutcome], None]
    ) -> None:
        """Load chunks, in this order; `done` is called for each. Cheaper than one by one."""
        self._check(chunks, writable=True)
        ttl_s = self.options.ttl_s if self.options.ttl_refresh else 0
        remove = self.remove
        for some in _batches(chunks):
            now = time.monotonic()
            jobs = [Read(chunk, done, remove, now, ttl_s) for chunk in some]
            nodes = self._place(some, jobs)
            accepted = self._jobs.enter(jobs)
            by_node: dict[Node, list[Task]] = {}
            for job in accepted:
                for index, node in enumerate(nodes[job]):
                    if node not in by_node:
                        by_node[node] = []
                    by_node[node].append((job, index, None))
            for node, tasks in by_node.items():
                node.reads.put(tasks)
            # A server may have gone, or the plane been closed, while they were queued.
            self._jobs.refuse(accepted)

    def write(self, chunk: ChunkIO, done: Callable[[ChunkIO, WriteOutcome], None]) -> None:
        """Store a chunk from its slots, which must not change until `done`."""
        self.write_all((chunk,), done)

    def write_all(
        self, chunks: Sequence[ChunkIO], done: Callable[[ChunkIO, WriteOutcome], None]
    ) -> None:
        """Store chunks, in this order; `done` is called for each. Cheaper than one by one."""
        self._check(chunks, writable=False)
        remove = self.remove
        for some in _batches(chunks):
            now = time.monotonic()
            unix_ms = max(0, int(time.time() * 1000))
            # Chunks of one stripe cannot be torn: one id does for all of them.
            store_id = self._new_store_id()
            jobs: list[Write] = []
            for chunk in some:
                if chunk.frame.stripe_count > 1:
                    store_id = self._new_store_id()
                jobs.append(Write(chunk, done, remove, now, store_id, unix_ms))
            nodes = self._place(some, jobs)
            accepted = self._jobs.enter(jobs)
            removals = self._jobs.removals
            is_clear = removals.is_empty()
            by_queue: dict[TaskQueue[Task], list[Task]] = {}
            for job in accepted:
                queues = [node.writes(job.chunk_key) for node in nodes[job]]
                job.first_queue = queues[0]
                # Stripe 0 goes when all others are there.
                placed = [(queues[n], (job, n, None)) for n in range(len(queues) > 1, len(queues))]
                if is_clear or not removals.wait(job.chunk_key, partial(_put_all, placed)):
                    for queue, task in placed:
                        by_queue.setdefault(queue, []).append(task)
            for queue, tasks in by_queue.items():
                queue.put(tasks)
            self._jobs.refuse(accepted)

    def cancel(self, chunk: ChunkIO) -> None:
        """End a read or write early: CANCELLED as soon as no socket uses its slots.

        Does nothing if the chunk was answered or its outcome is decided.
        """
        job = self._jobs.transfers.get(chunk)
        if job is not None:
            self._jobs.timekeeper.post(lambda: self._jobs.stop((job,), Stop.CANCELLED))

    def _check(self, chunks: Sequence[ChunkIO], writable: bool) -> None:
        """Check all chunks before any is started."""
        for chunk in chunks:
            chunk.check(writable)
        self._jobs.check_usable()
        if len(set(chunks)) < len(chunks) or not self._jobs.transfers.keys().isdisjoint(chunks):
            raise RuntimeError("the chunk is being read or written already")

    def _place(self, chunks: Sequence[ChunkIO], jobs: Sequence[Any]) -> dict[Any, list[Any]]:
        """The node of each stripe of each job; from here on the jobs can be cancelled."""
        routes = self._nodes.routes
        nodes: dict[Any, list[Any]] = {}
        single = routes.node_of(b"")
        for chunk, job in zip(chunks, jobs, strict=True):
            if routes.is_cluster:
                keys = [stripe_key(chunk.key, index) for index in range(chunk.frame.stripe_count)]
                nodes[job] = [routes.node_of(key) for key in keys]
                job.nodes = tuple(dict.fromkeys(nodes[job]))
            else:
                nodes[job] = [single] * chunk.frame.stripe_count
                job.nodes = (single,)
        self._jobs.transfers.update(zip(chunks, jobs, strict=True))
        return nodes

    def _new_store_id(self) -> bytes:
        return self._random.getrandbits(8 * STORE_ID_BYTES).to_bytes(STORE_ID_BYTES, "little")


def _put_all(placed: Sequence[tuple[TaskQueue[Task], Task]]) -> None:
    for queue, task in placed:
        queue.put((task,))


def _batches(chunks: Sequence[ChunkIO]) -> Iterator[Sequence[ChunkIO]]:
    """Batches of chunks: the first are in flight while the others are being prepared."""
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
