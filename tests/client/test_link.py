"""The next task of a link, by its state and the times of the last messages."""

from __future__ import annotations

import pytest

from lmcache_redis.client.link import Duty, LinkState, next_duty


@pytest.mark.parametrize(
    ("state", "heard_ago_s", "sent_ago_s", "duty"),
    [
        (LinkState.OFFLINE, 99.0, 0.1, Duty.NOTHING),
        (LinkState.OFFLINE, 99.0, 0.3, Duty.HELLO),
        (LinkState.GREETING, 99.0, 0.3, Duty.HELLO),
        (LinkState.REFUSED, 0.1, 4.9, Duty.NOTHING),
        (LinkState.REFUSED, 0.1, 5.1, Duty.HELLO),
        (LinkState.ONLINE, 0.1, 0.4, Duty.NOTHING),
        (LinkState.ONLINE, 0.1, 0.6, Duty.PING),
        (LinkState.ONLINE, 1.4, 0.6, Duty.PING),
        (LinkState.ONLINE, 1.6, 0.1, Duty.RECONNECT),  # silent, whatever was sent
    ],
)
def test_next_duty(state: LinkState, heard_ago_s: float, sent_ago_s: float, duty: Duty) -> None:
    found = next_duty(
        state,
        now_s=1000.0,
        heard_s=1000.0 - heard_ago_s,
        sent_s=1000.0 - sent_ago_s,
        dead_after_s=1.5,
    )
    assert found is duty
