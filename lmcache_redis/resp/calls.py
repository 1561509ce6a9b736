"""The calls of a plane about keys: routed to the servers that have them, results combined."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from lmcache_redis.chunks.frame import ChunkFrame, StripeHeader
from lmcache_redis.chunks.keys import KEY_MAGIC, stripe_key
from lmcache_redis.resp.control import (
    STEP_KEYS,
    Question,
    Removal,
    Steps,
    ask_each,
    count_prefix,
    find_present,
    header_commands,
    parse_count,
    parse_header,
    walk_keys,
)
from lmcache_redis.resp.jobs import Job, Jobs
from lmcache_redis.resp.net.topology import Part, Routing
from lmcache_redis.resp.net.wire import escape_pattern, keys_commands
from lmcache_redis.resp.node import Node, Nodes
from lmcache_redis.tiers import (
    CallOutcome,
    Done,
    ExistsResult,
    FramesResult,
    KeysResult,
    RemoveResult,
    ScanResult,
)

logger = logging.getLogger(__name__)

_FIRST_STRIPE = stripe_key(b"", 0)
# A command for each key: whether it exists, UNLINK, and its header; None: no value, or no header.
_EXISTS = partial(ask_each, partial(keys_commands, b"EXISTS", group_keys=1), parse_count)
_UNLINKS = partial(
    ask_each, partial(keys_commands, b"UNLINK", group_keys=1), parse_count, step_keys=STEP_KEYS
)
_HEADERS = partial(ask_each, header_commands, parse_header)
# A partial write is removed soon or not at all: later, the chunk may have been stored again.
_REMOVE_WITHIN_S = 10.0
_MAX_PENDING_REMOVALS = 1024
# A part's failure is the outcome of the call only if no part is DONE. The gravest is first.
_FAILURES = (CallOutcome.CANCELLED, CallOutcome.UNAVAILABLE, CallOutcome.TIMED_OUT)


class KeyCalls:
    """Keys are chunk keys: a chunk exists if its stripe 0 does, which is written last.

    Deadlines are `time.monotonic()` seconds. `done` is called once, on a thread of the plane. A
    shard that does not answer costs only its own keys, which count as missing: the outcome is DONE
    if any shard answered.
    """

    def __init__(self, nodes: Nodes, jobs: Jobs) -> None:
        self._nodes = nodes
        self._jobs = jobs
        self._removals = Removals(jobs.transfers)

    def scan(self, keys: Sequence[bytes], deadline: float, done: Done[ScanResult]) -> None:
        """How many of the leading chunks exist, up to the first gap."""

        def answer(outcome: CallOutcome, length: int | None) -> None:
            done(ScanResult(outcome, length or 0))

        self._jobs.check_usable()
        if self._nodes.routes.is_cluster:
            # The first gap, or the end.
            self._exists(keys, deadline, lambda outcome, n: answer(outcome, [*n, 0].index(0)))
        else:
            steps = partial(count_prefix, keys, _FIRST_STRIPE)
            question = Question(steps, deadline, answer, is_urgent=True)
            self._submit(question, self._nodes.routes.node_of(b""))

    def exists(self, keys: Sequence[bytes], deadline: float, done: Done[ExistsResult]) -> None:
        """Which of the chunks exist."""

        def answer(outcome: CallOutcome, counts: Sequence[int]) -> None:
            is_done = outcome is CallOutcome.DONE
            done(ExistsResult(outcome, [count > 0 for count in counts] if is_done and keys else ()))

        self._exists(keys, deadline, answer)

    def refresh(
        self, chunks: Sequence[tuple[bytes, int]], deadline: float, done: Done[ExistsResult]
    ) -> None:
        """Asks for stripe 0 of each chunk, until the branch `resp` is merged."""
        self.exists([key for key, _ in chunks], deadline, done)

    def describe(self, keys: Sequence[bytes], deadline: float, done: Done[FramesResult]) -> None:
        """The frames of the chunks, whatever their layout. Uses GETRANGE."""

        def answer(outcome: CallOutcome, headers: Sequence[StripeHeader | None]) -> None:
            is_done = outcome is CallOutcome.DONE
            done(FramesResult(outcome, [_frame(header) for header in headers] if is_done else ()))

        self._ask(_HEADERS, _first_stripes(keys), deadline, None, answer)

    def keys(self, prefix: bytes, deadline: float, limit: int = sys.maxsize) -> KeysResult:
        """The keys that begin with `prefix`: SCANs all servers, in small steps, after scans.

        Blocks. Logs a warning if keys are missing: a server does not answer in time, or there are
        more than the limit.
        """
        names: list[bytes] = []
        outcomes: SimpleQueue[CallOutcome] = SimpleQueue()

        def found(some: list[bytes]) -> Sequence[bytes]:
            if len(names) <= limit:
                names.extend(some)
            return ()

        pattern = escape_pattern(prefix) + b"*" + _FIRST_STRIPE
        self._walk(partial(walk_keys, pattern, found, "TYPE", "string"), deadline, outcomes.put)
        outcome = outcomes.get()
        if outcome is CallOutcome.DONE and len(names) > limit:
            outcome = CallOutcome.OVER_LIMIT
        if outcome is not CallOutcome.DONE:
            logger.warning("the list of chunks is not complete: %s", outcome.value)
        # A name may come twice, and the server may match other names.
        stripes = [name for name in dict.fromkeys(names) if name.startswith(prefix)]
        ends = [name for name in stripes if name.endswith(_FIRST_STRIPE)]
        return KeysResult(outcome, [name[: -len(_FIRST_STRIPE)] for name in ends])

    def remove(self, key: bytes, deadline: float, done: Done[RemoveResult]) -> None:
        """UNLINK all stripes of a chunk, which its header counts. Uses GETRANGE."""

        def answer(outcome: CallOutcome, headers: Sequence[StripeHeader | None]) -> None:
            if outcome is not CallOutcome.DONE:
                done(RemoveResult(outcome))
                return
            (header,) = headers
            self.unlink(key, header.stripe_count if header is not None else 1, deadline, done)

        self._ask(_HEADERS, _first_stripes((key,)), deadline, None, answer)

    def unlink(
        self,
        chunk_key: bytes,
        stripe_count: int,
        deadline: float | None = None,
        done: Done[RemoveResult] | None = None,
    ) -> None:
        """UNLINK the stripes of a chunk, stripe 0 first.

        Without `done`, in the background: within ten seconds or not at all, and not while the chunk
        is being stored, which replaces all of it.
        """
        jobs = self._jobs
        if done is None and (
            not jobs.started
            or jobs.closing
            or not self._nodes.state.up
            or jobs.count(Removal) >= _MAX_PENDING_REMOVALS
        ):
            return

        def answer(outcome: CallOutcome, removed: Sequence[int]) -> None:
            self._removals.end(chunk_key)
            if done is not None:
                done(RemoveResult(outcome, sum(removed)))

        if deadline is None:
            deadline = time.monotonic() + _REMOVE_WITHIN_S
        stripes = [stripe_key(chunk_key, index) for index in range(stripe_count)]
        jobs.check_usable()
        if self._removals.begin(chunk_key, unless_stored=done is None):
            self._ask(_UNLINKS, stripes, deadline, 0, answer, Removal)

    def clear(self, key_prefix: bytes, deadline: float, done: Done[RemoveResult]) -> None:
        """UNLINK every key that begins with `key_prefix`, in small steps, after scans.

        Raises ValueError unless the prefix is that of our keys (user prefix + b"lmcr1:" ...).
        """
        if KEY_MAGIC not in key_prefix:
            raise ValueError(f"{key_prefix!r} is not the beginning of keys of this package")
        lock = threading.Lock()
        total = 0

        def found(some: list[bytes]) -> Sequence[bytes]:
            # Whatever the server matched, only keys with this prefix are ours to delete.
            return [key for key in some if key.startswith(key_prefix)]

        def removed(count: int) -> None:
            nonlocal total
            with lock:
                total += count

        def answer(outcome: CallOutcome) -> None:
            done(RemoveResult(outcome, total))

        group_keys = 1 if self._nodes.routes.is_cluster else STEP_KEYS
        pattern = escape_pattern(key_prefix) + b"*"
        steps = partial(walk_keys, pattern, found, removed=removed, group_keys=group_keys)
        self._walk(steps, deadline, answer)

    def _exists(
        self,
        keys: Sequence[bytes],
        deadline: float,
        done: Callable[[CallOutcome, Sequence[int]], None],
    ) -> None:
        if self._nodes.routes.is_cluster:
            self._ask(_EXISTS, _first_stripes(keys), deadline, 0, done)
        else:
            self._ask(
                lambda some, asking: find_present(some, _FIRST_STRIPE), keys, deadline, 0, done
            )

    def _ask(
        self,
        make_steps: Callable[..., Steps[Sequence[Any]]],
        keys: Sequence[bytes],
        deadline: float,
        missing: Any,
        done: Callable[[CallOutcome, Sequence[Any]], None],
        kind: Callable[..., Question] = Question,
    ) -> None:
        """Ask each node for its keys, and follow redirections.

        make_steps: makes the steps for some keys (`control.ask_each`). done: called with a result
        for each key, `missing` for keys without one.
        """
        self._jobs.check_usable()
        routing = Routing(self._nodes.routes, keys, self._nodes.follow, missing)
        lock = threading.Lock()
        outcomes: set[CallOutcome] = set()
        open_parts = len(routing.parts)

        def ask(part: Part[Node]) -> None:
            some = [keys[index] for index in part.indexes]
            steps = partial(make_steps, some, asking=part.hop is not None and part.hop.asking)
            is_urgent = kind is not Removal
            answer = partial(answered, part)
            self._submit(kind(steps, deadline, answer, is_urgent=is_urgent), part.node)

        def answered(part: Part[Node], outcome: CallOutcome, results: Sequence[Any] | None) -> None:
            nonlocal open_parts
            redirected = routing.answered(part, results or ())
            with lock:
                outcomes.add(outcome)
                open_parts += len(redirected) - 1
                is_over = not open_parts
            for each in redirected:
                ask(each)
            if is_over:
                done(_total(outcomes), routing.results)

        for part in routing.parts:
            ask(part)
        if not routing.parts:
            # No keys, or no server has them.
            outcome = CallOutcome.UNAVAILABLE if keys else CallOutcome.DONE
            self._jobs.timekeeper.post(lambda: done(outcome, routing.results))

    def _walk(
        self,
        make_steps: Callable[[], Steps[None]],
        deadline: float,
        done: Callable[[CallOutcome], None],
    ) -> None:
        """Take the same steps on every server."""
        self._jobs.check_usable()
        nodes = self._nodes.routes.nodes or (None,)
        lock = threading.Lock()
        outcomes: list[CallOutcome] = []

        def answer(outcome: CallOutcome, _: None) -> None:
            with lock:
                outcomes.append(outcome)
                if len(outcomes) < len(nodes):
                    return
            failures = (each for each in outcomes if each is not CallOutcome.DONE)
            done(next(failures, CallOutcome.DONE))

        for node in nodes:
            self._submit(Question(make_steps, deadline, answer, is_urgent=False), node)

    def _submit(self, question: Question, node: Node | None) -> None:
        question.nodes = (node,)
        if self._jobs.enter((question,)) and node is not None:
            node.ask(question)
            # The server may have gone down, or the plane been closed, in the meantime.
            self._jobs.refuse((question,))


class Removals:
    """The removals in flight. No removal takes a stripe of a later store. Thread-safe.

    Removals and stores of one chunk use different connections: a store waits until the removals of
    its chunk are answered, and a chunk that is being stored is not removed because of a failed read
    or an earlier store. transfers: `Jobs.transfers`; a store is added to it before `is_empty` and
    `wait`.
    """

    def __init__(self, transfers: Mapping[Any, Job[Any]]) -> None:
        self._transfers = transfers
        self._lock = threading.Lock()
        # By chunk key: how many removals, and the stores that wait for them.
        self._removals: dict[bytes, tuple[int, list[Callable[[], None]]]] = {}

    def begin(self, chunk_key: bytes, unless_stored: bool) -> bool:
        """Note a removal before it is queued; False: do not queue it, the chunk is being stored."""
        with self._lock:
            if unless_stored:
                transfers = list(self._transfers.items())
                if any(chunk.key == chunk_key and job.is_store for chunk, job in transfers):
                    return False
            count, waiting = self._removals.get(chunk_key, (0, []))
            self._removals[chunk_key] = count + 1, waiting
            return True

    def end(self, chunk_key: bytes) -> None:
        """A removal was answered, or will not be sent."""
        with self._lock:
            count, waiting = self._removals.pop(chunk_key)
            if count > 1:
                self._removals[chunk_key] = count - 1, waiting
                return
        for start in waiting:
            start()

    def is_empty(self) -> bool:
        """Whether no removal is in flight; then the stores in `transfers` need not wait."""
        with self._lock:
            return not self._removals

    def wait(self, chunk_key: bytes, start: Callable[[], None]) -> bool:
        """Call `start` once the removals of the chunk have ended; False if none is in flight."""
        with self._lock:
            if chunk_key not in self._removals:
                return False
            self._removals[chunk_key][1].append(start)
            return True


def _first_stripes(keys: Sequence[bytes]) -> list[bytes]:
    return [key + _FIRST_STRIPE for key in keys]


def _frame(header: StripeHeader | None) -> ChunkFrame | None:
    """The chunk whose stripe 0 has this header."""
    if header is None or header.stripe_index != 0:
        return None
    return ChunkFrame(
        header.fingerprint,
        header.chunk_hash,
        header.chunk_bytes,
        header.payload_bytes,  # no stripe is larger than stripe 0
        header.metadata.serialize(),
    )


def _total(outcomes: set[CallOutcome]) -> CallOutcome:
    if CallOutcome.DONE in outcomes and CallOutcome.CANCELLED not in outcomes:
        return CallOutcome.DONE
    return next(outcome for outcome in _FAILURES if outcome in outcomes)
