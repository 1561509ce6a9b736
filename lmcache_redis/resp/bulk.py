# SPDX-License-Identifier: Apache-2.0
"""Stripes between sockets and slots, without copies: what a mover does, and one in Python.

A mover sends requests and receives replies on several connections, with one stripe in flight on
each. It receives replies in the order of the requests. The native extension (`moves.c`) moves many
stripes in one call, without the GIL. `PythonMover` does the same for TLS, and if the extension is
missing. Each stripe ends with a definite result (`End`). A call returns after `QUIET_MS` of
silence; the next call continues from a progress that only the mover reads. So the caller keeps the
deadlines.

A load expects the length of a plain value, and receives it in the slot. A value with fewer bytes
counts if its header says that it is packed: the stored bytes are received in the room that comes
with the stripe, verified, and unpacked into the slot, and the payload is verified if the header has
its checksum. Sealed ones are left in the slot.
"""

from __future__ import annotations

import enum
import errno
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from xxhash import xxh3_64_intdigest

from lmcache_redis.chunks.frame import (
    FLAGS_AT,
    HEADER_BYTES,
    PAYLOAD_CHECKSUM,
    SEALED,
    STORE_ID,
    add_checksums,
    is_expected,
    plain_checksum,
    stored_form,
)
from lmcache_redis.chunks.packing import unpack
from lmcache_redis.errors import RedisError, RedisLost, RedisProtocolError, RedisTimeout
from lmcache_redis.resp.net.connection import Connection
from lmcache_redis.resp.net.wire import CRLF, error_of, error_reply, parse_length

if TYPE_CHECKING:
    from typing_extensions import Buffer

# A call returns after this much silence: the caller has deadlines to keep, and idle lanes for new
# stripes.
QUIET_MS = 5
# The longest call: other threads may cancel the jobs that it works on.
SLICE_S = 0.02
# The most new stripes in one call. The lanes are busy while Python processes the results.
MOST_TASKS = 48
# The longest error reply.
MOST_LINE_BYTES = 4096

# What a mover needs of a stripe: (command, header, payload, end). To load: the GET; ``$length``
# CRLF and the expected header of a plain value, with its unknown fields zero; the slot; room for a
# packed payload, or nothing. To store: the SET up to its value; the header, with checksums if the
# stored bytes are at most `SHORT_BYTES`, which the native extension cannot hash; the stored bytes;
# the rest of the SET. The replies to loads arrive one by one: all of them may have one room.
Request = tuple[bytes, bytes | bytearray, memoryview, bytes | memoryview]


class End(enum.IntEnum):
    """How a stripe ended, as in `moves.h`. From OTHER_LENGTH on the connection is out of step."""

    DONE = 0
    NOTHING = 1  # no value
    LINE = 2  # an error reply; after a SET, any reply but OK
    MISMATCH = 3  # the value was received, but is not the expected one
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
    tasks: list[Request]
    in_flight: int
    is_sending: bool
    drain: bool
    until: float
    verify: bool = True
    quiet_ms: int = QUIET_MS


class PythonMover:
    """Moves stripes with a system call for each piece that has arrived."""

    def handle(self, connection: Connection) -> Handle:
        return connection, _Progress(connection)

    def move(self, call: MoveCall, is_load: bool) -> Moved:
        handles, tasks, in_flight, is_sending, drain, until, verify, quiet_ms = call
        lanes: list[_Progress] = [progress for _, progress in handles]
        sending = errno.EAGAIN if is_sending else 0
        lane_of = list(range(in_flight))
        idle = list(range(len(lanes) - 1, in_flight - 1, -1))
        done: list[Result] = []
        for progress in lanes:
            progress.until, progress.quiet_s = until, quiet_ms * 1e-3
        while True:
            while sending or (len(lane_of) < len(tasks) and idle):
                if not sending:
                    lane_of.append(idle.pop())
                    lanes[lane_of[-1]].reset()
                sending = lanes[lane_of[-1]].send(tasks[len(lane_of) - 1], is_load)
                if sending:
                    return Moved(lane_of[in_flight:], done, sending)
            all_sent = len(lane_of) == len(tasks)
            if len(done) == len(lane_of) or (all_sent and not drain):
                return Moved(lane_of[in_flight:], done, 0)
            result = lanes[lane_of[len(done)]].receive(tasks[len(done)], is_load, verify)
            if result is not None:
                done.append(result)
                idle.append(lane_of[len(done) - 1])
            if not isinstance(result, bytes) or time.monotonic() >= until:
                return Moved(lane_of[in_flight:], done, 0)


class _Progress:
    """The stripe on a lane: how much of it was sent and received; what the call allows."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.until = 0.0
        self.quiet_s = QUIET_MS * 1e-3
        self.first = bytearray(MOST_LINE_BYTES)
        self.view = memoryview(self.first)
        self.tail = bytearray(2)
        self.reset()

    def reset(self) -> None:
        self.sent = self.got = 0
        self.is_other = False
        self.stored = 0  # bytes of a packed payload, whose header is good

    def send(self, task: Request, is_load: bool) -> int:
        """Send the rest of a request: 0, EAGAIN if that would block, or another errno."""
        command, header, payload, end = task
        if not is_load and not self.sent and isinstance(header, bytearray):
            add_checksums(header, xxh3_64_intdigest(payload))
        parts = (command,) if is_load else (command, header, payload, end)
        nbytes = sum([len(part) for part in parts])
        try:
            while self.sent < nbytes:
                self._arm()
                self.sent += self.connection.send_some(parts, self.sent)
        except RedisTimeout:
            return errno.EAGAIN
        except RedisError:
            return errno.EPIPE
        return 0

    def receive(self, task: Request, is_load: bool, verify: bool) -> Result | None:
        """Receive a reply; None: it is not complete yet."""
        try:
            if is_load:
                return self._receive_value(task, verify)
            line = self._receive_line(b"+-:")
            if self.got != len(line) + 2:
                return End.GARBAGE, 0, b""
            return b"" if line == b"+OK" else (End.LINE, 0, line)
        except RedisTimeout:
            return None
        except RedisProtocolError:
            return End.GARBAGE, 0, b""
        except RedisError as error:
            return End.LOST, 0, str(error).encode()

    def _arm(self) -> None:
        self.connection.arm(min(self.until, time.monotonic() + self.quiet_s))

    def _fill_first(self, end: int) -> None:
        """Receive some of the first `end` bytes of a reply."""
        self._arm()
        self.got += self.connection.receive_some(self.view[self.got : end])

    def _receive_value(self, task: Request, verify: bool) -> Result:
        expected, payload = task[1], task[2]
        wanted = len(expected)
        head = wanted - HEADER_BYTES
        while not self.is_other and self.got < wanted:
            self._fill_first(wanted)
            there = min(self.got, head)
            self.is_other = self.first[:there] != expected[:there]
        if self.is_other:
            return self._receive_other(task, verify)
        self._receive_rest(wanted, payload)
        header = bytes(self.first[head:wanted])
        if is_expected(header, expected[head:], len(payload)) and (
            not verify or _is_undamaged(header, payload)
        ):
            return _result(header)
        return End.MISMATCH, 0, header

    def _receive_rest(self, start: int, into: memoryview) -> None:
        """Receive a payload that begins at byte `start` of the reply, and the end of the reply."""
        tail = memoryview(self.tail)
        while (left := start + len(into) + 2 - self.got) > 0:
            self._arm()
            part = into[2 - left :] if left > 2 else tail[2 - left :]
            self.got += self.connection.receive_some(part)
        if self.tail != CRLF:
            raise RedisProtocolError("a value has no end")

    def _receive_line(self, kinds: bytes) -> bytes:
        """Receive the first line of a reply, or more. It begins with one of `kinds`."""
        while True:
            if self.got and self.first[0] not in kinds:
                raise RedisProtocolError("malformed reply to GET or SET")
            end = self.first.find(CRLF, 0, self.got)
            if end >= 0:
                return bytes(self.first[:end])
            if self.got == len(self.first):
                raise RedisProtocolError("a line of a reply has no end")
            self._fill_first(len(self.first))

    def _receive_other(self, task: Request, verify: bool) -> Result:
        """Receive a reply that does not begin as the expected value."""
        line = self._receive_line(b"-$")
        start = len(line) + 2
        length = parse_length(line) if line[:1] == b"$" else None
        if length is not None:
            kept = min(length, HEADER_BYTES)
            while self.got < start + kept:
                self._fill_first(start + kept)
            header = bytes(self.first[start : start + kept])
            stored, start = length - kept, start + kept
            is_whole = kept == HEADER_BYTES
            if self.stored or (is_whole and self._begin_packed(task, header, start, stored)):
                return self._receive_packed(task, header, start, verify)
            return End.OTHER_LENGTH, 0, header
        if self.got != start:
            return End.GARBAGE, 0, b""
        return (End.LINE, 0, line) if line[:1] == b"-" else (End.NOTHING, 0, b"")

    def _begin_packed(self, task: Request, header: bytes, start: int, stored: int) -> bool:
        """Whether a value is a packed one that was asked for, or differs in the seal alone.

        The latter is received for the sake of the connection. Some may have arrived.
        """
        payload = task[2]
        if stored >= len(payload):
            return False
        bare = bytearray(task[1][-HEADER_BYTES:])
        bare[FLAGS_AT] ^= _is_other_kind(task, header)
        room = _room(task, header)
        if len(room) < stored or not is_expected(header, bare, stored):
            return False
        there = self.got - start
        room[: min(there, stored)] = self.first[start : start + min(there, stored)]
        if there > stored + 2:
            raise RedisProtocolError("a value has no end")
        end = self.first[start + stored : self.got]
        self.tail[: len(end)] = end
        self.stored = stored
        return True

    def _receive_packed(self, task: Request, header: bytes, start: int, verify: bool) -> Result:
        room = _room(task, header)[: self.stored]
        self._receive_rest(start, room)
        if _is_other_kind(task, header) or (verify and not _is_undamaged(header, room)):
            return End.MISMATCH, 0, header
        is_sealed = header[FLAGS_AT] & SEALED
        if not is_sealed and not unpacked(header, room, task[2], verify):
            return End.MISMATCH, 0, header
        return _result(header)


def unpacked(header: bytes, stored: Buffer, payload: Buffer, verify: bool = True) -> bool:
    """Bring a packed payload back. False if it is not the one that was packed."""
    if not unpack(stored, stored_form(header)[1], payload):
        return False
    expected = plain_checksum(header) if verify else 0
    return not expected or expected == xxh3_64_intdigest(payload)


def _room(task: Request, header: bytes) -> memoryview:
    """Where stored bytes go that are not the payload; sealed ones are opened by the caller."""
    is_sealed = (header[FLAGS_AT] | task[1][FLAGS_AT - HEADER_BYTES]) & SEALED
    return task[2] if is_sealed else memoryview(task[3])


def _is_other_kind(task: Request, header: bytes) -> int:
    """SEALED if one of what was found and what is expected is sealed, and the other is not."""
    return (header[FLAGS_AT] ^ task[1][FLAGS_AT - HEADER_BYTES]) & SEALED


def _is_undamaged(header: bytes, stored: memoryview) -> bool:
    return int.from_bytes(header[PAYLOAD_CHECKSUM], "little") == xxh3_64_intdigest(stored)


def _result(header: bytes) -> bytes:
    return header if header[FLAGS_AT] & SEALED else header[STORE_ID]


# -------------------------------------------------------------------- failures


def error_in(failure: StripeFailure, connection: Connection) -> RedisError | None:
    """The error of the connection or the server; None if the failure is about the value."""
    end, error_number, data = failure
    if end == End.LINE:
        if data[:1] != b"-":
            return RedisProtocolError("the reply to a SET is neither OK nor an error")
        return error_of(error_reply(data[1:].decode("utf-8", "replace")))
    if end == End.GARBAGE:
        return RedisProtocolError("malformed reply to GET or SET")
    if end == End.LOST:
        return RedisLost(data.decode()) if data else connection.lost(error_number)
    return None
