# SPDX-License-Identifier: Apache-2.0
"""A removal hides the chunk at once, whatever else it may ask, and leaves newer stores alone."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from lmcache_redis.resp import RedisPlane
from lmcache_redis.tiers import CallOutcome, ReadOutcome, RemoveResult
from tests.resp.helpers import Chunk, check_stores, read, remove, running, running_as
from tests.resp.test_node import cluster_url, shard
from tests.resp.trickling import Answer
from tests.servers import RedisServer

pytestmark = pytest.mark.servers
CHUNK = Chunk(1, 10_000, 1000, seed=1)
DONE, UNAVAILABLE = CallOutcome.DONE, CallOutcome.UNAVAILABLE


@pytest.fixture
def limited(server: RedisServer) -> Iterator[RedisPlane]:
    """Of a user who may not ask for headers."""
    with running_as(server, "+@all", "-getrange") as plane:
        yield plane


def stored(plane: RedisPlane) -> int:
    """Stores the chunk; a time before that in milliseconds."""
    before_ms = time.time_ns() // 1_000_000 - 1
    check_stores(plane, CHUNK)
    return before_ms


def later() -> int:
    return time.time_ns() // 1_000_000 + 1


def left(server: RedisServer) -> list[int]:
    """Which stripes are there."""
    keys = CHUNK.stripe_keys()
    return [index for index, key in enumerate(keys) if server.command("EXISTS", key)]


@pytest.mark.parametrize("stripe_count", [0, 10])
def test_all_stripes_go(plane: RedisPlane, server: RedisServer, stripe_count: int) -> None:
    stored(plane)
    assert remove(plane, CHUNK, stripe_count=stripe_count) == RemoveResult(DONE, 10, 10)
    assert left(server) == []
    again = remove(plane, CHUNK, stripe_count=stripe_count)
    assert again == RemoveResult(DONE, 0, stripe_count)


def test_without_its_header_a_chunk_is_hidden(limited: RedisPlane, server: RedisServer) -> None:
    stored(limited)
    assert remove(limited, CHUNK) == RemoveResult(DONE, 1)
    assert left(server) == [*range(1, 10)]
    stored(limited)
    assert remove(limited, CHUNK, stripe_count=10) == RemoveResult(DONE, 10, 10)
    assert left(server) == []


@pytest.mark.parametrize("stripe_count", [0, 10])
def test_a_newer_store_stays(plane: RedisPlane, server: RedisServer, stripe_count: int) -> None:
    before_ms = stored(plane)
    found = remove(plane, CHUNK, stripe_count=stripe_count, newest_unix_ms=before_ms)
    assert (found.outcome, found.removed) == (DONE, 0)
    assert left(server) == [*range(10)]
    assert read(plane, CHUNK) == [ReadOutcome.LOADED]
    found = remove(plane, CHUNK, stripe_count=stripe_count, newest_unix_ms=later())
    assert found == RemoveResult(DONE, 10, 10)
    assert left(server) == []


def test_a_failure_says_how_many_stripes_there_are() -> None:
    """A later attempt cannot ask stripe 0, which is gone, about the others."""
    first = CHUNK.stripe_keys()[0]

    def answer(words: list[bytes]) -> Answer:
        if words[0] == b"GETRANGE":
            return b"$%d\r\n%b\r\n" % (len(header), header)
        if words[0] == b"UNLINK":
            return b":1\r\n" if words[1] == first else b"-NOPERM no\r\n"
        return None

    header = CHUNK.frame.header(0, bytes(16), 0, 1)
    with shard(answer) as server, running(cluster_url(server)) as plane:
        assert remove(plane, CHUNK) == RemoveResult(UNAVAILABLE, 1, 10)
        later_on = remove(plane, CHUNK, stripe_count=3, newest_unix_ms=1)
        assert later_on == RemoveResult(UNAVAILABLE, 1, 10), "the larger number"


@pytest.mark.parametrize("value", [None, b"x", b"x" * 1000, "list"])
def test_what_is_no_store_does_not_stay(
    plane: RedisPlane, server: RedisServer, value: bytes | str | None
) -> None:
    stored(plane)
    first = CHUNK.stripe_keys()[0]
    server.command("UNLINK", first)
    if value == "list":
        server.command("RPUSH", first, "x")
    elif value is not None:
        server.command("SET", first, value)
    assert remove(plane, CHUNK, stripe_count=10, newest_unix_ms=0).outcome is DONE
    assert left(server) == []


def test_who_may_not_see_how_old_it_is_removes_it(limited: RedisPlane, server: RedisServer) -> None:
    stored(limited)
    assert remove(limited, CHUNK, stripe_count=10, newest_unix_ms=0) == RemoveResult(DONE, 10, 10)
    assert left(server) == []


@pytest.mark.parametrize("newest_unix_ms", [None, 0])
@pytest.mark.parametrize("stripe_count", [0, 10])
def test_a_refusal_is_a_failure(
    server: RedisServer, stripe_count: int, newest_unix_ms: int | None
) -> None:
    with running_as(server, "+@all", "-unlink", "-getrange") as plane:
        stored(plane)
        found = remove(plane, CHUNK, stripe_count=stripe_count, newest_unix_ms=newest_unix_ms)
        assert (found.outcome, found.removed) == (UNAVAILABLE, 0)
        assert left(server) == [*range(10)]


@pytest.mark.parametrize("stripe_count", [0, 10])
def test_a_slot_that_moves_is_a_failure(stripe_count: int) -> None:
    asked: list[bytes] = []

    def answer(words: list[bytes]) -> Answer:
        asked.append(words[0])
        if words[0] in (b"UNLINK", b"GETRANGE"):
            return b"-MOVED 5 127.0.0.1:1\r\n"
        return None

    with shard(answer) as server, running(cluster_url(server), op_timeout_s=0.5) as plane:
        found = remove(plane, CHUNK, stripe_count=stripe_count)
        assert found == RemoveResult(UNAVAILABLE, 0, stripe_count)
        assert b"UNLINK" in asked
        assert (b"GETRANGE" in asked) == (not stripe_count)


def test_the_first_attempt_asks_nothing() -> None:
    asked: list[list[bytes]] = []

    def answer(words: list[bytes]) -> Answer:
        asked.append(words)
        return b":1\r\n" if words[0] == b"UNLINK" else None

    with shard(answer) as server, running(cluster_url(server)) as plane:
        assert remove(plane, CHUNK, stripe_count=10) == RemoveResult(DONE, 10, 10)
    sent = [words for words in asked if words[0] not in (b"AUTH", b"CLIENT", b"CLUSTER", b"PING")]
    assert sent == [[b"UNLINK", key] for key in CHUNK.stripe_keys()]
