# SPDX-License-Identifier: Apache-2.0
"""From keys to nodes, and where a redirection leads. Decisions without I/O.

A Redis Cluster has 16,384 slots; a key's slot is CRC16 of the key, or of its part between the first
{ and the next } (https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/). The
stripes of a chunk differ in the last bytes of their keys, so they have different slots: many
stripes spread over the shards.

A node that does not have a slot names the one that has it (MOVED), or that may have it while the
slot moves (ASK). Nothing is believed that no map has named: no address, and no password for it.

    MOVED, the map names the server       the slot is that server's from now on; the step is tried
                                          once more there
    MOVED to any other server             the step waits for a map that names it
    ASK, the map names the server         a read is tried once more there, after ASKING
    anything else, or a second time       not known

A MOVED that answers a request from before the last map changes no slot: the map may be newer.
"""

from __future__ import annotations

import binascii
import functools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.resp.maps import SLOTS, ServerMap
from lmcache_redis.resp.net.endpoint import Endpoint

NodeT = TypeVar("NodeT")

_REDIRECT = re.compile(r"(MOVED|ASK) [0-9]{1,5} (\S*):([0-9]{1,5})(?:\s|\Z)")


class Routes(Generic[NodeT]):
    """From keys to nodes; immutable. None: no server has the key. map: the last one."""

    def __init__(self, server_map: ServerMap, nodes: Mapping[Endpoint, NodeT]) -> None:
        self.nodes: tuple[NodeT, ...] = tuple(nodes[server] for server in server_map.servers)
        self.map = server_map
        self.is_changed = False  # slots have moved since
        self._single = self.nodes[0] if self.nodes and server_map.ranges is None else None
        self._by_slot: list[NodeT | None] | None = None
        if server_map.ranges is not None:
            self._by_slot = [None] * SLOTS
            for first, last, number in server_map.ranges:
                self._by_slot[first : last + 1] = [self.nodes[number]] * (last + 1 - first)

    @functools.cached_property
    def unserved(self) -> int:
        """How many slots no server has."""
        return 0 if self._by_slot is None else self._by_slot.count(None)

    @property
    def is_cluster(self) -> bool:
        """Whether the keys of a command must share a slot."""
        return self._by_slot is not None

    def node_of(self, key: bytes) -> NodeT | None:
        return self._single if self._by_slot is None else self._by_slot[slot_of(key)]

    def node_of_slot(self, slot: int) -> NodeT | None:
        return self._single if self._by_slot is None else self._by_slot[slot]

    def nodes_of(self, chunk_key: bytes, stripe_count: int) -> tuple[NodeT | None, ...]:
        if self._by_slot is None:
            return (self._single,) * stripe_count
        keys = [stripe_key(chunk_key, index) for index in range(stripe_count)]
        return tuple([self.node_of(key) for key in keys])

    def split(self, keys: Sequence[bytes]) -> dict[NodeT | None, list[int]]:
        """The indexes of the keys by the node that has them, in order."""
        if self._by_slot is None:
            return {self._single: list(range(len(keys)))} if keys else {}
        by_node: dict[NodeT | None, list[int]] = defaultdict(list)
        for index, key in enumerate(keys):
            by_node[self._by_slot[slot_of(key)]].append(index)
        return by_node

    def named(self, host: str, port: int) -> NodeT | None:
        """The node at an address, if the map names it."""
        for server, node in zip(self.map.servers, self.nodes, strict=True):
            if (server.host, server.port) == (host, port):
                return node
        return None

    def with_slot(self, slot: int, node: NodeT) -> Routes[NodeT]:
        """The same map, with the slot that has moved since."""
        assert self._by_slot is not None
        moved: Routes[NodeT] = Routes.__new__(Routes)
        moved.nodes, moved.map, moved._single = self.nodes, self.map, None
        moved.is_changed = True
        moved._by_slot = self._by_slot.copy()
        moved._by_slot[slot] = node
        return moved


def slot_of(key: bytes) -> int:
    """The slot of a key, 0 to 16,383."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return binascii.crc_hqx(key, 0) % SLOTS


class Redirect(NamedTuple):
    """What a redirection says. An empty host is that of the server that was asked."""

    is_ask: bool
    host: str
    port: int


def parse_redirect(text: str) -> Redirect | None:
    """The text of an error reply, `MOVED slot host:port` or `ASK slot host:port`."""
    match = _REDIRECT.match(text)
    return match and Redirect(match[1] == "ASK", match[2], int(match[3]))


@dataclass(frozen=True, slots=True)
class Lead(Generic[NodeT]):
    """Where a redirection leads.

    to: the node to try once more; None: what was asked is not known. is_asking: after ASKING.
    moves_to: the node that has the slot from now on; None: no news. waits: for another map.
    """

    to: NodeT | None = None
    is_asking: bool = False
    moves_to: NodeT | None = None
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Redirected(Generic[NodeT]):
    """A step that was answered with a redirection.

    redirect: None if it cannot be read. slot: of the key. asked: the node that said it, at
    `asked_host`. sent: the routes that the step went by. is_tried: it was the second try.
    """

    redirect: Redirect | None
    slot: int
    asked: NodeT
    asked_host: str
    sent: Routes[NodeT]
    is_write: bool
    is_tried: bool

    def lead(self, now: Routes[NodeT]) -> Lead[NodeT]:
        """By the routes of now; see the module."""
        if self.redirect is None or not now.is_cluster:
            return Lead()
        is_ask, host, port = self.redirect
        owner = now.node_of_slot(self.slot)
        if owner is not None and owner is not self.asked:
            # A map, or another redirection, has said so since.
            return Lead(None if self.is_tried else owner)
        target = now.named(host or self.asked_host, port)
        if target is self.asked:
            return Lead()
        if is_ask:
            return Lead(None if self.is_tried or self.is_write else target, is_asking=True)
        if target is None:
            return Lead(waits=not self.is_tried)
        moves_to = target if now.map is self.sent.map else None
        return Lead(None if self.is_tried else target, moves_to=moves_to)
