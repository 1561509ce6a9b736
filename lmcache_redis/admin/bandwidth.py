"""Round trips and bytes a second, measured the way an agent moves stripes.

A few stripes of the usual size under names of our own that are no stripe's, each with an
expiry from the moment it is written, so that nothing stays behind if we are killed; removed
at the end. A server that is full evicts as much to make room for them.
"""

from __future__ import annotations

import itertools
import secrets
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lmcache_redis.admin.server import CLIENT_NAME, CONNECT_TIMEOUT_S, OP_TIMEOUT_S, Node, Server
from lmcache_redis.config import DEFAULT_SLOT_BYTES
from lmcache_redis.errors import RedisProtocolError, RedisUnavailable
from lmcache_redis.keys import KEY_MAGIC
from lmcache_redis.resp.bulk import BulkConnection, Found
from lmcache_redis.resp.connect import Connector
from lmcache_redis.resp.options import DEFAULT_GET_CONNECTIONS
from lmcache_redis.resp.stream import Stream
from lmcache_redis.resp.wire import (
    ErrorReply,
    ReplyBuffer,
    end_of_command,
    error_of,
    get_command,
    set_prefix,
)
from lmcache_redis.stripe import HEADER_BYTES

PINGS = 51
STRIPES = 8
VALUE_BYTES = HEADER_BYTES + DEFAULT_SLOT_BYTES
EXPIRES_S = 60
# Each way is measured for this long, writing for this many rounds at most.
_MEASURE_S = 0.6
_ROUNDS = 12
_DEADLINE_S = 20.0
# Enough to find keys for each of a thousand servers.
_ATTEMPTS = 50_000


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second of values, both ways."""

    read_bytes_per_s: float
    write_bytes_per_s: float


def measure_ping(node: Node, pings: int = PINGS) -> float:
    """The median round trip in seconds. Raises RedisError."""
    times = []
    for _ in range(pings):
        started = time.perf_counter()
        node.ask("PING")
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def probe_keys(prefix: bytes, is_there: Callable[[bytes], bool] = lambda key: True) -> list[bytes]:
    """Names that agents' rights cover (prefix and `lmcr1:`) and that name no stripe.

    is_there: whether the node to be measured would hold the key. Raises RedisUnavailable
    where it holds none that is tried.
    """
    base = prefix + KEY_MAGIC + b"doctor:"
    tried = (b"%b%b" % (base, secrets.token_hex(16).encode()) for _ in range(_ATTEMPTS))
    keys = list(itertools.islice(filter(is_there, tried), STRIPES))
    if len(keys) < STRIPES:
        raise RedisUnavailable("no key that begins with the key prefix falls on this server")
    return keys


def measure_bandwidth(server: Server, node: Node, prefix: bytes) -> Bandwidth:
    """Write stripes over one connection, read them over three, as an agent does.

    Raises RedisError where the server refuses, or takes longer than 20 s.
    """
    keys = probe_keys(prefix, lambda key: server.node_of(key) is node)
    deadline = time.monotonic() + _DEADLINE_S
    connector = Connector(node.endpoint, CONNECT_TIMEOUT_S, OP_TIMEOUT_S)
    try:
        write = _Writing(connector, keys, deadline).bytes_per_s()
        read = _Reading(connector, keys, deadline).bytes_per_s()
    finally:
        connector.abort()
        node.ask_all([("UNLINK", key) for key in keys])
    return Bandwidth(read, write)


class _Writing:
    """One connection, all stripes sent before the first reply is read, as an agent's."""

    def __init__(self, connector: Connector, keys: list[bytes], deadline: float) -> None:
        self._connector = connector
        self._deadline = deadline
        self._heads = [set_prefix(key, VALUE_BYTES, EXPIRES_S) for key in keys]
        self._tail = end_of_command(EXPIRES_S)
        # Not zeros: some networks compress.
        self._value = memoryview(secrets.token_bytes(VALUE_BYTES))

    def bytes_per_s(self) -> float:
        """The median of some rounds; the first, into fresh memory, is not counted."""
        stream = self._connector.open(CLIENT_NAME)
        try:
            self._round(stream)
            times: list[float] = []
            until = time.perf_counter() + _MEASURE_S
            while not times or (len(times) < _ROUNDS and time.perf_counter() < until):
                started = time.perf_counter()
                self._round(stream)
                times.append(time.perf_counter() - started)
        finally:
            self._connector.discard(stream)
        return STRIPES * VALUE_BYTES / statistics.median(times)

    def _round(self, stream: Stream) -> None:
        stream.arm(self._deadline)
        for head in self._heads:
            nbytes = len(head) + VALUE_BYTES + len(self._tail)
            stream.send((head, self._value, self._tail), nbytes)
        replies = ReplyBuffer()
        view = memoryview(bytearray(4096))
        missing = len(self._heads)
        while missing > 0:
            replies.feed(view[: stream.receive_some(view)])
            for reply in replies.take():
                missing -= 1
                if isinstance(reply, ErrorReply):
                    raise error_of(reply)


class _Reading:
    """One thread with connections, one GET outstanding on each, as an agent's."""

    def __init__(self, connector: Connector, keys: list[bytes], deadline: float) -> None:
        self._deadline = deadline
        self._commands = itertools.cycle([get_command(key) for key in keys])
        self._connections = [
            BulkConnection(connector, CLIENT_NAME) for _ in range(DEFAULT_GET_CONNECTIONS)
        ]
        self._buffer = memoryview(bytearray(DEFAULT_SLOT_BYTES))

    def bytes_per_s(self) -> float:
        received_bytes = 0
        try:
            for connection in self._connections:
                connection.open()
            started = time.perf_counter()
            asked = deque(self._connections)
            for connection in self._connections:
                connection.ask_stripe(next(self._commands), self._deadline)
            while asked:
                connection = asked.popleft()
                self._receive(connection)
                received_bytes += VALUE_BYTES
                if time.perf_counter() < started + _MEASURE_S:
                    connection.ask_stripe(next(self._commands), self._deadline)
                    asked.append(connection)
            return received_bytes / (time.perf_counter() - started)
        finally:
            for connection in self._connections:
                connection.close()

    def _receive(self, connection: BulkConnection) -> None:
        if connection.receive_stripe(self._buffer, self._deadline) is not Found.VALUE:
            raise RedisProtocolError(
                "a value written a moment ago is gone: the server's memory is too small"
            )
