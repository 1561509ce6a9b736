"""The servers that a URL names, with one connection each.

A `Node` is one process that holds keys; a `Server` is all of them, one unless it is a cluster. The
nodes are looked up once; in a cluster redirections are followed. Every reply has a deadline and is
bounded by the data plane's parser. A connection that was lost between two commands is replaced. No
error message contains a secret. Not thread-safe.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from lmcache_redis.errors import (
    ConfigError,
    RedisAuthError,
    RedisError,
    RedisFull,
    RedisProtocolError,
    RedisRedirect,
    RedisReplyError,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp.bulk import receive_value
from lmcache_redis.resp.net.connection import Connection, Connector
from lmcache_redis.resp.net.endpoint import Deployment, Endpoint, parse_deployment
from lmcache_redis.resp.net.topology import Routes, Routing, find_servers
from lmcache_redis.resp.net.wire import (
    ErrorReply,
    KeyScan,
    Reply,
    error_of,
    get_command,
    pack_command,
)
from lmcache_redis.resp.options import RedisOptions

CLIENT_NAME = "lmcache-redis-admin"
CONNECT_TIMEOUT_S = 3.0
# For a SCAN step or a pipeline of a thousand small commands, on a busy server.
OP_TIMEOUT_S = 10.0
# The maximum string of a server by default (proto-max-bulk-len).
MAX_STRIPE_BYTES = 512 << 20

Command = tuple[bytes | str | int, ...]


ResultT = TypeVar("ResultT")


class Node:
    """One process that holds keys.

    untouched: reading a value does not count as a use (CLIENT NO-TOUCH, Redis 7.2): inspection
    changes neither idle times nor the order of eviction.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.untouched = False
        self._connector = Connector(endpoint, CONNECT_TIMEOUT_S, OP_TIMEOUT_S)
        self._connection = Connection(self._connector, CLIENT_NAME)

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
        """The replies to commands in one pipeline; an error reply is a RedisError in its place.

        Raises RedisError if the connection fails.
        """
        if not commands:
            return []
        request = b"".join([pack_command(*command) for command in commands])
        replies = self._exchange(request, len(commands))
        return [_error_of_reply(r, self.where) if isinstance(r, ErrorReply) else r for r in replies]

    def scan(self, pattern: bytes, step_keys: int) -> Iterator[tuple[list[bytes], bool]]:
        """The string keys of each SCAN step, and whether it was the last. Raises RedisError."""
        scan = KeyScan(pattern, step_keys, "TYPE", "string")
        while not scan.is_over:
            (reply,) = self._exchange(scan.command(), 1)
            if isinstance(reply, ErrorReply):
                raise _error_of_reply(reply, self.where)
            yield scan.take(reply), scan.is_over

    def get(self, key: bytes, payload_bytes: int) -> tuple[bytes, memoryview] | None:
        """The header and the payload of a value; None if it does not exist or has another length.

        Raises RedisError.
        """
        if payload_bytes > MAX_STRIPE_BYTES:
            raise RedisProtocolError(f"a value of {payload_bytes:,} bytes at Redis at {self.where}")
        payload = memoryview(bytearray(payload_bytes))

        def get(connection: Connection) -> bytes | None:
            connection.send((get_command(key),), _deadline())
            return receive_value(connection, payload, _deadline())

        header = self._use(get)
        return None if header is None else (header, payload)

    def connect(self) -> None:
        """Opens a connection. Raises RedisError; the message says what to change."""
        connection = self._connection = Connection(self._connector, CLIENT_NAME)
        try:
            connection.open(_deadline())
        except ConfigError as error:
            raise RedisUnavailable(str(error)) from None
        request = pack_command("CLIENT", "NO-TOUCH", "ON")
        (reply,) = connection.exchange((request,), 1, _deadline())
        self.untouched = not isinstance(reply, ErrorReply)

    def close(self) -> None:
        self._connection.close()

    def _exchange(self, request: bytes, replies: int) -> list[Reply]:
        return self._use(lambda each: each.exchange((request,), replies, _deadline()))

    def _use(self, use: Callable[[Connection], ResultT]) -> ResultT:
        """Uses the connection, or a new one if it was lost: all commands here may be repeated."""
        try:
            if self._connection.is_open:
                with contextlib.suppress(RedisUnavailable):
                    return use(self._connection)
            self.connect()
            return use(self._connection)
        except RedisError as error:
            raise _error_of_loss(error, self.where) from None
        except BaseException:
            # Interrupted: a late reply would answer the next command.
            self.close()
            raise


class Server:
    """At least one node; each key is on exactly one of them."""

    def __init__(self, deployment: Deployment, routes: Routes[Node]) -> None:
        self.nodes = routes.nodes
        self.is_cluster = routes.is_cluster
        self._deployment = deployment
        self._routes = routes
        self._by_endpoint = {node.endpoint: node for node in routes.nodes}

    @property
    def where(self) -> str:
        return ", ".join(node.where for node in self.nodes)

    @property
    def untouched(self) -> bool:
        return all(node.untouched for node in self.nodes)

    def node_of(self, key: bytes) -> Node:
        """The node that owns `key`. Raises RedisUnavailable if none does."""
        node = self._routes.node_of(key)
        if node is None:
            raise self._no_server()
        return node

    def ask_all(self, commands: Sequence[tuple[bytes, Command]]) -> list[Any]:
        """The replies to (key, command) pairs, each sent to its key's node, in the given order.

        A node executes its commands in that order. Raises as `Node.ask_all`.
        """
        if not self.is_cluster:
            return self.nodes[0].ask_all([command for _, command in commands])
        missing = self._no_server()
        routing = Routing(self._routes, [key for key, _ in commands], self._follow, missing)
        parts = deque(routing.parts)
        while parts:
            part = parts.popleft()
            sent = [commands[index][1] for index in part.indexes]
            if part.hop is not None and part.hop.asking:
                replies = part.node.ask_all([each for c in sent for each in (("ASKING",), c)])[1::2]
            else:
                replies = part.node.ask_all(sent)
            parts += routing.answered(part, replies)
        if any(result is missing for result in routing.results):
            raise missing
        return routing.results

    def close(self) -> None:
        for node in self._by_endpoint.values():
            node.close()

    def _follow(self, node: Node, redirect: RedisRedirect) -> Node:
        endpoint = self._deployment.at(redirect.host or node.endpoint.host, redirect.port)
        if endpoint not in self._by_endpoint:
            self._by_endpoint[endpoint] = Node(endpoint)
        return self._by_endpoint[endpoint]

    def _no_server(self) -> RedisUnavailable:
        return RedisUnavailable(
            f"no server of the cluster at {self.where} has the slot of this key: see "
            "`redis-cli --cluster check`"
        )


@contextlib.contextmanager
def open_server(options: RedisOptions) -> Iterator[Server]:
    """The servers that `options` name, connected; closed on exit.

    Raises ConfigError if the URL is invalid, and RedisError, which says what to change, if a server
    cannot be reached or refuses the connection.
    """
    deployment = parse_deployment(options)
    try:
        found = find_servers(deployment, (), CONNECT_TIMEOUT_S, _deadline())
    except ConfigError as error:
        raise RedisUnavailable(str(error)) from None
    if not found.servers:
        raise RedisUnavailable(f"{deployment.where} has no master just now: try again")
    server = Server(deployment, Routes(found, {each: Node(each) for each in found.servers}))
    try:
        for node in server.nodes:
            node.connect()
            if isinstance(reply := node.ask_all([("PING",)])[0], RedisError):
                raise reply
        yield server
    finally:
        server.close()


def _deadline() -> float:
    return time.monotonic() + OP_TIMEOUT_S


def _error_of_loss(error: RedisError, where: str) -> RedisError:
    """The error to raise if a server that was reachable does not answer."""
    at = f"Redis at {where}"
    if isinstance(error, RedisTimeout):
        return RedisTimeout(f"{at} did not answer within {OP_TIMEOUT_S:g} s: is it overloaded?")
    if isinstance(error, RedisUnavailable):
        return RedisUnavailable(f"the connection to {at} was lost: try again ({error})")
    return error


def _error_of_reply(reply: ErrorReply, where: str) -> RedisError:
    at = f"Redis at {where}"
    text = " ".join(reply.text.split())[:160]
    error = error_of(reply)
    if isinstance(error, RedisRedirect):
        return error
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
