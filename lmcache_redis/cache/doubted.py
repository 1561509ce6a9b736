# SPDX-License-Identifier: Apache-2.0
"""What a tier must not be believed to have: chunks with doubtful bytes, and those found wrong.

A wrong chunk is removed from the tier. Until it has been, or the tier has stored the key anew, this
process neither loads it nor counts it as present, and its next write does not ask whether the tier
has it.

An attempt that fails is followed by another until one succeeds: after a pause that doubles, one at
a time while they fail, all together once one succeeds, and none while the tier is down. A later
attempt leaves alone what was stored after the chunk was found wrong, by the clock of whoever stored
it. Clocks may differ by `CLOCKS_DIFFER_MS`: a good chunk that is removed costs a miss, a wrong one
that stays costs answers.

The memory is bounded: of more wrong chunks than `MOST_KEYS` the oldest are given up, which means
that they may be loaded again, and are counted in the log when the process ends.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from lmcache_redis.cache.threads import OneTimer, Owner
from lmcache_redis.metrics import Metrics
from lmcache_redis.tiers import CallOutcome, RemoveResult, Tier

logger = logging.getLogger(__name__)

MOST_KEYS = 4096
CLOCKS_DIFFER_MS = 5000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_ROUND_KEYS = 64
# In a line of the log.
_LINE_KEYS = 16


@dataclass(slots=True, eq=False)
class WrongChunk:
    """A chunk that is to leave the tier.

    stripe_count: 0: not known. newest_unix_ms: of a later attempt, see `Tier.remove`.
    """

    key: bytes
    stripe_count: int
    newest_unix_ms: int
    has_failed: bool = False


class DoubtedChunks:
    """See the module. Owned by the cache's owner thread.

    begin: begins an attempt, which `ended` is told of; False: not now, because the key is being
    written.

    Attributes:
        wrong: chunks that were found wrong, and have not been removed.
        forgotten: how many were given up.
    """

    def __init__(
        self, tier: Tier, owner: Owner, metrics: Metrics, begin: Callable[[WrongChunk], bool]
    ) -> None:
        self.wrong: dict[bytes, WrongChunk] = {}
        self.forgotten = 0
        self._tier = tier
        self._metrics = metrics
        self._begin = begin
        self._doubtful: dict[bytes, None] = {}
        self._waiting: dict[bytes, WrongChunk] = {}  # the wrong ones with no attempt in flight
        self._pause_s = 0.0  # before the next attempt; 0: the last one has succeeded
        self._timer = OneTimer(owner, self._turn)
        self._is_stopping = False

    def __len__(self) -> int:
        """Wrong chunks that wait for another attempt."""
        return len(self._waiting)

    def distrust(self, key: bytes) -> None:
        """What was read under the key is doubtful: its next write does not ask."""
        self._doubtful[key] = None
        if len(self._doubtful) > MOST_KEYS:
            del self._doubtful[next(iter(self._doubtful))]

    def __contains__(self, key: bytes) -> bool:
        return key in self._doubtful or key in self.wrong

    def remove(self, key: bytes, stripe_count: int) -> None:
        """What the tier has under the key is wrong. stripe_count: 0: not known."""
        newest_unix_ms = time.time_ns() // 1_000_000 + CLOCKS_DIFFER_MS
        self._waiting.pop(key, None)
        self.wrong[key] = chunk = WrongChunk(key, stripe_count, newest_unix_ms)
        self._begin(chunk)

    def stored(self, key: bytes) -> None:
        """The tier has stored the key: after an attempt that has failed, before one in flight."""
        self._doubtful.pop(key, None)
        if self._waiting.pop(key, None) is not None:
            del self.wrong[key]

    def ended(self, chunk: WrongChunk, result: RemoveResult) -> None:
        """An attempt has ended."""
        is_done, is_known = result.outcome is CallOutcome.DONE, self.wrong.get(chunk.key) is chunk
        if is_done:
            self._pause_s = 0.0
        else:
            self._metrics.count("failed_removals")
            longer_s = 2 * self._pause_s if chunk.has_failed else self._pause_s
            self._pause_s = min(max(longer_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        if is_known and is_done:
            del self.wrong[chunk.key]
        elif is_known:
            self._failed(chunk, result)
        self._try_later()

    def _failed(self, chunk: WrongChunk, result: RemoveResult) -> None:
        if not (self._waiting or chunk.has_failed):
            logger.warning(
                "a chunk could not be removed from %s: %s. It is not loaded meanwhile, and its "
                "removal is tried again until it succeeds (all such are counted, and the first is "
                "logged). Its key is %s",
                self._tier.name, result.outcome.value, chunk.key.hex(),
            )  # fmt: skip
        chunk.has_failed = True
        chunk.stripe_count = max(chunk.stripe_count, result.stripe_count)
        self._waiting[chunk.key] = chunk
        if len(self._waiting) > MOST_KEYS:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest], self.wrong[oldest]
            self.forgotten += 1

    def say_what_stays(self) -> None:
        """For the log of a process that ends: the chunks that the tier may still have."""
        keys = [*self.wrong]
        if keys or self.forgotten:
            logger.error(
                "%d chunks that were to be removed may still be in %s: look at them with "
                "`lmcache-redis inspect KEY`, or remove all of a layout with `lmcache-redis purge`",
                len(keys) + self.forgotten, self._tier.name,
            )  # fmt: skip
        for first in range(0, len(keys), _LINE_KEYS):
            some = keys[first : first + _LINE_KEYS]
            logger.error(
                "not removed from %s: %s", self._tier.name, ", ".join(map(bytes.hex, some))
            )

    # ------------------------------------------------------------------- attempts

    def try_all(self) -> None:
        """Another attempt of each at once, because the owner is stopping; no more after it."""
        if not self._is_stopping:
            self._is_stopping = True
            self._try(len(self._waiting))

    def _try_later(self) -> None:
        """Unless an attempt is in flight, whose end decides."""
        if self._waiting and len(self._waiting) == len(self.wrong) and not self._is_stopping:
            pause_s = self._pause_s if self._tier.state.up else _FIRST_PAUSE_S
            self._timer.fire_in(pause_s * random.uniform(0.5, 1.0))

    def _turn(self) -> None:
        if self._tier.state.up and not self._is_stopping:
            self._try(1 if self._pause_s else _ROUND_KEYS)
        self._try_later()

    def _try(self, most: int) -> None:
        for key, chunk in [*islice(self._waiting.items(), most)]:
            del self._waiting[key]
            if not self._begin(chunk):
                self._waiting[key] = chunk  # the last of them, so that others have a turn
                self._pause_s = max(self._pause_s, _FIRST_PAUSE_S)
