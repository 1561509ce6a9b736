# SPDX-License-Identifier: Apache-2.0
"""How long a lookup waits for chunks that another engine is said to be storing, without I/O.

A prefill engine has answered, and the last chunks of its prompt are still being copied, queued or
being written, also by another agent. Nothing tells when they are there. So the lookup looks again.
"""

from __future__ import annotations

import random

from lmcache_redis.cache.pacing import Computing

_FIRST_PAUSE_S = 0.005
_MOST_PAUSE_S = 0.1
_NOT_MEASURED_S = 1.0


class AwaitedChunks:
    """The first ``chunks`` of a lookup. Times are of the owner's clock.

    They are waited for no longer than the engine would compute those that were missing at first,
    and since one came last, those that are still missing. until_s: nor after that.

    Attributes:
        since_s: the beginning of the wait; None: there was none.
    """

    def __init__(self, computing: Computing, chunks: int, until_s: float) -> None:
        self.since_s: float | None = None
        self._computing = computing
        self._chunks = chunks
        self._limit_s = until_s
        self._first_missing = self._missing = chunks + 1
        self._until_s = 0.0
        self._pause_s = 0.0

    def came(self, found_chunks: int) -> int:
        """How many have come since the beginning of the wait."""
        missing = max(0, self._chunks - found_chunks)
        return 0 if self.since_s is None else max(0, self._first_missing - missing)

    def pause_s(self, found_chunks: int, chunk_tokens: int, now_s: float) -> float:
        """The pause before the lookup looks again; 0.0: it does not, because none is missing or
        their time is over. found_chunks: the length of the prefix that it has found.
        """
        missing = self._chunks - found_chunks
        if missing <= 0:
            return 0.0
        if missing < self._missing:
            patience_s = self._compute_s(missing * chunk_tokens, now_s)
            if self.since_s is None:
                self.since_s, self._first_missing = now_s, missing
                self._limit_s = min(self._limit_s, now_s + patience_s)
            self._missing = missing
            self._until_s = min(self._limit_s, now_s + patience_s)
            self._pause_s = _FIRST_PAUSE_S
        left_s = self._until_s - now_s
        if left_s < _FIRST_PAUSE_S:
            return 0.0
        pause_s = min(self._pause_s * random.uniform(0.5, 1.0), left_s)
        self._pause_s = min(2 * self._pause_s, _MOST_PAUSE_S)
        return pause_s

    def _compute_s(self, tokens: int, now_s: float) -> float:
        """Until the engine could have computed them; a guess if it has not measured itself."""
        token_s = self._computing.token_s
        return self._computing.free_in_s(now_s) + tokens * token_s if token_s else _NOT_MEASURED_S
