"""One call over many servers: asked at once, redirections followed, answers put together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from lmcache_redis.errors import RedisRedirect
from lmcache_redis.resp.control import EachJob
from lmcache_redis.resp.jobs import JobRegistry
from lmcache_redis.resp.node import Node
from lmcache_redis.resp.outcomes import CallOutcome
from lmcache_redis.resp.routes import MAX_HOPS, Routes

# A failure of a part counts for the whole only where no part was done, the gravest first.
_FAILURES = (CallOutcome.CANCELLED, CallOutcome.UNAVAILABLE, CallOutcome.TIMED_OUT)


class EachKey:
    """EXISTS or UNLINK of many keys in a cluster.

    enter: submits a job to a node. follow: the node that a redirection names. done: called once
    with the outcome and a count for each key. A shard that does not answer costs only its own
    keys: they count 0, and the call is DONE if any shard answered.
    """

    def __init__(
        self,
        name: bytes,
        keys: Sequence[bytes],
        deadline: float,
        done: Callable[[CallOutcome, Sequence[int]], None],
        registry: JobRegistry,
        enter: Callable[[EachJob, Node], None],
        follow: Callable[[Node, RedisRedirect], Node],
        *,
        urgent: bool,
    ) -> None:
        self._name = name
        self._keys = keys
        self._deadline = deadline
        self._done = done
        self._registry = registry
        self._enter = enter
        self._follow = follow
        self._urgent = urgent
        self._counts = [0] * len(keys)
        self._outcomes: set[CallOutcome] = set()
        self._open = 0
        self._lock = threading.Lock()

    def start(self, routes: Routes[Node]) -> bool:
        """Ask every node for its keys; False if there is none to ask, and nothing was done."""
        parts = routes.split(range(len(self._keys)), lambda index: self._keys[index])
        parts.pop(None, None)
        self._open = len(parts)
        for node, indexes in parts.items():
            if node is not None:
                self._ask(node, indexes, hops=0, asking=False)
        return bool(parts)

    def _ask(self, node: Node, indexes: Sequence[int], hops: int, asking: bool) -> None:
        job = EachJob(
            self._name,
            [self._keys[index] for index in indexes],
            self._deadline,
            partial(self._answered, node, indexes, hops),
            self._registry,
            urgent=self._urgent,
            asking=asking,
        )
        self._enter(job, node)

    def _answered(
        self,
        node: Node,
        indexes: Sequence[int],
        hops: int,
        outcome: CallOutcome,
        results: Sequence[int | RedisRedirect],
    ) -> None:
        elsewhere: dict[tuple[Node, bool], list[int]] = {}
        for index, result in zip(indexes, results, strict=False):
            if not isinstance(result, RedisRedirect):
                self._counts[index] = result
            elif hops < MAX_HOPS:
                target = (self._follow(node, result), result.asking)
                elsewhere.setdefault(target, []).append(index)
        with self._lock:
            self._outcomes.add(outcome)
            self._open += len(elsewhere) - 1
            finished = self._open == 0
        for (target_node, asking), moved in elsewhere.items():
            self._ask(target_node, moved, hops + 1, asking)
        if finished:
            self._done(self._total(), self._counts)

    def _total(self) -> CallOutcome:
        if CallOutcome.DONE in self._outcomes and CallOutcome.CANCELLED not in self._outcomes:
            return CallOutcome.DONE
        return next(outcome for outcome in _FAILURES if outcome in self._outcomes)
