"""The disk tier of an agent: chunks of the host pool in files of this node, beside Redis.

    store    what becomes READY, by a gather or from Redis, is written behind by one thread;
             the queue is bounded in bytes, what does not fit is counted and left out
    load     a chunk that is not in the host pool is looked for here before Redis is asked;
             a file that turns out damaged costs one more read, from Redis
    down     a read or write that takes too long, as of a network file system that is gone, takes
             the tier down until it returns (`disk_calls`): nothing is on disk then and nothing
             is written, and loads that wait or are under way are Redis' to bring

The slots of a load that does not return stay the disk's: its entry leaves the pool, pinned, and
what comes from Redis goes into another.

A key names the layout: two engines whose bytes differ never meet in one file. `LMCLocalDiskBackend`
has the directory, its byte limit, and everything that may go wrong with files.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from lmcache_redis.agent.copies import CopyOutcome, ThreadLane
from lmcache_redis.agent.disk_calls import DiskCall, DiskCalls
from lmcache_redis.agent.registration import ChunkForm
from lmcache_redis.hostpool import Entry
from lmcache_redis.keys import ObjectKey
from lmcache_redis.messages import HASH_BYTES_OF_AN_EPOCH
from lmcache_redis.protocol import RemoteMetadata
from lmcache_redis.storage.disk import LMCLocalDiskBackend

if TYPE_CHECKING:
    from lmcache_redis.agent.core import Core

_LOAD_THREADS = 2
_STORE_NICE = 10
# Of a load: half of what a lookup has, so that Redis has the other half, and this at most.
_LOAD_PATIENCE_S = 5.0
_STORE_PATIENCE_S = 5.0
# How long a call may have been under way when the agent stops waiting for it at its end.
_CLOSE_S = 2.0
_JOIN_S = 0.25


class _Doomed(NamedTuple):
    """Chunks that a clear removes. ``epoch`` as in `messages.Clear`."""

    model_name: str
    epoch: bytes | None

    def includes(self, key: ObjectKey) -> bool:
        if key.model_name != self.model_name or self.epoch is None:
            return key.model_name == self.model_name
        lengths = [len(self.epoch) + nbytes for nbytes in HASH_BYTES_OF_AN_EPOCH]
        return len(key.chunk_hash) in lengths and key.chunk_hash.startswith(self.epoch)


class Disk:
    """Owned by the loop thread. Raises ConfigError for a directory that cannot be used."""

    def __init__(self, core: Core, directory: str, limit_bytes: int) -> None:
        self._core = core
        self._backend = LMCLocalDiskBackend(directory, limit_bytes)
        self._loads = ThreadLane("disk-load", _LOAD_THREADS, nice=0)
        self._stores = ThreadLane("disk-store", 1, nice=_STORE_NICE)
        self._load_patience_s = min(_LOAD_PATIENCE_S, core.config.lookup_deadline_s / 2)
        self._calls = DiskCalls(core, self._load_patience_s, self._clear_again)
        self._kept: set[Entry] = set()
        self._storing: set[Entry] = set()
        self._uncleared: set[_Doomed] = set()  # while the disk is down
        self._closed = False
        self.queued_bytes = 0
        self.directory = directory

    @property
    def limit_bytes(self) -> int:
        return self._backend.limit_bytes

    @property
    def used_bytes(self) -> int:
        return self._backend.used_bytes

    @property
    def is_up(self) -> bool:
        """False while a read or write does not return."""
        return not self._calls.is_down

    @property
    def reason(self) -> str:
        """Why it is down; empty where it is up."""
        return self._calls.reason

    @property
    def backlog(self) -> int:
        """Chunks that wait to be written, or are; none where the disk does not answer."""
        return 0 if self._calls.is_overdue else len(self._storing)

    def has(self, form: ChunkForm, chunk_hash: bytes) -> bool:
        """Whether there is a file of the chunk to be had now. Does not touch the disk."""
        return self.is_up and self._backend.contains(_key(form, chunk_hash))

    def keeps(self, entry: Entry) -> bool:
        """Whether the entry's slots are still being read into by a load that was given up."""
        return entry in self._kept

    def load(
        self, form: ChunkForm, chunk_hash: bytes, entry: Entry, done: Callable[[CopyOutcome], None]
    ) -> None:
        """Fill the entry's slots; `done` is told on the loop thread how that ended.

        FAILED: the slots are the caller's again. CANCELLED: they are not, where the disk `keeps`
        the entry; end its fill, which discards it.
        """
        slots = self._core.slots_of(form, entry)
        key, wanted = _key(form, chunk_hash), form.metadata

        def read() -> CopyOutcome:
            def allocate(found: RemoteMetadata) -> Sequence[memoryview] | None:
                return slots if found.serialize() == wanted else None

            found = self._backend.get_bytes(key, allocate)
            return CopyOutcome.FAILED if found is None else CopyOutcome.DONE

        def kept() -> None:
            self._core.pool.pin(entry)
            self._kept.add(entry)
            done(CopyOutcome.CANCELLED)

        def ended(outcome: CopyOutcome) -> None:
            if entry in self._kept:
                self._kept.remove(entry)
                self._core.pool.unpin(entry)
            elif outcome is CopyOutcome.CANCELLED and not self._closed:
                done(CopyOutcome.FAILED)
            else:
                done(outcome)

        self._calls.put(self._loads, DiskCall("a read", self._load_patience_s, read, ended, kept))

    def offer(self, form: ChunkForm, chunk_hash: bytes, entry: Entry) -> None:
        """Queue a READY entry, unless it is queued, on disk already, or the queue is full."""
        if entry in self._storing or self.has(form, chunk_hash):
            return
        limit_bytes = self._core.config.write_queue_limit_bytes
        if not self.is_up or self.queued_bytes + form.chunk_bytes > limit_bytes:
            self._core.metrics.count("drop_disk")
            return
        self._core.pool.pin(entry)
        self._storing.add(entry)
        self.queued_bytes += form.chunk_bytes
        key, slots = _key(form, chunk_hash), self._core.slots_of(form, entry)

        def write() -> CopyOutcome:
            stored = self._backend.put_bytes(key, RemoteMetadata.deserialize(form.metadata), slots)
            return CopyOutcome.DONE if stored else CopyOutcome.FAILED

        ended = partial(self._written, form, entry)
        # Its entry is READY, whatever becomes of the file: nobody waits for it.
        call = DiskCall("a write", _STORE_PATIENCE_S, write, ended, kept=lambda: None)
        self._calls.put(self._stores, call)

    def clear(self, forms: Sequence[ChunkForm], epoch: bytes | None) -> None:
        """Remove the chunks of an epoch, or all, of these layouts.

        Where the disk is down, or goes down meanwhile, they are removed when it is back, before
        anybody finds them.
        """
        doomed = {_Doomed(_model(form), epoch) for form in forms}
        if self.is_up:
            self._clear(doomed)
        else:
            self._uncleared |= doomed

    def close(self) -> None:
        """Finish the file that is being written, if that is soon; leave the others. Idempotent."""
        if self._closed:
            return
        self._closed = True
        deadline_s = time.monotonic() + max(0.0, _CLOSE_S - self._calls.under_way_s())
        for lane in (self._loads, self._stores):
            lane.stop()
        self._backend.close(max(0.0, deadline_s - time.monotonic()))
        for lane in (self._loads, self._stores):
            lane.join(_JOIN_S)

    def _clear(self, doomed: set[_Doomed]) -> None:
        def remove() -> CopyOutcome:
            for key in self._backend.list():
                if any(each.includes(key) for each in doomed):
                    self._backend.remove(key)
            return CopyOutcome.DONE

        def later() -> None:
            self._uncleared |= doomed

        def ended(outcome: CopyOutcome) -> None:
            if outcome is CopyOutcome.CANCELLED:
                later()

        # Of many files, and nobody waits for it who waits for a lookup: as long as it takes.
        self._calls.put(self._loads, DiskCall("a clear", math.inf, remove, ended, kept=later))

    def _clear_again(self) -> None:
        """The disk is about to be back."""
        doomed, self._uncleared = self._uncleared, set()
        if doomed:
            self._clear(doomed)

    def _written(self, form: ChunkForm, entry: Entry, outcome: CopyOutcome) -> None:
        self._storing.discard(entry)
        self.queued_bytes -= form.chunk_bytes
        if outcome is CopyOutcome.DONE:
            self._core.metrics.count("disk_stored_chunks")
            self._core.metrics.count("disk_stored_bytes", form.chunk_bytes)
        else:
            self._core.metrics.count("drop_disk")
        self._core.pool.unpin(entry)


def _model(form: ChunkForm) -> str:
    return f"{form.fingerprint.hex()}/{form.model_name}"


def _key(form: ChunkForm, chunk_hash: bytes) -> ObjectKey:
    return ObjectKey(chunk_hash, _model(form), form.kv_rank)
