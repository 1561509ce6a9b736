"""Which server has a key. Pure.

A Redis Cluster has 16,384 slots; a key's is CRC16 of the key, or of what stands between its
first { and the next } (https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/).
The stripes of a chunk differ in the last bytes of their keys, so they fall on different
slots: with many stripes, on every shard alike.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from lmcache_redis.resp.endpoint import Endpoint

SLOTS = 16384
# Redirections that a task follows: one is usual, two while a slot moves on.
MAX_HOPS = 5
NodeT = TypeVar("NodeT")
ItemT = TypeVar("ItemT")


class ServerMap(NamedTuple):
    """The data servers, and in a cluster which of them has which slots.

    ranges: (first slot, last slot, number of the server); None: the one server has every key.
    """

    servers: tuple[Endpoint, ...]
    ranges: tuple[tuple[int, int, int], ...] | None = None


class Hop(NamedTuple):
    """A redirection that a task has followed: the how manieth, and whether ASKING is needed."""

    number: int
    asking: bool


class Routes(Generic[NodeT]):
    """From keys to nodes; never changes. None: no server has the key."""

    __slots__ = ("_by_slot", "_single", "nodes")

    def __init__(self, server_map: ServerMap, nodes: Mapping[Endpoint, NodeT]) -> None:
        self.nodes: tuple[NodeT, ...] = tuple(nodes[server] for server in server_map.servers)
        self._single = self.nodes[0] if self.nodes and server_map.ranges is None else None
        self._by_slot: list[NodeT | None] | None = None
        if server_map.ranges is not None:
            self._by_slot = [None] * SLOTS
            for first, last, number in server_map.ranges:
                self._by_slot[first : last + 1] = [self.nodes[number]] * (last + 1 - first)

    @property
    def is_cluster(self) -> bool:
        """Whether a command may name keys of one slot only."""
        return self._by_slot is not None

    def node_of(self, key: bytes) -> NodeT | None:
        """The node that has the key."""
        if self._by_slot is None:
            return self._single
        return self._by_slot[slot_of(key)]

    def nodes_of(
        self, items: Sequence[ItemT], key_of: Callable[[ItemT], bytes]
    ) -> list[NodeT | None]:
        """For each item the node of its key; with one server no key is made."""
        if self._by_slot is None:
            return [self._single] * len(items)
        return [self._by_slot[slot_of(key_of(item))] for item in items]

    def split(
        self, items: Sequence[ItemT], key_of: Callable[[ItemT], bytes]
    ) -> dict[NodeT | None, list[ItemT]]:
        """Items by the node of their keys, in order."""
        if self._by_slot is None:
            return {self._single: list(items)} if items else {}
        by_node: dict[NodeT | None, list[ItemT]] = {}
        for item, node in zip(items, self.nodes_of(items, key_of), strict=True):
            by_node.setdefault(node, []).append(item)
        return by_node


def slot_of(key: bytes) -> int:
    """The slot of a key, 0 to 16,383."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return binascii.crc_hqx(key, 0) % SLOTS
