# SPDX-License-Identifier: Apache-2.0
"""A Redis Cluster of real servers: chunks on all shards, and lost shards."""

from __future__ import annotations

import pytest

from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.resp.routes import slot_of
from lmcache_redis.tiers import CallOutcome, ReadOutcome, WriteOutcome
from tests.resp.helpers import (
    Chunk,
    check_loads,
    check_moves,
    check_stores,
    chunk_key,
    clear,
    exists,
    read,
    remove,
    running,
    scan,
    wait_until,
    write,
)
from tests.servers import RedisServer
from tests.topologies import Cluster, keys_on

pytestmark = pytest.mark.servers

SLOT = 4096
BIG = 100_000


def test_a_chunk_lies_on_one_shard_and_many_on_all(cluster: Cluster) -> None:
    stored = [Chunk(n, BIG + n, SLOT, seed=n) for n in range(30)]
    with running(cluster.url) as plane:
        check_moves(plane, *stored)
        for chunk in stored:
            assert len({slot_of(key) for key in chunk.stripe_keys()}) == 1
        on_nodes = keys_on(cluster.nodes)
        assert sum(on_nodes) == 30 * stored[0].stripe_count
        assert min(on_nodes) > sum(on_nodes) / 6
        assert plane.state.up
        assert plane.stats().bytes_in == plane.stats().bytes_out == sum(BIG + n for n in range(30))


def test_a_lost_shard_costs_only_its_chunks(cluster: Cluster) -> None:
    small = [Chunk(n, 3000, SLOT, seed=n) for n in range(60)]
    keys = [chunk_key(n) for n in range(60)]
    with running(cluster.url) as plane:
        check_stores(plane, *small)
        lost = cluster.nodes[1]
        on_lost = [cluster.node_of(stripe_key(key, 0)) is lost for key in keys]
        assert 0 < sum(on_lost) < 60
        lost.kill()
        wait_until(lambda: "1 of 3 shards" in plane.state.reason)
        assert plane.state.up
        loaded = [chunk.empty() for chunk in small]
        outcomes = read(plane, *loaded)
        for chunk, outcome, gone in zip(loaded, outcomes, on_lost, strict=True):
            assert outcome is (ReadOutcome.UNAVAILABLE if gone else ReadOutcome.LOADED)
            assert gone or chunk.content == small[chunk.number].content
        assert exists(plane, keys)[:2] == (
            CallOutcome.DONE,
            [None if gone else True for gone in on_lost],
        )
        assert scan(plane, keys) == (CallOutcome.UNAVAILABLE, on_lost.index(True))
        assert WriteOutcome.UNAVAILABLE in write(plane, *small)
        for chunk, gone in zip(small, on_lost, strict=True):
            expected = (CallOutcome.UNAVAILABLE, 0) if gone else (CallOutcome.DONE, 1)
            assert remove(plane, chunk, stripe_count=1)[:2] == expected
        lost.start()
        wait_until(lambda: "shards are down" not in plane.state.reason)
        wait_until(lambda: set(write(plane, *small)) == {WriteOutcome.STORED})
        check_loads(plane, *small)


def test_a_url_of_the_other_kind_says_what_to_write(cluster: Cluster, server: RedisServer) -> None:
    with running(f"redis+cluster://127.0.0.1:{server.port}") as plane:
        assert not plane.state.up
        assert "is no cluster: write redis:// instead" in plane.state.reason
        assert write(plane, Chunk(1, 3000, SLOT)) == [WriteOutcome.UNAVAILABLE]
        assert scan(plane, [chunk_key(1)]).outcome is CallOutcome.UNAVAILABLE
        assert clear(plane, b"lmcr2:").outcome is CallOutcome.UNAVAILABLE
    with running(f"redis://127.0.0.1:{cluster.nodes[0].port}") as plane:
        assert WriteOutcome.UNAVAILABLE in write(plane, *(Chunk(n, BIG, SLOT) for n in range(3)))
        assert "redis+cluster://" in plane.state.reason


def test_nodes_that_come_later(cluster: Cluster) -> None:
    for node in cluster.nodes:
        node.kill()
    with running(cluster.url) as plane:
        assert not plane.state.up
        assert read(plane, Chunk(1, 3000, SLOT)) == [ReadOutcome.UNAVAILABLE]
        for node in cluster.nodes:
            node.start()
        chunk = Chunk(1, BIG, SLOT, seed=1)
        wait_until(lambda: write(plane, chunk) == [WriteOutcome.STORED])
        check_loads(plane, chunk)
