# SPDX-License-Identifier: Apache-2.0
"""Servers for the tests of the plane, and a check that nothing is left behind."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis

from lmcache_redis import native
from lmcache_redis.resp import RedisPlane
from lmcache_redis.resp.maps import SLOTS
from tests import forks
from tests.resp.certificates import Authority
from tests.resp.helpers import our_connections, plane_threads, running, wait_until
from tests.resp.proxy import Proxy
from tests.servers import RedisServer
from tests.topologies import Cluster, Watched, running_cluster, running_sentinel


@pytest.fixture
def plane(server: RedisServer) -> Iterator[RedisPlane]:
    with running(server.url) as plane:
        yield plane


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    """Three empty shards, shared by tests that add no node. They may move slots."""
    nodes = shared_cluster.nodes
    for node in nodes:
        if not node.running:
            node.start()
        node.command("FLUSHALL")
        for slot in re.findall(r"\[(\d+)-[<>]-", node.command("CLUSTER", "NODES").decode()):
            node.command("CLUSTER", "SETSLOT", slot, "STABLE")
    wait_until(lambda: all(map(shared_cluster.knows_all, nodes)))
    share = -(-SLOTS // len(nodes))
    for first, last, port in _agreed_ranges(nodes):
        (owner,) = (node for node in nodes if node.port == port)
        for slot in range(first, last + 1):
            if (home := nodes[slot // share]) is not owner:
                shared_cluster.move(slot, owner, home)
    _agreed_ranges(nodes)
    return shared_cluster


def _agreed_ranges(nodes: Sequence[RedisServer]) -> Sequence[tuple[int, int, int]]:
    """First slot, last slot and port of the master, as all nodes have them."""

    def said_by(node: RedisServer) -> tuple[tuple[int, int, int], ...]:
        ranges = node.command("CLUSTER", "SLOTS")
        return tuple(sorted((first, last, int(master[1])) for first, last, master, *_ in ranges))

    wait_until(lambda: len(set(map(said_by, nodes))) == 1, "the nodes disagree on the slots")
    return said_by(nodes[0])


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    with running_sentinel(tmp_path) as watched:
        yield watched


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture(params=["compiled", "python"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stripes are moved by the native extension, and without it."""
    if request.param == "python":
        monkeypatch.setattr(native, "moves", None)
    elif native.moves is None:
        pytest.skip(native.why_not)


@pytest.fixture(autouse=True)
def _nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """No thread and no descriptor outlives a test, and the server has none of our connections."""
    if request.node.get_closest_marker("unit"):
        yield
        return
    shared_server: RedisServer = request.getfixturevalue("shared_server")
    forks.start_server()
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert plane_threads() == []
    assert len(os.listdir("/proc/self/fd")) <= before
    wait_until(lambda: not our_connections(shared_server), "a connection was left at the server")
