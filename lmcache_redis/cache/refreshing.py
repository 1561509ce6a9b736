"""Keeps in a tier what the host pool serves, and finds out what the tier has lost.

Requests for a chunk in the host pool do not reach the tiers, which would evict or expire exactly
the hottest chunks: other nodes and the next process then lack them. So after a lookup the tiers are
told to keep its chunks, each at most once in `refresh_every_s`. What a tier lacks is written again.

A tier may be too small for what the host pools of all its nodes serve. It then evicts what is
written again. So a chunk that a tier lacks twice in a row is looked at later each time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import NamedTuple

from lmcache_redis.cache.backing import Backing
from lmcache_redis.cache.pool import Entry, EntryState
from lmcache_redis.cache.threads import Owner
from lmcache_redis.chunks.names import ChunkForm
from lmcache_redis.tiers import CallOutcome, ExistsResult

_BATCH_CHUNKS = 256
_MOST_WAITING = 16384
# A chunk is looked at again after at most 2 to this power times `refresh_every_s`.
_MOST_LOSSES = 6
_MOST_COUNTED = 65536


class PooledChunk(NamedTuple):
    """A chunk in the host pool, with what it takes to write it."""

    form: ChunkForm
    chunk_hash: bytes
    entry: Entry


class Refresher:
    """One tier's. Owned by the owner's thread. lacked: told of READY chunks that the tier lacks."""

    def __init__(
        self, backing: Backing, owner: Owner, lacked: Callable[[PooledChunk], None]
    ) -> None:
        self._backing = backing
        self._owner = owner
        self._lacked = lacked
        self._waiting: deque[PooledChunk] = deque()
        self._is_asking = False
        self._losses: dict[bytes, int] = {}  # of a chunk, since the tier last had it

    def add(self, chunks: Iterable[PooledChunk]) -> None:
        """Chunks of a lookup. Pins nothing: what is evicted meanwhile is not written again."""
        if self._backing.tier.state.up:
            self._waiting.extend(islice(chunks, _MOST_WAITING - len(self._waiting)))
            self._ask()

    def _ask(self) -> None:
        if self._is_asking or not self._waiting:
            return
        count = min(_BATCH_CHUNKS, len(self._waiting))
        chunks = [self._waiting.popleft() for _ in range(count)]
        self._backing.tier.refresh(
            [(chunk.entry.key, chunk.form.stripe_count) for chunk in chunks],
            time.monotonic() + self._backing.ask_timeout_s,
            lambda result: self._owner.post(partial(self._asked, chunks, result)),
        )
        self._is_asking = True

    def _asked(self, chunks: list[PooledChunk], result: ExistsResult) -> None:
        self._is_asking = False
        if result.outcome is CallOutcome.DONE:
            for chunk, present in zip(chunks, result.present, strict=True):
                if present:
                    self._losses.pop(chunk.entry.key, None)
                elif chunk.entry.state is EntryState.READY:
                    self._postpone(chunk.entry)
                    self._lacked(chunk)
        self._ask()

    def _postpone(self, entry: Entry) -> None:
        """The first time, the entry is looked at again when any other is."""
        losses = min(self._losses.pop(entry.key, 0) + 1, _MOST_LOSSES)
        self._losses[entry.key] = losses
        if len(self._losses) > _MOST_COUNTED:
            del self._losses[next(iter(self._losses))]
        wait_s = (2**losses - 2) * self._backing.refresh_every_s
        entry.refreshed_s = max(entry.refreshed_s, time.monotonic() + wait_s)
