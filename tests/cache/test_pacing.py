# SPDX-License-Identifier: Apache-2.0
"""Rates of transfers, the queue of an engine, and which prefix is worth loading."""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.cache.pacing import Computing, TransferRate, WorthLoading, prefix_worth_loading
from tests.cache.played import World

MB = 1 << 20


@pytest.mark.parametrize(
    ("load_s", "chunk_s", "free_in_s", "worth"),
    [
        # each chunk's load, each chunk's computing, the engine's queue
        (0.1, 1.0, 0.0, 4),  # all: loading is faster
        (2.0, 1.0, 0.0, 0),  # none
        (1.0, 1.0, 0.0, 4),  # as fast: loaded, the engine has others to compute
        (2.0, 1.0, 2.0, 1),  # what arrives while the engine computes others
        (2.0, 1.0, 4.5, 2),
        (2.0, 1.0, 8.0, 4),
        (0.1, 0.0, 0.0, 0),  # computing costs nothing
        (math.inf, 1.0, 9.0, 0),  # nothing arrives
    ],
)
def test_the_first_token_decides(
    load_s: float, chunk_s: float, free_in_s: float, worth: int
) -> None:
    loads = [(chunks, chunks * load_s if chunks else 0.0) for chunks in range(5)]
    assert prefix_worth_loading(loads, 4, chunk_s, free_in_s) == worth


@given(st.lists(st.floats(0.0, 10.0), max_size=8), st.floats(0.001, 5.0), st.floats(0.0, 20.0))
def test_it_is_never_expected_later_than_by_computing(
    steps: list[float], chunk_s: float, free_in_s: float
) -> None:
    loads = [(count, sum(steps[:count])) for count in range(len(steps) + 1)]
    worth = prefix_worth_loading(loads, len(steps), chunk_s, free_in_s)

    def first_token_s(count: int) -> float:
        return max(loads[count][1], free_in_s) + (len(steps) - count) * chunk_s

    assert first_token_s(worth) == min(first_token_s(count) for count in range(len(steps) + 1))


def test_a_rate_is_the_bytes_that_arrived_in_busy_time() -> None:
    rate = TransferRate()
    assert (rate.per_second(), rate.seconds(MB, 0.0)) == (0.0, math.inf), "nothing is known"
    for second in range(100):
        at_s = second * 10.0  # idle most of the time
        rate.begun(MB, at_s)
        rate.begun(MB, at_s)
        rate.ended(MB, at_s + 0.1, arrived=True)
        rate.ended(MB, at_s + 0.2, arrived=True)
    assert rate.per_second() == pytest.approx(10 * MB)
    assert rate.seconds(5 * MB, 1000.0) == pytest.approx(0.5)


def test_a_rate_follows_a_change_within_seconds() -> None:
    rate, now_s = TransferRate(), 0.0

    def load(seconds: float) -> None:
        nonlocal now_s
        rate.begun(MB, now_s)
        now_s += seconds
        rate.ended(MB, now_s, arrived=True)

    for _ in range(1000):
        load(0.001)
    assert rate.per_second() == pytest.approx(1000 * MB, rel=0.01)
    load(2.0)
    assert rate.per_second() < 40 * MB
    for _ in range(3000):
        load(0.001)
    assert rate.per_second() > 900 * MB


@pytest.mark.parametrize("idle_s", [10.0, 1e9])
def test_one_chunk_after_a_pause_shows_a_faster_tier(idle_s: float) -> None:
    """It is a probe, and takes too short to change the rate by its own time."""
    rate = TransferRate()
    rate.begun(10 * MB, 1.0)
    rate.ended(10 * MB, 41.0, arrived=True)
    assert rate.per_second() == pytest.approx(MB / 4)
    rate.begun(MB, 41.0 + idle_s)
    assert rate.per_second() == pytest.approx(MB / 4)
    rate.ended(MB, 41.0 + idle_s + 2**-6, arrived=True)
    assert rate.per_second() > 20 * MB


def test_a_stall_is_expected_to_last_as_long_again() -> None:
    rate = TransferRate()
    rate.begun(100 * MB, 0.0)
    rate.ended(50 * MB, 0.5, arrived=True)
    rate.ended(50 * MB, 1.0, arrived=True)
    rate.begun(10 * MB, 2.0)
    assert rate.seconds(10 * MB, 2.05) == pytest.approx(0.1), "it may arrive in time"
    assert rate.seconds(10 * MB, 5.0) == pytest.approx(3.0)


def test_a_load_alone_shows_too_high_a_rate() -> None:
    """What a token bucket has saved up passes at once: counted on is a quarter less."""
    rate = TransferRate()
    for at_s in (0.0, 1.0):
        rate.begun(MB, at_s)
        rate.ended(MB, at_s + 0.1, arrived=True)
    assert rate.per_second() == pytest.approx(10 * MB)
    assert rate.expected_s(8 * MB, 2.0) == pytest.approx(1.0)
    rate.begun(2 * MB, 2.0)
    rate.ended(MB, 2.1, arrived=True)
    assert rate.expected_s(8 * MB, 2.1) == pytest.approx(1.0)
    assert rate.seconds(8 * MB, 2.1) == pytest.approx(0.8), "what has begun is not given up for it"
    rate.ended(MB, 2.2, arrived=True)
    assert rate.expected_s(8 * MB, 2.2) == pytest.approx(0.8), "the second one had nothing saved up"
    rate.begun(MB, 10.0)
    rate.ended(MB, 10.1, arrived=True)
    assert rate.expected_s(8 * MB, 10.1) == pytest.approx(1.0), "after a pause again"


def test_the_latency_is_not_part_of_the_rate() -> None:
    """Else a far server would never be worth it: one chunk is mostly latency."""
    rate = TransferRate()
    rate.answered(0.1)
    for second in range(10):
        rate.begun(MB, second)
        rate.begun(MB, second)
        rate.ended(MB, second + 0.15, arrived=True)
        rate.ended(MB, second + 0.2, arrived=True)
    assert rate.per_second() == pytest.approx(20 * MB)
    assert rate.seconds(10 * MB, 20.0) == pytest.approx(0.6)


def test_a_late_answer_does_not_raise_a_rate_much() -> None:
    rate = TransferRate()
    rate.answered(5.0)
    rate.begun(MB, 0.0)
    rate.ended(MB, 0.1, arrived=True)
    assert rate.per_second() == pytest.approx(40 * MB)


def test_the_latency_is_that_of_quick_answers() -> None:
    rate = TransferRate()
    for took_s in (0.5, 0.01, 0.4, 0.01, 0.4):
        rate.answered(took_s)
    assert 0.01 < rate.latency_s < 0.03
    for _ in range(100):
        rate.answered(0.4)
    assert rate.latency_s > 0.3, "the way has become longer"


def test_given_up_loads_lower_the_rate_until_others_arrive() -> None:
    rate = TransferRate()
    rate.begun(1000 * MB, 0.0)
    rate.ended(1000 * MB, 1.0, arrived=True)
    rate.begun(10 * MB, 2.0)
    rate.gave_up(4.0)
    rate.ended(10 * MB, 4.0, arrived=False)
    assert rate.per_second() == pytest.approx(2.5 * MB)
    rate.begun(100 * MB, 5.0)
    rate.ended(100 * MB, 5.1, arrived=True)
    assert rate.per_second() > 25 * MB


def test_giving_up_does_not_raise_a_rate() -> None:
    rate = TransferRate()
    rate.begun(MB, 0.0)
    rate.ended(MB, 1.0, arrived=True)
    rate.begun(1000 * MB, 2.0)
    rate.gave_up(2.1)
    assert rate.per_second() == pytest.approx(MB)


def test_a_server_that_does_not_answer_is_no_longer_known() -> None:
    rate = TransferRate()
    rate.begun(MB, 0.0)
    rate.ended(MB, 1.0, arrived=True)
    rate.gave_up(2.0)
    assert (rate.per_second(), rate.is_slow) == (0.0, True)
    assert rate.may_probe(2.0)


def test_what_is_cancelled_says_nothing() -> None:
    rate = TransferRate()
    rate.begun(MB, 0.0)
    rate.ended(MB, 1.0, arrived=True)
    rate.begun(50 * MB, 1.0)
    rate.ended(50 * MB, 1.5, arrived=False)
    assert rate.per_second() == pytest.approx(MB)


def test_what_is_not_known_or_old_is_measured_alone() -> None:
    rate = TransferRate()
    assert rate.may_probe(100.0)
    rate.begun(MB, 100.0)
    assert not rate.may_probe(130.0), "what is in flight shows the rate"
    rate.ended(MB, 130.0, arrived=True)
    assert not rate.may_probe(139.9)
    assert rate.may_probe(140.0)
    rate.begun(MB, 140.0)
    assert not rate.may_probe(180.0)


def test_who_waits_for_a_load_is_told_once() -> None:
    rate, told = TransferRate(), list[str]()
    rate.begun(2 * MB, 0.0)
    rate.when_one_ends(lambda: told.append("first"))
    rate.ended(MB, 1.0, arrived=False)
    rate.ended(MB, 2.0, arrived=True)
    assert told == ["first"]


# ------------------------------------------------------------ worth loading


def worth_loading(free_in_s: float = 0.0) -> WorthLoading:
    """A prompt that is computed in 24 s, after ``free_in_s``; the share of it is a second."""
    engine = Computing()
    engine.told(1.0, free_in_s, (), 100.0)
    return WorthLoading(engine, 6, 4)


def known_rate() -> TransferRate:
    rate = TransferRate()
    rate.begun(2 * MB, 0.0)
    for second in (1.0, 2.0):
        rate.ended(MB, second, arrived=True)
    return rate


def test_a_tier_that_is_not_known_gets_a_share_of_the_computing() -> None:
    worth, rate = worth_loading(), TransferRate()
    assert worth.patience_s(rate, 100.0) == pytest.approx(1.0)
    assert not worth.waits_for(rate, 100.0), "nothing is in flight"
    rate.begun(MB, 100.5)
    assert worth.waits_for(rate, 100.9)
    assert not worth.waits_for(rate, 101.1), "since it began to wait"


def test_what_has_stalled_before_is_not_waited_for() -> None:
    worth, rate = worth_loading(), TransferRate()
    rate.begun(MB, 98.9)
    assert not worth.waits_for(rate, 100.0)


def test_waiting_costs_nothing_while_the_engine_computes_others() -> None:
    worth, rate = worth_loading(free_in_s=30), TransferRate()
    assert worth.patience_s(rate, 100.0) == pytest.approx(31.0)
    rate.begun(MB, 100.0)
    assert worth.waits_for(rate, 100.0)
    assert worth.waits_for(rate, 130.0)


def test_a_fast_tier_may_take_as_long_as_computing() -> None:
    worth, rate = worth_loading(), known_rate()
    assert worth.patience_s(rate, 100.0) == pytest.approx(24.0)
    rate.is_slow = True
    assert worth.patience_s(rate, 100.0) == pytest.approx(1.0)


def test_a_server_far_away_is_asked_only_if_that_is_worth_it() -> None:
    worth, rate = worth_loading(), known_rate()
    assert worth.is_quick(rate)
    rate.answered(2.0)
    assert not worth.is_quick(rate)


# -------------------------------------------------------------------- engines


def test_an_engine_computes_one_prompt_after_the_other() -> None:
    engine = Computing()
    engine.answered("first", 1000, 5.0)
    assert engine.free_in_s(5.0) == 0.0, "not measured yet"
    engine.told(0.001, 0.0, ["first"], 10.0)
    engine.answered("second", 1000, 10.0)
    engine.answered("third", 500, 10.5)
    assert engine.free_in_s(10.5) == pytest.approx(1.0)
    assert engine.free_in_s(20.0) == 0.0


def test_what_an_engine_says_it_has_begun_counts_once() -> None:
    """It was answered, and it is a part of the seconds that the engine says."""
    engine = Computing()
    engine.told(0.001, 0.0, (), 10.0)
    engine.answered("begun", 3000, 10.0)
    engine.answered("waits", 500, 10.0)
    engine.told(0.001, 2.0, ["begun", "another agent's"], 11.0)
    assert engine.free_in_s(11.0) == pytest.approx(2.5)
    engine.told(0.001, 0.0, ["waits"], 11.5)
    assert engine.free_in_s(11.5) == 0.0, "whatever was expected before"


def test_what_has_ended_is_not_computed() -> None:
    engine = Computing()
    engine.told(0.001, 1.0, (), 10.0)
    engine.answered("aborted", 3000, 10.0)
    engine.answered("again", 200, 10.0)
    engine.answered("again", 500, 10.0)
    assert engine.free_in_s(10.0) == pytest.approx(4.5), "a request counts once"
    engine.ended("aborted")
    engine.ended("never asked for")
    assert engine.free_in_s(10.0) == pytest.approx(1.5)
    engine.ended("again")
    assert engine.free_in_s(10.0) == pytest.approx(1.0)


# --------------------------------------------------------------- a full pool


def test_urgent_lookups_wait_before_the_others() -> None:
    world, told = World([]), list[str]()
    queue = world.cache.waiting
    for who, nbytes, urgent in (("a", 1, False), ("b", 20, False), ("c", 300, True)):
        queue.wait(who, nbytes, partial(told.append, who), urgent)
    queue.wait("d", 4000, partial(told.append, "d"), True)
    assert [queue.bytes_before(who) for who in "cdabx"] == [0, 300, 4300, 4301, 4321]
    assert [queue.is_turn_of(who, urgent=False) for who in "cdax"] == [True, False, False, False]
    assert not queue.is_turn_of("x", urgent=True)
    queue.leave("c")
    queue.leave("x")
    queue.leave("d")
    assert queue.is_turn_of("x", urgent=True)
    queue.wait("a", 2, partial(told.append, "a again"), False)
    assert (queue.bytes_before("b"), len(queue)) == (2, 2), "it keeps its place"
    world.loop.run_posted()
    assert told == ["a again"], "the first is told of room, once"
