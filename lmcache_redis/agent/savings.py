"""What loads have saved: tokens that engines did not compute, and the seconds of that.

A hit saves something when every worker of its engine has it in its blocks. It saves its tokens, and
the seconds in which the engine would have computed them, less those that its request has waited for
the lookup and the load. A load of which any part fails saves nothing, nor does a hit that the
engine does not load. Workers with other agents, on other nodes, are not seen.

For an engine that has not measured itself yet, only tokens are counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lmcache_redis.chunks.names import Reach


class Saving(NamedTuple):
    """Of one load. prefill_s: None if that is not known; below 0 if computing was faster."""

    tokens: int
    prefill_s: float | None

    @property
    def is_timed(self) -> bool:
        return self.prefill_s is not None


@dataclass
class HitLoad:
    """The load of one hit: a retrieve of each worker and group. Times are `time.monotonic()`.

    workers: of which no retrieve has ended yet. first_chunk: of the lookup. token_s: seconds in
    which the engine computes a token; 0.0: not measured. waited_s: for the lookup.
    """

    workers: set[int]
    first_chunk: int
    chunk_tokens: int
    token_s: float
    waited_s: float
    began_s: float = 0.0
    in_flight: int = 0
    failed: bool = False
    tokens: int | None = None

    def begun(self, now_s: float) -> None:
        """A retrieve has begun."""
        self.began_s = self.began_s or now_s
        self.in_flight += 1

    def ended(self, worker_id: int, tokens: int | None, now_s: float) -> Saving | None:
        """A retrieve has ended with so many tokens, or None if any chunk was not copied.

        Returns what the load has saved when it was the last one; None as well if it failed.
        """
        self.in_flight -= 1
        self.workers.discard(worker_id)
        if tokens is None:
            self.failed = True
        else:
            # A sliding window knows only the most that it may be.
            self.tokens = tokens if self.tokens is None else min(self.tokens, tokens)
        if self.failed or self.in_flight or self.workers or not self.tokens:
            return None
        waited_s = self.waited_s + now_s - self.began_s
        return Saving(self.tokens, self.tokens * self.token_s - waited_s if self.token_s else None)

    def tokens_of(self, reach: Reach, chunks: Iterable[int], skipped_tokens: int) -> int:
        """The tokens that a retrieve of these chunks of the prompt stands for.

        What reaches back to all tokens moves each of them. Of others, those before it count too:
        the engine has no need of them.
        """
        numbers = list(chunks)
        first, skipped = self.first_chunk, 0
        if reach.kind == "all":
            first, skipped = min(numbers), skipped_tokens
        return max(0, (max(numbers) + 1 - first) * self.chunk_tokens - skipped)
