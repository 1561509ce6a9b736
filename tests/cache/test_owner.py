# SPDX-License-Identifier: Apache-2.0
"""The owner's loop: posts and timers run in order; an action that fails affects no other."""

from __future__ import annotations

import pytest

from lmcache_redis.cache.threads import OneTimer, OwnerLoop


def test_timers_run_in_order_and_only_when_due() -> None:
    now = 1000.0
    loop, ran = OwnerLoop(lambda: None, lambda: now), []
    loop.at(now - 1, lambda: ran.append("second"))
    loop.at(now - 2, lambda: ran.append("first"))
    cancelled = loop.at(now - 3, lambda: ran.append("never"))
    later = loop.after(100, lambda: ran.append("later"))
    cancelled.cancel()
    assert loop.run_due() == 1.0
    assert ran == ["first", "second"]
    later.cancel()
    loop.at(now + 0.5, lambda: None)
    assert loop.run_due() == pytest.approx(0.5)


def test_an_action_that_fails_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    woken: list[bool] = []
    loop, ran = OwnerLoop(lambda: woken.append(True)), []

    def bug() -> None:
        raise RuntimeError("a bug")

    for put in (loop.post, lambda action: loop.after(0, action)):
        put(bug)
        put(lambda: ran.append(True))
    loop.post(lambda: loop.post(lambda: ran.append(True)))
    loop.run_posted()
    loop.run_due()
    assert ran == [True, True], "what an action posts waits for the next turn"
    loop.run_posted()
    assert len(ran) == 3
    assert len(woken) == 4
    assert caplog.text.count("RuntimeError: a bug") == 2


def test_what_runs_again_and_again_survives_its_bugs() -> None:
    now = 1000.0
    loop, ran = OwnerLoop(lambda: None, lambda: now), []

    def bug() -> None:
        ran.append(now)
        raise RuntimeError("a bug")

    loop.every(10, bug)
    first = now
    for passed in (0, 9, 10, 19, 20):
        now = first + passed
        loop.run_due()
    assert ran == [first + 10, first + 20]


def test_one_timer_is_set_earlier_and_not_later() -> None:
    clock, ran = [0.0], list[float]()
    loop = OwnerLoop(lambda: None, lambda: clock[0])
    timer = OneTimer(loop, lambda: ran.append(clock[0]))
    timer.fire_in(5.0)
    timer.fire_by(9.0)
    timer.fire_by(3.0)
    for clock[0] in (2.0, 3.0, 5.0, 9.0):
        loop.run_due()
    assert ran == [3.0]
    timer.fire_in(2.0)
    clock[0] = 11.0
    loop.run_due()
    assert ran == [3.0, 11.0], "it is set again and again"
