"""The servers that a URL names, asked with redis-py's clients for one server, Sentinel and Cluster.

redis-py connects, authenticates, repeats what a lost connection took, asks Sentinels for the master
and follows the redirections of a cluster. Added are one sentence for each of its errors, and two
bounds that it lacks: on the time of all replies to a request, however slowly they arrive, and on
their size. No error message contains a secret. Not thread-safe.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from socket import socket
from ssl import SSLSocket
from typing import Any

import redis
from redis import exceptions
from redis.backoff import ExponentialWithJitterBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import Connection, SSLConnection
from redis.credentials import CredentialProvider
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from lmcache_redis.admin.sentences import sentence_of
from lmcache_redis.errors import RedisError, RedisProtocolError, RedisUnavailable
from lmcache_redis.resp.net.connection import auth_command
from lmcache_redis.resp.net.endpoint import Endpoint, Transport
from lmcache_redis.resp.net.tls import TlsParameters, tls_context
from lmcache_redis.resp.options import Deployment, RedisOptions, Topology, parse_deployment

CLIENT_NAME = "lmcache-redis-admin"
CONNECT_TIMEOUT_S = 3.0
# For a SCAN step or a pipeline of a thousand small commands, on a busy server.
OP_TIMEOUT_S = 10.0
# All replies to one request. The headers of 500 keys are 250 KiB.
MAX_REPLY_BYTES = 8 << 20
# Of a value, what is read at once.
PIECE_BYTES = 4 << 20
# A SCAN has a step for many keys; for few where the table of keys was large once.
SPARE_STEPS, _LEAST_KEYS_A_STEP = 100_000, 10
# For a lost connection. A time-out is not waited for again.
_RETRY = Retry(ExponentialWithJitterBackoff(0.2, 0.05), 2, (exceptions.ConnectionError,))
_NO_TOUCH = ("CLIENT", "NO-TOUCH", "ON")
_REDIRECTIONS = (exceptions.MovedError, exceptions.AskError, exceptions.TryAgainError)
# Of redis-py; the last ones where it takes a reply for what it is not.
_FAILURES = (
    exceptions.RedisError, exceptions.RedisClusterException, RedisError, OSError,
    TypeError, ValueError, LookupError, AttributeError,
)  # fmt: skip

Command = tuple[bytes | str | int, ...]


class BoundedSocket:
    """A connection's socket. Time and size of what it receives count from the last request."""

    def __init__(self, connected: socket) -> None:
        self._socket = connected
        self._timeout_s = OP_TIMEOUT_S
        self._allow()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def settimeout(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def sendall(self, data: bytes) -> None:
        self._socket.settimeout(OP_TIMEOUT_S)
        self._socket.sendall(data)
        self._allow()

    def recv_into(self, buffer: bytearray) -> int:
        left_s = max(0.001, self._until_s - time.monotonic())
        self._socket.settimeout(min(left_s, self._timeout_s))
        received = self._socket.recv_into(buffer)
        self._left_bytes -= received
        if self._left_bytes < 0:
            raise RedisProtocolError(f"a reply of more than {MAX_REPLY_BYTES:,} bytes")
        return received

    def _allow(self) -> None:
        self._until_s = time.monotonic() + OP_TIMEOUT_S
        self._left_bytes = MAX_REPLY_BYTES


class _BoundedConnection:
    """What is ours in a connection of redis-py: its socket, and what TLS trusts."""

    host: str
    tls: TlsParameters

    def _connect(self) -> BoundedSocket:
        return BoundedSocket(super()._connect())  # type: ignore[misc]

    def _wrap_socket_with_ssl(self, connected: socket) -> SSLSocket:
        # redis-py would trust the system's CAs beside those that are named.
        return tls_context(self.tls).wrap_socket(connected, server_hostname=self.host)


@functools.cache
def _bounded(connection_class: type, tls: TlsParameters) -> type:
    name = f"Bounded{connection_class.__name__}"
    return type(name, (_BoundedConnection, connection_class), {"tls": tls})


class Primary:
    """One server that holds keys, and redis-py's client of it.

    untouched: reading a value does not count as a use (CLIENT NO-TOUCH, Redis 7.2): inspection
    changes neither idle times nor the order of eviction. Never on a node of a cluster: it ends a
    Redis 8.2 that is asked for a key of a slot that is being moved.
    """

    def __init__(self, endpoint: Endpoint, client: redis.Redis) -> None:
        self.endpoint = endpoint
        self.untouched = False
        self._client = client
        pool = client.connection_pool
        if not issubclass(pool.connection_class, _BoundedConnection):
            pool.connection_class = _bounded(pool.connection_class, endpoint.tls)

    @property
    def where(self) -> str:
        return self.endpoint.where

    def check_access(self) -> None:
        """Raises RedisError, which says what to change, unless the server can be used."""
        with self.errors(opening=True):
            self._client.ping()
        (info,) = self.ask_all([("INFO", "cluster")])
        if isinstance(info, dict) and info.get("cluster_enabled") == 0:
            self.untouched = not isinstance(self.ask_all([_NO_TOUCH])[0], RedisError)

    def ask(self, *command: bytes | str | int) -> Any:
        """The reply to one command, as redis-py reads it. Raises RedisError."""
        return _unless_error(self.ask_all([command])[0])

    def ask_all(
        self, commands: Sequence[Command], follow: Callable[[Command], Any] | None = None
    ) -> list[Any]:
        """The replies to commands in one pipeline; an error reply is a RedisError in its place.

        follow: repeats a command that a cluster redirects. Raises RedisError if the connection
        fails.
        """
        pipeline = self._client.pipeline(transaction=False)
        before = [_NO_TOUCH] if self.untouched else []
        for command in (*before, *commands):
            pipeline.execute_command(*command)
        with self.errors():
            replies: list[Any] = pipeline.execute(raise_on_error=False)[len(before) :]
            for index, reply in enumerate(replies):
                if follow is not None and isinstance(reply, _REDIRECTIONS):
                    replies[index] = reply = follow(commands[index])
                if isinstance(reply, Exception):
                    replies[index] = sentence_of(reply, self.endpoint)
        return replies

    def scan(self, pattern: bytes, step_keys: int) -> Iterator[tuple[list[bytes], bool]]:
        """The string keys of each SCAN step, and whether it was the last.

        Raises RedisError, also for a SCAN that does not end: redis-py's iterator would wait for the
        next key for ever.
        """
        cursor, keys = 0, int(self.ask("DBSIZE"))
        most_steps = SPARE_STEPS + keys // _LEAST_KEYS_A_STEP
        for _ in range(most_steps):
            with self.errors():
                cursor, found = self._client.scan(cursor, pattern, step_keys, _type="string")
            yield found, not cursor
            if not cursor:
                return
        raise RedisProtocolError(
            f"the SCAN of Redis at {self.where} does not end: {most_steps:,} steps for {keys:,} "
            "keys"
        )

    @contextlib.contextmanager
    def errors(self, opening: bool = False) -> Iterator[None]:
        """Raises a RedisError of one sentence instead of an error of redis-py."""
        try:
            yield
        except BaseException as error:
            # Interrupted or out of step: a late reply would answer the next request.
            self._client.connection_pool.disconnect()
            if not isinstance(error, _FAILURES):
                raise
            raise sentence_of(error, self.endpoint, opening) from None


class PrimaryServers:
    """At least one; each key is on exactly one of them. cluster: redis-py's client of a cluster."""

    def __init__(
        self, deployment: Deployment, nodes: Sequence[Primary], cluster: RedisCluster | None = None
    ) -> None:
        self.nodes = tuple(nodes)
        self._deployment = deployment
        self._cluster = cluster
        self._by_address = {(n.endpoint.host, n.endpoint.port): n for n in nodes}

    @property
    def is_cluster(self) -> bool:
        return self._cluster is not None

    @property
    def where(self) -> str:
        return ", ".join(node.where for node in self.nodes)

    @property
    def untouched(self) -> bool:
        return all(node.untouched for node in self.nodes)

    def node_of(self, key: bytes) -> Primary:
        """The server that has `key`. Raises RedisUnavailable if none has."""
        if self._cluster is None:
            return self.nodes[0]
        try:
            found = self._cluster.get_node_from_key(key)
        except _FAILURES:
            raise RedisUnavailable(
                f"no server of the cluster at {self.where} has the slot of this key: see "
                "`redis-cli --cluster check`"
            ) from None
        address = found.host, found.port
        if address not in self._by_address:
            client = self._cluster.get_redis_connection(found)
            self._by_address[address] = Primary(self._deployment.at(*address), client)
        return self._by_address[address]

    def ask_all(self, commands: Sequence[tuple[bytes, Command]]) -> list[Any]:
        """The replies to (key, command) pairs, each sent to its key's server, in the given order.

        A server executes its commands in that order. Raises as `Primary.ask_all`.
        """
        follow = None if self._cluster is None else self._follow
        by_node: dict[Primary, list[int]] = {}
        for index, (key, _) in enumerate(commands):
            by_node.setdefault(self.node_of(key), []).append(index)
        replies: list[Any] = [None] * len(commands)
        for node, indexes in by_node.items():
            found = node.ask_all([commands[index][1] for index in indexes], follow)
            for index, reply in zip(indexes, found, strict=True):
                replies[index] = reply
        return replies

    def get(self, key: bytes, most_bytes: int) -> bytearray:
        """The beginning of a string, empty if there is none. Raises RedisError."""
        value = bytearray()
        while len(value) < most_bytes:
            last = min(len(value) + PIECE_BYTES, most_bytes) - 1
            command: Command = ("GETRANGE", key, len(value), last)
            piece = _unless_error(self.ask_all([(key, command)])[0])
            if not piece:
                break
            value += piece
        return value

    def _follow(self, command: Command) -> Any:
        """By one, redis-py follows redirections. In its cluster pipelines a time-out of one server
        is waited for again with each command."""
        assert self._cluster is not None
        try:
            return self._cluster.execute_command(*command)
        except exceptions.ResponseError as error:
            return error


@contextlib.contextmanager
def open_server(options: RedisOptions) -> Iterator[PrimaryServers]:
    """The servers that `options` name, connected; closed on exit.

    Raises ConfigError if the URL is invalid, and RedisError, which says what to change, if a server
    cannot be reached or refuses the connection.
    """
    deployment = parse_deployment(options)
    with contextlib.ExitStack() as stack:
        servers = _CLIENTS_OF[deployment.topology](deployment, stack)
        for node in servers.nodes:
            node.check_access()
        yield servers


def _single(deployment: Deployment, stack: contextlib.ExitStack) -> PrimaryServers:
    server = deployment.server
    address = {"host": server.host, "port": server.port, "unix_socket_path": server.path or None}
    client = redis.Redis(**address, **_of_one(server, stack))
    return PrimaryServers(deployment, [Primary(server, client)])


def _master(deployment: Deployment, stack: contextlib.ExitStack) -> PrimaryServers:
    addresses = [(seed.host, seed.port) for seed in deployment.seeds]
    sentinel = Sentinel(addresses, sentinel_kwargs=_of_one(deployment.seeds[0], stack))
    sentinels = [Primary(*each) for each in zip(deployment.seeds, sentinel.sentinels, strict=True)]
    client = sentinel.master_for(deployment.service, **_of_one(deployment.server, stack))
    with sentinels[0].errors(opening=True):
        try:
            master = deployment.at(*sentinel.discover_master(deployment.service))
        except MasterNotFoundError:
            sentinels[0].check_access()  # says why it does not answer
            raise RedisUnavailable(
                f"{deployment.url}: there is no master named {deployment.service} that is up: "
                "correct the name in the Redis URL, or try again"
            ) from None
    return PrimaryServers(deployment, [Primary(master, client)])


def _cluster(deployment: Deployment, stack: contextlib.ExitStack) -> PrimaryServers:
    first, *others = deployment.seeds
    is_tls = first.transport is Transport.TLS
    try:
        cluster = RedisCluster(
            # With a host instead of a URL it ignores the class of connections.
            url=f"redis://{first.where}",
            startup_nodes=[ClusterNode(seed.host, seed.port) for seed in others],
            connection_class=_bounded(SSLConnection if is_tls else Connection, first.tls),
            require_full_coverage=False,
            retry=_RETRY,
            redis_connect_func=functools.partial(_introduce, stack),
            **_of_all(first),
        )
    except _FAILURES as error:
        raise sentence_of(error, first, opening=True) from None
    nodes = [
        Primary(deployment.at(node.host, node.port), cluster.get_redis_connection(node))
        for node in cluster.get_primaries()
    ]
    return PrimaryServers(deployment, nodes, cluster)


_CLIENTS_OF = {Topology.STANDALONE: _single, Topology.SENTINEL: _master, Topology.CLUSTER: _cluster}


class _CheckedCredentials(CredentialProvider):  # type: ignore[misc]
    """A server's credentials, asked at each connect: all that they may raise is a RedisError."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def get_credentials(self) -> tuple[str, ...]:
        return (auth_command(self._endpoint.credentials) or ())[1:]


def _of_all(endpoint: Endpoint) -> dict[str, Any]:
    """Options of connections by their names in redis-py."""
    return {
        "credential_provider": _CheckedCredentials(endpoint) if endpoint.credentials else None,
        "protocol": 2,  # replies of RESP3 have other types
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": OP_TIMEOUT_S,
        "encoding_errors": "replace",
    }


def _of_one(endpoint: Endpoint, stack: contextlib.ExitStack) -> dict[str, Any]:
    """As `_of_all`, and those that a cluster does not have."""

    def greet(connection: Any) -> None:
        connection.on_connect()
        _introduce(stack, connection)

    own = {"db": endpoint.db, "ssl": endpoint.transport is Transport.TLS, "retry": _RETRY}
    return {**own, "redis_connect_func": greet, **_of_all(endpoint)}


def _introduce(stack: contextlib.ExitStack, connection: Any) -> None:
    """Names a new connection, which may be forbidden."""
    stack.callback(connection.disconnect)
    connection.send_command("CLIENT", "SETNAME", CLIENT_NAME, check_health=False)
    with contextlib.suppress(exceptions.ResponseError):
        connection.read_response()


def _unless_error(reply: Any) -> Any:
    if isinstance(reply, RedisError):
        raise reply
    return reply
