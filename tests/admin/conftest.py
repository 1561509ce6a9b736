# SPDX-License-Identifier: Apache-2.0
"""The server shared by tests that leave its settings alone, and clients of it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_redis.admin.server import PrimaryServers, open_server
from lmcache_redis.resp import RedisOptions
from tests.servers import RedisServer
from tests.topologies import Cluster, running_cluster


@pytest.fixture
def redis_server(shared_server: RedisServer) -> RedisServer:
    shared_server.command("FLUSHALL")
    return shared_server


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    with redis_server.client() as client:
        yield client


@pytest.fixture
def server(redis_server: RedisServer) -> Iterator[PrimaryServers]:
    with open_server(RedisOptions(redis_server.unix_url)) as server:
        yield server


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    """An empty one, for tests that neither stop nor change its nodes."""
    for node in shared_cluster.nodes:
        node.command("FLUSHALL")
    return shared_cluster


@pytest.fixture(autouse=True)
def _nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """No thread and no descriptor outlives a test."""
    if not request.node.get_closest_marker("unit"):
        request.getfixturevalue("shared_server")  # what it opens is not the test's
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    if len(os.listdir("/proc/self/fd")) > files:
        gc.collect()  # a client of a cluster that was never made
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= files
