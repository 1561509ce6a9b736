"""Looking up which servers there are: with Sentinel or Cluster, again and again.

At the start, every few seconds, soon after a hint that the map is outdated (a redirection, a server
that went down, a master that is a replica), and more often while a server is down or none is known.
A look-up that fails changes nothing. Look-ups use a kept connection to any node that answers;
pauses have jitter and grow while nothing changes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from lmcache_redis.errors import ConfigError, RedisError
from lmcache_redis.resp.loops import Backoff, LoopThread, jittered
from lmcache_redis.resp.net.endpoint import Deployment, Endpoint, Topology
from lmcache_redis.resp.net.topology import ServerFinder, ServerMap
from lmcache_redis.tiers import PlaneState

logger = logging.getLogger(__name__)

# A cluster announces changes of its map by redirections; Sentinel does not.
_REFRESH_S = {Topology.SENTINEL: 1.0, Topology.CLUSTER: 15.0}
# Hints come in bursts: a resharding redirects every key of a slot.
_LEAST_PAUSE_S = 0.1
# While a server is down, or hints come that lead to no other map.
_LONGEST_PAUSE_S = 1.0
_REPEAT_AFTER_S = 60.0


class MappedServers(Protocol):
    """The interface of `node.DataNodes` for the watcher."""

    def servers(self, up: bool = False) -> Sequence[Endpoint]:
        """The servers of the map; up: only those that are up."""

    def adopt(self, found: ServerMap) -> bool:
        """Use a map from now on; return whether it is another one."""

    def sweep(self) -> None:
        """End what is not needed any more."""


class MapWatcher:
    """A thread that looks the servers up. mapped: the first look-up has ended."""

    def __init__(self, deployment: Deployment, timeout_s: float, nodes: MappedServers) -> None:
        self.mapped = threading.Event()
        self.thread = LoopThread("lmcr-topology", self._step)
        self._nodes = nodes
        self._deployment = deployment
        self._finder = ServerFinder(deployment, timeout_s)
        self._backoff = Backoff(_LEAST_PAUSE_S, _LONGEST_PAUSE_S)
        self._waiting: deque[Callable[[], None]] = deque()
        self._error = "the servers have not been looked up yet"
        self._error_since = time.monotonic()
        self._said_at = 0.0
        self._hinted = threading.Event()
        self._closing = threading.Event()

    @property
    def state(self) -> PlaneState:
        """While there is no server."""
        return PlaneState(False, self.mapped.is_set(), self._error, self._error_since)

    def hint(self) -> None:
        """Have the servers looked up soon."""
        self._hinted.set()

    def when_mapped(self, action: Callable[[], None]) -> None:
        """Call `action` after the next look-up that begins, whether it fails or not."""
        self._waiting.append(action)
        self.hint()

    def close(self) -> None:
        self._closing.set()
        self._hinted.set()

    def _step(self) -> bool:
        if self._closing.is_set():
            self._finder.close()
            return False
        self._hinted.clear()
        waiting = len(self._waiting)
        try:
            self._look_up()
        finally:
            self.mapped.set()
            for _ in range(waiting):  # one that fails leaves the others for the next step
                self._waiting.popleft()()
        self._pause()
        return True

    def _look_up(self) -> None:
        try:
            known = self._nodes.servers(up=True)
            found = self._finder.find(known, closing=self._closing.is_set)
            if self._nodes.adopt(found):
                self._backoff.reset()
            if found.servers:
                self._error = ""
            elif not self._error:
                self._error = "Sentinel names a server as master that is a replica"
                self._error_since = time.monotonic()
        except (RedisError, ConfigError) as error:
            self._not_found(error)
        self._nodes.sweep()

    def _not_found(self, error: RedisError | ConfigError) -> None:
        if not self._nodes.servers():
            self._error = str(error)
        now = time.monotonic()
        if now - self._said_at > _REPEAT_AFTER_S:
            self._said_at = now
            logger.warning("%s: the servers cannot be looked up: %s", self._deployment.where, error)

    def _pause(self) -> None:
        least_s = self._backoff.next_s()
        if self._closing.wait(least_s):
            return
        servers = self._nodes.servers()
        if not servers or len(self._nodes.servers(up=True)) < len(servers):
            return
        left_s = jittered(_REFRESH_S[self._deployment.topology]) - least_s
        if not self._hinted.wait(max(0.0, left_s)):
            # Without hints, and all servers are up.
            self._backoff.reset()
