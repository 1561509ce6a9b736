"""Clears: the chunks of an epoch leave the host pool at once, disk and Redis in the background.

An engine that clears has begun a new epoch by itself and never asks for the old one's chunks
again. So nothing here has to succeed: it gives memory back, on this node and in Redis.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

from lmcache_redis.agent.core import Core
from lmcache_redis.agent.registration import ChunkForm
from lmcache_redis.agent.writes import Writes
from lmcache_redis.resp.outcomes import CallOutcome, ClearResult

logger = logging.getLogger(__name__)

# Large servers hold millions of keys, and a clear gives way to everything else.
_REDIS_S = 60.0


def clear(core: Core, writes: Writes, forms: Sequence[ChunkForm], epoch: bytes | None) -> int:
    """Removes the chunks of ``epoch``, or all, of these layouts; returns how many the pool had."""
    prefixes = tuple(sorted({prefix for form in forms for prefix in form.prefixes(epoch)}))
    doomed = [entry for entry in core.pool if entry.key.startswith(prefixes)] if prefixes else []
    for entry in doomed:
        core.pool.discard(entry)
        writes.cancel(entry)
    core.metrics.count("clears")
    if core.disk is not None:
        core.disk.clear(forms, epoch)
    _clear_redis(core, prefixes, time.monotonic() + _REDIS_S)
    return len(doomed)


def _clear_redis(core: Core, prefixes: Sequence[bytes], deadline_s: float) -> None:
    """One prefix after the other."""
    if not prefixes:
        return

    def cleared(result: ClearResult) -> None:
        if result.outcome is not CallOutcome.DONE:
            core.metrics.count("clears_failed")
            logger.warning("chunks of an old epoch stay in Redis: %s", result.outcome.value)
            return
        core.metrics.count("cleared_keys", result.removed)
        _clear_redis(core, prefixes[1:], deadline_s)

    core.plane.clear(prefixes[0], deadline_s, lambda result: core.post(partial(cleared, result)))
