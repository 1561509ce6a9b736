"""The Redis data plane: chunks between slots and Redis, every call answered.

Each data server is a `Node` with threads and connections of its own: readers, writers, one
controller, one health prober. There is one node, or with Sentinel the master's, or one for each
shard of a cluster; a `Watcher` keeps the map of those two. A timekeeper without a connection
answers what is late or cannot be tried. Callers hand in jobs from any thread and never wait. Each
callback is called exactly once, on a thread of the plane, by the job's deadline (a wait on a
socket may overrun it by milliseconds), and must only enqueue.

When a server goes down (`health`), everything pending that needs it is answered UNAVAILABLE, and
so is whatever comes until a probe finds it up again. docs/data-plane.md has what happens when.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from lmcache_redis import native
from lmcache_redis.errors import RedisRedirect
from lmcache_redis.resp.admission import Admission
from lmcache_redis.resp.calls import Calls
from lmcache_redis.resp.chunks import Chunks
from lmcache_redis.resp.control import ClearJob, EachJob, QueryJob
from lmcache_redis.resp.deployment import parse_deployment
from lmcache_redis.resp.endpoint import Transport
from lmcache_redis.resp.jobs import JobRegistry, Stop
from lmcache_redis.resp.node import Node
from lmcache_redis.resp.nodes import Nodes
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.resp.outcomes import (
    ChunkIO,
    ClearResult,
    ExistsResult,
    PlaneState,
    PlaneStats,
    ReadOutcome,
    ScanResult,
    WriteOutcome,
)
from lmcache_redis.resp.queues import Timekeeper
from lmcache_redis.resp.readjob import ReadBundle, ReadJob, ReadTask
from lmcache_redis.resp.routes import MAX_HOPS, Hop
from lmcache_redis.resp.stats import Counts
from lmcache_redis.resp.writejob import WriteJob, WriteTask

logger = logging.getLogger(__name__)


class RedisPlane:
    """See the module. Raises ConfigError on construction for a URL that names no server."""

    def __init__(self, options: RedisOptions) -> None:
        self.options = options
        self.deployment = parse_deployment(options)
        self._registry = JobRegistry()
        self._counts = Counts()
        self._timekeeper = Timekeeper(self._registry.expire)
        self._nodes = Nodes(
            self.deployment,
            options,
            self._registry,
            remove=self.remove,
            follow_read=self._follow_read,
            follow_write=self._follow_write,
        )
        self._admission = Admission(self._registry, self._timekeeper)
        self._calls = Calls(
            self._nodes, self._registry, self._admission, self._timekeeper, self._counts
        )
        self._chunks = Chunks(
            options,
            self._nodes,
            self._registry,
            self._admission,
            self._timekeeper,
            self._counts,
            self.remove,
            tls=self.deployment.server.transport is Transport.TLS,
        )

    # ------------------------------------------------------------- life cycle

    def start(self) -> None:
        """Start the threads; returns at once, whether the server is there or not."""
        if self._admission.started:
            raise RuntimeError("a Redis plane is started once")
        self._admission.started = True
        if native.moves is None:
            logger.warning("Stripes are moved by Python, which is slower: %s", native.why_not)
        self._timekeeper.start()
        self._nodes.start()

    def wait_probed(self, timeout_s: float) -> PlaneState:
        """Wait until every server was asked once, or the time is over; the state then."""
        return self._nodes.wait_probed(timeout_s)

    def close(self, deadline_s: float) -> bool:
        """Finish writes for at most `deadline_s`, cancel everything else, end all threads.

        Every callback has been called on return. Takes a little longer than `deadline_s`
        when Redis does not answer; False if a thread could not be ended (it is a daemon).
        """
        if not self._admission.started or self._admission.closing:
            return True
        self._admission.closing = True
        deadline = time.monotonic() + deadline_s
        # Callbacks come on threads of the plane to the last: the timekeeper stops the jobs.
        self._timekeeper.post(self._cancel_all_but_writes)
        self._registry.wait_empty(deadline)
        self._timekeeper.post(self._cancel_all)
        patience_s = self.options.connect_timeout_s + self.options.op_timeout_s
        left = self._nodes.close(patience_s)
        # Whatever was submitted meanwhile.
        self._timekeeper.post(self._cancel_all)
        self._admission.closed = True
        left += not self._timekeeper.close(patience_s)
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
        counts = self._counts
        with counts.lock:
            return PlaneStats(
                bytes_in=counts.bytes_in,
                bytes_out=counts.bytes_out,
                reads=dict(counts.reads),
                writes=dict(counts.writes),
                calls=dict(counts.calls),
                keys_scanned=counts.keys_scanned,
                keys_removed=counts.keys_removed,
                connects=self._nodes.connects,
                connections_lost=self._nodes.connections_lost,
                errors=self._nodes.errors,
                queued_reads=self._chunks.reads,
                queued_writes=self._chunks.writes,
            )

    # ---------------------------------------------------------------- chunks

    def read(self, chunk: ChunkIO, done: Callable[[ChunkIO, ReadOutcome], None]) -> None:
        """Load a chunk into its slots, which are the plane's until `done`."""
        self.read_all((chunk,), done)

    def read_all(
        self, chunks: Sequence[ChunkIO], done: Callable[[ChunkIO, ReadOutcome], None]
    ) -> None:
        """Load chunks, in this order; `done` is called for each. Cheaper than one by one."""
        self._chunks.read_all(chunks, done)

    def write(self, chunk: ChunkIO, done: Callable[[ChunkIO, WriteOutcome], None]) -> None:
        """Store a chunk from its slots, which must not change until `done`."""
        self.write_all((chunk,), done)

    def write_all(
        self, chunks: Sequence[ChunkIO], done: Callable[[ChunkIO, WriteOutcome], None]
    ) -> None:
        """Store chunks, in this order; `done` is called for each. Cheaper than one by one."""
        self._chunks.write_all(chunks, done)

    def write_filling(self, chunk: ChunkIO, done: Callable[[ChunkIO, WriteOutcome], None]) -> None:
        """Store a chunk while its slots are being filled: a stripe is sent after it is `filled`.

        Nobody can see the chunk before all are. Whoever cannot fill them all cancels it: what was
        sent is removed. The deadline is the chunk's, as for any other.
        """
        self._chunks.write_filling(chunk, done)

    def filled(self, chunk: ChunkIO, slots: int) -> None:
        """The first ``slots`` slots of such a chunk have their bytes, which will not change.

        Does nothing where the chunk was answered.
        """
        self._chunks.filled(chunk, slots)

    def cancel(self, chunk: ChunkIO) -> None:
        """End a read or write early: CANCELLED as soon as no socket uses its slots.

        Does nothing to a chunk that was answered, or whose outcome is decided already.
        """
        self._chunks.cancel(chunk)

    # ------------------------------------------------------------------ keys

    def scan(
        self, keys: Sequence[bytes], deadline: float, done: Callable[[ScanResult], None]
    ) -> None:
        """How many of the (stripe 0) keys exist from the first on; deadline is monotonic."""
        self._calls.scan(keys, deadline, done)

    def exists(
        self, keys: Sequence[bytes], deadline: float, done: Callable[[ExistsResult], None]
    ) -> None:
        """Which of the (stripe 0) keys exist."""
        self._calls.exists(keys, deadline, done)

    def remove(self, chunk_key: bytes, stripe_count: int) -> None:
        """UNLINK the stripes of a chunk, within seconds or not at all; nobody is told."""
        self._calls.remove(chunk_key, stripe_count)

    def clear(
        self, key_prefix: bytes, deadline: float, done: Callable[[ClearResult], None]
    ) -> None:
        """UNLINK every key that begins with `key_prefix`, in small batches, behind scans.

        Raises ValueError for a prefix that is not of our keys (user prefix + b"lmcr1:" ...).
        """
        self._calls.clear(key_prefix, deadline, done)

    # ---------------------------------------------------------------- inside

    def _cancel_all_but_writes(self) -> None:
        for kind in (ReadJob, ReadBundle, QueryJob, EachJob, ClearJob):
            self._registry.stop_all(Stop.CANCELLED, kind)

    def _cancel_all(self) -> None:
        self._registry.stop_all(Stop.CANCELLED)

    def _follow_read(self, node: Node, task: ReadTask, redirect: RedisRedirect) -> bool:
        job, index, hop = task
        target = self._follow(node, job, hop, redirect)
        if target is not None:
            target.reads.put(((job, index, _next_hop(hop, redirect)),), urgent=True)
        return target is not None

    def _follow_write(self, node: Node, task: WriteTask, redirect: RedisRedirect) -> bool:
        job, index, hop = task
        target = self._follow(node, job, hop, redirect)
        if target is not None:
            target.writes(job.key).put(((job, index, _next_hop(hop, redirect)),), urgent=True)
        return target is not None

    def _follow(
        self, node: Node, job: ReadJob | WriteJob, hop: Hop | None, redirect: RedisRedirect
    ) -> Node | None:
        """The node that a task is to go to; None: nowhere."""
        if not self._nodes.routes.is_cluster or (hop is not None and hop.number >= MAX_HOPS):
            return None
        target = self._nodes.follow(node, redirect)
        if target not in job.nodes:
            job.nodes = (*job.nodes, target)
        return target


def _next_hop(hop: Hop | None, redirect: RedisRedirect) -> Hop:
    return Hop(1 if hop is None else hop.number + 1, redirect.asking)
