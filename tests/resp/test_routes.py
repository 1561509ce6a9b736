# SPDX-License-Identifier: Apache-2.0
"""Which server has a key, beside redis-py's own arithmetic."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from lmcache_redis.resp.maps import SLOTS, ServerMap
from lmcache_redis.resp.net.endpoint import Endpoint, Transport
from lmcache_redis.resp.routes import Routes, slot_of

SERVERS = tuple(Endpoint(Transport.TCP, host="h", port=port) for port in (1, 2, 3))
NODES = {server: f"node-{server.port}" for server in SERVERS}

keys = st.one_of(
    st.binary(max_size=80),
    st.lists(st.sampled_from([b"{", b"}", b"a", b"\xff", b"{}"]), max_size=12).map(b"".join),
)


@given(keys)
def test_a_slot_is_what_the_server_says(key: bytes) -> None:
    assert slot_of(key) == key_slot(key)


@given(st.lists(keys, max_size=40))
def test_items_are_split_by_the_node_of_their_keys(asked: list[bytes]) -> None:
    ranges = ((0, 5000, 0), (5001, 5001, 1), (5002, 9999, 2), (12000, SLOTS - 1, 0))
    routes = Routes(ServerMap(SERVERS, ranges), NODES)
    assert routes.is_cluster
    parts = routes.split(asked)
    assert sorted(index for part in parts.values() for index in part) == [*range(len(asked))]
    for node, part in parts.items():
        assert part == sorted(part)
        for index in part:
            slot = slot_of(asked[index])
            number = next((n for first, last, n in ranges if first <= slot <= last), None)
            assert node == routes.node_of(asked[index])
            assert node == (None if number is None else NODES[SERVERS[number]])


def test_a_range_ends_with_its_last_slot() -> None:
    edges: dict[int, bytes] = {}
    numbers = itertools.count()
    while len(edges) < 4:
        key = b"%d" % next(numbers)
        if slot_of(key) in (9, 10, 20, 21):
            edges[slot_of(key)] = key
    routes = Routes(ServerMap(SERVERS[:1], ((10, 20, 0),)), NODES)
    found = [routes.node_of(edges[slot]) for slot in (9, 10, 20, 21)]
    assert found == [None, "node-1", "node-1", None]


def test_one_server_has_every_key() -> None:
    routes = Routes(ServerMap(SERVERS[:1]), NODES)
    assert not routes.is_cluster
    assert routes.node_of(b"any") == "node-1"
    assert routes.split([b"a", b"b"]) == {"node-1": [0, 1]}
    assert routes.split([]) == {}


def test_nobody_has_a_key_before_there_is_a_map() -> None:
    routes = Routes(ServerMap(()), NODES)
    assert routes.nodes == ()
    assert routes.node_of(b"any") is None
    assert routes.split([b"a"]) == {None: [0]}
