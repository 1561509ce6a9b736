# SPDX-License-Identifier: Apache-2.0
"""Which hits are canaries: how often, and at most how many."""

from __future__ import annotations

import random

from lmcache_redis.client.scheduler import CANARY_SHARE, FIRST_CANARY_TOKENS, Canaries


def test_one_hit_in_so_many_is_a_canary() -> None:
    canaries = Canaries(random.Random(1).random)
    canaries.computed(10**9)
    for every in (1, 7, 100):
        taken = sum(canaries.takes(100, every) for _ in range(20_000))
        assert 0.8 <= taken * every / 20_000 <= 1.2
    assert not any(canaries.takes(100, 0) for _ in range(100))


def test_those_before_do_not_decide() -> None:
    """So a process that restarts often has as many."""
    draws = iter([0.0, 0.0, 0.99, 0.0009])
    canaries = Canaries(lambda: next(draws))
    assert [canaries.takes(1, 1000) for _ in range(4)] == [True, True, False, True]


def test_canaries_stay_within_their_share() -> None:
    canaries = Canaries(lambda: 0.0)
    assert not canaries.takes(FIRST_CANARY_TOKENS + 1, 1)
    assert canaries.takes(FIRST_CANARY_TOKENS, 1)
    assert not canaries.takes(1, 1)
    spent, computed = 0, 0
    for _ in range(1000):
        canaries.computed(700)
        computed += 700
        spent += 300 * canaries.takes(300, 1)
        assert spent <= CANARY_SHARE * computed + 1e-6
    assert spent > 0.9 * CANARY_SHARE * computed


def test_the_first_hits_may_all_be_canaries() -> None:
    """Whatever they take, and none if there are to be none."""
    canaries = Canaries(lambda: 0.99, first=3)
    assert not canaries.takes(10, 0)
    taken = [canaries.takes(FIRST_CANARY_TOKENS + 1, 1000) for _ in range(5)]
    assert taken == [True] * 3 + [False] * 2
    assert not Canaries(lambda: 0.99).takes(1, 1000)


def test_hits_that_cannot_be_compared_are_held_back_at_first() -> None:
    canaries = Canaries(lambda: 0.99, first=2)
    assert not canaries.holds_back(0), "no canaries at all"
    assert canaries.takes(1, 1000)
    held = [canaries.holds_back(1000) for _ in range(6)]
    # Not for ever: all prompts may begin with a local system prompt.
    assert held == [True] * 4 + [False] * 2
    assert not canaries.takes(1, 1000)
    assert not Canaries(lambda: 0.99).holds_back(1000)
