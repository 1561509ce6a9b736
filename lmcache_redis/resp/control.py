"""The control connection of a server: questions about keys, and removals.

A question is a generator of `steps`. Urgent questions go first; the others wait between two steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from lmcache_redis.errors import RedisError, RedisUnavailable
from lmcache_redis.resp.jobs import Job
from lmcache_redis.resp.net.connection import Connection, Pipeline
from lmcache_redis.resp.queues import TaskQueue
from lmcache_redis.resp.steps import Request, Steps
from lmcache_redis.resp.worker import DataServer, Worker
from lmcache_redis.tiers import CallOutcome


class KeyQuestion(Job[CallOutcome]):
    """Steps on the control connection of one server.

    make_steps: called for each attempt. done: called with the outcome and the result of the steps,
    None unless DONE. next_request: the request of the next step; None before the first.
    """

    __slots__ = ("_done", "_make_steps", "_result", "_steps", "is_urgent", "next_request")
    good = CallOutcome.DONE

    def __init__(
        self,
        make_steps: Callable[[], Steps[Any]],
        deadline: float,
        done: Callable[[CallOutcome, Any], None],
        *,
        is_urgent: bool,
    ) -> None:
        super().__init__(1, deadline, time.monotonic())
        self.is_urgent = is_urgent
        self.next_request: Request | None = None
        self._make_steps = make_steps
        self._done = done
        self._result: Any = None

    def first_request(self) -> Request:
        """Begin an attempt; return the request of its first step."""
        self._steps = self._make_steps()
        return next(self._steps)

    def advance_steps(self, pipeline: Pipeline) -> bool:
        """Receive the replies to the last request; True if that was the last step.

        Raises RedisError.
        """
        try:
            self.next_request = self._steps.send(pipeline)
        except StopIteration as end:
            self._result = end.value
            return True
        return False

    def answer(self, outcome: CallOutcome) -> None:
        self._done(outcome, self._result if outcome is CallOutcome.DONE else None)


class Controller(Worker):
    """The control connection of a server and its thread."""

    def __init__(self, server: DataServer) -> None:
        super().__init__("control", server)
        self.queue: TaskQueue[KeyQuestion] = TaskQueue()
        # Held while a thread sends or receives: callers may use an idle connection.
        self._in_use = threading.Lock()
        self._connection: Connection | None = None
        self._asked: tuple[KeyQuestion, Pipeline] | None = None

    def put(self, question: KeyQuestion) -> None:
        """Enqueue a question. If it is urgent and the connection is idle, send its first request.

        The server works on it while the control thread wakes up. Called on any thread; does not
        block.
        """
        if question.is_urgent and self._in_use.acquire(blocking=False):
            try:
                connection = self._connection
                if (
                    connection is not None
                    and self._asked is None
                    and not len(self.queue)
                    and not self._is_outdated(connection)
                ):
                    pipeline = self._new_pipeline(connection, question)
                    pipeline.send_at_once(*question.first_request())
                    self._asked = question, pipeline
            finally:
                self._in_use.release()
        self.queue.put((question,), urgent=question.is_urgent)

    def serve(self, connection: Connection) -> bool:
        self._connection = connection
        try:
            while connection.is_open:
                question = self.queue.take()
                if question is None:
                    return False
                with self._in_use:
                    if self._asked is None and self._is_outdated(connection):
                        connection.close()
                    self._take_turn(connection, question)
            return True
        finally:
            with self._in_use:
                self._connection = self._asked = None

    def _is_outdated(self, connection: Connection) -> bool:
        return self._server.write_state.is_outdated(connection.opened_at)

    def _take_turn(self, connection: Connection, question: KeyQuestion) -> None:
        """A step of the question that a caller sent, whose replies come first, and of this one."""
        asked, self._asked = self._asked, None
        if asked is not None:
            self._take_step(connection, *asked)
        if asked is None or question is not asked[0]:
            if connection.is_open:
                self._take_step(connection, question)
            else:
                self.queue.put((question,), urgent=True)

    def _take_step(
        self, connection: Connection, question: KeyQuestion, asked: Pipeline | None = None
    ) -> None:
        """Take a step. asked: the pipeline in which the first request was sent."""
        if self._jobs.begin(question):
            pipeline = asked or self._new_pipeline(connection, question)
            try:
                if asked is None:
                    pipeline.send(*(question.next_request or question.first_request()))
                is_last = question.advance_steps(pipeline)
            except RedisError as error:
                self._fail(connection, question, error)
            except BaseException:
                # A bug of ours. The connection is closed: the next must not get these replies.
                self._jobs.end(question, CallOutcome.UNAVAILABLE)
                raise
            else:
                if is_last:
                    self._jobs.end(question)
                else:
                    self._put_back(question)
            self._finish(connection, pipeline)
        elif asked is not None:
            self._finish(connection, asked)

    def _fail(self, connection: Connection, question: KeyQuestion, error: RedisError) -> None:
        self._judge(error, connection)
        if isinstance(error, RedisUnavailable) and self._may_retry(question, connection):
            # From the first step: cursors and counts are those of the lost server.
            question.next_request = None
            self._put_back(question)
        else:
            self._jobs.end(question, CallOutcome[self._stop_for(error).name])

    def _new_pipeline(self, connection: Connection, question: KeyQuestion) -> Pipeline:
        """A step has one deadline for all its round trips."""
        return Pipeline(connection, min(question.deadline, self._op_deadline))

    @property
    def _op_deadline(self) -> float:
        return time.monotonic() + self._server.options.op_timeout_s

    def _finish(self, connection: Connection, pipeline: Pipeline) -> None:
        """Receive and drop the replies that the question did not need."""
        if pipeline.outstanding and connection.is_open:
            try:
                pipeline.finish(self._op_deadline)
            except RedisError as error:
                self._judge(error, connection)

    def _put_back(self, question: KeyQuestion) -> None:
        self._jobs.release((question,))
        self.queue.put((question,), urgent=question.is_urgent)
