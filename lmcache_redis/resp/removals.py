# SPDX-License-Identifier: Apache-2.0
"""Evictions and expiries, from the keyspace notifications of servers.

A server tells what `notify-keyspace-events` names: E with e (evicted), x (expired), g (removed by a
client, or moved to another shard, so nothing is certain then). It keeps nothing for a subscriber
that is away, so a subscription begins with `on_begun`: who relies on the news asks again for what
it believes to be there. FLUSHALL tells nothing, nor does a server whose setting is changed: a
subscription is renewed every minute.

One thread has a connection to each server while somebody listens. It counts for nothing else: a
server that refuses it is not down.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from math import inf

from lmcache_redis.chunks.names import chunk_key_in
from lmcache_redis.errors import (
    ConfigError,
    RedisError,
    RedisReplyError,
)
from lmcache_redis.resp.health import DataServer
from lmcache_redis.resp.jobs import LoopThread
from lmcache_redis.resp.net.commands import removal_channels
from lmcache_redis.resp.net.connection import Connection
from lmcache_redis.resp.net.wire import PING_COMMAND, Reply, pack_command

logger = logging.getLogger(__name__)

# How long news may wait in the socket.
_POLL_S = 0.1
# Until a server is asked again that does not tell, or refuses.
_ASK_AGAIN_S = 30.0
_RECONNECT_S = 1.0
_RENEW_S = 60.0
_SETTING = "notify-keyspace-events"
_CONFIG_COMMAND = pack_command("CONFIG", "GET", _SETTING)
_PONG: Reply = [b"pong", b""]
_MOST_REPLIES = 1 << 30

# (chunk keys, certain): keys may repeat; after a DEL it is not certain that they are gone.
Told = Callable[[Sequence[bytes], bool], None]


class Removals:
    """Who listens to the servers of a plane. Thread-safe; callbacks come on its thread.

    servers: returns those that there are now.
    """

    def __init__(self, key_prefix: bytes, servers: Callable[[], Sequence[DataServer]]) -> None:
        self.thread = LoopThread("lmcr-removals", self._step)
        self._key_prefix = key_prefix
        self._servers = servers
        self._subscriptions: dict[DataServer, _Subscription] = {}
        self._changed = threading.Event()
        self._is_closing = False
        self._on_removed: Told | None = None
        self._on_begun: Callable[[], None] = lambda: None

    def listen(self, on_removed: Told, on_begun: Callable[[], None]) -> None:
        """Have servers tell from now on. Raises RuntimeError if there can be no thread."""
        self._on_begun, self._on_removed = on_begun, on_removed
        self._changed.set()
        if self.thread.ident is None:
            self.thread.start()

    def stop(self) -> None:
        self._on_removed = None
        self._changed.set()

    def close(self) -> None:
        """End the thread soon; `Connector.abort` ends what it waits for."""
        self._is_closing = True
        self.stop()

    @property
    def is_listening(self) -> bool:
        return self._on_removed is not None

    @property
    def why_silent(self) -> str:
        """Why a server does not tell, and what to change; empty if all do, or if none is asked."""
        return next((each.why for each in list(self._subscriptions.values()) if each.why), "")

    def _step(self) -> bool:
        is_over, listener = self._is_closing, self._on_removed
        servers = () if listener is None else self._servers()
        for server in self._subscriptions.keys() - set(servers):
            self._subscriptions.pop(server).disconnect()
        for server in servers:
            subscription = self._subscriptions.setdefault(server, _Subscription(server))
            if server.health.is_up and (news := subscription.news(self._on_begun)) and listener:
                self._tell(news, listener)
        if not is_over:
            self._changed.wait(_POLL_S if servers else None)
            self._changed.clear()
        return not is_over

    def _tell(self, news: Sequence[Reply], listener: Told) -> None:
        keys: dict[bytes, bool] = {}  # a chunk's stripes go one after the other
        for message in news:
            match message:
                case [b"message", bytes() as channel, bytes() as name]:
                    key = chunk_key_in(name, self._key_prefix)
                    if key is not None:
                        keys[key] = keys.get(key, False) or not channel.endswith(b":del")
        for is_certain in (True, False):
            if told := [key for key, certain in keys.items() if certain is is_certain]:
                listener(told, is_certain)


class _Subscription:
    """What one server tells. why: it does not; empty if it does; None: not asked yet."""

    def __init__(self, server: DataServer) -> None:
        self.why: str | None = None
        self._server = server
        self._where = server.connector.endpoint.where
        self._connection: Connection | None = None
        self._begin_at = 0.0  # again, `time.monotonic()` seconds

    def disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def news(self, on_begun: Callable[[], None]) -> Sequence[Reply]:
        """What the server has told since the last call. Subscribes first, if it is time to."""
        try:
            if time.monotonic() < self._begin_at:
                return () if self._connection is None else self._told(self._connection)
            self.disconnect()
            self._connection = self._server.open("removals")
            news = self._subscribed(self._connection)
            self._note("", _RENEW_S)
            on_begun()
            return news
        except RedisReplyError as error:
            why = f"{self._where} does not tell routers what it evicts and expires: {error}"
            self._note(why, _ASK_AGAIN_S)
        except (RedisError, ConfigError) as error:
            self._note(f"the subscription to {self._where} has ended: {error}", _RECONNECT_S)
        self.disconnect()
        return ()

    def _note(self, why: str, pause_s: float) -> None:
        """The server tells from now on, or does not: why. It is asked again after `pause_s`."""
        if why != self.why:
            told = f"{self._where} tells which chunks it evicts and expires"
            logger.log(logging.WARNING if why else logging.INFO, "%s", why or told)
        self.why, self._begin_at = why, time.monotonic() + pause_s

    def _subscribed(self, connection: Connection) -> Sequence[Reply]:
        """Raises RedisReplyError unless the server tells, or may: some hide their settings."""
        connection.arm(inf)
        connection.send((_CONFIG_COMMAND,), 1)
        (reply,) = connection.receive_all()
        flags = reply[1] if isinstance(reply, list) and len(reply) == 2 else b"AE"
        assert isinstance(flags, bytes)
        if b"E" not in flags or (b"A" not in flags and not (b"e" in flags and b"x" in flags)):
            shown = flags.decode("ascii", "replace")
            raise RedisReplyError(
                f"its {_SETTING} is '{shown}'; set it to Egex, or add these letters"
            )
        channels = removal_channels(self._server.connector.endpoint.db)
        return self._told(connection, pack_command("SUBSCRIBE", *channels))

    def _told(self, connection: Connection, request: bytes = b"") -> Sequence[Reply]:
        """What has come before the answer to a PING, which says that the server is alive."""
        connection.arm(inf)
        connection.send((request + PING_COMMAND,), _MOST_REPLIES)
        replies: list[Reply] = []
        while _PONG not in replies:
            replies += connection.receive(1)
        return replies
