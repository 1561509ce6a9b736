# SPDX-License-Identifier: Apache-2.0
"""The errors of the package, by the stage at which they occur.

Third-party exceptions are translated into these once, where they arise. Code above that layer
catches only these.
"""

from __future__ import annotations

from collections.abc import Sequence


class LMCacheRedisError(Exception):
    """Base class of every error that this package raises on purpose."""


class ConfigError(LMCacheRedisError, ValueError):
    """A wrong setting; the message names it and what it may be."""


class StartError(ConfigError):
    """A setting that this machine cannot serve now: an address in use, or memory that is taken."""


class Unsupported(LMCacheRedisError):
    """This engine cannot be cached, or its KV not be identified; the message says why."""


class FormatError(LMCacheRedisError, ValueError):
    """A value that cannot be encoded, or bytes that cannot be decoded."""


class NotListed(LMCacheRedisError):
    """Not all names could be listed; the message says why."""


class Closed(LMCacheRedisError, RuntimeError):
    """A call after `close`."""


class WireError(LMCacheRedisError):
    """The peer of a ZeroMQ socket broke the protocol."""


class DeviceError(LMCacheRedisError):
    """Device memory that cannot be exported, mapped or addressed within its bounds."""


class CudaError(DeviceError):
    """A call of NVIDIA's driver failed. code: its ``CUresult``; 0 without one."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class DriverError(CudaError):
    """The CUDA driver refused the call, or is not installed."""


class GpuLost(CudaError):
    """The driver refuses every further call of this process to the GPU: the process must end."""


class RedisError(LMCacheRedisError):
    """Base class of the failures of a Redis server and of the connection to it.

    refusal: which of `resp.net.advice.REASONS` the server's reply is; empty if it is no reply.
    """

    refusal = ""


class RedisUnavailable(RedisError):
    """No usable connection: refused, reset, a server that is starting, an unresolvable name."""


class RedisLost(RedisUnavailable):
    """The connection was closed or reset, by whomever."""


class RedisClusterDown(RedisUnavailable):
    """A shard refuses keys because its cluster is not complete; the shard itself is well."""


class RedisTimeout(RedisError):
    """The deadline of an operation passed before its reply was complete."""


class RedisProtocolError(RedisError):
    """Bytes that are not the expected reply; the connection must be closed."""


class RedisFull(RedisError):
    """The server has reached its memory limit and does not evict."""


class RedisAuthError(RedisError):
    """The server refused the credentials, or the user may not run the command."""


class RedisNotAllowed(RedisAuthError):
    """The user may not run the command."""


class RedisReplyError(RedisError):
    """Any other error reply of the server; the connection stays usable."""


class RedisWriteRefused(RedisReplyError):
    """The server takes no writes for now (NOREPLICAS, MISCONF); it serves reads."""


class RedisReadOnly(RedisWriteRefused):
    """A write was refused because the server is a replica."""


class RedisRedirect(RedisReplyError):
    """A node of a Redis Cluster does not have the slot of a key, or not all of it (MOVED, ASK).

    reply: its text.
    """

    def __init__(self, message: str, reply: str = "") -> None:
        super().__init__(message)
        self.reply = reply


def check_int(what: str, value: int, least: int, most: int) -> None:
    """Raises FormatError unless ``value`` is an int within its bounds."""
    if type(value) is not int:
        raise FormatError(f"{what} is an int, not {type(value).__name__}")
    if not least <= value <= most:
        raise FormatError(f"{what} is {value}, outside {least} to {most}")


def checked_shape(shape: Sequence[int], most: int) -> tuple[int, ...]:
    """The sizes of a shape. Raises FormatError unless it is a list of ints from 0 to ``most``."""
    if not isinstance(shape, (tuple, list)):
        raise FormatError(f"a shape is a list of sizes, not {shape!r:.80}")
    for size in shape:
        check_int("a size in a shape", size, 0, most)
    return tuple(shape)
