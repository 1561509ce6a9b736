"""One connection to a server: commands out, replies in, each by its deadline.

States: NEW (not connected), OPEN, CLOSED (for good: after a time-out, a lost connection or
a reply that makes no sense, what comes next on the socket cannot be known). An error reply
leaves the connection in step and OPEN.

A `Pipeline` sends commands before earlier replies have come. Replies come in order; what was not
received when it is over has to be (`Pipeline.finish`) before the connection is used otherwise.
"""

from __future__ import annotations

import enum
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from lmcache_redis.errors import (
    RedisError,
    RedisProtocolError,
    RedisTimeout,
    RedisUnavailable,
)
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
# Requests that go out on the thread of a caller, who has other things to do.
_AT_ONCE = 2


class ConnectionState(enum.Enum):
    NEW = "new"
    OPEN = "open"
    CLOSED = "closed"


class Connection:
    """One connection of the Redis plane, used by one thread.

    Every call raises RedisTimeout, RedisUnavailable, RedisProtocolError (CLOSED then), or
    what `wire.error_of` makes of an error reply (OPEN still). Deadlines are
    `time.monotonic()` seconds; no step waits longer than the connector's op time-out.
    """

    __slots__ = ("_connector", "_name", "_replies", "_stream", "_view", "opened_at", "state")

    def __init__(self, connector: Connector, name: str) -> None:
        self.state = ConnectionState.NEW
        self.opened_at = 0.0
        self._connector = connector
        self._name = name
        self._stream: Stream | None = None
        self._replies = ReplyBuffer()
        self._view = memoryview(bytearray(_RECEIVE_BYTES))

    @property
    def is_open(self) -> bool:
        return self.state is ConnectionState.OPEN

    @property
    def stream(self) -> Stream:
        """The socket, for stripes. Raises RedisUnavailable unless it is open."""
        if self._stream is None:
            raise RedisUnavailable("the connection is closed")
        return self._stream

    def open(self, deadline: float = math.inf) -> None:
        """Connect. Raises what `Connector.open` raises."""
        self._stream = self._connector.open(self._name, deadline)
        self.opened_at = time.monotonic()
        self.state = ConnectionState.OPEN

    def close(self) -> None:
        """Give the socket back. Does nothing the second time."""
        self.state = ConnectionState.CLOSED
        if self._stream is not None:
            self._connector.discard(self._stream)
            self._stream = None

    def fail(self, error: RedisError) -> NoReturn:
        """Close, because what comes next is not known, and raise the error."""
        self.close()
        raise error

    def check_idle(self) -> None:
        """Close if the server has closed, or said something unasked."""
        if self._stream is not None and not self._stream.is_quiet():
            self.close()

    def send(self, requests: Iterable[bytes], deadline: float) -> None:
        """Send packed commands. The server works on some while more of `requests` is made."""
        stream = self.stream
        # Outside: a deadline that has passed before anything was sent costs no connection.
        stream.arm(deadline)
        try:
            for request in requests:
                stream.send((request,), len(request))
        except (RedisTimeout, RedisUnavailable) as error:
            self.fail(error)

    def send_at_once(self, request: bytes) -> int:
        """Send of packed commands what can be sent without waiting; how many bytes that was.

        Where the connection is lost that is none: who sends the rest is told.
        """
        return 0 if self._stream is None else self._stream.send_at_once(request)

    def receive(self, deadline: float, least: int, most: int) -> list[Reply]:
        """The next replies that are whole, at least and at most so many."""
        stream, view = self.stream, self._view
        replies: list[Reply] = []
        try:
            stream.arm(deadline)
            # All that so many replies must have, in one call: they come in pieces otherwise.
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
    """On a connection that is open; everything ends by `deadline` (`time.monotonic()`).

    Every method raises what `Connection.exchange` does.
    """

    def __init__(self, connection: Connection, deadline: float) -> None:
        self.outstanding = 0
        self._connection = connection
        self._deadline = deadline
        # What `send_at_once` left.
        self._unsent: Iterable[bytes] = ()

    def send(self, requests: Iterable[bytes], replies: int) -> None:
        """Send packed commands, to which there will be so many replies."""
        unsent, self._unsent = self._unsent, ()
        self._connection.send(itertools.chain(unsent, requests), self._deadline)
        self.outstanding += replies

    def send_at_once(self, requests: Iterator[bytes], replies: int) -> None:
        """As `send`, but never waits nor raises: what does not go out now goes before what follows.

        Takes the first few of `requests`. Only as the first of a pipeline.
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
        """The next replies, at least so many; raises the first error among them."""
        return without_errors(self._receive(least))

    def receive_all(self) -> Sequence[Reply]:
        """Every outstanding reply, error replies among them."""
        return self._receive(self.outstanding) if self.outstanding else ()

    def finish(self, deadline: float) -> None:
        """Receive what is still outstanding, and drop it."""
        self._deadline = deadline
        self.receive_all()

    def _receive(self, least: int) -> Sequence[Reply]:
        self.send((), 0)
        replies = self._connection.receive(self._deadline, least, self.outstanding)
        self.outstanding -= len(replies)
        return replies
