# SPDX-License-Identifier: Apache-2.0
"""The data servers of a plane: which has which keys, and their queues, threads and health.

A `DataNode` is one server: the only one, the master of Sentinels, or a shard of a cluster.
`DataNodes` starts and retires them by the map, which `finder` looks up.

What a server redirects (`routes` says where to) is tried once more, within its deadline: at once,
or when a map has come that names the other server. What a single reply says opens no connection,
and sends no password anywhere. A write that was redirected was not made: it keeps its store id, and
its stripe 0 is still the last.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from lmcache_redis.errors import RedisError, RedisRedirect, RedisUnavailable
from lmcache_redis.resp.asking import KeyCall
from lmcache_redis.resp.control import Controller, KeyQuestion, Steps
from lmcache_redis.resp.failures import newest_first
from lmcache_redis.resp.finder import MapWatcher, ServerFinder
from lmcache_redis.resp.following import follow
from lmcache_redis.resp.health import DataServer
from lmcache_redis.resp.jobs import (
    Job,
    Jobs,
    LoopThread,
    StripeTask,
    TaskQueue,
    wait_for,
)
from lmcache_redis.resp.lanes import BulkWorker
from lmcache_redis.resp.maps import ServerMap
from lmcache_redis.resp.net.advice import BY_CODE
from lmcache_redis.resp.net.endpoint import Endpoint
from lmcache_redis.resp.options import Deployment, RedisOptions, Topology
from lmcache_redis.resp.removals import Removals
from lmcache_redis.resp.routes import Lead, Redirected, Routes, parse_redirect, slot_of
from lmcache_redis.resp.transfers import Gets, Sets
from lmcache_redis.tiers import CallOutcome, Operation, PlaneState

logger = logging.getLogger(__name__)


# How many of the servers that a map names, and that have never answered, are tried at a time: a map
# may name servers that do not exist.
_MOST_UNPROVEN = 32
# How often it is looked whether a server that was named no more has answered what it was asked.
_LOOK_EVERY_S = 0.02


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
        self._nodes = nodes
        self.control = Controller(self)
        readers = _shares(options.connections, shards, options.network_threads)
        writers = _shares(options.connections, shards, options.network_threads)
        self._writes = [_WorkerQueue(self) for _ in writers]
        for number, count in enumerate(readers):
            loads = BulkWorker(f"get-{number}", self, self.reads, count, Gets(self))
            self.reads.workers.append(loads.thread)
        for number, (queue, count) in enumerate(zip(self._writes, writers, strict=True)):
            stores = BulkWorker(f"set-{number}", self, queue, count, Sets(self))
            queue.workers.append(stores.thread)

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

    def redirected(self, task: StripeTask, error: RedisRedirect) -> bool:
        return follow(self._nodes, self, task, error)

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


class _MapWait(Job[CallOutcome]):
    """A step that waits for a map. It needs no server."""

    __slots__ = ("_then",)
    good = CallOutcome.DONE

    def __init__(self, deadline: float, then: Callable[[CallOutcome], None]) -> None:
        super().__init__(1, deadline)
        self._then = then

    def answer(self, outcome: CallOutcome) -> None:
        self._then(outcome)


class DataNodes:
    """All nodes. Thread-safe. routes: by the current map."""

    def __init__(self, deployment: Deployment, options: RedisOptions, jobs: Jobs) -> None:
        self.deployment = deployment
        self.options = options
        self.jobs = jobs
        self.routes: Routes[DataNode] = Routes(ServerMap(()), {})
        self._lock = threading.Lock()
        self._nodes: dict[Endpoint, DataNode] = {}
        # Steps that wait for a map, and whether they need not any more.
        self._waits: dict[_MapWait, Callable[[Routes[DataNode]], bool]] = {}
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
        if len(states) == 1 and not self.routes.unserved:
            return states[0]
        down = [state for state in states if not state.up]
        reason = next((state.reason for state in down or states if state.reason), "")
        if down and len(states) > 1:
            reason = f"{len(down)} of {len(states)} shards are down: {reason}"
        elif not reason and (unserved := self.routes.unserved):
            missing = BY_CODE["CLUSTERDOWN"].change
            reason = f"{unserved:,} slots of the cluster have no server: {missing}"
        is_probed = all(state.probed for state in states)
        errors = newest_first(error for state in states for error in state.errors)
        return PlaneState(len(down) < len(states), is_probed, reason, errors)

    def note(self, error: RedisError) -> None:
        """One of the servers refuses something that the others refuse as well, as a rule."""
        for node in self.routes.nodes[:1]:
            node.refused(error, Operation.ASK)

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
        keys: Sequence[bytes],
        done: Callable[[CallOutcome, Sequence[Any]], None],
        is_urgent: bool = True,
        is_write: bool = False,
    ) -> None:
        """Ask each node for its keys, and once more where redirections lead.

        make_steps: makes the steps for some keys (`ask_each`). done: called with a result for each
        key; None: not known. DONE if any is known, or there are no keys.
        """
        how = {"is_urgent": is_urgent, "is_write": is_write}
        KeyCall(self, make_steps, deadline, keys, done, **how).begin()

    def ask(
        self,
        steps: Sequence[tuple[DataNode | None, Steps[Any]]],
        deadline: float,
        done: Callable[[Sequence[CallOutcome], Sequence[Any]], None],
        is_urgent: bool = True,
    ) -> None:
        """Take steps on servers. None, one that is missing, is UNAVAILABLE.

        done: called once, with the outcome of each, and the result of each that is DONE.
        """
        self.jobs.check_usable()
        lock = threading.Lock()
        outcomes = [CallOutcome.UNAVAILABLE] * len(steps)
        found: list[Any] = [None] * len(steps)
        left = len(steps)

        def answered(number: int, outcome: CallOutcome, result: Any) -> None:
            nonlocal left
            with lock:
                outcomes[number], found[number] = outcome, result
                left -= 1
                is_over = not left
            if is_over:
                done(outcomes, found)

        for number, (node, asked) in enumerate(steps):
            told = partial(answered, number)
            question = KeyQuestion(asked, deadline, told, is_urgent=is_urgent)
            question.nodes = (node,)
            if self.jobs.enter((question,)) and node is not None:
                node.control.put(question)
                # The server may have gone down, or the plane been closed, in the meantime.
                self.jobs.refuse((question,))
        if not steps:
            self.jobs.post(partial(done, (CallOutcome.DONE,), ()))

    # ------------------------------------------------------------- redirections

    def redirected(
        self,
        asked: DataNode,
        error: RedisRedirect,
        key: bytes,
        sent: Routes[DataNode],
        is_write: bool,
        is_tried: bool,
    ) -> Redirected[DataNode]:
        """A step about a key that went by the routes `sent` was redirected."""
        if not sent.is_cluster:
            asked.refused(error, Operation.ASK)  # what to write instead of the URL
        redirect, host = parse_redirect(error.reply), asked.connector.endpoint.host
        return Redirected(redirect, slot_of(key), asked, host, sent, is_write, is_tried)

    def follow(self, step: Redirected[DataNode]) -> Lead[DataNode]:
        """Where to try it once more. A slot that has moved is its new node's from now on."""
        with self._lock:
            found = step.lead(self.routes)
            if found.moves_to is not None:
                self.routes = self.routes.with_slot(step.slot, found.moves_to)
        if found.moves_to is not None:
            self._have_looked_up()
        return found

    def wait(
        self,
        deadline: float,
        is_over: Callable[[Routes[DataNode]], bool],
        then: Callable[[CallOutcome], None],
    ) -> None:
        """Have the map looked up until it is over; `then` is called once: DONE, or it was too long.

        At most for an operation's time-out.
        """

        def ended(outcome: CallOutcome) -> None:
            with self._lock:
                self._waits.pop(waiting, None)
            then(outcome)

        waiting = _MapWait(min(deadline, time.monotonic() + self.options.op_timeout_s), ended)
        self.jobs.enter((waiting,))
        with self._lock:
            # A map may have come in the meantime.
            is_at_once = is_over(self.routes)
            # One that has ended already is not taken out any more.
            if not is_at_once and waiting.outcome is None:
                self._waits[waiting] = is_over
        if is_at_once:
            self.jobs.stop((waiting,), CallOutcome.DONE)
        else:
            self._have_looked_up()

    def _end_waits(self) -> None:
        """There is a map."""
        with self._lock:
            over = {each for each, is_over in self._waits.items() if is_over(self.routes)}
            is_waiting = len(self._waits) > len(over)
        self.jobs.stop(over, CallOutcome.DONE)
        if is_waiting:
            self._have_looked_up()

    def _have_looked_up(self) -> None:
        if self.look_up is not None:
            self.look_up()

    # --------------------------------------------------------------------- maps

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
            named = [node for each in found.servers if (node := self._nodes[each]).is_started]
        timeout_s = self.options.op_timeout_s
        if before.nodes:
            # Until it is known to be up, a new server would refuse what it is asked.
            wait_for(partial(self._are_probed, named), time.monotonic() + timeout_s)
        with self._lock:
            if self._closing:
                return False
            # An equal map takes back what redirections have changed: they say so again.
            if found != before.map or self.routes.is_changed:
                self.routes = Routes(found, self._nodes)
            self._start_some(found.servers)  # `start_more` has known the last map
            retired = [self._nodes[server] for server in self._nodes.keys() - set(found.servers)]
        linger_until = time.monotonic() + timeout_s
        self._end_waits()
        for node in retired:
            if found.ranges is not None:
                # It redirects what it was asked before the map came.
                wait_for(partial(self._is_idle, node), linger_until, _LOOK_EVERY_S)
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

    def _are_probed(self, nodes: Sequence[DataNode]) -> bool:
        return self._closing or all(node.health.state.probed for node in nodes)

    def _is_idle(self, node: DataNode) -> bool:
        return self._closing or not (node.is_up and self.jobs.any_needs(node))

    def _retire(self, node: DataNode) -> None:
        """End a server that the map does not name any more. What it was asked is not known."""
        node.stop()
        self.jobs.stop_all(CallOutcome.UNAVAILABLE, node=node)
        if left := node.join():
            logger.warning("%d threads of a retired server did not end", left)
        with self._lock:
            del self._nodes[node.connector.endpoint]
