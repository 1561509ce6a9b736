"""Questions about keys: in groups, on the control connection, that lose it or meet a bug."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from typing import Any, cast

import pytest

from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.errors import RedisProtocolError
from lmcache_redis.resp import CallOutcome, RedisPlane, control
from lmcache_redis.resp.control import GROUP_KEYS, Steps, count_prefix, find_present
from lmcache_redis.resp.net.connection import Pipeline
from lmcache_redis.resp.net.wire import Reply, keys_commands
from tests.resp.helpers import (
    PATIENCE_S,
    Answers,
    chunk_key,
    describe,
    exists,
    running,
    scan,
    wait_until,
)
from tests.resp.trickling import Answer, LyingServer
from tests.servers import RedisServer


class FakeServer:
    """Answers packed EXISTS commands as a `Pipeline` does, and counts round trips.

    most: so many replies come at a time, where no more have to.
    """

    def __init__(self, present: set[bytes], most: int = 1000) -> None:
        self.present = present
        self.round_trips = 0
        self._most = most
        self._replies: list[Reply] = []
        self._received = True

    @property
    def outstanding(self) -> int:
        return len(self._replies)

    def send(self, requests: Iterable[bytes], replies: int) -> None:
        self.round_trips += self._received and replies > 0
        self._received = False
        before = len(self._replies)
        words = b"".join(requests).split(b"\r\n")[:-1]
        while words:
            count = int(words[0][1:])
            command, words = words[1 : 1 + 2 * count], words[1 + 2 * count :]
            assert command[1] == b"EXISTS"
            self._replies.append(sum(key in self.present for key in command[3::2]))
        assert len(self._replies) == before + replies

    def receive(self, least: int) -> Sequence[Reply]:
        assert 0 < least <= len(self._replies), "would wait for ever"
        self._received = True
        now = min(max(least, self._most), len(self._replies))
        replies, self._replies = self._replies[:now], self._replies[now:]
        return replies

    def receive_all(self) -> Sequence[Reply]:
        return self.receive(self.outstanding) if self.outstanding else ()


def result_of(server: FakeServer, steps: Steps[Any]) -> Any:
    """The result of a question of one step."""
    server.send(*next(steps))
    with pytest.raises(StopIteration) as end:
        steps.send(cast(Pipeline, server))
    return end.value.value


def counted(server: FakeServer, asked: list[bytes]) -> int:
    return int(result_of(server, count_prefix(asked)))


def found(server: FakeServer, asked: list[bytes]) -> list[bool]:
    return list(result_of(server, find_present(asked)))


def keys(count: int) -> list[bytes]:
    return [b"key-%05d" % number for number in range(count)]


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 64, 100, 1000])
def test_all_or_none_cost_one_round_trip(count: int) -> None:
    asked = keys(count)
    full, empty = FakeServer(set(asked)), FakeServer(set())
    assert counted(full, asked) == count
    assert counted(empty, asked) == 0
    assert full.round_trips == empty.round_trips == (1 if count else 0)


@pytest.mark.parametrize("length", range(0, 100, 7))
def test_a_prefix_costs_two_at_most(length: int) -> None:
    asked = keys(100)
    server = FakeServer(set(asked[:length]))
    assert counted(server, asked) == length
    assert server.round_trips == (1 if length % GROUP_KEYS == 0 else 2)


def test_gaps_end_the_prefix_whatever_comes_after() -> None:
    asked = keys(200)
    source = random.Random(7)
    for _ in range(200):
        present = {key for key in asked if source.random() < source.choice([0.5, 0.97, 1.0])}
        server = FakeServer(present, most=source.randint(1, 9))
        truth = next((i for i, key in enumerate(asked) if key not in present), len(asked))
        assert counted(server, asked) == truth
        server = FakeServer(present)
        assert found(server, asked) == [key in present for key in asked]


def test_a_key_that_comes_in_between_is_no_error() -> None:
    asked = keys(40)

    class Changing(FakeServer):
        def receive(self, least: int) -> Sequence[Reply]:
            self.present.add(asked[3])
            return super().receive(least)

    # One less than there are now: what is answered existed.
    assert counted(Changing(set(asked) - {asked[3]}), asked) == GROUP_KEYS - 1

    class Going(FakeServer):
        def receive(self, least: int) -> Sequence[Reply]:
            self.present.discard(asked[1])
            return super().receive(least)

    assert counted(Going(set(asked) - {asked[3]}), asked) == 1


@pytest.mark.parametrize("reply", [b"OK", None, -1, 33, [1]])
def test_a_reply_that_is_no_count(reply: Reply) -> None:
    class Odd(FakeServer):
        def receive(self, least: int) -> Sequence[Reply]:
            return [reply] * len(super().receive(least))

    with pytest.raises(RedisProtocolError):
        counted(Odd(set()), keys(32))
    with pytest.raises(RedisProtocolError):
        found(Odd(set()), keys(32))


@pytest.mark.parametrize("length", [0, 40, 500, 999])
def test_the_prefix_is_known_before_all_replies_are_there(length: int) -> None:
    asked = keys(1000)
    server = FakeServer(set(asked[:length]), most=2)
    assert counted(server, asked) == length
    # All but the first two groups; the rest of the group with the gap, each key by itself.
    assert length or server.outstanding == 30
    assert length != 40 or server.outstanding == GROUP_KEYS


def test_against_a_server(plane: RedisPlane, server: RedisServer) -> None:
    asked = [chunk_key(number) for number in range(1000)]
    stripes = [stripe_key(key, 0) for key in asked]
    assert scan(plane, asked) == (CallOutcome.DONE, 0)
    assert scan(plane, []) == (CallOutcome.DONE, 0)
    with server.client() as client:
        client.mset(dict.fromkeys(stripes[:777], b"x"))
        client.delete(stripes[800])
    assert scan(plane, asked) == (CallOutcome.DONE, 777)
    assert scan(plane, asked[:777]) == (CallOutcome.DONE, 777)
    with server.client() as client:
        client.mset(dict.fromkeys(stripes[900:], b"x"))
    found = exists(plane, asked)
    assert found.outcome is CallOutcome.DONE
    assert list(found.present) == [True] * 777 + [False] * 123 + [True] * 100
    assert exists(plane, []).present == ()


def test_ten_thousand_keys_of_differing_lengths(plane: RedisPlane, server: RedisServer) -> None:
    asked = [b"k" * (number % 5 + 1) + b"-%d" % number for number in range(10_000)]
    request = keys_commands(b"UNLINK", asked, len(asked))
    assert request.count(b"\r\n") == 2 * len(asked) + 3
    with server.client() as client:
        client.mset(dict.fromkeys([stripe_key(key, 0) for key in asked[:9_999]], b""))
    assert scan(plane, asked) == (CallOutcome.DONE, 9_999)


# ------------------------------------------------------------ the connection


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
