# SPDX-License-Identifier: Apache-2.0
"""The servers that a URL names, asked with redis-py's clients for one server and for Sentinel.

redis-py connects, authenticates, repeats what a lost connection took, and asks Sentinels for the
master. The servers of a cluster are found as agents find them. Added is one sentence for each of
its errors, which says what to change and contains no secret. Not thread-safe.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from socket import socket
from ssl import SSLSocket
from typing import Any

import redis
from redis import exceptions
from redis.backoff import ExponentialWithJitterBackoff
from redis.credentials import CredentialProvider
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from lmcache_redis.errors import (
    ConfigError,
    RedisAuthError,
    RedisError,
    RedisNotAllowed,
    RedisProtocolError,
    RedisRedirect,
    RedisReplyError,
    RedisUnavailable,
)
from lmcache_redis.resp.finder import ServerFinder
from lmcache_redis.resp.net.advice import (
    NO_CONNECTION_LEFT,
    advice_on,
    advised,
    missing_right,
)
from lmcache_redis.resp.net.endpoint import (
    NO_PASSWORD,
    NO_SENTINEL,
    Endpoint,
    Transport,
    auth_command,
    has_no_password,
    is_no_sentinel,
    tls_question,
    translated,
)
from lmcache_redis.resp.net.tls import name_in_certificate, tls_context
from lmcache_redis.resp.net.wire import error_reply
from lmcache_redis.resp.options import (
    Deployment,
    PasswordFile,
    RedisOptions,
    StaticPassword,
    Topology,
    parse_deployment,
)
from lmcache_redis.resp.routes import slot_of

CONNECT_TIMEOUT_S = 3.0
# For a SCAN step or a pipeline of a thousand small commands, on a busy server.
OP_TIMEOUT_S = 10.0
# Keys that are asked about at once: their headers are 250 KiB.
BATCH_KEYS = 500
# For a lost connection. A time-out is not waited for again.
_RETRY = Retry(ExponentialWithJitterBackoff(0.2, 0.05), 2, (exceptions.ConnectionError,))
REDIRECTIONS = (exceptions.MovedError, exceptions.AskError, exceptions.TryAgainError)
_MOST_REDIRECTIONS = 5
_TRY_AGAIN_S = 0.05
_NO_SERVER = "no server of the cluster has the slot of this key: see `redis-cli --cluster check`"
# redis-py leaves the codes out of the texts of those that it has classes for.
_CODES_OF_CLASSES: dict[type[BaseException], str] = {
    exceptions.AskError: "ASK",
    exceptions.BusyLoadingError: "LOADING",
    exceptions.ClusterCrossSlotError: "CROSSSLOT",
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.ExecAbortError: "EXECABORT",
    exceptions.MasterDownError: "MASTERDOWN",
    exceptions.MovedError: "MOVED",
    exceptions.NoScriptError: "NOSCRIPT",
    exceptions.OutOfMemoryError: "OOM",
    exceptions.ReadOnlyError: "READONLY",
    exceptions.TryAgainError: "TRYAGAIN",
}
# Of redis-py; the last ones where it takes a reply for what it is not.
_FAILURES = (
    exceptions.RedisError, RedisError, OSError, TypeError, ValueError, LookupError, AttributeError,
)  # fmt: skip
Command = tuple[bytes | str | int, ...]


class Primary:
    """One server that holds keys, and redis-py's client of it. follow: asks where it redirects."""

    def __init__(
        self,
        endpoint: Endpoint,
        client: redis.Redis,
        follow: Callable[[Primary, Command, Exception], Any] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.client = client
        self._follow = follow

    def ask(self, *command: bytes | str | int) -> Any:
        """The reply to one command, as redis-py reads it. Raises RedisError."""
        (reply,) = self.ask_all([command])
        if isinstance(reply, RedisError):
            raise reply
        return reply

    def ask_all(self, commands: Sequence[Command]) -> list[Any]:
        """The replies to commands in one pipeline; an error reply is a RedisError in its place.

        Raises RedisError if the connection fails.
        """
        replies = self.exchange(commands)
        for index, reply in enumerate(replies):
            if self._follow is not None and isinstance(reply, REDIRECTIONS):
                replies[index] = reply = self._follow(self, commands[index], reply)
            if isinstance(reply, Exception):
                replies[index] = sentence_of(reply, self.endpoint)
        return replies

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """As `ask_all`, with the errors of redis-py, and no redirection is followed."""
        pipeline = self.client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        with one_sentence(self.endpoint):
            try:
                return list(pipeline.execute(raise_on_error=False))
            except BaseException:
                # Out of step: a late reply would answer the next request.
                self.client.connection_pool.disconnect()
                raise


class PrimaryServers:
    """At least one; each key is on exactly one of them. owner: of a cluster, who has a key."""

    def __init__(
        self, nodes: Sequence[Primary], owner: Callable[[bytes], Primary] | None = None
    ) -> None:
        self.nodes = tuple(nodes)
        self._owner = owner

    @property
    def is_cluster(self) -> bool:
        return self._owner is not None

    @property
    def where(self) -> str:
        return ", ".join(node.endpoint.where for node in self.nodes)

    def node_of(self, key: bytes) -> Primary:
        """The server that has `key`. Raises RedisUnavailable if none has."""
        return self.nodes[0] if self._owner is None else self._owner(key)

    def ask_each(
        self, keys: Sequence[bytes], questions: Callable[[bytes], list[Command]]
    ) -> Iterator[list[Any]]:
        """For each key the replies to its commands, BATCH_KEYS keys at once.

        A server executes its commands in the given order. Raises as `Primary.ask_all`.
        """
        for start in range(0, len(keys), BATCH_KEYS):
            some = keys[start : start + BATCH_KEYS]
            by_node: dict[Primary, list[bytes]] = {}
            for key in some:
                by_node.setdefault(self.node_of(key), []).append(key)
            replies: dict[bytes, list[Any]] = {}
            for node, own in by_node.items():
                asked = [questions(key) for key in own]
                found = iter(node.ask_all([*chain(*asked)]))
                replies |= {k: [*islice(found, len(q))] for k, q in zip(own, asked, strict=True)}
            yield from (replies[key] for key in some)


@contextlib.contextmanager
def open_server(options: RedisOptions) -> Iterator[PrimaryServers]:
    """The servers that `options` name, connected; closed on exit.

    Raises ConfigError or RedisError, which say what to change.
    """
    deployment = parse_deployment(options)
    server = deployment.server
    with contextlib.ExitStack() as stack:
        if deployment.topology is Topology.CLUSTER:
            cluster = _Cluster(deployment, stack)
            servers = PrimaryServers(cluster.nodes, cluster.owner)
        elif deployment.topology is Topology.SENTINEL:
            servers = PrimaryServers([_master(deployment, stack)])
        else:
            path = server.path or None
            client = redis.Redis(server.host, server.port, unix_socket_path=path, **_of_one(server))
            servers = PrimaryServers([_primary(server, client, stack)])
        for node in servers.nodes:
            # Whether it lets us in; a user who may not PING may still read.
            with contextlib.suppress(RedisNotAllowed):
                node.ask("PING")
        yield servers


def _primary(
    endpoint: Endpoint,
    client: redis.Redis,
    stack: contextlib.ExitStack,
    follow: Callable[[Primary, Command, Exception], Any] | None = None,
) -> Primary:
    stack.callback(client.close)
    pool = client.connection_pool
    pool.connection_class = _adapted(pool.connection_class, endpoint)
    return Primary(endpoint, client, follow)


def _master(deployment: Deployment, stack: contextlib.ExitStack) -> Primary:
    addresses = [(seed.host, seed.port) for seed in deployment.seeds]
    sentinel = Sentinel(addresses, sentinel_kwargs=_of_one(deployment.seeds[0]))
    pairs = zip(deployment.seeds, sentinel.sentinels, strict=True)
    sentinels = [_primary(*pair, stack) for pair in pairs]
    client = sentinel.master_for(deployment.service, **_of_one(deployment.server))
    with one_sentence(deployment.seeds[0]):
        try:
            master = deployment.at(*sentinel.discover_master(deployment.service))
        except MasterNotFoundError:
            sentinels[0].ask("PING")  # says why it does not answer
            raise RedisUnavailable(
                f"{deployment.url}: there is no master named {deployment.service} that is up: "
                "correct the name in the Redis URL, or try again"
            ) from None
    return _primary(master, client, stack)


class _Cluster:
    """A cluster by the map that agents look up, and where its redirections lead."""

    def __init__(self, deployment: Deployment, stack: contextlib.ExitStack) -> None:
        self._deployment = deployment
        self._stack = stack
        self._by_address: dict[tuple[str, int], Primary] = {}
        with contextlib.closing(ServerFinder(deployment, OP_TIMEOUT_S)) as finder:
            try:
                found = finder.find()
            except RedisReplyError as error:
                if "NOPERM" in str(error):
                    raise RedisNotAllowed(str(error)) from None
                raise
        self.nodes = [self._at(each.host, each.port) for each in found.servers]
        self._ranges = found.ranges or ()

    def owner(self, key: bytes) -> Primary:
        """Raises RedisUnavailable if there is none."""
        slot = slot_of(key)
        for first, last, number in self._ranges:
            if first <= slot <= last:
                return self.nodes[number]
        raise RedisUnavailable(_NO_SERVER)

    def follow(self, asked: Primary, command: Command, error: Exception) -> Any:
        """The reply where a redirection leads, or the last error. Raises RedisError."""
        for _ in range(_MOST_REDIRECTIONS):
            if isinstance(error, exceptions.TryAgainError):
                time.sleep(_TRY_AGAIN_S)
            else:
                # Without a host it is the one that was asked.
                asked = self._at(error.host or asked.endpoint.host, error.port)  # type: ignore[attr-defined]
            is_moved = isinstance(error, exceptions.MovedError)
            reply = asked.exchange([command] if is_moved else [("ASKING",), command])[-1]
            if not isinstance(reply, REDIRECTIONS):
                return reply
            error = reply
        return RedisRedirect(f"{asked.endpoint.where} redirects again and again: try again later")

    def _at(self, host: str, port: int) -> Primary:
        if (host, port) not in self._by_address:
            endpoint = self._deployment.at(host, port)
            client = redis.Redis(host, port, **_of_one(endpoint))
            self._by_address[host, port] = _primary(endpoint, client, self._stack, self.follow)
        return self._by_address[host, port]


def _of_one(endpoint: Endpoint) -> dict[str, Any]:
    """Options of connections by their names in redis-py."""
    return {
        "db": endpoint.db,
        "ssl": endpoint.transport is Transport.TLS,
        "credential_provider": _CheckedCredentials(endpoint) if endpoint.credentials else None,
        "protocol": 2,  # replies of RESP3 have other types
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": OP_TIMEOUT_S,
        "encoding_errors": "replace",
        "retry": _RETRY,
    }


class _CheckedCredentials(CredentialProvider):  # type: ignore[misc]
    """A server's credentials, asked at each connect: all that they may raise is a RedisError."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def get_credentials(self) -> tuple[str, ...]:
        return (auth_command(self._endpoint.credentials) or ())[1:]


def _adapted(kind: type, endpoint: Endpoint) -> type:
    """A class of connections, which are not named, at which some proxies close one (twemproxy).

    Over TLS they are: redis-py takes unread session tickets for a reply. There it would trust the
    system's CAs beside those that are named.
    """

    def start(connection: Any, *args: Any, **named: Any) -> None:
        kind.__init__(connection, *args, **named)  # type: ignore[misc]
        # By what its versions call it.
        connection.driver_info = connection.lib_name = connection.lib_version = None

    def wrap(connection: Any, connected: socket) -> SSLSocket:
        name = name_in_certificate(connection.host)
        return tls_context(endpoint.tls).wrap_socket(connected, server_hostname=name)

    if endpoint.transport is Transport.TLS:
        return type("TlsConnection", (kind,), {"_wrap_socket_with_ssl": wrap})
    return type("UnnamedConnection", (kind,), {"__init__": start})


# ------------------------------------------------------------------ its errors


@contextlib.contextmanager
def one_sentence(endpoint: Endpoint) -> Iterator[None]:
    """Raises an error of one sentence instead of one of redis-py."""
    try:
        yield
    except _FAILURES as error:
        raise sentence_of(error, endpoint) from None


def sentence_of(error: BaseException, endpoint: Endpoint) -> RedisError | ConfigError:
    """In this order: a class of redis-py's before those that it is one of."""
    at = f"Redis at {endpoint.where}"
    text = _without_secrets(" ".join(str(error).split()), endpoint)[:160]
    reason = error.__cause__ or error.__context__
    if isinstance(error, RedisError):
        return error
    if isinstance(error, exceptions.TimeoutError):
        return translated(TimeoutError(), endpoint)
    if isinstance(error, exceptions.AuthenticationError) and endpoint.credentials is None:
        return RedisAuthError(f"{at} wants a password: {endpoint.origin.password}")
    if has_no_password(text):
        return RedisAuthError(f"{at} {NO_PASSWORD}")
    if is_no_sentinel(text):
        return RedisUnavailable(f"{at} {NO_SENTINEL}")
    if "max number of clients" in text:
        return RedisUnavailable(f"{at} has no connection left: {NO_CONNECTION_LEFT}")
    if "cluster support disabled" in text:
        return RedisUnavailable(f"{at} is no cluster: write redis:// instead of redis+cluster://")
    if isinstance(reason, OSError):
        return translated(reason, endpoint)
    if isinstance(error, exceptions.ClusterDownError) and "not served" in text:
        return RedisUnavailable(_NO_SERVER)
    if isinstance(error, exceptions.AuthenticationError):
        return RedisAuthError(f"{at} refuses the user or the password: {text}")
    if isinstance(error, exceptions.NoPermissionError):
        tools = (
            "inspect and purge need +@read and +unlink on the agents' keys, in a cluster "
            "+cluster|slots too, and on Sentinels +sentinel|masters"
        )
        rights = "; ".join(filter(None, (missing_right(text), tools)))
        return RedisNotAllowed(f"{at} does not allow it to this user ({text}): {rights}")
    if code := _CODES_OF_CLASSES.get(type(error)):
        text = f"{code} {text}"
    kind, change = advice_on(error_reply(text).code, text)
    said = advised(f"{at} says: {text}", change)
    if isinstance(error, exceptions.BusyLoadingError):
        return RedisUnavailable(said)
    if isinstance(error, exceptions.ConnectionError):
        lost = f"the connection to {at} was lost: try again ({text})"
        return RedisUnavailable(f"{lost}{tls_question(endpoint)}")
    if isinstance(error, exceptions.ResponseError):
        # One reply among others says nothing of the connection.
        return kind(said) if issubclass(kind, RedisReplyError) else RedisReplyError(said)
    return translated(RedisProtocolError(), endpoint)


def _without_secrets(text: str, endpoint: Endpoint) -> str:
    """A server may repeat what it was asked."""
    credentials = endpoint.credentials
    if isinstance(credentials, StaticPassword | PasswordFile):
        with contextlib.suppress(RedisAuthError):
            return text.replace(credentials.get_credentials()[-1], "***")
    # A provider is not asked for this: its next token may be another one.
    return "(not shown)" if credentials is not None and "AUTH" in text else text
