"""The outcome of a chunk's load from those of its stripes, in any order."""

from __future__ import annotations

import itertools
import time

import pytest

from lmcache_redis.resp import ChunkIO, ReadOutcome
from lmcache_redis.resp.jobs import Jobs
from lmcache_redis.resp.transfers import Read, Verified
from tests.resp.helpers import Chunk

A, B = b"a" * 16, b"b" * 16
GOOD, OTHER = Verified(None, A), Verified(None, B)
GONE, BAD = Verified(ReadOutcome.INCOMPLETE), Verified(ReadOutcome.CORRUPT)


class Answered:
    """A load of three stripes, all in flight."""

    def __init__(self) -> None:
        self.outcomes: list[ReadOutcome] = []
        self.jobs = Jobs()
        self.read = Read(Chunk(1, 300, 100).io(), self._done, time.monotonic())
        assert self.jobs.begin_all([(self.read,)] * 3)

    def _done(self, chunk: ChunkIO, outcome: ReadOutcome) -> None:
        self.outcomes.append(outcome)

    def end(self, index: int, verified: Verified) -> None:
        with self.jobs.lock:
            self.read.ended(index, *verified)
        self.jobs.conclude((self.read,))


@pytest.mark.parametrize(
    ("ends", "allowed"),
    [
        ((GOOD, GOOD, GOOD), {ReadOutcome.LOADED}),
        ((GOOD, GOOD, OTHER), {ReadOutcome.TORN}),
        ((OTHER, GOOD, GOOD), {ReadOutcome.TORN}),
        ((GOOD, GONE, GOOD), {ReadOutcome.INCOMPLETE}),
        ((GOOD, GONE, GONE), {ReadOutcome.INCOMPLETE}),
        # Without stripe 0 a store may be in flight.
        ((GONE, GOOD, GOOD), {ReadOutcome.MISSING}),
        ((GONE, GONE, GONE), {ReadOutcome.MISSING}),
        ((GONE, GOOD, OTHER), {ReadOutcome.MISSING, ReadOutcome.TORN}),
        ((BAD, GOOD, GOOD), {ReadOutcome.CORRUPT}),
        ((GOOD, GOOD, BAD), {ReadOutcome.CORRUPT}),
        # Stripe 0 is there, if damaged: whichever is found first.
        ((BAD, GONE, GOOD), {ReadOutcome.CORRUPT, ReadOutcome.INCOMPLETE}),
        ((GOOD, GONE, OTHER), {ReadOutcome.INCOMPLETE, ReadOutcome.TORN}),
    ],
)
def test_of_stripes_in_any_order(ends: tuple[Verified, ...], allowed: set[ReadOutcome]) -> None:
    for order in itertools.permutations(range(3)):
        answered = Answered()
        for index in order:
            assert answered.outcomes == []
            answered.end(index, ends[index])
        (outcome,) = answered.outcomes
        assert outcome in allowed, order
