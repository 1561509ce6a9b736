"""Clears: chunks whose keys have a common beginning leave the pool and, in the background, tiers.

A clear removes what is there. One *for good* is of chunks that are never asked for again, such as
those of an epoch that only one engine had. Stores of that engine may still be on their way, at this
agent and at those of its other nodes; a server that answers nothing may keep what was sent to it.
So such chunks are refused from then on, and tiers are cleared again: a while after the first time,
and after a failure.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from lmcache_redis.cache.pool import Entry, HostPool
from lmcache_redis.cache.threads import Owner, posting
from lmcache_redis.cache.writebehind import WriteBehind
from lmcache_redis.metrics import Metrics
from lmcache_redis.tiers import Backing, CallOutcome, RemoveResult

logger = logging.getLogger(__name__)

# Large servers hold millions of keys, and a clear has the lowest priority.
_DEADLINE_S = 60.0
# Longer than a chunk may wait to be written, at any agent.
_AGAIN_S = 60.0
_AGAIN_AT_MOST_S = 3600.0
_SWEEPS = 2  # that succeed
_MOST_ENDED = 4096


class EndedPrefixes:
    """Beginnings of keys that were cleared for good, the newest ones."""

    def __init__(self) -> None:
        self._prefixes: dict[bytes, None] = {}
        self._lengths: Counter[int] = Counter()

    def add(self, prefix: bytes) -> None:
        if prefix in self._prefixes:
            return
        self._prefixes[prefix] = None
        self._lengths[len(prefix)] += 1
        if len(self._prefixes) > _MOST_ENDED:
            oldest = next(iter(self._prefixes))
            del self._prefixes[oldest]
            self._lengths[len(oldest)] -= 1

    def has(self, key: bytes) -> bool:
        return any(key[:length] in self._prefixes for length in self._lengths)


class Clears:
    """Clears one cache. backings: its tiers; queues: what is to be written to them."""

    def __init__(
        self,
        owner: Owner,
        pool: HostPool,
        backings: Sequence[Backing],
        queues: Sequence[WriteBehind],
        metrics: Metrics,
        discard: Callable[[Entry], None],
    ) -> None:
        self.ended = EndedPrefixes()
        self.owner, self.metrics = owner, metrics
        self._pool = pool
        self._tiers = tuple(zip(backings, queues, strict=True))
        self._discard = discard

    def clear(self, prefixes: Sequence[bytes], *, for_good: bool = False) -> int:
        """Discards the chunks whose keys have one of the prefixes; returns how many were in memory.

        The tiers remove theirs in the background, and may fail to. Removal there only frees space:
        an owner that must not find these chunks again stops asking for their keys.
        """
        doomed = [e for e in self._pool if e.key.startswith(tuple(prefixes))] if prefixes else []
        if for_good:
            for prefix in prefixes:
                self.ended.add(prefix)
        for entry in doomed:
            self._discard(entry)
        for backing, queue in self._tiers:
            sweep = _Sweep(self, backing, prefixes, for_good)
            queue.after_writes(doomed, sweep.begin)
        return len(doomed)


class _Sweep:
    """The removal of chunks from one tier: once, or for good until it has succeeded twice."""

    def __init__(
        self, clears: Clears, backing: Backing, prefixes: Sequence[bytes], for_good: bool
    ) -> None:
        self._owner, self._metrics = clears.owner, clears.metrics
        self._backing = backing
        self._prefixes = prefixes
        self._for_good = for_good
        self._done = 0
        self._pause_s = _AGAIN_S

    def begin(self) -> None:
        self._clear(self._prefixes, time.monotonic() + _DEADLINE_S)

    def _clear(self, prefixes: Sequence[bytes], deadline_s: float) -> None:
        """Clears one prefix after the other, and stops at the first failure."""
        if prefixes:
            cleared = posting(self._owner, partial(self._cleared, prefixes, deadline_s))
            self._backing.tier.clear(prefixes[0], deadline_s, cleared)
            return
        self._done += 1
        if self._for_good and self._done < _SWEEPS:
            self._again(_AGAIN_S)

    def _cleared(self, prefixes: Sequence[bytes], deadline_s: float, result: RemoveResult) -> None:
        is_remote = self._backing.counters.is_remote
        if is_remote:
            self._metrics.count("cleared_keys", result.removed)
        if result.outcome is CallOutcome.DONE:
            self._clear(prefixes[1:], deadline_s)
            return
        if is_remote:
            self._metrics.count("clears_failed")
            logger.warning(
                "chunks of an old epoch stay in %s%s: %s",
                self._backing.tier.name,
                f" for {self._pause_s:.0f} s" if self._for_good else "",
                result.outcome.value,
            )
        if self._for_good:
            self._again(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _AGAIN_AT_MOST_S)

    def _again(self, pause_s: float) -> None:
        self._owner.at(time.monotonic() + pause_s, self.begin)
