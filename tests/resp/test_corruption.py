# SPDX-License-Identifier: Apache-2.0
"""Values that are not what was stored: never delivered, never deleted, and replaced by a store."""

from __future__ import annotations

import pytest
import redis

from lmcache_redis.chunks.frame import HEADER_BYTES
from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.resp import RedisPlane
from lmcache_redis.tiers import CallOutcome, FramesResult, ReadOutcome, RemoveResult, WriteOutcome
from tests.resp.helpers import Chunk, chunk_key, describe, read, remove, write
from tests.resp.test_codecs import Change, flip

pytestmark = pytest.mark.usefixtures("both_ways")

SLOT = 4096
SIZE = 5 * SLOT - 100


@pytest.fixture
def stored(plane: RedisPlane, client: redis.Redis) -> Chunk:
    chunk = Chunk(1, SIZE, SLOT, seed=1)
    # A neighbour, to see that nothing else is touched.
    assert set(write(plane, chunk, Chunk(2, SIZE, SLOT, seed=2))) == {WriteOutcome.STORED}
    return chunk


def check(
    plane: RedisPlane, client: redis.Redis, stored: Chunk, outcome: ReadOutcome, what: str = ""
) -> None:
    """What reading the spoiled chunk gives, what is left of it, and that others still load."""
    present = client.exists(*stored.stripe_keys())
    assert read(plane, Chunk(1, SIZE, SLOT)) == [outcome], what
    neighbour = Chunk(2, SIZE, SLOT)
    assert read(plane, neighbour) == [ReadOutcome.LOADED]
    assert neighbour.content == Chunk(2, SIZE, SLOT, seed=2).content
    assert client.exists(*stored.stripe_keys()) == present, "a reader has deleted something"
    assert plane.state.up
    # The same chunk can be stored and loaded again.
    assert write(plane, stored) == [WriteOutcome.STORED]
    assert read(plane, Chunk(1, SIZE, SLOT)) == [ReadOutcome.LOADED]


def spoil(client: redis.Redis, stored: Chunk, stripe: int, change: Change) -> bytearray:
    """Change the value of a stripe at the server. What it is now."""
    key = stored.stripe_keys()[stripe]
    value = bytearray(client.get(key))
    change(value)
    client.set(key, bytes(value))
    return value


# Of which stripe, what is changed, and what its chunk is then. `test_codecs`, `test_frame` and
# `test_bulk` have every field and length.
CHANGES: dict[str, tuple[int, Change, ReadOutcome]] = {
    "magic": (0, flip(0), ReadOutcome.FOREIGN),
    "version": (0, flip(4), ReadOutcome.FOREIGN),
    "a bit of the header": (3, flip(40), ReadOutcome.CORRUPT),
    "its checksum": (0, flip(168), ReadOutcome.CORRUPT),
    "first bit of the payload": (0, flip(HEADER_BYTES), ReadOutcome.CORRUPT),
    "last bit of the payload": (4, flip(-1), ReadOutcome.CORRUPT),
    "one byte short": (2, lambda value: value.pop(), ReadOutcome.CORRUPT),
    "half a header": (4, lambda value: value.__delitem__(slice(200, None)), ReadOutcome.CORRUPT),
    "empty": (0, bytearray.clear, ReadOutcome.FOREIGN),
    "one byte long": (0, lambda value: value.append(1), ReadOutcome.CORRUPT),
    "very long": (4, lambda value: value.extend(bytes(9 << 20)), ReadOutcome.CORRUPT),
    "no header": (2, lambda value: value.__setitem__(slice(0, 99), b"y"), ReadOutcome.FOREIGN),
}


def test_a_value_that_was_changed(plane: RedisPlane, client: redis.Redis, stored: Chunk) -> None:
    for what, (stripe, change, outcome) in CHANGES.items():
        spoil(client, stored, stripe, change)
        check(plane, client, stored, outcome, what)


def test_a_value_of_another_type(plane: RedisPlane, client: redis.Redis, stored: Chunk) -> None:
    for key in stored.stripe_keys()[:2]:
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


def test_a_chunk_cut_into_stripes_otherwise(
    plane: RedisPlane, client: redis.Redis, stored: Chunk
) -> None:
    for slot_bytes in (SLOT // 2, 2 * SLOT, 1 << 20):
        client.unlink(*stored.stripe_keys())
        assert write(plane, Chunk(1, SIZE, slot_bytes, seed=1)) == [WriteOutcome.STORED]
        # Two connections: the other cut is found first, or that there are fewer stripes.
        found = read(plane, Chunk(1, SIZE, SLOT))
        assert found in ([ReadOutcome.FOREIGN], [ReadOutcome.INCOMPLETE])
        check(plane, client, stored, *found)


def test_stripes_of_two_stores(plane: RedisPlane, client: redis.Redis, stored: Chunk) -> None:
    for key in stored.stripe_keys()[1::3]:
        older = client.get(key)
        assert write(plane, stored) == [WriteOutcome.STORED]
        client.set(key, older)
        check(plane, client, stored, ReadOutcome.TORN)


def test_a_later_stripe_is_missing(plane: RedisPlane, client: redis.Redis, stored: Chunk) -> None:
    for key in stored.stripe_keys()[1::3]:
        client.delete(key)
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
    frames = [None, stored.frame, None, None]
    assert describe(plane, keys) == FramesResult(CallOutcome.DONE, frames)


def test_a_removal_is_answered_with_what_was_there(
    plane: RedisPlane, client: redis.Redis, stored: Chunk
) -> None:
    neighbours = client.dbsize() - stored.frame.stripe_count
    for removed in (stored.frame.stripe_count, 0):
        # Of a chunk that is not there, the number of stripes is not known.
        assert remove(plane, stored) == RemoveResult(CallOutcome.DONE, removed, removed)
        assert client.dbsize() == neighbours
