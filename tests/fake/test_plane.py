# SPDX-License-Identifier: Apache-2.0
"""The data plane without a server binary: a fake Redis of this process behind a TCP port."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmcache_redis.chunks.names import parse_stripe_key, stripe_key
from lmcache_redis.resp import RedisPlane
from lmcache_redis.tiers import CallOutcome, ReadOutcome, WriteOutcome
from tests.fake.server import FakeRedisServer
from tests.resp.helpers import (
    STEM,
    Chunk,
    chunk_key,
    clear,
    describe,
    exists,
    first_key,
    read,
    running,
    scan,
    write,
)

STORED, LOADED, MISSING = WriteOutcome.STORED, ReadOutcome.LOADED, ReadOutcome.MISSING
SLOT_BYTES = (1 << 20) - 4096


@pytest.fixture
def plane(fake: FakeRedisServer) -> Iterator[RedisPlane]:
    with running(fake.url) as made:
        assert made.state.up
        yield made


@pytest.mark.parametrize(
    ("chunk_bytes", "slot_bytes"),
    [(1, 4096), (4096, 4096), (70_000, 4096), (SLOT_BYTES, SLOT_BYTES), (3_000_000, SLOT_BYTES)],
)
def test_chunks_come_back_as_they_were(
    plane: RedisPlane, chunk_bytes: int, slot_bytes: int
) -> None:
    stored = [Chunk(n, chunk_bytes, slot_bytes, seed=n) for n in range(2)]
    assert write(plane, *stored) == [STORED, STORED]
    found = [Chunk(n, chunk_bytes, slot_bytes) for n in range(3)]
    assert read(plane, *found) == [LOADED, LOADED, MISSING]
    assert [chunk.content for chunk in found[:2]] == [chunk.content for chunk in stored]
    assert not any(found[2].content)


def test_zeros_too(plane: RedisPlane) -> None:
    """No line end in the payload."""
    assert write(plane, Chunk(1, 5000, 4096)) == [STORED]
    assert read(plane, Chunk(1, 5000, 4096)) == [LOADED]


def test_a_scan_finds_the_cached_prefix(plane: RedisPlane) -> None:
    """Over several groups of EXISTS."""
    write(plane, *(Chunk(n, 64, 64, seed=n) for n in range(100) if n != 70))
    keys = [chunk_key(n) for n in range(100)]
    assert scan(plane, keys).prefix_length == 70
    assert scan(plane, keys[71:]).prefix_length == 29
    found = exists(plane, keys)
    assert found.outcome is CallOutcome.DONE
    assert found.present == [n != 70 for n in range(100)]


def test_a_header_says_what_a_chunk_is(plane: RedisPlane) -> None:
    chunk = Chunk(1, 9000, 4096, seed=1)
    write(plane, chunk)
    found = describe(plane, [chunk_key(1), chunk_key(2)])
    assert found.outcome is CallOutcome.DONE
    described, missing = found.frames
    assert described is not None
    assert described.chunk_bytes == 9000
    assert missing is None


def test_a_missing_stripe_is_a_miss(plane: RedisPlane, fake: FakeRedisServer) -> None:
    chunk = Chunk(1, 9000, 4096, seed=1)
    write(plane, chunk)
    fake.command("DEL", stripe_key(chunk_key(1), 2))
    assert read(plane, Chunk(1, 9000, 4096)) == [ReadOutcome.INCOMPLETE]


def test_a_foreign_value_is_a_miss(plane: RedisPlane, fake: FakeRedisServer) -> None:
    for value in (b"", b"plain", b"x" * 5000):
        fake.command("SET", first_key(1), value)
        assert read(plane, Chunk(1, 4096, 4096)) == [ReadOutcome.FOREIGN]
    fake.command("DEL", first_key(1))
    assert read(plane, Chunk(1, 4096, 4096)) == [MISSING]


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


def test_a_server_that_is_gone_is_down() -> None:
    with FakeRedisServer() as fake, running(fake.url) as plane:
        assert write(plane, Chunk(1, 64, 64, seed=1)) == [STORED]
        fake.stop()
        assert read(plane, Chunk(1, 64, 64)) == [ReadOutcome.UNAVAILABLE]
