"""What the compiled part did with the lanes of a thread, and why it came back.

See `lmcache_redis.native`. Whatever is not plain it leaves to Python, where a lane goes on from
what had come: `bulk.BulkConnection` takes a `Moved`.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from lmcache_redis import native
from lmcache_redis.stripe import HEADER_BYTES

# Nothing for so long: Python waits then, with one job's slots in use and not with those of many.
QUIET_MS = 5
# Nor does a call take longer: others may want to cancel what it works on.
SLICE_S = 0.02
# Tasks in one call. While Python accounts for what was done, the lanes are busy with the last.
MOST_TASKS = 48
# Shorter payloads have another kind of checksum, which is left to Python.
LEAST_PAYLOAD_BYTES = 241

# A command, a header, a slot and the command's end, as `native` takes them.
Packed = tuple[bytes, bytes | bytearray, memoryview, bytes]
# Stands for a stripe that was sent: only its lane matters.
SENT: Packed = (b"", bytearray(HEADER_BYTES), memoryview(bytes(LEAST_PAYLOAD_BYTES)), b"")


class Why(enum.IntEnum):
    """How a call ended; in the order of `moves.c`."""

    DONE = 0
    QUIET = 1  # the next reply has not begun to come
    REPLY = 2  # it begins otherwise than expected, or has not come so far
    PART = 3  # of its payload a part has come
    VALUE = 4  # all of it has come, and is not what it should be
    LOST = 5  # the connection ended before it
    SENT_PART = 6  # of the next command a part was sent, or nothing
    SEND_LOST = 7  # the connection ended while it was sent


class Moved(NamedTuple):
    """See `_moves.pyi`."""

    lanes: list[int]
    done: list[bytes]
    why: Why
    lane: int
    moved: int
    error: int
    first: bytes
    tail: bytes


# Ends of calls after which the first lane has to be seen to, and the one that was to send.
OF_REPLY = frozenset({Why.REPLY, Why.PART, Why.VALUE, Why.LOST})
OF_SENDING = frozenset({Why.SENT_PART, Why.SEND_LOST})


def is_compiled() -> bool:
    return native.moves is not None


def load(
    fds: list[int],
    tasks: list[Packed],
    under_way: int,
    drain: bool,
    until: float,
    verify: bool,
) -> Moved:
    """GETs that are under way, and others as lanes become free. Only where `is_compiled`."""
    assert native.moves is not None
    result = native.moves.load(fds, tasks, under_way, drain, QUIET_MS, until, verify)
    return Moved(result[0], result[1], Why(result[2]), *result[3:])


def store(fds: list[int], tasks: list[Packed], under_way: int, drain: bool, until: float) -> Moved:
    """SETs alike."""
    assert native.moves is not None
    result = native.moves.store(fds, tasks, under_way, drain, QUIET_MS, until)
    return Moved(result[0], result[1], Why(result[2]), *result[3:])
