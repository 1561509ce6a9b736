"""The control connection: questions that lose it, or meet a bug."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lmcache_redis.resp import CallOutcome, control
from tests.resp.helpers import PATIENCE_S, Answers, chunk_key, describe, running, scan, wait_until
from tests.resp.trickling import Answer, LyingServer

KEY = chunk_key(1) + bytes(2)


def test_a_question_that_lost_its_connection_begins_anew() -> None:
    """A cursor is the lost server's."""
    scans: list[bytes] = []

    def answer(words: list[bytes]) -> Answer:
        if words[0] != b"SCAN":
            return None
        scans.append(words[1])
        if len(scans) == 2:
            raise OSError
        after = {b"0": b"7", b"7": b"0"}[words[1]]
        return b"*2\r\n$1\r\n%b\r\n*1\r\n$%d\r\n%b\r\n" % (after, len(KEY), KEY)

    with LyingServer(answer) as server, running(server.url) as plane:
        wait_until(lambda: plane.open_streams == 4)
        assert plane.keys(b"lmcr1:", time.monotonic() + PATIENCE_S).keys == [chunk_key(1)]
        assert scans == [b"0", b"7", b"0", b"7"]


@pytest.mark.parametrize(
    "reply",
    [b"*2\r\n$1\r\nx\r\n*0\r\n", b"*1\r\n$1\r\n0\r\n", b"*2\r\n:0\r\n*0\r\n", b"$1\r\n0\r\n"],
)
def test_a_scan_without_a_cursor_or_keys_is_malformed(reply: bytes) -> None:
    with (
        LyingServer(lambda words: reply if words[0] == b"SCAN" else None) as server,
        running(server.url) as plane,
    ):
        found = plane.keys(b"lmcr1:", time.monotonic() + PATIENCE_S)
        assert found == (CallOutcome.UNAVAILABLE, [])
        assert "malformed reply to SCAN" in plane.state.reason


def test_a_bug_costs_its_own_question_and_the_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(value: bytes) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(control, "describe_header", fail)
    with (
        LyingServer(lambda w: b"$1\r\nx\r\n" if w[0] == b"GETRANGE" else None) as server,
        running(server.url) as plane,
    ):
        wait_until(lambda: plane.open_streams == 4)
        connects = plane.stats().connects
        assert describe(plane, [chunk_key(1)]).outcome is CallOutcome.UNAVAILABLE
        assert scan(plane, [chunk_key(1)]) == (CallOutcome.DONE, 0)
        assert plane.stats().connects == connects + 1
        assert "ZeroDivisionError" in caplog.text


def test_questions_behind_a_lost_connection_are_answered() -> None:
    lost: list[int] = []

    def answer(words: list[bytes]) -> Answer:
        if words[0] == b"EXISTS" and not lost:
            lost.append(1)
            time.sleep(0.2)
            raise OSError
        return None

    with LyingServer(answer) as server, running(server.url) as plane:
        wait_until(lambda: plane.open_streams == 4)
        answers = Answers()
        for number in range(20):
            deadline = time.monotonic() + PATIENCE_S
            plane.scan([chunk_key(number)], deadline, answers.callback(number))
        assert answers.wait(20) == [(CallOutcome.DONE, 0)] * 20
