# SPDX-License-Identifier: Apache-2.0
"""Counters, log lines, and room for payloads."""

from __future__ import annotations

import asyncio
import logging

import pytest

from lmcache_redis.compat.gateway import connection
from lmcache_redis.compat.gateway.connection import QuietLog, Room
from tests.compat.gateway.serving import DictTier, Serving
from tests.compat.gateway.wire import KEY


def test_a_flood_is_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = QuietLog(logging.getLogger(__name__))
    for number in range(100):
        log.warning("a", "number %d", number)
    log.warning("b", "another kind")
    assert caplog.messages == ["number 0", "another kind"]
    monkeypatch.setattr(connection, "_SILENCE_S", 0)
    log = QuietLog(logging.getLogger(__name__))
    for _ in range(2):
        log.warning("a", "again %s", "%s")
    assert caplog.messages[2:] == ["again %s"] * 2


def test_what_is_not_stored_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tier = DictTier()
    tier.refuses = True
    with Serving(tier) as serving, serving.client() as client:
        for _ in range(5):
            client.put(KEY, b"1234567")
        assert client.get(KEY) is None
        assert serving.stats()["puts_not_stored"] == 5
    (line,) = [message for message in caplog.messages if "is not stored" in message]
    assert "7 bytes" in line


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_room_is_given_in_the_order_of_requests() -> None:
    async def work() -> None:
        room = Room(10)
        await room.take(8)
        large = asyncio.ensure_future(room.take(9))
        small = asyncio.ensure_future(room.take(1))
        await _turns()
        assert not large.done()
        assert not small.done(), "it does not overtake"
        room.give_back(8)
        await _turns()
        assert large.done()
        assert small.done()
        assert room.used_bytes == 10

    asyncio.run(work())


@pytest.mark.parametrize("when", ["waiting", "granted"])
def test_a_request_for_room_that_is_cancelled(when: str) -> None:
    async def work() -> None:
        room = Room(10)
        await room.take(8)
        first, second = (asyncio.ensure_future(room.take(n)) for n in (9, 2))
        await _turns()
        if when == "granted":
            room.give_back(8)  # and the task has not run since
        first.cancel()
        await _turns()
        assert first.cancelled()
        assert second.done(), "the next one gets its room"
        assert room.used_bytes == (2 if when == "granted" else 10)

    asyncio.run(work())
