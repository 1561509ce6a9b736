# SPDX-License-Identifier: Apache-2.0
"""The wait for chunks that another engine stores is bounded by what computing them takes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from lmcache_redis.cache.awaiting import AwaitedChunks
from lmcache_redis.cache.pacing import Computing

CHUNK_TOKENS = 100
CHUNK_S = 0.1  # to compute one
NEAR_S = 0.005  # the shortest pause that is worth it


def computing(token_s: float = CHUNK_S / CHUNK_TOKENS, busy_s: float = 0.0) -> Computing:
    engine = Computing()
    engine.told(token_s, busy_s, (), 0.0)
    return engine


def wait(
    awaited: AwaitedChunks, found: Callable[[float], int], now_s: float = 0.0
) -> tuple[float, int]:
    """When it ends, and how often the lookup has looked. found: chunks there at a time."""
    looks = 1
    while pause_s := awaited.pause_s(found(now_s), CHUNK_TOKENS, now_s):
        assert 0 < pause_s <= 0.1
        now_s, looks = now_s + pause_s, looks + 1
    return now_s, looks


@pytest.mark.parametrize(
    ("chunks", "busy_s", "until_s", "waited_s"),
    [
        (0, 0.0, math.inf, 0.0),
        (8, 0.0, math.inf, 0.8),
        (8, 0.0, 0.5, 0.5),
        (8, 0.4, math.inf, 1.2),  # the engine could not begin before
    ],
)
def test_what_never_comes_costs_at_most_the_time_of_computing(
    chunks: int, busy_s: float, until_s: float, waited_s: float
) -> None:
    awaited = AwaitedChunks(computing(busy_s=busy_s), chunks, until_s)
    ended_s, looks = wait(awaited, lambda now_s: 0)
    assert waited_s - NEAR_S <= ended_s <= waited_s + 1e-9
    assert looks < 4 + ended_s / 0.05 + 5, "they become rarer"
    assert awaited.came(0) == 0


def test_pauses_double_up_to_a_tenth_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda least, most: most)
    awaited, now_s, pauses = AwaitedChunks(computing(), 8, math.inf), 0.0, list[float]()
    while pause_s := awaited.pause_s(0, CHUNK_TOKENS, now_s):
        now_s += pause_s
        pauses.append(pause_s)
    assert pauses[:7] == [0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.1]


def test_an_engine_without_a_measure_waits_for_a_second() -> None:
    ended_s, _ = wait(AwaitedChunks(computing(0.0), 8, 3.0), lambda now_s: 0)
    assert 1.0 - NEAR_S <= ended_s <= 1.0


def test_a_wait_of_nothing_is_none() -> None:
    awaited = AwaitedChunks(computing(1e-9), 8, math.inf)
    assert awaited.pause_s(0, CHUNK_TOKENS, 0.0) == 0.0
    assert AwaitedChunks(computing(NEAR_S), 1, math.inf).pause_s(0, 1, 0.0) > 0.0, "the shortest"
    awaited = AwaitedChunks(computing(), 8, math.inf)
    assert awaited.pause_s(8, CHUNK_TOKENS, 0.0) == 0.0
    assert awaited.since_s is None
    assert awaited.came(8) == 0, "they were there before"


def test_a_wait_ends_when_all_are_there() -> None:
    awaited = AwaitedChunks(computing(), 8, math.inf)
    ended_s, _ = wait(awaited, lambda now_s: 2 if now_s < 0.3 else 8)
    assert 0.3 <= ended_s <= 0.4
    assert awaited.came(8) == 6
    assert awaited.came(11) == 6, "of those that were said to be stored"


def test_the_last_ones_are_not_waited_for_as_long_as_all() -> None:
    """Seven come, and the last one is lost: it takes as long to compute as one."""
    awaited = AwaitedChunks(computing(), 8, math.inf)
    ended_s, _ = wait(awaited, lambda now_s: 0 if now_s < 0.2 else 7)
    assert 0.2 + CHUNK_S - NEAR_S <= ended_s <= 0.2 + 2 * CHUNK_S
    assert awaited.came(7) == 7


def test_chunks_that_trickle_in_do_not_extend_the_wait() -> None:
    awaited = AwaitedChunks(computing(), 8, math.inf)
    ended_s, _ = wait(awaited, lambda now_s: int(now_s / 0.19))
    assert ended_s <= 0.8 + 1e-9
    assert awaited.came(4) == 4


def test_what_is_evicted_meanwhile_is_no_news() -> None:
    awaited = AwaitedChunks(computing(), 8, math.inf)
    ended_s, _ = wait(awaited, lambda now_s: 5 if now_s < 0.05 else 3)
    assert ended_s <= 3 * CHUNK_S + 1e-9
    assert awaited.came(3) == 0
