"""One data server: its queues, the threads and connections that serve them, its health."""

from __future__ import annotations

from collections.abc import Callable

from lmcache_redis.errors import RedisError, RedisRedirect
from lmcache_redis.resp.connect import Connector
from lmcache_redis.resp.control import CallJob, Controller
from lmcache_redis.resp.endpoint import Endpoint
from lmcache_redis.resp.health import Health
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.resp.queues import TaskQueue
from lmcache_redis.resp.reader import Reader
from lmcache_redis.resp.readjob import AnyRead, ReadTask
from lmcache_redis.resp.worker import Worker
from lmcache_redis.resp.writejob import AnyWrite, WriteTask
from lmcache_redis.resp.writer import Writer


class Node:
    """Takes work whether the server is up or not; `is_up` says whether that is any use.

    on_down: called with the node, on any thread, when its server went down. remove: see
    `writer`. follow_read, follow_write: given a task that a cluster's node redirected; False
    if nobody else can do it. stale: called when the server turned out to be a replica.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        options: RedisOptions,
        get_connections: int,
        set_connections: int,
        *,
        on_down: Callable[[Node], None],
        remove: Callable[[bytes, int], None],
        follow_read: Callable[[Node, ReadTask, RedisRedirect], bool],
        follow_write: Callable[[Node, WriteTask, RedisRedirect], bool],
        stale: Callable[[RedisError], None],
    ) -> None:
        self.endpoint = endpoint
        self.connector = Connector(endpoint, options.connect_timeout_s, options.op_timeout_s)
        self.health = Health(
            self.connector,
            options.probe_interval_s,
            options.heartbeat_s,
            options.op_timeout_s,
            on_down=lambda: on_down(self),
        )
        self.reads: TaskQueue[AnyRead] = TaskQueue()
        self._calls: TaskQueue[CallJob] = TaskQueue()
        self._patience_s = options.connect_timeout_s + options.op_timeout_s
        connector, health = self.connector, self.health
        self._controller = Controller(
            "control", connector, health, self._calls, options.op_timeout_s
        )
        self._workers: list[Worker] = [self._controller]
        threads = options.network_threads
        self._workers += [
            Reader(
                f"get-{number}",
                connector,
                health,
                self.reads,
                connections,
                options.op_timeout_s,
                lambda task, redirect: follow_read(self, task, redirect),
                options.verify_checksums,
            )
            for number, connections in enumerate(_shares(get_connections, threads))
        ]
        shares = _shares(set_connections, threads)
        self._writes: list[TaskQueue[AnyWrite]] = [TaskQueue() for _ in shares]
        self._workers += [
            Writer(
                f"set-{number}",
                connector,
                health,
                self._writes[number],
                connections,
                options.op_timeout_s,
                remove,
                lambda task, redirect: follow_write(self, task, redirect),
                stale,
                options.ttl_s,
            )
            for number, connections in enumerate(shares)
        ]

    def call(self, job: CallJob) -> None:
        """Queue a call."""
        self._controller.put(job)

    def writes(self, chunk_key: bytes) -> TaskQueue[AnyWrite]:
        """The queue for all stripes of a chunk that this server gets."""
        return self._writes[hash(chunk_key) % len(self._writes)]

    @property
    def is_up(self) -> bool:
        return self.health.is_up

    @property
    def connections_lost(self) -> int:
        return sum(worker.connections_lost for worker in self._workers)

    def start(self) -> None:
        """Start the threads; returns at once."""
        self.health.start()
        for worker in self._workers:
            worker.start()

    def stop(self) -> None:
        """Drop what is queued, and wake every thread that waits: all of them end."""
        self.reads.close()
        self._calls.close()
        for queue in self._writes:
            queue.close()
        self.health.close()
        self.connector.abort()

    def join(self) -> int:
        """Wait for the threads' ends; how many did not come in time."""
        ended = [worker.join(self._patience_s) for worker in self._workers]
        ended.append(self.health.join(self._patience_s))
        return ended.count(False)


def _shares(connections: int, threads: int) -> list[int]:
    """How many of the connections each thread gets: at least one."""
    threads = min(threads, connections)
    return [(connections + number) // threads for number in range(threads)]
