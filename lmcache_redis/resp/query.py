"""Questions about keys, and removals: to one server, or to all shards of a cluster at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lmcache_redis.errors import FormatError, RedisProtocolError, RedisRedirect
from lmcache_redis.keys import KEY_MAGIC, stripe_key
from lmcache_redis.resp.control import (
    ClearJob,
    GroupJob,
    KeyJob,
    Query,
    RemoveJob,
    count_prefix,
    find_present,
    parse_count,
)
from lmcache_redis.resp.jobs import Jobs
from lmcache_redis.resp.node import Node, Nodes
from lmcache_redis.resp.outcomes import (
    CallOutcome,
    ClearResult,
    DescribeResult,
    ExistsResult,
    RemoveResult,
    ScanResult,
)
from lmcache_redis.resp.topology import Hop, next_hop
from lmcache_redis.resp.wire import Reply, keys_command, pack_command
from lmcache_redis.stripe import HEADER_BYTES, StripeHeader, describe_header

# Partial writes are removed soon or not at all: later, the chunk may have been stored again.
_REMOVE_WITHIN_S = 10.0
_MAX_PENDING_REMOVALS = 1024
# A failure of a part counts for the whole only where no part was done, the gravest first.
_FAILURES = (CallOutcome.CANCELLED, CallOutcome.UNAVAILABLE, CallOutcome.TIMED_OUT)


class Queries:
    """Implements `RedisPlane`'s calls about keys."""

    def __init__(self, nodes: Nodes, jobs: Jobs) -> None:
        self._nodes = nodes
        self._jobs = jobs

    def scan(
        self, keys: Sequence[bytes], deadline: float, done: Callable[[ScanResult], None]
    ) -> None:
        def answer(outcome: CallOutcome, length: int | None) -> None:
            self._called(outcome, len(keys))
            done(ScanResult(outcome, length or 0))

        self._jobs.check_usable()
        if self._nodes.routes.is_cluster:
            self._exists_each(keys, deadline, lambda outcome, n: answer(outcome, [*n, 0].index(0)))
        else:
            self._submit(GroupJob(count_prefix, keys, deadline, answer), self._any_node)

    def exists(
        self, keys: Sequence[bytes], deadline: float, done: Callable[[ExistsResult], None]
    ) -> None:
        def answer(outcome: CallOutcome, counts: Sequence[int] | None) -> None:
            self._called(outcome, len(keys))
            present = [count > 0 for count in counts or ()]
            done(ExistsResult(outcome, present if present and outcome is CallOutcome.DONE else ()))

        self._jobs.check_usable()
        if self._nodes.routes.is_cluster:
            self._exists_each(keys, deadline, answer)
        else:
            self._submit(GroupJob(find_present, keys, deadline, answer), self._any_node)

    def describe(
        self, keys: Sequence[bytes], deadline: float, done: Callable[[DescribeResult], None]
    ) -> None:
        def answer(outcome: CallOutcome, headers: Sequence[StripeHeader | None]) -> None:
            self._called(outcome)
            done(DescribeResult(outcome, headers if outcome is CallOutcome.DONE else ()))

        self._jobs.check_usable()
        job_of = partial(KeyJob, header_command, parse_header, is_urgent=True)
        self._ask_each(job_of, keys, deadline, None, answer)

    def remove(
        self,
        chunk_key: bytes,
        stripe_count: int,
        deadline: float,
        done: Callable[[RemoveResult], None],
    ) -> None:
        def answer(outcome: CallOutcome, removed: Sequence[int]) -> None:
            self._called(outcome, removed=sum(removed))
            done(RemoveResult(outcome, sum(removed)))

        self._jobs.check_usable()
        self._unlink(chunk_key, stripe_count, deadline, answer)

    def remove_soon(self, chunk_key: bytes, stripe_count: int) -> None:
        """Remove a chunk in the background, where that can be tried at all.

        A chunk that is being stored is left alone: the store replaces all of it.
        """
        jobs = self._jobs
        if not jobs.started or jobs.closing or not self._nodes.state.up:
            return
        if jobs.count(RemoveJob) >= _MAX_PENDING_REMOVALS:
            return

        def answer(outcome: CallOutcome, removed: Sequence[int]) -> None:
            self._called(None, removed=sum(removed))

        deadline = time.monotonic() + _REMOVE_WITHIN_S
        self._unlink(chunk_key, stripe_count, deadline, answer, unless_stored=True)

    def clear(
        self, key_prefix: bytes, deadline: float, done: Callable[[ClearResult], None]
    ) -> None:
        if KEY_MAGIC not in key_prefix:
            raise ValueError(f"{key_prefix!r} is not the beginning of keys of this package")

        self._jobs.check_usable()
        nodes = self._nodes.routes.nodes or (None,)
        lock = threading.Lock()
        outcomes: list[CallOutcome] = []
        total = 0

        def answer(outcome: CallOutcome, removed: int) -> None:
            nonlocal total
            self._called(None, removed=removed)
            with lock:
                outcomes.append(outcome)
                total += removed
                if len(outcomes) < len(nodes):
                    return
            failed = next((each for each in outcomes if each is not CallOutcome.DONE), None)
            self._called(failed or CallOutcome.DONE)
            done(ClearResult(failed or CallOutcome.DONE, total))

        more = {"batch_keys": 1} if self._nodes.routes.is_cluster else {}
        for node in nodes:
            self._submit(ClearJob(key_prefix, deadline, answer, **more), node)

    # ---------------------------------------------------------------- inside

    @property
    def _any_node(self) -> Node | None:
        return self._nodes.routes.node_of(b"")

    def _exists_each(
        self,
        keys: Sequence[bytes],
        deadline: float,
        done: Callable[[CallOutcome, Sequence[int]], None],
    ) -> None:
        job_of = partial(KeyJob, exists_command, parse_count, is_urgent=True)
        self._ask_each(job_of, keys, deadline, 0, done)

    def _unlink(
        self,
        chunk_key: bytes,
        stripe_count: int,
        deadline: float,
        done: Callable[[CallOutcome, Sequence[int]], None],
        unless_stored: bool = False,
    ) -> None:
        removals = self._jobs.removals
        if not removals.begin(chunk_key, unless_stored):
            return

        def answer(outcome: CallOutcome, removed: Sequence[int]) -> None:
            removals.end(chunk_key)
            done(outcome, removed)

        keys = [stripe_key(chunk_key, index) for index in range(stripe_count)]
        job_of = partial(RemoveJob, unlink_command, parse_count, is_urgent=False)
        self._ask_each(job_of, keys, deadline, 0, answer)

    def _ask_each(
        self,
        job_of: Callable[..., KeyJob],
        keys: Sequence[bytes],
        deadline: float,
        missing: Any,
        done: Callable[[CallOutcome, Sequence[Any]], None],
    ) -> None:
        """A command for each key."""
        call = _EachKey(self._nodes, self._submit, job_of, keys, deadline, missing, done)
        if not call.start():
            # Nothing to ask, or no server to be asked.
            outcome = CallOutcome.UNAVAILABLE if keys else CallOutcome.DONE
            self._jobs.timekeeper.post(lambda: done(outcome, [missing] * len(keys)))

    def _submit(self, query: Query, node: Node | None) -> None:
        query.nodes = (node,)
        if self._jobs.enter((query,)) and node is not None:
            node.ask(query)
            self._jobs.refuse((query,))

    def _called(self, outcome: CallOutcome | None, scanned: int = 0, removed: int = 0) -> None:
        jobs = self._jobs
        with jobs.lock:
            if outcome is not None:
                jobs.calls[outcome] += 1
            jobs.keys_scanned += scanned
            jobs.keys_removed += removed


class _EachKey:
    """A command for each of many keys: asked at once, redirections followed, answers put together.

    submit: queues a job at a node. done: called once with the outcome and a result for each key. A
    shard that does not answer costs only its own keys: they have the result `missing`, and the call
    is DONE if any shard answered.
    """

    def __init__(
        self,
        nodes: Nodes,
        submit: Callable[[Query, Node], None],
        job_of: Callable[..., KeyJob],
        keys: Sequence[bytes],
        deadline: float,
        missing: Any,
        done: Callable[[CallOutcome, Sequence[Any]], None],
    ) -> None:
        self._nodes = nodes
        self._submit = submit
        self._job_of = job_of
        self._keys = keys
        self._deadline = deadline
        self._done = done
        self._results = [missing] * len(keys)
        self._outcomes: set[CallOutcome] = set()
        self._open = 0
        self._lock = threading.Lock()

    def start(self) -> bool:
        """Ask every node for its keys; False if there is none to ask, and nothing was done."""
        routes = self._nodes.routes
        parts = routes.split(range(len(self._keys)), lambda index: self._keys[index])
        parts.pop(None, None)
        self._open = len(parts)
        for node, indexes in parts.items():
            if node is not None:
                self._ask(node, indexes, None)
        return bool(parts)

    def _ask(self, node: Node, indexes: Sequence[int], hop: Hop | None) -> None:
        job = self._job_of(
            [self._keys[index] for index in indexes],
            self._deadline,
            partial(self._answered, node, indexes, hop),
            asking=hop is not None and hop.asking,
        )
        self._submit(job, node)

    def _answered(
        self,
        node: Node,
        indexes: Sequence[int],
        hop: Hop | None,
        outcome: CallOutcome,
        results: Sequence[Any],
    ) -> None:
        elsewhere: dict[tuple[Node, Hop | None], list[int]] = {}
        for index, result in zip(indexes, results, strict=False):
            if not isinstance(result, RedisRedirect):
                self._results[index] = result
            elif (target := self._nodes.follow(node, hop, result)) is not None:
                elsewhere.setdefault((target, next_hop(hop, result)), []).append(index)
        with self._lock:
            self._outcomes.add(outcome)
            self._open += len(elsewhere) - 1
            finished = self._open == 0
        for (target, next_), moved in elsewhere.items():
            self._ask(target, moved, next_)
        if finished:
            self._done(self._total(), self._results)

    def _total(self) -> CallOutcome:
        if CallOutcome.DONE in self._outcomes and CallOutcome.CANCELLED not in self._outcomes:
            return CallOutcome.DONE
        return next(outcome for outcome in _FAILURES if outcome in self._outcomes)


def exists_command(key: bytes) -> bytes:
    """EXISTS of one key."""
    return keys_command(b"EXISTS", (key,))


def unlink_command(key: bytes) -> bytes:
    """UNLINK of one key."""
    return keys_command(b"UNLINK", (key,))


def header_command(key: bytes) -> bytes:
    """The header of a stripe."""
    return pack_command(b"GETRANGE", key, 0, HEADER_BYTES - 1)


def parse_header(reply: Reply) -> StripeHeader | None:
    """What a GETRANGE found, if it is a header."""
    if not isinstance(reply, bytes):
        raise RedisProtocolError("the reply to a GETRANGE is no string")
    try:
        return describe_header(reply)
    except FormatError:
        return None
