"""What the Redis plane is asked for and what it answers. Plain types, no I/O."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lmcache_redis.stripe import ChunkFrame, StripeHeader


class _Outcome(enum.Enum):
    """Counted by the thousand: an enum's own hash is a call in Python."""

    __hash__ = object.__hash__


class ReadOutcome(_Outcome):
    """How the read of a chunk ended. The slots hold the chunk only if LOADED."""

    LOADED = "loaded"
    MISSING = "not in Redis"
    TORN = "stripes of two different stores"
    INCOMPLETE = "some of its stripes are missing"
    CORRUPT = "damaged bytes"
    FOREIGN = "a value that is not this chunk's: other type, layout, chunk or version"
    TIMED_OUT = "not loaded before its deadline"
    UNAVAILABLE = "Redis cannot be used"
    CANCELLED = "cancelled"


class WriteOutcome(_Outcome):
    """How the write of a chunk ended. Readers can see the chunk only if STORED."""

    STORED = "stored"
    FULL = "Redis is at its memory limit and evicts nothing"
    REJECTED = "Redis refuses the write"
    TIMED_OUT = "not stored before its deadline"
    UNAVAILABLE = "Redis cannot be used"
    CANCELLED = "cancelled"


class CallOutcome(_Outcome):
    """How a call about keys ended. Its result means something only if DONE."""

    DONE = "done"
    TIMED_OUT = "not answered before its deadline"
    UNAVAILABLE = "Redis cannot be used"
    CANCELLED = "cancelled"


class ScanResult(NamedTuple):
    """prefix_length: how many of the keys, from the first on without a gap, exist."""

    outcome: CallOutcome
    prefix_length: int = 0


class ExistsResult(NamedTuple):
    """present: for each key in order whether it exists; empty unless DONE."""

    outcome: CallOutcome
    present: Sequence[bool] = ()


class KeysResult(NamedTuple):
    """names: those that were found, also where the outcome is not DONE."""

    outcome: CallOutcome
    names: Sequence[bytes] = ()


class ClearResult(NamedTuple):
    """removed: how many keys were deleted, also where the outcome is not DONE."""

    outcome: CallOutcome
    removed: int = 0


class RemoveResult(NamedTuple):
    """removed: how many stripes were there and were deleted, also where it is not DONE."""

    outcome: CallOutcome
    removed: int = 0


class DescribeResult(NamedTuple):
    """headers: for each key in order what its value says, None where there is none or another's.

    Empty unless DONE.
    """

    outcome: CallOutcome
    headers: Sequence[StripeHeader | None] = ()


class ChunkIO:
    """One chunk to read into slots, or to write from them.

    key: the chunk key (no stripe index). frame: the chunk's. slots: one contiguous
    memoryview for each stripe, of exactly its payload's size, writable for a read; they
    belong to the plane from the call until `done`. deadline: `time.monotonic()` seconds.
    tag: the caller's own. Compared and hashed by identity.
    """

    __slots__ = ("deadline", "frame", "key", "slots", "tag")

    def __init__(
        self,
        key: bytes,
        frame: ChunkFrame,
        slots: Sequence[memoryview],
        deadline: float,
        tag: object = None,
    ) -> None:
        self.key = key
        self.frame = frame
        self.slots = slots
        self.deadline = deadline
        self.tag = tag

    def check(self, writable: bool) -> None:
        """Raises ValueError unless there is one slot of the right size for every stripe."""
        frame = self.frame
        if len(self.slots) != frame.stripe_count:
            raise ValueError(f"{len(self.slots)} slots for a chunk of {frame.stripe_count} stripes")
        left = frame.chunk_bytes
        for index, slot in enumerate(self.slots):
            wanted = min(left, frame.stripe_payload_bytes)
            left -= wanted
            # One dimension of single bytes: a slice of it then counts bytes as well.
            if len(slot) != wanted or slot.nbytes != wanted or not slot.c_contiguous:
                raise ValueError(f"slot {index} is not {wanted} contiguous bytes in one dimension")
            if writable and slot.readonly:
                raise ValueError(f"slot {index} is read-only")


@dataclass(frozen=True, slots=True)
class PlaneState:
    """up: operations are tried. reason: one sentence, why it is down or what went wrong last.

    probed: the server has been asked at least once since the start. since: when this state
    began, `time.monotonic()` seconds.
    """

    up: bool
    probed: bool
    reason: str
    since: float


@dataclass(frozen=True, slots=True)
class PlaneStats:
    """Counts since the start. bytes are payload bytes of whole chunks read and written."""

    bytes_in: int
    bytes_out: int
    reads: Mapping[ReadOutcome, int]
    writes: Mapping[WriteOutcome, int]
    calls: Mapping[CallOutcome, int]
    keys_scanned: int
    keys_removed: int
    connects: int
    connections_lost: int
    errors: int
    queued_reads: int
    queued_writes: int
