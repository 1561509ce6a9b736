# SPDX-License-Identifier: Apache-2.0
"""The address of a server and its credentials, and what the errors of connecting mean."""

from __future__ import annotations

import enum
import errno
import socket
import ssl
from dataclasses import dataclass, field
from typing import Protocol

from lmcache_redis.errors import (
    ConfigError,
    RedisAuthError,
    RedisError,
    RedisLost,
    RedisProtocolError,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp.net.advice import NO_CONNECTION_LEFT
from lmcache_redis.resp.net.tls import TlsParameters, tls_advice
from lmcache_redis.resp.net.wire import ErrorReply, error_of

# Commands of a greeting that may fail: the server may not know them, or the user lack the right.
# Only a refusal of the connection itself counts.
_MAY_FAIL = ("CLIENT", "PING")


class Credentials(Protocol):
    """As redis-py's `redis.credentials.CredentialProvider`; importing that takes 0.15 s.

    Asked on any thread, at each connect, so that a secret may change; what it raises fails that.
    """

    def get_credentials(self) -> tuple[str, ...]:
        """(password,) or (user, password)."""


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


class Transport(enum.Enum):
    TCP = "redis"
    TLS = "rediss"
    UNIX = "unix"


@dataclass(frozen=True, slots=True)
class Origin:
    """What an address and a password come from, for sentences that say what to change.

    named_by: who names the address, if the URL does not, and settings: of what settles which one.
    password: how to give one. tls: what else may be wrong if it is not the same on both sides.
    """

    named_by: str = ""
    settings: str = ""
    password: str = "put one into the Redis URL, or set LMCACHE_REDIS_PASSWORD"
    tls: str = ""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server. host and port for TCP and TLS, path for a unix socket.

    tls: parameters by their redis-py names. origin: tells no servers apart. repr and `where`, the
    server's name in messages, contain no credentials.
    """

    transport: Transport
    host: str = ""
    port: int = 0
    path: str = ""
    db: int = 0
    credentials: Credentials | None = field(default=None, repr=False)
    tls: TlsParameters = field(default=(), repr=False)
    origin: Origin = field(default=Origin(), repr=False, compare=False)

    @property
    def where(self) -> str:
        """The address, e.g. "127.0.0.1:6379" or "unix:///run/redis.sock"."""
        if self.transport is Transport.UNIX:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


NO_PASSWORD = (
    "has no password: leave it out of the Redis URL, LMCACHE_REDIS_PASSWORD and the password file"
)
NO_SENTINEL = "is no Sentinel: write redis:// instead of redis+sentinel://, or name its Sentinels"


def has_no_password(text: str) -> bool:
    """Whether a server refuses a password because it has none."""
    return "without any password configured" in text or "no password is set" in text


def is_no_sentinel(text: str) -> bool:
    return "unknown command" in text.lower() and "sentinel" in text.lower()


def judge_greeting(reply: ErrorReply, name: str, endpoint: Endpoint) -> None:
    """Raise the error that a reply to command `name` stands for, unless that may fail."""
    at = f"Redis at {endpoint.where}"
    error = error_of(reply)
    if "max number of clients" in reply.text:
        raise RedisUnavailable(f"{at} has no connection left: {NO_CONNECTION_LEFT}")
    if reply.code == "LOADING":
        raise RedisUnavailable(f"{at} is still loading its data")
    if isinstance(error, RedisAuthError) or name == "AUTH":
        if endpoint.credentials is None:
            raise RedisAuthError(f"{at} wants a password: {endpoint.origin.password}")
        if has_no_password(reply.text):
            raise RedisAuthError(f"{at} {NO_PASSWORD}")
        raise RedisAuthError(
            f"{at} refuses the user or the password: correct them where they are set "
            f"({brief(reply.text)})"
        )
    if name not in _MAY_FAIL or reply.code == "DENIED":
        raise RedisUnavailable(f"{at} refuses the connection: {brief(reply.text)}")


def tls_question(endpoint: Endpoint) -> str:
    """After the sentence for a connection that the server has closed at once, as TLS ports do."""
    is_plain = endpoint.transport is Transport.TCP
    return ": is it up, is the port right, does it use TLS (rediss://)?" if is_plain else ""


def translated(error: Exception, endpoint: Endpoint) -> RedisError | ConfigError:
    """The error, with a sentence that says what to change, for one of connecting or greeting."""
    at, tls = f"Redis at {endpoint.where}", endpoint.origin.tls
    is_tls = endpoint.transport is Transport.TLS
    more = f" ({tls})" if tls else ""
    if isinstance(error, (RedisTimeout, TimeoutError)) and not isinstance(error, ssl.SSLError):
        advice = f"is it stopped, or the address wrong{', or is there no TLS' if is_tls else ''}?"
        return RedisTimeout(_unreachable(endpoint, "does not answer", advice) + more)
    if isinstance(error, RedisProtocolError):
        return RedisProtocolError(
            f"{at} does not speak Redis: is the port right, does it use TLS?{more}"
        )
    if isinstance(error, RedisLost):
        return RedisLost(f"{error}{tls_question(endpoint)}{more}")
    if isinstance(error, RedisError):
        return error
    if is_tls and isinstance(error, FileNotFoundError):
        return ConfigError("a TLS file that the Redis URL names cannot be read")
    if isinstance(error, ssl.SSLError):
        return RedisUnavailable(f"{at} cannot be reached over TLS: {tls_advice(error)}{more}")
    return RedisUnavailable(_unreachable(endpoint, *_seen(error, endpoint)))


def _seen(error: Exception, endpoint: Endpoint) -> tuple[str, str]:
    """What is wrong with an address, and what to do if the URL names it."""
    if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
        # The host may be right: no name server has answered.
        what = "has a host name that cannot be looked up now"
        return what, "is the name server reachable (temporary failure in name resolution)?"
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return "has a host name that is unknown", "correct the Redis URL"
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.ECONNREFUSED:
        return "refuses connections", "start it, or correct the Redis URL"
    if code == errno.ENOENT and endpoint.transport is Transport.UNIX:
        return "does not exist", "start Redis, or correct the Redis URL"
    if code == errno.EACCES:
        return "may not be used by this user", "see its permissions"
    if code in (errno.ECONNRESET, errno.EPIPE):
        return f"closes connections{tls_question(endpoint)}", ""
    known = errno.errorcode.get(code, str(code)) if code is not None else brief(str(error))
    return f"cannot be reached: {known}", ""


def _unreachable(endpoint: Endpoint, what: str, advice: str) -> str:
    """A sentence that blames who names the address."""
    origin, at = endpoint.origin, f"Redis at {endpoint.where}"
    if origin.named_by:
        at = f"{origin.named_by} names {endpoint.where}, which"
        advice = f"start it, or see {origin.settings}"
    return f"{at} {what}{';' if ':' in what else ':'} {advice}" if advice else f"{at} {what}"


def brief(text: str) -> str:
    """One line of an error's text."""
    return " ".join(text.split())[:160]
