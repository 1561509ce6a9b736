# SPDX-License-Identifier: Apache-2.0
"""Questions about keys: in groups, on the control connection, that lose it or meet a bug."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import pytest

from lmcache_redis.chunks.frame import HEADER_BYTES
from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.errors import RedisProtocolError, RedisRedirect
from lmcache_redis.resp import control
from lmcache_redis.resp.control import (
    GROUP_KEYS,
    Steps,
    ask_each,
    count_prefix,
    header_commands,
    keep_each,
    parse_count,
    parse_frame,
    walk_keys,
)
from lmcache_redis.resp.net.connection import Connection
from lmcache_redis.resp.net.wire import ErrorReply, Reply, keys_commands, pack_command
from lmcache_redis.tiers import CallOutcome
from tests.resp.helpers import (
    PATIENCE_S,
    Answers,
    chunk_key,
    describe,
    open_streams,
    running,
    scan,
    wait_until,
)
from tests.resp.trickling import Answer, LyingServer


class FakeServer:
    """Answers packed EXISTS commands as a `Connection` does, and counts round trips.

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


def counted(server: FakeServer, asked: list[bytes]) -> int:
    steps = count_prefix(asked)
    server.send(*next(steps))
    with pytest.raises(StopIteration) as end:
        steps.send(cast(Connection, server))
    return int(end.value.value)


def keys(count: int) -> list[bytes]:
    return [b"key-%05d" % number for number in range(count)]


LENGTHS = [(100, length) for length in range(0, 100, 7)]
LENGTHS += [(count, count) for count in (0, 1, 31, 32, 33, 64, 100, 1000)]


@pytest.mark.parametrize(("count", "length"), LENGTHS)
def test_a_prefix_costs_two_round_trips_at_most(count: int, length: int) -> None:
    """All or none cost one."""
    asked = keys(count)
    server = FakeServer(set(asked[:length]))
    assert counted(server, asked) == length
    is_known = length == count or length % GROUP_KEYS == 0
    assert server.round_trips == (0 if not count else 1 if is_known else 2)


def test_gaps_end_the_prefix_whatever_comes_after() -> None:
    asked = keys(200)
    source = random.Random(7)
    for _ in range(200):
        present = {key for key in asked if source.random() < source.choice([0.5, 0.97, 1.0])}
        server = FakeServer(present, most=source.randint(1, 9))
        truth = next((i for i, key in enumerate(asked) if key not in present), len(asked))
        assert counted(server, asked) == truth


def test_a_key_that_comes_in_between_is_no_error() -> None:
    asked = keys(40)

    class Changing(FakeServer):
        def receive(self, least: int) -> Sequence[Reply]:
            self.present.add(asked[3])
            return super().receive(least)

    # The later group is not asked again.
    assert counted(Changing(set(asked) - {asked[3]}), asked) == GROUP_KEYS

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


@pytest.mark.parametrize("length", [0, 40, 500, 999])
def test_the_prefix_is_known_before_all_replies_are_there(length: int) -> None:
    asked = keys(1000)
    server = FakeServer(set(asked[:length]), most=2)
    assert counted(server, asked) == length
    # All but the first two groups.
    assert length or server.outstanding == 30


class Replies:
    """The replies to one step."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        self._replies = replies

    def receive_all(self) -> Sequence[Reply]:
        return self._replies

    def receive(self, least: int) -> Sequence[Reply]:
        assert least == len(self._replies)
        return self._replies


def play(steps: Steps[Any], *answers: Sequence[Reply]) -> tuple[list[bytes], Any]:
    """What the steps of a question send, given the replies to each, and its result."""
    sent: list[bytes] = []
    requests, replies = next(steps)
    for each in answers:
        sent.append(b"".join(requests))
        assert replies == len(each)
        try:
            requests, replies = steps.send(cast(Connection, Replies(each)))
        except StopIteration as end:
            assert len(sent) == len(answers)
            return sent, end.value
    raise AssertionError("more is asked")


def test_a_walk_removes_what_is_unwanted() -> None:
    removed: list[int] = []
    scanned = [[b"7", [b"a", b"b", b"c"]]], [[b"0", []]]
    steps = walk_keys(b"*", lambda keys: keys[1:], removed=removed.append)
    sent, _ = play(steps, scanned[0], [1, 1], scanned[1])
    assert sent[1] == keys_commands(b"UNLINK", [b"b", b"c"])
    assert removed == [2]
    for reply in (b"OK", None, -1):
        with pytest.raises(RedisProtocolError, match="0 to 1"):
            play(walk_keys(b"*", lambda keys: keys[:1]), scanned[0], [reply])
    play(walk_keys(b"*", lambda keys: keys[:1]), scanned[0], [0], scanned[1])


def pack(keys: Sequence[bytes]) -> bytes:
    return keys_commands(b"EXISTS", keys, 1)


def test_each_key_is_asked_about_by_itself() -> None:
    asked = keys(3)
    moved = ErrorReply("MOVED", "MOVED 1 127.0.0.1:7")
    wrong = ErrorReply("WRONGTYPE", "WRONGTYPE of a string")
    plain = play(ask_each(pack, parse_count, asked, step_keys=2), [1, wrong], [0])
    assert plain == ([pack(asked[:2]), pack(asked[2:])], [1, None, 0])
    _, (redirect,) = play(ask_each(pack, parse_count, asked[:1]), [moved])
    assert isinstance(redirect, RedisRedirect)
    for reply in (b"1", None, -1, 2, [1]):
        with pytest.raises(RedisProtocolError, match="0 to 1"):
            play(ask_each(pack, parse_count, asked[:1]), [reply])


def test_asking_comes_before_each_key_in_one_write() -> None:
    asked, asking = keys(2), b"*1\r\n$6\r\nASKING\r\n"
    moved = ErrorReply("MOVED", "MOVED 1 127.0.0.1:7")
    steps = ask_each(pack, parse_count, asked, is_asking=True)
    (sent,), (first, second) = play(steps, [b"OK", 1, b"OK", moved])
    assert sent == b"".join(asking + pack([key]) for key in asked)
    assert (first, second.reply) == (1, "MOVED 1 127.0.0.1:7")


def test_a_header_is_read_to_its_last_byte() -> None:
    *_, start, _, end = header_commands([b"key"]).split(b"\r\n")[:-1]
    assert (int(start), int(end)) == (0, HEADER_BYTES - 1)
    assert parse_frame(b"no header") is None
    with pytest.raises(RedisProtocolError, match="GETRANGE"):
        parse_frame(None)


# ------------------------------------------------------------ the connection


def test_replies_that_are_not_awaited_answer_no_later_question() -> None:
    def answer(words: list[bytes]) -> Answer:
        if words[0] != b"EXISTS" or words[1] == stripe_key(chunk_key(100), 0):
            return None
        if words[1] == stripe_key(chunk_key(0), 0):
            return b":0\r\n"
        time.sleep(0.2)
        return b":%d\r\n" % (len(words) - 1)

    with LyingServer(answer) as server, running(server.url) as plane:
        wait_until(lambda: open_streams(plane) == 3)
        assert scan(plane, [chunk_key(n) for n in range(2 * GROUP_KEYS)]) == (CallOutcome.DONE, 0)
        later = [chunk_key(100 + n) for n in range(GROUP_KEYS)]
        assert scan(plane, later) == (CallOutcome.DONE, 0)


@pytest.mark.parametrize(
    "reply",
    [b"*2\r\n$1\r\nx\r\n*0\r\n", b"*1\r\n$1\r\n0\r\n", b"*2\r\n:0\r\n*0\r\n", b"$1\r\n0\r\n"],
)
def test_a_scan_without_a_cursor_or_keys_is_malformed(reply: bytes) -> None:
    with (
        LyingServer(lambda words: reply if words[0] == b"SCAN" else None) as server,
        running(server.url) as plane,
    ):
        found = plane.keys(b"lmcr2:", time.monotonic() + PATIENCE_S)
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
        wait_until(lambda: open_streams(plane) == 3)
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
        wait_until(lambda: open_streams(plane) == 3)
        answers = Answers()
        for number in range(20):
            deadline = time.monotonic() + PATIENCE_S
            plane.scan([chunk_key(number)], deadline, answers.callback(number))
        outcomes = [each.outcome for each in answers.wait(20)]
        assert outcomes.count(CallOutcome.DONE) == 19


def test_claims_among_other_keys_are_claimed() -> None:
    """As where two nodes redirect to a third: each key gets its own command, and its own result."""

    keys = [b"claim a", b"a", b"claim b", b"b"]
    touch = partial(keys_commands, b"TOUCH")
    steps = keep_each(touch, print, lambda key: key.startswith(b"claim"), 2000, keys)
    (sent,), found = play(steps, [b"OK", None, 1, 0])
    claims = [pack_command(b"SET", key, b"", b"NX", b"PX", 2000) for key in keys[::2]]
    assert sent == b"".join([*claims, touch(keys[1::2])])
    assert found == [1, 1, 0, 0]
