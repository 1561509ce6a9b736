"""The calls of a plane about keys: routed to the servers that have them, results combined."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from lmcache_redis.chunks.frame import ChunkFrame, StripeHeader
from lmcache_redis.chunks.keys import KEY_MAGIC
from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.errors import RedisRedirect
from lmcache_redis.resp.control import (
    STEP_KEYS,
    KeyQuestion,
    Steps,
    ask_each,
    count_prefix,
    expire_commands,
    find_present,
    header_commands,
    parse_count,
    parse_header,
    walk_keys,
)
from lmcache_redis.resp.jobs import Hop, Jobs
from lmcache_redis.resp.net.wire import escape_pattern, keys_commands
from lmcache_redis.resp.node import DataNode, DataNodes
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
# Of a cluster, keys in the first round of a question, and in any.
_FIRST_ROUND_KEYS = 256
_MOST_ROUND_KEYS = 16384
# A command for each key: whether it exists, UNLINK, and its header; None: no value, or no header.
_EXISTS = partial(ask_each, partial(keys_commands, b"EXISTS", group_keys=1), parse_count)
_FIND_PRESENT = partial(find_present, suffix=_FIRST_STRIPE)
_UNLINKS = partial(
    ask_each, partial(keys_commands, b"UNLINK", group_keys=1), parse_count, step_keys=STEP_KEYS
)
_HEADERS = partial(ask_each, header_commands, parse_header)
# A part's failure is the outcome of the call only if no part is DONE. The gravest is first.
_FAILURES = (CallOutcome.CANCELLED, CallOutcome.UNAVAILABLE, CallOutcome.TIMED_OUT)


class KeyCalls:
    """Keys are chunk keys: a chunk exists if its stripe 0 does, which is written last.

    Deadlines are `time.monotonic()` seconds. `done` is called once, on a thread of the plane. A
    shard that does not answer costs only its own keys, which count as missing: the outcome is DONE
    if any shard answered.
    """

    def __init__(self, nodes: DataNodes, jobs: Jobs) -> None:
        self._nodes = nodes
        self._jobs = jobs

    def scan(self, keys: Sequence[bytes], deadline: float, done: Done[ScanResult]) -> None:
        """How many of the leading chunks exist, up to the first gap."""

        def answer(outcome: CallOutcome, length: int | None) -> None:
            done(ScanResult(outcome, length or 0))

        def counted(outcome: CallOutcome, counts: Sequence[int]) -> None:
            # The first gap, or the end.
            answer(outcome, [*counts, 0].index(0))

        self._jobs.check_usable()
        if self._nodes.routes.is_cluster:
            ask = partial(self._ask, _EXISTS, deadline, 0)
            ask_in_rounds(ask, keys, counted, _FIRST_STRIPE, only_prefix=True)
        else:
            steps = partial(count_prefix, keys, _FIRST_STRIPE)
            self._submit(steps, deadline, answer, self._nodes.routes.node_of(b""))

    def exists(self, keys: Sequence[bytes], deadline: float, done: Done[ExistsResult]) -> None:
        """Which of the chunks exist."""

        def answer(outcome: CallOutcome, counts: Sequence[int]) -> None:
            is_done = outcome is CallOutcome.DONE
            done(ExistsResult(outcome, [count > 0 for count in counts] if is_done and keys else ()))

        if self._nodes.routes.is_cluster:
            ask_in_rounds(partial(self._ask, _EXISTS, deadline, 0), keys, answer, _FIRST_STRIPE)
        else:
            self._ask(_FIND_PRESENT, deadline, 0, keys, answer)

    def refresh(
        self, chunks: Sequence[tuple[bytes, int]], deadline: float, done: Done[ExistsResult]
    ) -> None:
        """Keep chunks from eviction and expiry: their keys, and how many stripes each has.

        `present` says of each chunk whether all of its stripes exist. Uses TOUCH, or EXPIRE if a
        load restarts the TTL. After scans.
        """

        def counted(outcome: CallOutcome, counts: Sequence[int]) -> None:
            left = iter(counts)
            present = [sum(itertools.islice(left, stripes)) == stripes for _, stripes in chunks]
            done(ExistsResult(outcome, present if outcome is CallOutcome.DONE else ()))

        options = self._nodes.options
        keys = [stripe_key(key, index) for key, stripes in chunks for index in range(stripes)]
        pack = partial(keys_commands, b"TOUCH", group_keys=1)
        if options.ttl_refresh:
            pack = partial(expire_commands, options.ttl_s)
        steps = partial(ask_each, pack, parse_count, step_keys=STEP_KEYS)
        ask_in_rounds(partial(self._ask, steps, deadline, 0, is_urgent=False), keys, counted)

    def describe(self, keys: Sequence[bytes], deadline: float, done: Done[FramesResult]) -> None:
        """The frames of the chunks, whatever their layout. Uses GETRANGE."""

        def answer(outcome: CallOutcome, headers: Sequence[StripeHeader | None]) -> None:
            is_done = outcome is CallOutcome.DONE
            done(FramesResult(outcome, [_frame(header) for header in headers] if is_done else ()))

        self._ask(_HEADERS, deadline, None, [key + _FIRST_STRIPE for key in keys], answer)

    def keys(self, prefix: bytes, deadline: float, limit: int = sys.maxsize) -> KeysResult:
        """As `list_keys`, and blocks."""
        results: SimpleQueue[KeysResult] = SimpleQueue()
        self.list_keys(prefix, deadline, results.put, limit)
        return results.get()

    def list_keys(
        self, prefix: bytes, deadline: float, done: Done[KeysResult], limit: int = sys.maxsize
    ) -> None:
        """The keys that begin with `prefix`: SCANs all servers, in small steps, after scans.

        Logs a warning if keys are missing: a server does not answer in time, or there are more than
        the limit.
        """
        names: list[bytes] = []

        def found(some: list[bytes]) -> Sequence[bytes]:
            if len(names) <= limit:
                names.extend(some)
            return ()

        def walked(outcome: CallOutcome) -> None:
            if outcome is CallOutcome.DONE and len(names) > limit:
                outcome = CallOutcome.OVER_LIMIT
            if outcome is not CallOutcome.DONE:
                logger.warning("the list of chunks is not complete: %s", outcome.value)
            # A name may come twice, and the server may match other names.
            stripes = [name for name in dict.fromkeys(names) if name.startswith(prefix)]
            ends = [name for name in stripes if name.endswith(_FIRST_STRIPE)]
            done(KeysResult(outcome, [name[: -len(_FIRST_STRIPE)] for name in ends]))

        pattern = escape_pattern(prefix) + b"*" + _FIRST_STRIPE
        self._walk(partial(walk_keys, pattern, found, "TYPE", "string"), deadline, walked)

    def remove(self, key: bytes, deadline: float, done: Done[RemoveResult]) -> None:
        """UNLINK all stripes of a chunk, stripe 0 first. Its header, a GETRANGE, counts them."""

        def found(outcome: CallOutcome, headers: Sequence[StripeHeader | None]) -> None:
            if outcome is not CallOutcome.DONE:
                done(RemoveResult(outcome))
                return
            count = headers[0].stripe_count if headers[0] is not None else 1
            stripes = [stripe_key(key, index) for index in range(count)]
            self._ask(_UNLINKS, deadline, 0, stripes, unlinked, is_urgent=False)

        def unlinked(outcome: CallOutcome, removed: Sequence[int]) -> None:
            done(RemoveResult(outcome, sum(removed)))

        self._ask(_HEADERS, deadline, None, (key + _FIRST_STRIPE,), found)

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

        group_keys = 1 if self._nodes.routes.is_cluster else STEP_KEYS
        pattern = escape_pattern(key_prefix) + b"*"
        steps = partial(walk_keys, pattern, found, removed=removed, group_keys=group_keys)
        self._walk(steps, deadline, lambda outcome: done(RemoveResult(outcome, total)))

    def _ask(
        self,
        make_steps: Callable[..., Steps[Sequence[Any]]],
        deadline: float,
        missing: Any,
        keys: Sequence[bytes],
        done: Callable[[CallOutcome, Sequence[Any]], None],
        is_urgent: bool = True,
    ) -> None:
        """Ask each node for its keys, and follow redirections.

        make_steps: makes the steps for some keys (`ask_each`). done: called with a result for each
        key, `missing` for keys without one.
        """
        self._jobs.check_usable()
        results: list[Any] = [missing] * len(keys)
        lock = threading.Lock()
        outcomes: set[CallOutcome] = set()
        by_node = self._nodes.routes.split(keys)
        parts = [(node, None, indexes) for node, indexes in by_node.items() if node is not None]
        open_parts = len(parts)

        def ask(node: DataNode, hop: Hop | None, indexes: Sequence[int]) -> None:
            some = [keys[index] for index in indexes]
            steps = partial(make_steps, some, asking=hop is not None and hop.asking)
            self._submit(steps, deadline, partial(answered, node, hop, indexes), node, is_urgent)

        def answered(
            node: DataNode,
            hop: Hop | None,
            indexes: Sequence[int],
            outcome: CallOutcome,
            found: Sequence[Any] | None,
        ) -> None:
            nonlocal open_parts
            redirected: dict[tuple[DataNode, Hop], list[int]] = defaultdict(list)
            for index, result in zip(indexes, found or (), strict=False):
                if not isinstance(result, RedisRedirect):
                    results[index] = result
                elif (followed := self._nodes.follow(node, result, hop)) is not None:
                    redirected[followed].append(index)
            with lock:
                outcomes.add(outcome)
                open_parts += len(redirected) - 1
                is_over = not open_parts
            for place, some in redirected.items():
                ask(*place, some)
            if is_over:
                done(_total(outcomes), results)

        for part in parts:
            ask(*part)
        if not parts:
            # No keys, or no server has them.
            outcome = CallOutcome.UNAVAILABLE if keys else CallOutcome.DONE
            self._jobs.post(lambda: done(outcome, results))

    def _walk(
        self, make_steps: Callable[[], Steps[None]], deadline: float, done: Done[CallOutcome]
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
            self._submit(make_steps, deadline, answer, node, is_urgent=False)

    def _submit(
        self,
        make_steps: Callable[[], Steps[Any]],
        deadline: float,
        done: Callable[[CallOutcome, Any], None],
        node: DataNode | None,
        is_urgent: bool = True,
    ) -> None:
        question = KeyQuestion(make_steps, deadline, done, is_urgent=is_urgent)
        question.nodes = (node,)
        if self._jobs.enter((question,)) and node is not None:
            node.control.put(question)
            # The server may have gone down, or the plane been closed, in the meantime.
            self._jobs.refuse((question,))


def ask_in_rounds(
    ask: Callable[[Sequence[bytes], Callable[[CallOutcome, Sequence[int]], None]], None],
    keys: Sequence[bytes],
    done: Callable[[CallOutcome, Sequence[int]], None],
    suffix: bytes = b"",
    only_prefix: bool = False,
) -> None:
    """Ask for some keys after the other: routing all at once would hold up the caller.

    Each round is four times as large as the last, up to a limit. suffix: at the end of each key.
    done: called with a count for each key; 0 for keys after the first gap with `only_prefix`, and
    for those of which no server said anything.
    """
    counts: list[int] = []
    round_keys = _FIRST_ROUND_KEYS

    def ask_next() -> None:
        start = len(counts)
        some = keys[start : start + round_keys]
        ask([key + suffix for key in some] if suffix else some, answered)

    def answered(outcome: CallOutcome, more: Sequence[int]) -> None:
        nonlocal round_keys
        has_answer = len(counts) > 0
        counts.extend(more)
        left = len(keys) - len(counts)
        if outcome is CallOutcome.DONE and left and not (only_prefix and 0 in more):
            round_keys = min(4 * round_keys, _MOST_ROUND_KEYS)
            ask_next()
            return
        if has_answer and outcome is not CallOutcome.CANCELLED:
            # What is known stands.
            outcome = CallOutcome.DONE
        done(outcome, counts + [0] * left)

    ask_next()


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
