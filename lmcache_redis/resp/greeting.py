"""The first words on a connection, and a sentence for each way in which it does not come about.

AUTH (or HELLO for RESP3), SELECT and CLIENT SETNAME go out in one write. No message contains a
secret.
"""

from __future__ import annotations

import contextlib
import errno
import re
import socket
import ssl

from lmcache_redis.errors import (
    ConfigError,
    RedisAuthError,
    RedisError,
    RedisProtocolError,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp.endpoint import Endpoint, Transport
from lmcache_redis.resp.stream import Stream
from lmcache_redis.resp.wire import ErrorReply, ReplyBuffer, error_of, pack_command

# Of CLIENT SETNAME: a user may do without, as far as these say.
_TOLERATED = ("NOPERM", "ERR")
_OF_CERTIFICATES = re.compile("ALERT_(CERTIFICATE|UNKNOWN_CA|BAD_CERTIFICATE|NO_CERTIFICATE)")


def greet(stream: Stream, endpoint: Endpoint, client_name: str, deadline: float) -> None:
    """Be let in by the server of a stream that is connected.

    Raises RedisError with a sentence, or as the stream does.
    """
    commands = _commands(endpoint, client_name)
    stream.arm(deadline)
    request = b"".join([pack_command(*words) for words in commands])
    # A server without room says so and closes: what it said may have come.
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
    """Raises what an error reply to the greeting means, unless it can be done without."""
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
    """A sentence for what was raised on the way to a connection and during its greeting."""
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
