"""The Redis data plane: chunks between slots and one Redis server, every call answered.

Threads, all owned here: `get_connections` readers, `set_connections` writers and one
controller with a connection each; the health prober with its own; and a timekeeper without
one, which answers what is late or cannot be tried. Callers hand in jobs from any thread and
never wait. Each callback is called exactly once, on a thread of the plane, by the job's
deadline (a wait on a socket may overrun it by milliseconds), and must only enqueue.

When the server goes down (`health`), everything pending is answered UNAVAILABLE, and so is
whatever comes until a probe finds it up again. docs/data-plane.md has what happens when.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from lmcache_redis.keys import KEY_MAGIC
from lmcache_redis.resp.connect import Connector
from lmcache_redis.resp.control import CallJob, ClearJob, Controller, QueryJob, RemoveJob
from lmcache_redis.resp.endpoint import parse_endpoint
from lmcache_redis.resp.health import Health
from lmcache_redis.resp.jobs import Job, JobRegistry, Stop
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.resp.outcomes import (
    CallOutcome,
    ChunkIO,
    ClearResult,
    ExistsResult,
    PlaneState,
    PlaneStats,
    ReadOutcome,
    ScanResult,
    WriteOutcome,
)
from lmcache_redis.resp.queues import TaskQueue, Timekeeper
from lmcache_redis.resp.reader import Reader, ReadJob, ReadTask, read_tasks
from lmcache_redis.resp.scan import count_prefix, find_present
from lmcache_redis.resp.stats import Counts
from lmcache_redis.resp.worker import Worker
from lmcache_redis.resp.writer import WriteJob, Writer

logger = logging.getLogger(__name__)

# Remains are removed soon or not at all: later, somebody may have stored the chunk again.
_REMOVE_WITHIN_S = 10.0
_MAX_PENDING_REMOVALS = 1024

AnyJob = Job[ReadOutcome] | Job[WriteOutcome] | Job[CallOutcome]


class RedisPlane:
    """See the module. Raises ConfigError on construction for a URL that names no server."""

    def __init__(self, options: RedisOptions) -> None:
        self.options = options
        self.endpoint = parse_endpoint(options)
        self._connector = Connector(self.endpoint, options.connect_timeout_s, options.op_timeout_s)
        self._registry = JobRegistry()
        self._counts = Counts()
        self._timekeeper = Timekeeper(self._registry.expire)
        self._health = Health(
            self._connector,
            options.probe_interval_s,
            options.heartbeat_s,
            options.op_timeout_s,
            on_down=lambda: self._registry.stop_all(Stop.UNAVAILABLE),
        )
        self._reads: TaskQueue[ReadTask] = TaskQueue()
        self._writes: TaskQueue[WriteJob] = TaskQueue()
        self._calls: TaskQueue[CallJob] = TaskQueue()
        self._workers = self._make_workers()
        self._started = False
        self._closing = False
        self._closed = False
        self._by_chunk: dict[ChunkIO, AnyJob] = {}

    def _make_workers(self) -> list[Worker]:
        options, connector, health = self.options, self._connector, self._health
        op_timeout_s = options.op_timeout_s
        workers: list[Worker] = [
            Controller("control", connector, health, self._calls, op_timeout_s)
        ]
        workers += [
            Reader(f"get-{number}", connector, health, self._reads)
            for number in range(options.get_connections)
        ]
        workers += [
            Writer(
                f"set-{number}",
                connector,
                health,
                self._writes,
                options.max_outstanding_sets,
                op_timeout_s,
                self.remove,
            )
            for number in range(options.set_connections)
        ]
        return workers

    # ------------------------------------------------------------- life cycle

    def start(self) -> None:
        """Start the threads; returns at once, whether the server is there or not."""
        if self._started:
            raise RuntimeError("a Redis plane is started once")
        self._started = True
        self._timekeeper.start()
        self._health.start()
        for worker in self._workers:
            worker.start()

    def wait_probed(self, timeout_s: float) -> PlaneState:
        """Wait until the server was asked once, or the time is over; the state then."""
        return self._health.wait_probed(timeout_s)

    def close(self, deadline_s: float) -> bool:
        """Finish writes for at most `deadline_s`, cancel everything else, end all threads.

        Every callback has been called on return. Takes a little longer than `deadline_s`
        when Redis does not answer; False if a thread could not be ended (it is a daemon).
        """
        if not self._started or self._closing:
            return True
        self._closing = True
        deadline = time.monotonic() + deadline_s
        # Callbacks come on threads of the plane to the last: the timekeeper stops the jobs.
        self._timekeeper.post(self._cancel_all_but_writes)
        self._registry.wait_empty(deadline)
        self._timekeeper.post(self._cancel_all)
        for queue in (self._reads, self._writes, self._calls):
            queue.close()
        self._health.close()
        # Wakes every thread that waits on a socket; a name look-up alone cannot be woken.
        self._connector.abort()
        patience_s = self.options.connect_timeout_s + self.options.op_timeout_s
        ended = [worker.join(patience_s) for worker in self._workers]
        ended.append(self._health.join(patience_s))
        # Whatever was submitted meanwhile.
        self._timekeeper.post(self._cancel_all)
        self._closed = True
        ended.append(self._timekeeper.close(patience_s))
        if not all(ended):
            logger.warning("%d threads of the Redis plane did not end", ended.count(False))
        return all(ended)

    # ------------------------------------------------------------ what it is

    @property
    def state(self) -> PlaneState:
        """Up or down, and why."""
        return self._health.state

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
                connects=self._connector.connects,
                connections_lost=sum(worker.connections_lost for worker in self._workers),
                errors=self._health.errors,
                queued_reads=self._registry.count(ReadJob),
                queued_writes=self._registry.count(WriteJob),
            )

    # ---------------------------------------------------------------- chunks

    def read(self, chunk: ChunkIO, done: Callable[[ChunkIO, ReadOutcome], None]) -> None:
        """Load a chunk into its slots, which are the plane's until `done`."""
        chunk.check(writable=True)
        self._check_usable()
        self._check_idle(chunk)
        job = ReadJob(chunk, done, self._read_settled, self._registry)
        tasks = read_tasks(job)
        self._by_chunk[chunk] = job
        if self._enter(job):
            self._reads.put(tasks)
            # The server may have gone, or the plane been closed, while it was queued.
            self._refuse(job)

    def write(self, chunk: ChunkIO, done: Callable[[ChunkIO, WriteOutcome], None]) -> None:
        """Store a chunk from its slots, which must not change until `done`."""
        chunk.check(writable=False)
        self._check_usable()
        self._check_idle(chunk)
        job = WriteJob(chunk, done, self._write_settled, self._registry)
        self._by_chunk[chunk] = job
        if self._enter(job):
            self._writes.put((job,))
            # The server may have gone, or the plane been closed, while it was queued.
            self._refuse(job)

    def cancel(self, chunk: ChunkIO) -> None:
        """End a read or write early: CANCELLED as soon as no socket uses its slots.

        Does nothing to a chunk that was answered, or whose outcome is decided already.
        """
        job = self._by_chunk.get(chunk)
        if job is not None:
            self._timekeeper.post(lambda: job.stop(Stop.CANCELLED))

    def remove(self, chunk_key: bytes, stripe_count: int) -> None:
        """UNLINK the stripes of a chunk, within seconds or not at all; nobody is told."""
        if not self._started or self._closing or not self._health.is_up:
            return
        if self._registry.count(RemoveJob) >= _MAX_PENDING_REMOVALS:
            return
        deadline = time.monotonic() + _REMOVE_WITHIN_S
        job = RemoveJob(chunk_key, stripe_count, deadline, self._counts.removed, self._registry)
        self._submit_call(job)

    # ------------------------------------------------------------------ keys

    def scan(
        self, keys: Sequence[bytes], deadline: float, done: Callable[[ScanResult], None]
    ) -> None:
        """How many of the (stripe 0) keys exist from the first on; deadline is monotonic."""

        def answer(outcome: CallOutcome, length: int | None) -> None:
            self._counts.called(outcome, len(keys))
            done(ScanResult(outcome, length or 0))

        self._check_usable()
        self._submit_call(QueryJob(count_prefix, keys, deadline, answer, self._registry))

    def exists(
        self, keys: Sequence[bytes], deadline: float, done: Callable[[ExistsResult], None]
    ) -> None:
        """Which of the (stripe 0) keys exist."""

        def answer(outcome: CallOutcome, present: list[bool] | None) -> None:
            self._counts.called(outcome, len(keys))
            done(ExistsResult(outcome, present or ()))

        self._check_usable()
        self._submit_call(QueryJob(find_present, keys, deadline, answer, self._registry))

    def clear(
        self, key_prefix: bytes, deadline: float, done: Callable[[ClearResult], None]
    ) -> None:
        """UNLINK every key that begins with `key_prefix`, in small batches, behind scans.

        Raises ValueError for a prefix that is not of our keys (user prefix + b"lmcr1:" ...).
        """
        if KEY_MAGIC not in key_prefix:
            raise ValueError(f"{key_prefix!r} is not the beginning of keys of this package")

        def answer(outcome: CallOutcome, removed: int) -> None:
            self._counts.called(outcome)
            self._counts.removed(removed)
            done(ClearResult(outcome, removed))

        self._check_usable()
        self._submit_call(ClearJob(key_prefix, deadline, answer, self._registry))

    # ---------------------------------------------------------------- inside

    def _cancel_all_but_writes(self) -> None:
        for kind in (ReadJob, QueryJob, ClearJob):
            self._registry.stop_all(Stop.CANCELLED, kind)

    def _cancel_all(self) -> None:
        self._registry.stop_all(Stop.CANCELLED)

    def _check_usable(self) -> None:
        if not self._started or self._closed:
            raise RuntimeError("the Redis plane is not running")

    def _check_idle(self, chunk: ChunkIO) -> None:
        if chunk in self._by_chunk:
            raise RuntimeError("the chunk is being read or written already")

    def _submit_call(self, job: CallJob) -> None:
        if self._enter(job):
            self._calls.put((job,), urgent=job.urgent)
            # The server may have gone, or the plane been closed, while it was queued.
            self._refuse(job)

    def _enter(self, job: AnyJob) -> bool:
        """From here on the job will be answered. False: without being tried."""
        self._registry.add(job)
        if self._refuse(job):
            return False
        self._timekeeper.watch(job.deadline)
        return True

    def _refuse(self, job: AnyJob) -> bool:
        """Whether the job cannot be tried; then it is answered on the timekeeper's thread."""
        if self._closing:
            self._timekeeper.post(lambda: job.stop(Stop.CANCELLED))
            return True
        if not self._health.is_up:
            self._timekeeper.post(lambda: job.stop(Stop.UNAVAILABLE))
            return True
        return False

    def _read_settled(self, chunk: ChunkIO, outcome: ReadOutcome, remove_stripes: int) -> None:
        self._by_chunk.pop(chunk, None)
        self._counts.read(outcome, chunk.frame.chunk_bytes)
        if remove_stripes:
            self.remove(chunk.key, remove_stripes)

    def _write_settled(self, chunk: ChunkIO, outcome: WriteOutcome) -> None:
        self._by_chunk.pop(chunk, None)
        self._counts.written(outcome, chunk.frame.chunk_bytes)
