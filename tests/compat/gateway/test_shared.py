"""Counters and log lines."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from lmcache_redis.compat.gateway.shared import Counters, QuietLog
from tests.compat.gateway.serving import DictTier, Serving
from tests.compat.gateway.wire import KEY


def test_a_flood_is_one_line_and_its_size(caplog: pytest.LogCaptureFixture) -> None:
    log = QuietLog(logging.getLogger(__name__), silence_s=3600)
    for number in range(100):
        log.warning("a", "number %d", number)
    log.warning("b", "another kind")
    assert caplog.messages == ["number 0", "another kind"]
    log = QuietLog(logging.getLogger(__name__), silence_s=0.05)
    for _ in range(3):
        log.warning("a", "again %s", "%s")
    log._kinds["a"] = (0.0, log._kinds["a"][1])  # as if the time had passed
    log.warning("a", "again %s", "%s")
    assert caplog.messages[2:] == ["again %s", "again %s (2 more like it since the last such line)"]


def test_the_figures_have_names() -> None:
    with Serving(DictTier()) as serving:
        stats = serving.stats()
    names = (field.name for field in dataclasses.fields(Counters))
    assert set(stats) == {*names, "open_connections", "slots", "slots_in_use"}


def test_what_is_not_stored_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tier = DictTier()
    tier.refuses = True
    with Serving(tier) as serving, serving.client() as client:
        for _ in range(5):
            client.put(KEY, b"1234567")
        assert client.get(KEY) is None
        assert serving.stats()["not_stored"] == 5
    (line,) = [message for message in caplog.messages if "is not stored" in message]
    assert "7 bytes" in line
