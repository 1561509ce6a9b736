# SPDX-License-Identifier: Apache-2.0
"""Chunks in memory that another cache owns, stored in Redis and loaded from it: what all doors do.

A *door* (`integrations`) lets the cache of another host use Redis: LMCache's, SGLang's, vLLM's own.
It translates calls and types. It owns no memory, and what follows is not its business:

    names     the host's keys, in a namespace that stands for all else that decides the bytes
    stores    leave out what Redis has; a chunk becomes visible whole
    loads     are checked (layout, size, shapes, dtypes, checksum), and fail on any doubt
    time      every call is answered by its deadline, at once while Redis is down

    settings = DoorSettings.of({"url": "redis://cache.example:6379"})
    store = RegionStore(settings)
    form = form_of({"weights": "v2"}, "org/model", 0, metadata, settings)
    store.store([RegionChunk(form, key, [view])], stored.append)      # [[True]], in a moment
    store.load([RegionChunk(form, key, [other])], loaded.append)
    store.close(5.0)

The views of a chunk belong to the store from the call until its answer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from lmcache_redis.chunks.keys import MAX_HASH_BYTES
from lmcache_redis.chunks.metadata import RemoteMetadata
from lmcache_redis.chunks.names import ChunkForm, ChunkNames
from lmcache_redis.config import DEFAULT_SLOT_BYTES
from lmcache_redis.errors import ConfigError
from lmcache_redis.metrics import Metrics
from lmcache_redis.resp import RedisOptions, RedisPlane
from lmcache_redis.resp.options import load_provider
from lmcache_redis.seal import read_seal_keys
from lmcache_redis.tier_kinds import REDIS
from lmcache_redis.tiers import (
    DOUBTFUL,
    CallOutcome,
    ChunkIO,
    ExistsResult,
    ReadOutcome,
    RemoveResult,
    TierCounters,
    WriteOutcome,
)

logger = logging.getLogger(__name__)

# Told once for each chunk of a call in order: on a thread of the plane, or before the call returns.
Answer = Callable[[list[bool]], None]

_COUNTERS = TierCounters.of(REDIS)
_DIGEST_BYTES = 32
_MOST_DISTRUSTED = 65_536
# Settings of an earlier version: an engine that has them starts.
_FOLLOW_TIMEOUT = ("lookup_timeout_s", "store_timeout_s")
_OLD_TIMEOUT = "load_timeout_s"


class DoorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What users may set in a door's configuration (docs/guides/doors.md).

    timeout_s: of a load. A lookup has a tenth of it, a store three times as long.
    """

    url: Annotated[str, msgspec.Meta(min_length=1)]
    username: str | None = None
    password_file: str | None = None
    credential_provider: str | None = None
    key_prefix: str = ""
    seal_key_file: str | None = None
    compress: Literal["off", "lossless"] = "off"
    weights_id: str = ""
    ttl_s: int = 0
    slot_bytes: Annotated[int, msgspec.Meta(ge=4096, le=512 << 20)] = DEFAULT_SLOT_BYTES
    connections: int = 4
    network_threads: int = 1
    timeout_s: Annotated[float, msgspec.Meta(ge=0.01, le=3600)] = 10.0

    @staticmethod
    def of(given: Mapping[str, Any], known_to_host: Sequence[str] = ()) -> DoorSettings:
        """Those that the host does not read itself. Raises ConfigError, which names the setting."""
        own = {name: value for name, value in given.items() if name not in known_to_host}
        if _OLD_TIMEOUT in own and "timeout_s" not in own:
            logger.warning("%s is taken for timeout_s, its name now: rename it", _OLD_TIMEOUT)
            own["timeout_s"] = own.pop(_OLD_TIMEOUT)
        for name in own.keys() & {_OLD_TIMEOUT, *_FOLLOW_TIMEOUT}:
            logger.warning("%s is ignored, because timeout_s decides: remove it", name)
            del own[name]
        try:
            return msgspec.convert(own, DoorSettings)
        except msgspec.ValidationError as error:
            names = ", ".join(DoorSettings.__struct_fields__)
            raise ConfigError(f"{error}; lmcache_redis has the settings {names}") from None

    @property
    def lookup_timeout_s(self) -> float:
        return self.timeout_s / 10

    @property
    def store_timeout_s(self) -> float:
        return self.timeout_s * 3

    def redis(self) -> RedisOptions:
        """The options of the plane, with the password of the environment. Raises ConfigError."""
        provider = self.credential_provider
        return RedisOptions(
            self.url,
            self.key_prefix.encode(),
            self.username,
            _secret("LMCACHE_REDIS_PASSWORD"),
            self.password_file,
            None if provider is None else load_provider(provider),
            _secret("LMCACHE_REDIS_SENTINEL_PASSWORD"),
            connections=self.connections,
            network_threads=self.network_threads,
            ttl_s=self.ttl_s,
            seal_keys=read_seal_keys(self.seal_key_file),
            compress=self.compress,
        )


def _secret(variable: str) -> str | None:
    text = os.environ.get(variable)
    return None if text is None else text.rstrip("\r\n")


class RegionChunk(NamedTuple):
    """A chunk of a call. key: the host's, of any length. views: its bytes, in order.

    One view is cut into stripes; several are equally long, and a stripe each.
    """

    form: ChunkForm
    key: bytes
    views: Sequence[memoryview] = ()


def form_of(
    identity: Mapping[str, str],
    model_name: str,
    kv_rank: int,
    metadata: RemoteMetadata,
    settings: DoorSettings,
    views: int = 1,
) -> ChunkForm:
    """The form of chunks of one identity, shape and dtype, in a namespace of their own.

    identity: pairs of text for everything that decides the bytes and is not in the host's keys.
    views: in how many pieces the host has a chunk. Raises FormatError for a chunk that cannot be
    encoded.
    """
    described = [sorted(identity.items()), metadata.serialize().hex(), views]
    text = json.dumps(described, separators=(",", ":"))
    layout = hashlib.blake2b(
        text.encode(), digest_size=_DIGEST_BYTES, person=b"lmcr2.region"
    ).digest()
    slot_bytes = settings.slot_bytes if views == 1 else metadata.length // views
    names = ChunkNames(layout, settings.key_prefix.encode())
    return ChunkForm.of(names, model_name, kv_rank, metadata, slot_bytes)


class RegionStore:
    """Stores and loads chunks of any form in Redis. Thread-safe; no call waits."""

    def __init__(self, settings: DoorSettings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self._plane = RedisPlane(settings.redis())
        self._lock = threading.Lock()
        self._distrusted: dict[bytes, None] = {}  # what was read of them is not what it should be
        self._plane.start()

    @property
    def is_up(self) -> bool:
        """Whether Redis is asked at all."""
        return self._plane.state.up

    @property
    def why_down(self) -> str:
        """Why Redis is down, or what its last operations were answered; empty if they worked."""
        return self._plane.state.reason

    def wait_probed(self, timeout_s: float) -> bool:
        """Wait until Redis was probed; whether it can be used."""
        return self._plane.wait_probed(timeout_s).up

    def lookup(self, chunks: Sequence[RegionChunk], done: Answer) -> None:
        """Which of the chunks are there, as far as that is known. Views are not needed."""
        deadline = time.monotonic() + self.settings.lookup_timeout_s
        keys = [_chunk_key(chunk) for chunk in chunks]

        def found(result: ExistsResult) -> None:
            there = result.present if result.outcome is CallOutcome.DONE else [False] * len(keys)
            pairs = zip(keys, there, strict=True)
            done([bool(each) and key not in self._distrusted for key, each in pairs])

        self._plane.exists(keys, deadline, found)

    def store(
        self, chunks: Sequence[RegionChunk], done: Answer, present: Answer | None = None
    ) -> None:
        """Store those that are not there. True: it is there now. present: told first, of those.

        What may be there or not is not stored: it counts as dropped.
        """
        now = time.monotonic()
        deadline = now + self.settings.store_timeout_s
        jobs = [_job(chunk, deadline) for chunk in chunks]
        for job in jobs:
            job.check(writable=False)

        def missing(result: ExistsResult) -> None:
            there = dict(zip(jobs, result.present or [None] * len(jobs), strict=True))
            for job in jobs:
                if job.key in self._distrusted:
                    there[job] = False
            skipped = {job for job, each in there.items() if each}
            self.metrics.count("skipped_chunks", len(skipped))
            if present is not None:
                present([job in skipped for job in jobs])
            answer = _Answers(jobs, done, skipped)
            is_closed = result.outcome is CallOutcome.CANCELLED
            not_asked = WriteOutcome.CANCELLED if is_closed else WriteOutcome.NOT_KNOWN
            lacking = [job for job in answer.open if there[job] is False]
            for job in [job for job in answer.open if there[job] is None]:
                answer.ended(job, self._wrote(job, not_asked))
            try:
                self._plane.store_all(
                    lacking, lambda job, how: answer.ended(job, self._wrote(job, how))
                )
            except RuntimeError:  # the plane was closed in the meantime
                for job in lacking:
                    answer.ended(job, self._wrote(job, WriteOutcome.CANCELLED))

        asked_until = min(deadline, now + self.settings.lookup_timeout_s)
        self._plane.exists([job.key for job in jobs], asked_until, missing)

    def load(self, chunks: Sequence[RegionChunk], done: Answer) -> None:
        """Load chunks into their views, which hold undefined bytes where a load fails."""
        deadline = time.monotonic() + self.settings.timeout_s
        answer = _Answers([_job(chunk, deadline) for chunk in chunks], done)
        self._plane.load_all(answer.open, lambda job, how: answer.ended(job, self._read(job, how)))

    def keep(self, chunks: Sequence[RegionChunk]) -> None:
        """Count as a use of chunks that the host serves from its own memory."""
        asked = [(_chunk_key(chunk), chunk.form.stripe_count) for chunk in chunks]
        deadline = time.monotonic() + self.settings.lookup_timeout_s
        self._plane.refresh(asked, deadline, lambda result: None)

    def remove(self, chunks: Sequence[RegionChunk], done: Answer) -> None:
        """Remove chunks. True: it is not there any more, or was not."""
        deadline = time.monotonic() + self.settings.lookup_timeout_s
        answer = _Answers([_job(chunk, deadline) for chunk in chunks], done)

        def removed(job: ChunkIO, result: RemoveResult) -> None:
            answer.ended(job, result.outcome is CallOutcome.DONE)

        for job in answer.open:
            stripes = job.frame.stripe_count
            self._plane.remove(job.key, deadline, partial(removed, job), stripes)

    def clear(self, form: ChunkForm, timeout_s: float, done: Answer) -> None:
        """Remove every chunk of this form. True: none is left of those that were there."""
        deadline = time.monotonic() + timeout_s

        def cleared(result: RemoveResult) -> None:
            done([result.outcome is CallOutcome.DONE])

        self._plane.clear([form.names.common], deadline, cleared)

    def close(self, deadline_s: float) -> bool:
        """Finish stores for so long and answer everything. Idempotent."""
        return self._plane.close(deadline_s)

    def _read(self, job: ChunkIO, how: ReadOutcome) -> bool:
        if how is ReadOutcome.LOADED:
            self.metrics.count(_COUNTERS.loaded_chunks)
            self.metrics.count(_COUNTERS.loaded_bytes, job.frame.chunk_bytes)
            return True
        self.metrics.count(_COUNTERS.misses[how])
        if how in DOUBTFUL:
            with self._lock:
                while len(self._distrusted) >= _MOST_DISTRUSTED:
                    del self._distrusted[next(iter(self._distrusted))]
                self._distrusted[job.key] = None
        return False

    def _wrote(self, job: ChunkIO, how: WriteOutcome) -> bool:
        if how is not WriteOutcome.STORED:
            self.metrics.count(_COUNTERS.drops[how])
            return False
        self.metrics.count(_COUNTERS.stored_chunks)
        nbytes = job.frame.chunk_bytes
        self.metrics.count(_COUNTERS.stored_bytes, job.stored_bytes or nbytes)
        self.metrics.count(_COUNTERS.plain_bytes, nbytes)
        with self._lock:
            self._distrusted.pop(job.key, None)
        return True


def answered(call: Callable[[Answer], None]) -> list[bool]:
    """Waits for the answer of a call to a store, which comes by its deadline."""
    answers: SimpleQueue[list[bool]] = SimpleQueue()
    call(answers.put)
    return answers.get()


class _Answers:
    """How the jobs of one call ended; `done` is told after the last. at_once: good without work."""

    def __init__(
        self, jobs: Sequence[ChunkIO], done: Answer, at_once: Collection[ChunkIO] = ()
    ) -> None:
        self.open = [job for job in jobs if job not in at_once]
        self._jobs = jobs
        self._done = done
        self._lock = threading.Lock()
        self._left = len(self.open)
        self._good = set(at_once)
        if not self.open:
            done([True] * len(jobs))

    def ended(self, job: ChunkIO, is_good: bool) -> None:
        with self._lock:
            self._left -= 1
            if is_good:
                self._good.add(job)
            is_last = not self._left
        if is_last:
            self._done([each in self._good for each in self._jobs])


def _chunk_key(chunk: RegionChunk) -> bytes:
    return chunk.form.key(_name(chunk.key))


def _name(key: bytes) -> bytes:
    """The host's key as a chunk hash, whose length is limited."""
    if len(key) <= MAX_HASH_BYTES:
        return key
    return hashlib.blake2b(key, digest_size=_DIGEST_BYTES, person=b"lmcr2.key").digest()


def _job(chunk: RegionChunk, deadline: float) -> ChunkIO:
    """Raises ValueError unless the views are those of the form."""
    form, name = chunk.form, _name(chunk.key)
    slots = chunk.views
    if len(slots) == 1:
        size, whole = form.stripe_payload_bytes, slots[0]
        slots = [whole[at : at + size] for at in range(0, form.chunk_bytes, size)]
    return ChunkIO(form.key(name), form.frame(name), slots, deadline)
