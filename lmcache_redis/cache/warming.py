"""`--warm-bytes`: a new host pool is filled with the chunks that Redis uses most, behind all else.

When workers of an engine are registered, it is known how their chunks are named and how large they
are. Redis tells which of those it uses most; each is then loaded as for a lookup, under the same
key, with all checks.

    waiting for other workers ──▶ ranking ──▶ loading ──no more, no room, or not up──▶ done

Engines come first. A chunk takes free memory only. Its load begins while nothing is loaded, waited
for or written otherwise, and is cancelled when a lookup begins; then it is loaded again. Until
somebody asks for it, it is evicted before all others, the least used first.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from lmcache_redis.cache.cache import Cache, Load
from lmcache_redis.cache.pool import EntryState
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


class Warming:
    """Owned by the cache's owner. rank: prefixes, the most keys, a deadline, and who is told.

    size_bytes: of all chunks that it loads.
    """

    def __init__(self, cache: Cache, rank: Rank, size_bytes: int) -> None:
        self._cache = cache
        self._rank = rank
        self._left_bytes = size_bytes
        # By what all keys of a worker's parts begin with.
        self._forms: dict[bytes, ChunkForm] = {}
        self._unranked: set[bytes] = set()
        self._is_ranking = self._is_stopped = False
        self._queue: deque[bytes] = deque()  # of keys
        self._loading: dict[_Chunk, Callable[[], None]] = {}  # and who watches
        self._timer = OneTimer(cache.owner, self._go_on)
        self._pause_until_s = 0.0
        self._began_s = 0.0  # of the round that has not ended; 0.0: there is none

    def warm(self, forms: Sequence[ChunkForm]) -> None:
        """These parts of chunks are of a worker that is registered now."""
        # Without its last byte, the length of a hash.
        new = {form.stem(MAX_HASH_BYTES)[:-1]: form for form in forms}
        self._unranked.update(new.keys() - self._forms.keys())
        self._forms.update(new)
        if self._unranked and not self._is_stopped:
            self._timer.fire_by(time.monotonic() + _TOGETHER_S)

    def give_way(self) -> None:
        """A lookup begins: what it loads comes first."""
        if not self._began_s:
            return
        self._pause_until_s = time.monotonic() + self._pause_s()
        for chunk, watcher in self._loading.items():
            entry = self._cache.pool.get(chunk.key)
            if entry is not None:
                self._cache.pool.unwatch(entry, watcher)
            self._queue.appendleft(chunk.key)
            self._left_bytes += chunk.form.chunk_bytes
        if self._loading:
            self._loading.clear()
            self._timer.fire_by(time.monotonic() + _POLL_S)

    def stop(self) -> None:
        """Loads nothing more."""
        self._is_stopped = True
        self.give_way()
        self._queue.clear()
        self._unranked.clear()
        self._began_s = 0.0

    def report(self) -> dict[str, Any]:
        """For STATUS."""
        counters = self._cache.metrics.snapshot()
        return {
            "chunks": counters["warmed_chunks"],
            "bytes": counters["warmed_bytes"],
            "left_chunks": len(self._queue) + len(self._loading),
            "done": bool(self._forms) and not (self._began_s or self._unranked),
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
        self._is_ranking, self._began_s = True, time.monotonic()
        done = posting(self._cache.owner, self._ranked)
        self._rank(prefixes, _MOST_CHUNKS, self._began_s + _RANK_DEADLINE_S, done)

    def _ranked(self, result: _Ranked) -> None:
        self._is_ranking = False
        if self._is_stopped:
            return
        refused = result.refused
        if result.outcome is not CallOutcome.DONE and not result.keys:
            refused = refused or f"Redis: {result.outcome.value}"
        if refused:
            logger.warning("the host pool is not filled (--warm-bytes): %s", refused)
        else:
            count = len(result.keys)
            logger.info("filling the host pool with the most used of %d chunks", count)
        self._queue.extend(result.keys)
        self._load_some()

    def _chunk(self, key: bytes) -> _Chunk | None:
        for prefix, form in self._forms.items():
            if key.startswith(prefix) and (name := form.names.parse(key)) is not None:
                return _Chunk(key, form, name.chunk_hash)
        return None

    def _load_some(self) -> None:
        """Begins what may be loaded now. All that is left is tried again later, or never."""
        cache = self._cache
        while self._queue:
            key = self._queue[0]
            chunk, level = self._chunk(key), cache.level_of(key)
            if chunk is None or level is None or key in cache.pool:
                self._queue.popleft()
                continue
            form = chunk.form
            has_room = cache.units(form) <= cache.pool.free
            if not has_room or form.chunk_bytes > self._left_bytes or not cache.tiers[-1].state.up:
                self._queue.clear()
                break
            if self._must_wait(form.chunk_bytes):
                self._timer.fire_by(time.monotonic() + _POLL_S)
                return
            self._queue.popleft()
            deadline_s = time.monotonic() + _LOAD_DEADLINE_S
            load = cache.prepare_load(form, chunk.chunk_hash, level, deadline_s)
            if load is not None:
                self._begin(chunk, load)
        if self._began_s and not self._queue and not self._loading:
            self._end()

    def _must_wait(self, nbytes: int) -> bool:
        cache, now_s = self._cache, time.monotonic()
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
        self._loading[chunk] = watcher
        self._left_bytes -= chunk.form.chunk_bytes
        self._cache.pool.watch(load.entry, watcher)
        self._cache.begin_loads((load,))

    def _filled(self, chunk: _Chunk, load: Load) -> None:
        del self._loading[chunk]
        if load.entry.state is EntryState.READY:
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

    def _end(self) -> None:
        counters = self._cache.metrics.snapshot()
        logger.info(
            "filled the host pool with %d chunks, %.1f MiB (%.1f s)",
            counters["warmed_chunks"], counters["warmed_bytes"] / 2**20,
            time.monotonic() - self._began_s,
        )  # fmt: skip
        self._began_s = 0.0
        self._go_on()
