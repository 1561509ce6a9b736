"""The data servers of a plane: which has which keys, and their queues, threads and health.

A `DataNode` is one server: the only one, the master of Sentinels, or a shard of a cluster.
`DataNodes` starts and retires them by the map, which `maps` looks up.

A Redis Cluster has 16,384 slots; a key's slot is CRC16 of the key, or of its part between the first
{ and the next } (https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/). The
stripes of a chunk differ in the last bytes of their keys, so they have different slots: many
stripes spread evenly over the shards.

A redirection is not followed: the key is a miss until the next map says where it is. So what a
single reply says opens no connection, and sends no password anywhere.
"""

from __future__ import annotations

import binascii
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.errors import RedisRedirect
from lmcache_redis.resp.control import Controller, KeyQuestion, Steps
from lmcache_redis.resp.health import DataServer
from lmcache_redis.resp.jobs import (
    Jobs,
    LoopThread,
    StripeTask,
    TaskQueue,
    wait_for,
)
from lmcache_redis.resp.maps import SLOTS, MapWatcher, ServerFinder, ServerMap
from lmcache_redis.resp.net.endpoint import Endpoint
from lmcache_redis.resp.options import Deployment, RedisOptions, Topology
from lmcache_redis.resp.removals import Removals
from lmcache_redis.resp.transfers import Reader, Writer
from lmcache_redis.tiers import CallOutcome, PlaneState

logger = logging.getLogger(__name__)

NodeT = TypeVar("NodeT")


class Routes(Generic[NodeT]):
    """From keys to nodes; immutable. None: no server has the key."""

    def __init__(self, server_map: ServerMap, nodes: Mapping[Endpoint, NodeT]) -> None:
        self.nodes: tuple[NodeT, ...] = tuple(nodes[server] for server in server_map.servers)
        self.map = server_map
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
        for index, key in enumerate(keys):
            by_node[self._by_slot[slot_of(key)]].append(index)
        return by_node


def slot_of(key: bytes) -> int:
    """The slot of a key, 0 to 16,383."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return binascii.crc_hqx(key, 0) % SLOTS


class DataNode(DataServer):
    """One server. Queues work whether it is up or not."""

    def __init__(self, endpoint: Endpoint, nodes: DataNodes, shards: int) -> None:
        options = nodes.options
        super().__init__(endpoint, options, nodes.jobs, nodes.look_up)
        self.reads: TaskQueue[StripeTask] = TaskQueue()
        self.control = Controller(self)
        readers = _shares(options.get_connections, shards, options.network_threads)
        writers = _shares(options.set_connections, shards, options.network_threads)
        self._writes: list[TaskQueue[StripeTask]] = [TaskQueue() for _ in writers]
        self._workers = [
            *[Reader(f"get-{n}", self, self.reads, count) for n, count in enumerate(readers)],
            *[Writer(f"set-{n}", self, self._writes[n], count) for n, count in enumerate(writers)],
        ]

    def put_writes(self, tasks: Sequence[StripeTask], urgent: bool = False) -> None:
        """Queue stripes to store. One thread gets all stripes of a chunk for this server."""
        for number, queue in enumerate(self._writes):
            queue.put(
                [task for task in tasks if hash(task[0].chunk_key) % len(self._writes) == number],
                urgent,
            )

    @property
    def is_up(self) -> bool:
        return self.health.is_up

    @property
    def _threads(self) -> list[LoopThread]:
        return [self.control.thread, *[worker.thread for worker in self._workers]]

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
        queues: list[TaskQueue[Any]] = [self.reads, *self._writes, self.questions]
        for queue in queues:
            queue.close()
        self.health.close()
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


def _outcome_of(outcomes: Sequence[CallOutcome], is_known: bool) -> CallOutcome:
    """The outcome of a call, by those of its servers. is_known: something of what was asked is."""
    if CallOutcome.CANCELLED in outcomes:
        return CallOutcome.CANCELLED
    if is_known:
        return CallOutcome.DONE
    only_late = set(outcomes) == {CallOutcome.TIMED_OUT}
    return CallOutcome.TIMED_OUT if only_late else CallOutcome.UNAVAILABLE


class DataNodes:
    """All nodes. Thread-safe. routes: by the current map."""

    def __init__(self, deployment: Deployment, options: RedisOptions, jobs: Jobs) -> None:
        self.deployment = deployment
        self.options = options
        self.jobs = jobs
        self.routes: Routes[DataNode] = Routes(ServerMap(()), {})
        self._lock = threading.Lock()
        self._nodes: dict[Endpoint, DataNode] = {}
        self._closing = False
        self.removals = Removals(options.key_prefix, lambda: self.routes.nodes)
        self.watcher = MapWatcher(
            ServerFinder(deployment, options.connect_timeout_s), self.adopt, self.servers
        )
        is_alone = deployment.topology is Topology.STANDALONE
        self.look_up = None if is_alone else self.watcher.hint

    def start(self) -> None:
        """Raises RuntimeError if the process may not have the threads."""
        if self.deployment.topology is Topology.STANDALONE:
            self.adopt(ServerMap((self.deployment.server,)))
        else:
            self.watcher.thread.start()

    def close(self, timeout_s: float) -> int:
        """End all threads; return how many did not end in time."""
        with self._lock:
            self._closing = True
            nodes = list(self._nodes.values())
        self.watcher.close()
        self.removals.close()
        for node in nodes:
            node.stop()
        left = sum(node.join() for node in nodes)
        # A look-up in flight ends by its time-out.
        threads = (self.watcher.thread, self.removals.thread)
        return left + [thread.ends_within(timeout_s) for thread in threads].count(False)

    def wait_probed(self, timeout_s: float) -> PlaneState:
        """Wait until every server was probed, at most `timeout_s`; return the state then."""
        wait_for(lambda: self.state.probed or self._closing, time.monotonic() + timeout_s)
        return self.state

    @property
    def state(self) -> PlaneState:
        """Up or down, and why. A cluster is up while any of its shards is."""
        nodes = self.routes.nodes
        if not nodes:
            return self.watcher.state
        states = [node.health.state for node in nodes]
        if len(states) == 1:
            return states[0]
        down = [state for state in states if not state.up]
        reason = next((state.reason for state in down or states if state.reason), "")
        if down:
            reason = f"{len(down)} of {len(states)} shards are down: {reason}"
        return PlaneState(len(down) < len(states), all(state.probed for state in states), reason)

    def servers(self) -> dict[Endpoint, bool]:
        """The servers of the map, and whether each is up."""
        return {node.connector.endpoint: node.is_up for node in self.routes.nodes}

    def ask_for_each(
        self,
        make_steps: Callable[..., Steps[Sequence[Any]]],
        deadline: float,
        keys: Sequence[bytes],
        done: Callable[[CallOutcome, Sequence[Any]], None],
        is_urgent: bool = True,
    ) -> None:
        """Ask each node for its keys.

        make_steps: makes the steps for some keys (`ask_each`). done: called with a result for each
        key; None: not known. DONE if any is known, or there are no keys.
        """
        by_node = self.routes.split(keys)

        def answered(outcomes: Sequence[CallOutcome], found: Mapping[DataNode, Any]) -> None:
            results: list[Any] = [None] * len(keys)
            is_known = not keys
            for node, some in found.items():
                for index, result in zip(by_node[node], some, strict=True):
                    if isinstance(result, RedisRedirect):
                        node.map_is_old()
                    else:
                        results[index], is_known = result, True
            done(_outcome_of(outcomes, is_known), results)

        steps = {
            node: make_steps([keys[index] for index in indexes])
            for node, indexes in by_node.items()
        }
        self.ask(steps, deadline, answered, is_urgent)

    def ask(
        self,
        steps: Mapping[DataNode | None, Steps[Any]],
        deadline: float,
        done: Callable[[Sequence[CallOutcome], Mapping[DataNode, Any]], None],
        is_urgent: bool = True,
    ) -> None:
        """Take steps on servers.

        done: called once, with the outcomes, and the result of each server that is DONE; None, one
        that is missing, is UNAVAILABLE.
        """
        self.jobs.check_usable()
        lock = threading.Lock()
        outcomes: list[CallOutcome] = []
        found: dict[Any, Any] = {}

        def answered(node: DataNode | None, outcome: CallOutcome, result: Any) -> None:
            with lock:
                if outcome is CallOutcome.DONE:
                    found[node] = result
                outcomes.append(outcome)
                is_over = len(outcomes) == len(steps)
            if is_over:
                done(outcomes, found)

        for node, asked in steps.items():
            told = partial(answered, node)
            question = KeyQuestion(asked, deadline, told, is_urgent=is_urgent)
            question.nodes = (node,)
            if self.jobs.enter((question,)) and node is not None:
                node.control.put(question)
                # The server may have gone down, or the plane been closed, in the meantime.
                self.jobs.refuse((question,))
        if not steps:
            self.jobs.post(partial(done, (CallOutcome.DONE,), {}))

    def adopt(self, found: ServerMap) -> bool:
        """Use the servers of a map from now on; return whether it is another map.

        Raises RuntimeError if the process may not have the threads of a new server; then the last
        map stays.
        """
        before = self.routes
        with self._lock:
            if self._closing:
                return False
            for server in found.servers:
                if server not in self._nodes:
                    node = DataNode(server, self, len(found.servers))
                    node.start()
                    self._nodes[server] = node
            self.routes = Routes(found, self._nodes)
            retired = [self._nodes[server] for server in self._nodes.keys() - set(found.servers)]
        for node in retired:
            self._retire(node)
        is_new = set(before.nodes) != set(self.routes.nodes)
        if is_new and self.deployment.topology is not Topology.STANDALONE:
            places = ", ".join(server.where for server in found.servers)
            logger.info("%s: the data is with %s", self.deployment.url, places)
        return is_new or before.map.ranges != found.ranges

    def _retire(self, node: DataNode) -> None:
        """End a server that the map does not name any more. What it was asked is not known."""
        node.stop()
        self.jobs.stop_all(CallOutcome.UNAVAILABLE, node=node)
        if left := node.join():
            logger.warning("%d threads of a retired server did not end", left)
        with self._lock:
            del self._nodes[node.connector.endpoint]
