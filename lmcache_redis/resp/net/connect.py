"""Connections to one server: name look-up, connect, TLS handshake, greeting.

The first three have the connect time-out together, however many addresses a name has. The greeting
has the op time-out, however slowly its replies arrive. A caller's deadline shortens both. A name
look-up cannot be interrupted: it has a thread of its own, which concurrent callers share, and no
call waits for it beyond its deadline.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import math
import re
import socket
import ssl
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
from lmcache_redis.resp.net.endpoint import Endpoint, Transport
from lmcache_redis.resp.net.stream import PlainStream, Stream, TlsStream
from lmcache_redis.resp.net.wire import ErrorReply, ReplyBuffer, error_of, pack_command

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
_VERIFY_MODES = {
    "none": ssl.CERT_NONE,
    "optional": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}

# Errors of CLIENT SETNAME that are ignored: the user may not be allowed to call it.
_TOLERATED = ("NOPERM", "ERR")
_OF_CERTIFICATES = re.compile("ALERT_(CERTIFICATE|UNKNOWN_CA|BAD_CERTIFICATE|NO_CERTIFICATE)")

# As in the socket module: the family, and the argument of `connect`.
Address = tuple[int, Any]


class Connector:
    """Opens streams to one endpoint, and can abort all of them at once. Thread-safe.

    connect_timeout_s: for look-up, connect and TLS handshake together. op_timeout_s: for the
    greeting, and for each operation on the stream.
    """

    def __init__(self, endpoint: Endpoint, connect_timeout_s: float, op_timeout_s: float) -> None:
        self.endpoint = endpoint
        self.connects = 0
        self._connect_timeout_s = connect_timeout_s
        self._op_timeout_s = op_timeout_s
        self._lock = threading.Lock()
        self._opening: set[Stream] = set()
        self._streams: set[Stream] = set()
        self._look_up: concurrent.futures.Future[list[Address]] | None = None
        self._aborted = False

    @property
    def open_streams(self) -> int:
        """Streams that were opened and not discarded."""
        with self._lock:
            return len(self._streams)

    def open(self, client_name: str, deadline: float = math.inf) -> Stream:
        """A new connection: authenticated, database selected, named `client_name` if allowed.

        Raises RedisUnavailable, RedisTimeout, RedisAuthError or RedisProtocolError with a sentence
        that says what to change, or ConfigError if a TLS file is unreadable.
        """
        try:
            stream = self._connect(min(deadline, time.monotonic() + self._connect_timeout_s))
            try:
                greet(stream, self.endpoint, client_name, deadline)
            except BaseException:
                self.discard(stream)
                raise
        except (RedisError, OSError, UnicodeError) as error:
            with self._lock:
                self._check_wanted()
            raise translated(error, self.endpoint) from None
        with self._lock:
            # If it was aborted in the meantime, it fails at its first use.
            self._opening.discard(stream)
            self._streams.add(stream)
            self.connects += 1
        return stream

    def discard(self, stream: Stream) -> None:
        with self._lock:
            self._opening.discard(stream)
            self._streams.discard(stream)
        stream.close()

    def abort(self) -> None:
        """Fail every stream, and every attempt to open one, from now on."""
        with self._lock:
            self._aborted = True
            if self._look_up is not None:
                self._look_up.cancel()
            for stream in (*self._opening, *self._streams):
                stream.abort()

    def _check_wanted(self) -> None:
        if self._aborted:
            raise RedisUnavailable("the Redis plane is being closed")

    def _connect(self, deadline: float) -> Stream:
        """Connect to the first address that answers; each has its share of the time left."""
        addresses = self._addresses(deadline)
        while True:
            family, address = addresses.pop(0)
            now = time.monotonic()
            stream = self._new_stream(family)
            try:
                with self._lock:
                    self._check_wanted()
                    # `abort` reaches it from the start.
                    self._opening.add(stream)
                stream.connect(address, now + (deadline - now) / (len(addresses) + 1))
                return stream
            except BaseException as error:
                self.discard(stream)
                if not isinstance(error, OSError) or not addresses:
                    raise

    def _new_stream(self, family: int) -> PlainStream | TlsStream:
        endpoint = self.endpoint
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if endpoint.transport is Transport.UNIX:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SEND_BUFFER_BYTES)
            else:
                for option in _TCP_OPTIONS:
                    sock.setsockopt(*option)
            if endpoint.transport is Transport.TLS:
                sock = _tls_context(endpoint).wrap_socket(
                    sock, server_hostname=endpoint.host, do_handshake_on_connect=False
                )
                return TlsStream(sock, endpoint.where, self._op_timeout_s)
            return PlainStream(sock, endpoint.where, self._op_timeout_s)
        except BaseException:
            sock.close()
            raise

    # ------------------------------------------------------------------ names

    def _addresses(self, deadline: float) -> list[Address]:
        """At least one. Raises OSError, UnicodeError, and TimeoutError if it takes too long."""
        if self.endpoint.transport is Transport.UNIX:
            return [(socket.AF_UNIX, self.endpoint.path)]
        with contextlib.suppress(socket.gaierror):
            return self._resolve(socket.AI_NUMERICHOST)
        with self._lock:
            self._check_wanted()
            look_up = self._look_up
            if look_up is None or look_up.done():
                look_up = self._look_up = concurrent.futures.Future()
                threading.Thread(
                    target=self._look_up_name, args=(look_up,), name="redis-name", daemon=True
                ).start()
        try:
            return list(look_up.result(max(0.0, deadline - time.monotonic())))
        except concurrent.futures.CancelledError:
            raise RedisUnavailable("the Redis plane is being closed") from None
        except concurrent.futures.TimeoutError:
            raise TimeoutError from None

    def _look_up_name(self, look_up: concurrent.futures.Future[list[Address]]) -> None:
        # Closing the plane cancels it.
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            try:
                look_up.set_result(self._resolve(0))
            except (OSError, UnicodeError) as error:
                look_up.set_exception(error)

    def _resolve(self, flags: int) -> list[Address]:
        host, port = self.endpoint.host, self.endpoint.port
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
        return [(family, address) for family, _, _, _, address in found]


def _tls_context(endpoint: Endpoint) -> ssl.SSLContext:
    """Made for each connection: certificates may have been renewed. Raises OSError."""
    given: dict[str, Any] = dict(endpoint.tls)
    context = ssl.create_default_context()
    mode = _VERIFY_MODES[given.get("ssl_cert_reqs", "required")]
    context.check_hostname = mode != ssl.CERT_NONE and given.get("ssl_check_hostname", True)
    context.verify_mode = mode
    certificate = given.get("ssl_certfile") or given.get("ssl_keyfile")
    if certificate is not None:
        # Without a password OpenSSL would ask for one on the terminal.
        password = given.get("ssl_password", "")
        context.load_cert_chain(certificate, given.get("ssl_keyfile"), password)
    if "ssl_ca_certs" in given or "ssl_ca_path" in given:
        context.load_verify_locations(given.get("ssl_ca_certs"), given.get("ssl_ca_path"))
    return context


# ---------------------------------------------------------------- the greeting


def greet(stream: Stream, endpoint: Endpoint, client_name: str, deadline: float) -> None:
    """Authenticate on a connected stream, select the database, name the connection.

    Raises RedisError with a sentence that says what to change, or as the stream does.
    """
    commands = _commands(endpoint, client_name)
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
        for reply in buffer.take():
            if replied == len(commands):
                raise RedisProtocolError("the server sent something that was not asked for")
            name = commands[replied][0]
            replied += 1
            if isinstance(reply, ErrorReply):
                _judge(reply, name, endpoint)
    if buffer.pending_bytes or not stream.is_quiet():
        raise RedisProtocolError("the server sent something that was not asked for")


def _commands(endpoint: Endpoint, client_name: str) -> list[tuple[str, ...]]:
    commands: list[tuple[str, ...]] = []
    username, password = endpoint.username or "", endpoint.password or ""
    if endpoint.protocol == 3:
        with_auth = ("AUTH", username or "default", password) if username or password else ()
        commands.append(("HELLO", "3", *with_auth))
    elif username or password:
        commands.append(("AUTH", username, password) if username else ("AUTH", password))
    if endpoint.db:
        commands.append(("SELECT", str(endpoint.db)))
    commands.append(("CLIENT", "SETNAME", client_name))
    return commands


def _judge(reply: ErrorReply, name: str, endpoint: Endpoint) -> None:
    """Raise the error that a reply to the greeting stands for, unless the command may fail."""
    at = f"Redis at {endpoint.where}"
    error = error_of(reply)
    if "max number of clients" in reply.text:
        raise RedisUnavailable(f"{at} has no connection left: raise its maxclients")
    if reply.code == "LOADING":
        raise RedisUnavailable(f"{at} is still loading its data")
    if isinstance(error, RedisAuthError) or name == "AUTH":
        if not endpoint.password:
            raise RedisAuthError(f"{at} wants a password: put one into the Redis URL")
        raise RedisAuthError(
            f"{at} refuses the user or the password: correct them in the Redis URL "
            f"({_brief(reply.text)})"
        )
    if name != "CLIENT" or reply.code not in _TOLERATED:
        raise RedisUnavailable(f"{at} refuses the connection: {_brief(reply.text)}")


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
        return RedisUnavailable(f"{at} cannot be reached over TLS: {_tls_advice(error)}")
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return RedisUnavailable(f"{at}: this host name is unknown: correct the Redis URL")
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.ECONNREFUSED:
        return RedisUnavailable(f"{at} refuses connections: start it, or correct the Redis URL")
    if code == errno.ENOENT and endpoint.transport is Transport.UNIX:
        return RedisUnavailable(f"{at} does not exist: start Redis, or correct the Redis URL")
    if code == errno.EACCES:
        return RedisUnavailable(f"{at} may not be used by this user: see its permissions")
    known = errno.errorcode.get(code, code) if code is not None else _brief(str(error))
    return RedisUnavailable(f"{at} cannot be reached: {known}")


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
