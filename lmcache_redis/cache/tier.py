"""The contract between the cache and a tier behind the host pool (a disk, Redis).

A job is the transfer of one chunk, a `ChunkIO`: the chunk key, the frame (size, stripe size,
metadata), one slot of memory per stripe, and a deadline. The cache pins the slots of a job until
the tier is done with them:

    read_all, write_all ──▶ in flight ──▶ done       the slots belong to the cache again
                               └──▶ stuck ──▶ done   the cache stops waiting; the slots belong to
                                                     the tier until `done`

A callback may come on any thread, even before the call that caused it returns, and must only
enqueue: the cache posts it to its owner. `done` is called exactly once for each job, `stuck` at
most once and before `done`. A tier never waits for I/O on the owner's thread, never raises because
a disk or a server fails, and calls nothing else of the cache.

A tier that is down (`state.up` is False) answers every job UNAVAILABLE at once. `stuck` is for jobs
that it cannot abandon, such as a read from a network file system that is gone. The tier is down
before it calls `stuck`, and until those jobs have ended: the cache then asks the next tier whose
`lookup` is not False.

Keys are chunk keys (`naming`): everything in a Redis key before the stripe index. The tier decides
how it stores a chunk, in stripes or in a file. Deadlines are `time.monotonic()` seconds. A tier
that cannot abandon a job may overrun them, and calls `stuck` when the cache should not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache_redis.resp.outcomes import (
    ChunkIO,
    Done,
    ExistsResult,
    FramesResult,
    PlaneState,
    ReadDone,
    ReadOutcome,
    RemoveResult,
    ScanResult,
    WriteDone,
    WriteOutcome,
)

Stuck = Callable[[ChunkIO], None]


class Tier(Protocol):
    """See the module. `RedisPlane` and `disk.tier.DiskTier` are tiers."""

    @property
    def name(self) -> str:
        """The name in log lines: "Redis", "disk"."""

    @property
    def state(self) -> PlaneState:
        """Up or down, and why. Cheap: called for every chunk that is enqueued."""

    def lookup(self, key: bytes) -> bool | None:
        """Whether the tier's index has the chunk. No I/O: called for every chunk of a lookup.

        False while the tier is down. None, for every key, if the tier has no index: then the cache
        calls `scan` and `exists`.
        """

    def scan(self, keys: Sequence[bytes], deadline: float, done: Done[ScanResult]) -> None:
        """How many leading chunks exist, up to the first that does not."""

    def exists(self, keys: Sequence[bytes], deadline: float, done: Done[ExistsResult]) -> None:
        """Which of the chunks exist."""

    def describe(self, keys: Sequence[bytes], deadline: float, done: Done[FramesResult]) -> None:
        """The frames of the chunks.

        The chunk under a key may be of any layout; the caller checks the frame.
        """

    def keys(self, prefix: bytes, deadline: float) -> list[bytes]:
        """The chunk keys that begin with `prefix`, in any order.

        The only call that blocks: not for the owner's thread. If the tier does not answer in time,
        returns the keys found so far and logs a warning.
        """

    def read_all(self, jobs: Sequence[ChunkIO], done: ReadDone, stuck: Stuck, /) -> None:
        """Load chunks into their slots, in this order.

        A chunk is never LOADED if it differs from the job's frame (fingerprint, hash, sizes,
        metadata) or fails its checksum. Slots of a chunk that is not LOADED hold undefined bytes.
        """

    def write_all(self, jobs: Sequence[ChunkIO], done: WriteDone, stuck: Stuck, /) -> None:
        """Store chunks from their slots, which do not change until `done`.

        A chunk becomes visible whole or not at all.
        """

    def cancel(self, job: ChunkIO, /) -> None:
        """End a job early, with CANCELLED through `done` as soon as its slots are free.

        Does nothing to a job that has ended or can no longer be abandoned.
        """

    def remove(self, key: bytes, deadline: float, done: Done[RemoveResult]) -> None:
        """Remove a chunk, or whatever is stored under its key."""

    def clear(self, key_prefix: bytes, deadline: float, done: Done[RemoveResult]) -> None:
        """Remove every chunk whose key begins with `key_prefix`, in the background.

        A tier that is down answers UNAVAILABLE. If its chunks survive the outage (a disk), it
        removes them before they can be found again.
        """

    def close(self, deadline_s: float) -> bool:
        """End every job within `deadline_s` seconds: writes finish if possible, the others are
        CANCELLED. Idempotent. False: a thread has not ended and still uses the slots of its job.
        """


@dataclass(frozen=True, slots=True)
class TierCounters:
    """Names of counters, and of the histograms of loads: a chunk's time, and the tier's rate.

    misses, drops: by the outcome of a read or write. queue_full: for a chunk that does not fit the
    write-behind queue. is_remote: chunks that the tier already had and cleared keys are counted
    too; drops and failed clears are logged.
    """

    loaded_chunks: str
    loaded_bytes: str
    load_seconds: str
    load_rate: str
    stored_chunks: str
    stored_bytes: str
    misses: Mapping[ReadOutcome, str]
    drops: Mapping[WriteOutcome, str]
    queue_full: str
    is_remote: bool


REDIS_COUNTERS = TierCounters(
    loaded_chunks="loaded_chunks",
    loaded_bytes="loaded_bytes",
    load_seconds="redis_load_seconds",
    load_rate="redis_load_rate",
    stored_chunks="stored_chunks",
    stored_bytes="stored_bytes",
    misses={
        ReadOutcome.MISSING: "miss_absent",
        ReadOutcome.INCOMPLETE: "miss_incomplete",
        ReadOutcome.TORN: "miss_mixed_stores",
        ReadOutcome.FOREIGN: "miss_foreign",
        ReadOutcome.CORRUPT: "miss_corrupt",
        ReadOutcome.NOT_OPENED: "miss_sealed",
        ReadOutcome.TIMED_OUT: "miss_deadline",
        ReadOutcome.UNAVAILABLE: "miss_redis_error",
        ReadOutcome.CANCELLED: "miss_deadline",
    },
    drops={
        WriteOutcome.FULL: "drop_redis_full",
        WriteOutcome.TIMED_OUT: "drop_redis_error",
        WriteOutcome.UNAVAILABLE: "drop_redis_error",
        WriteOutcome.REJECTED: "drop_redis_error",
        WriteOutcome.NO_ROOM_FOR_SEAL: "drop_redis_error",
        WriteOutcome.CANCELLED: "drop_shutdown",
    },
    queue_full="drop_queue_full",
    is_remote=True,
)

DISK_COUNTERS = TierCounters(
    loaded_chunks="disk_loaded_chunks",
    loaded_bytes="disk_loaded_bytes",
    load_seconds="disk_load_seconds",
    load_rate="disk_load_rate",
    stored_chunks="disk_stored_chunks",
    stored_bytes="disk_stored_bytes",
    misses={each: "miss_disk" for each in ReadOutcome if each is not ReadOutcome.CANCELLED},
    drops=dict.fromkeys(WriteOutcome, "drop_disk"),
    queue_full="drop_disk",
    is_remote=False,
)


@dataclass(frozen=True, slots=True)
class Backing:
    """A tier of a cache. write_limit_bytes: of its queue. exists_timeout_s: of one `exists`."""

    tier: Tier
    counters: TierCounters
    write_limit_bytes: int
    exists_timeout_s: float = 1.0
