"""Which server has a key, and finding the servers behind Sentinels or in a cluster.

A Redis Cluster has 16,384 slots; a key's slot is CRC16 of the key, or of its part between the first
{ and the next } (https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/). The
stripes of a chunk differ in the last bytes of their keys, so they have different slots: many
stripes spread evenly over the shards.

Sentinels or cluster nodes return a `ServerMap`; `Routes` maps keys to servers.
"""

from __future__ import annotations

import binascii
import contextlib
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.errors import ConfigError, RedisError, RedisRedirect, RedisUnavailable
from lmcache_redis.resp.net.connection import Connection, Connector
from lmcache_redis.resp.net.endpoint import Deployment, Endpoint, Topology
from lmcache_redis.resp.net.wire import pack_command

# No time-out: the deadline bounds a look-up.
_FAR_S = 3600.0
SLOTS = 16384
# A range for each slot, each with three replicas and long host names.
MAX_MAP_BYTES = 16 << 20
# Redirections that a command follows: one is usual, two while a slot is migrating.
MAX_HOPS = 5
NodeT = TypeVar("NodeT")
_CONNECTION_NAME = "lmcache-redis:topology"
# Of a Sentinel and the master, or of a node.
_MOST_KEPT = 2


class ServerMap(NamedTuple):
    """The data servers, and in a cluster the slots of each.

    ranges: (first slot, last slot, number of the server); None: the one server has every key.
    unplaced: (first slot, last slot) of those whose server the cluster does not name.
    """

    servers: tuple[Endpoint, ...]
    ranges: tuple[tuple[int, int, int], ...] | None = None
    unplaced: tuple[tuple[int, int], ...] = ()


class Hop(NamedTuple):
    """The last redirection that a command has followed: the hop count, and whether it is an ASK."""

    hops: int
    asking: bool


def next_hop(hop: Hop | None, redirect: RedisRedirect) -> Hop | None:
    """After another redirection; None: there were too many."""
    hops = 1 if hop is None else hop.hops + 1
    return Hop(hops, redirect.asking) if hops <= MAX_HOPS else None


class Routes(Generic[NodeT]):
    """From keys to nodes; immutable. None: no server has the key.

    unplaced: see `ServerMap`.
    """

    __slots__ = ("_by_slot", "_single", "nodes", "ranges", "unplaced")

    def __init__(self, server_map: ServerMap, nodes: Mapping[Endpoint, NodeT]) -> None:
        self.nodes: tuple[NodeT, ...] = tuple(nodes[server] for server in server_map.servers)
        self.ranges = server_map.ranges
        self.unplaced = server_map.unplaced
        self._single = self.nodes[0] if self.nodes and server_map.ranges is None else None
        self._by_slot: list[NodeT | None] | None = None
        if server_map.ranges is not None:
            self._by_slot = [None] * SLOTS
            for first, last, number in server_map.ranges:
                self._by_slot[first : last + 1] = [self.nodes[number]] * (last + 1 - first)

    @property
    def is_cluster(self) -> bool:
        """Whether the keys of a command must share a slot."""
        return self._by_slot is not None

    def node_of(self, key: bytes) -> NodeT | None:
        if self._by_slot is None:
            return self._single
        return self._by_slot[slot_of(key)]

    def nodes_of(self, chunk_key: bytes, stripe_count: int) -> tuple[NodeT | None, ...]:
        if self._by_slot is None:
            return (self._single,) * stripe_count
        keys = [stripe_key(chunk_key, index) for index in range(stripe_count)]
        return tuple([self.node_of(key) for key in keys])

    def split(self, keys: Sequence[bytes]) -> dict[NodeT | None, list[int]]:
        """The indexes of the keys by the node that has them, in order."""
        if self._by_slot is None:
            return {self._single: list(range(len(keys)))} if keys else {}
        by_node: dict[NodeT | None, list[int]] = {}
        by_slot, crc = self._by_slot, binascii.crc_hqx
        for index, key in enumerate(keys):
            slot = slot_of(key) if b"{" in key else crc(key, 0) % SLOTS
            node = by_slot[slot]
            if node in by_node:
                by_node[node].append(index)
            else:
                by_node[node] = [index]
        return by_node


@dataclass(frozen=True, slots=True, eq=False)
class KeyGroup(Generic[NodeT]):
    """Some keys of a `Routing`, all asked of one node.

    indexes: of the keys. hop: the redirection that led here; if it is an ASK, an ASKING precedes
    each command.
    """

    node: NodeT
    indexes: list[int]
    hop: Hop | None = None


class Routing(Generic[NodeT]):
    """Which node is asked for which of many keys, until no redirection is left to follow.

    No I/O: the caller asks for the `parts`, and then for those that `answered` returns. follow:
    returns the node that a node redirects to, or None if it is not followed. results: for each key
    its result; `missing` if no node has the key or answered for it.
    """

    def __init__(
        self,
        routes: Routes[NodeT],
        keys: Sequence[bytes],
        follow: Callable[[NodeT, RedisRedirect], NodeT | None],
        missing: Any,
    ) -> None:
        self.results: list[Any] = [missing] * len(keys)
        by_node = routes.split(keys)
        self.parts = [KeyGroup(node, some) for node, some in by_node.items() if node is not None]
        self._follow = follow

    def answered(self, part: KeyGroup[NodeT], results: Sequence[Any]) -> list[KeyGroup[NodeT]]:
        """Take the results of a part, none if it failed; return the parts to ask next."""
        parts: dict[tuple[NodeT, bool], KeyGroup[NodeT]] = {}
        for index, result in zip(part.indexes, results, strict=False):
            if not isinstance(result, RedisRedirect):
                self.results[index] = result
                continue
            hop = next_hop(part.hop, result)
            node = self._follow(part.node, result) if hop is not None else None
            if node is not None:
                place = (node, result.asking)
                parts.setdefault(place, KeyGroup(node, [], hop)).indexes.append(index)
        return list(parts.values())


def slot_of(key: bytes) -> int:
    """The slot of a key, 0 to 16,383."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return binascii.crc_hqx(key, 0) % SLOTS


# ----------------------------------------------------------- finding the servers


class ServerFinder:
    """Asks Sentinels or a cluster which servers there are. Keeps the connections that answered.

    timeout_s: for all questions to one server. One thread uses it.
    """

    def __init__(self, deployment: Deployment, timeout_s: float) -> None:
        self._deployment = deployment
        self._timeout_s = timeout_s
        self._kept: dict[Endpoint, Connection] = {}

    def find(
        self,
        known: Iterable[Endpoint] = (),
        deadline: float = math.inf,
        closing: Callable[[], bool] = lambda: False,
    ) -> ServerMap:
        """Ask once; a single server is what the URL says.

        Raises RedisError or ConfigError with a sentence that says what to change.

        known: servers of the last map. One that answered is asked again; then they are asked in any
        order, then the seeds, which may have left the cluster. deadline: `time.monotonic()`, for
        all servers. closing: called before each server; True ends the look-up.
        """
        deployment = self._deployment
        if deployment.topology is Topology.STANDALONE:
            return ServerMap((deployment.server,))
        is_sentinel = deployment.topology is Topology.SENTINEL
        ask_one = self._master if is_sentinel else self._shards
        failure: RedisError | ConfigError = RedisUnavailable(f"{deployment.where} has no servers")
        for endpoint in self._in_order(() if is_sentinel else known):
            until = min(deadline, time.monotonic() + self._timeout_s)
            if closing() or until <= time.monotonic():
                break
            try:
                return ask_one(endpoint, until)
            except (RedisError, ConfigError) as error:
                failure = error
            except (TypeError, ValueError, IndexError, AttributeError):
                command = "SENTINEL" if is_sentinel else "CLUSTER SLOTS"
                failure = RedisUnavailable(f"malformed {command} reply from {endpoint.where}")
            self._drop(endpoint)
        raise failure

    def close(self) -> None:
        for endpoint in list(self._kept):
            self._drop(endpoint)

    def _in_order(self, known: Iterable[Endpoint]) -> Iterable[Endpoint]:
        first, second = list(known), list(self._deployment.seeds)
        random.shuffle(first)
        random.shuffle(second)
        servers = dict.fromkeys((*first, *second))
        return dict.fromkeys((*[each for each in self._kept if each in servers], *servers))

    def _drop(self, endpoint: Endpoint) -> None:
        if (connection := self._kept.pop(endpoint, None)) is not None:
            connection.close()

    def _ask(self, endpoint: Endpoint, deadline: float, *words: str) -> Any:
        """The reply to one command. Raises RedisError and ConfigError."""
        connection = self._kept.pop(endpoint, None)
        if connection is not None:
            connection.check_idle()
        if connection is None or not connection.is_open:
            connector = Connector(endpoint, _FAR_S, _FAR_S)
            connection = Connection(connector, _CONNECTION_NAME, MAX_MAP_BYTES)
        # The one used last is the last.
        self._kept[endpoint] = connection
        if len(self._kept) > _MOST_KEPT:
            self._drop(next(iter(self._kept)))
        if not connection.is_open:
            connection.open(deadline)
        return connection.call(pack_command(*words), 1, deadline)[0]

    def _master(self, endpoint: Endpoint, deadline: float) -> ServerMap:
        deployment = self._deployment
        words = "SENTINEL", "GET-MASTER-ADDR-BY-NAME", deployment.service
        found = self._ask(endpoint, deadline, *words)
        if not found:
            raise RedisUnavailable(
                f"Sentinel at {endpoint.where} watches no master named {deployment.service}: "
                "correct the name in the Redis URL"
            )
        master = deployment.at(_text(found[0]), int(found[1]))
        # Sentinel may be outdated: the server must agree.
        return ServerMap((master,) if self._is_master(master, deadline) else ())

    def _is_master(self, server: Endpoint, deadline: float) -> bool:
        """False only if the server says so; one that does not answer counts as the master."""
        with contextlib.suppress(RedisError, ConfigError):
            role = self._ask(server, deadline, "ROLE")
            return bool(role) and _text(role[0]) == "master"
        return True

    def _shards(self, endpoint: Endpoint, deadline: float) -> ServerMap:
        try:
            rows = self._ask(endpoint, deadline, "CLUSTER", "SLOTS")
        except RedisError as error:
            if "cluster support disabled" in str(error):
                raise ConfigError(
                    f"Redis at {endpoint.where} is no cluster: write redis:// instead of "
                    "redis+cluster://"
                ) from None
            raise
        return _read_slots(self._deployment, endpoint, rows)


def _read_slots(deployment: Deployment, asked: Endpoint, rows: list[list[Any]]) -> ServerMap:
    """Rows are [first slot, last slot, [host, port, id, ...] of the master, replicas...].

    Without a host it is the host that was asked; ? is a host name that is not set, and port 0 a
    port that is not open (https://redis.io/docs/latest/commands/cluster-slots/).
    """
    numbers: dict[tuple[str, int], int] = {}
    ranges: list[tuple[int, int, int]] = []
    unplaced: list[tuple[int, int]] = []
    for first, last, master, *_ in rows:
        if not 0 <= first <= last < SLOTS:
            raise ValueError
        host, port = _text(master[0] or b"") or asked.host, int(master[1])
        if host == "?" or not 0 < port < 1 << 16:
            unplaced.append((first, last))
        else:
            ranges.append((first, last, numbers.setdefault((host, port), len(numbers))))
    if not ranges:
        missing = "does not name its servers (?)" if unplaced else "has no slots assigned yet"
        raise RedisUnavailable(f"the cluster at {asked.where} {missing}")
    servers = tuple(deployment.at(host, port) for host, port in numbers)
    return ServerMap(servers, tuple(ranges), tuple(unplaced))


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
