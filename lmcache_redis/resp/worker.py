"""A thread that works on connections to a server: the base of all but the health prober."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol

from lmcache_redis.errors import (
    ConfigError,
    RedisAuthError,
    RedisError,
    RedisProtocolError,
    RedisRedirect,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp.health import Health
from lmcache_redis.resp.jobs import Job, Jobs, OutcomeT, TaskT
from lmcache_redis.resp.net.connect import Connector
from lmcache_redis.resp.net.connection import Connection
from lmcache_redis.resp.net.options import RedisOptions
from lmcache_redis.resp.net.topology import Hop
from lmcache_redis.resp.outcomes import ChunkIO

logger = logging.getLogger(__name__)

# A stripe: the job of its chunk, its index, and its last redirection, if any.
Task = tuple[Any, int, Hop | None]


# Called with a chunk key and a stripe count.
Remove = Callable[[bytes, int], None]


class Transfer(Job[OutcomeT]):
    """A chunk in flight; a step is a stripe. done: called with the chunk and the outcome."""

    __slots__ = ("_done", "_remove", "_remove_stripes", "chunk", "chunk_key")

    def __init__(
        self, chunk: ChunkIO, done: Callable[[ChunkIO, OutcomeT], None], remove: Remove, now: float
    ) -> None:
        super().__init__(chunk.frame.stripe_count, chunk.deadline, now)
        self.chunk = chunk
        self.chunk_key = chunk.key
        self._done = done
        self._remove = remove
        self._remove_stripes = 0  # how many to remove before the answer

    def answer(self, outcome: OutcomeT) -> None:
        chunk = self.chunk
        del self.chunk  # a queue may still hold the job, but must not hold a slot
        try:
            # Before the callback, which may store the chunk again.
            if self._remove_stripes:
                self._remove(self.chunk_key, self._remove_stripes)
        finally:
            self._done(chunk, outcome)


class Server(Protocol):
    """The interface of `node.Node` for its threads."""

    connector: Connector
    health: Health
    jobs: Jobs
    options: RedisOptions

    def redirect(self, task: Task, redirect: RedisRedirect) -> bool:
        """Queue a redirected stripe at another node; False if there is none."""

    def is_replica(self) -> None:
        """The server is a replica: the map is outdated."""


class Worker(ABC):
    """A thread that connects whenever the server is up, and then calls `serve`.

    It connects before it takes work, so an unreachable server delays no job.
    """

    def __init__(self, name: str, server: Server) -> None:
        self.name = name
        self.connections_lost = 0
        self._server = server
        self._jobs = server.jobs
        self._health = server.health
        self.thread = threading.Thread(target=self._run, name=f"lmcr-{name}", daemon=True)

    def start(self) -> None:
        self.thread.start()

    @abstractmethod
    def serve(self, connection: Connection) -> bool:
        """Work until the connection is unusable or the queue is closed.

        Returns False if the queue is closed. Otherwise it has closed the connection. Answers each
        job that it takes, whatever happens.
        """

    def _new_connection(self) -> Connection:
        return Connection(self._server.connector, f"lmcache-redis:{self.name}")

    def _run(self) -> None:
        failures = 0
        while self._health.wait_up():
            connection = self._new_connection()
            try:
                failures = self._connect(connection, failures)
                if connection.is_open and not self._serve_safely(connection):
                    return
            finally:
                connection.close()

    def _connect(self, connection: Connection, failures: int) -> int:
        """Try once; return how many attempts in a row have failed."""
        tried_at = time.monotonic()
        try:
            connection.open()
        except (RedisError, ConfigError) as error:
            # A single failure may be a server that has just restarted: try again at once.
            if failures or not isinstance(error, RedisUnavailable):
                self._health.down(error, tried_at)
            return failures + 1
        return 0

    def _serve_safely(self, connection: Connection) -> bool:
        try:
            return self.serve(connection)
        except Exception:
            # A bug of ours: `serve` has answered its job; the thread continues.
            logger.exception("a thread of the Redis plane met a bug")
            return True

    def _may_retry(self, job: Job[Any], connection: Connection) -> bool:
        """Whether to retry a job that lost its connection.

        An idle connection that dies unnoticed when the server restarts is not an outage. There is
        no retry if the connection was opened after the job was created.
        """
        lost = not connection.is_open
        return lost and connection.opened_at < job.created_at and self._health.is_up

    def _judge(self, error: RedisError, connection: Connection) -> None:
        """Update connection and health after an operation has failed."""
        if isinstance(error, RedisTimeout):
            if not connection.is_open:
                self.connections_lost += 1
                self._health.suspect(error)
        elif isinstance(error, RedisProtocolError):
            self.connections_lost += 1
            self._health.note(error)
        elif isinstance(error, RedisUnavailable):
            if connection.is_open:
                # The server said so itself (LOADING, BUSY): it would refuse any request.
                connection.close()
                self._health.down(error, time.monotonic())
            else:
                # Lost: the attempt to connect again tells whether the server is there.
                self.connections_lost += 1
        else:
            if isinstance(error, RedisAuthError):
                # Credentials were revoked: connecting again shows it.
                connection.close()
            self._health.note(error)


class TaskQueue(Generic[TaskT]):
    """First in, first out; urgent tasks go first. Thread-safe.

    Each change is one operation of a deque, in C, and a thread waits on a lock of its own: a
    `threading.Condition` would add several hundredths of a millisecond to a scan of keys.
    """

    __slots__ = ("_ordinary", "_urgent", "_waiters", "closed")

    def __init__(self) -> None:
        self._ordinary: deque[TaskT] = deque()
        self._urgent: deque[TaskT] = deque()
        self._waiters: deque[threading.Lock] = deque()
        self.closed = False

    def put(self, tasks: Iterable[TaskT], urgent: bool = False) -> None:
        (self._urgent if urgent else self._ordinary).extend(tasks)
        if self.closed:
            self.close()
        self._wake_all()

    def take(self) -> TaskT | None:
        """Wait for the next task. None: the queue is closed."""
        while self.wait():
            # Another thread may take it first.
            task = _pop(self._urgent)
            if task is None:
                task = _pop(self._ordinary)
            if task is not None:
                return task
        return None

    def take_some(self, most: int) -> list[TaskT]:
        """Up to `most` tasks, without waiting."""
        some: list[TaskT] = []
        for tasks in (self._urgent, self._ordinary):
            with contextlib.suppress(IndexError):
                while len(some) < most:
                    some.append(tasks.popleft())
        return some

    def put_back(self, tasks: Sequence[TaskT]) -> None:
        """Return tasks that were taken: they precede all but the urgent ones."""
        self._ordinary.extendleft(reversed(tasks))
        self.put(())

    def wait(self) -> bool:
        """Wait until there is a task, which another thread may take first; False if closed."""
        while not self.closed:
            if self._urgent or self._ordinary:
                return True
            waiter = threading.Lock()
            waiter.acquire()
            # Enqueue, then look again: a task put before that did not wake this thread.
            self._waiters.append(waiter)
            if self.closed or self._urgent or self._ordinary:
                self._wake_all()
            waiter.acquire()
        return False

    def _wake_all(self) -> None:
        while (waiter := _pop(self._waiters)) is not None:
            waiter.release()

    def __len__(self) -> int:
        return len(self._urgent) + len(self._ordinary)

    def close(self) -> None:
        """Drop all tasks, also those put later, and wake all threads."""
        self.closed = True
        self._ordinary.clear()
        self._urgent.clear()
        self._wake_all()


def _pop(items: deque[TaskT]) -> TaskT | None:
    try:
        return items.popleft()
    except IndexError:
        return None
