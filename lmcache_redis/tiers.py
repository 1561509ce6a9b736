# SPDX-License-Identifier: Apache-2.0
"""The contract between the cache and a tier behind the host pool (a disk, Redis).

A job is the transfer of one chunk, a `ChunkIO`: the chunk key, the frame (size, stripe size,
metadata), one slot of memory per stripe, and a deadline. The slots belong to the tier from the call
until `done`, which is called exactly once for each job, by its deadline. A tier that cannot abandon
an operation, such as a read from a network file system that is gone, makes it in memory of its own:
it begins none after the deadline, and answers when its own patience ends.

A callback may come on any thread, even before the call that caused it returns, and must only
enqueue: the cache posts it to its owner. A tier never waits for I/O on the owner's thread, never
raises because a disk or a server fails, and calls nothing else of the cache.

A tier that is down (`state.up` is False) answers every job UNAVAILABLE at once.

Keys are chunk keys (`chunks.names`): everything in a Redis key before the stripe index. The tier
decides how it stores a chunk, in stripes or in a file. Deadlines are of the owner's clock, which is
`time.monotonic()` but in a simulation.

A question has three answers: the chunk is there, it is absent, or that is not known, because a
shard is down, or the slot moves. What is not known is never a reason to write, to delete, or to
believe that a chunk is gone.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from lmcache_redis.chunks.frame import ChunkFrame
from lmcache_redis.chunks.names import Shares
from lmcache_redis.tier_kinds import TierKind

ResultT = TypeVar("ResultT")
# Told the result of a call, once.
Done = Callable[[ResultT], None]


class _Outcome(enum.Enum):
    """Outcomes are dictionary keys on the hot path: Enum.__hash__ is a call in Python."""

    __hash__ = object.__hash__


class ReadOutcome(_Outcome):
    """How the read of a chunk ended. The slots hold the chunk only if it is LOADED."""

    LOADED = "loaded"
    MISSING = "not there"
    TORN = "stripes of two different stores"
    INCOMPLETE = "some of its stripes are missing"
    CORRUPT = "damaged bytes"
    FOREIGN = "a value that is not this chunk's: other type, layout, chunk or version"
    NOT_OPENED = "sealed with an unknown key, or not sealed although it must be"
    TIMED_OUT = "not loaded before its deadline"
    UNAVAILABLE = "it cannot be used"
    CANCELLED = "cancelled"


class WriteOutcome(_Outcome):
    """How the write of a chunk ended. Readers can see the chunk only if it is STORED."""

    STORED = "stored"
    FULL = "it is full and evicts nothing"
    REJECTED = "it refuses the write"
    NOT_KNOWN = "it does not say whether it has them"
    TIMED_OUT = "not stored before its deadline"
    UNAVAILABLE = "it cannot be used"
    CANCELLED = "cancelled"


class CallOutcome(_Outcome):
    """How a call about keys ended."""

    DONE = "done"
    TIMED_OUT = "not answered before its deadline"
    UNAVAILABLE = "it cannot be used"
    CANCELLED = "cancelled"
    OVER_LIMIT = "there is more than the caller can take"


class ScanResult(NamedTuple):
    """prefix_length: how many of the leading keys exist.

    DONE: up to the first that does not. Otherwise up to the first of which it is not known.
    """

    outcome: CallOutcome
    prefix_length: int = 0


class ExistsResult(NamedTuple):
    """present: whether each key exists, in order; None: not known. Empty unless DONE.

    DONE: it is known of some. claimed: of a `refresh` with a claim, whether the caller has it.
    """

    outcome: CallOutcome
    present: Sequence[bool | None] = ()
    claimed: Sequence[bool | None] = ()


class RemoveResult(NamedTuple):
    """removed: how many keys of Redis or files were deleted, also if the outcome is not DONE.

    stripe_count: of the chunk, as far as the removal has seen it; 0: not known.
    """

    outcome: CallOutcome
    removed: int = 0
    stripe_count: int = 0


class FramesResult(NamedTuple):
    """frames: for each key in order, the frame of its chunk; None: there is none, or it is not
    known. Empty unless DONE: it is known of some.
    """

    outcome: CallOutcome
    frames: Sequence[ChunkFrame | None] = ()


class KeysResult(NamedTuple):
    """keys: those found, all of them if DONE."""

    outcome: CallOutcome
    keys: Sequence[bytes]


class NumbersResult(NamedTuple):
    """numbers: under each key in order, 0 where there is none; None: not known. Empty unless DONE.

    An amount was added if the number of its key is known, and was not if the key is ``refused``: a
    server does not take it now. Otherwise that is not known, whatever the outcome.
    """

    outcome: CallOutcome
    numbers: Sequence[int | None] = ()
    refused: Sequence[bool] = ()


@dataclass(slots=True, eq=False, repr=False)
class ChunkIO:
    """One chunk to read into slots, or to write from them.

    key: the chunk key, without a stripe index. frame: of its stripes, or of those of its first
    share. slots: one
    contiguous memoryview for each stripe, of exactly its payload's size, writable for a read; they
    belong to the tier from the call until `done`. deadline: of the owner's clock. tag: for
    the caller's use. is_asked_for: a load is a use of the chunk, so its TTL may start again.
    tenant: 8 bytes of a digest of who stores it, or empty. stored_bytes: how many bytes a tier has
    stored for the payload of a write, if it counts them; else 0. shares: those of its form.
    Compared and hashed by identity.
    """

    key: bytes
    frame: ChunkFrame
    slots: Sequence[memoryview]
    deadline: float
    tag: object = None
    is_asked_for: bool = True
    tenant: bytes = b""
    stored_bytes: int = 0
    shares: Shares | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the payload."""
        return self.frame.chunk_bytes * (1 if self.shares is None else self.shares.count)

    def check(self, writable: bool) -> None:
        """Raises ValueError unless there is one slot of the right size for every stripe."""
        frame = self.frame
        if len(self.slots) != frame.stripe_count:
            found, stripes = len(self.slots), frame.stripe_count
            raise ValueError(f"a chunk of {stripes} stripes needs as many slots, not {found}")
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


class Operation(_Outcome):
    """Kinds that fail by themselves: a PING may be answered, and every GET refused."""

    PROBE = "to connect, and to be told that it lives"
    ASK = "about keys"
    LOAD = "of chunks"
    STORE = "of chunks, or of parts of one"


@dataclass(frozen=True, slots=True)
class LastError:
    """What operations of one kind fail with now. text: with what to change.

    count: how many, since one worked. at_s: of the last one (`time.monotonic()`). is_silence: it
    was not answered in time.
    """

    operation: Operation
    text: str
    count: int
    at_s: float
    is_silence: bool = False


@dataclass(frozen=True, slots=True)
class PlaneState:
    """up: operations are tried. probed: the server has been probed since the start.

    reason: why operations fail: why it is down, or what the last ones were answered. Empty while
    they work. errors: one of each kind of operation whose last one failed, the newest first.
    """

    up: bool
    probed: bool
    reason: str
    errors: tuple[LastError, ...] = ()

    @property
    def read_error(self) -> LastError | None:
        """The newest that says why something was not found or not loaded."""
        return next((e for e in self.errors if e.operation is not Operation.STORE), None)


@dataclass(frozen=True, slots=True)
class PlaneStats:
    """Counts since the start. bytes_in, bytes_out: payload of the chunks loaded and stored.

    refused: error replies, by the reasons of `resp.net.advice`.
    """

    bytes_in: int
    bytes_out: int
    reads: Mapping[ReadOutcome, int]
    writes: Mapping[WriteOutcome, int]
    connects: int
    connections_lost: int
    errors: int
    refused: Mapping[str, int]


class TierPlace(NamedTuple):
    """Where a tier keeps chunks, as it is shown: a directory, or a URL without a password.

    used_bytes, limit_bytes: None: it does not know.
    """

    where: str
    used_bytes: int | None = None
    limit_bytes: int | None = None


class Tier(Protocol):
    """See the module. `RedisPlane` and `disk.tier.DiskTier` are tiers.

    `testing.tier_contract` has a test for each promise.
    """

    @property
    def name(self) -> str:
        """The name in log lines: "Redis", "disk"."""

    @property
    def state(self) -> PlaneState:
        """Up or down, and why. Cheap: called for every chunk that is enqueued."""

    @property
    def place(self) -> TierPlace:
        """Where the tier is, for people. No I/O."""

    def lookup(self, key: bytes) -> bool | None:
        """Whether the tier's index has the chunk. No I/O: called for every chunk of a lookup.

        False while the tier is down. None, for every key, if the tier has no index: then the cache
        calls `scan` and `exists`. Of a cache's tiers only the last may have none.
        """

    def scan(self, keys: Sequence[bytes], deadline: float, done: Done[ScanResult]) -> None:
        """How many leading chunks exist, up to the first that does not, or may not."""

    def exists(self, keys: Sequence[bytes], deadline: float, done: Done[ExistsResult]) -> None:
        """Which of the chunks exist."""

    def refresh(
        self,
        chunks: Sequence[tuple[bytes, int]],
        deadline: float,
        done: Done[ExistsResult],
        claim_s: float = 0.0,
    ) -> None:
        """Which chunks, by key and number of stripes, exist whole. Counts as a use of those.

        claim_s: also claim them for so long: of several writers one gets the claim. A tier with one
        writer has no claims.
        """

    def unclaim(self, keys: Sequence[bytes]) -> None:
        """Give back claims that have not run out: others may write the chunks."""

    def load_all(self, jobs: Sequence[ChunkIO], done: ReadDone, /) -> None:
        """Load chunks into their slots, in this order.

        A chunk is never LOADED if it differs from the job's frame (fingerprint, hash, sizes,
        metadata) or fails its checksum. Slots of a chunk that is not LOADED hold undefined bytes.
        """

    def store_all(self, jobs: Sequence[ChunkIO], done: WriteDone, /) -> None:
        """Store chunks from their slots. A chunk becomes visible whole or not at all."""

    def cancel(self, job: ChunkIO, /) -> None:
        """End a job early, with CANCELLED through `done` as soon as its slots are free.

        Does nothing to a job that has ended. A write may still become visible, but not later than
        a write or a removal of its key that is begun after the cancelled one has ended.
        """

    def close(self, deadline_s: float) -> bool:
        """End every job within `deadline_s` seconds: writes finish if possible, the others are
        CANCELLED. Idempotent. False: a thread of the tier has not ended.
        """

    def describe(self, keys: Sequence[bytes], deadline: float, done: Done[FramesResult]) -> None:
        """The frames of the chunks, which may be of any layout."""

    def keys(self, prefix: bytes, deadline: float, limit: int) -> KeysResult:
        """The chunk keys that begin so, about `limit` at most. Blocks: not for the owner."""

    def remove(
        self,
        key: bytes,
        deadline: float,
        done: Done[RemoveResult],
        stripe_count: int = 0,
        newest_unix_ms: int | None = None,
    ) -> None:
        """Remove a chunk, or whatever is stored under its key.

        stripe_count: of the chunk; 0: not known. newest_unix_ms: what says that it was stored later
        than this, by its writer's clock, stays; what says nothing goes.

        DONE: what was stored until the call, or until `newest_unix_ms`, is not found any more. A
        newer chunk may be, also one that was left: then nothing is removed.
        """

    def clear(
        self, key_prefixes: Sequence[bytes], deadline: float, done: Done[RemoveResult]
    ) -> None:
        """Remove all chunks whose keys begin with one of these, in the background, in one pass.

        Nothing is removed while the tier is down.
        """


# Reads that found something else than the chunk, which a tier may take for it.
DOUBTFUL = frozenset(
    {
        ReadOutcome.INCOMPLETE,
        ReadOutcome.TORN,
        ReadOutcome.CORRUPT,
        ReadOutcome.FOREIGN,
        ReadOutcome.NOT_OPENED,
    }
)


@dataclass(frozen=True, slots=True)
class TierCounters:
    """Names of counters, and of the histograms of loads: a chunk's time, and the tier's rate.

    misses, drops: by the outcome of a read or write; a read that was cancelled is no miss of the
    tier. silent: misses because it has not answered.
    """

    loaded_chunks: str
    loaded_bytes: str
    load_seconds: str
    load_rate: str
    stored_chunks: str
    stored_bytes: str
    plain_bytes: str
    misses: Mapping[ReadOutcome, str]
    drops: Mapping[WriteOutcome, str]
    queue_full: str
    silent: str

    @classmethod
    def of(cls, kind: TierKind) -> TierCounters:
        misses: dict[ReadOutcome, str] = {
            each: kind.misses.get(each.name, kind.miss)
            for each in ReadOutcome
            if each not in (ReadOutcome.LOADED, ReadOutcome.CANCELLED)
        }
        drops: dict[WriteOutcome, str] = {
            each: kind.drops.get(each.name, kind.drop)
            for each in WriteOutcome
            if each is not WriteOutcome.STORED
        }
        return cls(
            kind.counter("loaded_chunks"),
            kind.counter("loaded_bytes"),
            kind.load_seconds,
            kind.load_rate,
            kind.counter("stored_chunks"),
            kind.counter("stored_bytes"),
            kind.counter("plain_bytes"),
            misses,
            drops,
            kind.queue_full or kind.drop,
            kind.silent or kind.miss,
        )


class Account(Protocol):
    """What tenants have in a tier. Called on the owner's thread. An empty name: no tenant."""

    def digest(self, tenant: str) -> bytes:
        """8 bytes that name the tenant in the values that it stores; empty: there is none."""

    def admits(self, tenant: str) -> bool:
        """Whether chunks of the tenant are written. Cheap: called for every chunk."""

    def dropped(self, tenant: str) -> None:
        """A chunk of a tenant that is not admitted is not written. Told once for each chunk."""

    def stored(self, tenant: str, nbytes: int) -> None:
        """A chunk that the tier did not have was written; nbytes: its payload, as it lies there."""


@dataclass(frozen=True, slots=True)
class Backing:
    """A tier of a cache.

    write_limit_bytes: of its queue. ask_timeout_s: of one `refresh`. refresh_every_s: how often at
    most the tier is told to keep a chunk that lookups find in the host pool.
    """

    tier: Tier
    kind: TierKind
    write_limit_bytes: int
    ask_timeout_s: float = 1.0
    refresh_every_s: float = 60.0
    account: Account | None = None
    counters: TierCounters = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counters", TierCounters.of(self.kind))
