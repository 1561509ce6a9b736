"""What a tier must not be believed to have: chunks with doubtful bytes, and those being removed.

A chunk is being removed from when that is asked for until the tier has removed it, or has stored
the key anew. Until then this process neither loads it nor counts it as present, and its next write
does not ask whether the tier has it.

A removal that fails is tried again until it succeeds: after a pause that doubles, one at a time
while they fail, all together once one succeeds, and none while the tier is down. A later attempt
names the store that was to be removed, if that is known: a tier that sees another one under the key
leaves it alone, since it was stored after the removal was asked for.

The memory is bounded: of more removals than `MOST_KEYS` the oldest are given up.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from lmcache_redis.cache.threads import Owner
from lmcache_redis.metrics import Metrics
from lmcache_redis.tiers import CallOutcome, Done, RemoveResult, Tier

logger = logging.getLogger(__name__)

MOST_KEYS = 4096
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_ROUND_KEYS = 64
# In a line of the log.
_LINE_KEYS = 16


@dataclass(slots=True, eq=False)
class Removal:
    """A chunk that is to leave the tier.

    done: told how the first attempt has ended, and no later one. stripe_count: 0: not known.
    store_id: of the store that is to be removed; empty: whatever is there. is_again: an attempt
    has failed.
    """

    key: bytes
    deadline_s: float
    done: Done[RemoveResult]
    stripe_count: int = 0
    store_id: bytes = b""
    is_again: bool = False


class DoubtedChunks:
    """See the module. Owned by the cache's owner thread.

    begin: begins another attempt; False: not now, because the key is being written. forgotten:
    removals that were given up, because too many wait.
    """

    def __init__(
        self, tier: Tier, owner: Owner, metrics: Metrics, begin: Callable[[Removal], bool]
    ) -> None:
        self.forgotten = 0
        self.is_stopping = False  # no attempt waits for its turn any more
        self._tier = tier
        self._owner = owner
        self._metrics = metrics
        self._begin = begin
        self._doubtful: dict[bytes, None] = {}
        self._removing: dict[bytes, Removal] = {}  # asked for, and not ended
        self._waiting: dict[bytes, Removal] = {}  # those of them that have failed
        self._round: set[Removal] = set()  # attempts in flight that are not the first
        self._pause_s = 0.0  # before the next ones; 0: the last ones have succeeded
        self._is_timed = False

    def __len__(self) -> int:
        """Removals that have failed, and wait for another attempt."""
        return len(self._waiting)

    def distrust(self, key: bytes) -> None:
        """What was read under the key is doubtful: its next write does not ask."""
        self._doubtful[key] = None
        if len(self._doubtful) > MOST_KEYS:
            del self._doubtful[next(iter(self._doubtful))]

    def __contains__(self, key: bytes) -> bool:
        return key in self._doubtful or key in self._removing

    def is_removing(self, key: bytes) -> bool:
        return key in self._removing

    @property
    def is_removing_some(self) -> bool:
        return bool(self._removing)

    # ------------------------------------------------------------ the ends of removals

    def asked(self, removal: Removal) -> None:
        """A removal is asked for, instead of an earlier one of the key."""
        self._waiting.pop(removal.key, None)
        self._removing[removal.key] = removal

    def stored(self, key: bytes) -> None:
        """The tier has stored the key. That was after a removal that has failed, if there is one,
        and before one in flight."""
        self._doubtful.pop(key, None)
        if self._waiting.pop(key, None) is not None:
            del self._removing[key]

    def ended(self, removal: Removal, outcome: CallOutcome) -> None:
        """An attempt has ended."""
        key, is_done = removal.key, outcome is CallOutcome.DONE
        if self._removing.get(key) is removal:
            if is_done:
                del self._removing[key]
                self._doubtful.pop(key, None)
            else:
                self._failed(removal, outcome)
        if removal in self._round:
            self._round.remove(removal)
            longer_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            self._pause_s = 0.0 if is_done else longer_s
        self._try_later()

    def _failed(self, removal: Removal, outcome: CallOutcome) -> None:
        self._metrics.count("failed_removals")
        if not (self._waiting or removal.is_again):
            logger.warning(
                "a chunk could not be removed from %s: %s. It is not loaded meanwhile, and its "
                "removal is tried again until it succeeds (all such are counted, and the first is "
                "logged). Its key is %s",
                self._tier.name, outcome.value, removal.key.hex(),
            )  # fmt: skip
        if not removal.is_again:
            removal.is_again = True
            self._pause_s = max(self._pause_s, _FIRST_PAUSE_S)
        self._waiting[removal.key] = removal
        if len(self._waiting) > MOST_KEYS:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest], self._removing[oldest]
            self.forgotten += 1

    def say_what_stays(self, most: int = MOST_KEYS) -> None:
        """For the log of a process that ends: the chunks that the tier may still have.

        most: that are named.
        """
        keys = [*self._removing]
        if keys or self.forgotten:
            logger.error(
                "%d chunks that were to be removed may still be in %s: look at them with "
                "`lmcache-redis inspect KEY`, or remove all of a layout with `lmcache-redis purge`",
                len(keys) + self.forgotten, self._tier.name,
            )  # fmt: skip
        for first in range(0, min(len(keys), most), _LINE_KEYS):
            some = keys[first : first + _LINE_KEYS]
            logger.error(
                "not removed from %s: %s", self._tier.name, ", ".join(map(bytes.hex, some))
            )

    # ------------------------------------------------------------------- attempts

    def try_all(self) -> None:
        """Another attempt of each at once, because the owner is stopping; no more after it."""
        if not self.is_stopping:
            self.is_stopping = True
            self._try(len(self._waiting))

    def _try_later(self) -> None:
        if self._is_timed or self._round or not self._waiting or self.is_stopping:
            return
        self._is_timed = True
        pause_s = self._pause_s if self._tier.state.up else _FIRST_PAUSE_S
        due_s = time.monotonic() + pause_s * random.uniform(0.5, 1.0)
        self._owner.at(due_s, self._turn)

    def _turn(self) -> None:
        self._is_timed = False
        if self._tier.state.up and not self.is_stopping:
            self._try(1 if self._pause_s else _ROUND_KEYS)
        self._try_later()

    def _try(self, most: int) -> None:
        for key, removal in [*islice(self._waiting.items(), most)]:
            del self._waiting[key]
            self._round.add(removal)
            if not self._begin(removal):
                self._round.remove(removal)
                self._waiting[key] = removal  # the last of them, so that others have a turn
                self._pause_s = max(self._pause_s, _FIRST_PAUSE_S)
