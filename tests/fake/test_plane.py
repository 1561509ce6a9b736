# SPDX-License-Identifier: Apache-2.0
"""The data plane without a server binary. `tests/resp` has the same and more, over real servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmcache_redis.chunks.names import parse_stripe_key
from lmcache_redis.resp import RedisPlane
from lmcache_redis.tiers import CallOutcome, ReadOutcome, WriteOutcome
from tests.fake.server import FakeRedisServer
from tests.resp.helpers import STEM, Chunk, clear, read, running, write

STORED, LOADED, MISSING = WriteOutcome.STORED, ReadOutcome.LOADED, ReadOutcome.MISSING
SLOT_BYTES = (1 << 20) - 4096


@pytest.fixture
def plane(fake: FakeRedisServer) -> Iterator[RedisPlane]:
    with running(fake.url) as made:
        assert made.state.up
        yield made


@pytest.mark.parametrize(
    ("chunk_bytes", "slot_bytes"), [(1, 4096), (70_000, 4096), (3_000_000, SLOT_BYTES)]
)
def test_chunks_come_back_as_they_were(
    plane: RedisPlane, chunk_bytes: int, slot_bytes: int
) -> None:
    """Also zeros, which have no line end."""
    stored = [Chunk(n, chunk_bytes, slot_bytes, seed=n or None) for n in range(2)]
    assert write(plane, *stored) == [STORED, STORED]
    found = [Chunk(n, chunk_bytes, slot_bytes) for n in range(3)]
    assert read(plane, *found) == [LOADED, LOADED, MISSING]
    assert [chunk.content for chunk in found[:2]] == [chunk.content for chunk in stored]
    assert not any(found[2].content)


def test_clearing_removes_the_keys_of_a_prefix_only(
    plane: RedisPlane, fake: FakeRedisServer
) -> None:
    write(plane, *(Chunk(n, 9000, 4096, seed=n) for n in range(4)))
    fake.command("SET", "another program's", "value")
    cleared = clear(plane, STEM)
    assert (cleared.outcome, cleared.removed) == (CallOutcome.DONE, 12)
    assert fake.command("KEYS", "*") == [b"another program's"]


def test_chunks_expire_and_a_load_restarts_that(fake: FakeRedisServer) -> None:
    with running(fake.url, ttl_s=100, ttl_refresh=True) as plane:
        write(plane, Chunk(1, 64, 64, seed=1))
        (key,) = fake.command("KEYS", "*")
        assert parse_stripe_key(key) is not None
        assert 90 < fake.command("TTL", key) <= 100
        fake.command("EXPIRE", key, 10)
        assert read(plane, Chunk(1, 64, 64)) == [LOADED]
        assert 90 < fake.command("TTL", key) <= 100
