from __future__ import annotations

import random

import pytest

from lmcache_redis.resp import health
from lmcache_redis.resp.health import Breaker
from lmcache_redis.tiers import WriteOutcome


@pytest.fixture(autouse=True)
def _without_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)


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


def test_only_the_first_failure_is_a_change() -> None:
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


def test_a_server_that_stays_down_is_asked_less_and_less_often() -> None:
    breaker = Breaker(0.2, 2.0)
    pauses = []
    for now in range(6):
        breaker.failed(now, "refused")
        pauses.append(round(breaker.next_probe_at - now, 3))
    assert pauses == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_an_unsteady_server_is_asked_less_often() -> None:
    breaker = Breaker(0.2, 2.0)
    now = 100.0
    pauses = []
    for _ in range(6):
        breaker.answered(now)
        now += 0.5
        breaker.failed(now, "no connection left")
        pauses.append(round(breaker.next_probe_at - now, 3))
        now = breaker.next_probe_at
    assert pauses == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    breaker.answered(now)
    breaker.failed(now + 10.0, "gone")
    assert breaker.next_probe_at == pytest.approx(now + 10.2)


def test_probes_of_many_planes_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    fleet = [Breaker(0.2, 2.0) for _ in range(200)]
    for breaker in fleet:
        breaker.failed(0.0, "refused")
    times = sorted(breaker.next_probe_at for breaker in fleet)
    assert 0.1 <= times[0] < 0.12
    assert 0.18 < times[-1] <= 0.2
    assert times[50] < times[150] - 0.03


def test_refused_writes_are_not_sent_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(health.time, "monotonic", lambda: now)
    state = health.WritePause()
    assert state.refusal is None
    state.pause(WriteOutcome.FULL)
    assert state.refusal is WriteOutcome.FULL
    now += health.WRITE_PAUSE_S + 0.001
    assert state.refusal is None


def test_connections_are_renewed_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(health.time, "monotonic", lambda: now)
    state = health.WritePause()
    assert not state.is_outdated(50.0)
    state.renew_connections()
    assert state.is_outdated(99.0)
    assert not state.is_outdated(100.0)
    now = 104.0
    state.renew_connections()
    assert not state.is_outdated(100.0)
    now = 105.0
    state.renew_connections()
    assert state.is_outdated(104.0)
