"""Requests to the Redis plane and their results. Plain types, no I/O."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from lmcache_redis.stripe import ChunkFrame

ResultT = TypeVar("ResultT")
# Told the result of a call, once.
Done = Callable[[ResultT], None]


class _Outcome(enum.Enum):
    """Outcomes are dictionary keys on the hot path: Enum.__hash__ is a call in Python."""

    __hash__ = object.__hash__


class ReadOutcome(_Outcome):
    """How the read of a chunk ended. The slots hold the chunk only if it is LOADED."""

    LOADED = "loaded"
    MISSING = "not in Redis"
    TORN = "stripes of two different stores"
    INCOMPLETE = "some of its stripes are missing"
    CORRUPT = "damaged bytes"
    FOREIGN = "a value that is not this chunk's: other type, layout, chunk or version"
    NOT_OPENED = "sealed with an unknown key, or not sealed although it must be"
    TIMED_OUT = "not loaded before its deadline"
    UNAVAILABLE = "Redis cannot be used"
    CANCELLED = "cancelled"


class WriteOutcome(_Outcome):
    """How the write of a chunk ended. Readers can see the chunk only if it is STORED."""

    STORED = "stored"
    FULL = "Redis is at its memory limit and evicts nothing"
    REJECTED = "Redis refuses the write"
    NO_ROOM_FOR_SEAL = "its metadata leave no room for a seal"
    TIMED_OUT = "not stored before its deadline"
    UNAVAILABLE = "Redis cannot be used"
    CANCELLED = "cancelled"


class CallOutcome(_Outcome):
    """How a call about keys ended. Its result is valid only if DONE."""

    DONE = "done"
    TIMED_OUT = "not answered before its deadline"
    UNAVAILABLE = "Redis cannot be used"
    CANCELLED = "cancelled"


class ScanResult(NamedTuple):
    """prefix_length: how many of the leading keys exist, up to the first gap."""

    outcome: CallOutcome
    prefix_length: int = 0


class ExistsResult(NamedTuple):
    """present: whether each key exists, in order; empty unless DONE."""

    outcome: CallOutcome
    present: Sequence[bool] = ()


class RemoveResult(NamedTuple):
    """removed: how many keys of Redis or files were deleted, also if the outcome is not DONE."""

    outcome: CallOutcome
    removed: int = 0


class FramesResult(NamedTuple):
    """frames: for each key in order, the frame of its chunk or None; empty unless DONE."""

    outcome: CallOutcome
    frames: Sequence[ChunkFrame | None] = ()


@dataclass(slots=True, eq=False, repr=False)
class ChunkIO:
    """One chunk to read into slots, or to write from them.

    key: the chunk key, without a stripe index. frame: the frame of its stripes. slots: one
    contiguous memoryview for each stripe, of exactly its payload's size, writable for a read; they
    belong to the plane from the call until `done`. deadline: `time.monotonic()` seconds. tag: for
    the caller's use. Compared and hashed by identity.
    """

    key: bytes
    frame: ChunkFrame
    slots: Sequence[memoryview]
    deadline: float
    tag: object = None

    def check(self, writable: bool) -> None:
        """Raises ValueError unless there is one slot of the right size for every stripe."""
        frame = self.frame
        if len(self.slots) != frame.stripe_count:
            raise ValueError(f"{len(self.slots)} slots for a chunk of {frame.stripe_count} stripes")
        left = frame.chunk_bytes
        for index, slot in enumerate(self.slots):
            wanted = min(left, frame.stripe_payload_bytes)
            left -= wanted
            # One dimension of single bytes: slices count bytes, too.
            if len(slot) != wanted or slot.nbytes != wanted or not slot.c_contiguous:
                raise ValueError(f"slot {index} is not {wanted} contiguous bytes in one dimension")
            if writable and slot.readonly:
                raise ValueError(f"slot {index} is read-only")


# Told once for each chunk how its read or write has ended.
ReadDone = Callable[[ChunkIO, ReadOutcome], None]
WriteDone = Callable[[ChunkIO, WriteOutcome], None]


@dataclass(frozen=True, slots=True)
class PlaneState:
    """up: operations are tried. reason: a sentence that says why it is down, or the last error.

    probed: the server has been probed since the start. since: when this state began,
    `time.monotonic()` seconds.
    """

    up: bool
    probed: bool
    reason: str
    since: float


@dataclass(frozen=True, slots=True)
class PlaneStats:
    """Counts since the start. bytes_in, bytes_out: payload of the chunks loaded and stored."""

    bytes_in: int
    bytes_out: int
    reads: Mapping[ReadOutcome, int]
    writes: Mapping[WriteOutcome, int]
    connects: int
    connections_lost: int
    errors: int
    queued_reads: int
    queued_writes: int
