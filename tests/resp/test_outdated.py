# SPDX-License-Identifier: Apache-2.0
"""Sentinels and cluster nodes that do not know what the others know, and servers that move."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from lmcache_redis.tiers import ReadOutcome, WriteOutcome
from tests.resp.helpers import Chunk, check_loads, check_stores, read, running, wait_until, write
from tests.servers import RedisServer, free_port
from tests.topologies import Cluster, CuttableCluster, Watched, another_sentinel, free_node_port

pytestmark = pytest.mark.servers

SLOT = 4096
BIG = 100_000


@pytest.mark.parametrize("is_dead", [True, False], ids=["dead", "replica"])
def test_an_outdated_sentinel_is_left(
    watched: Watched, tmp_path: Path, is_dead: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers alone at first: then two others come that know better."""
    caplog.set_level("INFO")
    ports = [free_port(), free_port()]
    seeds = ",".join(f"127.0.0.1:{port}" for port in (*ports, watched.port))
    believed = free_port() if is_dead else watched.servers[1].port
    watched.stop_sentinel()
    chunk = Chunk(1, 50_000, SLOT, seed=1)
    with (
        another_sentinel(watched, tmp_path / "outdated", ports[0], believed),
        running(f"redis+sentinel://{seeds}/mymaster") as plane,
    ):
        assert plane.state.up is not is_dead
        assert write(plane, chunk) != [WriteOutcome.STORED]
        watched.start_sentinel()
        with another_sentinel(watched, tmp_path / "right", ports[1], watched.servers[0].port):
            wait_until(lambda: write(plane, chunk) == [WriteOutcome.STORED])
            assert watched.servers[0].command("EXISTS", *chunk.stripe_keys()) == chunk.stripe_count
            # It stays with those.
            for number in range(2, 40):
                check_stores(plane, Chunk(number, 5000, SLOT))
    assert f"127.0.0.1:{ports[0]} says 127.0.0.1:{believed}" in caplog.text


def test_a_primary_cut_off_from_its_cluster_with_its_clients(tmp_path: Path) -> None:
    """They reach every node, and the one that they ask is outdated."""
    stored = [Chunk(n, BIG, SLOT, seed=n) for n in range(4)]
    with ExitStack() as stack:
        cluster = CuttableCluster(tmp_path, stack)
        primary = cluster.nodes[0]
        replica = cluster.add_replica(primary)
        # All that it knows is that one.
        with running(cluster.url) as plane:
            check_stores(plane, *stored)
            wait_until(lambda: replica.command("DBSIZE") == primary.command("DBSIZE"))
            cluster.cut_off(primary)
            wait_until(lambda: replica.command("ROLE")[0] == b"master")
            empty = [chunk.empty() for chunk in stored]
            wait_until(lambda: set(read(plane, *empty)) == {ReadOutcome.LOADED})
            check_loads(plane, *stored)
            wait_until(lambda: set(write(plane, *stored)) == {WriteOutcome.STORED})
            assert primary.command("CLUSTER", "INFO").startswith(b"cluster_state:fail")


def move(cluster: Cluster, node: RedisServer) -> None:
    """The node comes back at another address, which the others learn from it."""
    node.kill()
    node.port = free_node_port()
    node.start()
    wait_until(lambda: all(str(node.port).encode() in _nodes(each) for each in cluster.nodes))
    wait_until(lambda: all(cluster.knows_all(each) for each in cluster.nodes))


def _nodes(node: RedisServer) -> bytes:
    found: bytes = node.command("CLUSTER", "NODES")
    return found


def test_nodes_that_come_back_elsewhere_one_after_the_other(tmp_path: Path) -> None:
    """In the end no address is left that the URL, or the first map, had named."""
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack)
        with running(cluster.url) as plane:
            for number, node in enumerate(cluster.nodes):
                chunk = Chunk(number, BIG, SLOT, seed=number)
                wait_until(lambda chunk=chunk: write(plane, chunk) == [WriteOutcome.STORED])  # type: ignore[misc]
                move(cluster, node)
                wait_until(lambda chunk=chunk: write(plane, chunk) == [WriteOutcome.STORED])  # type: ignore[misc]
                assert read(plane, chunk) == [ReadOutcome.LOADED]
