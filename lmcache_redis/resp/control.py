"""The control connection of a server: scans, exists, headers, removals and clears.

Scans and exists go first; removals and clears are background work in steps so small that a scan
never waits long behind one.

EXISTS counts. On one server the keys go in groups of 32, one EXISTS each, many in one write; only a
group whose count is neither nothing nor all is looked into. 1,000 keys take 0.3 ms so, against
7.5 ms with one EXISTS a key (docs/data-plane.md). A prefix ends where the first key is missing. It
is known then, and answered, while the server is still busy with the rest. In a cluster a command
has one key (`KeyJob`).
"""

from __future__ import annotations

import itertools
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from lmcache_redis.errors import (
    RedisError,
    RedisProtocolError,
    RedisRedirect,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp.connection import Connection, Pipeline
from lmcache_redis.resp.jobs import Job, Jobs, TaskQueue
from lmcache_redis.resp.outcomes import CallOutcome
from lmcache_redis.resp.wire import (
    ASKING_COMMAND,
    ErrorReply,
    Reply,
    error_of,
    escape_pattern,
    keys_command,
    keys_commands,
    parse_scan,
    scan_command,
    without_errors,
)
from lmcache_redis.resp.worker import Server, Worker

ResultT = TypeVar("ResultT")
GROUP_KEYS = 32
# Groups in a write: the first is small, so that the server has something to do at once, and
# looks these up while the next are packed.
_FIRST_GROUPS = 2
_WRITE_GROUPS = 32
# Keys for one UNLINK, and what one SCAN looks at: well under a millisecond of the server's.
BATCH_KEYS = 512


class Asking(Protocol):
    """What a question needs of a `Pipeline`."""

    outstanding: int

    def send(self, requests: Iterable[bytes], replies: int, /) -> None: ...

    def receive(self, least: int, /) -> Sequence[Reply]: ...


class Query(Job[CallOutcome]):
    """A question or removal for the control connection of one server, in one step or several."""

    __slots__ = ("is_urgent",)
    good = CallOutcome.DONE

    def __init__(self, deadline: float, *, is_urgent: bool) -> None:
        self.is_urgent = is_urgent
        super().__init__(1, deadline, time.monotonic())

    @abstractmethod
    def work(self, pipeline: Pipeline) -> bool:
        """Do a step; True if it was the last. Raises RedisError."""

    def leave(self, jobs: Jobs) -> None:
        """Whole calls are counted, of which this may be a part."""


class GroupJob(Query, Generic[ResultT]):
    """Which keys exist, on one server that has them all."""

    __slots__ = ("_answer_from", "_done", "_keys", "_result")

    def __init__(
        self,
        answer_from: Callable[[Asking, Sequence[bytes]], ResultT],
        keys: Sequence[bytes],
        deadline: float,
        done: Callable[[CallOutcome, ResultT | None], None],
    ) -> None:
        self._answer_from = answer_from
        self._keys = keys
        self._done = done
        self._result: ResultT | None = None
        super().__init__(deadline, is_urgent=True)

    def ask(self, send: Callable[[Iterator[bytes], int], None]) -> None:
        """Send the first question."""
        send(*first_question(self._keys))

    def work(self, pipeline: Pipeline) -> bool:
        """Once the first question was sent."""
        self._result = self._answer_from(pipeline, self._keys)
        return True

    def answer(self, outcome: CallOutcome) -> None:
        self._done(outcome, self._result if outcome is CallOutcome.DONE else None)


class ClearJob(Query):
    """SCAN one server for keys with a prefix and UNLINK them, a bounded batch each step.

    batch_keys: most keys of one UNLINK; 1 in a cluster, where keys have slots.
    """

    __slots__ = ("_batch_keys", "_cursor", "_done", "_pattern", "_prefix", "_removed")

    def __init__(
        self,
        prefix: bytes,
        deadline: float,
        done: Callable[[CallOutcome, int], None],
        batch_keys: int = BATCH_KEYS,
    ) -> None:
        self._batch_keys = batch_keys
        self._prefix = prefix
        self._pattern = escape_pattern(prefix) + b"*"
        self._cursor = b"0"
        self._removed = 0
        self._done = done
        super().__init__(deadline, is_urgent=False)

    def work(self, pipeline: Pipeline) -> bool:
        request = scan_command(self._cursor, self._pattern, BATCH_KEYS)
        (reply,) = without_errors(pipeline.exchange((request,), 1))
        self._cursor, found = parse_scan(reply)
        # Whatever the server matched: only what begins with the prefix is ours to delete.
        keys = [key for key in found if key.startswith(self._prefix)]
        commands = -(-len(keys) // self._batch_keys)
        request = keys_commands(b"UNLINK", keys, self._batch_keys) if keys else b""
        for removed in without_errors(pipeline.exchange((request,), commands)):
            if not isinstance(removed, int) or removed < 0:
                raise RedisProtocolError("the reply to an UNLINK is no count")
            self._removed += removed
        return self._cursor == b"0"

    def answer(self, outcome: CallOutcome) -> None:
        self._done(outcome, self._removed)


class KeyJob(Query):
    """A command for each key; its reply as `parse` has it, or the redirection that came instead.

    asking: each follows an ASKING.
    """

    __slots__ = ("_asking", "_command_of", "_commands", "_done", "_keys", "_parse", "_results")

    def __init__(
        self,
        command_of: Callable[[bytes], bytes],
        parse: Callable[[Reply], Any],
        keys: Sequence[bytes],
        deadline: float,
        done: Callable[[CallOutcome, Sequence[Any]], None],
        *,
        is_urgent: bool,
        asking: bool,
    ) -> None:
        self._command_of = command_of
        self._parse = parse
        self._keys = keys
        self._done = done
        self._asking = asking
        self._results: Sequence[Any] = ()
        super().__init__(deadline, is_urgent=is_urgent)

    def work(self, pipeline: Pipeline) -> bool:
        step, before = (2, ASKING_COMMAND) if self._asking else (1, b"")
        request = b"".join([before + self._command_of(key) for key in self._keys])
        replies = pipeline.exchange((request,), step * len(self._keys))
        self._results = [self._result(reply) for reply in replies[step - 1 :: step]]
        return True

    def _result(self, reply: Reply) -> Any:
        if not isinstance(reply, ErrorReply):
            return self._parse(reply)
        if reply.code == "WRONGTYPE":
            return None
        error = error_of(reply)
        if isinstance(error, RedisRedirect):
            return error
        raise error

    def answer(self, outcome: CallOutcome) -> None:
        self._done(outcome, self._results if outcome is CallOutcome.DONE else ())


class RemoveJob(KeyJob):
    """A `KeyJob` that removes a chunk: it is finished where the plane is closed."""

    __slots__ = ()


def parse_count(reply: Reply) -> int:
    """The reply to an EXISTS or UNLINK of one key."""
    if reply == 0 or reply == 1:
        return 1 if reply else 0
    raise RedisProtocolError("the reply to a command with one key is no count of it")


class Controller(Worker):
    """The control connection of a server and its thread."""

    def __init__(self, name: str, server: Server, queue: TaskQueue[Query]) -> None:
        super().__init__(name, server)
        self._queue = queue
        self._op_timeout_s = server.options.op_timeout_s
        # Held by the thread that sends or receives. An idle connection may be used by a caller.
        self._in_use = threading.Lock()
        self._connection: Connection | None = None
        self._asked: tuple[Query, Pipeline] | None = None

    def put(self, query: Query) -> None:
        """Queue a query. The first question goes out here where the connection is idle.

        So the server is at work while the thread wakes up. Any thread; never waits.
        """
        if isinstance(query, GroupJob) and self._in_use.acquire(blocking=False):
            try:
                if self._connection is not None and self._asked is None and not len(self._queue):
                    pipeline = self._new_pipeline(self._connection, query)
                    query.ask(pipeline.send_at_once)
                    self._asked = query, pipeline
            finally:
                self._in_use.release()
        self._queue.put((query,), urgent=query.is_urgent)

    def serve(self, connection: Connection) -> bool:
        self._connection = connection
        try:
            while connection.is_open:
                query = self._queue.take()
                if query is None:
                    return False
                with self._in_use:
                    self._do(connection, query)
            return True
        finally:
            with self._in_use:
                self._connection = self._asked = None

    def _do(self, connection: Connection, query: Query) -> None:
        """Do a step of what was asked, whose replies come first, and of the query."""
        asked, self._asked = self._asked, None
        if asked is not None:
            self._step(connection, *asked)
        if asked is None or query is not asked[0]:
            if connection.is_open:
                self._step(connection, query)
            else:
                self._queue.put((query,), urgent=True)

    def _step(self, connection: Connection, query: Query, asked: Pipeline | None = None) -> None:
        """asked: the pipeline in which its first question was sent."""
        if self._jobs.begin(query):
            self._work(connection, query, asked)
        elif asked is not None:
            self._finish(connection, asked)

    def _work(self, connection: Connection, query: Query, asked: Pipeline | None) -> None:
        pipeline = asked or self._new_pipeline(connection, query)
        try:
            if asked is None and isinstance(query, GroupJob):
                query.ask(pipeline.send)
            if query.work(pipeline):
                self._jobs.end(query)
            else:
                self._again(query)
        except RedisError as error:
            self._judge(error, connection)
            if isinstance(error, RedisUnavailable) and self._may_retry(query, connection):
                self._again(query)
            else:
                late = isinstance(error, RedisTimeout)
                self._jobs.end(query, CallOutcome.TIMED_OUT if late else CallOutcome.UNAVAILABLE)
        except BaseException:
            self._jobs.end(query, CallOutcome.UNAVAILABLE)
            raise
        self._finish(connection, pipeline)

    def _new_pipeline(self, connection: Connection, query: Query) -> Pipeline:
        """One budget for all round trips of a step."""
        return Pipeline(connection, min(query.deadline, time.monotonic() + self._op_timeout_s))

    def _finish(self, connection: Connection, pipeline: Pipeline) -> None:
        """Receive what the query did not wait for: it has been answered."""
        if pipeline.outstanding and connection.is_open:
            try:
                pipeline.finish(time.monotonic() + self._op_timeout_s)
            except RedisError as error:
                self._judge(error, connection)

    def _again(self, query: Query) -> None:
        self._jobs.release((query,))
        self._queue.put((query,), urgent=query.is_urgent)


# --------------------------------------------------------- groups of keys, pure


def first_question(keys: Sequence[bytes]) -> tuple[Iterator[bytes], int]:
    """What is to be sent before `count_prefix` or `find_present`, and how many replies come."""
    return _in_groups(keys, GROUP_KEYS)


def count_prefix(pipeline: Asking, keys: Sequence[bytes]) -> int:
    """How many keys exist from the first on without a gap, once the `first_question` was sent.

    Raises what `pipeline` raises. May leave replies outstanding that do not matter any more.
    """
    before = 0
    least = 1
    while before < len(keys):
        for found in _counts(pipeline.receive(least), keys, before, GROUP_KEYS):
            group = keys[before : before + GROUP_KEYS]
            if found == 0:
                return before
            if found < len(group):
                return before + _first_gap(pipeline, group, found)
            before += GROUP_KEYS
        # Every time it is woken for replies costs the server too.
        least = -(-pipeline.outstanding // 2)
    return len(keys)


def _first_gap(pipeline: Asking, group: Sequence[bytes], found: int) -> int:
    """Where the first gap is in a group of which `found` exist, asked behind what is outstanding.

    Almost always those are the first, and one EXISTS of them says so; then what was asked together
    with it, each key by itself, is not waited for.
    """
    earlier = pipeline.outstanding
    requests = (keys_command(b"EXISTS", group[:found]), keys_commands(b"EXISTS", group, 1))
    pipeline.send((b"".join(requests),), 1 + len(group))
    replies = [*pipeline.receive(earlier + 1)]
    (of_first,) = _counts(replies[earlier : earlier + 1], group[:found], 0, found)
    if of_first == found:
        return found
    if pipeline.outstanding:
        replies += pipeline.receive(pipeline.outstanding)
    for number, there in enumerate(_counts(replies[earlier + 1 :], group, 0, 1)):
        if not there:
            return number
    # Without a gap now: the missing one came in since. The later groups are not asked again.
    return len(group)


def find_present(pipeline: Asking, keys: Sequence[bytes]) -> list[bool]:
    """For each key whether it exists, once the `first_question` was sent.

    Raises what `pipeline` raises.
    """
    groups = [keys[start : start + GROUP_KEYS] for start in range(0, len(keys), GROUP_KEYS)]
    counts = _all_counts(pipeline, keys, GROUP_KEYS)
    unclear = [g for g, found in zip(groups, counts, strict=True) if 0 < found < len(g)]
    one_by_one = [key for group in unclear for key in group]
    pipeline.send(*_in_groups(one_by_one, 1))
    looked_up = iter(_all_counts(pipeline, one_by_one, 1))
    present: list[bool] = []
    for group, found in zip(groups, counts, strict=True):
        if 0 < found < len(group):
            present += [next(looked_up) > 0 for _ in group]
        else:
            present += [found > 0] * len(group)
    return present


def _all_counts(pipeline: Asking, keys: Sequence[bytes], group_keys: int) -> list[int]:
    """How many there are of each group of keys, which have been asked for."""
    return (
        list(_counts(pipeline.receive(pipeline.outstanding), keys, 0, group_keys)) if keys else []
    )


def _in_groups(keys: Sequence[bytes], group_keys: int) -> tuple[Iterator[bytes], int]:
    """The commands, packed as they are needed, and how many they are."""
    first = group_keys * _FIRST_GROUPS
    step = group_keys * _WRITE_GROUPS
    ends = [0, *range(first, len(keys), step), len(keys)] if keys else []
    requests = (
        keys_commands(b"EXISTS", keys[start:end], group_keys)
        for start, end in itertools.pairwise(ends)
    )
    return requests, -(-len(keys) // group_keys)


def _counts(
    replies: Sequence[Reply], keys: Sequence[bytes], before: int, group_keys: int
) -> Iterator[int]:
    """Replies as counts of the groups that begin `before` keys from the first."""
    for reply in replies:
        most = min(group_keys, len(keys) - before)
        if not isinstance(reply, int) or not 0 <= reply <= most:
            raise RedisProtocolError("the reply to an EXISTS is no count of its keys")
        yield reply
        before += group_keys
