from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any, cast

import pytest

from lmcache_redis.chunks.keys import stripe_key
from lmcache_redis.errors import RedisProtocolError
from lmcache_redis.resp import CallOutcome, RedisPlane
from lmcache_redis.resp.control import GROUP_KEYS, Steps, count_prefix, find_present
from lmcache_redis.resp.net.connection import Pipeline
from lmcache_redis.resp.net.wire import Reply, keys_commands
from tests.resp.helpers import chunk_key, exists, scan
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
