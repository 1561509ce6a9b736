"""Small questions to the servers that hold the chunks, each answered by its deadline.

What the data plane has no call for: the header of a stripe, a removal whose result counts, the
names of all keys. Connections are the plane's own kind, a few for each server, kept between
questions. A connection that was lost while nobody used it is replaced once; MOVED and ASK are
followed; the servers of a Sentinel or a cluster are looked up when they are first needed, when
they have changed or failed, and every few seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lmcache_redis.errors import (
    ConfigError,
    RedisError,
    RedisProtocolError,
    RedisRedirect,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp.deployment import Deployment, Topology, parse_deployment
from lmcache_redis.resp.endpoint import Endpoint
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.resp.routes import MAX_HOPS, Routes, ServerMap
from lmcache_redis.resp.topology import find_servers
from lmcache_redis.resp.wire import ASKING_COMMAND, ErrorReply, Reply, error_of, pack_command
from lmcache_redis.storage.connections import ServerConnections

# Questions are short: more connections would only wait for each other.
_MOST_AT_ONCE = 8
_MAP_AGE_S = 5.0


Answer = Reply | RedisError


class Question(NamedTuple):
    """A packed command, and the key that says which server is asked."""

    key: bytes
    command: bytes


class Asking:
    """Thread-safe. Deadlines are `time.monotonic()` seconds.

    Raises ConfigError on construction for a URL that names no server.
    """

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._deployment = parse_deployment(options)
        self._room = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self._lock = threading.Lock()
        self._servers: dict[Endpoint, ServerConnections] = {}
        self._map_lock = threading.Lock()
        self._routes: Routes[Endpoint] | None = None
        self._looked_up_at = 0.0
        self._closed = False

    def ask(self, questions: Sequence[Question], deadline: float) -> list[Answer]:
        """The replies in order, a RedisError in place of what could not be had.

        Those for one server are sent at once and carried out in their order.
        """
        answers: list[Answer] = [None] * len(questions)
        try:
            routes = self._current_routes(deadline)
        except RedisError as error:
            return [error] * len(questions)
        places: dict[Endpoint | None, list[int]] = {}
        for place, question in enumerate(questions):
            places.setdefault(routes.node_of(question.key), []).append(place)
        for endpoint, of_server in places.items():
            for place, answer in zip(
                of_server,
                self._ask_one(endpoint, [questions[place] for place in of_server], deadline),
                strict=True,
            ):
                answers[place] = answer
        return answers

    def keys(self, pattern: bytes, step_keys: int, deadline: float) -> Iterator[bytes]:
        """The names of strings on all servers that match, in SCANs of so many keys each.

        A key may come twice; one that was there all the time comes. Raises RedisError.
        """
        for endpoint in self._current_routes(deadline).nodes:
            cursor = b"0"
            while True:
                words = (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % step_keys)
                command = pack_command(*words, b"TYPE", b"string")
                (reply,) = self._exchange(endpoint, [command], deadline)
                match reply:
                    case [bytes() as cursor, list() as found] if cursor.isdigit():
                        yield from (key for key in found if isinstance(key, bytes))
                    case ErrorReply():
                        raise error_of(reply)
                    case _:
                        raise RedisProtocolError("the reply to a SCAN is no cursor and keys")
                if cursor == b"0":
                    break

    def close(self) -> None:
        """Close every connection; whoever waits for an answer gets RedisUnavailable."""
        with self._lock:
            self._closed = True
            servers = list(self._servers.values())
        for server in servers:
            server.close()

    # ------------------------------------------------------------- one server

    def _ask_one(
        self, endpoint: Endpoint | None, questions: Sequence[Question], deadline: float
    ) -> list[Answer]:
        if endpoint is None:
            where = self._deployment.where
            missing = RedisUnavailable(f"no server at {where} has this key just now")
            return [missing] * len(questions)
        try:
            replies = self._exchange(endpoint, [each.command for each in questions], deadline)
        except RedisError as error:
            return [error] * len(questions)
        return [
            self._settled(endpoint, question, reply, deadline)
            for question, reply in zip(questions, replies, strict=True)
        ]

    def _settled(
        self, endpoint: Endpoint, question: Question, reply: Reply, deadline: float
    ) -> Answer:
        """The answer to a question, where redirections lead."""
        for _ in range(MAX_HOPS):
            error = error_of(reply) if isinstance(reply, ErrorReply) else None
            is_cluster = self._deployment.topology is Topology.CLUSTER
            if not isinstance(error, RedisRedirect) or not is_cluster:
                break
            endpoint = self._deployment.at(error.host or endpoint.host, error.port)
            commands = [question.command]
            if error.asking:
                commands.insert(0, ASKING_COMMAND)
            else:
                self._forget_map()
            try:
                reply = self._exchange(endpoint, commands, deadline)[-1]
            except RedisError as failure:
                return failure
        return error_of(reply) if isinstance(reply, ErrorReply) else reply

    def _exchange(
        self, endpoint: Endpoint, commands: Sequence[bytes], deadline: float
    ) -> list[Reply]:
        """One write, all replies. Raises RedisError where the server cannot be asked in time."""
        if not self._room.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise RedisTimeout("too many questions are waiting for an answer")
        try:
            replies = self._server(endpoint).exchange(commands, deadline)
        except RedisUnavailable:
            # Where the server has gone its successor may be known.
            self._forget_map()
            raise
        except ConfigError as error:
            raise RedisUnavailable(str(error)) from None
        finally:
            self._room.release()
        for reply in replies:
            if isinstance(reply, ErrorReply) and reply.code == "READONLY":
                self._forget_map()
        return replies

    def _server(self, endpoint: Endpoint) -> ServerConnections:
        with self._lock:
            if self._closed:
                raise RedisUnavailable("the tier is being closed")
            server = self._servers.get(endpoint)
            if server is None:
                server = self._servers[endpoint] = ServerConnections(endpoint, self._options)
            return server

    # ------------------------------------------------------------ which server

    def _current_routes(self, deadline: float) -> Routes[Endpoint]:
        if not self._map_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise RedisTimeout(f"{self._deployment.where}: the servers are being looked up")
        try:
            is_old = time.monotonic() - self._looked_up_at > _MAP_AGE_S
            if self._routes is None or (
                is_old and self._deployment.topology is not Topology.STANDALONE
            ):
                found = self._look_up(self._deployment, self._routes, deadline)
                self._routes = Routes(found, {server: server for server in found.servers})
                self._looked_up_at = time.monotonic()
            return self._routes
        finally:
            self._map_lock.release()

    def _look_up(
        self, deployment: Deployment, last: Routes[Endpoint] | None, deadline: float
    ) -> ServerMap:
        if deployment.topology is Topology.STANDALONE:
            return ServerMap((deployment.server,))
        if time.monotonic() >= deadline:
            raise RedisTimeout(f"{deployment.where}: no time is left to look up the servers")
        known = last.nodes if last else ()
        try:
            found = find_servers(deployment, known, self._options.connect_timeout_s, deadline)
        except ConfigError as error:
            raise RedisUnavailable(str(error)) from None
        if not found.servers:
            raise RedisUnavailable(f"{deployment.where} has no master just now")
        return found

    def _forget_map(self) -> None:
        # Not the routes: the servers that they name know the new ones. A plain write: a look-up
        # under way that overwrites it costs an old map for seconds at most.
        self._looked_up_at = 0.0
