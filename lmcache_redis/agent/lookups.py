"""Lookups: find the leading chunks that can be had, hold them, and only then answer.

    find     every chunk in the host pool is pinned; of the others, those on disk are loaded
             from there, and the rest is scanned for in Redis
    load     those found are read into slots, in the order of the prompt; what the disk does not
             give, or not in time, is asked of Redis as well
    answer   as soon as every chunk of the prefix is READY, or at the deadline with the
             prefix that is; what lies behind it is let go

A chunk counts when every rank's part of it does. The prefix ends, at any moment, at
``bound``: a chunk that is missing, that finds no room, or whose load fails moves it forward.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

from lmcache_redis import messages as m
from lmcache_redis.agent.copies import CopyOutcome
from lmcache_redis.agent.core import Core, Reply
from lmcache_redis.agent.registration import ChunkForm, Registration
from lmcache_redis.agent.sessions import Session
from lmcache_redis.hostpool import Entry
from lmcache_redis.keys import stripe_key
from lmcache_redis.resp.outcomes import CallOutcome, ChunkIO, ReadOutcome, ScanResult

logger = logging.getLogger(__name__)

_MISSES = {
    ReadOutcome.MISSING: ("miss_absent", "chunks vanished from Redis"),
    ReadOutcome.INCOMPLETE: ("miss_incomplete", "chunks in Redis lacked stripes"),
    ReadOutcome.TORN: ("miss_mixed_stores", "chunks in Redis mixed two stores"),
    ReadOutcome.FOREIGN: ("miss_foreign", "values in Redis were not the chunks asked for"),
    ReadOutcome.CORRUPT: ("miss_corrupt", "chunks in Redis were damaged"),
    ReadOutcome.TIMED_OUT: ("miss_deadline", "Redis was too slow"),
    ReadOutcome.UNAVAILABLE: ("miss_redis_error", "Redis is not available"),
    ReadOutcome.CANCELLED: ("miss_deadline", "the load was cancelled"),
}

_FIRST_STRIPE = stripe_key(b"", 0)
_PROBE_POLL_S = 0.01
# The first chunks are on their way while slots are found for the next.
_STRIPES_TOGETHER = 32

Place = tuple[int, int]  # chunk number, rank


class LookupJob:
    """One lookup, from the question to the answer."""

    def __init__(
        self,
        core: Core,
        session: Session,
        ranks: Sequence[Registration],
        hashes: Sequence[bytes],
        reply: Reply,
        deadline_s: float,
    ) -> None:
        self._core = core
        self._session = session
        self._ranks = ranks
        self._hashes = hashes
        self._reply = reply
        self._bound = len(hashes)
        self._held: dict[Place, Entry] = {}
        self._waiting: dict[Place, Entry] = {}
        self._watchers: dict[Place, partial[None]] = {}
        self._from_redis: set[int] = set()
        self._from_disk: set[int] = set()
        self._to_read: dict[ChunkIO, ChunkForm] = {}
        self._scanning = False
        self._done = False
        self._started_s = time.monotonic()
        self._deadline_s = deadline_s
        self._timer = core.timers.at(self._deadline_s, self._expire)

    def start(self) -> None:
        """Pins what the host pool has and asks Redis for the rest."""
        missing: list[tuple[Place, bytes]] = []
        on_disk: list[tuple[Place, bytes]] = []
        get = self._core.pool.get
        stems = [registration.form.stem(len(self._hashes[0])) for registration in self._ranks]
        for chunk, chunk_hash in enumerate(self._hashes):
            for rank, stem in enumerate(stems):
                key = stem + chunk_hash
                entry = get(key)
                if entry is not None:
                    self._hold((chunk, rank), entry)
                elif self._on_disk(chunk, rank):
                    on_disk.append(((chunk, rank), key))
                else:
                    missing.append(((chunk, rank), key))
        self._bring(on_disk, from_disk=True)
        if missing:
            self._scanning = True
            self._scan(missing)
        self._check()

    def _scan(self, missing: list[tuple[Place, bytes]]) -> None:
        if self._done:
            return
        if not self._core.plane.state.probed:
            # An agent that has just been started: whether Redis is there is not known yet.
            self._core.timers.after(_PROBE_POLL_S, partial(self._scan, missing))
            return
        self._core.plane.scan(
            [key + _FIRST_STRIPE for _, key in missing],
            self._deadline_s,
            lambda result: self._core.post(partial(self._scanned, missing, result)),
        )

    def cancel(self) -> None:
        """Lets everything go and answers nothing: nobody is there to hear it."""
        if not self._done:
            self._shrink(0)
            self._finish()

    def _hold(self, place: Place, entry: Entry) -> None:
        self._core.pool.pin(entry)
        self._held[place] = entry
        if self._core.fills.filling(entry):
            watcher = partial(self._filled, place)
            self._waiting[place] = entry
            self._watchers[place] = watcher
            self._core.fills.watch(entry, watcher)

    def _scanned(self, missing: list[tuple[Place, bytes]], result: ScanResult) -> None:
        if self._done:
            return
        self._scanning = False
        found = missing[: result.prefix_length]
        if len(found) < len(missing):
            (first, _), _ = missing[len(found)]
            # The prefix may have ended before, where the host pool had no room.
            missed = max(0, self._bound - first)
            if result.outcome is CallOutcome.DONE:
                self._core.metrics.count("miss_absent", missed)
            else:
                self._miss("miss_redis_error", "Redis is not available", missed)
            self._shrink(first)
        self._bring(found, from_disk=False)
        self._check()

    def _bring(self, found: Sequence[tuple[Place, bytes]], from_disk: bool) -> None:
        """Begins to load what is there, as far as the prefix goes."""
        for place, key in found:
            if place[0] >= self._bound:
                break
            entry = self._core.pool.get(key)  # somebody else may have begun meanwhile
            if entry is None:
                entry = self._load_making_room(place, key, from_disk)
            if entry is None:
                break
            self._hold(place, entry)
        self._read_all()

    def _on_disk(self, chunk: int, rank: int) -> bool:
        disk = self._core.disk
        return disk is not None and disk.has(self._ranks[rank].form, self._hashes[chunk])

    def _load_making_room(self, place: Place, key: bytes, from_disk: bool) -> Entry | None:
        """Begins a load, at the cost of chunks at the prefix's end if there is no other room."""
        entry = self._load(place, key, from_disk)
        if entry is None:
            self._read_all()  # what is not under way could not be cancelled below
        while entry is None and self._bound > place[0]:
            self._miss("miss_pool_full", "the host pool was full", 1)
            self._shrink(self._bound - 1)
            if self._bound > place[0]:
                entry = self._load(place, key, from_disk)
        return entry

    def _load(self, place: Place, key: bytes, from_disk: bool) -> Entry | None:
        form = self._ranks[place[1]].form
        entry = self._core.fills.begin(key, form.stripe_count)
        if entry is None:
            return None
        if from_disk and self._core.disk is not None:
            self._from_disk.add(place[0])
            self._core.disk.load(
                form, self._hashes[place[0]], entry, partial(self._from_file, place, entry)
            )
        else:
            self._from_redis.add(place[0])
            self._read(place, entry)
        return entry

    def _from_file(self, place: Place, entry: Entry, outcome: CopyOutcome) -> None:
        """A file was read, or could not be: then Redis may have the chunk."""
        metrics, form = self._core.metrics, self._ranks[place[1]].form
        if outcome is CopyOutcome.DONE:
            metrics.count("disk_loaded_chunks")
            metrics.count("disk_loaded_bytes", form.chunk_bytes)
        else:
            metrics.count("miss_disk")
        if outcome is not CopyOutcome.FAILED:
            self._core.fills.end(entry, filled=outcome is CopyOutcome.DONE)
            return
        self._from_disk.discard(place[0])
        self._from_redis.add(place[0])
        self._read(place, entry)
        self._read_all()

    def _read(self, place: Place, entry: Entry) -> None:
        core, form = self._core, self._ranks[place[1]].form
        io = core.chunk_io(form, self._hashes[place[0]], entry, self._deadline_s)
        core.fills.on_abandoned(entry, partial(core.plane.cancel, io))
        self._to_read[io] = form
        if len(self._to_read) * form.stripe_count >= _STRIPES_TOGETHER:
            self._read_all()

    def _read_all(self) -> None:
        """Begins to read what is to be read: together that is less work for each."""
        if self._to_read:
            core, forms = self._core, self._to_read
            self._to_read = {}
            core.plane.read_all(
                list(forms),
                lambda io, outcome: core.post(partial(_loaded, core, forms[io], io, outcome)),
            )

    def _filled(self, place: Place, ready: bool) -> None:
        self._waiting.pop(place, None)
        self._watchers.pop(place, None)
        if not ready and not self._asked_redis_instead(place):
            self._session.tally.reasons.add("a chunk could not be loaded")
            self._shrink(place[0])
        self._check()

    def _asked_redis_instead(self, place: Place) -> bool:
        """Where a disk that does not answer keeps the entry's slots: another entry, from Redis."""
        entry, disk = self._held.get(place), self._core.disk
        if entry is None or disk is None or not disk.keeps(entry):
            return False
        del self._held[place]
        self._core.pool.unpin(entry)
        self._from_disk.discard(place[0])
        self._bring([(place, entry.key)], from_disk=False)
        return True

    def _shrink(self, bound: int) -> None:
        """The prefix ends before chunk number ``bound``: lets go what lies behind."""
        self._bound = min(self._bound, bound)
        for place in [p for p in self._held if p[0] >= self._bound]:
            entry = self._held.pop(place)
            self._waiting.pop(place, None)
            watcher = self._watchers.pop(place, None)
            if watcher is not None:
                self._core.fills.unwatch(entry, watcher)
            self._core.pool.unpin(entry)

    def _expire(self) -> None:
        if self._done:
            return
        self._core.metrics.count("lookups_timed_out")
        self._session.tally.reasons.add("the lookup deadline passed")
        ready = self._held.keys() - self._waiting.keys()
        every = ((c, r) for c in range(self._bound) for r in range(len(self._ranks)))
        first = next((place[0] for place in every if place not in ready), self._bound)
        self._scanning = False
        self._core.metrics.count("miss_deadline", self._bound - first)
        self._shrink(first)
        self._check()

    def _check(self) -> None:
        if self._done or self._scanning or self._waiting:
            return
        # First of all: what is held is held by this job still, and is the session's below.
        self._reply(m.LookupResult(0, self._bound))
        metrics, tally = self._core.metrics, self._session.tally
        loaded = sum(1 for chunk in self._from_redis if chunk < self._bound)
        metrics.count("lookups")
        metrics.count("lookup_chunks", len(self._hashes))
        from_disk = sum(1 for chunk in self._from_disk - self._from_redis if chunk < self._bound)
        metrics.count("hit_chunks_redis", loaded)
        metrics.count("hit_chunks_disk", from_disk)
        metrics.count("hit_chunks_pool", self._bound - loaded - from_disk)
        tally.asked += len(self._hashes)
        tally.hit += self._bound
        tally.from_redis += loaded
        tally.from_disk += from_disk
        tally.lookup_ms += (time.monotonic() - self._started_s) * 1e3
        for (chunk, rank), entry in self._held.items():
            self._session.hold((self._ranks[rank].worker_id, self._hashes[chunk]), entry)
        self._held.clear()
        self._finish()

    def _finish(self) -> None:
        self._done = True
        self._timer.cancel()
        if self._session.cancel_lookup == self.cancel:
            self._session.cancel_lookup = None

    def _miss(self, counter: str, reason: str, chunks: int) -> None:
        self._core.metrics.count(counter, chunks)
        self._session.tally.reasons.add(reason)


def _loaded(core: Core, form: ChunkForm, io: ChunkIO, outcome: ReadOutcome) -> None:
    """A read has ended: its entry becomes READY or leaves the pool, and watchers are told."""
    entry = io.tag
    assert isinstance(entry, Entry)
    if outcome is ReadOutcome.LOADED:
        core.metrics.count("loaded_chunks")
        core.metrics.count("loaded_bytes", io.frame.chunk_bytes)
        entry.persisted = True
    else:
        counter, reason = _MISSES[outcome]
        core.metrics.count(counter)
        logger.debug("chunk %s was not loaded: %s", io.frame.chunk_hash.hex()[:16], reason)
    if core.fills.end(entry, filled=outcome is ReadOutcome.LOADED) and core.disk is not None:
        core.disk.offer(form, io.frame.chunk_hash, entry)
