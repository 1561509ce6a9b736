"""Stripes between sockets and slots, without copies; and what a value found in Redis is worth.

A mover sends requests and receives replies on several connections, one stripe in flight on each,
and replies are received in the order of the requests. The native extension is one (`moves.c`: one
call without the GIL for many stripes); `PythonMover` does the same for TLS and where the extension
is missing. Each stripe ends with a definite result (`End`). A call that meets a wait returns after
`QUIET_MS` and the next call continues, from a progress that only the mover reads; so the caller
keeps the deadlines. Between two calls, what a mover is told to receive may be directed to other
memory.

A value counts only when its header is exactly the expected one and its payload has the checksum
that the header names. What is wrong is either ours beyond doubt, and then its chunk is removed: a
whole header of this very chunk (cut into stripes otherwise, or moved), or a damaged one that has
our magic and version. Or it may belong to others, and is left alone: another type, another magic
or version, another layout or chunk, no header at all.
"""

from __future__ import annotations

import enum
import errno
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from xxhash import xxh3_64_intdigest

from lmcache_redis import native
from lmcache_redis.errors import (
    FormatError,
    RedisError,
    RedisProtocolError,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp.net.connection import Connection
from lmcache_redis.resp.net.stream import Stream
from lmcache_redis.resp.net.wire import CRLF, error_of, parse_error, parse_length, value_head
from lmcache_redis.resp.outcomes import ReadOutcome
from lmcache_redis.stripe import HEADER_BYTES, ChunkFrame, Verdict, describe_header

# A call that is met by silence returns after that long: the caller has deadlines to keep, and lanes
# that are idle for new stripes.
QUIET_MS = 5
# Nor does a call take longer: others may want to cancel what it works on.
SLICE_S = 0.02
# New stripes in one call. While Python accounts for what was done, the lanes are busy.
MOST_TASKS = 48
# Of an error reply.
MOST_LINE_BYTES = 4096
# Shorter payloads have another kind of checksum, which the native extension leaves to Python.
_SHORT_BYTES = 240
_MAGIC = b"LMCR"
_OF_THIS_CHUNK = frozenset({Verdict.WRONG_SIZE, Verdict.WRONG_STRIPE})
_STORE_ID = slice(8, 24)
_PAYLOAD_CHECKSUM = slice(56, 64)
_CREATED = slice(160, 168)
_OWN_CHECKSUM = slice(168, 176)

# A command, a header, a slot and what ends the command. To load: the packed GET, ``$length`` CRLF
# and the expected header with its unknown fields zero, the slot, nothing. To store: the packed SET
# up to its value, the header (`seal_short`), the slot, what ends the command.
Packed = tuple[bytes, bytes | bytearray, memoryview, bytes]
# In the place of a SET that was sent.
SENT: Packed = (b"", bytearray(HEADER_BYTES), memoryview(b""), b"")


class End(enum.IntEnum):
    """How a stripe ended; in the order of `moves.h`. From OTHER_LENGTH on: out of step."""

    DONE = 0
    NOTHING = 1  # no value
    LINE = 2  # an error reply, or to a SET another than OK
    MISMATCH = 3  # a value of the right length, in the slot, and not what is expected
    OTHER_LENGTH = 4  # a value of another length
    GARBAGE = 5  # no reply to the request
    LOST = 6  # the connection ended


# Of a stripe that ended well the store id (nothing after a store). Else how it ended, for LOST
# errno (0: closed), and its data: the line, or the first bytes of the value.
Failure = tuple[int, int, bytes]
Result = bytes | Failure
Handle = tuple[Any, Any]


class Moved(NamedTuple):
    """What a call did.

    lanes: for each task that was sent its lane. done: the results of the first tasks, in order; one
    that failed is the last. sending: 0, EAGAIN where the last task was sent in part, else its
    errno.
    """

    lanes: Sequence[int]
    done: Sequence[Result]
    sending: int


class Call(NamedTuple):
    """What a mover is to do.

    lanes: handles; the first `in_flight` tasks are on the first of them. is_sending: the last of
    these was sent in part. drain: receive all, rather than return when all have been sent. until:
    `time.monotonic()`. verify: whether loaded payloads are hashed. quiet_ms: the longest silence.
    """

    lanes: list[Handle]
    tasks: list[Packed]
    in_flight: int
    is_sending: bool
    drain: bool
    until: float
    verify: bool = True
    quiet_ms: int = QUIET_MS


class Mover(Protocol):
    """See the module."""

    def handle(self, stream: Stream) -> Handle:
        """What stands for a connection in a `Call`."""

    def load(self, call: Call) -> Moved: ...

    def store(self, call: Call) -> Moved: ...


def mover_for(stream: Stream) -> Mover:
    """The native extension's where it is there and the connection is plain."""
    if native.moves is None or stream.plain_fileno() < 0:
        return PythonMover()
    return NativeMover()


class NativeMover:
    """`moves.c`."""

    def __init__(self) -> None:
        assert native.moves is not None
        self._moves: Any = native.moves

    def handle(self, stream: Stream) -> Handle:
        return stream.plain_fileno(), bytearray(self._moves.PROGRESS_BYTES)

    def load(self, call: Call) -> Moved:
        return Moved(*self._moves.load(*call))

    def store(self, call: Call) -> Moved:
        return Moved(*self._moves.store(*call))


class _Progress:
    """How far the stripe on a lane has come."""

    __slots__ = ("first", "got", "is_other", "quiet_s", "sent", "tail", "view")

    def __init__(self) -> None:
        self.quiet_s = QUIET_MS * 1e-3
        self.first = bytearray(MOST_LINE_BYTES)
        self.view = memoryview(self.first)
        self.tail = bytearray(2)
        self.reset()

    def reset(self) -> None:
        self.sent = self.got = 0
        self.is_other = False


class PythonMover:
    """The same in Python, on blocking sockets: the kernel waits, without the GIL."""

    def handle(self, stream: Stream) -> Handle:
        return stream, _Progress()

    def load(self, call: Call) -> Moved:
        return _move(call, is_load=True)

    def store(self, call: Call) -> Moved:
        return _move(call, is_load=False)


def _move(call: Call, is_load: bool) -> Moved:
    lanes, tasks, in_flight, is_sending, drain, until, verify, quiet_ms = call
    sending = errno.EAGAIN if is_sending else 0
    lane_of = list(range(in_flight))
    idle = list(range(len(lanes) - 1, in_flight - 1, -1))
    done: list[Result] = []
    for _, progress in lanes:
        progress.quiet_s = quiet_ms * 1e-3
    while True:
        while sending or (len(lane_of) < len(tasks) and idle):
            if not sending:
                lane_of.append(idle.pop())
                lanes[lane_of[-1]][1].reset()
            sending = _send(*lanes[lane_of[-1]], tasks[len(lane_of) - 1], is_load, until)
            if sending:
                return Moved(lane_of[in_flight:], done, sending)
        all_sent = len(lane_of) == len(tasks)
        if len(done) == len(lane_of) or (all_sent and not drain):
            return Moved(lane_of[in_flight:], done, 0)
        stream, progress = lanes[lane_of[len(done)]]
        result = _receive(stream, progress, tasks[len(done)], is_load, verify, until)
        if result is not None:
            done.append(result)
            idle.append(lane_of[len(done) - 1])
        if not isinstance(result, bytes) or time.monotonic() >= until:
            return Moved(lane_of[in_flight:], done, 0)


def _arm(stream: Stream, progress: _Progress, until: float) -> None:
    stream.arm(min(until, time.monotonic() + progress.quiet_s))


def _send(stream: Stream, progress: _Progress, task: Packed, is_load: bool, until: float) -> int:
    """Send what is left of a request: 0, EAGAIN where that has to wait, or another errno."""
    command, header, payload, end = task
    if not is_load and not progress.sent and isinstance(header, bytearray):
        seal(header, payload)
    parts: tuple[bytes | bytearray | memoryview, ...] = (command,)
    if not is_load:
        parts = (command, header, payload, end)
    nbytes = sum([len(part) for part in parts])
    try:
        while progress.sent < nbytes:
            _arm(stream, progress, until)
            progress.sent += stream.send_some(parts, progress.sent)
    except RedisTimeout:
        return errno.EAGAIN
    except RedisError:
        return errno.EPIPE
    return 0


def _receive(
    stream: Stream, progress: _Progress, task: Packed, is_load: bool, verify: bool, until: float
) -> Result | None:
    """Receive what has come of a reply; None: it is not whole."""
    try:
        if is_load:
            return _receive_value(stream, progress, task[1], task[2], verify, until)
        line = _receive_line(stream, progress, b"+-:", until)
        if progress.got != len(line) + 2:
            return End.GARBAGE, 0, b""
        return b"" if line == b"+OK" else (End.LINE, 0, line)
    except RedisTimeout:
        return None
    except RedisProtocolError:
        return End.GARBAGE, 0, b""
    except RedisError as error:
        return End.LOST, 0, str(error).encode()


def _receive_value(
    stream: Stream,
    progress: _Progress,
    expected: bytes | bytearray,
    payload: memoryview,
    verify: bool,
    until: float,
) -> Result:
    wanted = len(expected)
    head = wanted - HEADER_BYTES
    while not progress.is_other and progress.got < wanted:
        _arm(stream, progress, until)
        progress.got += stream.receive_some(progress.view[progress.got : wanted])
        there = min(progress.got, head)
        progress.is_other = progress.first[:there] != expected[:there]
    if progress.is_other:
        return _receive_other(stream, progress, until)
    tail = memoryview(progress.tail)
    while (left := wanted + len(payload) + 2 - progress.got) > 0:
        _arm(stream, progress, until)
        parts = (payload[-(left - 2) :], tail) if left > 2 else (tail[2 - left :],)
        progress.got += stream.receive_most(parts)
    if progress.tail != CRLF:
        return End.GARBAGE, 0, b""
    header = bytes(progress.first[head:wanted])
    checksum = int.from_bytes(header[_PAYLOAD_CHECKSUM], "little")
    if _is_expected(header, expected[head:]) and (
        not verify or checksum == xxh3_64_intdigest(payload)
    ):
        return header[_STORE_ID]
    return End.MISMATCH, 0, header


def _is_expected(header: bytes, expected: bytes | bytearray) -> bool:
    """Whether a header has its own checksum, and every field that a reader knows before."""
    masked = bytearray(header)
    masked[_OWN_CHECKSUM] = bytes(8)
    if xxh3_64_intdigest(masked) != int.from_bytes(header[_OWN_CHECKSUM], "little"):
        return False
    masked[_STORE_ID] = bytes(16)
    masked[_PAYLOAD_CHECKSUM] = masked[_CREATED] = bytes(8)
    return masked == expected


def _receive_line(stream: Stream, progress: _Progress, kinds: bytes, until: float) -> bytes:
    """The first line of a reply that begins with one of `kinds`. `got` may be beyond it."""
    while True:
        data = progress.first
        if progress.got and data[0] not in kinds:
            raise RedisProtocolError("the reply to a GET or SET is none")
        end = data.find(CRLF, 0, progress.got)
        if end >= 0:
            return bytes(data[:end])
        if progress.got == len(data):
            raise RedisProtocolError("a line of a reply has no end")
        _arm(stream, progress, until)
        progress.got += stream.receive_some(progress.view[progress.got :])


def _receive_other(stream: Stream, progress: _Progress, until: float) -> Result:
    """A reply that is not the expected value."""
    line = _receive_line(stream, progress, b"-$_", until)
    start = len(line) + 2
    length = None
    if line[:1] == b"$":
        length = parse_length(line)
    if length is not None:
        kept = min(length, HEADER_BYTES)
        while progress.got < start + kept:
            _arm(stream, progress, until)
            progress.got += stream.receive_some(progress.view[progress.got : start + kept])
        return End.OTHER_LENGTH, 0, bytes(progress.first[start : start + kept])
    if progress.got != start or (line[:1] == b"_" and line != b"_"):
        return End.GARBAGE, 0, b""
    return (End.LINE, 0, line) if line[:1] == b"-" else (End.NOTHING, 0, b"")


def seal(header: bytearray, payload: memoryview) -> None:
    """Write the checksums of payload and header into the header."""
    header[_PAYLOAD_CHECKSUM] = xxh3_64_intdigest(payload).to_bytes(8, "little")
    header[_OWN_CHECKSUM] = bytes(8)
    header[_OWN_CHECKSUM] = xxh3_64_intdigest(header).to_bytes(8, "little")


def seal_short(header: bytearray, payload: memoryview) -> bytearray:
    """The header of a SET, sealed where the native extension cannot do it."""
    if payload.nbytes <= _SHORT_BYTES:
        seal(header, payload)
    return header


# ------------------------------------------------------------------- one value


def ask_value(connection: Connection, command: bytes, deadline: float) -> None:
    """Send a packed GET, whose reply `receive_value` receives. Raises as `Connection.send`."""
    connection.send((command,), deadline)


def receive_value(connection: Connection, payload: memoryview, deadline: float) -> bytes | None:
    """Receive the reply to a GET: its first 512 bytes, and the others in `payload`.

    None where there is no value of that length. Raises RedisError.
    """
    expected = value_head(HEADER_BYTES + payload.nbytes) + bytes(HEADER_BYTES)
    stream, progress = connection.stream, _Progress()
    result: Result | None = None
    while result is None:
        if deadline <= time.monotonic():
            connection.fail(RedisTimeout("Redis did not answer in time"))
        result = _receive(stream, progress, (b"", expected, payload, b""), True, False, deadline)
    # A header of zeros has no checksum: what has the right length is a MISMATCH.
    assert not isinstance(result, bytes)
    end, _, data = result
    if end is End.MISMATCH:
        return data
    error = error_in(result)
    if end >= End.OTHER_LENGTH:
        connection.close()
    if error is not None and not _is_other_type(result):
        raise error
    return None


# -------------------------------------------------------------------- judgement


def error_in(failure: Failure, stream: Stream | None = None) -> RedisError | None:
    """What a failure says of the connection or the server; None where it is about the value."""
    end, error_number, data = failure
    if end == End.LINE:
        if data[:1] != b"-":
            return RedisProtocolError("the reply to a SET is neither OK nor an error")
        return error_of(parse_error(data))
    if end == End.GARBAGE:
        return RedisProtocolError("the reply to a GET or SET is none")
    if end == End.LOST:
        if data or stream is None:
            return RedisUnavailable(data.decode() or "the connection to Redis was lost")
        return stream.lost(error_number)
    return None


class Verified(NamedTuple):
    """outcome None: the stripe is good, of the store `store_id`.

    remove_stripes: 0, or how many stripes of the chunk to remove.
    """

    outcome: ReadOutcome | None
    store_id: bytes = b""
    remove_stripes: int = 0


def verify(
    frame: ChunkFrame, index: int, failure: Failure, payload: memoryview, checksums: bool = True
) -> Verified | None:
    """Judge what was found for stripe `index` of a chunk; None where it is no value's fault.

    checksums: whether the payload is hashed and compared as well.
    """
    end, _, data = failure
    if end == End.NOTHING:
        return Verified(ReadOutcome.INCOMPLETE, remove_stripes=frame.stripe_count)
    if _is_other_type(failure):
        return Verified(ReadOutcome.FOREIGN)
    if end not in (End.MISMATCH, End.OTHER_LENGTH):
        return None
    check = frame.check_header(data, index)
    if check.ok and end == End.MISMATCH:
        if not checksums or xxh3_64_intdigest(payload) == check.checksum:
            return Verified(None, check.store_id)
        return Verified(ReadOutcome.CORRUPT, remove_stripes=frame.stripe_count)
    if check.verdict in _OF_THIS_CHUNK:
        return Verified(ReadOutcome.FOREIGN, remove_stripes=_stripes(frame, data))
    # Cut short before the version, a header says CORRUPT_HEADER too: the magic decides.
    if check.ok or (check.verdict is Verdict.CORRUPT_HEADER and data[:4] == _MAGIC):
        return Verified(ReadOutcome.CORRUPT, remove_stripes=frame.stripe_count)
    return Verified(ReadOutcome.FOREIGN)


def _is_other_type(failure: Failure) -> bool:
    return failure[0] == End.LINE and failure[2].startswith(b"-WRONGTYPE")


def _stripes(frame: ChunkFrame, header: bytes) -> int:
    """All stripes of the chunk, however it was cut."""
    try:
        return max(frame.stripe_count, describe_header(header).stripe_count)
    except FormatError:
        return frame.stripe_count
