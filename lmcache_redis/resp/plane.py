# SPDX-License-Identifier: Apache-2.0
"""The Redis data plane: chunks between slots and Redis; every call is answered.

Each data server is a `DataNode` with threads and connections of its own: readers, writers, one
controller. A timekeeper without a connection answers jobs that are late or cannot be tried. Callers
submit jobs from any thread without blocking. Each callback is called exactly once, on a thread of
the plane, by the job's deadline (a wait on a socket may overrun it by milliseconds). A callback
should only enqueue.

When a server goes down (`health`), all pending jobs that need it are answered UNAVAILABLE, and so
are new ones until a probe finds it up. docs/internals/data-plane.md lists the faults and their
effects.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from lmcache_redis import native
from lmcache_redis.chunks.frame import STORE_ID_BYTES, ChunkFrame
from lmcache_redis.chunks.keys import KEY_MAGIC
from lmcache_redis.chunks.names import claim_key, is_claim_key, stripe_key
from lmcache_redis.errors import RedisError
from lmcache_redis.resp.adding import add_each
from lmcache_redis.resp.control import (
    Steps,
    ask_each,
    count_prefix,
    expire_commands,
    header_commands,
    keep_each,
    parse_count,
    parse_frame,
    walk_keys,
)
from lmcache_redis.resp.jobs import ChunkJob, Jobs, StripeTask
from lmcache_redis.resp.listing import FoundNames
from lmcache_redis.resp.net.advice import REASONS
from lmcache_redis.resp.net.commands import Command, Use, needed
from lmcache_redis.resp.net.wire import escape_pattern, keys_commands, prefix_pattern
from lmcache_redis.resp.node import DataNode, DataNodes
from lmcache_redis.resp.options import RedisOptions, parse_deployment, uses_of
from lmcache_redis.resp.ranking import MostUsed, RankedKeys, walk_uses
from lmcache_redis.resp.transfers import Read, Write
from lmcache_redis.resp.unlinking import remove_chunk
from lmcache_redis.tiers import (
    CallOutcome,
    ChunkIO,
    Done,
    ExistsResult,
    FramesResult,
    KeysResult,
    NumbersResult,
    PlaneState,
    PlaneStats,
    ReadDone,
    ReadOutcome,
    RemoveResult,
    ScanResult,
    TierPlace,
    WriteDone,
    WriteOutcome,
)

logger = logging.getLogger(__name__)

# About as many are enqueued together: a thread works on these while the next are prepared.
_BATCH_STRIPES = 32
_FIRST_STRIPE = stripe_key(b"", 0)
# A command for each key: whether it exists, and its header; None: no value, or no header.
_EXISTS = partial(ask_each, partial(keys_commands, b"EXISTS"), parse_count)
_FRAMES = partial(ask_each, header_commands, parse_frame)


class RedisPlane:
    """Chunks between slots and Redis: a tier of a cache (`lmcache_redis.tiers`) without an index.

    A chunk exists if its stripe 0 does, which is written last. Of the keys of a shard that does not
    answer, and of those in a slot that moves, nothing is known. A question is DONE if anything is,
    and a removal if everything is.

    Args:
        options: Of the server and its connections.
        uses: What else its user needs rights for.

    Raises:
        ConfigError: The URL names no server.
    """

    name = "Redis"

    def __init__(self, options: RedisOptions, uses: Sequence[Use] = ()) -> None:
        self.options = options
        self._uses = tuple(uses)
        self.deployment = parse_deployment(options)
        self._jobs = Jobs()
        self._nodes = DataNodes(self.deployment, options, self._jobs)
        self.adds_up = False  # whether `add_up` is used
        # What servers evict and expire.
        self.removals = self._nodes.removals

    def start(self) -> None:
        """Start the threads. Returns at once, whether the server is reachable or not.

        Raises RuntimeError if the process may not have the threads.
        """
        if self._jobs.started:
            raise RuntimeError("a Redis plane is started once")
        if (keys := self.options.seal_keys) is not None:
            first, *others = [key_id.hex() for key_id in keys.ids]
            more = ", ".join(others) or "no other"
            logger.info("values are sealed with the key %s, and opened with it and %s", first, more)
        moved = "moved by Python, which is slower" if native.moves is None else ""
        packed = "not packed" if self.options.compress != "off" and not self.options.packs else ""
        if effects := ", and ".join(filter(None, (moved, packed))):
            logger.warning("Stripes are %s: %s", effects, native.why_not or native.why_not_packed)
        self._jobs.timekeeper.start()
        try:
            self._nodes.start()
        except BaseException:
            self._jobs.close(self.options.op_timeout_s)
            raise
        self._jobs.started = True

    def wait_probed(self, timeout_s: float) -> PlaneState:
        """Wait until every server was probed, at most `timeout_s`; return the state then."""
        return self._nodes.wait_probed(timeout_s)

    def close(self, deadline_s: float) -> bool:
        """Finish writes for at most `deadline_s`, cancel everything else, end all threads.

        Every callback has been called on return. Takes a little longer than `deadline_s` if Redis
        does not answer. Returns False if a thread did not end (it is a daemon).
        """
        jobs = self._jobs
        if not jobs.started or jobs.closing or jobs.pid != os.getpid():
            return True  # of a fork, the threads and the connections are the parent's
        jobs.closing = True
        deadline = time.monotonic() + deadline_s
        # Every callback is called on a thread of the plane: the timekeeper stops the jobs.
        jobs.post(lambda: jobs.stop_all(CallOutcome.CANCELLED, but=Write))
        jobs.wait_empty(deadline)
        stop_rest = partial(jobs.stop_all, CallOutcome.CANCELLED)
        jobs.post(stop_rest)
        timeout_s = self.options.connect_timeout_s + self.options.op_timeout_s
        left = self._nodes.close(timeout_s)
        # Jobs that were submitted in the meantime.
        jobs.post(stop_rest)
        left += not jobs.close(timeout_s)
        if left:
            logger.warning("%d threads of the Redis plane did not end", left)
        return not left

    @property
    def state(self) -> PlaneState:
        """Up or down, and why. A cluster is up while any of its shards is."""
        return self._nodes.state

    @property
    def place(self) -> TierPlace:
        return TierPlace(self.deployment.url)

    @property
    def commands(self) -> tuple[Command, ...]:
        """Those that its user needs rights for, by the settings and by who listens now."""
        uses = {Use.ROUTERS: self.removals.is_listening, Use.TENANTS: self.adds_up}
        others = (use for use, is_used in uses.items() if is_used)
        always = uses_of(self.deployment, self.options.ttl_refresh)
        return needed((*always, *self._uses, *others))

    def stats(self) -> PlaneStats:
        """Counts since the start, taken at one moment."""
        jobs = self._jobs
        jobs.check_own()
        with jobs.lock:
            return PlaneStats(
                bytes_in=jobs.moved_bytes[ReadOutcome.LOADED],
                bytes_out=jobs.moved_bytes[WriteOutcome.STORED],
                reads={outcome: jobs.counts[outcome] for outcome in ReadOutcome},
                writes={outcome: jobs.counts[outcome] for outcome in WriteOutcome},
                connects=jobs.counts["connects"],
                connections_lost=jobs.counts["connections_lost"],
                errors=jobs.counts["errors"],
                refused={reason: jobs.counts[f"refused {reason}"] for reason in REASONS},
            )

    def lookup(self, key: bytes) -> None:
        """None for every key: only the servers know."""

    def load_all(self, chunks: Sequence[ChunkIO], done: ReadDone) -> None:
        """Load chunks into their slots, in this order; `done` is called for each.

        Slots belong to the plane until `done`. Many chunks at once are cheaper than one by one.
        """
        self._check(chunks, writable=True)
        for some in _batches(chunks):
            reads = [Read(chunk, done) for chunk in some]
            self._queue(reads, lambda node, tasks: node.reads.put(tasks))

    def store_all(self, chunks: Sequence[ChunkIO], done: WriteDone) -> None:
        """Store chunks from their slots, in this order; `done` is called for each.

        Slots must not change until `done`.
        """
        self._check(chunks, writable=False)

        def put(node: DataNode, tasks: Sequence[StripeTask]) -> None:
            # Stripe 0 follows the others, unless it is the only one.
            node.put_writes([task for task in tasks if task[1] or len(task[0].nodes) == 1])

        for some in _batches(chunks):
            unix_ms = max(0, int(time.time() * 1000))
            writes = [Write(c, done, os.urandom(STORE_ID_BYTES), unix_ms) for c in some]
            self._queue(writes, put)

    def cancel(self, chunk: ChunkIO) -> None:
        """End a read or write early: CANCELLED as soon as no socket uses its slots.

        Does nothing if the chunk was answered or its outcome is known.
        """
        job = self._jobs.transfers.get(chunk)
        if job is not None:
            self._jobs.post(lambda: self._jobs.stop((job,), CallOutcome.CANCELLED))

    # ----------------------------------------------------------- calls about keys

    def scan(self, keys: Sequence[bytes], deadline: float, done: Done[ScanResult]) -> None:
        """How many of the leading chunks exist, up to the first gap."""

        def counted(outcome: CallOutcome, counts: Sequence[int | None]) -> None:
            # The first gap, or the end.
            length = next((n for n, count in enumerate(counts) if not count), len(keys))
            if outcome is CallOutcome.DONE and length < len(keys) and counts[length] is None:
                outcome = CallOutcome.UNAVAILABLE
            done(ScanResult(outcome, length))

        if self._nodes.routes.is_cluster:
            self._nodes.ask_for_each(
                _EXISTS, deadline, [key + _FIRST_STRIPE for key in keys], counted
            )
        else:
            self._nodes.ask(
                [(self._nodes.routes.node_of(b""), count_prefix(keys, _FIRST_STRIPE))],
                deadline,
                lambda outcomes, found: done(ScanResult(outcomes[0], found[0] or 0)),
            )

    def exists(self, keys: Sequence[bytes], deadline: float, done: Done[ExistsResult]) -> None:
        """Which of the chunks exist."""

        def answer(outcome: CallOutcome, counts: Sequence[int | None]) -> None:
            present = [None if count is None else count > 0 for count in counts]
            done(ExistsResult(outcome, present if outcome is CallOutcome.DONE and keys else ()))

        names = [key + _FIRST_STRIPE for key in keys]
        self._nodes.ask_for_each(_EXISTS, deadline, names, answer)

    def refresh(
        self,
        chunks: Sequence[tuple[bytes, int]],
        deadline: float,
        done: Done[ExistsResult],
        claim_s: float = 0.0,
    ) -> None:
        """Keep chunks from eviction and expiry: their keys, and how many stripes each has.

        `present` says of each chunk whether all of its stripes exist: False if one is known to be
        absent. Uses TOUCH, or EXPIRE if a load restarts the TTL; EXISTS if that is refused. After
        scans. Claims go out in the same write, before it, so that who gets one after another writer
        sees its chunk. They are keys of their own, which expire.
        """
        prefix = self.options.key_prefix
        claims = [claim_key(key, prefix) for key, _ in chunks] if claim_s else []

        def counted(outcome: CallOutcome, counts: Sequence[int | None]) -> None:
            left = iter(counts)
            claimed = tuple(
                None if n is None else n > 0 for n in itertools.islice(left, len(claims))
            )
            present = [_all_of([*itertools.islice(left, stripes)]) for _, stripes in chunks]
            is_done = outcome is CallOutcome.DONE
            done(ExistsResult(outcome, present, claimed) if is_done else ExistsResult(outcome))

        stripes = [stripe_key(key, index) for key, count in chunks for index in range(count)]
        pack = partial(keys_commands, b"TOUCH")
        if self.options.ttl_refresh:
            pack = partial(expire_commands, self.options.ttl_s)
        is_claim = partial(is_claim_key, key_prefix=prefix)
        steps = partial(keep_each, pack, self._nodes.note, is_claim, int(claim_s * 1000))
        self._nodes.ask_for_each(steps, deadline, [*claims, *stripes], counted, is_urgent=False)

    def unclaim(self, keys: Sequence[bytes]) -> None:
        """Give back claims, after scans. What cannot be given back runs out."""
        claims = [claim_key(key, self.options.key_prefix) for key in keys]
        steps = partial(ask_each, partial(keys_commands, b"UNLINK"), parse_count)
        deadline = time.monotonic() + self.options.op_timeout_s
        with contextlib.suppress(RuntimeError):  # the plane was closed in the meantime
            self._nodes.ask_for_each(
                steps, deadline, claims, lambda *_: None, is_urgent=False, is_write=True
            )

    def add_up(
        self,
        keys: Sequence[bytes],
        amounts: Mapping[bytes, int],
        ttl_s: int,
        deadline: float,
        done: Done[NumbersResult],
    ) -> None:
        """The numbers under keys, after their amounts are added, after scans. Uses INCRBY.

        A key expires ``ttl_s`` seconds after it is made.
        """

        def answer(outcome: CallOutcome, found: Sequence[int | RedisError | None]) -> None:
            numbers = [each if isinstance(each, int) else None for each in found]
            refused = [isinstance(each, RedisError) for each in found]
            is_done = outcome is CallOutcome.DONE
            done(NumbersResult(outcome, numbers, refused) if is_done else NumbersResult(outcome))

        steps = partial(add_each, amounts, ttl_s, self._nodes.note)
        self._nodes.ask_for_each(
            steps, deadline, keys, answer, is_urgent=False, is_write=bool(amounts)
        )

    def describe(self, keys: Sequence[bytes], deadline: float, done: Done[FramesResult]) -> None:
        """The frames of the chunks, whatever their layout. Uses GETRANGE."""

        def answer(outcome: CallOutcome, frames: Sequence[ChunkFrame | None]) -> None:
            done(FramesResult(outcome, frames if outcome is CallOutcome.DONE else ()))

        self._nodes.ask_for_each(_FRAMES, deadline, [key + _FIRST_STRIPE for key in keys], answer)

    def keys(self, prefix: bytes, deadline: float, limit: int = sys.maxsize) -> KeysResult:
        """As `list_keys`; blocks the caller."""
        results: SimpleQueue[KeysResult] = SimpleQueue()
        self.list_keys(prefix, deadline, results.put, limit)
        return results.get()

    def list_keys(
        self, prefix: bytes, deadline: float, done: Done[KeysResult], limit: int = sys.maxsize
    ) -> None:
        """The keys that begin with `prefix`: SCANs all servers, in small steps, after scans.

        Logs a warning if keys are missing: a server does not answer in time, or there are more than
        the limit, or than fit in `listing.MOST_BYTES`.
        """
        listed = FoundNames(prefix, _FIRST_STRIPE, limit)

        def found(some: list[bytes]) -> Sequence[bytes] | None:
            return () if listed.add(some) else None

        def walked(outcome: CallOutcome) -> None:
            if outcome is CallOutcome.DONE and listed.is_over:
                outcome = CallOutcome.OVER_LIMIT
            if outcome is not CallOutcome.DONE:
                logger.warning("the list of chunks is not complete: %s", outcome.value)
            done(KeysResult(outcome, [*listed.names]))

        pattern = escape_pattern(prefix) + b"*" + _FIRST_STRIPE
        steps = partial(walk_keys, pattern, found, "TYPE", "string")
        self._walk(steps, deadline, walked)

    def rank(
        self, prefixes: Sequence[bytes], limit: int, deadline: float, done: Done[RankedKeys]
    ) -> None:
        """The keys with one of these prefixes that are used most, about `limit` at most.

        SCANs all servers, in small steps, after scans. Uses OBJECT. If they do not answer in time,
        what was found until then.
        """
        found = MostUsed(prefixes, _FIRST_STRIPE, limit)
        steps = partial(walk_uses, prefix_pattern(prefixes) + _FIRST_STRIPE, found)

        def walked(outcome: CallOutcome) -> None:
            done(RankedKeys(outcome, found.ranked(), found.refused))

        self._walk(steps, deadline, walked)

    def remove(
        self,
        key: bytes,
        deadline: float,
        done: Done[RemoveResult],
        stripe_count: int = 0,
        newest_unix_ms: int | None = None,
    ) -> None:
        """UNLINK all stripes of a chunk, before scans. Stripe 0, which hides it, waits for nothing.

        If their number is not known, the header tells it, if the user may GETRANGE. With
        `newest_unix_ms` the header is asked for first; if that is refused, the chunk is removed.
        UNAVAILABLE if a stripe could not be asked for: its shard is down, or its slot moves.
        """
        remove_chunk(self._nodes, key, deadline, done, stripe_count, newest_unix_ms)

    def clear(
        self, key_prefixes: Sequence[bytes], deadline: float, done: Done[RemoveResult]
    ) -> None:
        """UNLINK every key that begins with one of the prefixes, in small steps, after scans.

        Raises ValueError unless they are those of our keys (user prefix + b"lmcr2:" ...).
        """
        for prefix in key_prefixes:
            if KEY_MAGIC not in prefix:
                raise ValueError(f"{prefix!r} is not the beginning of keys of this package")
        beginnings, removed = tuple(key_prefixes), list[int]()

        def found(some: list[bytes]) -> Sequence[bytes]:
            # The pattern matches others too, and only keys with these prefixes are ours to delete.
            return [key for key in some if key.startswith(beginnings)]

        steps = partial(walk_keys, prefix_pattern(beginnings), found, removed=removed.append)
        self._walk(steps, deadline, lambda outcome: done(RemoveResult(outcome, sum(removed))))

    # --------------------------------------------------------------- what they share

    def _check(self, chunks: Sequence[ChunkIO], writable: bool) -> None:
        """Raises ValueError or RuntimeError before any chunk is started."""
        for chunk in chunks:
            chunk.check(writable)
        self._jobs.check_usable()
        if len(set(chunks)) < len(chunks) or not self._jobs.transfers.keys().isdisjoint(chunks):
            raise RuntimeError("the chunk is being read or written already")

    def _queue(
        self,
        jobs: Sequence[ChunkJob[Any]],
        put: Callable[[DataNode, Sequence[StripeTask]], None],
    ) -> None:
        """Route and register jobs, and put the stripes of each node into its queues, in order."""
        routes = self._nodes.routes
        for job in jobs:
            job.routes, job.nodes = routes, routes.nodes_of(job.chunk_key, job.steps_left)
        accepted = self._jobs.enter(jobs, [job.chunk for job in jobs])
        by_node: dict[Any, list[StripeTask]] = defaultdict(list)
        for job in accepted:
            for index, node in enumerate(job.nodes):
                by_node[node].append((job, index))
        for node, tasks in by_node.items():
            put(node, tasks)
        # A server may have gone down, or the plane been closed, in the meantime.
        self._jobs.refuse(accepted)

    def _walk(
        self, make_steps: Callable[[], Steps[None]], deadline: float, done: Done[CallOutcome]
    ) -> None:
        """Take the same steps on every server, after scans. DONE if all of them answered."""

        def answered(outcomes: Sequence[CallOutcome], found: object) -> None:
            failures = (each for each in outcomes if each is not CallOutcome.DONE)
            done(next(failures, CallOutcome.DONE))

        every = [(node, make_steps()) for node in self._nodes.routes.nodes or (None,)]
        self._nodes.ask(every, deadline, answered, is_urgent=False)


def _all_of(counts: Sequence[int | None]) -> bool | None:
    """Whether a chunk is whole, by the counts of its stripes; None: not known."""
    if 0 in counts:
        return False
    return None if None in counts else True


def _batches(chunks: Sequence[ChunkIO]) -> Iterator[Sequence[ChunkIO]]:
    """Batches of chunks: the first is in flight while the others are prepared."""
    each = -(-_BATCH_STRIPES // chunks[0].frame.stripe_count) if chunks else 1
    return (chunks[start : start + each] for start in range(0, len(chunks), each))
