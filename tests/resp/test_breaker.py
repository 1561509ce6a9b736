from __future__ import annotations

from lmcache_redis.resp.health import Breaker


def test_down_until_a_probe_is_answered() -> None:
    breaker = Breaker(probe_interval_s=0.2, heartbeat_s=2.0)
    assert not breaker.up
    assert breaker.next_probe_at <= 0.0
    assert breaker.answered(10.0)
    assert breaker.up
    assert breaker.since == 10.0
    assert breaker.next_probe_at == 12.0
    assert not breaker.answered(12.0)
    assert breaker.since == 10.0


def test_the_first_failure_is_a_change_and_the_second_is_none() -> None:
    breaker = Breaker(0.2, 2.0)
    assert breaker.failed(1.0, "refused")
    assert breaker.probed
    assert breaker.next_probe_at == 1.2
    assert not breaker.failed(1.2, "refused still")
    assert breaker.reason == "refused still"


def test_up_and_down_are_told_once_each() -> None:
    breaker = Breaker(0.2, 2.0)
    breaker.answered(0.0)
    assert breaker.failed(5.0, "gone")
    assert breaker.since == 5.0
    assert not breaker.failed(5.2, "gone")
    assert breaker.since == 5.0
    assert breaker.answered(6.0)
    assert breaker.reason == ""


def test_a_suspicion_moves_the_heartbeat_only() -> None:
    breaker = Breaker(0.2, 2.0)
    breaker.suspected(0.0)
    assert not breaker.up
    breaker.answered(1.0)
    breaker.suspected(1.5)
    assert breaker.up
    assert breaker.next_probe_at == 1.5


def test_a_refusal_is_not_retried_soon() -> None:
    breaker = Breaker(0.2, 2.0)
    breaker.failed(1.0, "wrong password", retry_after_s=1.0)
    assert breaker.next_probe_at == 2.0


def test_an_unsteady_server_is_asked_less_often_but_every_second() -> None:
    breaker = Breaker(0.2, 2.0)
    now = 100.0
    pauses = []
    for _ in range(6):
        breaker.answered(now)
        now += 0.5
        breaker.failed(now, "no connection left")
        pauses.append(round(breaker.next_probe_at - now, 3))
        now = breaker.next_probe_at
    assert pauses == [0.4, 0.8, 1.0, 1.0, 1.0, 1.0]
    breaker.answered(now)
    breaker.failed(now + 10.0, "gone")
    assert breaker.next_probe_at == now + 10.2
