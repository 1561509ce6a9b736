"""What the plane's network threads have in common: connections, kept or replaced."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from lmcache_redis.errors import (
    ConfigError,
    RedisAuthError,
    RedisError,
    RedisProtocolError,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp.bulk import BulkConnection
from lmcache_redis.resp.connect import Connector
from lmcache_redis.resp.health import Health
from lmcache_redis.resp.jobs import Job

logger = logging.getLogger(__name__)


class Worker:
    """A thread that connects whenever the server is up and then lets `serve` work.

    Connecting comes before taking work: a server that cannot be reached holds no job up.
    `serve` works until the connection is of no more use, which it has closed then, and
    returns True; or until there will be no more work, and returns False. It answers for the
    jobs it takes, whatever happens.
    """

    def __init__(self, name: str, connector: Connector, health: Health) -> None:
        self.name = name
        self.connections_lost = 0
        self._connector = connector
        self._health = health
        self._thread = threading.Thread(target=self._run, name=f"lmcr-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; False if it takes longer."""
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def serve(self, connection: BulkConnection) -> bool:
        raise AssertionError("a worker without work")

    def make_connection(self) -> BulkConnection:
        """A connection of this thread, not open yet."""
        return BulkConnection(self._connector, f"lmcache-redis:{self.name}")

    def _run(self) -> None:
        failures = 0
        while self._health.wait_up():
            connection = self.make_connection()
            try:
                failures = self._connect(connection, failures)
                if connection.is_open and not self._serve_safely(connection):
                    return
            finally:
                connection.close()

    def _connect(self, connection: BulkConnection, failures: int) -> int:
        """Try once; how many times it failed in a row now."""
        tried_at = time.monotonic()
        try:
            connection.open()
        except RedisUnavailable as error:
            # Once may be a server that went away just now and is back: look again at once.
            if failures:
                self._health.down(error, tried_at)
            return failures + 1
        except (RedisError, ConfigError) as error:
            self._health.down(error, tried_at)
            return failures + 1
        return 0

    def _serve_safely(self, connection: BulkConnection) -> bool:
        try:
            return self.serve(connection)
        except Exception:
            # A bug of ours: its job has been answered by `serve`, the thread serves on.
            logger.exception("a thread of the Redis plane met a bug")
            return True

    def _may_retry(self, job: Job[Any], connection: BulkConnection) -> bool:
        """Whether a job that lost its connection deserves another.

        An idle connection dies unnoticed when the server restarts: that is no outage. One
        that was made for the job, or after it came, has had its chance.
        """
        lost = not connection.is_open
        return lost and connection.opened_at < job.created_at and self._health.is_up

    def _judge(self, error: RedisError, connection: BulkConnection) -> None:
        """Draw the conclusions about connection and server from what an operation raised."""
        if isinstance(error, RedisTimeout):
            if not connection.is_open:
                self.connections_lost += 1
                self._health.suspect(error)
        elif isinstance(error, RedisProtocolError):
            self.connections_lost += 1
            self._health.note(error)
        elif isinstance(error, RedisUnavailable):
            if connection.is_open:
                # The server said so itself (LOADING, BUSY): it would say it to others as well.
                connection.close()
                self._health.down(error, time.monotonic())
            else:
                # Lost: the attempt to connect again tells whether the server is there.
                self.connections_lost += 1
        else:
            if isinstance(error, RedisAuthError):
                # Credentials that were good no more are: connecting again brings it to light.
                connection.close()
            self._health.note(error)
