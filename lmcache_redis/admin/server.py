"""Clients of the server that a URL names. The only place where the admin tools make one.

Everything else asks `Server.nodes`: the processes that hold keys, one for a single server.
Replies are those of the data plane's reader, bounded as it bounds them, each by its deadline.
No message contains a secret.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_redis.errors import (
    RedisAuthError,
    RedisError,
    RedisFull,
    RedisProtocolError,
    RedisReplyError,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp.bulk import BulkConnection, Found
from lmcache_redis.resp.connect import Connector
from lmcache_redis.resp.deployment import Topology, parse_deployment
from lmcache_redis.resp.endpoint import Endpoint
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.resp.routes import Routes, ServerMap
from lmcache_redis.resp.topology import find_servers
from lmcache_redis.resp.wire import ErrorReply, error_of, get_command, pack_command

CLIENT_NAME = "lmcache-redis-admin"
CONNECT_TIMEOUT_S = 3.0
# A SCAN step or a pipeline of a thousand small commands, on a server that is busy.
OP_TIMEOUT_S = 10.0
# What a server that was not told otherwise holds in one string (proto-max-bulk-len).
MAX_STRIPE_BYTES = 512 << 20

Command = tuple[bytes | str | int, ...]


@dataclass(eq=False)
class Node:
    """One process that holds keys, and one connection to it. For one thread.

    untouched: reading a value here does not count as a use (CLIENT NO-TOUCH, Redis 7.2), so
    that looking at the cache changes neither ages nor what is evicted next.
    """

    endpoint: Endpoint
    connection: BulkConnection | None = field(default=None, repr=False)
    untouched: bool = False

    @property
    def where(self) -> str:
        return self.endpoint.where

    def ask(self, *command: bytes | str | int) -> Any:
        """The reply to one command. Raises RedisError."""
        (reply,) = self.ask_all([command])
        if isinstance(reply, RedisError):
            raise reply
        return reply

    def ask_all(self, commands: Sequence[Command]) -> list[Any]:
        """The replies to commands sent at once, an error reply as a RedisError in its place.

        Raises RedisError where the connection fails.
        """
        if not commands:
            return []
        request = b"".join([pack_command(*command) for command in commands])
        connection = self.open()
        deadline = time.monotonic() + OP_TIMEOUT_S
        try:
            replies = connection.exchange((request,), len(commands), deadline)
        except RedisError as error:
            raise _lost(error, self.where) from None
        return [_said(r, self.where) if isinstance(r, ErrorReply) else r for r in replies]

    def get(self, key: bytes, payload_bytes: int) -> tuple[bytes, memoryview] | None:
        """The header and the payload of a value; None if it is not there, or has another length.

        Raises RedisError.
        """
        if payload_bytes > MAX_STRIPE_BYTES:
            raise RedisProtocolError(f"a value of {payload_bytes:,} bytes at Redis at {self.where}")
        payload = memoryview(bytearray(payload_bytes))
        connection = self.open()
        deadline = time.monotonic() + OP_TIMEOUT_S
        try:
            found = connection.get_stripe(get_command(key), payload, deadline)
        except RedisError as error:
            raise _lost(error, self.where) from None
        return (bytes(connection.header), payload) if found is Found.VALUE else None

    def open(self) -> BulkConnection:
        """The connection, or a new one where that was lost. Raises RedisError and ConfigError."""
        if self.connection is None or not self.connection.is_open:
            connector = Connector(self.endpoint, CONNECT_TIMEOUT_S, OP_TIMEOUT_S)
            self.connection = BulkConnection(connector, CLIENT_NAME)
            self.connection.open()
            (reply,) = self.connection.exchange(
                (pack_command("CLIENT", "NO-TOUCH", "ON"),), 1, time.monotonic() + OP_TIMEOUT_S
            )
            self.untouched = not isinstance(reply, ErrorReply)
        return self.connection

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()


@dataclass(frozen=True, slots=True)
class Server:
    """Where keys are: at least one node, each key on exactly one of them.

    routes: which node has a key; None where there is one node that has them all.
    """

    nodes: tuple[Node, ...]
    routes: Routes[Node] | None = None

    @property
    def where(self) -> str:
        return ", ".join(node.where for node in self.nodes)

    @property
    def untouched(self) -> bool:
        return all(node.untouched for node in self.nodes)

    def node_of(self, key: bytes) -> Node:
        """The node that holds `key`. Raises RedisUnavailable where none does."""
        node = self.routes.node_of(key) if self.routes else self.nodes[0]
        if node is None:
            raise RedisUnavailable(
                f"no server of the cluster at {self.where} has the slot of this key: see "
                "`redis-cli --cluster check`"
            )
        return node

    @property
    def is_cluster(self) -> bool:
        """Whether keys are spread over nodes by their slots."""
        return self.routes is not None and self.routes.is_cluster

    def ask_all(self, commands: Sequence[tuple[bytes, Command]]) -> list[Any]:
        """Replies to (key, command) pairs, each asked of its key's node, in the given order.

        On one node the commands are carried out in that order. Raises as `Node.ask_all`.
        """
        if len(self.nodes) == 1:
            return self.nodes[0].ask_all([command for _, command in commands])
        places: dict[Node, list[int]] = {}
        for place, (key, _) in enumerate(commands):
            places.setdefault(self.node_of(key), []).append(place)
        replies: list[Any] = [None] * len(commands)
        for node, of_node in places.items():
            for place, reply in zip(
                of_node, node.ask_all([commands[at][1] for at in of_node]), strict=True
            ):
                replies[place] = reply
        return replies


@contextlib.contextmanager
def open_server(options: RedisOptions) -> Iterator[Server]:
    """The servers that `options` name, each connected; closed on exit.

    Raises ConfigError for a URL that is none, and RedisError, saying what to change, where
    the server cannot be reached or does not let us in.
    """
    nodes: dict[Endpoint, Node] = {}
    try:
        server_map = _servers(options)
        for endpoint in server_map.servers:
            node = nodes[endpoint] = Node(endpoint)
            node.ask("PING")
        yield Server(tuple(nodes.values()), Routes(server_map, nodes))
    finally:
        for node in nodes.values():
            node.close()


def _servers(options: RedisOptions) -> ServerMap:
    """The server itself, the master that Sentinels name, or a cluster's shards."""
    deployment = parse_deployment(options)
    if deployment.topology is Topology.STANDALONE:
        return ServerMap((deployment.server,))
    found = find_servers(deployment, (), CONNECT_TIMEOUT_S)
    if not found.servers:
        raise RedisUnavailable(f"{deployment.where} has no master just now: try again")
    return found


def _lost(error: RedisError, where: str) -> RedisError:
    """What to say where a question to a server that was there had no answer."""
    at = f"Redis at {where}"
    if isinstance(error, RedisTimeout):
        return RedisTimeout(f"{at} did not answer within {OP_TIMEOUT_S:g} s: is it overloaded?")
    if isinstance(error, RedisUnavailable):
        return RedisUnavailable(f"the connection to {at} was lost: try again ({error})")
    return error


def _said(reply: ErrorReply, where: str) -> RedisError:
    """The exception that stands for an error reply."""
    at = f"Redis at {where}"
    text = " ".join(reply.text.split())[:160]
    error = error_of(reply)
    if reply.code == "NOPERM":
        return RedisAuthError(
            f"{at} does not allow it to this user ({text}): inspect and purge need +@read and "
            "+unlink on the agents' keys"
        )
    if isinstance(error, RedisAuthError):
        return RedisAuthError(f"{at} refuses the user or the password: {text}")
    if isinstance(error, RedisFull):
        return RedisFull(f"{at} is full and evicts nothing: {text}")
    if reply.code == "LOADING":
        return RedisUnavailable(f"{at} is still loading its data: try again when it is done")
    return RedisReplyError(f"{at} says: {text}")
