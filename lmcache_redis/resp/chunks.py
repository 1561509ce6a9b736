"""Chunks on their way: from what a caller hands in to tasks in the queues of nodes.

Chunks of one stripe that come together are one job (`bundles`) where one server has them all and
the compiled part can move them; every other chunk is a job of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from lmcache_redis import native
from lmcache_redis.keys import stripe_key
from lmcache_redis.resp.admission import Admission
from lmcache_redis.resp.bundles import Bundle, can_be_bundled
from lmcache_redis.resp.jobs import JobRegistry, Stop
from lmcache_redis.resp.node import Node
from lmcache_redis.resp.nodes import Nodes
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.resp.outcomes import ChunkIO, ReadOutcome, WriteOutcome
from lmcache_redis.resp.queues import TaskQueue, Timekeeper
from lmcache_redis.resp.readjob import AnyRead, ReadBundle, ReadDone, ReadJob
from lmcache_redis.resp.stats import Counts
from lmcache_redis.resp.writejob import AnyWrite, WriteBundle, WriteDone, WriteJob
from lmcache_redis.stripe import STORE_ID_BYTES

# Prepared together: a thread takes these up while the next are being prepared.
_BATCH_STRIPES = 32

ChunkJob = ReadJob | ReadBundle | WriteJob | WriteBundle


class Chunks:
    """What `RedisPlane` says of these methods. Of its parts. remove: see `writer`.

    tls: connections are such, which the compiled part leaves to Python.
    """

    def __init__(
        self,
        options: RedisOptions,
        nodes: Nodes,
        registry: JobRegistry,
        admission: Admission,
        timekeeper: Timekeeper,
        counts: Counts,
        remove: Callable[[bytes, int], None],
        *,
        tls: bool,
    ) -> None:
        self._tls = tls
        self._refresh_ttl_s = options.ttl_s if options.ttl_refresh else 0
        self._nodes = nodes
        self._registry = registry
        self._admission = admission
        self._timekeeper = timekeeper
        self._counts = counts
        self._remove = remove
        self._jobs: dict[ChunkIO, ChunkJob] = {}
        # Seeded by the operating system: no two planes give a store the same id.
        self._random = random.Random()

    @property
    def reads(self) -> int:
        """Chunks that are being read."""
        return self._count(ReadJob, ReadBundle)

    @property
    def writes(self) -> int:
        """Chunks that are being written."""
        return self._count(WriteJob, WriteBundle)

    def read_all(self, chunks: Sequence[ChunkIO], done: ReadDone) -> None:
        self._check(chunks, writable=True)
        for some in _batches(chunks):
            self._read_some(some, done)

    def write_all(self, chunks: Sequence[ChunkIO], done: WriteDone) -> None:
        self._check(chunks, writable=False)
        for some in _batches(chunks):
            self._write_some(some, done)

    def write_filling(self, chunk: ChunkIO, done: WriteDone) -> None:
        self._check((chunk,), writable=False)
        self._write_some((chunk,), done, filled=False)

    def filled(self, chunk: ChunkIO, slots: int) -> None:
        job = self._jobs.get(chunk)
        if isinstance(job, WriteJob):
            for queue, tasks in job.fill(slots).items():
                queue.put(tasks)

    def cancel(self, chunk: ChunkIO) -> None:
        job = self._jobs.get(chunk)
        if isinstance(job, Bundle):
            self._timekeeper.post(partial(job.cancel, chunk))
        elif job is not None:
            self._timekeeper.post(partial(job.stop, Stop.CANCELLED))

    # ---------------------------------------------------------------- inside

    def _read_some(self, chunks: Sequence[ChunkIO], done: ReadDone) -> None:
        routes, registry, settled = self._nodes.routes, self._registry, self._read_settled
        refresh_ttl_s = self._refresh_ttl_s
        jobs: dict[ReadJob | ReadBundle, dict[Node | None, list[AnyRead]]] = {}
        if self._is_bundle(chunks):
            all_settled = self._reads_settled
            bundle = ReadBundle(chunks, done, settled, all_settled, registry, refresh_ttl_s)
            jobs[bundle] = {routes.node_of(bundle.key): bundle.tasks()}
            self._jobs.update(dict.fromkeys(chunks, bundle))
        else:
            for chunk in chunks:
                job = ReadJob(chunk, done, settled, registry, refresh_ttl_s)
                jobs[job] = routes.split(job.tasks(), partial(_key_of, chunk.key))
                self._jobs[chunk] = job
        for each, tasks_of in jobs.items():
            each.nodes = tuple(tasks_of)
        accepted = self._admission.enter(jobs)
        by_node: dict[Node | None, list[AnyRead]] = {}
        for each in accepted:
            for node, tasks in jobs[each].items():
                by_node.setdefault(node, []).extend(tasks)
        for node, tasks in by_node.items():
            if node is not None:
                node.reads.put(tasks)
        # A server may have gone, or the plane been closed, while they were queued.
        self._admission.refuse(accepted)

    def _write_some(self, chunks: Sequence[ChunkIO], done: WriteDone, filled: bool = True) -> None:
        routes, registry, settled = self._nodes.routes, self._registry, self._write_settled
        jobs: dict[WriteJob | WriteBundle, Sequence[Node | None]] = {}
        if self._is_bundle(chunks):
            all_settled, store_id = self._writes_settled, self._new_store_id()
            bundle = WriteBundle(chunks, done, settled, all_settled, registry, store_id)
            jobs[bundle] = [routes.node_of(bundle.key)]
            self._jobs.update(dict.fromkeys(chunks, bundle))
        else:
            for chunk in chunks:
                job = WriteJob(chunk, done, settled, registry, self._new_store_id())
                stripes = range(job.stripe_count)
                jobs[job] = routes.nodes_of(stripes, partial(stripe_key, chunk.key))
                self._jobs[chunk] = job
        for each, nodes in jobs.items():
            each.nodes = tuple(dict.fromkeys(nodes))
        accepted = self._admission.enter(jobs)
        by_queue: dict[TaskQueue[AnyWrite], list[AnyWrite]] = {}
        for each in accepted:
            queues = [node.writes(each.key) for node in jobs[each] if node is not None]
            if isinstance(each, WriteBundle):
                by_queue.setdefault(queues[0], []).extend(each.tasks())
                continue
            each.begin_at(queues)
            for queue, tasks in each.fill(each.stripe_count if filled else 0).items():
                by_queue.setdefault(queue, []).extend(tasks)
        for queue, tasks in by_queue.items():
            queue.put(tasks)
        # A server may have gone, or the plane been closed, while they were queued.
        self._admission.refuse(accepted)

    def _check(self, chunks: Sequence[ChunkIO], writable: bool) -> None:
        """All of them, before any is begun."""
        for chunk in chunks:
            chunk.check(writable)
        self._admission.check_usable()
        if len(set(chunks)) < len(chunks) or not self._jobs.keys().isdisjoint(chunks):
            raise RuntimeError("the chunk is being read or written already")

    def _is_bundle(self, chunks: Sequence[ChunkIO]) -> bool:
        compiled = native.moves is not None and not self._tls
        return compiled and not self._nodes.routes.is_cluster and can_be_bundled(chunks)

    def _new_store_id(self) -> bytes:
        return self._random.getrandbits(8 * STORE_ID_BYTES).to_bytes(STORE_ID_BYTES, "little")

    def _count(self, *kinds: type[ChunkJob]) -> int:
        return sum(isinstance(job, kinds) for job in list(self._jobs.values()))

    def _read_settled(self, chunk: ChunkIO, outcome: ReadOutcome, remove_stripes: int) -> None:
        self._reads_settled((chunk,), outcome)
        if remove_stripes:
            self._remove(chunk.key, remove_stripes)

    def _reads_settled(self, chunks: Sequence[ChunkIO], outcome: ReadOutcome) -> None:
        self._counts.read(outcome, len(chunks), self._forget(chunks))

    def _write_settled(self, chunk: ChunkIO, outcome: WriteOutcome, remains: bool) -> None:
        self._writes_settled((chunk,), outcome)
        if remains:
            self._remove(chunk.key, chunk.frame.stripe_count)

    def _writes_settled(self, chunks: Sequence[ChunkIO], outcome: WriteOutcome) -> None:
        self._counts.written(outcome, len(chunks), self._forget(chunks))

    def _forget(self, chunks: Sequence[ChunkIO]) -> int:
        """They may be handed in again; how many bytes they have."""
        for chunk in chunks:
            self._jobs.pop(chunk, None)
        return sum([chunk.frame.chunk_bytes for chunk in chunks])


def _key_of(chunk_key: bytes, task: AnyRead) -> bytes:
    return stripe_key(chunk_key, task[1])


def _batches(chunks: Sequence[ChunkIO]) -> Iterator[Sequence[ChunkIO]]:
    """Of many chunks the first are on their way while the others are being prepared."""
    batch: list[ChunkIO] = []
    stripes = 0
    for chunk in chunks:
        batch.append(chunk)
        stripes += chunk.frame.stripe_count
        if stripes >= _BATCH_STRIPES:
            yield batch
            batch, stripes = [], 0
    if batch:
        yield batch
