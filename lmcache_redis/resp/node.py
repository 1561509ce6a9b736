"""The data servers of a plane: their queues, threads and health.

A `Node` is one server: the only one, the master of Sentinels, or a shard of a cluster. `Nodes`
starts and retires them by the map. With Sentinel or Cluster a thread looks the map up at the start,
every few seconds, soon after a hint that it is outdated (a redirection, a server that went down, a
master that is a replica), and more often while a server is down or none is known. A look-up that
fails changes nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from lmcache_redis.errors import ConfigError, RedisError, RedisRedirect
from lmcache_redis.resp.control import Controller
from lmcache_redis.resp.health import Health, Worker
from lmcache_redis.resp.jobs import Jobs, Stop, Task, TaskQueue, joined
from lmcache_redis.resp.net.connection import Connector
from lmcache_redis.resp.net.endpoint import Deployment, Endpoint, Topology
from lmcache_redis.resp.net.topology import Routes, ServerMap, find_servers, next_hop
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.resp.reading import Read, Reader
from lmcache_redis.resp.writing import Writer
from lmcache_redis.tiers import PlaneState

logger = logging.getLogger(__name__)

# A cluster announces changes of its map by redirections; Sentinel does not.
_REFRESH_S = {Topology.SENTINEL: 1.0, Topology.CLUSTER: 15.0}
# Hints come in bursts: a resharding redirects every key of a slot.
_LEAST_PAUSE_S = 0.1
# A shard that lost its last slot still answers earlier requests, with redirections.
_GRACE_S = 5.0
_REPEAT_AFTER_S = 60.0


class Node:
    """One server. Queues work whether it is up or not."""

    def __init__(self, endpoint: Endpoint, nodes: Nodes) -> None:
        options = self.options = nodes.options
        self.endpoint = endpoint
        self.jobs = nodes.jobs
        self._nodes = nodes
        self.connector = Connector(endpoint, options.connect_timeout_s, options.op_timeout_s)
        self.health = Health(self.connector, options, on_down=lambda: nodes.node_is_down(self))
        self.reads: TaskQueue[Task] = TaskQueue()
        self._controller = Controller(self)
        self.ask = self._controller.put
        readers = _shares(options.get_connections, nodes.shards, options.network_threads)
        writers = _shares(options.set_connections, nodes.shards, options.network_threads)
        self._writes: list[TaskQueue[Task]] = [TaskQueue() for _ in writers]
        self._workers: list[Worker] = [
            self._controller,
            *[Reader(f"get-{n}", self, self.reads, count) for n, count in enumerate(readers)],
            *[Writer(f"set-{n}", self, self._writes[n], count) for n, count in enumerate(writers)],
        ]
        self._threads = [self.health.thread, *[worker.thread for worker in self._workers]]

    def put_writes(self, tasks: Sequence[Task], urgent: bool = False) -> None:
        """Queue stripes to store. One thread gets all stripes of a chunk for this server."""
        if len(self._writes) == 1:
            self._writes[0].put(tasks, urgent)
            return
        by_queue: dict[TaskQueue[Task], list[Task]] = {}
        for task in tasks:
            queue = self._writes[hash(task[0].chunk_key) % len(self._writes)]
            by_queue.setdefault(queue, []).append(task)
        for queue, some in by_queue.items():
            queue.put(some, urgent)

    def redirect(self, task: Task, redirect: RedisRedirect) -> bool:
        job, index, hop = task
        hop = next_hop(hop, redirect)
        target = self._nodes.follow(self, redirect) if hop is not None else None
        if target is None:
            return False
        if target not in job.nodes:
            job.nodes = (*job.nodes, target)
        put = target.reads.put if isinstance(job, Read) else target.put_writes
        put(((job, index, hop),), urgent=True)
        return True

    def is_replica(self) -> None:
        self._nodes.map_is_old()

    @property
    def is_up(self) -> bool:
        return self.health.is_up

    @property
    def counts(self) -> tuple[int, int, int]:
        """Since the start: connections made, connections lost, errors."""
        lost = sum(worker.connections_lost for worker in self._workers)
        return self.connector.connects, lost, self.health.errors

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Drop what is queued and end the threads."""
        for queue in (self.reads, *self._writes):
            queue.close()
        self._controller.queue.close()
        self.health.close()
        self.connector.abort()

    def join(self) -> int:
        """Wait for the threads; return how many did not end in time."""
        timeout_s = self.options.connect_timeout_s + self.options.op_timeout_s
        return [joined(thread, timeout_s) for thread in self._threads].count(False)


def _shares(connections: int, shards: int, threads: int) -> list[int]:
    """How many connections to one of the shards each thread has: at least one."""
    connections = -(-connections // shards)
    threads = min(threads, connections)
    return [(connections + number) // threads for number in range(threads)]


class Nodes:
    """All nodes. Thread-safe. routes: by the current map."""

    def __init__(self, deployment: Deployment, options: RedisOptions, jobs: Jobs) -> None:
        self.deployment = deployment
        self.options = options
        self.jobs = jobs
        self.shards = 1
        self.routes: Routes[Node] = Routes(ServerMap(()), {})
        self._lock = threading.RLock()
        self._nodes: dict[Endpoint, Node] = {}
        self._retiring: dict[Node, float] = {}  # until when they may be needed
        self._retired_counts = (0, 0, 0)
        self._map_error = "the servers have not been looked up yet"
        self._map_error_since = time.monotonic()
        self._said_at = 0.0
        self._mapped = threading.Event()
        self._hinted = threading.Event()
        self._closing = threading.Event()
        self._is_watched = deployment.topology is not Topology.STANDALONE
        self._thread = threading.Thread(target=self._watch, name="lmcr-topology", daemon=True)

    # ------------------------------------------------------------- life cycle

    def start(self) -> None:
        if self._is_watched:
            self._thread.start()
        else:
            self._adopt(ServerMap((self.deployment.server,)))

    def close(self, timeout_s: float) -> int:
        """End all threads; return how many did not end in time."""
        with self._lock:
            self._closing.set()
            nodes = self._all()
        self._hinted.set()
        for node in nodes:
            node.stop()
        left = sum(node.join() for node in nodes)
        # A look-up in flight ends by its time-out.
        return left + (not joined(self._thread, timeout_s))

    # ------------------------------------------------------------- any thread

    def follow(self, node: Node, redirect: RedisRedirect) -> Node | None:
        """The node that `node` redirects to, added if it is not on the map; None: not a cluster."""
        if not self.routes.is_cluster:
            return None
        if not redirect.asking:
            self.map_is_old()
        target = self.deployment.at(redirect.host or node.endpoint.host, redirect.port)
        with self._lock:
            return self._nodes.get(target) or self._add(target)

    def node_is_down(self, node: Node) -> None:
        """Called on any thread when the node has gone down."""
        self.jobs.stop_all(Stop.UNAVAILABLE, node=node)
        self.map_is_old()

    def map_is_old(self) -> None:
        """Have the servers looked up soon."""
        self._hinted.set()

    def wait_probed(self, timeout_s: float) -> PlaneState:
        """Wait until every server was probed, at most `timeout_s`; return the state then."""
        deadline = time.monotonic() + timeout_s
        self._mapped.wait(timeout_s)
        for node in self.routes.nodes:
            node.health.wait_probed(max(0.0, deadline - time.monotonic()))
        return self.state

    @property
    def state(self) -> PlaneState:
        """Up or down, and why. A cluster is up while any of its shards is."""
        nodes = self.routes.nodes
        if not nodes:
            return PlaneState(False, self._mapped.is_set(), self._map_error, self._map_error_since)
        states = [node.health.state for node in nodes]
        unplaced = self.routes.unplaced
        if len(states) == 1 and not unplaced:
            return states[0]
        down = [state for state in states if not state.up]
        reason = next((state.reason for state in down or states if state.reason), "")
        if down:
            reason = f"{len(down)} of {len(states)} shards are down: {reason}"
        if unplaced:
            where = ", ".join(f"{first}-{last}" for first, last in unplaced[:4])
            more = " ..." if len(unplaced) > 4 else ""
            reason = f"the cluster does not name the servers of slots {where}{more}. {reason}"
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
    def counts(self) -> tuple[int, int, int]:
        """The sums of the nodes' counts, retired nodes included."""
        return _sums(self._retired_counts, *[node.counts for node in self._all()])

    def _all(self) -> list[Node]:
        with self._lock:
            return [*self._nodes.values(), *self._retiring]

    def _add(self, server: Endpoint) -> Node:
        """Under the lock. The node is not started if the plane is being closed."""
        node = self._nodes[server] = Node(server, self)
        if not self._closing.is_set():
            node.start()
        return node

    # ------------------------------------------------------- watcher's thread

    def _watch(self) -> None:
        while not self._closing.is_set():
            self._hinted.clear()
            try:
                known = [node.endpoint for node in self.routes.nodes if node.is_up]
                timeout_s, closing = self.options.connect_timeout_s, self._closing.is_set
                self._adopt(find_servers(self.deployment, known, timeout_s, closing=closing))
            except (RedisError, ConfigError) as error:
                self._not_found(error)
            except Exception:
                logger.exception("the servers could not be looked up")
            nodes = self.routes.nodes
            pause_s = _REFRESH_S[self.deployment.topology]
            if not nodes or not all(node.is_up for node in nodes):
                pause_s = self.options.probe_interval_s
            if not self._closing.wait(_LEAST_PAUSE_S):
                self._hinted.wait(max(0.0, pause_s - _LEAST_PAUSE_S))

    def _adopt(self, found: ServerMap) -> None:
        with self._lock:
            if self._closing.is_set():
                return
            self.shards = max(1, len(found.servers))
            before = self.routes.nodes
            for server in found.servers:
                if server not in self._nodes:
                    self._add(server)
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
        if self._is_watched and set(before) != set(self.routes.nodes):
            places = ", ".join(server.where for server in found.servers) or "no server"
            logger.info("%s: the data is with %s", self.deployment.where, places)
        self._sweep()
        self._mapped.set()

    def _not_found(self, error: RedisError | ConfigError) -> None:
        self._sweep()
        if not self.routes.nodes:
            self._map_error = str(error)
        now = time.monotonic()
        if now - self._said_at > _REPEAT_AFTER_S:
            self._said_at = now
            logger.warning("%s: the servers cannot be looked up: %s", self.deployment.where, error)
        self._mapped.set()

    def _sweep(self) -> None:
        """End retired nodes that are down, not needed, or past their grace period."""
        now = time.monotonic()
        for node, until in list(self._retiring.items()):
            if node.is_up and now < until and self.jobs.needs(node):
                continue
            node.stop()
            self.jobs.stop_all(Stop.UNAVAILABLE, node=node)
            if left := node.join():
                logger.warning("%d threads of a retired server did not end", left)
            with self._lock:
                self._retired_counts = _sums(self._retired_counts, node.counts)
                del self._retiring[node]


def _sums(*counts: tuple[int, int, int]) -> tuple[int, int, int]:
    connects, lost, errors = map(sum, zip(*counts, strict=True))
    return connects, lost, errors
