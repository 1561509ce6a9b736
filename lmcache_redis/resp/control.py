"""Everything but payloads: scans, exists, removals and clears, on one connection.

Scans and exists go first; removals and clears are background work in steps so small that
a scan never waits long behind one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from lmcache_redis.errors import (
    RedisError,
    RedisProtocolError,
    RedisRedirect,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.keys import stripe_key
from lmcache_redis.resp.bulk import BulkConnection
from lmcache_redis.resp.connect import Connector
from lmcache_redis.resp.health import Health
from lmcache_redis.resp.jobs import Job, JobRegistry
from lmcache_redis.resp.outcomes import CallOutcome
from lmcache_redis.resp.queues import TaskQueue
from lmcache_redis.resp.scan import Asking, first_question
from lmcache_redis.resp.talk import Talk
from lmcache_redis.resp.wire import (
    ASKING_COMMAND,
    ErrorReply,
    Reply,
    error_of,
    escape_pattern,
    keys_command,
    keys_commands,
    scan_command,
)
from lmcache_redis.resp.worker import Worker

ResultT = TypeVar("ResultT")

# Keys for one UNLINK, and what one SCAN looks at: well under a millisecond of the server's.
_BATCH_KEYS = 512


class CallJob(Job[CallOutcome]):
    """One call of the control connection, in one step or several."""

    __slots__ = ("urgent",)

    def __init__(self, deadline: float, registry: JobRegistry, urgent: bool) -> None:
        self.urgent = urgent
        super().__init__(1, CallOutcome.DONE, deadline, registry)

    def work(self, talk: Talk) -> bool:
        """Do a step; True if it was the last. Raises RedisError."""
        raise AssertionError("a call that does nothing")


class QueryJob(CallJob, Generic[ResultT]):
    """A question about keys, answered with one result."""

    __slots__ = ("_answer_from", "_done", "_keys", "_result")

    def __init__(
        self,
        answer_from: Callable[[Asking, Sequence[bytes]], ResultT],
        keys: Sequence[bytes],
        deadline: float,
        done: Callable[[CallOutcome, ResultT | None], None],
        registry: JobRegistry,
    ) -> None:
        self._answer_from = answer_from
        self._keys = keys
        self._done = done
        self._result: ResultT | None = None
        super().__init__(deadline, registry, urgent=True)

    def ask(self, send: Callable[[Iterator[bytes], int], None]) -> None:
        """Send the first question."""
        send(*first_question(self._keys))

    def work(self, talk: Talk) -> bool:
        """Once the first question was sent."""
        self._result = self._answer_from(talk, self._keys)
        return True

    def _answer(self, outcome: CallOutcome) -> None:
        self._done(outcome, self._result if outcome is CallOutcome.DONE else None)


class RemoveJob(CallJob):
    """UNLINK the stripes of one chunk, stripe 0 first. Nobody waits for it."""

    __slots__ = ("_chunk_key", "_removed", "_settled", "_stripe_count")

    def __init__(
        self,
        chunk_key: bytes,
        stripe_count: int,
        deadline: float,
        settled: Callable[[int], None],
        registry: JobRegistry,
    ) -> None:
        self._chunk_key = chunk_key
        self._stripe_count = stripe_count
        self._settled = settled
        self._removed = 0
        super().__init__(deadline, registry, urgent=False)

    def work(self, talk: Talk) -> bool:
        keys = [stripe_key(self._chunk_key, index) for index in range(self._stripe_count)]
        self._removed = unlink(talk, keys)
        return True

    def _answer(self, outcome: CallOutcome) -> None:
        self._settled(self._removed)


class ClearJob(CallJob):
    """SCAN one server for keys with a prefix and UNLINK them, a bounded batch each step.

    batch_keys: most keys of one UNLINK; 1 in a cluster, where keys have slots.
    """

    __slots__ = ("_batch_keys", "_cursor", "_done", "_pattern", "_prefix", "_removed")

    def __init__(
        self,
        prefix: bytes,
        deadline: float,
        done: Callable[[CallOutcome, int], None],
        registry: JobRegistry,
        batch_keys: int = _BATCH_KEYS,
    ) -> None:
        self._batch_keys = batch_keys
        self._prefix = prefix
        self._pattern = escape_pattern(prefix) + b"*"
        self._cursor = b"0"
        self._removed = 0
        self._done = done
        super().__init__(deadline, registry, urgent=False)

    def work(self, talk: Talk) -> bool:
        (reply,) = talk.call((scan_command(self._cursor, self._pattern, _BATCH_KEYS),), 1)
        match reply:
            case [bytes() as cursor, list() as found] if cursor.isdigit():
                self._cursor = cursor
            case _:
                raise RedisProtocolError("the reply to a SCAN is no cursor and keys")
        # Whatever the server matched: only what begins with the prefix is ours to delete.
        keys = [key for key in found if isinstance(key, bytes) and key.startswith(self._prefix)]
        self._removed += unlink(talk, keys, self._batch_keys)
        return self._cursor == b"0"

    def _answer(self, outcome: CallOutcome) -> None:
        self._done(outcome, self._removed)


class EachJob(CallJob):
    """EXISTS or UNLINK of keys one by one, as a cluster wants them; counts and redirections.

    Answers with a count, or the redirection that came instead, for each key in order.
    """

    __slots__ = ("_asking", "_done", "_keys", "_name", "_results")

    def __init__(
        self,
        name: bytes,
        keys: Sequence[bytes],
        deadline: float,
        done: Callable[[CallOutcome, Sequence[int | RedisRedirect]], None],
        registry: JobRegistry,
        *,
        urgent: bool,
        asking: bool = False,
    ) -> None:
        self._name = name
        self._keys = keys
        self._done = done
        self._asking = asking
        self._results: Sequence[int | RedisRedirect] = ()
        super().__init__(deadline, registry, urgent)

    def work(self, talk: Talk) -> bool:
        step = 1
        request = keys_commands(self._name, self._keys, 1)
        if self._asking:
            step = 2
            commands = [ASKING_COMMAND + keys_command(self._name, (key,)) for key in self._keys]
            request = b"".join(commands)
        replies = talk.exchange((request,), step * len(self._keys))
        self._results = [_count_or_redirect(reply) for reply in replies[step - 1 :: step]]
        return True

    def _answer(self, outcome: CallOutcome) -> None:
        self._done(outcome, self._results if outcome is CallOutcome.DONE else ())


def _count_or_redirect(reply: Reply) -> int | RedisRedirect:
    if reply == 0 or reply == 1:
        return 1 if reply else 0
    if isinstance(reply, ErrorReply):
        error = error_of(reply)
        if isinstance(error, RedisRedirect):
            return error
        raise error
    raise RedisProtocolError("the reply to a command with one key is no count of it")


def unlink(talk: Talk, keys: Sequence[bytes], batch_keys: int = _BATCH_KEYS) -> int:
    """Delete keys without blocking the server; how many there were."""
    if not keys:
        return 0
    request = keys_commands(b"UNLINK", keys, batch_keys)
    removed = 0
    for reply in talk.call((request,), -(-len(keys) // batch_keys)):
        if not isinstance(reply, int) or reply < 0:
            raise RedisProtocolError("the reply to an UNLINK is no count")
        removed += reply
    return removed


class Controller(Worker):
    """The control connection and its thread."""

    def __init__(
        self,
        name: str,
        connector: Connector,
        health: Health,
        queue: TaskQueue[CallJob],
        op_timeout_s: float,
    ) -> None:
        super().__init__(name, connector, health)
        self._queue = queue
        self._op_timeout_s = op_timeout_s
        # Held by whoever sends or receives. A connection that rests may be used by a caller.
        self._talking = threading.Lock()
        self._resting: BulkConnection | None = None
        self._begun: tuple[CallJob, Talk] | None = None

    def put(self, job: CallJob) -> None:
        """Queue a job. The first question goes out here where the connection rests.

        So the server is at work while the thread wakes up. Any thread; never waits.
        """
        if isinstance(job, QueryJob) and self._talking.acquire(blocking=False):
            try:
                if self._resting is not None and self._begun is None and not len(self._queue):
                    talk = self._new_talk(self._resting, job)
                    job.ask(talk.send_at_once)
                    self._begun = job, talk
            finally:
                self._talking.release()
        self._queue.put((job,), urgent=job.urgent)

    def serve(self, connection: BulkConnection) -> bool:
        self._resting = connection
        try:
            while connection.is_open:
                job = self._queue.take()
                if job is None:
                    return False
                with self._talking:
                    self._do(connection, job)
            return True
        finally:
            with self._talking:
                self._resting = self._begun = None

    def _do(self, connection: BulkConnection, job: CallJob) -> None:
        """Do a step of what was begun, whose replies come first, and of the job."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self._step(connection, *begun)
        if begun is None or job is not begun[0]:
            if connection.is_open:
                self._step(connection, job)
            else:
                self._queue.put((job,), urgent=True)

    def _step(self, connection: BulkConnection, job: CallJob, talk: Talk | None = None) -> None:
        """talk: the one in which its first question was sent."""
        if job.begin():
            self._work(connection, job, talk)
        elif talk is not None:
            self._finish(connection, talk)

    def _work(self, connection: BulkConnection, job: CallJob, begun: Talk | None) -> None:
        talk = begun or self._new_talk(connection, job)
        try:
            if begun is None and isinstance(job, QueryJob):
                job.ask(talk.send)
            finished = job.work(talk)
        except RedisError as error:
            self._judge(error, connection)
            if isinstance(error, RedisUnavailable) and self._may_retry(job, connection):
                self._again(job)
            else:
                late = isinstance(error, RedisTimeout)
                job.end(CallOutcome.TIMED_OUT if late else CallOutcome.UNAVAILABLE)
        except BaseException:
            job.end(CallOutcome.UNAVAILABLE)
            raise
        else:
            if finished:
                job.end()
            else:
                self._again(job)
        self._finish(connection, talk)

    def _new_talk(self, connection: BulkConnection, job: CallJob) -> Talk:
        """One budget for all round trips of a step."""
        return Talk(connection, min(job.deadline, time.monotonic() + self._op_timeout_s))

    def _finish(self, connection: BulkConnection, talk: Talk) -> None:
        """Receive what the job did not wait for: it has been answered."""
        if talk.outstanding and connection.is_open:
            try:
                talk.finish(time.monotonic() + self._op_timeout_s)
            except RedisError as error:
                self._judge(error, connection)

    def _again(self, job: CallJob) -> None:
        job.release()
        self._queue.put((job,), urgent=job.urgent)
