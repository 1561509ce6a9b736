# SPDX-License-Identifier: Apache-2.0
"""Values that are not what was stored: never delivered, never deleted, and replaced by a store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from queue import Queue

import pytest
import redis

from lmcache_redis.chunks.frame import HEADER_BYTES
from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.resp import RedisPlane
from lmcache_redis.tiers import CallOutcome, FramesResult, ReadOutcome, RemoveResult, WriteOutcome
from tests.resp.helpers import Chunk, chunk_key, read, write
from tests.servers import RedisServer

pytestmark = pytest.mark.usefixtures("both_ways")

SLOT = 4096
SIZE = 5 * SLOT - 100
WAIT_S = 10.0


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


@pytest.fixture
def stored(plane: RedisPlane, client: redis.Redis) -> Chunk:
    chunk = Chunk(1, SIZE, SLOT, seed=1)
    # A neighbour, to see that nothing else is touched.
    assert set(write(plane, chunk, Chunk(2, SIZE, SLOT, seed=2))) == {WriteOutcome.STORED}
    return chunk


def check(
    plane: RedisPlane,
    client: redis.Redis,
    stored: Chunk,
    outcome: ReadOutcome | tuple[ReadOutcome, ...],
) -> None:
    """What reading the spoiled chunk gives, what is left of it, and that others still load."""
    present = client.exists(*stored.stripe_keys())
    allowed = outcome if isinstance(outcome, tuple) else (outcome,)
    assert read(plane, Chunk(1, SIZE, SLOT))[0] in allowed
    neighbour = Chunk(2, SIZE, SLOT)
    assert read(plane, neighbour) == [ReadOutcome.LOADED]
    assert neighbour.content == Chunk(2, SIZE, SLOT, seed=2).content
    assert client.exists(*stored.stripe_keys()) == present, "a reader has deleted something"
    assert plane.state.up
    # The same chunk can be stored and loaded again.
    assert write(plane, stored) == [WriteOutcome.STORED]
    assert read(plane, Chunk(1, SIZE, SLOT)) == [ReadOutcome.LOADED]


def flip(client: redis.Redis, key: bytes, position: int) -> None:
    value = bytearray(client.get(key))
    value[position] ^= 0x10
    client.set(key, bytes(value))


HEADER_FIELDS = {
    "store id": 10,
    "stripe index": 24,
    "stripe count": 26,
    "payload bytes": 32,
    "payload offset": 40,
    "chunk bytes": 50,
    "payload checksum": 56,
    "fingerprint": 64,
    "hash": 100,
    "time": 160,
    "header checksum": 168,
    "metadata": 180,
    "padding": 511,
}


@pytest.mark.parametrize("stripe", [0, 3])
@pytest.mark.parametrize("position", HEADER_FIELDS.values(), ids=HEADER_FIELDS)
def test_a_flipped_bit_in_the_header(
    plane: RedisPlane, client: redis.Redis, stored: Chunk, stripe: int, position: int
) -> None:
    flip(client, stored.stripe_keys()[stripe], position)
    check(plane, client, stored, ReadOutcome.CORRUPT)


@pytest.mark.parametrize("position", [HEADER_BYTES, HEADER_BYTES + 2000, -1])
@pytest.mark.parametrize("stripe", [0, 4])
def test_a_flipped_bit_in_the_payload(
    plane: RedisPlane, client: redis.Redis, stored: Chunk, stripe: int, position: int
) -> None:
    flip(client, stored.stripe_keys()[stripe], position)
    check(plane, client, stored, ReadOutcome.CORRUPT)


@pytest.mark.parametrize("position", [0, 4])
def test_an_unknown_magic_or_version(
    plane: RedisPlane, client: redis.Redis, stored: Chunk, position: int
) -> None:
    flip(client, stored.stripe_keys()[0], position)
    check(plane, client, stored, ReadOutcome.FOREIGN)


LENGTHS: dict[str, tuple[Callable[[bytes], bytes], ReadOutcome]] = {
    "one byte short": (lambda value: value[:-1], ReadOutcome.CORRUPT),
    "header only": (lambda value: value[:HEADER_BYTES], ReadOutcome.CORRUPT),
    "half a header": (lambda value: value[:200], ReadOutcome.CORRUPT),
    "three bytes": (lambda value: value[:3], ReadOutcome.FOREIGN),
    "empty": (lambda value: b"", ReadOutcome.FOREIGN),
    "one byte long": (lambda value: value + b"x", ReadOutcome.CORRUPT),
    "twice": (lambda value: value * 2, ReadOutcome.CORRUPT),
    "very long": (lambda value: value + bytes(9 << 20), ReadOutcome.CORRUPT),
    "something else": (lambda value: b"y" * 100_000, ReadOutcome.FOREIGN),
    "something else, same length": (lambda value: b"y" * len(value), ReadOutcome.FOREIGN),
}


@pytest.mark.parametrize("stripe", [0, 2, 4])
@pytest.mark.parametrize("case", LENGTHS)
def test_a_value_of_another_length(
    plane: RedisPlane, client: redis.Redis, stored: Chunk, stripe: int, case: str
) -> None:
    change, outcome = LENGTHS[case]
    key = stored.stripe_keys()[stripe]
    client.set(key, change(client.get(key)))
    check(plane, client, stored, outcome)


@pytest.mark.parametrize("stripe", [0, 1])
def test_a_value_of_another_type(
    plane: RedisPlane, client: redis.Redis, stored: Chunk, stripe: int
) -> None:
    key = stored.stripe_keys()[stripe]
    client.delete(key)
    client.rpush(key, "x")
    check(plane, client, stored, ReadOutcome.FOREIGN)


def test_a_value_of_another_layout(plane: RedisPlane, client: redis.Redis, stored: Chunk) -> None:
    other = Chunk(1, SIZE, SLOT, seed=9, fingerprint=b"\x77" * 32)
    assert write(plane, other) == [WriteOutcome.STORED]
    check(plane, client, stored, ReadOutcome.FOREIGN)


def test_another_chunk_and_another_stripe_under_the_key(
    plane: RedisPlane, client: redis.Redis, stored: Chunk
) -> None:
    keys = stored.stripe_keys()
    client.set(keys[1], client.get(Chunk(2, SIZE, SLOT).stripe_keys()[1]))
    check(plane, client, stored, ReadOutcome.FOREIGN)
    client.set(keys[1], client.get(keys[2]))
    check(plane, client, stored, ReadOutcome.FOREIGN)


@pytest.mark.parametrize("slot_bytes", [SLOT // 2, 2 * SLOT, 1 << 20])
def test_a_chunk_cut_into_stripes_otherwise(
    plane: RedisPlane, client: redis.Redis, stored: Chunk, slot_bytes: int
) -> None:
    other = Chunk(1, SIZE, slot_bytes, seed=1)
    client.unlink(*stored.stripe_keys())
    assert write(plane, other) == [WriteOutcome.STORED]
    # Two connections: the other cut is found first, or that there are fewer stripes.
    outcomes = (ReadOutcome.FOREIGN, ReadOutcome.INCOMPLETE)
    check(plane, client, stored, outcomes)


@pytest.mark.parametrize("stripe", [1, 4])
def test_stripes_of_two_stores(
    plane: RedisPlane, client: redis.Redis, stored: Chunk, stripe: int
) -> None:
    key = stored.stripe_keys()[stripe]
    older = client.get(key)
    assert write(plane, stored) == [WriteOutcome.STORED]
    client.set(key, older)
    check(plane, client, stored, ReadOutcome.TORN)


@pytest.mark.parametrize("stripe", [1, 4])
def test_a_later_stripe_is_missing(
    plane: RedisPlane, client: redis.Redis, stored: Chunk, stripe: int
) -> None:
    client.delete(stored.stripe_keys()[stripe])
    check(plane, client, stored, ReadOutcome.INCOMPLETE)


def test_stripe_0_is_missing(plane: RedisPlane, client: redis.Redis, stored: Chunk) -> None:
    client.delete(stored.stripe_keys()[0])
    check(plane, client, stored, ReadOutcome.MISSING)
    client.delete(stored.stripe_keys()[0], stored.stripe_keys()[1])
    check(plane, client, stored, ReadOutcome.MISSING)


def test_a_description_is_that_of_the_headers(
    plane: RedisPlane, client: redis.Redis, stored: Chunk
) -> None:
    client.set(stripe_key(chunk_key(8), 0), b"not ours")
    client.set(stripe_key(chunk_key(7), 0), client.get(stored.stripe_keys()[1]))
    keys = [chunk_key(9), stored.key, chunk_key(8), chunk_key(7)]
    answers: Queue[FramesResult] = Queue()
    plane.describe(keys, time.monotonic() + WAIT_S, answers.put)
    found = answers.get(timeout=WAIT_S)
    assert found == FramesResult(CallOutcome.DONE, [None, stored.frame, None, None])


def test_a_removal_is_answered_with_what_was_there(
    plane: RedisPlane, client: redis.Redis, stored: Chunk
) -> None:
    neighbours = client.dbsize() - stored.frame.stripe_count
    answers: Queue[RemoveResult] = Queue()
    for removed in (stored.frame.stripe_count, 0):
        deadline = time.monotonic() + WAIT_S
        plane.remove(stored.key, deadline, answers.put)
        # Of a chunk that is not there, the number of stripes is not known.
        assert answers.get(timeout=WAIT_S) == RemoveResult(CallOutcome.DONE, removed, removed)
        assert client.dbsize() == neighbours
