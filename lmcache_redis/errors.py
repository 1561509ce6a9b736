"""What can go wrong, by the stage at which it goes wrong.

Third-party exceptions are translated into these once, at the edge where they arise;
everything above that edge catches only what stands here.
"""

from __future__ import annotations


class LMCacheRedisError(Exception):
    """Base class of every error that this package raises on purpose."""


class ConfigError(LMCacheRedisError, ValueError):
    """A setting must change; the message names the setting and what it may be."""


class FormatError(LMCacheRedisError, ValueError):
    """A value that has no encoding, or bytes that are no encoding of a value."""


class WireError(LMCacheRedisError):
    """The peer of a ZeroMQ socket broke the protocol."""


class DeviceError(LMCacheRedisError):
    """Device memory that cannot be exported, mapped or addressed within its bounds."""


class RedisError(LMCacheRedisError):
    """Base class of everything a Redis server, or the way to it, can do wrong."""


class RedisUnavailable(RedisError):
    """No connection: refused, reset, not yet up, or a name that does not resolve."""


class RedisTimeout(RedisError):
    """The deadline of an operation passed before its reply was complete."""


class RedisProtocolError(RedisError):
    """Bytes that are not the reply expected here; the connection must be thrown away."""


class RedisFull(RedisError):
    """The server has reached its memory limit and evicts nothing."""


class RedisAuthError(RedisError):
    """The server refused the credentials, or the user may not run the command."""


class RedisReplyError(RedisError):
    """Any other error reply of the server; the connection stays usable."""


class RedisReadOnly(RedisReplyError):
    """A write was refused because the server is a replica: not, or no longer, the master."""


class RedisRedirect(RedisReplyError):
    """A node of a Redis Cluster says which node to ask instead.

    host is empty where it is the host of the node that said so. asking: only this once, with
    ASKING before it (ASK); otherwise from now on (MOVED).
    """

    def __init__(self, message: str, host: str, port: int, asking: bool) -> None:
        super().__init__(message)
        self.host = host
        self.port = port
        self.asking = asking


def check_int(what: str, value: int, least: int, most: int) -> None:
    """Raises FormatError unless ``value`` is an int within its bounds."""
    if type(value) is not int:
        raise FormatError(f"{what} is an int, not {type(value).__name__}")
    if not least <= value <= most:
        raise FormatError(f"{what} is {value}, outside {least} to {most}")
