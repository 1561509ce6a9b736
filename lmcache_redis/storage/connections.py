"""Connections for small questions to one server, kept between them.

One that was lost while nobody used it is replaced once: whoever asks does not notice. One that
was given up in the middle of a question is closed, for its reply may still come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from lmcache_redis.errors import RedisError, RedisTimeout, RedisUnavailable
from lmcache_redis.resp.connect import Connector
from lmcache_redis.resp.connection import Connection
from lmcache_redis.resp.endpoint import Endpoint
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.resp.wire import Reply

_CONNECTION_NAME = "lmcache-redis:storage"


class ServerConnections:
    """Thread-safe. Connections are as many as there are callers at once, and kept then."""

    def __init__(self, endpoint: Endpoint, options: RedisOptions) -> None:
        self._connector = Connector(endpoint, options.connect_timeout_s, options.op_timeout_s)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._closed = False

    def exchange(self, commands: Sequence[bytes], deadline: float) -> list[Reply]:
        """Their replies. Raises RedisError, and ConfigError for TLS files that are none."""
        connection = self._kept()
        if connection is not None:
            try:
                return self._exchange(connection, commands, deadline)
            except RedisUnavailable:
                # It may have been lost long ago; the server may be another by now. None of
                # our commands does harm when it is carried out twice.
                pass
        connection = Connection(self._connector, _CONNECTION_NAME)
        if time.monotonic() >= deadline:
            raise RedisTimeout(f"Redis at {self._connector.endpoint.where}: no time is left")
        connection.open(deadline)
        return self._exchange(connection, commands, deadline)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        self._connector.abort()
        for connection in idle:
            connection.close()

    def _kept(self) -> Connection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _exchange(
        self, connection: Connection, commands: Sequence[bytes], deadline: float
    ) -> list[Reply]:
        try:
            replies = connection.exchange((b"".join(commands),), len(commands), deadline)
        except RedisError:
            # Open where nothing had been sent.
            self._give_back(connection)
            raise
        except BaseException:
            # Interrupted: its reply may still come, and would be taken for another's.
            connection.close()
            raise
        self._give_back(connection)
        return replies

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if connection.is_open and not self._closed:
                self._idle.append(connection)
                return
        connection.close()
