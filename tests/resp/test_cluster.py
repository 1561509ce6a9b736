# SPDX-License-Identifier: Apache-2.0
"""A Redis Cluster of real servers: stripes over all shards, redirections, lost shards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.resp.routes import slot_of
from lmcache_redis.tiers import CallOutcome, ReadOutcome, WriteOutcome
from tests.resp.helpers import (
    NAMESPACE,
    Chunk,
    chunk_key,
    clear,
    exists,
    read,
    refresh,
    remove,
    running,
    scan,
    wait_until,
    write,
)
from tests.servers import RedisServer
from tests.topologies import Cluster, keys_on, running_cluster

pytestmark = pytest.mark.servers

SLOT = 4096
BIG = 100_000


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    """Three empty shards, shared by tests that leave them as they are: all up, and their slots."""
    for node in shared_cluster.nodes:
        if not node.running:
            node.start()
        wait_until(lambda node=node: b"cluster_state:ok" in node.command("CLUSTER", "INFO"))
        node.command("FLUSHALL")
    return shared_cluster


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three shards that the test may join and reshard."""
    with ExitStack() as stack:
        yield Cluster(tmp_path, stack)


def test_a_chunk_lies_on_one_shard_and_many_on_all(cluster: Cluster) -> None:
    stored = [Chunk(n, BIG + n, SLOT, seed=n) for n in range(30)]
    with running(cluster.url) as plane:
        assert set(write(plane, *stored)) == {WriteOutcome.STORED}
        for chunk in stored:
            assert len({slot_of(key) for key in chunk.stripe_keys()}) == 1
        on_nodes = keys_on(cluster.nodes)
        assert sum(on_nodes) == 30 * stored[0].stripe_count
        assert min(on_nodes) > sum(on_nodes) / 6
        loaded = [Chunk(n, BIG + n, SLOT) for n in range(30)]
        assert set(read(plane, *loaded)) == {ReadOutcome.LOADED}
        assert [c.content for c in loaded] == [c.content for c in stored]
        assert plane.state.up
        assert plane.stats().bytes_in == plane.stats().bytes_out == sum(BIG + n for n in range(30))


def test_scans_and_clears_ask_every_shard(cluster: Cluster) -> None:
    keys = [chunk_key(n) for n in range(200)]
    with running(cluster.url) as plane:
        assert scan(plane, []) == (CallOutcome.DONE, 0)
        assert scan(plane, keys) == (CallOutcome.DONE, 0)
        chunks = [Chunk(n, 3000, SLOT, seed=n) for n in range(200) if n != 150]
        assert set(write(plane, *chunks)) == {WriteOutcome.STORED}
        assert scan(plane, keys) == (CallOutcome.DONE, 150)
        assert exists(plane, keys).present == [n != 150 for n in range(200)]
        cluster.node_of(b"foreign").command("SET", "foreign", "x")
        assert clear(plane, b"lmcr2:" + NAMESPACE)[:2] == (CallOutcome.DONE, 199)
        assert sum(keys_on(cluster.nodes)) == 1


def test_a_chunk_that_lost_a_stripe(cluster: Cluster) -> None:
    """The first stripes to arrive come from whichever shard is faster."""
    chunk = Chunk(1, BIG, SLOT, seed=1)
    with running(cluster.url) as plane:
        for lost in range(chunk.stripe_count):
            assert write(plane, chunk) == [WriteOutcome.STORED]
            key = chunk.stripe_keys()[lost]
            cluster.node_of(key).command("UNLINK", key)
            outcome = ReadOutcome.MISSING if lost == 0 else ReadOutcome.INCOMPLETE
            assert read(plane, Chunk(1, BIG, SLOT)) == [outcome]
            assert sum(keys_on(cluster.nodes)) == chunk.stripe_count - 1


def test_what_moving_slots_have_is_missed_until_they_moved(own_cluster: Cluster) -> None:
    chunk = Chunk(1, BIG, SLOT, seed=1)
    first = chunk.stripe_keys()[0]
    source, slot = own_cluster.node_of(first), slot_of(first)
    with running(own_cluster.url) as plane:
        assert write(plane, chunk) == [WriteOutcome.STORED]
        target = own_cluster.add_node()  # nobody has told the plane of it
        own_cluster.begin_move(slot, source, target)
        assert own_cluster.move_keys(slot, source, target, 99) == chunk.stripe_count
        # The source answers ASK.
        loaded = Chunk(1, BIG, SLOT)
        assert read(plane, loaded) == [ReadOutcome.UNAVAILABLE]
        assert scan(plane, [chunk.key]) == (CallOutcome.UNAVAILABLE, 0)
        assert exists(plane, [chunk.key]).outcome is CallOutcome.UNAVAILABLE
        assert refresh(plane, chunk).outcome is CallOutcome.UNAVAILABLE
        assert remove(plane, chunk)[:2] == (CallOutcome.UNAVAILABLE, 0)
        assert plane.state.up
        # And now MOVED.
        own_cluster.end_move(slot, source, target)
        wait_until(lambda: read(plane, loaded) == [ReadOutcome.LOADED])
        assert loaded.content == chunk.content
        again = Chunk(1, BIG, SLOT, seed=2)
        assert write(plane, again) == [WriteOutcome.STORED]
        assert read(plane, loaded) == [ReadOutcome.LOADED]
        assert loaded.content == again.content
        assert target.command("DBSIZE") == chunk.stripe_count
        assert scan(plane, [chunk.key]) == (CallOutcome.DONE, 1)
        assert remove(plane, chunk)[:2] == (CallOutcome.DONE, chunk.stripe_count)
        assert sum(keys_on(own_cluster.nodes)) == 0


def test_a_lost_shard_costs_only_its_chunks(cluster: Cluster) -> None:
    small = [Chunk(n, 3000, SLOT, seed=n) for n in range(60)]
    keys = [chunk_key(n) for n in range(60)]
    with running(cluster.url) as plane:
        assert set(write(plane, *small)) == {WriteOutcome.STORED}
        lost = cluster.nodes[1]
        on_lost = [cluster.node_of(stripe_key(key, 0)) is lost for key in keys]
        assert 0 < sum(on_lost) < 60
        lost.kill()
        wait_until(lambda: "1 of 3 shards" in plane.state.reason)
        assert plane.state.up
        loaded = [Chunk(n, 3000, SLOT) for n in range(60)]
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
        lost.start()
        wait_until(lambda: "shards are down" not in plane.state.reason)
        wait_until(lambda: set(write(plane, *small)) == {WriteOutcome.STORED})
        assert set(read(plane, *loaded)) == {ReadOutcome.LOADED}


def test_a_removal_says_if_a_shard_was_not_asked(cluster: Cluster) -> None:
    chunks = [Chunk(n, BIG, SLOT, seed=n) for n in range(10)]
    lost = cluster.node_of(chunks[0].key)
    with running(cluster.url) as plane:
        assert set(write(plane, *chunks)) == {WriteOutcome.STORED}
        lost.kill()
        wait_until(lambda: "1 of 3 shards" in plane.state.reason)
        outcomes = set()
        for chunk in chunks:
            is_lost = cluster.node_of(chunk.key) is lost
            removed = remove(plane, chunk, stripe_count=chunk.stripe_count)[:2]
            assert removed == (
                (CallOutcome.UNAVAILABLE, 0) if is_lost else (CallOutcome.DONE, chunk.stripe_count)
            )
            outcomes.add(removed[0])
        assert len(outcomes) == 2


def test_a_replica_takes_over(own_cluster: Cluster) -> None:
    stored = [Chunk(n, BIG, SLOT, seed=n) for n in range(4)]
    master = own_cluster.nodes[2]
    replica = own_cluster.add_replica(master)
    with running(own_cluster.url) as plane:
        assert set(write(plane, *stored)) == {WriteOutcome.STORED}
        wait_until(lambda: replica.command("DBSIZE") == master.command("DBSIZE"))
        master.kill()
        replica.command("CLUSTER", "FAILOVER", "TAKEOVER")
        loaded = [Chunk(n, BIG, SLOT) for n in range(4)]
        wait_until(lambda: set(read(plane, *loaded)) == {ReadOutcome.LOADED})
        assert [c.content for c in loaded] == [c.content for c in stored]
        assert set(write(plane, *stored)) == {WriteOutcome.STORED}
        wait_until(lambda: "shards are down" not in plane.state.reason)


def test_a_shard_that_restarts_empty_makes_no_half_chunk_visible(cluster: Cluster) -> None:
    stored = [Chunk(n, BIG, SLOT, seed=n) for n in range(30)]
    with running(cluster.url) as plane:
        killer = threading.Thread(target=cluster.nodes[1].restart)
        killer.start()
        outcomes = write(plane, *stored)
        killer.join()
        probe = Chunk(1000, BIG, SLOT, seed=1)
        wait_until(lambda: write(plane, probe) == [WriteOutcome.STORED])
        loaded = [Chunk(n, BIG, SLOT) for n in range(30)]
        for chunk, written, outcome in zip(loaded, outcomes, read(plane, *loaded), strict=True):
            if outcome is ReadOutcome.LOADED:
                assert chunk.content == stored[chunk.number].content
            # What was stored before the restart may have lost stripes: a miss, never wrong bytes.
            assert outcome in (ReadOutcome.LOADED, ReadOutcome.MISSING, ReadOutcome.INCOMPLETE)
            assert written in (WriteOutcome.STORED, WriteOutcome.UNAVAILABLE)


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
        chunk, loaded = Chunk(1, BIG, SLOT, seed=1), Chunk(1, BIG, SLOT)
        wait_until(lambda: write(plane, chunk) == [WriteOutcome.STORED])
        assert read(plane, loaded) == [ReadOutcome.LOADED]
        assert loaded.content == chunk.content
