"""One connection to a server: commands and replies, each with a deadline.

A connection is open from `open` until `close`, and closes itself after a time-out, a loss or a
malformed reply: the next bytes on the socket would be unknown. An error reply leaves it in step and
open.

A `Pipeline` sends commands before earlier replies have arrived. Replies arrive in order; those not
received must be (`Pipeline.finish`) before the connection is used for anything else.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from lmcache_redis.errors import RedisError, RedisProtocolError, RedisTimeout, RedisUnavailable
from lmcache_redis.resp.net.connect import Connector
from lmcache_redis.resp.net.stream import Stream
from lmcache_redis.resp.net.wire import (
    LEAST_REPLY_BYTES,
    PING_COMMAND,
    PONG,
    Reply,
    ReplyBuffer,
    without_errors,
)

_RECEIVE_BYTES = 64 << 10
# How many requests `send_at_once` sends on the caller's thread.
_AT_ONCE = 2


class Connection:
    """One connection of the Redis plane, used by one thread.

    Every call raises RedisTimeout, RedisUnavailable or RedisProtocolError, and closes the
    connection then, or what `wire.error_of` returns for an error reply, and stays open. Deadlines
    are `time.monotonic()` seconds; no step waits longer than the connector's op time-out.
    """

    __slots__ = ("_connector", "_name", "_replies", "_stream", "_view", "is_open", "opened_at")

    def __init__(self, connector: Connector, name: str) -> None:
        self.is_open = False
        self.opened_at = 0.0
        self._connector = connector
        self._name = name
        self._stream: Stream | None = None
        self._replies = ReplyBuffer()
        self._view = memoryview(bytearray(_RECEIVE_BYTES))

    @property
    def stream(self) -> Stream:
        """The socket, for stripes. Raises RedisUnavailable if the connection is closed."""
        if self._stream is None:
            raise RedisUnavailable("the connection is closed")
        return self._stream

    def open(self, deadline: float = math.inf) -> None:
        """Connect. Raises what `Connector.open` raises."""
        self._stream = self._connector.open(self._name, deadline)
        self.opened_at = time.monotonic()
        self.is_open = True

    def close(self) -> None:
        """Close the socket. Does nothing the second time."""
        self.is_open = False
        if self._stream is not None:
            self._connector.discard(self._stream)
            self._stream = None

    def fail(self, error: RedisError) -> NoReturn:
        """Close, because the connection is out of step, and raise the error."""
        self.close()
        raise error

    def check_idle(self) -> None:
        """Close if the server has closed it, or sent something unasked."""
        if self._stream is not None and not self._stream.is_quiet():
            self.close()

    def send(self, requests: Iterable[bytes], deadline: float) -> None:
        """Send packed commands. The server works on the first while `requests` makes the next."""
        stream = self.stream
        # Outside: a deadline that passed before anything was sent costs no connection.
        stream.arm(deadline)
        try:
            for request in requests:
                stream.send((request,), len(request))
        except (RedisTimeout, RedisUnavailable) as error:
            self.fail(error)

    def send_at_once(self, request: bytes) -> int:
        """Send as much as possible without blocking; return how many bytes.

        0 if the connection is lost: sending the rest raises the error.
        """
        return 0 if self._stream is None else self._stream.send_at_once(request)

    def receive(self, deadline: float, least: int, most: int) -> list[Reply]:
        """The next replies, at least `least` and at most `most`."""
        stream, view = self.stream, self._view
        replies: list[Reply] = []
        try:
            stream.arm(deadline)
            # The minimum size of `least` replies, in one call: otherwise they arrive in pieces.
            wanted = LEAST_REPLY_BYTES * least - self._replies.pending_bytes
            if least > 1 and 0 < wanted <= view.nbytes:
                stream.receive_exactly(view[:wanted])
                self._replies.feed(view[:wanted])
                replies = self._replies.take()
            while len(replies) < least:
                self._replies.feed(view[: stream.receive_some(view)])
                replies += self._replies.take()
            if len(replies) > most or (len(replies) == most and self._replies.pending_bytes):
                raise RedisProtocolError("more replies came than were asked for")
        except (RedisTimeout, RedisUnavailable, RedisProtocolError) as error:
            self.fail(error)
        return replies

    def exchange(self, requests: Iterable[bytes], replies: int, deadline: float) -> list[Reply]:
        """Send packed commands and receive exactly their replies, errors among them."""
        self.send(requests, deadline)
        return self.receive(deadline, replies, replies)

    def call(self, request: bytes, replies: int, deadline: float) -> list[Reply]:
        """`exchange`, but the first error reply is raised (`wire.error_of`)."""
        return without_errors(self.exchange((request,), replies, deadline))

    def ping(self, deadline: float) -> None:
        """Raises what `call` raises unless the server answers PONG."""
        if self.call(PING_COMMAND, 1, deadline) != [PONG]:
            self.fail(RedisProtocolError("the reply to a PING is no PONG"))


class Pipeline:
    """Commands and replies on an open connection, by `deadline` (`time.monotonic()`).

    Every method raises what `Connection.exchange` raises.
    """

    def __init__(self, connection: Connection, deadline: float) -> None:
        self.outstanding = 0
        self._connection = connection
        self._deadline = deadline
        # What `send_at_once` left.
        self._unsent: Iterable[bytes] = ()

    def send(self, requests: Iterable[bytes], replies: int) -> None:
        """Send packed commands that have `replies` replies."""
        unsent, self._unsent = self._unsent, ()
        self._connection.send(itertools.chain(unsent, requests), self._deadline)
        self.outstanding += replies

    def send_at_once(self, requests: Iterator[bytes], replies: int) -> None:
        """Send the first of `requests` without blocking or raising; the next call sends the rest.

        Only as the first call of a pipeline.
        """
        left: tuple[bytes, ...] = ()
        for request in itertools.islice(requests, _AT_ONCE):
            sent = self._connection.send_at_once(request)
            if sent < len(request):
                left = (request[sent:],)
                break
        self._unsent = itertools.chain(left, requests)
        self.outstanding += replies

    def receive(self, least: int) -> Sequence[Reply]:
        """The next replies, at least `least`; raises the first error among them."""
        return without_errors(self._receive(least))

    def receive_all(self) -> Sequence[Reply]:
        """Every outstanding reply, error replies among them."""
        return self._receive(self.outstanding) if self.outstanding else ()

    def finish(self, deadline: float) -> None:
        """Receive and drop all outstanding replies."""
        self._deadline = deadline
        self.receive_all()

    def _receive(self, least: int) -> Sequence[Reply]:
        self.send((), 0)
        replies = self._connection.receive(self._deadline, least, self.outstanding)
        self.outstanding -= len(replies)
        return replies
