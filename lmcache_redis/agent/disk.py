"""The disk tier of an agent: chunks of the host pool in files of this node, beside Redis.

    store    what becomes READY, by a gather or from Redis, is written behind by one thread;
             the queue is bounded in bytes, what does not fit is counted and left out
    load     a chunk that is not in the host pool is looked for here before Redis is asked;
             a file that turns out damaged costs one more read, from Redis

A key names the layout: two engines whose bytes differ never meet in one file. `LMCLocalDiskBackend`
has the directory, its byte limit, and everything that may go wrong with files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from lmcache_redis.agent.copies import CopyOutcome, ThreadLane
from lmcache_redis.agent.registration import ChunkForm
from lmcache_redis.hostpool import Entry
from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import RemoteMetadata
from lmcache_redis.storage.disk import LMCLocalDiskBackend

if TYPE_CHECKING:
    from lmcache_redis.agent.core import Core

logger = logging.getLogger(__name__)

_LOAD_THREADS = 2
_STORE_NICE = 10
_CLOSE_S = 5.0


class Disk:
    """Owned by the loop thread. Raises ConfigError for a directory that cannot be used."""

    def __init__(self, core: Core, directory: str, limit_bytes: int) -> None:
        self._core = core
        self._backend = LMCLocalDiskBackend(directory, limit_bytes)
        self._loads = ThreadLane("disk-load", _LOAD_THREADS, nice=0)
        self._stores = ThreadLane("disk-store", 1, nice=_STORE_NICE)
        self._storing: set[Entry] = set()
        self.queued_bytes = 0
        self.directory = directory

    @property
    def limit_bytes(self) -> int:
        return self._backend.limit_bytes

    @property
    def used_bytes(self) -> int:
        return self._backend.used_bytes

    @property
    def backlog(self) -> int:
        """Chunks that wait to be written, or are."""
        return len(self._storing)

    def has(self, form: ChunkForm, chunk_hash: bytes) -> bool:
        """Whether there is a file of the chunk. Does not touch the disk."""
        return self._backend.contains(_key(form, chunk_hash))

    def load(
        self, form: ChunkForm, chunk_hash: bytes, entry: Entry, done: Callable[[CopyOutcome], None]
    ) -> None:
        """Fill the entry's slots; `done` is told on the loop thread how that ended."""
        slots = self._core.slots_of(form, entry)
        key, wanted = _key(form, chunk_hash), form.metadata

        def read() -> CopyOutcome:
            def allocate(found: RemoteMetadata) -> Sequence[memoryview] | None:
                return slots if found.serialize() == wanted else None

            found = self._backend.get_bytes(key, allocate)
            return CopyOutcome.FAILED if found is None else CopyOutcome.DONE

        self._loads.put(read, lambda outcome: self._core.post(partial(done, outcome)))

    def offer(self, form: ChunkForm, chunk_hash: bytes, entry: Entry) -> None:
        """Queue a READY entry, unless it is queued, on disk already, or the queue is full."""
        if entry in self._storing or self.has(form, chunk_hash):
            return
        if self.queued_bytes + form.chunk_bytes > self._core.config.write_queue_limit_bytes:
            self._core.metrics.count("drop_disk")
            return
        self._core.pool.pin(entry)
        self._storing.add(entry)
        self.queued_bytes += form.chunk_bytes
        key, slots = _key(form, chunk_hash), self._core.slots_of(form, entry)

        def write() -> CopyOutcome:
            stored = self._backend.put_bytes(key, RemoteMetadata.deserialize(form.metadata), slots)
            return CopyOutcome.DONE if stored else CopyOutcome.FAILED

        self._stores.put(
            write, lambda outcome: self._core.post(partial(self._written, form, entry, outcome))
        )

    def clear(self, forms: Sequence[ChunkForm], done: Callable[[int], None]) -> None:
        """Remove the chunks of these layouts; `done` is told how many there were."""
        names = {_model(form) for form in forms}
        removed = 0

        def remove() -> CopyOutcome:
            nonlocal removed
            doomed = [key for key in self._backend.list() if key.model_name in names]
            removed = sum(self._backend.remove(key) for key in doomed)
            return CopyOutcome.DONE

        self._loads.put(remove, lambda _: self._core.post(lambda: done(removed)))

    def close(self) -> None:
        """Finish the file that is being written; leave the others."""
        for lane in (self._loads, self._stores):
            lane.stop()
        for lane in (self._loads, self._stores):
            lane.join(_CLOSE_S)
        self._backend.close()

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
