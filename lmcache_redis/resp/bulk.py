"""A connection that moves stripes between slots and Redis without copying them.

A GET takes three system calls: the command; `$length` and header together; payload and the
last CRLF straight into slot and tail. The first receive takes what there is, so that `$-1`,
an error or another length is recognised before more is waited for. A SET is one sendmsg of
command, header, payload and CRLF. The kernel keeps the deadline and Python holds no GIL
while bytes move. What the compiled part has begun, a connection goes on with (`moving.Moved`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from lmcache_redis.errors import RedisProtocolError, RedisTimeout, RedisUnavailable
from lmcache_redis.resp.connect import Connector
from lmcache_redis.resp.connection import Connection
from lmcache_redis.resp.moving import Moved, Why
from lmcache_redis.resp.stream import Buffer, Stream
from lmcache_redis.resp.wire import (
    CRLF,
    MAX_LINE_BYTES,
    NULL3,
    ErrorReply,
    end_of_command,
    error_of,
    parse_error,
    parse_length,
    set_prefix,
)
from lmcache_redis.stripe import HEADER_BYTES

# A value of unexpected length up to this is read and dropped; beyond, the connection is.
MAX_DRAIN_BYTES = 8 << 20


class Found(enum.Enum):
    """What a GET found under a stripe's key."""

    VALUE = "a value of the expected length; payload and header are filled"
    NOTHING = "no value"
    OTHER_LENGTH = "a value of another length; header holds its first bytes"
    OTHER_TYPE = "something that is no string"


class BulkConnection(Connection):
    """A `Connection` for stripes; what that says of errors and deadlines holds here as well."""

    __slots__ = (
        "_buffer",
        "_first",
        "_first_bytes",
        "_head",
        "_payload_bytes",
        "_tail",
        "_tail_view",
        "header",
    )

    def __init__(self, connector: Connector, name: str) -> None:
        super().__init__(connector, name)
        self.header = memoryview(b"")
        self._tail = bytearray(2)
        self._tail_view = memoryview(self._tail)
        self._payload_bytes = -1
        self._head = b""
        self._buffer = bytearray()
        self._first = memoryview(b"")
        self._first_bytes = 0

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
            if begun is not None and begun.moved:
                # More of another reply than the head of the expected one has: it went on there.
                data = begun.first + bytes(payload[: begun.moved])
                found: Found | ErrorReply = self._other_reply(stream, data, payload)
            elif received == self._first_bytes and self._buffer.startswith(self._head):
                found = Found.VALUE
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
        if left > MAX_DRAIN_BYTES:
            self.close()
            return Found.OTHER_LENGTH
        last = data[: length + 2][-2:]
        if left < 0 and last == CRLF:
            # Nobody asked for what follows.
            self.close()
            return Found.OTHER_LENGTH
        while left > 0:
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
