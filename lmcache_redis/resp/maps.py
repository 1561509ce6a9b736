"""Which servers there are, and which slots each has: asked of Sentinels or of a cluster.

The map is looked up at the start, every few seconds, soon after a hint that it is outdated (a
redirection, a server that went down, a master that is a replica), and more often while a server is
down or none is known. A look-up that fails changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from lmcache_redis.errors import ConfigError, RedisError, RedisReplyError, RedisUnavailable
from lmcache_redis.resp.health import RepeatedLines
from lmcache_redis.resp.jobs import LoopThread, backoff_s, jittered
from lmcache_redis.resp.net.connection import Connection, Connector
from lmcache_redis.resp.net.endpoint import NO_SENTINEL, Endpoint, is_no_sentinel
from lmcache_redis.resp.net.wire import pack_command
from lmcache_redis.resp.options import Deployment, Topology
from lmcache_redis.tiers import PlaneState

logger = logging.getLogger(__name__)

SLOTS = 16384
# More nodes than this are not recommended in a cluster; each costs threads and connections.
_MOST_SERVERS = 1000
# A cluster announces changes of its map by redirections; Sentinel does not.
_REFRESH_S = {Topology.SENTINEL: 1.0, Topology.CLUSTER: 15.0}
# Hints come in bursts: a resharding redirects every key of a slot.
_LEAST_PAUSE_S = 0.1
# While a server is down, or hints come that lead to no other map.
_LONGEST_PAUSE_S = 1.0


class ServerMap(NamedTuple):
    """The data servers, and in a cluster the slots of each.

    ranges: (first slot, last slot, number of the server); None: the one server has every key.
    """

    servers: tuple[Endpoint, ...]
    ranges: tuple[tuple[int, int, int], ...] | None = None


class ServerFinder:
    """Asks Sentinels or a cluster which servers there are. Keeps the connection that answered.

    timeout_s: for all questions to one server. One thread uses it.
    """

    def __init__(self, deployment: Deployment, timeout_s: float) -> None:
        self.deployment = deployment
        self._timeout_s = timeout_s
        self._connection: Connection | None = None
        self._asked: Endpoint | None = None  # where that leads

    def find(
        self, known: Iterable[Endpoint] = (), closing: Callable[[], bool] = lambda: False
    ) -> ServerMap:
        """Ask once. Raises RedisError or ConfigError with a sentence that says what to change.

        known: servers of the last map. One that answered is asked again; then they are asked in any
        order, then the seeds, which may have left the cluster. closing: called before each server;
        True ends the look-up.
        """
        deployment = self.deployment
        is_sentinel = deployment.topology is Topology.SENTINEL
        ask_one = self._master if is_sentinel else self._shards
        failure: RedisError | ConfigError = RedisUnavailable(f"{deployment.url} has no servers")
        for endpoint in self._in_order(() if is_sentinel else known):
            if closing():
                break
            try:
                return ask_one(endpoint)
            except (RedisError, ConfigError) as error:
                failure = error
            except (TypeError, ValueError, IndexError, AttributeError):
                command = "SENTINEL" if is_sentinel else "CLUSTER SLOTS"
                failure = RedisUnavailable(f"malformed {command} reply from {endpoint.where}")
            self.close()
        try:
            raise failure
        finally:
            del failure  # else it and this frame would keep each other

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._asked = None

    def _in_order(self, known: Iterable[Endpoint]) -> Iterable[Endpoint]:
        first, second = list(known), list(self.deployment.seeds)
        random.shuffle(first)
        random.shuffle(second)
        return sorted(dict.fromkeys(first + second), key=lambda each: each != self._asked)

    def _ask(self, endpoint: Endpoint, *words: str) -> Any:
        """The reply to one command. Raises RedisError and ConfigError."""
        deadline = time.monotonic() + self._timeout_s
        if self._connection is not None:
            self._connection.check_idle()
        if self._connection is None or endpoint != self._asked or not self._connection.is_open:
            self.close()
            connector = Connector(endpoint, self._timeout_s, self._timeout_s)
            self._connection = connector.open("lmcache-redis:topology", deadline)
            self._asked = endpoint
        return self._connection.call(pack_command(*words), 1, deadline)[0]

    def _master(self, endpoint: Endpoint) -> ServerMap:
        """As the Sentinel says. If it is outdated, a refused write has it asked again."""
        service = self.deployment.service
        try:
            found = self._ask(endpoint, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
        except RedisReplyError as error:
            if is_no_sentinel(str(error)):
                raise RedisUnavailable(f"Redis at {endpoint.where} {NO_SENTINEL}") from None
            raise
        if not found:
            raise RedisUnavailable(
                f"Sentinel at {endpoint.where} watches no master named {service}: "
                "correct the name in the Redis URL"
            )
        return ServerMap((self.deployment.at(_text(found[0]), int(found[1])),))

    def _shards(self, endpoint: Endpoint) -> ServerMap:
        try:
            rows = self._ask(endpoint, "CLUSTER", "SLOTS")
        except RedisError as error:
            if "cluster support disabled" in str(error):
                raise ConfigError(
                    f"Redis at {endpoint.where} is no cluster: write redis:// instead of "
                    "redis+cluster://"
                ) from None
            raise
        return _read_slots(self.deployment, endpoint, rows)


def find_servers(deployment: Deployment, timeout_s: float) -> tuple[Endpoint, ...]:
    """The data servers, asked for once if they are not named. Raises RedisError and ConfigError."""
    if deployment.topology is Topology.STANDALONE:
        return (deployment.server,)
    with contextlib.closing(ServerFinder(deployment, timeout_s)) as finder:
        return finder.find().servers


def _read_slots(deployment: Deployment, asked: Endpoint, rows: list[list[Any]]) -> ServerMap:
    """Rows are [first slot, last slot, [host, port, id, ...] of the master, replicas...].

    Without a host it is the host that was asked; ? is a host name that is not set, and port 0 a
    port that is not open (https://redis.io/docs/latest/commands/cluster-slots/).
    """
    numbers: dict[tuple[str, int], int] = {}
    ranges: list[tuple[int, int, int]] = []
    for first, last, master, *_ in rows:
        if not 0 <= first <= last < SLOTS:
            raise ValueError
        host, port = _text(master[0] or b"") or asked.host, int(master[1])
        if host != "?" and 0 < port < 1 << 16:
            ranges.append((first, last, numbers.setdefault((host, port), len(numbers))))
    if len(numbers) > _MOST_SERVERS:
        names = f"names {len(numbers)} servers, more than {_MOST_SERVERS}"
        raise RedisUnavailable(f"the cluster at {asked.where} {names}")
    if not ranges:
        missing = "does not name its servers (?)" if rows else "has no slots assigned yet"
        raise RedisUnavailable(f"the cluster at {asked.where} {missing}")
    servers = tuple(deployment.at(host, port) for host, port in numbers)
    return ServerMap(servers, tuple(ranges))


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


class MapWatcher:
    """A thread that looks the servers up. Pauses have jitter, and grow while nothing changes.

    adopt: called with each map; whether it is another one. servers: returns those in use, and
    whether each is up. state: while there are none.
    """

    def __init__(
        self,
        finder: ServerFinder,
        adopt: Callable[[ServerMap], bool],
        servers: Callable[[], Mapping[Endpoint, bool]],
    ) -> None:
        self.thread = LoopThread("lmcr-topology", self._step)
        self.state = PlaneState(False, False, "the servers have not been looked up yet")
        self._finder = finder
        self._adopt = adopt
        self._servers = servers
        self._quiet = 0  # look-ups that changed nothing, in a row
        self._lines = RepeatedLines()
        self._hinted = threading.Event()
        self._closing = threading.Event()

    def hint(self) -> None:
        """Have the servers looked up soon."""
        self._hinted.set()

    def close(self) -> None:
        self._closing.set()
        self._hinted.set()

    def _step(self) -> bool:
        if self._closing.is_set():
            self._finder.close()
            return False
        self._hinted.clear()
        reason = self.state.reason
        try:
            up = [server for server, is_up in self._servers().items() if is_up]
            if self._adopt(self._finder.find(up, closing=self._closing.is_set)):
                self._quiet = 0
            reason = ""
        except (RedisError, ConfigError) as error:
            reason = str(error)
            if self._lines.is_new(reason):
                where = self._finder.deployment.url
                logger.warning("%s: the servers cannot be looked up: %s", where, error)
        finally:
            self.state = PlaneState(False, True, reason)
        self._pause()
        return True

    def _pause(self) -> None:
        least_s = backoff_s(self._quiet, _LEAST_PAUSE_S, _LONGEST_PAUSE_S)
        self._quiet += 1
        are_up = self._servers().values()
        if self._closing.wait(least_s) or not are_up or not all(are_up):
            return
        left_s = jittered(_REFRESH_S[self._finder.deployment.topology]) - least_s
        if not self._hinted.wait(max(0.0, left_s)):
            # Without hints, and all servers are up.
            self._quiet = 0
