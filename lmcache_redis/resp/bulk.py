"""Stripes between sockets and slots, without copies: what a mover does, and one in Python.

A mover sends requests and receives replies on several connections, with one stripe in flight on
each. It receives replies in the order of the requests. The native extension (`moves.c`) moves many
stripes in one call, without the GIL. `PythonMover` does the same for TLS, and if the extension is
missing. Each stripe ends with a definite result (`End`). A call returns after `QUIET_MS` of
silence; the next call continues from a progress that only the mover reads. So the caller keeps the
deadlines, and can redirect the rest of a reply to other memory between two calls.
"""

from __future__ import annotations

import enum
import errno
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from lmcache_redis.chunks.frame import (
    FLAGS_AT,
    HEADER_BYTES,
    PAYLOAD_CHECKSUM,
    SEALED,
    STORE_ID,
    add_checksums,
    is_expected,
)
from lmcache_redis.errors import RedisError, RedisProtocolError, RedisTimeout, RedisUnavailable
from lmcache_redis.resp.net.connection import Connection
from lmcache_redis.resp.net.stream import Stream
from lmcache_redis.resp.net.wire import CRLF, error_of, error_reply, parse_length, value_head

# A call returns after this much silence: the caller has deadlines to keep, and idle lanes for new
# stripes.
QUIET_MS = 5
# The longest call: other threads may cancel the jobs that it works on.
SLICE_S = 0.02
# The most new stripes in one call. The lanes are busy while Python processes the results.
MOST_TASKS = 48
# The longest error reply.
MOST_LINE_BYTES = 4096

# Payloads up to this size have another algorithm of xxh3.
SHORT_BYTES = 240

# What a mover needs of a stripe: (command, header, slot, end of the command). To load: the packed
# GET; ``$length`` CRLF and the expected header with its unknown fields zero; the slot; nothing. To
# store: the packed SET up to its value; the header, with checksums if the payload has at most
# `SHORT_BYTES`, which the native extension cannot hash; the slot, or its sealed copy; the rest of
# the SET.
Packed = tuple[bytes, bytes | bytearray, memoryview, bytes]
# Replaces a SET that was sent.
SENT: Packed = (b"", bytearray(HEADER_BYTES), memoryview(b""), b"")


class End(enum.IntEnum):
    """How a stripe ended, as in `moves.h`. From OTHER_LENGTH on the connection is out of step."""

    DONE = 0
    NOTHING = 1  # no value
    LINE = 2  # an error reply; after a SET, any reply but OK
    MISMATCH = 3  # a value of the right length is in the slot, but is not the expected one
    OTHER_LENGTH = 4  # a value of another length
    GARBAGE = 5  # no reply to the request
    LOST = 6  # the connection ended


# A failure: how the stripe ended; errno if LOST (0: closed); the line, or the first bytes of the
# value. Otherwise the result is the store id of a loaded stripe, or its header if it is sealed and
# has yet to be opened; it is empty for a stored one.
StripeFailure = tuple[int, int, bytes]
Result = bytes | StripeFailure
Handle = tuple[Any, Any]


class Moved(NamedTuple):
    """What a call did.

    lanes: the lane of each new task that was sent. done: the results of the first tasks, in order;
    a failure is the last. sending: 0; EAGAIN if the last task was sent in part; else its errno.
    """

    lanes: Sequence[int]
    done: Sequence[Result]
    sending: int


class MoveCall(NamedTuple):
    """What a mover is to do.

    lanes: handles; the first `in_flight` tasks are on the first of them. is_sending: the last of
    these was sent in part. drain: return when all replies have arrived, not when all requests have
    been sent. until: when to return, `time.monotonic()`. verify: whether to hash loaded payloads.
    quiet_ms: the longest silence.
    """

    lanes: list[Handle]
    tasks: list[Packed]
    in_flight: int
    is_sending: bool
    drain: bool
    until: float
    verify: bool = True
    quiet_ms: int = QUIET_MS


class _Progress:
    """The progress of the stripe on a lane."""

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
    """Moves stripes on blocking sockets: the kernel waits while the GIL is released."""

    def handle(self, stream: Stream) -> Handle:
        return stream, _Progress()

    def load(self, call: MoveCall) -> Moved:
        return _move(call, is_load=True)

    def store(self, call: MoveCall) -> Moved:
        return _move(call, is_load=False)


def _move(call: MoveCall, is_load: bool) -> Moved:
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
    """Send the rest of a request: 0, EAGAIN if that would block, or another errno."""
    command, header, payload, end = task
    if not is_load and not progress.sent and isinstance(header, bytearray):
        add_checksums(header, xxh3_64_intdigest(payload))
    parts = (command,) if is_load else (command, header, payload, end)
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
    """Receive a reply; None: it is not complete yet."""
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
    checksum = int.from_bytes(header[PAYLOAD_CHECKSUM], "little")
    if is_expected(header, expected[head:]) and (
        not verify or checksum == xxh3_64_intdigest(payload)
    ):
        return header if header[FLAGS_AT] & SEALED else header[STORE_ID]
    return End.MISMATCH, 0, header


def _receive_line(stream: Stream, progress: _Progress, kinds: bytes, until: float) -> bytes:
    """Receive the first line of a reply, which begins with one of `kinds`, and perhaps more."""
    while True:
        data = progress.first
        if progress.got and data[0] not in kinds:
            raise RedisProtocolError("malformed reply to GET or SET")
        end = data.find(CRLF, 0, progress.got)
        if end >= 0:
            return bytes(data[:end])
        if progress.got == len(data):
            raise RedisProtocolError("a line of a reply has no end")
        _arm(stream, progress, until)
        progress.got += stream.receive_some(progress.view[progress.got :])


def _receive_other(stream: Stream, progress: _Progress, until: float) -> Result:
    """Receive a reply that is not the expected value."""
    line = _receive_line(stream, progress, b"-$", until)
    start = len(line) + 2
    length = parse_length(line) if line[:1] == b"$" else None
    if length is not None:
        kept = min(length, HEADER_BYTES)
        while progress.got < start + kept:
            _arm(stream, progress, until)
            progress.got += stream.receive_some(progress.view[progress.got : start + kept])
        return End.OTHER_LENGTH, 0, bytes(progress.first[start : start + kept])
    if progress.got != start:
        return End.GARBAGE, 0, b""
    return (End.LINE, 0, line) if line[:1] == b"-" else (End.NOTHING, 0, b"")


# ------------------------------------------------------------------- one value


def receive_value(connection: Connection, payload: memoryview, deadline: float) -> bytes | None:
    """Receive the reply to a GET that was sent: the value's first 512 bytes, the rest in `payload`.

    None if there is no value of that length. Raises RedisError.
    """
    # No header is this one: it is not zero where a mover compares with zeros. So any value of the
    # right length is a MISMATCH.
    expected = value_head(HEADER_BYTES + payload.nbytes) + b"\xff" * HEADER_BYTES
    stream, progress = connection.stream, _Progress()
    result: Result | None = None
    while result is None:
        if deadline <= time.monotonic():
            connection.fail(stream.late())
        result = _receive(stream, progress, (b"", expected, payload, b""), True, False, deadline)
    assert not isinstance(result, bytes)
    end, _, data = result
    if end is End.MISMATCH:
        return data
    error = error_in(result, stream)
    if end >= End.OTHER_LENGTH:
        connection.close()
    if error is not None and not is_other_type(result):
        raise error
    return None


# -------------------------------------------------------------------- failures


def error_in(failure: StripeFailure, stream: Stream) -> RedisError | None:
    """The error of the connection or the server; None if the failure is about the value."""
    end, error_number, data = failure
    if end == End.LINE:
        if data[:1] != b"-":
            return RedisProtocolError("the reply to a SET is neither OK nor an error")
        return error_of(error_reply(data[1:].decode("utf-8", "replace")))
    if end == End.GARBAGE:
        return RedisProtocolError("malformed reply to GET or SET")
    if end == End.LOST:
        return RedisUnavailable(data.decode()) if data else stream.lost(error_number)
    return None


def is_other_type(failure: StripeFailure) -> bool:
    """Whether the key has a value that is not a string."""
    return failure[0] == End.LINE and failure[2].startswith(b"-WRONGTYPE")
