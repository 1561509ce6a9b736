"""Connections to Redis, made by redis-py and then taken out of its hands.

The only module that knows redis-py's insides: `_take_socket` needs `Connection._sock` to be
the connected socket (tests/resp/test_connect.py fails clearly where a release moves it), the
rest is public. redis-py resolves, connects, speaks TLS, authenticates and selects the
database; from then on the socket carries RESP2 and is ours. Its exceptions end here.
"""

from __future__ import annotations

import contextlib
import errno
import re
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any

from lmcache_redis.errors import (
    ConfigError,
    RedisAuthError,
    RedisError,
    RedisProtocolError,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp.endpoint import Endpoint, Transport
from lmcache_redis.resp.stream import PlainStream, Stream, TlsStream

# A unix socket's default (208 KiB) makes a sender sleep five times a stripe; TCP tunes itself.
_UNIX_SEND_BUFFER_BYTES = 1 << 20


_OF_CERTIFICATES = re.compile("ALERT_(CERTIFICATE|UNKNOWN_CA|BAD_CERTIFICATE|NO_CERTIFICATE)")


class Connector:
    """Makes streams to one endpoint, and can make all of them fail at once.

    Thread-safe. connect_timeout_s bounds the TCP or TLS connection, op_timeout_s each reply
    of the handshake and then each step on the stream.
    """

    def __init__(self, endpoint: Endpoint, connect_timeout_s: float, op_timeout_s: float) -> None:
        self.endpoint = endpoint
        self.connects = 0
        self._connect_timeout_s = connect_timeout_s
        self._op_timeout_s = op_timeout_s
        self._lock = threading.Lock()
        self._handshakes: set[Any] = set()
        self._streams: set[Stream] = set()
        self._aborted = False

    @property
    def open_streams(self) -> int:
        """Streams that were opened here and not discarded yet."""
        with self._lock:
            return len(self._streams)

    def open(self, client_name: str) -> Stream:
        """A new connection, authenticated, on its database, named `client_name` if allowed.

        Raises RedisUnavailable, RedisTimeout, RedisAuthError, RedisProtocolError with a
        sentence that says what to change, or ConfigError for TLS files that are none.
        """
        connection = self._prepare()
        try:
            sock = _connect(connection, client_name, self.endpoint)
        finally:
            with self._lock:
                self._handshakes.discard(connection)
        stream = self._stream(sock)
        with self._lock:
            if not self._aborted:
                self.connects += 1
                self._streams.add(stream)
                return stream
        stream.close()
        raise RedisUnavailable("the Redis plane is being closed")

    def discard(self, stream: Stream) -> None:
        """Close a stream for good."""
        with self._lock:
            self._streams.discard(stream)
        stream.close()

    def abort(self) -> None:
        """Fail every stream, and every attempt to open one, now and from now on."""
        with self._lock:
            self._aborted = True
            for stream in self._streams:
                stream.abort()
            for connection in self._handshakes:
                sock = getattr(connection, "_sock", None)
                if sock is not None:
                    with contextlib.suppress(OSError):
                        socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _greet(self, connection: Any) -> None:
        """redis-py's handshake, from its beginning within the reach of `abort`."""
        with self._lock:
            if self._aborted:
                raise RedisUnavailable("the Redis plane is being closed")
            self._handshakes.add(connection)
        connection.on_connect()

    def _prepare(self) -> Any:
        """A redis-py connection for the endpoint, not connected yet."""
        # 0.2 s and 25 MB that an agent need not spend before it has begun to serve.
        from redis import connection as redis_connection

        endpoint = self.endpoint
        settings: dict[str, Any] = {
            "db": endpoint.db,
            "username": endpoint.username,
            "password": endpoint.password,
            "protocol": endpoint.protocol,
            "socket_timeout": self._op_timeout_s,
            "socket_connect_timeout": self._connect_timeout_s,
            "redis_connect_func": self._greet,
        }
        if endpoint.transport is Transport.UNIX:
            return redis_connection.UnixDomainSocketConnection(path=endpoint.path, **settings)
        settings |= {"host": endpoint.host, "port": endpoint.port, "socket_keepalive": True}
        if endpoint.transport is Transport.TLS:
            return redis_connection.SSLConnection(**settings, **_tls_settings(endpoint))
        return redis_connection.Connection(**settings)

    def _stream(self, sock: socket.socket) -> Stream:
        where = self.endpoint.where
        if isinstance(sock, ssl.SSLSocket):
            return TlsStream(sock, where, self._op_timeout_s)
        if self.endpoint.transport is Transport.UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SEND_BUFFER_BYTES)
        return PlainStream(sock, where, self._op_timeout_s)


def _tls_settings(endpoint: Endpoint) -> dict[str, Any]:
    # Without a password OpenSSL would ask for one on the terminal.
    return {"ssl_password": "", **dict(endpoint.tls)}


def redis_client(
    endpoint: Endpoint,
    connect_timeout_s: float,
    op_timeout_s: float,
    greet: Callable[[Any], None] | None = None,
) -> Any:
    """A `redis.Redis` for the odd question: RESP2, bytes, one try. Close it (`with`).

    greet: redis-py's redis_connect_func, called with each connection to set it up.
    """
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    settings: dict[str, Any] = {
        "db": endpoint.db,
        "username": endpoint.username,
        "password": endpoint.password,
        "protocol": 2,
        "socket_timeout": op_timeout_s,
        "socket_connect_timeout": connect_timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "redis_connect_func": greet,
    }
    if endpoint.transport is Transport.UNIX:
        return redis.Redis(unix_socket_path=endpoint.path, **settings)
    if endpoint.transport is Transport.TLS:
        settings |= {"ssl": True, **_tls_settings(endpoint)}
    return redis.Redis(host=endpoint.host, port=endpoint.port, **settings)


def _connect(connection: Any, client_name: str, endpoint: Endpoint) -> socket.socket:
    from redis import exceptions

    try:
        connection.connect()
        # Not redis-py's client_name: a user whose ACL forbids CLIENT could not connect.
        connection.send_command("CLIENT", "SETNAME", client_name)
        with contextlib.suppress(exceptions.ResponseError):
            connection.read_response()
        return _take_socket(connection)
    except (exceptions.RedisError, OSError, UnicodeError) as error:
        connection.disconnect()
        raise translated(error, endpoint) from None
    except BaseException:
        connection.disconnect()
        raise


def _take_socket(connection: Any) -> socket.socket:
    """The connected socket, which redis-py will neither use nor close any more."""
    sock = getattr(connection, "_sock", None)
    if not isinstance(sock, socket.socket) or sock.fileno() < 0:
        raise ConfigError(
            "the installed redis-py hides the socket of its connections: install redis>=7,<9"
        )
    # After the last reply of the handshake nothing may be left, there or in a parser's buffer.
    if connection.can_read(0):
        connection.disconnect()
        raise RedisProtocolError("the server sent something that nobody asked for")
    connection._sock = None
    connection.disconnect()
    if sock.fileno() < 0:
        raise ConfigError(
            "the installed redis-py closes sockets it no longer owns: install redis>=7,<9"
        )
    return sock


def translated(error: Exception, endpoint: Endpoint) -> RedisError | ConfigError:
    """Ours for what redis-py or the socket raised. No message contains a secret."""
    from redis import exceptions

    at = f"Redis at {endpoint.where}"
    text = str(error)
    auth = (exceptions.AuthenticationError, exceptions.AuthenticationWrongNumberOfArgsError)
    if isinstance(error, auth) or text.startswith(("NOAUTH", "WRONGPASS")):
        if endpoint.password is None:
            return RedisAuthError(f"{at} wants a password: put one into the Redis URL")
        return RedisAuthError(
            f"{at} refuses the user or the password: correct them in the Redis URL ({_brief(text)})"
        )
    if isinstance(error, exceptions.BusyLoadingError):
        return RedisUnavailable(f"{at} is still loading its data")
    if isinstance(error, exceptions.TimeoutError):
        tls = ", or is there no TLS" if endpoint.transport is Transport.TLS else ""
        return RedisTimeout(f"{at} does not answer: is it stopped, or the address wrong{tls}?")
    if isinstance(error, exceptions.InvalidResponse):
        return RedisProtocolError(f"{at} does not speak Redis: is the port right, does it use TLS?")
    if "max number of clients" in text:
        return RedisUnavailable(f"{at} has no connection left: raise its maxclients")
    if isinstance(error, exceptions.ResponseError):
        return RedisUnavailable(f"{at} refuses the connection: {_brief(text)}")
    return _translated_os(error, endpoint, at, text)


def _translated_os(
    error: Exception, endpoint: Endpoint, at: str, text: str
) -> RedisError | ConfigError:
    cause = error if isinstance(error, OSError) else error.__context__
    if endpoint.transport is Transport.TLS and isinstance(cause, FileNotFoundError):
        return ConfigError("a TLS file that the Redis URL names cannot be read")
    if isinstance(cause, ssl.SSLError):
        return RedisUnavailable(f"{at} cannot be reached over TLS: {_tls_advice(cause)}")
    if isinstance(cause, (socket.gaierror, UnicodeError)):
        return RedisUnavailable(f"{at}: this host name is unknown: correct the Redis URL")
    code = cause.errno if isinstance(cause, OSError) else None
    if code == errno.ECONNREFUSED:
        return RedisUnavailable(f"{at} refuses connections: start it, or correct the Redis URL")
    if code == errno.ENOENT and endpoint.transport is Transport.UNIX:
        return RedisUnavailable(f"{at} does not exist: start Redis, or correct the Redis URL")
    if code == errno.EACCES:
        return RedisUnavailable(f"{at} may not be used by this user: see its permissions")
    if code is not None:
        return RedisUnavailable(f"{at} cannot be reached: {errno.errorcode.get(code, code)}")
    return RedisUnavailable(f"{at} closed the connection during its set-up ({_brief(text)})")


def _tls_advice(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{error.verify_message} (ssl_ca_certs names the CA, ssl_check_hostname the check)"
    if _OF_CERTIFICATES.search(error.reason or ""):
        return (
            f"it refuses our certificate ({error.reason}): ssl_certfile and ssl_keyfile name one "
            "that its CA has signed"
        )
    if "PEM lib" in str(error) or error.reason in ("BAD_DECRYPT", "BAD_PASSWORD_READ"):
        return "the key of ssl_keyfile cannot be read; if it is locked, ssl_password opens it"
    if error.reason == "WRONG_VERSION_NUMBER":
        return "the server does not speak TLS there: use redis:// or its TLS port"
    return f"{error.reason or error}"


def _brief(text: str) -> str:
    return " ".join(text.split())[:160]
