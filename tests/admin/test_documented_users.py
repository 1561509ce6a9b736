# SPDX-License-Identifier: Apache-2.0
"""The users of docs/guides/redis.md may do what the tools do: servers note what they deny."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from lmcache_redis.admin.doctor import examine
from lmcache_redis.admin.facts import Need
from lmcache_redis.admin.inspect import ChunkVerdict, explain, summarise
from lmcache_redis.admin.node import _clock_ahead_s
from lmcache_redis.admin.purge import PurgeResult, Selection, choose, remove
from lmcache_redis.admin.server import open_server
from lmcache_redis.resp import RedisOptions
from tests.acl import PASSWORD, documented_url
from tests.admin.cache import Cached
from tests.servers import RedisServer
from tests.topologies import Cluster, Watched

pytestmark = pytest.mark.servers

_IN_A_CLUSTER = ("+cluster|slots", "+cluster|info", "+asking")
# What agents and tools do without; redis-py tells its version.
_NOT_NEEDED = {"client|setinfo"}


def denied(servers: Sequence[RedisServer]) -> set[str]:
    found = set()
    for server in servers:
        with server.client() as client:
            found |= {entry["object"] for entry in client.acl_log()}
    return found - _NOT_NEEDED


def use_all_tools(options: RedisOptions, chunk: Cached) -> None:
    with open_server(options) as server:
        summary = summarise(server, b"", everything=True, verify=True)
        assert [group.chunks for group in summary.groups] == [1]
        assert summary.survey.database_keys
        report = explain(server, chunk.keys[0], b"", True)
        assert report.verdict is ChunkVerdict.COMPLETE
        assert _clock_ahead_s(server) is not None
        result = PurgeResult()
        chosen = Selection(idle_longer_than_s=-1.0)
        remove(server, choose(server, b"", chosen), 1e6, result)
        assert result.chunks == 1
    diagnosis = examine(options, Need(1, 1.0), bandwidth=True)
    topics = {finding.topic for finding in diagnosis.findings}
    assert {"maxmemory", "io-threads", "load bandwidth", "latency"} <= topics
    assert not {"not seen", "tools", "bandwidth"} & topics


@pytest.mark.parametrize("kind", ["server", "cluster", "sentinel"])
def test_the_tools_as_the_page_says(tmp_path: Path, own_server: RedisServer, kind: str) -> None:
    chunk, more = Cached(1, stripe_count=12), tuple[str, ...]()
    with ExitStack() as stack:
        servers, url = [own_server], own_server.url
        if kind == "cluster":
            cluster = Cluster(tmp_path, stack)
            servers, url, more = cluster.nodes, cluster.url, _IN_A_CLUSTER
        elif kind == "sentinel":
            watched = Watched(tmp_path, stack)
            rights = ("get-master-addr-by-name", "master", "masters")
            rules = [f"+sentinel|{name}" for name in rights]
            watched.sentinel("ACL", "SETUSER", "seer", "on", f">{PASSWORD}", *rules)
            servers = watched.servers
            url = f"{watched.url}?sentinel_username=seer&sentinel_password={PASSWORD}"
        for server in servers:
            documented_url(server, "admin", *more)
        for key, value in zip(chunk.keys, map(chunk.value, range(12)), strict=True):
            (cluster.node_of(key) if kind == "cluster" else servers[0]).command("SET", key, value)
        use_all_tools(RedisOptions(url, username="admin", password=PASSWORD), chunk)
        assert not denied(servers)
