"""A removal hides the chunk at once, whatever else it may ask, and leaves other stores alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmcache_redis.resp import RedisPlane
from lmcache_redis.tiers import CallOutcome, ReadOutcome, RemoveResult, WriteOutcome
from tests.acl import PASSWORD
from tests.resp.helpers import Answers, Chunk, read, remove, running
from tests.resp.test_node import cluster_url, shard
from tests.resp.trickling import Answer
from tests.servers import RedisServer

pytestmark = pytest.mark.servers
CHUNK = Chunk(1, 10_000, 1000, seed=1)
OTHER = b"another store id"
DONE, UNAVAILABLE = CallOutcome.DONE, CallOutcome.UNAVAILABLE


@pytest.fixture
def limited(server: RedisServer) -> Iterator[RedisPlane]:
    """Of a user who may not ask for headers."""
    rights = ("+@all", "-getrange", "~*")
    server.command("ACL", "SETUSER", "limited", "reset", "on", f">{PASSWORD}", *rights)
    with running(f"redis://limited:{PASSWORD}@127.0.0.1:{server.port}") as plane:
        yield plane
    server.command("ACL", "DELUSER", "limited")


def stored(plane: RedisPlane) -> bytes:
    """Stores the chunk; the id of the store."""
    answers, transfer = Answers(), CHUNK.io(10.0)
    plane.store_all([transfer], answers)
    assert answers.of([transfer]) == [WriteOutcome.STORED]
    assert len(transfer.store_id) == len(OTHER)
    return transfer.store_id


def left(server: RedisServer) -> list[int]:
    """Which stripes are there."""
    keys = CHUNK.stripe_keys()
    return [index for index, key in enumerate(keys) if server.command("EXISTS", key)]


def test_a_transfer_says_whose_store_it_is(plane: RedisPlane) -> None:
    store_id, answers, transfer = stored(plane), Answers(), CHUNK.io(10.0)
    plane.load_all([transfer], answers)
    assert answers.of([transfer]) == [ReadOutcome.LOADED]
    assert transfer.store_id == store_id
    assert stored(plane) != store_id


@pytest.mark.parametrize("stripe_count", [0, 10])
def test_all_stripes_go(plane: RedisPlane, server: RedisServer, stripe_count: int) -> None:
    stored(plane)
    assert remove(plane, CHUNK, stripe_count=stripe_count) == RemoveResult(DONE, 10)
    assert left(server) == []
    assert remove(plane, CHUNK, stripe_count=stripe_count) == RemoveResult(DONE, 0)


def test_without_its_header_a_chunk_is_hidden(limited: RedisPlane, server: RedisServer) -> None:
    stored(limited)
    assert remove(limited, CHUNK) == RemoveResult(DONE, 1)
    assert left(server) == [*range(1, 10)]
    stored(limited)
    assert remove(limited, CHUNK, stripe_count=10) == RemoveResult(DONE, 10)
    assert left(server) == []


@pytest.mark.parametrize("stripe_count", [0, 10])
def test_another_store_stays(plane: RedisPlane, server: RedisServer, stripe_count: int) -> None:
    former = stored(plane)
    store_id = stored(plane)
    again = {"stripe_count": stripe_count, "only_store": former}
    assert remove(plane, CHUNK, **again) == RemoveResult(DONE, 0)
    assert left(server) == [*range(10)]
    assert read(plane, CHUNK) == [ReadOutcome.LOADED]
    again["only_store"] = store_id
    assert remove(plane, CHUNK, **again) == RemoveResult(DONE, 10)
    assert left(server) == []


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
    assert remove(plane, CHUNK, stripe_count=10, only_store=OTHER).outcome is DONE
    assert left(server) == []


def test_who_may_not_see_whose_store_it_is_removes_it(
    limited: RedisPlane, server: RedisServer
) -> None:
    stored(limited)
    assert remove(limited, CHUNK, stripe_count=10, only_store=OTHER) == RemoveResult(DONE, 10)
    assert left(server) == []


@pytest.mark.parametrize("only_store", [b"", OTHER])
@pytest.mark.parametrize("stripe_count", [0, 10])
def test_a_refusal_is_a_failure(server: RedisServer, stripe_count: int, only_store: bytes) -> None:
    rights = ("+@all", "-unlink", "-getrange", "~*")
    server.command("ACL", "SETUSER", "limited", "reset", "on", f">{PASSWORD}", *rights)
    with running(f"redis://limited:{PASSWORD}@127.0.0.1:{server.port}") as plane:
        stored(plane)
        found = remove(plane, CHUNK, stripe_count=stripe_count, only_store=only_store)
        assert found == RemoveResult(UNAVAILABLE, 0)
        assert left(server) == [*range(10)]
    server.command("ACL", "DELUSER", "limited")


@pytest.mark.parametrize("stripe_count", [0, 10])
def test_a_slot_that_moves_is_a_failure(stripe_count: int) -> None:
    asked: list[bytes] = []

    def answer(words: list[bytes]) -> Answer:
        asked.append(words[0])
        if words[0] in (b"UNLINK", b"GETRANGE"):
            return b"-MOVED 5 127.0.0.1:1\r\n"
        return None

    with shard(answer) as server, running(cluster_url(server)) as plane:
        found = remove(plane, CHUNK, stripe_count=stripe_count)
        assert found == RemoveResult(UNAVAILABLE, 0)
        assert b"UNLINK" in asked
        assert (b"GETRANGE" in asked) == (not stripe_count)


def test_the_first_attempt_asks_nothing() -> None:
    asked: list[list[bytes]] = []

    def answer(words: list[bytes]) -> Answer:
        asked.append(words)
        return b":1\r\n" if words[0] == b"UNLINK" else None

    with shard(answer) as server, running(cluster_url(server)) as plane:
        assert remove(plane, CHUNK, stripe_count=10) == RemoveResult(DONE, 10)
    sent = [words for words in asked if words[0] not in (b"AUTH", b"CLIENT", b"CLUSTER", b"PING")]
    assert sent == [[b"UNLINK", key] for key in CHUNK.stripe_keys()]
