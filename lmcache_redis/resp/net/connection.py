# SPDX-License-Identifier: Apache-2.0
"""Connections to one server: sockets, commands and replies, each with a deadline.

Name look-up, connect and TLS handshake have the connect time-out together, however many addresses a
name has. The greeting has the op time-out, however slowly its replies arrive. A caller's deadline
shortens both. A name look-up cannot be interrupted: it has a thread of its own, and no call waits
for it beyond its deadline. A connector has one in flight, which all its callers wait for.

A connection closes itself after a time-out, a loss or a malformed reply: the next bytes on the
socket would be unknown. An error reply leaves it in step and open.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lmcache_redis.errors import (
    RedisError,
    RedisLost,
    RedisProtocolError,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.processes import NamedThread
from lmcache_redis.resp.net.endpoint import (
    Endpoint,
    Transport,
    auth_command,
    judge_greeting,
    translated,
)
from lmcache_redis.resp.net.tls import name_in_certificate, tls_context
from lmcache_redis.resp.net.wire import (
    ErrorReply,
    Reply,
    ReplyBuffer,
    error_of,
    pack_command,
)

logger = logging.getLogger(__name__)

# A server that closed a connection at its name is given none for so long.
_UNNAMED_S = 600.0
# A unix socket's default (208 KiB) makes a sender sleep five times a stripe; TCP tunes itself.
_UNIX_SEND_BUFFER_BYTES = 1 << 20
# Keep-alive: on an idle connection, a dead machine is noticed within 45 s.
_TCP_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
_RECEIVE_BYTES = 64 << 10
_LEAST_TIMEOUT_S = 0.001
_TLS_SEND_BYTES = 256 << 10
_TLS_TOGETHER_BYTES = 4096
# Resolvers give up sooner; after this, a look-up that hangs is not waited for any more.
_LONGEST_NAME_S = 60.0

BytesLike = bytes | bytearray | memoryview


# As in the socket module: the family, and the argument of `connect`.
Address = tuple[int, Any]


class Connection:
    """A socket, plain or TLS. One thread uses and closes it; others may abort it.

    Every call raises RedisTimeout, RedisUnavailable or RedisProtocolError, and closes the
    connection then, or what `wire.error_of` returns for an error reply, and stays open. The
    deadline of `arm` (`time.monotonic()` seconds) holds for all calls until the next, however few
    bytes each moves: the clock is read before every system call.

    Commands may be sent before earlier replies have arrived, which is in order.

    Movers of stripes use `arm`, `send_some` and `receive_some`, which close nothing: they count
    what each call moved.

    is_open: it was greeted, and is not closed. outstanding: replies that have not been received.
    siblings: connections that are not closed; it leaves them when it is.
    """

    def __init__(
        self,
        sock: socket.socket,
        endpoint: Endpoint,
        op_timeout_s: float,
        siblings: set[Connection] | None = None,
    ) -> None:
        self.is_open = False
        self.outstanding = 0
        self._sock = sock
        self._endpoint = endpoint
        self._op_timeout_s = op_timeout_s
        self._siblings = siblings
        self._deadline = 0.0
        self._lock = threading.Lock()
        self._replies = ReplyBuffer()
        self._view = memoryview(bytearray(_RECEIVE_BYTES))

    @property
    def plain_fileno(self) -> int:
        """The file descriptor, if bytes on it are not encrypted; else -1."""
        return -1 if isinstance(self._sock, ssl.SSLSocket) else self._sock.fileno()

    def connect(self, address: Any, deadline: float) -> None:
        """Raises OSError; TimeoutError if the deadline passes."""
        self._sock.settimeout(max(_LEAST_TIMEOUT_S, deadline - time.monotonic()))
        self._sock.connect(address)
        if isinstance(self._sock, ssl.SSLSocket):
            # The time-out is for the whole handshake.
            self._sock.settimeout(max(_LEAST_TIMEOUT_S, deadline - time.monotonic()))
            self._sock.do_handshake()

    def greet(self, commands: Sequence[tuple[str, ...]], deadline: float) -> None:
        """Make it ready: authenticate, select the database, name the connection. Closes nothing."""
        self.arm(deadline)
        # A server at its maxclients says so and closes: its reply may have arrived.
        with contextlib.suppress(RedisUnavailable):
            self.send_all(b"".join([pack_command(*words) for words in commands]))
        for name, *_ in commands:
            while not (replies := self._replies.take(1)):
                self._replies.feed(self._view[: self.receive_some(self._view)])
            if isinstance(replies[0], ErrorReply):
                judge_greeting(replies[0], name, self._endpoint)
        if self._replies.has_rest or not self._is_quiet():
            raise RedisProtocolError("the server sent something that was not asked for")
        self.is_open = True

    def close(self) -> None:
        self.is_open = False
        if self._siblings is not None:
            self._siblings.discard(self)
        # Under the lock: `abort` must not shut down another socket with this descriptor.
        with self._lock:
            self._sock.close()

    def abort(self) -> None:
        """Make the call in flight fail at once. From any thread, any number of times."""
        with self._lock:
            if self._sock.fileno() >= 0:
                with contextlib.suppress(OSError):
                    # Not unwrap(): a TLS goodbye could wait for the peer.
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def check_idle(self) -> None:
        """Close if the server has closed it, or sent something unasked."""
        if self.is_open and not self._is_quiet():
            self.close()

    def send(self, requests: Iterable[bytes], replies: int) -> None:
        """Send packed commands, and expect this number of replies.

        The server works on the first while `requests` makes the next.
        """
        self.outstanding += replies
        try:
            for request in requests:
                self.send_all(request)
        except (RedisTimeout, RedisUnavailable):
            self.close()
            raise

    @property
    def takes_ahead(self) -> bool:
        """Whether the connection is plain, and nothing has arrived."""
        return self.plain_fileno >= 0 and self._is_quiet()

    def send_ahead(self, request: bytes, replies: int) -> int:
        """Send as much as possible without blocking; return how many bytes.

        For a thread that keeps the owner out, if it `takes_ahead`. 0 if it is lost: sending the
        rest raises the error.
        """
        self.outstanding += replies
        try:
            return os.write(self._sock.fileno(), request)
        except OSError:
            return 0

    def receive(self, least: int) -> list[Reply]:
        """The next replies, at least `least`; raises the first error among them.

        If it is called again for the rest of them, they contain no arrays.
        """
        replies = self._receive(least)
        for reply in replies:
            if isinstance(reply, ErrorReply):
                raise error_of(reply)
        return replies

    def receive_all(self) -> list[Reply]:
        """Every outstanding reply, error replies among them."""
        return self._receive(self.outstanding)

    def _receive(self, least: int) -> list[Reply]:
        replies: list[Reply] = []
        try:
            while len(replies) < least:
                self._replies.feed(self._view[: self.receive_some(self._view)])
                replies += self._replies.take(self.outstanding - len(replies))
            self.outstanding -= len(replies)
            if self.outstanding < 0 or (not self.outstanding and self._replies.has_rest):
                raise RedisProtocolError("more replies came than were asked for")
        except (RedisTimeout, RedisUnavailable, RedisProtocolError):
            self.close()
            raise
        return replies

    def call(self, request: bytes, replies: int, deadline: float) -> list[Reply]:
        """Send packed commands and receive exactly their replies; the first error is raised.

        A deadline that has passed costs no connection.
        """
        self.arm(deadline)
        self.send((request,), replies)
        return self.receive(replies)

    # ------------------------------------------------------------------ bytes

    def arm(self, deadline: float) -> None:
        """Set the deadline of the next calls: `deadline`, at most an op time-out from now."""
        now = time.monotonic()
        self._deadline = min(now + self._op_timeout_s, deadline)
        if self._deadline <= now:
            raise self.late()

    def send_all(self, request: bytes) -> None:
        sent = 0
        while sent < len(request):
            sent += self.send_some((request,), sent)

    def send_some(self, parts: Sequence[BytesLike], skip: int) -> int:
        """Send at least one byte after the first `skip` bytes; return how many."""
        views = _after(parts, skip)
        try:
            self._limit()
            if not isinstance(self._sock, ssl.SSLSocket):
                return self._sock.sendmsg(views)
            # Small parts are joined: every send is a record, and often a packet, of its own.
            small = b""
            for view in views:
                if len(small) + view.nbytes > _TLS_TOGETHER_BYTES:
                    break
                small += view
            return self._sock.send(small or views[0][:_TLS_SEND_BYTES])
        except OSError as error:
            raise self._lost(error) from None

    def receive_some(self, view: memoryview) -> int:
        """Receive what has arrived, at least one byte, at most the view; return how many."""
        try:
            self._limit()
            received = self._sock.recv_into(view)
        except OSError as error:
            raise self._lost(error) from None
        if received == 0:
            raise self._lost()
        return received

    def lost(self, error_number: int) -> RedisError:
        """The error for an errno of the native extension (0: the server closed the connection)."""
        error = OSError(error_number, os.strerror(error_number)) if error_number else None
        return self._lost(error)

    def late(self) -> RedisTimeout:
        return RedisTimeout(f"Redis at {self._endpoint.where} did not answer in time")

    def _is_quiet(self) -> bool:
        """Whether nothing has arrived: neither bytes nor the end of the connection."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def _limit(self) -> None:
        """Have the next call end by the deadline."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self.late()
        self._sock.settimeout(left)

    def _lost(self, error: OSError | None = None) -> RedisError:
        if isinstance(error, (BlockingIOError, TimeoutError)):
            return self.late()
        why = "it was closed by the server" if error is None else error.strerror or str(error)
        where = self._endpoint.where
        return RedisLost(f"the connection to Redis at {where} was lost: {why}")


def _after(parts: Sequence[BytesLike], nbytes: int) -> list[memoryview]:
    """Views of `parts` after their first `nbytes` bytes, without copies."""
    left: list[memoryview] = []
    for part in parts:
        view = memoryview(part)
        if nbytes < view.nbytes:
            left.append(view.cast("B")[nbytes:])
        nbytes = max(0, nbytes - view.nbytes)
    return left


class Connector:
    """Opens connections to one server, and can abort all of them at once. Thread-safe.

    connect_timeout_s: for look-up, connect and TLS handshake together. op_timeout_s: for the
    greeting, and for each operation.
    """

    def __init__(self, endpoint: Endpoint, connect_timeout_s: float, op_timeout_s: float) -> None:
        self.endpoint = endpoint
        self._connect_timeout_s = connect_timeout_s
        self._op_timeout_s = op_timeout_s
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._aborted = False
        self._name: _NameLookUp | None = None  # the last one
        self._unnamed_until = -math.inf

    def open(self, client_name: str, deadline: float = math.inf) -> Connection:
        """A new connection: authenticated, database selected, named `client_name` if allowed.

        Raises RedisUnavailable, RedisTimeout, RedisAuthError or RedisProtocolError with a sentence
        that says what to change, or ConfigError if a TLS file is unreadable. A credential provider
        is called first, on this thread, and has no time-out.
        """
        auth = auth_command(self.endpoint.credentials)
        commands = [] if auth is None else [auth]
        if self.endpoint.db:
            commands.append(("SELECT", str(self.endpoint.db)))
        try:
            connection = self._greeted(commands, client_name, deadline)
        except (RedisError, OSError, UnicodeError, RuntimeError) as error:
            with self._lock:
                self._check_wanted()
            raise translated(error, self.endpoint) from None
        # If it was aborted in the meantime, it fails at its first use.
        return connection

    def _greeted(
        self, commands: list[tuple[str, ...]], client_name: str, deadline: float
    ) -> Connection:
        """A connection after `commands`. Some proxies close one that is given a name (twemproxy):
        then it is tried once more without, and for a while none gets a name."""
        if self._unnamed_until <= time.monotonic():
            with contextlib.suppress(RedisLost):
                return self._try([*commands, ("CLIENT", "SETNAME", client_name)], deadline)
        connection = self._try([*commands, ("PING",)], deadline)
        if self._unnamed_until <= time.monotonic():
            self._unnamed_until = time.monotonic() + _UNNAMED_S
            where = self.endpoint.where
            logger.info("Redis at %s closes connections at CLIENT: they stay unnamed", where)
        return connection

    def _try(self, commands: list[tuple[str, ...]], deadline: float) -> Connection:
        connection = self._connect(min(deadline, time.monotonic() + self._connect_timeout_s))
        try:
            connection.greet(commands, deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def abort(self) -> None:
        """Fail every connection, and every attempt to open one, from now on."""
        with self._lock:
            self._aborted = True
        self.drop()

    def drop(self) -> None:
        """Close all open connections."""
        for connection in list(self._connections):
            connection.abort()

    def _check_wanted(self) -> None:
        if self._aborted:
            raise RedisUnavailable("the Redis plane is being closed")

    def _connect(self, deadline: float) -> Connection:
        """Connect to the first address that answers; each has its share of the time left."""
        addresses = self._addresses(deadline)
        while True:
            family, address = addresses.pop(0)
            now = time.monotonic()
            connection = self._new_connection(family)
            try:
                with self._lock:
                    self._check_wanted()
                    # `abort` reaches it from the start.
                    self._connections.add(connection)
                connection.connect(address, now + (deadline - now) / (len(addresses) + 1))
                return connection
            except BaseException as error:
                connection.close()
                if not isinstance(error, OSError) or not addresses:
                    raise

    def _new_connection(self, family: int) -> Connection:
        endpoint = self.endpoint
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if endpoint.transport is Transport.UNIX:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SEND_BUFFER_BYTES)
            else:
                for option in _TCP_OPTIONS:
                    sock.setsockopt(*option)
            if endpoint.transport is Transport.TLS:
                sock = tls_context(endpoint.tls).wrap_socket(
                    sock,
                    server_hostname=name_in_certificate(endpoint.host),
                    do_handshake_on_connect=False,
                )
            return Connection(sock, endpoint, self._op_timeout_s, self._connections)
        except BaseException:
            sock.close()
            raise

    # ------------------------------------------------------------------ names

    def _addresses(self, deadline: float) -> list[Address]:
        """At least one.

        Raises OSError, UnicodeError, TimeoutError if it takes too long, and RuntimeError if there
        can be no thread.
        """
        if self.endpoint.transport is Transport.UNIX:
            return [(socket.AF_UNIX, self.endpoint.path)]
        with contextlib.suppress(socket.gaierror):
            return self._resolve(socket.AI_NUMERICHOST)
        with self._lock:
            name = self._name
            if name is None or not name.is_in_flight:
                name = _NameLookUp(self._resolve)
                name.thread.start()
                self._name = name
        return name.result(deadline)

    def _resolve(self, flags: int) -> list[Address]:
        host, port = self.endpoint.host, self.endpoint.port
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
        return [(family, address) for family, _, _, _, address in found]


class _NameLookUp:
    """A look-up on a thread of its own. Those who wait for it share what it finds."""

    def __init__(self, resolve: Callable[[int], list[Address]]) -> None:
        self.thread = NamedThread("redis-name", self._run)
        self._resolve = resolve
        self._given_up_at = time.monotonic() + _LONGEST_NAME_S
        self._done = threading.Event()
        self._found: list[Address] = []
        # Each waiter raises its own.
        self._failure: tuple[type[Exception], tuple[Any, ...]] | None = None

    @property
    def is_in_flight(self) -> bool:
        return not self._done.is_set() and time.monotonic() < self._given_up_at

    def result(self, deadline: float) -> list[Address]:
        """Raises OSError and UnicodeError; TimeoutError at the deadline."""
        if not self._done.wait(max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        if self._failure is not None:
            kind, words = self._failure
            raise kind(*words)
        return list(self._found)

    def _run(self) -> None:
        try:
            self._found = self._resolve(0)
        except (OSError, UnicodeError) as error:
            self._failure = type(error), error.args
        except BaseException:
            self._failure = OSError, ("the name look-up failed",)
            raise
        finally:
            self._done.set()
