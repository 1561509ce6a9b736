# SPDX-License-Identifier: Apache-2.0
"""Clears: chunks whose keys have a common beginning leave the pool and, in the background, tiers.

A clear removes what is there. One *for good* is of chunks that are never asked for again, such as
those of an epoch that only one engine had. Stores of that engine may still be on their way, at this
agent and at those of its other nodes; a server that answers nothing may keep what was sent to it.
So such chunks are refused from then on, and tiers are cleared again: a while after the first time,
and after a failure.

A pass over a large tier takes long. So a tier makes one at a time, of all that is due, and after a
failure the next one has twice the time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lmcache_redis.cache.pool import Entry, HostPool
from lmcache_redis.cache.threads import OneTimer, Owner, posting
from lmcache_redis.cache.writebehind import WriteBehind
from lmcache_redis.metrics import Metrics
from lmcache_redis.tiers import Backing, CallOutcome, RemoveResult

logger = logging.getLogger(__name__)

# Longer than a chunk may wait to be written, at any agent.
_AGAIN_S = 60.0
_AGAIN_AT_MOST_S = 3600.0
_PASSES = 2  # that succeed
_MOST_PREFIXES = 4096


class EndedPrefixes:
    """Beginnings of keys that were cleared for good, the newest ones."""

    def __init__(self) -> None:
        self._prefixes: dict[bytes, None] = {}
        self._lengths: set[int] = set()  # few: kinds of keys have one each

    def add(self, prefix: bytes) -> None:
        if prefix in self._prefixes:
            return
        self._prefixes[prefix] = None
        self._lengths.add(len(prefix))
        if len(self._prefixes) > _MOST_PREFIXES:
            del self._prefixes[next(iter(self._prefixes))]

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
        self._pool = pool
        self._queues = queues
        self._sweeps = [Sweeps(owner, metrics, each) for each in backings]
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
        for queue, sweeps in zip(self._queues, self._sweeps, strict=True):
            queue.after_writes(doomed, partial(sweeps.add, prefixes, for_good))
        return len(doomed)


@dataclass(slots=True, eq=False)
class _Sweep:
    """The removal of a prefix. left: passes that are to succeed, each if it is for good."""

    due_s: float
    left: int
    for_good: bool


class Sweeps:
    """Removes chunks from one tier: one pass at a time, of all prefixes that are due."""

    def __init__(self, owner: Owner, metrics: Metrics, backing: Backing) -> None:
        self._owner, self._metrics = owner, metrics
        self._backing = backing
        self._sweeps: dict[bytes, _Sweep] = {}
        self._is_sweeping = False
        self._timer = OneTimer(owner, self._begin)
        self._pause_s = _AGAIN_S  # after a failure, and the time that a pass has

    def add(self, prefixes: Sequence[bytes], for_good: bool) -> None:
        """A prefix is removed once, or for good."""
        for prefix in prefixes:
            self._sweeps[prefix] = _Sweep(self._owner.now(), _PASSES if for_good else 1, for_good)
            if len(self._sweeps) > _MOST_PREFIXES:
                del self._sweeps[next(iter(self._sweeps))]
        self._begin()

    def _begin(self) -> None:
        if self._is_sweeping:
            return
        now_s = self._owner.now()
        due = {prefix: each for prefix, each in self._sweeps.items() if each.due_s <= now_s}
        if due:
            ended = posting(self._owner, partial(self._ended, due))
            self._backing.tier.clear([*due], now_s + self._pause_s, ended)
            self._is_sweeping = True
        elif self._sweeps:
            self._timer.fire_by(min(each.due_s for each in self._sweeps.values()))

    def _ended(self, due: Mapping[bytes, _Sweep], result: RemoveResult) -> None:
        self._is_sweeping = False
        is_done, pause_s = result.outcome is CallOutcome.DONE, self._pause_s
        self._pause_s = _AGAIN_S if is_done else min(2 * pause_s, _AGAIN_AT_MOST_S)
        for_good = any(each.for_good for each in due.values())
        if self._backing.kind.is_shared:
            self._metrics.count("cleared_keys", result.removed)
            if not is_done:
                self._metrics.count("clears_failed")
                logger.warning(
                    "chunks of an old epoch stay in %s%s: %s",
                    self._backing.tier.name,
                    f" (tried again in {pause_s:.0f} s)" if for_good else "",
                    result.outcome.value,
                )
        for prefix, each in due.items():
            each.left -= is_done
            each.due_s = self._owner.now() + (_AGAIN_S if is_done else pause_s)
            is_over = not (each.left and each.for_good)
            if is_over and self._sweeps.get(prefix) is each:
                del self._sweeps[prefix]
        self._begin()
