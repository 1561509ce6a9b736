"""What stands behind the host pool: the contract between the cache and a tier (a disk, Redis).

A job is one chunk's transfer, a `ChunkIO`: the chunk key, the frame (size, cut, metadata), one slot
of memory for each stripe, a deadline. The cache pins what a job uses, and the tier gives it back:

    read_all, write_all ──▶ in flight ──▶ done       the slots are the cache's again
                               └──▶ stuck ──▶ done   the cache waits no longer; the slots are the
                                                     tier's until `done`, however long that takes

Every callback may come from any thread, also before the call that caused it returns, and must only
enqueue: the cache posts it to its owner. `done` is called exactly once for each job, `stuck` at
most once and before `done`. A tier never waits for I/O on the owner's thread, never raises for what
a disk or a server does, and never calls anything else of the cache.

A tier that is down (`state.up` is False) answers every job UNAVAILABLE at once; `stuck` is for jobs
that it cannot take back, such as a read of a network file system that is gone. It is down before it
says so, and until those jobs have ended: the cache asks the next tier whose `lookup` is not False.

Keys are chunk keys (`naming`): everything in a Redis key before the stripe index. The tier knows
how it stores a chunk, in stripes or in a file. Deadlines are `time.monotonic()` seconds; a tier on
which a job cannot be abandoned may overrun them, and says `stuck` when the cache should not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from lmcache_redis.resp.outcomes import (
    CallOutcome,
    ChunkIO,
    ClearResult,
    ExistsResult,
    PlaneState,
    ReadOutcome,
    RemoveResult,
    ScanResult,
    WriteOutcome,
)
from lmcache_redis.stripe import ChunkFrame


class FramesResult(NamedTuple):
    """frames: for each key in order the chunk that is there, None for none; empty unless DONE."""

    outcome: CallOutcome
    frames: Sequence[ChunkFrame | None] = ()


class Tier(Protocol):
    """See the module."""

    @property
    def name(self) -> str:
        """As log lines have it: "Redis", "disk"."""

    @property
    def state(self) -> PlaneState:
        """Up or down, and why. Cheap: asked for every chunk that is enqueued."""

    def lookup(self, key: bytes) -> bool | None:
        """Whether the chunk is there, from memory: no I/O, for every chunk of a lookup.

        None, for every key: the tier keeps no index, and is asked with `scan` and `exists`. False
        while it is down.
        """

    def scan(
        self, keys: Sequence[bytes], deadline: float, done: Callable[[ScanResult], None]
    ) -> None:
        """How many of the chunks are there, from the first on without a gap."""

    def exists(
        self, keys: Sequence[bytes], deadline: float, done: Callable[[ExistsResult], None]
    ) -> None:
        """Which of the chunks are there."""

    def describe(
        self, keys: Sequence[bytes], deadline: float, done: Callable[[FramesResult], None]
    ) -> None:
        """What each chunk is that is there, and how it is cut.

        Chunks of any layout: whether it is the one that was meant, the frame says.
        """

    def keys(self, prefix: bytes, deadline: float) -> list[bytes]:
        """The chunk keys that begin with `prefix`, in no order.

        The one call that waits: it is for threads other than the owner's. Where the tier does not
        answer in time, the keys found so far and a line in the log.
        """

    def read_all(
        self,
        jobs: Sequence[ChunkIO],
        done: Callable[[ChunkIO, ReadOutcome], None],
        stuck: Callable[[ChunkIO], None],
    ) -> None:
        """Load chunks into their slots, in this order.

        A chunk that is not exactly what the job's frame says (fingerprint, hash, sizes, metadata)
        or whose bytes fail their checksum is never LOADED; the slots may hold anything then.
        """

    def write_all(
        self,
        jobs: Sequence[ChunkIO],
        done: Callable[[ChunkIO, WriteOutcome], None],
        stuck: Callable[[ChunkIO], None],
    ) -> None:
        """Store chunks from their slots, which do not change until `done`. Visible whole or not."""

    def cancel(self, job: ChunkIO) -> None:
        """End a job early: CANCELLED, through `done`, as soon as its slots are free.

        Does nothing to a job that was answered, or that the tier can no longer take back.
        """

    def remove(
        self,
        key: bytes,
        stripe_count: int | None,
        deadline: float,
        done: Callable[[RemoveResult], None],
    ) -> None:
        """Remove a chunk, and what is in its place without being one.

        stripe_count: None: the tier finds out how many stripes there are.
        """

    def clear(
        self, key_prefix: bytes, deadline: float, done: Callable[[ClearResult], None]
    ) -> None:
        """Remove every chunk whose key begins with `key_prefix`, in the background.

        A tier that is down answers UNAVAILABLE; one whose chunks come back with it (a disk)
        removes them before they are found again.
        """

    def close(self, deadline_s: float) -> bool:
        """End every job within `deadline_s` seconds: writes finish if they can, the rest is
        CANCELLED. Idempotent. False: a thread did not end, and still has the slots of its job.
        """
