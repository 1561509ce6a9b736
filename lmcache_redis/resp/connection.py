"""One connection to a server: commands out, replies in, each by its deadline.

States: NEW (not connected), OPEN, CLOSED (for good: after a time-out, a lost connection or
a reply that makes no sense, what comes next on the socket cannot be known). An error reply
leaves the connection in step and OPEN.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Iterable
from typing import NoReturn

from lmcache_redis.errors import (
    RedisError,
    RedisProtocolError,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp.connect import Connector
from lmcache_redis.resp.moving import Moved, Why
from lmcache_redis.resp.stream import Stream
from lmcache_redis.resp.wire import (
    LEAST_REPLY_BYTES,
    PING_COMMAND,
    PONG,
    Reply,
    ReplyBuffer,
    without_errors,
)

_RECEIVE_BYTES = 64 << 10
_OK_LINE = b"+OK\r\n"


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

    __slots__ = (
        "_connector",
        "_name",
        "_receive_view",
        "_replies",
        "_stream",
        "opened_at",
        "state",
    )

    def __init__(self, connector: Connector, name: str) -> None:
        self.state = ConnectionState.NEW
        self.opened_at = 0.0
        self._connector = connector
        self._name = name
        self._stream: Stream | None = None
        self._replies = ReplyBuffer()
        self._receive_view = memoryview(bytearray(_RECEIVE_BYTES))

    @property
    def is_open(self) -> bool:
        return self.state is ConnectionState.OPEN

    @property
    def fileno(self) -> int:
        """The socket's, for the compiled part; -1 where that cannot use it (TLS)."""
        return -1 if self._stream is None else self._stream.plain_fileno()

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

    def check_idle(self) -> None:
        """Close if the server has closed, or said something unasked."""
        if self._stream is not None and not self._stream.is_quiet():
            self.close()

    # ------------------------------------------------------------- replies

    def receive_replies(self, deadline: float, least: int = 1) -> list[Reply]:
        """The next replies that are whole, at least so many."""
        stream = self._usable()
        view = self._receive_view
        replies: list[Reply] = []
        try:
            stream.arm(deadline)
            # All that so many replies must have, in one call: they come in pieces otherwise.
            wanted = LEAST_REPLY_BYTES * least - self._replies.pending_bytes
            if least > 1 and 0 < wanted <= view.nbytes:
                stream.receive_exactly((view[:wanted],), wanted)
                self._replies.feed(view[:wanted])
                replies = self._replies.take()
            while len(replies) < least:
                received = stream.receive_some(view)
                data = bytes(view[:received])
                if data == _OK_LINE and not self._replies.pending_bytes:
                    replies.append(b"OK")
                else:
                    self._replies.feed(data)
                    replies += self._replies.take()
        except (RedisTimeout, RedisUnavailable, RedisProtocolError) as error:
            self.fail(error)
        return replies

    def receive_reply(self, deadline: float, begun: Moved | None = None) -> Reply:
        """The one reply that is outstanding. begun: what of it has come."""
        stream = self._usable()
        view = self._receive_view
        try:
            if begun is not None and begun.why is Why.LOST:
                raise stream.lost(begun.error)
            stream.arm(deadline)
            if begun is None:
                received = stream.receive_some(view)
            else:
                received = len(begun.first)
                view[:received] = begun.first
        except (RedisTimeout, RedisUnavailable) as error:
            self.fail(error)
        if view[:received] == _OK_LINE and not self._replies.pending_bytes:
            return b"OK"
        try:
            self._replies.feed(view[:received])
            replies = self._replies.take()
        except RedisProtocolError as error:
            self.fail(error)
        return self._exactly(1, replies, deadline)[0]

    def call(self, request: bytes, reply_count: int, deadline: float) -> list[Reply]:
        """`exchange`, but the first error reply is raised (`wire.error_of`)."""
        return without_errors(self.exchange((request,), reply_count, deadline))

    def exchange(self, requests: Iterable[bytes], reply_count: int, deadline: float) -> list[Reply]:
        """Send packed commands and receive exactly their replies, errors among them."""
        self.send(requests, deadline)
        return self._exactly(reply_count, [], deadline)

    def send(self, requests: Iterable[bytes], deadline: float) -> None:
        """Send packed commands. The server works on some while more of `requests` is made."""
        stream = self._usable()
        stream.arm(deadline)
        try:
            for request in requests:
                stream.send((request,), len(request))
        except (RedisTimeout, RedisUnavailable) as error:
            self.fail(error)

    def send_at_once(self, request: bytes) -> int:
        """Send of packed commands what can be sent without waiting; how many bytes that was.

        Where the connection is lost that is none: whoever sends the rest is told.
        """
        return 0 if self._stream is None else self._stream.send_at_once(request)

    def check_in_step(self) -> None:
        """Close, and raise RedisProtocolError, if more has come than replies to what was asked."""
        if self._replies.pending_bytes:
            self.fail(RedisProtocolError("more replies came than were asked for"))

    def _exactly(self, reply_count: int, replies: list[Reply], deadline: float) -> list[Reply]:
        """So many replies and not a byte more, of which `replies` have come."""
        if len(replies) < reply_count:
            replies += self.receive_replies(deadline, reply_count - len(replies))
        if len(replies) > reply_count:
            self.fail(RedisProtocolError("more replies came than were asked for"))
        self.check_in_step()
        return replies

    def ping(self, deadline: float) -> None:
        """Raises what `call` raises unless the server answers PONG."""
        if self.call(PING_COMMAND, 1, deadline) != [PONG]:
            self.fail(RedisProtocolError("the reply to a PING is no PONG"))

    # -------------------------------------------------------------- inside

    def _usable(self) -> Stream:
        if self._stream is None:
            raise RedisUnavailable("the connection is closed")
        return self._stream

    def fail(self, error: RedisError) -> NoReturn:
        """Close, because nobody knows what comes next, and raise the error."""
        self.close()
        raise error
