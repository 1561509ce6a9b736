"""The nodes of a plane: one for each data server on the map, started and retired as it changes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from lmcache_redis.errors import ConfigError, RedisError, RedisRedirect
from lmcache_redis.resp.deployment import Deployment, Topology
from lmcache_redis.resp.endpoint import Endpoint
from lmcache_redis.resp.jobs import JobRegistry, Stop
from lmcache_redis.resp.node import Node
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.resp.outcomes import PlaneState
from lmcache_redis.resp.readjob import ReadTask
from lmcache_redis.resp.routes import Routes, ServerMap
from lmcache_redis.resp.topology import Watcher, find_servers
from lmcache_redis.resp.writejob import WriteTask

logger = logging.getLogger(__name__)

# A cluster tells by redirections that its map has changed; Sentinel has no such way.
_REFRESH_S = {Topology.SENTINEL: 1.0, Topology.CLUSTER: 15.0}
# A shard that lost its last slot still answers, with redirections, what was sent to it before.
_GRACE_S = 5.0
_REPEAT_AFTER_S = 60.0


class Nodes:
    """Thread-safe. The map is adopted on the watcher's thread; a single server needs none."""

    def __init__(
        self,
        deployment: Deployment,
        options: RedisOptions,
        registry: JobRegistry,
        *,
        remove: Callable[[bytes, int], None],
        follow_read: Callable[[Node, ReadTask, RedisRedirect], bool],
        follow_write: Callable[[Node, WriteTask, RedisRedirect], bool],
    ) -> None:
        self._deployment = deployment
        self._options = options
        self._registry = registry
        self._remove = remove
        self._follow_read = follow_read
        self._follow_write = follow_write
        self._lock = threading.RLock()
        self._mapped = threading.Event()
        self._nodes: dict[Endpoint, Node] = {}
        self._retiring: dict[Node, float] = {}  # and until when they may be needed
        self._retired = _Sums()
        self._closed = False
        self._shards = 1
        self._map_error = "the servers have not been looked up yet"
        self._map_error_since = time.monotonic()
        self._said_at = 0.0
        self._watcher: Watcher | None = None
        if deployment.topology is Topology.STANDALONE:
            self._nodes[deployment.server] = self._make(deployment.server)
            self.routes: Routes[Node] = Routes(ServerMap((deployment.server,)), self._nodes)
        else:
            self.routes = Routes(ServerMap(()), {})
            self._watcher = Watcher(
                self._find,
                self._adopt,
                self._not_found,
                lambda: not self.routes.nodes or not all(n.is_up for n in self.routes.nodes),
                retry_s=options.probe_interval_s,
                refresh_s=_REFRESH_S[deployment.topology],
            )

    # ------------------------------------------------------------- life cycle

    def start(self) -> None:
        if self._watcher is not None:
            self._watcher.start()
            return
        self._mapped.set()
        for node in self._nodes.values():
            node.start()

    def close(self, patience_s: float) -> int:
        """End all threads; how many did not end in time."""
        with self._lock:
            self._closed = True
            nodes = [*self._nodes.values(), *self._retiring]
        if self._watcher is not None:
            self._watcher.close()
        for node in nodes:
            node.stop()
        left = sum(node.join() for node in nodes)
        if self._watcher is not None:
            left += not self._watcher.join(patience_s)
        return left

    # ------------------------------------------------------------- any thread

    def follow(self, node: Node, redirect: RedisRedirect) -> Node:
        """The node that `node` redirected to; a new one if it is not on the map (yet)."""
        if self._watcher is not None and not redirect.asking:
            self._watcher.hint()
        target = self._deployment.at(redirect.host or node.endpoint.host, redirect.port)
        with self._lock:
            found = self._nodes.get(target)
            if found is None:
                found = self._nodes[target] = self._make(target)
                if self._closed:
                    return found  # never started: its tasks end with the plane
                found.start()
            return found

    def wait_probed(self, timeout_s: float) -> PlaneState:
        deadline = time.monotonic() + timeout_s
        self._mapped.wait(timeout_s)
        for node in self.routes.nodes:
            node.health.wait_probed(max(0.0, deadline - time.monotonic()))
        return self.state

    @property
    def state(self) -> PlaneState:
        nodes = self.routes.nodes
        if not nodes:
            return PlaneState(False, self._mapped.is_set(), self._map_error, self._map_error_since)
        states = [node.health.state for node in nodes]
        if len(states) == 1:
            return states[0]
        down = [state for state in states if not state.up]
        reason = next((state.reason for state in down or states if state.reason), "")
        if down:
            reason = f"{len(down)} of {len(states)} shards are down: {reason}"
        return PlaneState(
            up=len(down) < len(states),
            probed=all(state.probed for state in states),
            reason=reason,
            since=max(state.since for state in states),
        )

    @property
    def open_streams(self) -> int:
        return sum(node.connector.open_streams for node in self._all())

    @property
    def connects(self) -> int:
        return self._retired.connects + sum(node.connector.connects for node in self._all())

    @property
    def connections_lost(self) -> int:
        return self._retired.lost + sum(node.connections_lost for node in self._all())

    @property
    def errors(self) -> int:
        return self._retired.errors + sum(node.health.errors for node in self._all())

    def _all(self) -> list[Node]:
        with self._lock:
            return [*self._nodes.values(), *self._retiring]

    def _make(self, endpoint: Endpoint) -> Node:
        return Node(
            endpoint,
            self._options,
            -(-self._options.get_connections // self._shards),
            -(-self._options.set_connections // self._shards),
            on_down=self._down,
            remove=self._remove,
            follow_read=self._follow_read,
            follow_write=self._follow_write,
            stale=lambda error: self._hint(),
        )

    def _down(self, node: Node) -> None:
        self._registry.stop_all(Stop.UNAVAILABLE, node=node)
        self._hint()

    def _hint(self) -> None:
        if self._watcher is not None:
            self._watcher.hint()

    # ------------------------------------------------------- watcher's thread

    def _find(self) -> ServerMap:
        known = [node.endpoint for node in self.routes.nodes if node.is_up]
        timeout_s = self._options.connect_timeout_s
        return find_servers(self._deployment, known, timeout_s, wanted=lambda: not self._closed)

    def _adopt(self, found: ServerMap) -> None:
        with self._lock:
            if self._closed:
                return
            self._shards = max(1, len(found.servers))
            before = self.routes.nodes
            for server in found.servers:
                node = self._nodes.get(server)
                if node is None:
                    node = self._nodes[server] = self._make(server)
                    node.start()
            self.routes = Routes(found, self._nodes)
            grace_s = _GRACE_S if found.ranges is not None else 0.0
            until = time.monotonic() + grace_s
            for server in [server for server in self._nodes if server not in found.servers]:
                self._retiring[self._nodes.pop(server)] = until
        if found.servers:
            self._map_error = ""
        elif not self._map_error:
            self._map_error = "Sentinel names a server as master that is a replica"
            self._map_error_since = time.monotonic()
        if set(before) != set(self.routes.nodes):
            places = ", ".join(server.where for server in found.servers) or "nobody"
            logger.info("%s: the data is with %s", self._deployment.where, places)
        self._sweep()
        self._mapped.set()

    def _not_found(self, error: RedisError | ConfigError) -> None:
        self._sweep()
        if not self.routes.nodes:
            self._map_error = str(error)
        now = time.monotonic()
        if now - self._said_at > _REPEAT_AFTER_S:
            self._said_at = now
            logger.warning("%s: the servers cannot be looked up: %s", self._deployment.where, error)
        self._mapped.set()

    def _sweep(self) -> None:
        """End the nodes that were retired, once nothing needs them any more."""
        now = time.monotonic()
        for node, until in list(self._retiring.items()):
            if node.is_up and now < until and self._registry.needs(node):
                continue
            node.stop()
            self._registry.stop_all(Stop.UNAVAILABLE, node=node)
            if left := node.join():
                logger.warning("%d threads of a retired server did not end", left)
            self._retired.add(node)
            with self._lock:
                del self._retiring[node]


class _Sums:
    """What nodes counted that are no more."""

    def __init__(self) -> None:
        self.connects = self.lost = self.errors = 0

    def add(self, node: Node) -> None:
        self.connects += node.connector.connects
        self.lost += node.connections_lost
        self.errors += node.health.errors
