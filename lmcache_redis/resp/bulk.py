"""One connection that moves stripes between slots and Redis without copying them.

States: NEW (not connected), OPEN, CLOSED (for good: after a time-out, a lost connection or
a reply that makes no sense, what comes next on the socket cannot be known). An error reply
leaves the connection in step and OPEN.

What the compiled part has begun, a connection goes on with (`moving.Moved`).

A GET takes three system calls: the command; `$length` and header together; payload and the
last CRLF straight into slot and tail. The first receive takes what there is, so that `$-1`,
an error or another length is recognised before more is waited for. A SET is one sendmsg of
command, header, payload and CRLF. The kernel keeps the deadline and Python holds no GIL
while bytes move.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterable, Sequence
from typing import NoReturn

from lmcache_redis.errors import (
    RedisError,
    RedisProtocolError,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp.connect import Connector
from lmcache_redis.resp.moving import Moved, Why
from lmcache_redis.resp.stream import Buffer, Stream
from lmcache_redis.resp.wire import (
    CRLF,
    LEAST_REPLY_BYTES,
    MAX_LINE_BYTES,
    NULL3,
    PING_COMMAND,
    PONG,
    ErrorReply,
    Reply,
    ReplyBuffer,
    end_of_command,
    error_of,
    parse_error,
    parse_length,
    set_prefix,
)
from lmcache_redis.stripe import HEADER_BYTES

_RECEIVE_BYTES = 64 << 10
_OK_LINE = b"+OK\r\n"
# A value of unexpected length up to this is read and dropped; beyond, the connection is.
MAX_DRAIN_BYTES = 8 << 20


class ConnectionState(enum.Enum):
    NEW = "new"
    OPEN = "open"
    CLOSED = "closed"


class Found(enum.Enum):
    """What a GET found under a stripe's key."""

    VALUE = "a value of the expected length; payload and header are filled"
    NOTHING = "no value"
    OTHER_LENGTH = "a value of another length; header holds its first bytes"
    OTHER_TYPE = "something that is no string"


class BulkConnection:
    """One connection of the Redis plane, used by one thread (`abort` is for all).

    Every call raises RedisTimeout, RedisUnavailable, RedisProtocolError (CLOSED then), or
    what `wire.error_of` makes of an error reply (OPEN still). Deadlines are
    `time.monotonic()` seconds; no step waits longer than the connector's op time-out.
    """

    __slots__ = (
        "_buffer",
        "_connector",
        "_first",
        "_first_bytes",
        "_head",
        "_name",
        "_payload_bytes",
        "_receive_view",
        "_replies",
        "_stream",
        "_tail",
        "_tail_view",
        "header",
        "opened_at",
        "state",
    )

    def __init__(self, connector: Connector, name: str) -> None:
        self.state = ConnectionState.NEW
        self.opened_at = 0.0
        self.header = memoryview(b"")
        self._connector = connector
        self._name = name
        self._stream: Stream | None = None
        self._replies = ReplyBuffer()
        self._receive_view = memoryview(bytearray(_RECEIVE_BYTES))
        self._tail = bytearray(2)
        self._tail_view = memoryview(self._tail)
        self._payload_bytes = -1
        self._head = b""
        self._buffer = bytearray()
        self._first = memoryview(b"")
        self._first_bytes = 0

    @property
    def is_open(self) -> bool:
        return self.state is ConnectionState.OPEN

    @property
    def fileno(self) -> int:
        """The socket's, for the compiled part; -1 where that cannot use it (TLS)."""
        return -1 if self._stream is None else self._stream.plain_fileno()

    def open(self) -> None:
        """Connect. Raises what `Connector.open` raises."""
        self._stream = self._connector.open(self._name)
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

    # ----------------------------------------------------------------- GET

    def ask_stripe(self, command: bytes, deadline: float) -> None:
        """Send a packed GET. Its reply comes with `receive_stripe`."""
        stream = self._usable()
        # Outside: a deadline that has passed before anything was sent costs no connection.
        stream.arm(deadline)
        try:
            stream.send((command,), len(command))
        except (RedisTimeout, RedisUnavailable) as error:
            self.fail(error)

    def receive_stripe(
        self, payload: memoryview, deadline: float, begun: Moved | None = None
    ) -> Found:
        """Receive the reply to a GET: 512 bytes into `header`, the rest into `payload`.

        `header` is valid until the next call. After anything but VALUE the payload's bytes
        are undefined, and only OTHER_LENGTH says something in `header`. begun: what has come.
        """
        stream = self._usable()
        if payload.nbytes != self._payload_bytes:
            self._expect(payload.nbytes)
        try:
            stream.arm(deadline)
            if begun is None:
                received = stream.receive_some(self._first)
            else:
                received = len(begun.first)
                self._first[:received] = begun.first
                if begun.why is not Why.REPLY:
                    return self._receive_rest(stream, payload, begun)
            if received == self._first_bytes and self._buffer.startswith(self._head):
                found: Found | ErrorReply = Found.VALUE
            else:
                found = self._receive_head(stream, received, payload)
            if found is Found.VALUE:
                stream.receive_exactly((payload, self._tail_view), self._payload_bytes + 2)
                if self._tail != CRLF:
                    raise RedisProtocolError("a value is longer than its reply says")
                return found
        except (RedisTimeout, RedisUnavailable, RedisProtocolError) as error:
            self.fail(error)
        if isinstance(found, ErrorReply):
            if found.code == "WRONGTYPE":
                return Found.OTHER_TYPE
            raise error_of(found)
        return found

    def _receive_rest(self, stream: Stream, payload: memoryview, begun: Moved) -> Found:
        """What is left of a value whose header has come, if the connection is still there."""
        if begun.why is Why.LOST:
            raise stream.lost(begun.error)
        self._tail[:] = begun.tail
        if begun.why is Why.PART:
            left = payload.nbytes + 2 - begun.moved
            parts = [payload[begun.moved :]] if left > 2 else []
            stream.receive_exactly((*parts, self._tail_view[-left:]), left)
        if self._tail != CRLF:
            raise RedisProtocolError("a value is longer than its reply says")
        return Found.VALUE

    def get_stripe(self, command: bytes, payload: memoryview, deadline: float) -> Found:
        """`ask_stripe`, then `receive_stripe`."""
        self.ask_stripe(command, deadline)
        return self.receive_stripe(payload, deadline)

    def _expect(self, payload_bytes: int) -> None:
        """Prepare buffers for values of this size; stripes of one size follow each other."""
        self._head = b"$%d\r\n" % (HEADER_BYTES + payload_bytes)
        self._buffer = bytearray(len(self._head) + HEADER_BYTES)
        self._first = memoryview(self._buffer)
        self._first_bytes = len(self._first)
        self.header = self._first[len(self._head) :]
        self._payload_bytes = payload_bytes

    def _receive_head(
        self, stream: Stream, received: int, payload: memoryview
    ) -> Found | ErrorReply:
        """The first receive was short, or of another reply: go on by what it says."""
        head = self._head
        while received < len(head) and head.startswith(self._buffer[:received]):
            received += stream.receive_some(self._first[received:])
        if not self._buffer.startswith(head):
            return self._other_reply(stream, bytes(self._first[:received]), payload)
        rest = self._first[received:]
        if rest.nbytes:
            stream.receive_exactly((rest,), rest.nbytes)
        return Found.VALUE

    def _other_reply(self, stream: Stream, data: bytes, payload: memoryview) -> Found | ErrorReply:
        """A reply that is not the expected value; it begins with `data`."""
        if data[:1] not in (b"$", b"-", NULL3):
            raise RedisProtocolError("the reply to a GET is no string")
        while (end := data.find(CRLF)) < 0:
            if len(data) > MAX_LINE_BYTES:
                raise RedisProtocolError("a line of a reply has no end")
            data += self._receive_view[: stream.receive_some(self._receive_view)]
        line, rest = data[:end], data[end + 2 :]
        if line[:1] == b"-":
            if rest:
                raise RedisProtocolError("more follows an error reply than was asked for")
            return parse_error(line)
        length = None if line == NULL3 else parse_length(line)
        if length is None:
            if rest:
                raise RedisProtocolError("more follows a null reply than was asked for")
            return Found.NOTHING
        return self._other_length(stream, rest, length, payload)

    def _other_length(self, stream: Stream, data: bytes, length: int, payload: memoryview) -> Found:
        """Keep the first bytes of the value for the caller to judge, and drop the rest."""
        kept = min(length, HEADER_BYTES)
        while len(data) < kept:
            data += self._receive_view[
                : stream.receive_some(self._receive_view[: kept - len(data)])
            ]
        left = length + 2 - len(data)
        self._payload_bytes = -1
        self.header = memoryview(data[:kept])
        if left > MAX_DRAIN_BYTES or left < 0:
            self.close()
            return Found.OTHER_LENGTH
        last = data[-2:]
        while left:
            # Into the payload: it is lost anyway, and nothing else here is as large.
            piece = payload[: min(left, payload.nbytes)]
            stream.receive_exactly((piece,), piece.nbytes)
            left -= piece.nbytes
            last = (last + bytes(piece[-2:]))[-2:]
        if last != CRLF:
            raise RedisProtocolError("a value is longer than its reply says")
        return Found.OTHER_LENGTH

    # ----------------------------------------------------------------- SET

    def send_stripe(
        self,
        key: bytes,
        header: memoryview,
        payload: memoryview,
        deadline: float,
        ttl_s: int = 0,
    ) -> None:
        """Send a SET of header and payload. Its reply comes with `receive_reply`.

        Both buffers may be reused on return: the kernel has their bytes. ttl_s: in how many
        seconds the value expires; 0: never.
        """
        stream = self._usable()
        value_bytes = HEADER_BYTES + payload.nbytes
        prefix, end = set_prefix(key, value_bytes, ttl_s), end_of_command(ttl_s)
        stream.arm(deadline)
        try:
            stream.send((prefix, header, payload, end), len(prefix) + value_bytes + len(end))
        except (RedisTimeout, RedisUnavailable) as error:
            self.fail(error)

    def send_rest(self, parts: Sequence[Buffer], begun: Moved, deadline: float) -> None:
        """Send the rest of a command, of which `begun.moved` bytes were sent."""
        stream = self._usable()
        if not begun.moved and begun.why is Why.SENT_PART:
            # As in `ask_stripe`: nothing was sent, so that being late costs no connection.
            stream.arm(deadline)
        try:
            if begun.why is Why.SEND_LOST:
                raise stream.lost(begun.error)
            stream.arm(deadline)
            stream.send_rest(parts, begun.moved)
        except (RedisTimeout, RedisUnavailable) as error:
            self.fail(error)

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
        replies = self.exchange((request,), reply_count, deadline)
        for reply in replies:
            if isinstance(reply, ErrorReply):
                raise error_of(reply)
        return replies

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
