"""The data servers of a plane: which has which keys, and their queues, threads and health.

A `DataNode` is one server: the only one, the master of Sentinels, or a shard of a cluster.
`DataNodes` starts and retires them by the map, which `maps` looks up.

A Redis Cluster has 16,384 slots; a key's slot is CRC16 of the key, or of its part between the first
{ and the next } (https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/). The
stripes of a chunk differ in the last bytes of their keys, so they have different slots: many
stripes spread evenly over the shards.

A redirection is followed only to servers that the map names. Otherwise the stripe waits for a new
map: what a single reply says opens no connection, and sends no password anywhere.
"""

from __future__ import annotations

import binascii
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.errors import (
    RedisClusterDown,
    RedisError,
    RedisFull,
    RedisReadOnly,
    RedisRedirect,
    RedisUnavailable,
    RedisWriteRefused,
)
from lmcache_redis.resp.control import Controller
from lmcache_redis.resp.health import Health, Worker, WritePause
from lmcache_redis.resp.jobs import Hop, Jobs, LoopThread, Stop, StripeTask, TaskQueue
from lmcache_redis.resp.maps import SLOTS, MapWatcher, ServerMap
from lmcache_redis.resp.net.connection import Connector
from lmcache_redis.resp.net.stream import Endpoint
from lmcache_redis.resp.options import Deployment, RedisOptions, Topology
from lmcache_redis.resp.removals import RemovalListener, Removals
from lmcache_redis.resp.transfers import Read, Reader, Writer
from lmcache_redis.tiers import PlaneState, WriteOutcome

logger = logging.getLogger(__name__)

# A shard that lost its last slot still answers earlier requests, with redirections.
_GRACE_S = 5.0
# Until a map names the server of a redirection.
_MOST_LOOK_UPS = 5
# More nodes than this are not recommended in a cluster; each costs threads and connections.
_MOST_SERVERS = 1000
# Redirections that a command follows: one is usual, two while a slot is migrating.
MAX_HOPS = 5
NodeT = TypeVar("NodeT")


def next_hop(hop: Hop | None, redirect: RedisRedirect) -> Hop | None:
    """After another redirection; None: there were too many."""
    hops = 1 if hop is None else hop.hops + 1
    return Hop(hops, redirect.asking) if hops <= MAX_HOPS else None


class Routes(Generic[NodeT]):
    """From keys to nodes; immutable. None: no server has the key.

    unplaced: see `ServerMap`.
    """

    __slots__ = ("_by_slot", "_single", "nodes", "ranges", "unplaced")

    def __init__(self, server_map: ServerMap, nodes: Mapping[Endpoint, NodeT]) -> None:
        self.nodes: tuple[NodeT, ...] = tuple(nodes[server] for server in server_map.servers)
        self.ranges = server_map.ranges
        self.unplaced = server_map.unplaced
        self._single = self.nodes[0] if self.nodes and server_map.ranges is None else None
        self._by_slot: list[NodeT | None] | None = None
        if server_map.ranges is not None:
            self._by_slot = [None] * SLOTS
            for first, last, number in server_map.ranges:
                self._by_slot[first : last + 1] = [self.nodes[number]] * (last + 1 - first)

    @property
    def is_cluster(self) -> bool:
        """Whether the keys of a command must share a slot."""
        return self._by_slot is not None

    def node_of(self, key: bytes) -> NodeT | None:
        if self._by_slot is None:
            return self._single
        return self._by_slot[slot_of(key)]

    def nodes_of(self, chunk_key: bytes, stripe_count: int) -> tuple[NodeT | None, ...]:
        if self._by_slot is None:
            return (self._single,) * stripe_count
        keys = [stripe_key(chunk_key, index) for index in range(stripe_count)]
        return tuple([self.node_of(key) for key in keys])

    def split(self, keys: Sequence[bytes]) -> dict[NodeT | None, list[int]]:
        """The indexes of the keys by the node that has them, in order."""
        if self._by_slot is None:
            return {self._single: list(range(len(keys)))} if keys else {}
        by_node: dict[NodeT | None, list[int]] = defaultdict(list)
        by_slot, crc = self._by_slot, binascii.crc_hqx
        for index, key in enumerate(keys):
            slot = slot_of(key) if b"{" in key else crc(key, 0) % SLOTS
            by_node[by_slot[slot]].append(index)
        return by_node


def slot_of(key: bytes) -> int:
    """The slot of a key, 0 to 16,383."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return binascii.crc_hqx(key, 0) % SLOTS


class DataNode:
    """One server. Queues work whether it is up or not."""

    def __init__(self, endpoint: Endpoint, nodes: DataNodes) -> None:
        options = self.options = nodes.options
        self.jobs = nodes.jobs
        self._nodes = nodes
        self.connector = Connector(endpoint, options.connect_timeout_s, options.op_timeout_s)
        self.write_state = WritePause()
        self.health = Health(
            self.connector, options, self.write_state, on_down=lambda: nodes.node_is_down(self)
        )
        self.reads: TaskQueue[StripeTask] = TaskQueue()
        self.control = Controller(self)
        readers = _shares(options.get_connections, nodes.shards, options.network_threads)
        writers = _shares(options.set_connections, nodes.shards, options.network_threads)
        self._writes: list[TaskQueue[StripeTask]] = [TaskQueue() for _ in writers]
        self._workers: list[Worker] = [
            self.control,
            *[Reader(f"get-{n}", self, self.reads, count) for n, count in enumerate(readers)],
            *[Writer(f"set-{n}", self, self._writes[n], count) for n, count in enumerate(writers)],
        ]
        self._removals = RemovalListener(self, nodes.removals)

    def put_writes(self, tasks: Sequence[StripeTask], urgent: bool = False) -> None:
        """Queue stripes to store. One thread gets all stripes of a chunk for this server."""
        for number, queue in enumerate(self._writes):
            queue.put(
                [task for task in tasks if hash(task[0].chunk_key) % len(self._writes) == number],
                urgent,
            )

    def redirect(self, task: StripeTask, redirect: RedisRedirect) -> bool:
        job, index, hop = task
        hop = next_hop(hop, redirect)
        if hop is None or not self._nodes.routes.is_cluster:
            return False
        target = self._nodes.follow(self, redirect)
        self._put_redirected((job, index, hop), target, redirect, _MOST_LOOK_UPS)
        return True

    def _put_redirected(
        self, task: StripeTask, target: DataNode | None, redirect: RedisRedirect, look_ups: int
    ) -> None:
        """Queue a stripe at another node; if the map lacks that, after one of the next look-ups."""
        job = task[0]
        if target is not None:
            if target not in job.nodes:
                job.nodes = (*job.nodes, target)
            put = target.reads.put if isinstance(job, Read) else target.put_writes
            put((task,), urgent=True)
        elif look_ups and job.outcome is None:
            # Other nodes may not know it yet.
            self._nodes.watcher.when_mapped(
                lambda: self._put_redirected(
                    task, self._nodes.target_of(self, redirect), redirect, look_ups - 1
                )
            )
        else:
            self.jobs.stop((job,), Stop.UNAVAILABLE)

    def refuses_writes(self, error: RedisError) -> WriteOutcome:
        self.health.note(error)
        refusal = WriteOutcome.REJECTED
        if isinstance(error, RedisFull):
            refusal = WriteOutcome.FULL
        elif isinstance(error, RedisClusterDown):
            refusal = WriteOutcome.UNAVAILABLE
            self.map_is_old()
        elif not isinstance(error, RedisWriteRefused):
            # About this write alone, as far as one can tell.
            return refusal
        self.write_state.pause(refusal)
        if isinstance(error, RedisReadOnly):
            self.map_is_old()
            if self._nodes.deployment.topology is Topology.STANDALONE:
                # Its name, or what is between, may lead to another server by now.
                self.write_state.renew_connections()
        return refusal

    def map_is_old(self) -> None:
        self._nodes.watcher.hint()

    @property
    def is_up(self) -> bool:
        return self.health.is_up

    @property
    def counts(self) -> tuple[int, int, int]:
        """Since the start: connections made, connections lost, errors."""
        lost = sum(worker.connections_lost for worker in self._workers)
        return self.connector.connects, lost, self.health.notes.count

    @property
    def _threads(self) -> list[LoopThread]:
        workers = [worker.thread for worker in self._workers]
        return [self.health.thread, *workers, self._removals.thread]

    def start(self) -> None:
        """Start all threads or none. Raises RuntimeError if the process may not have them."""
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.stop()
            self.join()
            raise

    def stop(self) -> None:
        """Drop what is queued and end the threads."""
        queues: list[TaskQueue[Any]] = [self.reads, *self._writes, self.control.queue]
        for queue in queues:
            queue.close()
        self.health.close()
        self._removals.close()
        self.connector.abort()

    def join(self) -> int:
        """Wait for the threads; return how many did not end in time."""
        timeout_s = self.options.connect_timeout_s + self.options.op_timeout_s
        return [thread.ends_within(timeout_s) for thread in self._threads].count(False)


def _shares(connections: int, shards: int, threads: int) -> list[int]:
    """How many connections to one of the shards each thread has: at least one."""
    connections = -(-connections // shards)
    threads = min(threads, connections)
    return [(connections + number) // threads for number in range(threads)]


class DataNodes:
    """All nodes. Thread-safe. routes: by the current map."""

    def __init__(self, deployment: Deployment, options: RedisOptions, jobs: Jobs) -> None:
        self.deployment = deployment
        self.options = options
        self.jobs = jobs
        self.shards = 1
        self.routes: Routes[DataNode] = Routes(ServerMap(()), {})
        self._lock = threading.RLock()
        self._nodes: dict[Endpoint, DataNode] = {}
        self._retiring: dict[DataNode, float] = {}  # until when they may be needed
        self._retired_counts = (0, 0, 0)
        self._closing = False
        self.removals = Removals(options.key_prefix)
        self.watcher = MapWatcher(deployment, options.connect_timeout_s, self)

    def start(self) -> None:
        """Raises RuntimeError if the process may not have the threads."""
        if self.deployment.topology is Topology.STANDALONE:
            self.adopt(ServerMap((self.deployment.server,)))
            self.watcher.mapped.set()
        else:
            self.watcher.thread.start()

    def close(self, timeout_s: float) -> int:
        """End all threads; return how many did not end in time."""
        with self._lock:
            self._closing = True
            nodes = self._all()
        self.watcher.close()
        for node in nodes:
            node.stop()
        left = sum(node.join() for node in nodes)
        # A look-up in flight ends by its time-out.
        return left + (not self.watcher.thread.ends_within(timeout_s))

    def follow(self, node: DataNode, redirect: RedisRedirect) -> DataNode | None:
        """The node that `node` redirects to; None if the map, which is looked up, lacks it."""
        target = self.target_of(node, redirect)
        if self.routes.is_cluster and (target is None or not redirect.asking):
            self.watcher.hint()
        return target

    def target_of(self, node: DataNode, redirect: RedisRedirect) -> DataNode | None:
        if not self.routes.is_cluster:
            return None
        host = redirect.host or node.connector.endpoint.host
        return self._nodes.get(self.deployment.at(host, redirect.port))

    def node_is_down(self, node: DataNode) -> None:
        """Called on any thread when the node has gone down."""
        self.jobs.stop_all(Stop.UNAVAILABLE, node=node)
        self.watcher.hint()

    def wait_probed(self, timeout_s: float) -> PlaneState:
        """Wait until every server was probed, at most `timeout_s`; return the state then."""
        deadline = time.monotonic() + timeout_s
        self.watcher.mapped.wait(timeout_s)
        for node in self.routes.nodes:
            node.health.wait_probed(max(0.0, deadline - time.monotonic()))
        return self.state

    @property
    def state(self) -> PlaneState:
        """Up or down, and why. A cluster is up while any of its shards is."""
        nodes = self.routes.nodes
        if not nodes:
            return self.watcher.state
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
        probed, since = [state.probed for state in states], [state.since for state in states]
        return PlaneState(len(down) < len(states), all(probed), reason, max(since))

    @property
    def open_streams(self) -> int:
        return sum(node.connector.open_streams for node in self._all())

    @property
    def counts(self) -> tuple[int, int, int]:
        """The sums of the nodes' counts, retired nodes included."""
        return _sums(self._retired_counts, *[node.counts for node in self._all()])

    def _all(self) -> list[DataNode]:
        with self._lock:
            return [*self._nodes.values(), *self._retiring]

    # Called by the watcher's thread.

    def servers(self, up: bool = False) -> list[Endpoint]:
        return [node.connector.endpoint for node in self.routes.nodes if node.is_up or not up]

    def adopt(self, found: ServerMap) -> bool:
        """Use the servers of a map from now on; return whether they are others than before.

        Raises RuntimeError if the process may not have the threads of a new server, and
        RedisUnavailable if there are too many servers; then the last map stays.
        """
        if len(found.servers) > _MOST_SERVERS:
            where, count = self.deployment.where, len(found.servers)
            raise RedisUnavailable(f"{where} names {count} servers, more than {_MOST_SERVERS}")
        self.shards = max(1, len(found.servers))
        before = self.routes
        for server in found.servers:
            if server in self._nodes:
                continue
            node = DataNode(server, self)
            with self._lock:
                if self._closing:
                    return False
                node.start()
                self._nodes[server] = node
        with self._lock:
            if self._closing:
                return False
            self.routes = Routes(found, self._nodes)
            until = time.monotonic() + (_GRACE_S if self.routes.is_cluster else 0.0)
            for server in self._nodes.keys() - set(found.servers):
                self._retiring[self._nodes.pop(server)] = until
        is_new = set(before.nodes) != set(self.routes.nodes)
        if is_new and self.deployment.topology is not Topology.STANDALONE:
            places = ", ".join(server.where for server in found.servers) or "no server"
            logger.info("%s: the data is with %s", self.deployment.where, places)
        return is_new or before.ranges != self.routes.ranges

    def sweep(self) -> None:
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
