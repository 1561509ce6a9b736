# SPDX-License-Identifier: Apache-2.0
"""Values that are not what was stored: never delivered, never deleted, and replaced by a store."""

from __future__ import annotations

import pytest
import redis

from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.resp import RedisPlane
from lmcache_redis.tiers import CallOutcome, FramesResult, ReadOutcome
from tests.resp.helpers import (
    Chunk,
    check_loads,
    check_moves,
    check_stores,
    chunk_key,
    describe,
    read,
)
from tests.resp.test_codecs import Change, flip

pytestmark = pytest.mark.usefixtures("both_ways")

SLOT = 4096
SIZE = 5 * SLOT - 100
NEIGHBOUR = Chunk(2, SIZE, SLOT, seed=2)


@pytest.fixture
def stored(plane: RedisPlane) -> Chunk:
    """Beside a neighbour, to see that nothing else is touched."""
    chunk = Chunk(1, SIZE, SLOT, seed=1)
    check_stores(plane, chunk, NEIGHBOUR)
    return chunk


def check(
    plane: RedisPlane, client: redis.Redis, stored: Chunk, outcome: ReadOutcome, what: str = ""
) -> None:
    """What reading the spoiled chunk gives, what is left of it, and that others still load."""
    present = client.exists(*stored.stripe_keys())
    assert read(plane, stored.empty()) == [outcome], what
    check_loads(plane, NEIGHBOUR)
    assert client.exists(*stored.stripe_keys()) == present, "a reader has deleted something"
    assert plane.state.up
    # The same chunk can be stored and loaded again.
    check_moves(plane, stored)


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
    "a bit of the header": (3, flip(40), ReadOutcome.CORRUPT),
    "last bit of the payload": (4, flip(-1), ReadOutcome.CORRUPT),
    "one byte short": (2, lambda value: value.pop(), ReadOutcome.CORRUPT),
    "half a header": (4, lambda value: value.__delitem__(slice(200, None)), ReadOutcome.CORRUPT),
    "empty": (0, bytearray.clear, ReadOutcome.FOREIGN),
    "very long": (4, lambda value: value.extend(bytes(9 << 20)), ReadOutcome.CORRUPT),
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


def test_a_value_of_another_layout_chunk_or_stripe(
    plane: RedisPlane, client: redis.Redis, stored: Chunk
) -> None:
    check_stores(plane, Chunk(1, SIZE, SLOT, seed=9, fingerprint=b"\x77" * 32))
    check(plane, client, stored, ReadOutcome.FOREIGN)
    key, other_stripe = stored.stripe_keys()[1:3]
    for other in (NEIGHBOUR.stripe_keys()[1], other_stripe):
        client.set(key, client.get(other))
        check(plane, client, stored, ReadOutcome.FOREIGN)


def test_a_chunk_cut_into_stripes_otherwise(
    plane: RedisPlane, client: redis.Redis, stored: Chunk
) -> None:
    for slot_bytes in (SLOT // 2, 2 * SLOT, 1 << 20):
        client.unlink(*stored.stripe_keys())
        check_stores(plane, Chunk(1, SIZE, slot_bytes, seed=1))
        # Two connections: the other cut is found first, or that there are fewer stripes.
        found = read(plane, stored.empty())
        assert found in ([ReadOutcome.FOREIGN], [ReadOutcome.INCOMPLETE])
        check(plane, client, stored, *found)


def test_stripes_of_two_stores(plane: RedisPlane, client: redis.Redis, stored: Chunk) -> None:
    for key in stored.stripe_keys()[1::3]:
        older = client.get(key)
        check_stores(plane, stored)
        client.set(key, older)
        check(plane, client, stored, ReadOutcome.TORN)


def test_stripes_that_are_missing(plane: RedisPlane, client: redis.Redis, stored: Chunk) -> None:
    first, second, *_, last = stored.stripe_keys()
    for gone, outcome in (
        ([second], ReadOutcome.INCOMPLETE),
        ([last], ReadOutcome.INCOMPLETE),
        ([first], ReadOutcome.MISSING),
        ([first, second], ReadOutcome.MISSING),
    ):
        client.delete(*gone)
        check(plane, client, stored, outcome)


def test_a_description_is_that_of_the_headers(
    plane: RedisPlane, client: redis.Redis, stored: Chunk
) -> None:
    client.set(stripe_key(chunk_key(8), 0), b"not ours")
    client.set(stripe_key(chunk_key(7), 0), client.get(stored.stripe_keys()[1]))
    keys = [chunk_key(9), stored.key, chunk_key(8), chunk_key(7)]
    frames = [None, stored.frame, None, None]
    assert describe(plane, keys) == FramesResult(CallOutcome.DONE, frames)
