# SPDX-License-Identifier: Apache-2.0
"""Asks Sentinels or a cluster which servers there are, and has a thread that does it in time.

The map is looked up at the start, every few seconds, and soon after a hint that it is outdated: at
once and then up to once a second while a server is down or refuses, once a second while keys are
redirected. Pauses have jitter. A look-up that fails changes nothing. Whom to ask and whom to
believe is decided in `sources`.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from lmcache_redis.errors import ConfigError, RedisError, RedisUnavailable
from lmcache_redis.resp.health import RepeatedLines
from lmcache_redis.resp.jobs import LoopThread, backoff_s, jittered
from lmcache_redis.resp.maps import (
    Answer,
    ServerMap,
    judge_cluster,
    judge_master,
    read_slots,
    text_of,
)
from lmcache_redis.resp.net.advice import BY_CODE
from lmcache_redis.resp.net.connection import Connection, Connector
from lmcache_redis.resp.net.endpoint import NO_SENTINEL, Endpoint, brief, is_no_sentinel
from lmcache_redis.resp.net.wire import ErrorReply, Reply, error_of, pack_command
from lmcache_redis.resp.options import Deployment, Topology
from lmcache_redis.resp.sources import Doubt, Sources
from lmcache_redis.tiers import PlaneState

logger = logging.getLogger(__name__)

# A cluster announces changes of its map by redirections; Sentinel does not.
_REFRESH_S = {Topology.SENTINEL: 1.0, Topology.CLUSTER: 15.0}
# While a server is down or refuses, or no map is known.
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0
# A resharding redirects keys all the time, and a map of a large cluster is large.
_MOVED_PAUSE_S = 1.0
# While slots have no server; then longer and longer.
_PARTIAL_PAUSE_S = 0.5
# More than anybody has; each is small.
_MOST_CONNECTORS = 1024


class ServerFinder:
    """Asks who `Sources` names. Keeps the connections to its panel.

    timeout_s: for all questions to one server. One thread uses it.
    """

    def __init__(self, deployment: Deployment, timeout_s: float) -> None:
        self.deployment = deployment
        self._timeout_s = timeout_s
        self._is_sentinel = deployment.topology is Topology.SENTINEL
        self._sources = Sources(deployment.seeds, self._is_sentinel)
        # A name look-up that hangs is not begun again.
        self._connectors: dict[Endpoint, Connector] = {}
        self._connections: dict[Endpoint, Connection] = {}
        self._lines = RepeatedLines()
        self._told: set[str] = set()

    def find(
        self,
        doubt: Doubt = Doubt.NONE,
        down: Collection[Endpoint] = (),
        closing: Callable[[], bool] = lambda: False,
    ) -> ServerMap:
        """The map to use. Raises RedisError or ConfigError with a sentence that says what to
        change if no source answers.

        down: servers of the last map. closing: called before each server; True ends the look-up.
        """
        sources = self._sources
        failure: RedisError | ConfigError | None = None
        sources.begin(doubt, down)
        while not closing() and (source := sources.next_source()) is not None:
            failure = self._hear(source) or failure
        before = {} if sources.belief is None else {sources.teller: sources.belief}
        is_news = sources.end()
        self._keep(sources.panel)
        self._tell(before if is_news else {})
        try:
            if not sources.answers or sources.belief is None:
                raise failure or RedisUnavailable(f"{self.deployment.url} has no servers")
            return sources.belief.map
        finally:
            del failure  # else it and this frame would keep each other

    def close(self) -> None:
        self._keep(())

    def _keep(self, panel: Collection[Endpoint]) -> None:
        for endpoint in self._connections.keys() - set(panel):
            self._connections.pop(endpoint).close()

    def _tell(self, before: Mapping[Endpoint, Answer]) -> None:
        """Log who named which servers, if they do not agree. before: what was believed until now,
        and who had said it.
        """
        sources = self._sources
        said = {**before, **sources.answers}
        named = {frozenset(answer.map.servers) for answer in said.values()}
        if sources.belief is None or len(named) < 2:
            return
        each = "; ".join(sorted(f"{who.where} says {said[who].shown}" for who in said))
        line = f"the servers are named differently: {each}. Used: {sources.belief.shown}"
        if self._lines.is_new(line):
            logger.info("%s: %s", self.deployment.url, line)

    # ---------------------------------------------------------------- questions

    def _hear(self, source: Endpoint) -> RedisError | ConfigError | None:
        """Ask it, and tell the sources. Returns why it did not answer."""
        failure: RedisError | ConfigError
        try:
            self._sources.answered(source, self._ask(source))
            return None
        except (RedisError, ConfigError) as error:
            failure = error
        except (TypeError, ValueError, IndexError, AttributeError):
            command = "SENTINEL" if self._is_sentinel else "CLUSTER SLOTS"
            failure = RedisUnavailable(f"malformed {command} reply from {source.where}")
        self._sources.failed(source)
        try:
            return failure
        finally:
            del failure

    def _ask(self, endpoint: Endpoint) -> Answer:
        return self._ask_sentinel(endpoint) if self._is_sentinel else self._ask_node(endpoint)

    def _call(self, endpoint: Endpoint, *commands: tuple[str, ...]) -> list[Reply]:
        """The replies to commands, error replies among them. Raises RedisError and ConfigError."""
        deadline = time.monotonic() + self._timeout_s
        connection = self._connections.get(endpoint)
        if connection is not None:
            connection.check_idle()
        if connection is None or not connection.is_open:
            if endpoint not in self._connectors and len(self._connectors) >= _MOST_CONNECTORS:
                self._connectors.clear()
            connector = self._connectors.setdefault(
                endpoint, Connector(endpoint, self._timeout_s, self._timeout_s)
            )
            connection = connector.open("lmcache-redis:topology", deadline)
            self._connections[endpoint] = connection
        connection.arm(deadline)
        packed = b"".join([pack_command(*words) for words in commands])
        connection.send((packed,), len(commands))
        return connection.receive_all()

    def _ask_sentinel(self, endpoint: Endpoint) -> Answer:
        service = self.deployment.service
        found, more = self._call(
            endpoint,
            ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service),
            ("SENTINEL", "MASTER", service),
        )
        if isinstance(found, ErrorReply):
            if is_no_sentinel(found.text):
                raise RedisUnavailable(f"Redis at {endpoint.where} {NO_SENTINEL}")
            raise error_of(found)
        if not found:
            raise RedisUnavailable(
                f"Sentinel at {endpoint.where} watches no master named {service}: "
                "correct the name in the Redis URL"
            )
        host, port = _list(found)[:2]
        server_map = ServerMap((self.deployment.at(text_of(host), int(port)),))
        if isinstance(more, ErrorReply):
            self._do_without(endpoint, "SENTINEL MASTER", more)
        return judge_master(server_map, more if isinstance(more, list) else None)

    def _ask_node(self, endpoint: Endpoint) -> Answer:
        rows, more = self._call(endpoint, ("CLUSTER", "SLOTS"), ("CLUSTER", "INFO"))
        if isinstance(rows, ErrorReply):
            if "cluster support disabled" in rows.text:
                raise ConfigError(
                    f"Redis at {endpoint.where} is no cluster: write redis:// instead of "
                    "redis+cluster://"
                )
            raise error_of(rows)
        if isinstance(more, ErrorReply):
            self._do_without(endpoint, "CLUSTER INFO", more)
        server_map = read_slots(self.deployment, endpoint, _list(rows))
        return judge_cluster(server_map, more if isinstance(more, bytes) else None)

    def _do_without(self, endpoint: Endpoint, command: str, reply: ErrorReply) -> None:
        """Told once: only servers that disagree make a difference."""
        if command not in self._told:
            self._told.add(command)
            where, why = endpoint.where, brief(reply.text)
            logger.warning(
                "Redis at %s refuses %s, without which an outdated one is noticed later: %s",
                where, command, why,
            )  # fmt: skip


def _list(reply: Reply) -> list[Any]:
    if not isinstance(reply, list):
        raise TypeError
    return reply


def find_servers(deployment: Deployment, timeout_s: float) -> tuple[Endpoint, ...]:
    """The data servers, asked for once if they are not named. Raises RedisError and ConfigError."""
    if deployment.topology is Topology.STANDALONE:
        return (deployment.server,)
    with contextlib.closing(ServerFinder(deployment, timeout_s)) as finder:
        return finder.find().servers


class MapWatcher:
    """A thread that looks the servers up.

    adopt: called with each map. down: of the servers in use, those that do not answer; None if
    none is in use. state: until there is a map.
    """

    def __init__(
        self,
        finder: ServerFinder,
        adopt: Callable[[ServerMap], bool],
        down: Callable[[], Collection[Endpoint] | None],
    ) -> None:
        self.thread = LoopThread("lmcr-topology", self._step)
        self.state = PlaneState(False, False, "the servers have not been looked up yet")
        self._finder = finder
        self._adopt = adopt
        self._down = down
        self._in_doubt = 0  # look-ups because something is wrong, in a row
        self._lines = RepeatedLines()
        self._hinted = Doubt.NONE
        self._partial = 0  # maps in a row with slots without a server
        self._changed = threading.Condition(threading.Lock())
        self._is_closing = False

    def hint(self, doubt: Doubt = Doubt.MOVED) -> None:
        """Have the servers looked up soon."""
        with self._changed:
            self._hinted = max(self._hinted, doubt)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def _step(self) -> bool:
        if self._is_closing:
            self._finder.close()
            return False
        with self._changed:
            hinted, self._hinted = self._hinted, Doubt.NONE
        doubt = max(hinted, self._doubt)
        self._in_doubt = self._in_doubt + 1 if doubt is Doubt.BROKEN else 0
        reason = self.state.reason
        try:
            found = self._finder.find(doubt, self._down() or (), lambda: self._is_closing)
            self._adopt(found)
            self._note_slots(found.unserved)
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

    @property
    def _doubt(self) -> Doubt:
        """Doubts the map by the state of the servers in use."""
        down = self._down()
        return Doubt.BROKEN if down is None or down else Doubt.NONE

    def _note_slots(self, unserved: int) -> None:
        """Some slots may have no server for a moment: it is told if they have none again."""
        self._partial = self._partial + 1 if unserved else 0
        line = f"{unserved:,} slots of the cluster have no server"
        if self._partial > 1 and self._lines.is_new(line):
            url, change = self._finder.deployment.url, BY_CODE["CLUSTERDOWN"].change
            logger.warning("%s: %s: %s", url, line, change)

    def _pause(self) -> None:
        began = time.monotonic()
        refresh_s = _REFRESH_S[self._finder.deployment.topology]
        pauses_s: Mapping[Doubt, float] = {
            Doubt.NONE: (
                backoff_s(self._partial - 1, _PARTIAL_PAUSE_S, refresh_s)
                if self._partial
                else jittered(refresh_s)
            ),
            Doubt.MOVED: _MOVED_PAUSE_S * random.uniform(1.0, 1.5),
            Doubt.BROKEN: backoff_s(self._in_doubt, _FIRST_PAUSE_S, _LONGEST_PAUSE_S),
        }
        while not self._is_closing:
            doubt = self._doubt
            with self._changed:
                left_s = began + pauses_s[max(doubt, self._hinted)] - time.monotonic()
                if left_s <= 0 or self._is_closing:
                    return
                self._changed.wait(left_s)
