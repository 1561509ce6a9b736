"""Warms an agent: sends it chunks in batches, no faster than a rate, until its host pool is full.

The agent answers a batch when it is loaded, so that the batches are all there is to stop.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lmcache_redis.admin.pace import Pace
from lmcache_redis.client.control import ControlClient
from lmcache_redis.errors import LMCacheRedisError
from lmcache_redis.messages import MAX_WARM_CHUNKS, WarmChunk, WarmOutcome

# Bytes of a batch, as seconds at the rate.
_BATCH_S = 0.25
# Chunks in a row. One may be cleared while it is loaded, or take too long.
_MOST_FAILED = 4


@dataclass(slots=True)
class WarmReport:
    """What was done so far. Of the chunks that are left nothing is known.

    chunks: by outcome. is_full: the host pool is. is_limited: the limit is reached. is_waiting: the
    agent had no time for all chunks of the last batch; they are sent again.
    """

    chunks: Counter[str] = field(default_factory=Counter)
    loaded_bytes: int = 0
    left: int = 0
    is_full: bool = False
    is_limited: bool = False
    is_waiting: bool = False
    seconds: float = 0.0

    def count(self, batch: Sequence[WarmChunk], outcomes: Sequence[WarmOutcome]) -> list[WarmChunk]:
        """Counts a batch that has ended; returns the chunks of it that were left."""
        again = []
        for chunk, outcome in zip(batch, outcomes, strict=True):
            if outcome in ("busy", "full"):
                again.append(chunk)
                continue
            self.chunks[outcome] += 1
            if outcome == "loaded":
                self.loaded_bytes += chunk.chunk_bytes
        self.is_full, self.is_waiting = "full" in outcomes, "busy" in outcomes
        return again


def take_batch(left: deque[WarmChunk], most_bytes: int, limit_bytes: int | None) -> list[WarmChunk]:
    """Takes the next chunks off ``left``: about ``most_bytes``, at least one chunk.

    At most ``limit_bytes``, so none if the next chunk is larger.
    """
    batch: list[WarmChunk] = []
    nbytes = 0
    while left and len(batch) < MAX_WARM_CHUNKS:
        nbytes += left[0].chunk_bytes
        over = batch and nbytes > most_bytes
        if over or (limit_bytes is not None and nbytes > limit_bytes):
            break
        batch.append(left.popleft())
    return batch


def warm_agent(
    agent: ControlClient,
    chunks: Iterable[WarmChunk],
    limit_bytes: int | None,
    pace: Pace,
    report: WarmReport,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Has the agent load the chunks in this order, and reports in ``report``.

    limit_bytes: to load in all; None: as much as the host pool has room for. pace: in bytes.
    progress: called after each batch. Raises ``AgentUnreachable``, and LMCacheRedisError if the
    agent cannot load.
    """
    started_s, failed = time.monotonic(), 0
    batch_bytes = int(pace.per_second * _BATCH_S)
    left = deque(chunks)
    report.left = len(left)
    try:
        while left and not report.is_full:
            before_bytes = report.loaded_bytes
            rest = None if limit_bytes is None else limit_bytes - before_bytes
            batch = take_batch(left, batch_bytes, rest)
            if not batch:
                report.is_limited = True
                return
            pace.begin()
            outcomes = agent.warm(batch)
            left.extendleft(reversed(report.count(batch, outcomes)))
            report.left = len(left)
            pace.ended(report.loaded_bytes - before_bytes)
            progress()
            failed = failed + len(batch) if {*outcomes} == {"failed"} else 0
            if failed >= _MOST_FAILED:
                raise LMCacheRedisError(
                    "the agent could not load any of the last chunks: see its log, and the state "
                    "of its Redis in `lmcache-redis status`"
                )
    finally:
        report.seconds = time.monotonic() - started_s
