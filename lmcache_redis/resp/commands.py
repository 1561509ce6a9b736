"""A blocking client for small commands, each answered by its deadline; payloads are the plane's.

Keys are routed to the servers that hold them. The servers of a Sentinel or a cluster are looked up
when they are first needed, when they have changed or failed, and every few seconds; MOVED and ASK
are followed. Connections are the plane's own kind, as many to a server as there are callers at
once, and kept between commands. One that was lost meanwhile is replaced once; one that was given up
in the middle of a command is closed, for its reply may still come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from lmcache_redis.errors import (
    ConfigError,
    RedisError,
    RedisRedirect,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp.bulk import ask_value, receive_value
from lmcache_redis.resp.connect import Connector
from lmcache_redis.resp.connection import Connection
from lmcache_redis.resp.endpoint import Endpoint, Topology, parse_deployment
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.resp.topology import Hop, Routes, ServerMap, find_servers, next_hop
from lmcache_redis.resp.wire import (
    ASKING_COMMAND,
    ErrorReply,
    Reply,
    error_of,
    get_command,
    parse_scan,
    scan_command,
)

# Commands are short: more at once would only wait for each other.
_MOST_AT_ONCE = 8
_MAP_AGE_S = 5.0

Answer = Reply | RedisError
ResultT = TypeVar("ResultT")


class Question(NamedTuple):
    """A packed command, and the key that says which server is asked."""

    key: bytes
    command: bytes


class CommandClient:
    """Thread-safe. Deadlines are `time.monotonic()` seconds.

    name: of its connections. setup: a packed command for each new connection, which a server may
    refuse (`accepts_setup`). Raises ConfigError on construction for a URL that names no server.
    """

    def __init__(
        self, options: RedisOptions, name: str = "lmcache-redis:storage", setup: bytes = b""
    ) -> None:
        self._options = options
        self._name = name
        self._setup = setup
        self._deployment = parse_deployment(options)
        self._room = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self._lock = threading.Lock()
        self._connectors: dict[Endpoint, Connector] = {}
        self._idle: dict[Endpoint, list[Connection]] = {}
        self._accepting: set[Endpoint] = set()
        self._map_lock = threading.Lock()
        self._routes: Routes[Endpoint] | None = None
        self._looked_up_at = 0.0
        self._closed = False

    def ask(self, questions: Sequence[Question], deadline: float) -> list[Answer]:
        """The replies in order, errors among them; a RedisError in place of what could not be had.

        Those for one server are sent at once and carried out in their order.
        """
        try:
            routes = self.routes(deadline)
        except RedisError as error:
            return [error] * len(questions)
        answers: list[Answer] = [None] * len(questions)
        by_server = routes.split(range(len(questions)), lambda place: questions[place].key)
        for endpoint, places in by_server.items():
            asked = [questions[place] for place in places]
            replies = self._ask_one(endpoint, asked, deadline)
            for place, answer in zip(places, replies, strict=True):
                answers[place] = answer
        return answers

    def scan(self, pattern: bytes, step_keys: int, deadline: float) -> Iterator[bytes]:
        """The names of strings on all servers that match, in SCANs of so many keys each.

        A key may come twice; one that was there all the time comes. Raises RedisError.
        """
        for endpoint in self.routes(deadline).nodes:
            for keys, _ in self.scan_steps(endpoint, pattern, step_keys, lambda: deadline):
                yield from keys

    def scan_steps(
        self,
        endpoint: Endpoint,
        pattern: bytes,
        step_keys: int,
        next_deadline: Callable[[], float],
    ) -> Iterator[tuple[list[bytes], bool]]:
        """What each SCAN of one server finds, and whether it was the last. Raises RedisError."""
        cursor = b"0"
        is_last = False
        while not is_last:
            command = scan_command(cursor, pattern, step_keys, "TYPE", "string")
            (reply,) = self.exchange(endpoint, [command], next_deadline())
            if isinstance(reply, ErrorReply):
                raise error_of(reply)
            cursor, keys = parse_scan(reply)
            is_last = cursor == b"0"
            yield keys, is_last

    def exchange(
        self, endpoint: Endpoint, commands: Sequence[bytes], deadline: float
    ) -> list[Reply]:
        """The replies of one server, errors among them. Raises RedisError."""
        request = b"".join(commands)
        replies = self._with_connection(
            endpoint,
            lambda connection: connection.exchange((request,), len(commands), deadline),
            deadline,
        )
        if any(isinstance(reply, ErrorReply) and reply.code == "READONLY" for reply in replies):
            self._forget_map()
        return replies

    def get(
        self, endpoint: Endpoint, key: bytes, payload: memoryview, deadline: float
    ) -> bytes | None:
        """The header of a stripe, its payload received; None where there is none of that length.

        Raises RedisError.
        """

        def get(connection: Connection) -> bytes | None:
            ask_value(connection, get_command(key), deadline)
            return receive_value(connection, payload, deadline)

        return self._with_connection(endpoint, get, deadline)

    @property
    def is_cluster(self) -> bool:
        """Whether keys are spread over servers by their slots."""
        return self._deployment.topology is Topology.CLUSTER

    def accepts_setup(self, endpoint: Endpoint) -> bool:
        """Whether the server has accepted the `setup` of the last new connection."""
        return endpoint in self._accepting

    def routes(self, deadline: float) -> Routes[Endpoint]:
        """Which server has which key. Raises RedisError."""
        if not self._map_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise RedisTimeout(f"{self._deployment.where}: the servers are being looked up")
        try:
            is_old = time.monotonic() - self._looked_up_at > _MAP_AGE_S
            if self._routes is None or (
                is_old and self._deployment.topology is not Topology.STANDALONE
            ):
                found = self._look_up(deadline)
                self._routes = Routes(found, {server: server for server in found.servers})
                self._looked_up_at = time.monotonic()
            return self._routes
        finally:
            self._map_lock.release()

    def close(self) -> None:
        """Close every connection; who waits for an answer gets RedisUnavailable."""
        with self._lock:
            self._closed = True
            idle = [connection for some in self._idle.values() for connection in some]
            self._idle.clear()
        for connector in self._connectors.values():
            connector.abort()
        for connection in idle:
            connection.close()

    # ---------------------------------------------------------------- inside

    def _ask_one(
        self, endpoint: Endpoint | None, questions: Sequence[Question], deadline: float
    ) -> list[Answer]:
        if endpoint is None:
            where = self._deployment.where
            missing = RedisUnavailable(f"no server at {where} has this key just now")
            return [missing] * len(questions)
        try:
            replies = self.exchange(endpoint, [each.command for each in questions], deadline)
        except RedisError as error:
            return [error] * len(questions)
        return [
            self._followed(endpoint, question, reply, deadline)
            for question, reply in zip(questions, replies, strict=True)
        ]

    def _followed(
        self, endpoint: Endpoint, question: Question, reply: Reply, deadline: float
    ) -> Answer:
        """The answer to a question, where redirections lead."""
        hop: Hop | None = None
        while isinstance(reply, ErrorReply):
            error = error_of(reply)
            if not isinstance(error, RedisRedirect) or not self.is_cluster:
                break
            hop = next_hop(hop, error)
            if hop is None:
                break
            endpoint = self._deployment.at(error.host or endpoint.host, error.port)
            if not hop.asking:
                self._forget_map()
            commands = [ASKING_COMMAND, question.command] if hop.asking else [question.command]
            try:
                reply = self.exchange(endpoint, commands, deadline)[-1]
            except RedisError as failure:
                return failure
        return reply

    def _with_connection(
        self, endpoint: Endpoint, use: Callable[[Connection], ResultT], deadline: float
    ) -> ResultT:
        if not self._room.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise RedisTimeout("too many commands are waiting for an answer")
        try:
            connector, kept = self._kept(endpoint)
            if kept is not None:
                try:
                    return self._use(endpoint, kept, use)
                except RedisUnavailable:
                    # It may have been lost long ago; the server may be another by now. None of
                    # our commands does harm when it is carried out twice.
                    pass
            connection = Connection(connector, self._name)
            if time.monotonic() >= deadline:
                raise RedisTimeout(f"Redis at {endpoint.where}: no time is left")
            connection.open(deadline)
            if self._setup:
                (reply,) = connection.exchange((self._setup,), 1, deadline)
                with self._lock:
                    self._accepting.discard(endpoint)
                    if not isinstance(reply, ErrorReply):
                        self._accepting.add(endpoint)
            return self._use(endpoint, connection, use)
        except RedisUnavailable:
            # Where the server has gone its successor may be known.
            self._forget_map()
            raise
        except ConfigError as error:
            raise RedisUnavailable(str(error)) from None
        finally:
            self._room.release()

    def _use(
        self, endpoint: Endpoint, connection: Connection, use: Callable[[Connection], ResultT]
    ) -> ResultT:
        try:
            return use(connection)
        except BaseException as error:
            # Interrupted: its reply may still come, and would be taken for another's. After a
            # RedisError it is open where nothing was sent, or where an error was the reply.
            if not isinstance(error, RedisError):
                connection.close()
            raise
        finally:
            with self._lock:
                is_kept = connection.is_open and not self._closed
                if is_kept:
                    self._idle.setdefault(endpoint, []).append(connection)
            if not is_kept:
                connection.close()

    def _kept(self, endpoint: Endpoint) -> tuple[Connector, Connection | None]:
        with self._lock:
            if self._closed:
                raise RedisUnavailable("the client is being closed")
            connector = self._connectors.get(endpoint)
            if connector is None:
                times = self._options.connect_timeout_s, self._options.op_timeout_s
                connector = self._connectors[endpoint] = Connector(endpoint, *times)
            idle = self._idle.get(endpoint)
            return connector, idle.pop() if idle else None

    def _look_up(self, deadline: float) -> ServerMap:
        deployment = self._deployment
        if deployment.topology is Topology.STANDALONE:
            return ServerMap((deployment.server,))
        if time.monotonic() >= deadline:
            raise RedisTimeout(f"{deployment.where}: no time is left to look up the servers")
        known = self._routes.nodes if self._routes else ()
        try:
            found = find_servers(deployment, known, self._options.connect_timeout_s, deadline)
        except ConfigError as error:
            raise RedisUnavailable(str(error)) from None
        if not found.servers:
            raise RedisUnavailable(f"{deployment.where} has no master just now: try again")
        return found

    def _forget_map(self) -> None:
        # Not the routes: the servers that they name know the new ones. A plain write: a look-up in
        # flight that overwrites it costs an old map for seconds at most.
        self._looked_up_at = 0.0
