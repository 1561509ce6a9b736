"""Questions about keys and removals, to one server or to all shards of a cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from lmcache_redis.keys import KEY_MAGIC, stripe_key
from lmcache_redis.resp.admission import Admission
from lmcache_redis.resp.control import CallJob, ClearJob, EachJob, QueryJob, RemoveJob
from lmcache_redis.resp.fanout import EachKey
from lmcache_redis.resp.jobs import JobRegistry
from lmcache_redis.resp.node import Node
from lmcache_redis.resp.nodes import Nodes
from lmcache_redis.resp.outcomes import CallOutcome, ClearResult, ExistsResult, ScanResult
from lmcache_redis.resp.queues import Timekeeper
from lmcache_redis.resp.scan import count_prefix, find_present
from lmcache_redis.resp.stats import Counts

# Remains are removed soon or not at all: later, somebody may have stored the chunk again.
_REMOVE_WITHIN_S = 10.0
_MAX_PENDING_REMOVALS = 1024


class Calls:
    """What `RedisPlane` says of these methods. Of its parts."""

    def __init__(
        self,
        nodes: Nodes,
        registry: JobRegistry,
        admission: Admission,
        timekeeper: Timekeeper,
        counts: Counts,
    ) -> None:
        self._nodes = nodes
        self._registry = registry
        self._admission = admission
        self._timekeeper = timekeeper
        self._counts = counts

    def remove(self, chunk_key: bytes, stripe_count: int) -> None:
        if not self._admission.started or self._admission.closing or not self._nodes.state.up:
            return
        routes = self._nodes.routes
        kind = EachJob if routes.is_cluster else RemoveJob
        if self._registry.count(kind) >= _MAX_PENDING_REMOVALS:
            return
        deadline = time.monotonic() + _REMOVE_WITHIN_S
        if routes.is_cluster:
            keys = [stripe_key(chunk_key, index) for index in range(stripe_count)]
            self._each_key(
                b"UNLINK", keys, deadline, lambda _, n: self._counts.removed(sum(n)), urgent=False
            )
            return
        job = RemoveJob(chunk_key, stripe_count, deadline, self._counts.removed, self._registry)
        self._submit(job, routes.node_of(chunk_key))

    def scan(
        self, keys: Sequence[bytes], deadline: float, done: Callable[[ScanResult], None]
    ) -> None:
        def answer(outcome: CallOutcome, length: int | None) -> None:
            self._counts.called(outcome, len(keys))
            done(ScanResult(outcome, length or 0))

        self._admission.check_usable()
        routes = self._nodes.routes
        if routes.is_cluster:
            self._each_key(
                b"EXISTS",
                keys,
                deadline,
                lambda outcome, counts: answer(outcome, [*counts, 0].index(0)),
                urgent=True,
            )
            return
        job = QueryJob(count_prefix, keys, deadline, answer, self._registry)
        self._submit(job, routes.node_of(b""))

    def exists(
        self, keys: Sequence[bytes], deadline: float, done: Callable[[ExistsResult], None]
    ) -> None:
        def answer(outcome: CallOutcome, present: list[bool] | None) -> None:
            self._counts.called(outcome, len(keys))
            done(ExistsResult(outcome, present or ()))

        self._admission.check_usable()
        routes = self._nodes.routes
        if routes.is_cluster:
            self._each_key(
                b"EXISTS",
                keys,
                deadline,
                lambda outcome, counts: answer(outcome, [count > 0 for count in counts]),
                urgent=True,
            )
            return
        job = QueryJob(find_present, keys, deadline, answer, self._registry)
        self._submit(job, routes.node_of(b""))

    def clear(
        self, key_prefix: bytes, deadline: float, done: Callable[[ClearResult], None]
    ) -> None:
        if KEY_MAGIC not in key_prefix:
            raise ValueError(f"{key_prefix!r} is not the beginning of keys of this package")

        self._admission.check_usable()
        routes = self._nodes.routes
        nodes = routes.nodes or (None,)
        lock = threading.Lock()
        outcomes: list[CallOutcome] = []
        total = 0

        def answer(outcome: CallOutcome, removed: int) -> None:
            nonlocal total
            self._counts.removed(removed)
            with lock:
                outcomes.append(outcome)
                total += removed
                if len(outcomes) < len(nodes):
                    return
            failed = next((each for each in outcomes if each is not CallOutcome.DONE), None)
            self._counts.called(failed or CallOutcome.DONE)
            done(ClearResult(failed or CallOutcome.DONE, total))

        more = {"batch_keys": 1} if routes.is_cluster else {}
        for node in nodes:
            self._submit(ClearJob(key_prefix, deadline, answer, self._registry, **more), node)

    def _submit(self, job: CallJob, node: Node | None) -> None:
        job.nodes = (node,)
        if self._admission.enter((job,)) and node is not None:
            node.call(job)
            self._admission.refuse((job,))

    def _each_key(
        self,
        name: bytes,
        keys: Sequence[bytes],
        deadline: float,
        done: Callable[[CallOutcome, Sequence[int]], None],
        *,
        urgent: bool,
    ) -> None:
        """A command for each key, in a cluster."""
        call = EachKey(
            name,
            keys,
            deadline,
            done,
            self._registry,
            self._submit,
            self._nodes.follow,
            urgent=urgent,
        )
        if not call.start(self._nodes.routes):
            # Nothing to ask, or nobody to be asked.
            outcome = CallOutcome.UNAVAILABLE if keys else CallOutcome.DONE
            self._timekeeper.post(lambda: done(outcome, [0] * len(keys)))
