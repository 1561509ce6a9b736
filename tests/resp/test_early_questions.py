# SPDX-License-Identifier: Apache-2.0
"""A first question that a caller's thread sends: never waited for, never mixed with another's."""

from __future__ import annotations

import threading
import time

import pytest

from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.resp import RedisPlane
from lmcache_redis.resp.net.connection import Connection
from lmcache_redis.tiers import CallOutcome
from tests.resp.helpers import (
    STEM,
    Answers,
    Chunk,
    check_stores,
    chunk_key,
    clear,
    exists,
    running,
    scan,
    wait_until,
)
from tests.servers import RedisServer


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that sent first questions at once."""
    threads: list[str] = []
    original = Connection.send_ahead

    def send_ahead(self: Connection, request: bytes, replies: int) -> int:
        threads.append(threading.current_thread().name)
        return original(self, request, replies)

    monkeypatch.setattr(Connection, "send_ahead", send_ahead)
    return threads


def store(plane: RedisPlane, count: int) -> list[bytes]:
    chunks = [Chunk(number, 64, 4096, seed=number) for number in range(count)]
    check_stores(plane, *chunks)
    return [chunk_key(number) for number in range(count)]


def is_resting(plane: RedisPlane, early: list[str]) -> bool:
    """Whether the control connection is there and idle: then a question goes out at once."""
    before = len(early)
    scan(plane, [chunk_key(0)])
    return len(early) > before


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
def test_it_goes_out_on_the_caller_s_thread(
    server: RedisServer, early: list[str], scheme: str
) -> None:
    with running(server.url if scheme == "tcp" else server.unix_url) as plane:
        there = store(plane, 50)
        wait_until(lambda: is_resting(plane, early))
        before = len(early)
        assert scan(plane, [*there, chunk_key(99)]) == (CallOutcome.DONE, 50)
        assert exists(plane, [chunk_key(99), there[3]]).present == [False, True]
        assert len(early) > before
        assert set(early) == {threading.current_thread().name}


def test_more_than_a_socket_takes_at_once(server: RedisServer, early: list[str]) -> None:
    with running(server.url) as plane:
        wait_until(lambda: is_resting(plane, early))
        long = [stripe_key(STEM + number.to_bytes(8, "big") * 12, 0) for number in range(20_000)]
        assert scan(plane, long) == (CallOutcome.DONE, 0)
        there = store(plane, 3)
        assert scan(plane, there + long) == (CallOutcome.DONE, 3)
        assert exists(plane, long[:5000] + there).present == [False] * 5000 + [True] * 3


def test_a_caller_never_waits_for_a_server_that_does_not_read(
    own_server: RedisServer, early: list[str]
) -> None:
    with running(own_server.url, op_timeout_s=30.0) as plane:
        there = store(plane, 2)
        wait_until(lambda: is_resting(plane, early))
        long = [stripe_key(STEM + number.to_bytes(8, "big") * 12, 0) for number in range(50_000)]
        answers = Answers()
        own_server.stop()
        try:
            # Many times what a socket holds; whoever would wait here would do so for ever.
            plane.scan(long, time.monotonic() + 0.2, answers.callback("long"))
            plane.scan(there, time.monotonic() + 0.3, answers.callback("short"))
            outcomes = answers.wait(2)
            assert {each.outcome for each in outcomes} <= {
                CallOutcome.TIMED_OUT,
                CallOutcome.UNAVAILABLE,
            }
        finally:
            own_server.cont()
        wait_until(lambda: scan(plane, there) == (CallOutcome.DONE, 2))


def test_many_callers_at_once_get_their_own_answers(server: RedisServer, early: list[str]) -> None:
    with running(server.url) as plane:
        there = store(plane, 40)
        wait_until(lambda: is_resting(plane, early))
        wrong: list[object] = []

        def ask(length: int) -> None:
            for _ in range(100):
                result = scan(plane, [*there[:length], chunk_key(999)])
                if result != (CallOutcome.DONE, length):
                    wrong.append(result)

        callers = [threading.Thread(target=ask, args=(length,)) for length in (0, 1, 7, 33, 40)]
        for caller in callers:
            caller.start()
        for _ in range(20):
            # Background work on the same connection, in between.
            clear(plane, STEM + b"\xff" * 8)
        for caller in callers:
            caller.join()
        assert wrong == []


def test_a_connection_that_died_unnoticed_costs_no_answer(
    own_server: RedisServer, early: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with running(own_server.url, heartbeat_s=3600.0) as plane:
        store(plane, 3)
        wait_until(lambda: is_resting(plane, early))
        own_server.command("CLIENT", "KILL", "TYPE", "normal")
        assert scan(plane, [chunk_key(0)]) == (CallOutcome.DONE, 1)
        assert plane.state.up
    assert "internal error" not in caplog.text


def test_a_stale_answer_is_not_taken_for_the_next(
    own_server: RedisServer, early: list[str]
) -> None:
    with running(own_server.url, op_timeout_s=30.0, heartbeat_s=3600.0) as plane:
        there = store(plane, 5)
        wait_until(lambda: is_resting(plane, early))
        (node,) = plane._nodes.routes.nodes
        wait_until(lambda: not node.control._in_use.locked())
        answers = Answers()
        before = len(early)
        own_server.stop()
        try:
            plane.scan(there, time.monotonic() + 0.05, answers.callback("late"))
            assert answers.wait(1)[0].outcome is CallOutcome.TIMED_OUT
        finally:
            own_server.cont()
        assert len(early) == before + 1
        wait_until(lambda: plane.state.up)
        wait_until(lambda: scan(plane, [chunk_key(77)]) == (CallOutcome.DONE, 0))
        assert scan(plane, there[:4]) == (CallOutcome.DONE, 4)
