# SPDX-License-Identifier: Apache-2.0
"""`--warm-bytes`: a new host pool is filled with the chunks that Redis uses most, behind all else.

When workers of an engine are registered, it is known how their chunks are named and how large they
are. Redis tells which of those it uses most; each is then loaded as for a lookup, under the same
key, with all checks.

    waiting for other workers ──▶ ranking ──▶ loading ──no more, no room, or not up──▶ done

Engines come first. A chunk takes free memory only. Its load begins while nothing is loaded, waited
for or written otherwise, and is cancelled when a lookup begins; then it is loaded again. Until
somebody asks for it, it is evicted before all others, the least used first; it is not written to
other tiers, and its TTL runs on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from lmcache_redis.cache.cache import Cache, Load
from lmcache_redis.cache.pool import Entry, EntryState
from lmcache_redis.cache.threads import OneTimer, posting
from lmcache_redis.chunks.keys import MAX_HASH_BYTES
from lmcache_redis.chunks.names import ChunkForm
from lmcache_redis.tiers import CallOutcome

logger = logging.getLogger(__name__)

# The ranks of an engine register one after the other.
_TOGETHER_S = 1.0
_RANK_DEADLINE_S = 120.0
_MOST_CHUNKS = 1 << 15
# In flight: what Redis delivers in this time, or one larger chunk. After lookups and their loads
# nothing begins for as long: others may follow.
_IN_FLIGHT_S = 0.05
_POLL_S = 0.01
_LOAD_DEADLINE_S = 30.0
# Looked at before others have their turn: about a millisecond.
_MOST_A_TURN = 256


class _Ranked(Protocol):
    """What a rank has found: keys, the most used first; why a server does not tell."""

    @property
    def outcome(self) -> CallOutcome: ...
    @property
    def keys(self) -> Sequence[bytes]: ...
    @property
    def refused(self) -> str: ...


Rank = Callable[[Sequence[bytes], int, float, Callable[[_Ranked], None]], None]


class _Chunk(NamedTuple):
    key: bytes
    form: ChunkForm
    chunk_hash: bytes


class _Loading(NamedTuple):
    """The entry is kept: a clear takes it out of the pool while it is filled."""

    entry: Entry
    watcher: Callable[[], None]


@dataclass(slots=True)
class _Filling:
    """From the question to the last load: what was loaded."""

    began_s: float
    chunks: int = 0
    nbytes: int = 0


class Warming:
    """Owned by the cache's owner. rank: prefixes, the most keys, a deadline, and who is told.

    size_bytes: of all chunks that it loads. first: `ShareKeys.first`: what a rank knows them by.
    """

    def __init__(
        self,
        cache: Cache,
        rank: Rank,
        size_bytes: int,
        first: Callable[[bytes], bytes] = lambda key: key,
    ) -> None:
        self._cache = cache
        self._first = first
        self._rank = rank
        self._left_bytes = size_bytes
        # By what all keys of a worker's parts begin with.
        self._forms: dict[bytes, ChunkForm] = {}
        self._unranked: set[bytes] = set()
        self._is_ranking = self._is_stopped = False
        self._queue: deque[bytes] = deque()  # of keys
        self._loading: dict[_Chunk, _Loading] = {}
        self._timer = OneTimer(cache.owner, self._go_on)
        self._pause_until_s = 0.0
        self._round: _Filling | None = None  # that has not ended

    def warm(self, forms: Sequence[ChunkForm]) -> None:
        """These parts of chunks are of a worker that is registered now."""
        # Without its last byte, the length of a hash.
        new = {form.stem(MAX_HASH_BYTES)[:-1]: form for form in forms}
        self._unranked.update(new.keys() - self._forms.keys())
        self._forms.update(new)
        if self._unranked and not self._is_stopped:
            self._timer.fire_in(_TOGETHER_S)

    def give_way(self) -> None:
        """A lookup begins: what it loads comes first."""
        if not (self._loading or self._queue or self._is_ranking):
            return
        self._pause_until_s = self._cache.owner.now() + self._pause_s()
        for chunk, (entry, watcher) in self._loading.items():
            self._cache.pool.unwatch(entry, watcher)
            self._queue.appendleft(chunk.key)
            self._left_bytes += chunk.form.chunk_bytes
        if self._loading:
            self._loading.clear()
            self._timer.fire_in(_POLL_S)

    def stop(self) -> None:
        """Loads nothing more."""
        self._is_stopped = True
        self.give_way()
        self._queue.clear()
        self._unranked.clear()
        self._round = None

    def report(self) -> dict[str, Any]:
        """What STATUS says of it."""
        counters = self._cache.metrics.snapshot()
        return {
            "chunks": counters["warmed_chunks"],
            "bytes": counters["warmed_bytes"],
            "left_chunks": len(self._queue) + len(self._loading),
            "done": bool(self._forms) and not (self._round or self._unranked),
        }

    def _go_on(self) -> None:
        if self._is_stopped or self._is_ranking:
            return
        if self._queue or self._loading:
            self._load_some()
        elif self._unranked:
            self._begin_rank()

    def _begin_rank(self) -> None:
        prefixes, self._unranked = sorted(self._unranked), set()
        self._is_ranking, self._round = True, _Filling(self._cache.owner.now())
        done = posting(self._cache.owner, self._ranked)
        prefixes = [*dict.fromkeys(map(self._first, prefixes))]
        self._rank(prefixes, _MOST_CHUNKS, self._round.began_s + _RANK_DEADLINE_S, done)

    def _ranked(self, result: _Ranked) -> None:
        self._is_ranking = False
        if self._is_stopped:
            return
        refused = result.refused
        if result.outcome is not CallOutcome.DONE:
            refused = refused or f"Redis: {result.outcome.value}"
        if refused and not result.keys:
            logger.warning("the host pool is not filled (--warm-bytes): %s", refused)
        else:
            logger.info(
                "filling the host pool with the most used of %d chunks%s",
                len(result.keys),
                refused and f"; others are not known: {refused}",
            )
        for key in result.keys:
            # Workers of several sizes have the same first share.
            for prefix in self._forms:
                if key.startswith(first := self._first(prefix)):
                    self._queue.append(prefix + key[len(first) :])
        self._load_some()

    def _chunk(self, key: bytes) -> _Chunk | None:
        for prefix, form in self._forms.items():
            if key.startswith(prefix) and (name := form.names.parse(key)) is not None:
                return _Chunk(key, form, name.chunk_hash)
        return None

    def _load_some(self) -> None:
        """Begins what may be loaded now. All that is left is tried again later, or never."""
        if self._is_ranking:  # the round before has ended
            return
        cache = self._cache
        for _ in range(min(len(self._queue), _MOST_A_TURN)):
            key = self._queue[0]
            chunk, level = self._chunk(key), cache.level_of(key)
            is_needless = key in cache.pool or cache.clears.ended.has(key)
            if chunk is None or level is None or is_needless:
                self._queue.popleft()
                continue
            form = chunk.form
            has_room = cache.units(form) <= cache.pool.free
            if not has_room or form.chunk_bytes > self._left_bytes or not cache.tiers[-1].state.up:
                self._queue.clear()
                break
            if self._must_wait(form.chunk_bytes):
                self._timer.fire_in(_POLL_S)
                return
            self._queue.popleft()
            deadline_s = cache.owner.now() + _LOAD_DEADLINE_S
            load = cache.prepare_load(form, chunk.chunk_hash, level, deadline_s, is_asked_for=False)
            if load is not None:
                self._begin(chunk, load)
        if self._queue:
            self._timer.fire_in(_POLL_S)
        elif self._round is not None and not self._loading:
            self._end(self._round)

    def _must_wait(self, nbytes: int) -> bool:
        cache, now_s = self._cache, self._cache.owner.now()
        ours = sum(each.form.chunk_bytes for each in self._loading)
        if sum(each.in_flight_bytes for each in cache.rates) > ours or len(cache.waiting):
            self._pause_until_s = now_s + self._pause_s()
        is_full = ours > 0 and ours + nbytes > cache.rates[-1].per_second() * _IN_FLIGHT_S
        return is_full or now_s < self._pause_until_s or cache.backlog > 0

    def _pause_s(self) -> float:
        rate = self._cache.rates[-1].per_second()
        largest = max(form.chunk_bytes for form in self._forms.values())
        return max(_IN_FLIGHT_S, largest / rate if rate else 0.0)

    def _begin(self, chunk: _Chunk, load: Load) -> None:
        watcher = partial(self._filled, chunk, load)
        self._loading[chunk] = _Loading(load.entry, watcher)
        self._left_bytes -= chunk.form.chunk_bytes
        self._cache.pool.watch(load.entry, watcher)
        self._cache.begin_loads((load,))

    def _filled(self, chunk: _Chunk, load: Load) -> None:
        if self._loading.pop(chunk, None) is None:
            return  # a watcher before this one has begun a lookup
        if load.entry.state is EntryState.READY:
            if self._round is not None:
                self._round.chunks += 1
                self._round.nbytes += chunk.form.chunk_bytes
            self._cache.metrics.count("warmed_chunks")
            self._cache.metrics.count("warmed_bytes", chunk.form.chunk_bytes)
        else:
            self._left_bytes += chunk.form.chunk_bytes
        # Posted: it has our pin until this returns, and `begin_loads` may be what calls.
        self._cache.owner.post(partial(self._arrived, load.key))

    def _arrived(self, key: bytes) -> None:
        self._cache.pool.touch_least(key)
        if not self._is_stopped:
            self._load_some()

    def _end(self, ended: _Filling) -> None:
        logger.info(
            "filled the host pool with %d chunks, %.1f MiB (%.1f s)",
            ended.chunks, ended.nbytes / 2**20, self._cache.owner.now() - ended.began_s,
        )  # fmt: skip
        self._round = None
        self._go_on()
