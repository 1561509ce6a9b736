"""A thread with connections to a server: whenever the server is up, it connects and serves."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, Protocol

from lmcache_redis.errors import (
    ConfigError,
    RedisAuthError,
    RedisClusterDown,
    RedisError,
    RedisProtocolError,
    RedisRedirect,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp.health import Health, WritePause
from lmcache_redis.resp.jobs import Job, Jobs, Stop, StripeTask
from lmcache_redis.resp.loops import LoopThread, jittered
from lmcache_redis.resp.net.connection import Connection, Connector
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.tiers import WriteOutcome

# Between a first failed attempt to connect and the next.
_AGAIN_S = 0.05


class DataServer(Protocol):
    """The interface of `node.DataNode` for its threads."""

    connector: Connector
    health: Health
    jobs: Jobs
    options: RedisOptions
    write_state: WritePause

    def redirect(self, task: StripeTask, redirect: RedisRedirect) -> bool:
        """Queue a redirected stripe at another node; False if it is not followed."""

    def refuses_writes(self, error: RedisError) -> WriteOutcome:
        """The server refused a write: pause writes; return the outcome of this one."""

    def map_is_old(self) -> None:
        """Have the servers looked up soon."""


class Worker(ABC):
    """A thread that connects whenever the server is up, and then calls `serve`.

    It connects before it takes work, so an unreachable server delays no job.
    """

    def __init__(self, name: str, server: DataServer) -> None:
        self.name = name
        self.connections_lost = 0
        self._server = server
        self._jobs = server.jobs
        self._health = server.health
        self._has_failed = False
        self.thread = LoopThread(f"lmcr-{name}", self._step)

    @abstractmethod
    def serve(self, connection: Connection) -> bool:
        """Work until the connection is unusable or the queue is closed.

        Returns False if the queue is closed. Otherwise it has closed the connection. Answers each
        job that it takes, whatever happens.
        """

    def _new_connection(self) -> Connection:
        return Connection(self._server.connector, f"lmcache-redis:{self.name}")

    def _step(self) -> bool:
        if not self._health.wait_up():
            return False
        connection = self._new_connection()
        try:
            return not self._connect(connection) or self.serve(connection)
        finally:
            connection.close()

    def _connect(self, connection: Connection) -> bool:
        tried_at = time.monotonic()
        try:
            connection.open()
        except (RedisError, ConfigError) as error:
            # A single failure may be a server that has just restarted: try again soon.
            if self._has_failed or not isinstance(error, RedisUnavailable):
                self._health.down(error, tried_at)
            else:
                time.sleep(jittered(_AGAIN_S))
            self._has_failed = True
            return False
        self._has_failed = False
        return True

    def _may_retry(self, job: Job[Any], connection: Connection) -> bool:
        """Whether to retry a job that lost its connection.

        An idle connection that dies unnoticed when the server restarts is not an outage. There is
        no retry if the connection was opened after the job was created.
        """
        lost = not connection.is_open
        return lost and connection.opened_at < job.created_at and self._health.is_up

    @staticmethod
    def _stop_for(error: RedisError) -> Stop:
        """Why a job ends that lost its connection, and is not retried."""
        return Stop.TIMED_OUT if isinstance(error, RedisTimeout) else Stop.UNAVAILABLE

    def _judge(self, error: RedisError, connection: Connection) -> None:
        """Update connection and health after an operation has failed."""
        if isinstance(error, RedisClusterDown):
            # An answer of the cluster: this server is well.
            self._health.note(error)
            self._server.map_is_old()
        elif isinstance(error, RedisTimeout):
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
