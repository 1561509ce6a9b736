"""What servers evict and expire, as they tell it (keyspace notifications), for who wants to know.

A server tells what `notify-keyspace-events` names: E with e (evicted), x (expired), g (removed by a
client, or moved to another shard, so nothing is certain then). It keeps nothing for a subscriber
that is away, so a subscription begins with `on_begun`: who relies on the news asks again for what
it believes to be there. FLUSHALL tells nothing, nor does a server whose setting is changed: a
subscription is renewed every minute.

One connection to each server, with a thread, while somebody listens. It counts for nothing else: a
server that refuses it is not down.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from lmcache_redis.chunks.names import chunk_key_in
from lmcache_redis.errors import (
    ConfigError,
    RedisError,
    RedisProtocolError,
    RedisReplyError,
)
from lmcache_redis.resp.health import DataServer
from lmcache_redis.resp.jobs import LoopThread
from lmcache_redis.resp.net.connection import Connection
from lmcache_redis.resp.net.wire import PING_COMMAND, Reply, pack_command, without_errors

logger = logging.getLogger(__name__)

# How long news may wait in the socket.
_POLL_S = 0.1
# Until a server is asked again that does not tell, or refuses.
_ASK_AGAIN_S = 30.0
_RECONNECT_S = 1.0
_RENEW_S = 60.0
_EVENTS = ("evicted", "expired", "del")
_SETTING = "notify-keyspace-events"
_CONFIG_COMMAND = pack_command("CONFIG", "GET", _SETTING)
_PONG: Reply = [b"pong", b""]
_MOST_REPLIES = 1 << 30

# Chunk keys, each perhaps several times, and whether it is certain that they are gone.
Told = Callable[[Sequence[bytes], bool], None]


class Removals:
    """Who listens to the servers of a plane. Thread-safe; callbacks come on their threads."""

    def __init__(self, key_prefix: bytes) -> None:
        self._key_prefix = key_prefix
        self._changed = threading.Condition()
        self._on_removed: Told | None = None
        self._on_begun: Callable[[], None] = lambda: None
        self._states: dict[str, str] = {}  # of servers: why one does not tell, or nothing

    def listen(self, on_removed: Told, on_begun: Callable[[], None]) -> None:
        """Have servers tell from now on."""
        self._on_begun, self._on_removed = on_begun, on_removed
        self.wake()

    def stop(self) -> None:
        self._on_removed = None
        self._states.clear()
        self.wake()

    @property
    def why_silent(self) -> str:
        """Why a server does not tell, and what to change; empty if all do, or if none is asked."""
        return next(filter(None, list(self._states.values())), "")

    @property
    def is_wanted(self) -> bool:
        return self._on_removed is not None

    def wait(self, until: Callable[[], bool], timeout_s: float | None = None) -> None:
        with self._changed:
            self._changed.wait_for(until, timeout_s)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def note(self, where: str, why: str = "") -> None:
        """A server tells from now on, or does not: why."""
        if self._states.get(where) != why:
            told = f"{where} tells which chunks it evicts and expires"
            logger.log(logging.WARNING if why else logging.INFO, "%s", why or told)
        self._states[where] = why
        if not why:
            self._on_begun()

    def forget(self, where: str) -> None:
        self._states.pop(where, None)

    def told(self, messages: Sequence[Reply]) -> None:
        """Messages of a subscription."""
        keys: dict[bytes, bool] = {}  # a chunk's stripes go one after the other
        for message in messages:
            if not isinstance(message, list) or len(message) != 3 or message[0] != b"message":
                raise RedisProtocolError("something else than a message of a subscription")
            _, channel, name = message
            if not isinstance(channel, bytes) or not isinstance(name, bytes):
                raise RedisProtocolError("a message of a subscription without a key")
            key = chunk_key_in(name, self._key_prefix)
            if key is not None:
                keys[key] = keys.get(key, False) or not channel.endswith(b":del")
        listener = self._on_removed
        if listener is not None:
            for is_certain in (True, False):
                if told := [key for key, certain in keys.items() if certain is is_certain]:
                    listener(told, is_certain)


class RemovalListener:
    """The subscription to one server."""

    def __init__(self, server: DataServer, removals: Removals) -> None:
        self._server = server
        self._removals = removals
        self._has_ended = False
        endpoint = server.connector.endpoint
        self._where = endpoint.where
        self._channels = [f"__keyevent@{endpoint.db}__:{event}" for event in _EVENTS]
        self.thread = LoopThread("lmcr-removals", self._step)

    def close(self) -> None:
        """End the thread soon; `Connector.abort` ends what it waits for."""
        self._has_ended = True
        self._removals.forget(self._where)
        self._removals.wake()

    def _step(self) -> bool:
        removals = self._removals
        removals.wait(lambda: removals.is_wanted or self._has_ended)
        if self._has_ended or not self._server.health.wait_up():
            return False
        try:
            with closing(self._server.open("removals")) as connection:
                why, pause_s = self._why_silent(connection), _ASK_AGAIN_S
                if not why:
                    self._listen(connection)
                    return True
        except RedisReplyError as error:
            why = f"{self._where} does not tell routers what it evicts and expires: {error}"
            pause_s = _ASK_AGAIN_S
        except (RedisError, ConfigError) as error:
            why, pause_s = f"the subscription to {self._where} has ended: {error}", _RECONNECT_S
        if not self._has_ended:
            removals.note(self._where, why)
        removals.wait(lambda: self._has_ended or not removals.is_wanted, pause_s)
        return True

    def _why_silent(self, connection: Connection) -> str:
        """Empty if the server tells, or may: some do not show their configuration."""
        reply = self._asked(connection, _CONFIG_COMMAND, 1)[0]
        flags = reply[1] if isinstance(reply, list) and len(reply) == 2 else b"AE"
        assert isinstance(flags, bytes)
        if b"E" in flags and (b"A" in flags or (b"e" in flags and b"x" in flags)):
            return ""
        return (
            f"{self._where} does not tell routers what it evicts and expires: its {_SETTING} is "
            f"'{flags.decode('ascii', 'replace')}'; set it to Egex, or add these letters"
        )

    def _listen(self, connection: Connection) -> None:
        """While there are listeners, or for a while. Raises what the connection does."""
        until_s = time.monotonic() + _RENEW_S
        request, count = pack_command("SUBSCRIBE", *self._channels), len(self._channels)
        replies = without_errors(self._asked(connection, request, 1))  # or one error
        while len(replies) < count:
            replies += self._asked(connection, b"", 1)
        self._removals.note(self._where)
        self._removals.told(replies[count:])
        while self._removals.is_wanted and not self._has_ended and time.monotonic() < until_s:
            # What has come before its answer is news; the answer says that the server is alive.
            replies = self._asked(connection, PING_COMMAND, 1)
            while _PONG not in replies:
                replies += self._asked(connection, b"", 1)
            replies.remove(_PONG)
            self._removals.told(replies)
            if not replies:
                self._removals.wait(lambda: self._has_ended, _POLL_S)

    def _asked(self, connection: Connection, request: bytes, least: int) -> list[Reply]:
        deadline = time.monotonic() + self._server.options.op_timeout_s
        if request:
            connection.send((request,), deadline)
        return connection.receive(deadline, least, _MOST_REPLIES)
