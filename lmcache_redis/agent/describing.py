"""Descriptions of layouts in Redis: what decides the bytes of chunks that other agents have stored.

A key names a layout by its fingerprint alone. Each agent writes what the fingerprints of its
engines are made of, one small value for each, named and framed as a chunk is:

    namespace of `DESCRIPTIONS` | ObjectKey(fingerprint, model, kv_rank)     KVLayout.canonical

So it is sealed, evicted, expired and purged as chunks are. It is written every minute, while a
worker with the layout is registered: Redis may have been down or emptied, and may evict or expire
what nobody reads. The fingerprint is its digest, so a wrong description is not believed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from lmcache_redis.agent.agent import Agent
from lmcache_redis.agent.peers import Registration
from lmcache_redis.chunks.frame import ChunkFrame, stripe_payload_bytes
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.names import DESCRIPTIONS, ChunkNames, PartNames, opaque_pages
from lmcache_redis.device.layout import fingerprint_of
from lmcache_redis.tiers import ChunkIO, FramesResult, KeysResult, ReadOutcome, WriteOutcome

logger = logging.getLogger(__name__)

MOST_LAYOUTS = 1024
_MOST_BYTES = 1 << 20
_EVERY_S = 60.0
_DEADLINE_S = 5.0


class LayoutDescriptions:
    """See the module. Owned by the loop thread; callbacks run on it."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._names = ChunkNames(DESCRIPTIONS, agent.config.key_prefix)
        agent.loop.after(_EVERY_S, self._write_again)

    def write(self, registrations: Sequence[Registration]) -> None:
        """Writes those of the layouts of these workers, in the background. May fail."""
        described: dict[ObjectKey, bytes] = {}
        for each in registrations:
            for group, layout in zip(each.groups, each.device.layouts, strict=True):
                form = group.form
                key = ObjectKey(form.fingerprint, form.model_name, form.kv_rank)
                if key not in described:
                    described[key] = layout.canonical(each.chunk_tokens)
        deadline_s = time.monotonic() + _DEADLINE_S
        jobs = [
            _io(self._names.chunk_key(key), self._frame(key, len(canonical)), canonical, deadline_s)
            for key, canonical in described.items()
            if len(canonical) <= _MOST_BYTES
        ]
        if jobs:
            self._agent.plane.store_all(jobs, _written)

    def _write_again(self) -> None:
        self._agent.loop.after(_EVERY_S, self._write_again)
        self.write(self._agent.peers.registered)

    def names(self, done: Callable[[Sequence[PartNames]], None], deadline_s: float) -> None:
        """Of all layouts that are described in Redis, how their parts are named.

        Empty if Redis does not answer in time. Walks over all of Redis' keys.
        """

        def listed(result: KeysResult) -> None:
            found = filter(None, map(self._names.parse, result.keys))
            done([self._described(key) for key in found if len(key.chunk_hash) == 32])

        post = self._agent.loop.post
        self._agent.plane.list_keys(
            self._names.common, deadline_s, lambda result: post(partial(listed, result)),
            MOST_LAYOUTS,
        )  # fmt: skip

    def read(
        self,
        names: Sequence[PartNames],
        done: Callable[[Mapping[bytes, bytes]], None],
        deadline_s: float,
    ) -> None:
        """`KVLayout.canonical` of these layouts, by fingerprint, without those that are not there.

        Asks for the size of each first.
        """
        plane, post = self._agent.plane, self._agent.loop.post
        stems = {each.names.fingerprint: each for each in names}
        keys = [
            self._names.chunk_key(ObjectKey(fingerprint, each.model_name, each.kv_rank))
            for fingerprint, each in stems.items()
        ]
        found: dict[bytes, bytes] = {}
        waiting: set[ChunkIO] = set()

        def framed(result: FramesResult) -> None:
            # Without frames if Redis does not answer.
            for fingerprint, key, frame in zip(stems, keys, result.frames, strict=False):
                if frame is not None and _describes(frame, fingerprint):
                    waiting.add(_io(key, frame, bytes(frame.chunk_bytes), deadline_s))
            if waiting:
                plane.load_all([*waiting], lambda job, outcome: post(partial(read, job, outcome)))
            else:
                done(found)

        def read(job: ChunkIO, outcome: ReadOutcome) -> None:
            canonical, fingerprint = b"".join(job.slots), job.frame.chunk_hash
            if outcome is ReadOutcome.LOADED and fingerprint_of(canonical) == fingerprint:
                found[fingerprint] = canonical
            waiting.discard(job)
            if not waiting:
                done(found)

        if keys:
            plane.describe(keys, deadline_s, lambda result: post(partial(framed, result)))
        else:
            done(found)

    def _described(self, key: ObjectKey) -> PartNames:
        names = ChunkNames(key.chunk_hash, self._agent.config.key_prefix)
        return PartNames(names, key.model_name, key.kv_rank)

    def _frame(self, key: ObjectKey, nbytes: int) -> ChunkFrame:
        stripe_bytes = stripe_payload_bytes(nbytes, self._agent.config.slot_bytes)
        return self._names.frame(key, opaque_pages(nbytes), stripe_bytes)


def _describes(frame: ChunkFrame, fingerprint: bytes) -> bool:
    is_of_it = (frame.fingerprint, frame.chunk_hash) == (DESCRIPTIONS, fingerprint)
    return is_of_it and 0 < frame.chunk_bytes <= _MOST_BYTES


def _io(key: bytes, frame: ChunkFrame, content: bytes, deadline_s: float) -> ChunkIO:
    whole, size = memoryview(bytearray(content)), frame.stripe_payload_bytes
    slots = [whole[first : first + size] for first in range(0, len(content), size)]
    return ChunkIO(key, frame, slots, deadline_s)


def _written(job: ChunkIO, outcome: WriteOutcome) -> None:
    """On a thread of the plane."""
    if outcome is not WriteOutcome.STORED:
        logger.debug("the description of a layout was not written: %s", outcome.value)
