"""Which server has a key, beside redis-py's own arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from lmcache_redis.errors import RedisRedirect
from lmcache_redis.resp.calls import KeyGroup, Routing
from lmcache_redis.resp.maps import SLOTS, ServerMap
from lmcache_redis.resp.net.stream import Endpoint, Transport
from lmcache_redis.resp.node import MAX_HOPS, Routes, slot_of

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


HALVES = ((0, SLOTS // 2, 0), (SLOTS // 2 + 1, SLOTS - 1, 1))


def redirect(port: int, *, asking: bool = False) -> RedisRedirect:
    return RedisRedirect("elsewhere", "h", port, asking)


def routing_of(asked: Sequence[bytes]) -> Routing[str]:
    routes = Routes(ServerMap(SERVERS[:2], HALVES), NODES)

    def follow(node: str, redirect: RedisRedirect) -> str | None:
        return f"node-{redirect.port}" if redirect.port < 9 else None

    return Routing(routes, asked, follow, "missing")


def part_of(parts: Sequence[KeyGroup[str]], node: str) -> KeyGroup[str]:
    (part,) = [part for part in parts if part.node == node]
    return part


def test_keys_are_asked_of_their_nodes_and_redirections_followed() -> None:
    asked = [b"%d" % number for number in range(100)]
    routing = routing_of(asked)
    for part in routing.parts:
        results: list[Any] = [asked[index] for index in part.indexes]
        assert part.hop is None
        if part.node == "node-2":
            moved, asks = part.indexes[:2], part.indexes[2:3]
            results[:3] = [redirect(3), redirect(3), redirect(1, asking=True)]
            later = routing.answered(part, results)
        else:
            assert routing.answered(part, results) == []
    part = part_of(later, "node-3")
    assert part.indexes == moved
    assert part.hop is not None
    assert not part.hop.asking
    # Half of it moves on, and back comes an ASK: another redirection counts on.
    (part,) = routing.answered(part, [redirect(2, asking=True), asked[moved[1]]])
    assert (part.node, part.indexes) == ("node-2", moved[:1])
    assert part.hop is not None
    assert (part.hop.hops, part.hop.asking) == (2, True)
    assert routing.answered(part, [asked[moved[0]]]) == []
    part = part_of(later, "node-1")
    assert (part.indexes, part.hop and part.hop.asking) == (asks, True)
    assert routing.answered(part, [asked[asks[0]]]) == []
    assert routing.results == asked


def test_an_ask_and_a_moved_are_asked_apart() -> None:
    """Only one of the two wants ASKING before its command."""
    routing = routing_of([b"a", b"b", b"c", b"d"])
    part = max(routing.parts, key=lambda part: len(part.indexes))
    first, second = part.indexes[:2]
    asks, moved = routing.answered(part, [redirect(3, asking=True), redirect(3)])
    assert (asks.node, asks.indexes, asks.hop and asks.hop.asking) == ("node-3", [first], True)
    assert (moved.node, moved.indexes, moved.hop and moved.hop.asking) == (
        "node-3",
        [second],
        False,
    )


def test_a_redirection_that_leads_nowhere_leaves_the_key_missing() -> None:
    routing = routing_of([b"a"])
    (part,) = routing.parts
    for _ in range(MAX_HOPS):
        (part,) = routing.answered(part, [redirect(3)])
    assert routing.answered(part, [redirect(3)]) == []
    assert routing.results == ["missing"]
    assert routing.answered(routing_of([b"a"]).parts[0], [redirect(9)]) == []


def test_a_part_that_failed_leaves_its_keys_missing() -> None:
    routing = routing_of([b"a", b"b", b"c", b"d"])
    lost, answered = routing.parts
    assert routing.answered(lost, ()) == []
    assert routing.answered(answered, ["there"] * len(answered.indexes)) == []
    assert {routing.results[index] for index in lost.indexes} == {"missing"}
    assert {routing.results[index] for index in answered.indexes} == {"there"}
