# SPDX-License-Identifier: Apache-2.0
"""Maps of clusters: of any size, and with servers that the cluster does not name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lmcache_redis.errors import RedisUnavailable
from lmcache_redis.resp import RedisOptions
from lmcache_redis.resp.maps import SLOTS, ServerMap
from lmcache_redis.resp.options import parse_deployment
from tests.resp.helpers import find_servers
from tests.resp.trickling import LyingServer, packed

pytestmark = pytest.mark.servers

Node = tuple[bytes | None, int]


def node(host: bytes | None, port: int) -> list[Any]:
    """As Redis 7 describes it, with a host name."""
    return [host, port, b"a" * 40, [b"hostname", b"cache-1234.cluster.internal.example"]]


def slots(rows: Sequence[tuple[int, int, Sequence[Node]]]) -> bytes:
    return packed([[first, last, *[node(*each) for each in nodes]] for first, last, nodes in rows])


def map_from(reply: bytes) -> tuple[ServerMap, int]:
    """The map that a node makes of its reply to CLUSTER SLOTS, and the node's port."""
    with LyingServer(lambda words: reply if words[1:] == [b"SLOTS"] else None) as server:
        deployment = parse_deployment(RedisOptions(server.url.replace("redis", "redis+cluster")))
        return find_servers(deployment, 20.0), deployment.seeds[0].port


def test_a_range_for_each_slot_and_replicas() -> None:
    """Two masters that have every other slot, after many moves."""
    nodes: list[Sequence[Node]] = [
        ((b"10.0.0.%d" % shard, 6379), (b"10.0.1.%d" % shard, 6379), (b"10.0.2.%d" % shard, 6379))
        for shard in range(2)
    ]
    reply = slots([(slot, slot, nodes[slot % 2]) for slot in range(SLOTS)])
    assert len(reply) > 4 << 20
    found, _ = map_from(reply)
    assert [server.host for server in found.servers] == ["10.0.0.0", "10.0.0.1"]
    assert found.ranges == tuple((slot, slot, slot % 2) for slot in range(SLOTS))


@pytest.mark.parametrize("host", [b"", None])
def test_a_node_without_a_host_is_on_that_of_who_was_asked(host: bytes | None) -> None:
    found, _ = map_from(slots([(0, SLOTS - 1, [(host, 7001)])]))
    assert [(server.host, server.port) for server in found.servers] == [("127.0.0.1", 7001)]


@pytest.mark.parametrize("unknown", [(b"?", 6379), (b"10.0.0.1", 0), (b"?", 0), (None, 70_000)])
def test_a_node_that_is_not_named_is_no_server(unknown: Node) -> None:
    found, _ = map_from(slots([(0, 99, [unknown]), (100, SLOTS - 1, [(b"h", 1)])]))
    assert [server.host for server in found.servers] == ["h"]
    assert found.ranges == ((100, SLOTS - 1, 0),)
    with pytest.raises(RedisUnavailable, match="does not name its servers"):
        map_from(slots([(0, SLOTS - 1, [unknown])]))


def test_a_cluster_without_slots() -> None:
    with pytest.raises(RedisUnavailable, match="has no slots assigned yet"):
        map_from(slots([]))


@pytest.mark.parametrize(
    "rows", [[(0, SLOTS, [(b"h", 1)])], [(5, 4, [(b"h", 1)])], [(-1, 4, [(b"h", 1)])]]
)
def test_a_map_that_cannot_be(rows: Any) -> None:
    with pytest.raises(RedisUnavailable, match="malformed CLUSTER SLOTS reply"):
        map_from(slots(rows))
