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
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from lmcache_redis.chunks.keys import stripe_key
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

    __slots__ = ("_by_slot", "_single", "nodes", "unplaced")

    def __init__(self, server_map: ServerMap, nodes: Mapping[Endpoint, NodeT]) -> None:
        self.nodes: tuple[NodeT, ...] = tuple(nodes[server] for server in server_map.servers)
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
        for index, key in enumerate(keys):
            by_node.setdefault(self._by_slot[slot_of(key)], []).append(index)
        return by_node


@dataclass(frozen=True, slots=True, eq=False)
class Part(Generic[NodeT]):
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
        self.parts = [Part(node, some) for node, some in by_node.items() if node is not None]
        self._follow = follow

    def answered(self, part: Part[NodeT], results: Sequence[Any]) -> list[Part[NodeT]]:
        """Take the results of a part, none if it failed; return the parts to ask next."""
        parts: dict[tuple[NodeT, bool], Part[NodeT]] = {}
        for index, result in zip(part.indexes, results, strict=False):
            if not isinstance(result, RedisRedirect):
                self.results[index] = result
                continue
            hop = next_hop(part.hop, result)
            node = self._follow(part.node, result) if hop is not None else None
            if node is not None:
                place = (node, result.asking)
                parts.setdefault(place, Part(node, [], hop)).indexes.append(index)
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


def find_servers(
    deployment: Deployment,
    known: Iterable[Endpoint],
    timeout_s: float,
    deadline: float = math.inf,
    closing: Callable[[], bool] = lambda: False,
) -> ServerMap:
    """Ask Sentinels or a cluster once; a single server is what the URL says.

    Raises RedisError or ConfigError with a sentence that says what to change.

    known: servers of the last map, asked before the seeds, which may have left the cluster.
    timeout_s: for all questions to one server; deadline (`time.monotonic()`): for all servers.
    closing: called before each server; True ends the look-up.
    """
    if deployment.topology is Topology.STANDALONE:
        return ServerMap((deployment.server,))
    is_sentinel = deployment.topology is Topology.SENTINEL
    ask_one = _master if is_sentinel else _shards
    servers = deployment.seeds if is_sentinel else (*known, *deployment.seeds)
    failure: RedisError | ConfigError = RedisUnavailable(f"{deployment.where} has no servers")
    for endpoint in dict.fromkeys(servers):
        until = min(deadline, time.monotonic() + timeout_s)
        if closing() or until <= time.monotonic():
            break
        try:
            return ask_one(deployment, endpoint, until)
        except (RedisError, ConfigError) as error:
            failure = error
        except (TypeError, ValueError, IndexError, AttributeError):
            command = "SENTINEL" if is_sentinel else "CLUSTER SLOTS"
            failure = RedisUnavailable(f"malformed {command} reply from {endpoint.where}")
    raise failure


def _ask(endpoint: Endpoint, deadline: float, *words: str) -> Any:
    """The reply to one command on a connection of its own. Raises RedisError and ConfigError."""
    connection = Connection(Connector(endpoint, _FAR_S, _FAR_S), _CONNECTION_NAME, MAX_MAP_BYTES)
    try:
        connection.open(deadline)
        return connection.call(pack_command(*words), 1, deadline)[0]
    finally:
        connection.close()


def _master(deployment: Deployment, endpoint: Endpoint, deadline: float) -> ServerMap:
    found = _ask(endpoint, deadline, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", deployment.service)
    if not found:
        raise RedisUnavailable(
            f"Sentinel at {endpoint.where} watches no master named {deployment.service}: "
            "correct the name in the Redis URL"
        )
    master = deployment.at(_text(found[0]), int(found[1]))
    # Sentinel may be outdated: the server must agree.
    return ServerMap((master,) if _is_master(master, deadline) else ())


def _is_master(server: Endpoint, deadline: float) -> bool:
    """False only if the server says so; one that does not answer counts as the master."""
    with contextlib.suppress(RedisError, ConfigError):
        role = _ask(server, deadline, "ROLE")
        return bool(role) and _text(role[0]) == "master"
    return True


def _shards(deployment: Deployment, endpoint: Endpoint, deadline: float) -> ServerMap:
    try:
        rows = _ask(endpoint, deadline, "CLUSTER", "SLOTS")
    except RedisError as error:
        if "cluster support disabled" in str(error):
            raise ConfigError(
                f"Redis at {endpoint.where} is no cluster: write redis:// instead of "
                "redis+cluster://"
            ) from None
        raise
    return _read_slots(deployment, endpoint, rows)


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
