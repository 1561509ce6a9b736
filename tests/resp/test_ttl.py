# SPDX-License-Identifier: Apache-2.0
"""Chunks that expire, counted from the store or from the last load; and RESP3."""

from __future__ import annotations

import pytest

from lmcache_redis.errors import ConfigError
from lmcache_redis.resp import RedisOptions
from lmcache_redis.tiers import ReadOutcome
from tests.resp.helpers import Answers, Chunk, check_loads, check_stores, read, running
from tests.servers import RedisServer

SLOT = 4096


def left_s(server: RedisServer, chunk: Chunk) -> set[int]:
    """Seconds that the stripes of a chunk have left; -1: they stay."""
    with server.client() as client:
        return {int(client.ttl(key)) for key in chunk.stripe_keys()}


def expire_all(server: RedisServer, chunk: Chunk, seconds: int) -> None:
    with server.client() as client:
        for key in chunk.stripe_keys():
            assert client.expire(key, seconds)


def test_without_a_ttl_chunks_stay(server: RedisServer) -> None:
    chunk = Chunk(1, 20_000, SLOT, seed=1)
    with running(server.url) as plane:
        check_stores(plane, chunk)
        assert left_s(server, chunk) == {-1}


def test_every_stripe_of_a_store_expires(server: RedisServer) -> None:
    chunk = Chunk(1, 20_000, SLOT, seed=1)
    with running(server.url, ttl_s=5000) as plane:
        check_stores(plane, chunk)
        assert left_s(server, chunk) <= set(range(4900, 5001))
        expire_all(server, chunk, 100)
        check_loads(plane, chunk)
        assert left_s(server, chunk) <= set(range(1, 101))  # not refreshed
        expire_all(server, chunk, 0)
        assert read(plane, chunk.empty()) == [ReadOutcome.MISSING]


def test_a_load_begins_the_time_anew(server: RedisServer) -> None:
    chunk = Chunk(1, 20_000, SLOT, seed=1)
    with running(server.url, ttl_s=5000, ttl_refresh=True) as plane:
        assert read(plane, chunk.empty()) == [ReadOutcome.MISSING]
        check_stores(plane, chunk)
        expire_all(server, chunk, 100)
        check_loads(plane, chunk)
        assert left_s(server, chunk) <= set(range(4900, 5001))


def test_what_nobody_asked_for_expires_as_before(server: RedisServer) -> None:
    """A load that fills a host pool is no use of the chunk."""
    chunk, loaded = Chunk(1, 20_000, SLOT, seed=1), Chunk(1, 20_000, SLOT)
    with running(server.url, ttl_s=5000, ttl_refresh=True) as plane:
        check_stores(plane, chunk)
        expire_all(server, chunk, 100)
        answers, transfer = Answers(), loaded.io()
        transfer.is_asked_for = False
        plane.load_all([transfer], answers)
        assert answers.of([transfer]) == [ReadOutcome.LOADED]
        assert loaded.content == chunk.content
        assert left_s(server, chunk) <= set(range(1, 101))


def test_impossible_times() -> None:
    for wrong in (-1, 1.5, True, 1 << 40):
        with pytest.raises(ConfigError, match="ttl-s"):
            RedisOptions("redis://h", ttl_s=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ttl-refresh needs"):
        RedisOptions("redis://h", ttl_refresh=True)


def test_checksums_can_be_left_out_to_measure_them(server: RedisServer) -> None:
    chunk, loaded = Chunk(1, 3000, SLOT, seed=1), Chunk(1, 3000, SLOT)
    with running(server.url) as plane, running(server.url, verify_checksums=False) as careless:
        check_stores(plane, chunk)
        server.command("SETRANGE", chunk.stripe_keys()[0], 700, b"damaged")
        assert read(careless, loaded) == [ReadOutcome.LOADED]
        assert read(plane, loaded) == [ReadOutcome.CORRUPT]
