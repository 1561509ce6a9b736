"""The data servers of a plane: which has which keys, and their queues, threads and health.

A `DataNode` is one server: the only one, the master of Sentinels, or a shard of a cluster.
`DataNodes` starts and retires them by the map, which `finder` looks up.

A Redis Cluster has 16,384 slots; a key's slot is CRC16 of the key, or of its part between the first
{ and the next } (https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/). The
stripes of a chunk differ in the last bytes of their keys, so they have different slots: many
stripes spread evenly over the shards.

A redirection is not followed: the key is a miss until the next map says where it is. So what a
single reply says opens no connection, and sends no password anywhere.
"""

from __future__ import annotations

import binascii
import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.errors import RedisRedirect, RedisUnavailable
from lmcache_redis.resp.control import Controller, KeyQuestion, Steps
from lmcache_redis.resp.failures import newest_first
from lmcache_redis.resp.finder import MapWatcher, ServerFinder
from lmcache_redis.resp.health import DataServer
from lmcache_redis.resp.jobs import (
    Jobs,
    LoopThread,
    StripeTask,
    TaskQueue,
    wait_for,
)
from lmcache_redis.resp.maps import SLOTS, ServerMap
from lmcache_redis.resp.net.endpoint import Endpoint
from lmcache_redis.resp.options import Deployment, RedisOptions, Topology
from lmcache_redis.resp.removals import Removals
from lmcache_redis.resp.transfers import Reader, Writer
from lmcache_redis.tiers import CallOutcome, Operation, PlaneState

logger = logging.getLogger(__name__)

# The outcome of a call is the first of these that a server has: DONE if any answered.
_OF_ANY = (
    CallOutcome.CANCELLED,
    CallOutcome.DONE,
    CallOutcome.UNAVAILABLE,
    CallOutcome.TIMED_OUT,
)
NodeT = TypeVar("NodeT")
# Of the servers that a map names and that have never answered, so many are tried at a time: a map
# may name what does not exist.
_MOST_UNPROVEN = 32


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


class _WorkerQueue(TaskQueue[StripeTask]):
    """Stripes for threads that start with the first of them.

    Their server is down for a moment if the process may not have them.
    """

    __slots__ = ("_server", "workers")

    def __init__(self, server: DataServer) -> None:
        super().__init__()
        self.workers: list[LoopThread] = []
        self._server = server

    def put(self, tasks: Iterable[StripeTask], urgent: bool = False) -> None:
        super().put(tasks, urgent)
        if len(self) and not all(thread.ident for thread in self.workers):
            try:
                self.start()
            except RuntimeError as error:
                at = f"Redis at {self._server.connector.endpoint.where} cannot be used"
                failure = RedisUnavailable(f"{at}: {error}")
                down = partial(self._server.health.down, failure, time.monotonic())
                # Not here: callers of the plane are not called back on their threads.
                with contextlib.suppress(RuntimeError):
                    self._server.jobs.post(down)

    def start(self) -> None:
        """Raises RuntimeError."""
        with self._changed:
            for thread in self.workers:
                if thread.ident is None and not self.closed:
                    thread.start()


class DataNode(DataServer):
    """One server. Queues work whether it is up or not."""

    def __init__(self, endpoint: Endpoint, nodes: DataNodes, shards: int) -> None:
        options = nodes.options
        super().__init__(endpoint, options, nodes.jobs, nodes.look_up)
        self.came_up = nodes.start_more
        self.reads = _WorkerQueue(self)
        self.control = Controller(self)
        readers = _shares(options.get_connections, shards, options.network_threads)
        writers = _shares(options.set_connections, shards, options.network_threads)
        self._writes = [_WorkerQueue(self) for _ in writers]
        for number, count in enumerate(readers):
            self.reads.workers.append(Reader(f"get-{number}", self, self.reads, count).thread)
        for number, (queue, count) in enumerate(zip(self._writes, writers, strict=True)):
            queue.workers.append(Writer(f"set-{number}", self, queue, count).thread)

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
    def is_started(self) -> bool:
        return self.control.thread.ident is not None

    def start(self, at_once: bool) -> None:
        """Start the control thread; the others start with their first tasks, or at once.

        Starts all or none. Raises RuntimeError if the process may not have them.
        """
        self.control.thread.start()
        try:
            for queue in (self.reads, *self._writes) if at_once else ():
                queue.start()
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
        threads = [self.control.thread]
        for queue in (self.reads, *self._writes):
            threads += queue.workers
        return [thread.ends_within(timeout_s) for thread in threads].count(False)


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
        self.routes: Routes[DataNode] = Routes(ServerMap(()), {})
        self._lock = threading.Lock()
        self._nodes: dict[Endpoint, DataNode] = {}
        self._closing = False
        self.removals = Removals(options.key_prefix, lambda: self.routes.nodes)
        self.watcher = MapWatcher(
            ServerFinder(deployment, options.connect_timeout_s), self.adopt, self.down
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
        is_probed = all(state.probed for state in states)
        errors = newest_first(error for state in states for error in state.errors)
        return PlaneState(len(down) < len(states), is_probed, reason, errors)

    def down(self) -> list[Endpoint] | None:
        """The servers of the map that have been probed and are down; None without a map."""
        nodes = self.routes.nodes
        if not nodes:
            return None
        states = [(node.connector.endpoint, node.health.state) for node in nodes]
        return [endpoint for endpoint, state in states if state.probed and not state.up]

    def ask_for_each(
        self,
        make_steps: Callable[..., Steps[Sequence[Any]]],
        deadline: float,
        missing: Any,
        keys: Sequence[bytes],
        done: Callable[[CallOutcome, Sequence[Any]], None],
        is_urgent: bool = True,
    ) -> None:
        """Ask each node for its keys.

        make_steps: makes the steps for some keys (`ask_each`). done: called with a result for each
        key, `missing` for keys without one. DONE if any node answered.
        """
        by_node = self.routes.split(keys)

        def answered(outcomes: Sequence[CallOutcome], found: Mapping[DataNode, Any]) -> None:
            results: list[Any] = [missing] * len(keys)
            for node, some in found.items():
                for index, result in zip(by_node[node], some, strict=True):
                    if isinstance(result, RedisRedirect):
                        node.refused(result, Operation.ASK)
                    else:
                        results[index] = result
            done(next(each for each in _OF_ANY if each in outcomes), results)

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

        Called again with the same map, it starts more of its servers. Raises RuntimeError if the
        process may not have the threads of a new server; then the last map stays.
        """
        before = self.routes
        with self._lock:
            if self._closing:
                return False
            for server in found.servers:
                if server not in self._nodes:
                    self._nodes[server] = DataNode(server, self, len(found.servers))
            self._start_some(found.servers)
            if found != before.map:
                self.routes = Routes(found, self._nodes)
            retired = [self._nodes[server] for server in self._nodes.keys() - set(found.servers)]
        for node in retired:
            self._retire(node)
        is_new = set(before.nodes) != set(self.routes.nodes)
        if is_new and self.deployment.topology is not Topology.STANDALONE:
            places = ", ".join(server.where for server in found.servers)
            logger.info("%s: the data is with %s", self.deployment.url, places)
        return is_new or before.map.ranges != found.ranges

    def start_more(self) -> None:
        """A server has answered for the first time."""
        with self._lock:
            if not self._closing:
                # Without room for threads, when the map is looked up next.
                with contextlib.suppress(RuntimeError):
                    self._start_some(self.routes.map.servers)

    def _start_some(self, servers: Iterable[Endpoint]) -> None:
        """Start servers, under the lock; the others when some of these have answered."""
        at_once = self.deployment.topology is Topology.STANDALONE
        unproven = [each for each in servers if not self._nodes[each].health.has_answered]
        started = sum(self._nodes[each].is_started for each in unproven)
        for server in unproven:
            if not self._nodes[server].is_started and started < _MOST_UNPROVEN:
                self._nodes[server].start(at_once)
                started += 1

    def _retire(self, node: DataNode) -> None:
        """End a server that the map does not name any more. What it was asked is not known."""
        node.stop()
        self.jobs.stop_all(CallOutcome.UNAVAILABLE, node=node)
        if left := node.join():
            logger.warning("%d threads of a retired server did not end", left)
        with self._lock:
            del self._nodes[node.connector.endpoint]
