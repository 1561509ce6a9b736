"""Sockets with deadlines, plain and TLS, and the greeting.

A deadline holds for all calls until the next `arm`, however few bytes each call moves: the clock is
read before every system call. A stream raises RedisTimeout when the deadline passes, and
RedisUnavailable when the connection is lost. After the latter the owner closes the stream; after
the former, too, unless it counts what each call moved.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmcache_redis.errors import (
    ConfigError,
    RedisAuthError,
    RedisError,
    RedisProtocolError,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp.net.tls import TlsParameters, tls_advice
from lmcache_redis.resp.net.wire import ErrorReply, ReplyBuffer, error_of, pack_command

BytesLike = bytes | bytearray | memoryview

_LEAST_TIMEOUT_S = 0.001
_SEND_BYTES = 256 << 10
_TOGETHER_BYTES = 4096
# Errors of CLIENT SETNAME that are ignored: the user may not be allowed to call it.
_TOLERATED = ("NOPERM", "ERR")


class Credentials(Protocol):
    """As redis-py's `redis.credentials.CredentialProvider`; importing that takes 0.15 s.

    Asked on any thread, at each connect, so that a secret may change; what it raises fails that.
    """

    def get_credentials(self) -> tuple[str, ...]:
        """(password,) or (user, password)."""


class Transport(enum.Enum):
    TCP = "redis"
    TLS = "rediss"
    UNIX = "unix"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server. host and port for TCP and TLS, path for a unix socket.

    tls: parameters by their redis-py names. repr and `where`, the server's name in messages,
    contain no credentials.
    """

    transport: Transport
    host: str = ""
    port: int = 0
    path: str = ""
    db: int = 0
    credentials: Credentials | None = field(default=None, repr=False)
    tls: TlsParameters = field(default=(), repr=False)

    @property
    def where(self) -> str:
        """The address, e.g. "127.0.0.1:6379" or "unix:///run/redis.sock"."""
        if self.transport is Transport.UNIX:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Stream:
    """A socket with a deadline. One thread uses and closes it; others may abort it."""

    __slots__ = ("_deadline", "_lock", "_op_timeout_s", "_sock", "_where")

    def __init__(self, sock: socket.socket, where: str, op_timeout_s: float) -> None:
        self._sock = sock
        self._where = where
        self._op_timeout_s = op_timeout_s
        self._deadline = 0.0
        self._lock = threading.Lock()

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

    def arm(self, deadline: float) -> None:
        """Set the deadline of the next calls: `deadline`, at most an op time-out from now."""
        now = time.monotonic()
        self._deadline = min(now + self._op_timeout_s, deadline)
        if self._deadline <= now:
            raise self.late()

    def send(self, parts: Sequence[BytesLike], nbytes: int) -> None:
        sent = 0
        while sent < nbytes:
            sent += self.send_some(parts, sent)

    def send_some(self, parts: Sequence[BytesLike], skip: int = 0) -> int:
        """Send at least one byte after the first `skip` bytes; return how many."""
        views = _after(parts, skip)
        # Small parts are joined: of TLS, every send is a record, and often a packet, of its own.
        small = b""
        for view in views:
            if len(small) + view.nbytes > _TOGETHER_BYTES:
                break
            small += view
        try:
            self._limit()
            return self._sock.send(small or views[0][:_SEND_BYTES])
        except OSError as error:
            raise self._lost(error) from None

    def receive_exactly(self, view: memoryview) -> None:
        while view.nbytes:
            view = view[self.receive_some(view) :]

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

    def is_quiet(self) -> bool:
        """Whether nothing has arrived: neither bytes nor the end of the connection."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def abort(self) -> None:
        """Make the call in flight fail at once. From any thread, any number of times."""
        with self._lock:
            if self._sock.fileno() >= 0:
                try:
                    # Not unwrap(): a TLS goodbye could wait for the peer.
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
                except OSError as error:
                    if error.errno not in (errno.ENOTCONN, errno.EINVAL):
                        raise

    def close(self) -> None:
        # Under the lock: `abort` must not shut down another socket with this descriptor.
        with self._lock:
            self._sock.close()

    def lost(self, error_number: int) -> RedisError:
        """The error for an errno of the native extension (0: the server closed the connection)."""
        error = OSError(error_number, os.strerror(error_number)) if error_number else None
        return self._lost(error)

    def late(self) -> RedisTimeout:
        return RedisTimeout(f"Redis at {self._where} did not answer in time")

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
        return RedisUnavailable(f"the connection to Redis at {self._where} was lost: {why}")


def _after(parts: Sequence[BytesLike], nbytes: int) -> list[memoryview]:
    """Views of `parts` after their first `nbytes` bytes, without copies."""
    left: list[memoryview] = []
    for part in parts:
        view = memoryview(part)
        if nbytes < view.nbytes:
            left.append(view.cast("B")[nbytes:])
        nbytes = max(0, nbytes - view.nbytes)
    return left


# ---------------------------------------------------------------- the greeting


def auth_command(credentials: Credentials | None) -> tuple[str, ...] | None:
    """The words of AUTH; None without credentials. Raises RedisAuthError if there are none now."""
    if credentials is None:
        return None
    try:
        words = credentials.get_credentials()
    except RedisAuthError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {brief(str(error))}"
        raise RedisAuthError(f"the credential provider failed: {why}") from None
    if (
        not isinstance(words, (tuple, list))
        or not 1 <= len(words) <= 2
        or not all(isinstance(word, str) for word in words)
    ):
        raise RedisAuthError(
            "the credential provider returned neither (password,) nor (user, password)"
        )
    return ("AUTH", *words)


def greet(
    stream: Stream,
    endpoint: Endpoint,
    auth: tuple[str, ...] | None,
    client_name: str,
    deadline: float,
) -> None:
    """Authenticate on a connected stream, select the database, name the connection.

    auth: the words of AUTH. Raises RedisError with a sentence that says what to change, or as the
    stream does.
    """
    commands = [auth] if auth is not None else []
    if endpoint.db:
        commands.append(("SELECT", str(endpoint.db)))
    commands.append(("CLIENT", "SETNAME", client_name))
    stream.arm(deadline)
    request = b"".join([pack_command(*words) for words in commands])
    # A server at its maxclients says so and closes: its reply may have arrived.
    with contextlib.suppress(RedisUnavailable):
        stream.send((request,), len(request))
    buffer = ReplyBuffer()
    view = memoryview(bytearray(4096))
    replied = 0
    while replied < len(commands):
        buffer.feed(view[: stream.receive_some(view)])
        for reply in buffer.take(len(commands) - replied):
            name = commands[replied][0]
            replied += 1
            if isinstance(reply, ErrorReply):
                _judge(reply, name, endpoint)
    if buffer.has_rest or not stream.is_quiet():
        raise RedisProtocolError("the server sent something that was not asked for")


NO_PASSWORD = (
    "has no password: leave it out of the Redis URL, LMCACHE_REDIS_PASSWORD and the password file"
)
NO_SENTINEL = "is no Sentinel: write redis:// instead of redis+sentinel://, or name its Sentinels"


def has_no_password(text: str) -> bool:
    """Whether a server refuses a password because it has none."""
    return "without any password configured" in text or "no password is set" in text


def is_no_sentinel(text: str) -> bool:
    return "unknown command" in text.lower() and "sentinel" in text.lower()


def _judge(reply: ErrorReply, name: str, endpoint: Endpoint) -> None:
    """Raise the error that a reply to the greeting stands for, unless the command may fail."""
    at = f"Redis at {endpoint.where}"
    error = error_of(reply)
    if "max number of clients" in reply.text:
        raise RedisUnavailable(f"{at} has no connection left: raise its maxclients")
    if reply.code == "LOADING":
        raise RedisUnavailable(f"{at} is still loading its data")
    if isinstance(error, RedisAuthError) or name == "AUTH":
        if endpoint.credentials is None:
            raise RedisAuthError(f"{at} wants a password: put one into the Redis URL")
        if has_no_password(reply.text):
            raise RedisAuthError(f"{at} {NO_PASSWORD}")
        raise RedisAuthError(
            f"{at} refuses the user or the password: correct them where they are set "
            f"({brief(reply.text)})"
        )
    if name != "CLIENT" or reply.code not in _TOLERATED:
        raise RedisUnavailable(f"{at} refuses the connection: {brief(reply.text)}")


def translated(error: Exception, endpoint: Endpoint) -> RedisError | ConfigError:
    """The error, with a sentence that says what to change, for one of connecting or greeting."""
    at = f"Redis at {endpoint.where}"
    if isinstance(error, (RedisTimeout, TimeoutError)) and not isinstance(error, ssl.SSLError):
        tls = ", or is there no TLS" if endpoint.transport is Transport.TLS else ""
        return RedisTimeout(f"{at} does not answer: is it stopped, or the address wrong{tls}?")
    if isinstance(error, RedisProtocolError):
        return RedisProtocolError(f"{at} does not speak Redis: is the port right, does it use TLS?")
    if isinstance(error, RedisError):
        return error
    if endpoint.transport is Transport.TLS and isinstance(error, FileNotFoundError):
        return ConfigError("a TLS file that the Redis URL names cannot be read")
    if isinstance(error, ssl.SSLError):
        return RedisUnavailable(f"{at} cannot be reached over TLS: {tls_advice(error)}")
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return RedisUnavailable(f"{at}: this host name is unknown: correct the Redis URL")
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.ECONNREFUSED:
        return RedisUnavailable(f"{at} refuses connections: start it, or correct the Redis URL")
    if code == errno.ENOENT and endpoint.transport is Transport.UNIX:
        return RedisUnavailable(f"{at} does not exist: start Redis, or correct the Redis URL")
    if code == errno.EACCES:
        return RedisUnavailable(f"{at} may not be used by this user: see its permissions")
    known = errno.errorcode.get(code, code) if code is not None else brief(str(error))
    return RedisUnavailable(f"{at} cannot be reached: {known}")


def brief(text: str) -> str:
    """One line of an error's text."""
    return " ".join(text.split())[:160]
