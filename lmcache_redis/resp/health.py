# SPDX-License-Identifier: Apache-2.0
"""Whether a server is up and takes writes.

The control thread probes. While the server is DOWN, every operation is answered UNAVAILABLE at
once, and the thread tries a new connection and a PING, at first every `probe_interval_s`, then less
often. A stopped process accepts connections and answers nothing: the probe waits, and is answered
the moment the process continues. While the server is UP, the thread sends heartbeats between
questions, and probes at once after a time-out of another thread. So a slow operation does not take
down a server that answers, and a dead server costs one time-out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

from lmcache_redis.errors import (
    ConfigError,
    RedisAuthError,
    RedisClusterDown,
    RedisError,
    RedisFull,
    RedisProtocolError,
    RedisReadOnly,
    RedisRedirect,
    RedisTimeout,
    RedisUnavailable,
    RedisWriteRefused,
)
from lmcache_redis.resp.failures import Failures
from lmcache_redis.resp.jobs import Jobs, StripeTask, TaskQueue, backoff_s, jittered
from lmcache_redis.resp.net.advice import LOST, SILENT, advised
from lmcache_redis.resp.net.connection import Connection, Connector
from lmcache_redis.resp.net.endpoint import Endpoint
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.resp.sources import Doubt
from lmcache_redis.tiers import CallOutcome, Operation, PlaneState, WriteOutcome

logger = logging.getLogger(__name__)

# Wrong credentials rarely become right, and servers log every attempt.
_REFUSED_RETRY_S = 1.0
# The same sentence is logged once within this time.
_REPEAT_AFTER_S = 60.0

# A server that is up for less than this is unsteady: it is probed and logged less often.
STEADY_AFTER_S = 5.0
LONGEST_PAUSE_S = 2.0
# After a refused write, others are not sent for about this long.
WRITE_PAUSE_S = 0.5
_REFUSALS = {
    RedisFull: WriteOutcome.FULL,
    RedisClusterDown: WriteOutcome.UNAVAILABLE,
    RedisReadOnly: WriteOutcome.REJECTED,
    RedisWriteRefused: WriteOutcome.REJECTED,
}
# The least time between two moments at which all connections are replaced.
_RENEW_EVERY_S = 5.0


class RepeatedLines:
    """Lines of a log that may come in bursts: each is logged once a minute."""

    def __init__(self) -> None:
        self._logged_at: dict[str, float] = {}

    def is_new(self, text: str) -> bool:
        """Whether to log it now."""
        now = time.monotonic()
        if now - self._logged_at.get(text, -_REPEAT_AFTER_S) < _REPEAT_AFTER_S:
            return False
        # Error replies are part of the text: a server that varies them must not fill the memory.
        if len(self._logged_at) >= 64:
            self._logged_at.clear()
        self._logged_at[text] = now
        return True


class Health:
    """Whether a server is up, and when to probe it.

    A server that is up and down in quick succession is probed less often, too: a probe may succeed
    while workers fail, as when only one more connection is allowed. Pauses have jitter: the agents
    of a fleet do not all knock at once.
    """

    def __init__(self, server: DataServer) -> None:
        self._server = server
        self._state = PlaneState(False, False, "Redis has not been asked yet")
        self._since = time.monotonic()  # when this state began
        self._next_probe_at = 0.0
        self._failures = 0  # since the server was last steady
        self.failures = Failures(server.connector.endpoint.where)
        self._lines = RepeatedLines()
        self._logged_down = False
        self.has_answered = False  # at any time
        self._closing = False
        self._changed = threading.Condition(threading.Lock())

    @property
    def is_up(self) -> bool:
        return self._state.up and not self._closing

    @property
    def state(self) -> PlaneState:
        """Its reason says why operations fail, also while the server is up."""
        state, errors = self._state, self.failures.errors
        if not errors:
            return state
        return replace(state, reason=state.reason or errors[0].text, errors=errors)

    def wait_up(self) -> bool:
        """Wait until the server is up; False if the plane is closed first."""
        with self._changed:
            self._changed.wait_for(lambda: self._state.up or self._closing)
            return not self._closing

    def suspect(self, error: RedisError, operation: Operation) -> None:
        """An operation timed out: the server may only be slow. Have it probed."""
        self.note(RedisTimeout(advised(str(error), SILENT)), operation)
        with self._changed:
            if self._state.up:
                self._next_probe_at = time.monotonic()
                self._server.questions.put((None,), urgent=True)

    def down(self, error: RedisError | ConfigError, tried_at: float) -> None:
        """The server was unusable at `tried_at`: it refused the connection, or said so."""
        if self.is_up and self._since <= tried_at:
            # Otherwise a later probe has found it up, or it is down.
            self.failed(error)

    def note(self, error: RedisError, operation: Operation) -> None:
        """An operation failed; others may succeed. Logged once a minute."""
        with self._changed:
            self._count(error, operation)
            log = self._lines.is_new(str(error))
        if log:
            logger.warning("%s", error)

    def _count(self, error: RedisError | ConfigError, operation: Operation) -> None:
        self.failures.failed(operation, error)
        self._server.jobs.count("errors")

    def close(self) -> None:
        """Wake all waiting threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    # --------------------------------------------------------- control thread

    @property
    def due_in_s(self) -> float:
        """Until the next probe."""
        return max(0.0, self._next_probe_at - time.monotonic())

    def wait_due(self) -> bool:
        """Wait until it is time to connect, which it is while the server is up; False if closed."""
        with self._changed:
            while not (self._closing or self._state.up) and (left_s := self.due_in_s):
                self._changed.wait(left_s)
            return not self._closing

    def answered(self) -> None:
        with self._changed:
            now, before = time.monotonic(), self._state
            self._next_probe_at = now + jittered(self._server.options.heartbeat_s)
            if self._closing or before.up:
                return
            # In this order: `down` reads both without the lock.
            down_s, self._since = now - self._since, now
            self._state = PlaneState(True, True, "")
            self.failures.outage_is_over()
            was_logged, self._logged_down = self._logged_down, False
            self._changed.notify_all()
        if not self.has_answered:
            self.has_answered = True
            self._server.came_up()
        where = self._server.connector.endpoint.where
        if not before.probed:
            logger.info("connected to Redis at %s", where)
        elif was_logged:
            logger.info("Redis at %s is up again after %.1f s", where, down_s)

    def failed(self, error: RedisError | ConfigError) -> None:
        """A probe failed, or an operation failed definitely."""
        retry_after_s = _REFUSED_RETRY_S if isinstance(error, (RedisAuthError, ConfigError)) else 0
        with self._changed:
            if self._closing:
                return
            now, before = time.monotonic(), self._state
            if before.up and now - self._since >= STEADY_AFTER_S:
                self._failures = 0
            first_s = self._server.options.probe_interval_s
            pause_s = backoff_s(self._failures, first_s, LONGEST_PAUSE_S)
            self._next_probe_at = now + max(pause_s, jittered(retry_after_s))
            self._failures += 1
            self._state = PlaneState(False, True, str(error))
            if before.up:
                self._since = now
            self._count(error, Operation.PROBE)
            self._changed.notify_all()
            log = self._lines.is_new(str(error))
            self._logged_down |= log
        if log:
            logger.warning("Redis is down, nothing is loaded or stored: %s", error)
        if before.up or not before.probed:
            self._server.went_down()
        if before.up:
            self._server.questions.put((None,), urgent=True)


class DataServer:
    """A server as its threads see it: how to connect, whether it is up, whether it takes writes.

    A server that refuses writes (full, a replica, without replicas or disk) serves reads as before.
    The writes of the next moment are refused without being sent.

    look_up: has the servers looked up soon; None: the URL itself names this one. questions: of the
    control thread (`control.KeyQuestion`); None has it look at `health`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        options: RedisOptions,
        jobs: Jobs,
        look_up: Callable[[Doubt], None] | None = None,
    ) -> None:
        self.options = options
        self.jobs = jobs
        self.connector = Connector(endpoint, options.connect_timeout_s, options.op_timeout_s)
        self.health = Health(self)
        self.questions: TaskQueue[Any] = TaskQueue()
        self._look_up = look_up
        self.came_up: Callable[[], None] = lambda: None  # called when it answers first
        self._refusal = WriteOutcome.REJECTED
        self._refused_until = 0.0
        self._renewed_at = 0.0

    def open(self, name: str, deadline: float = inf) -> Connection:
        """A new connection. Raises what `Connector.open` raises."""
        connection = self.connector.open(f"lmcache-redis:{name}", deadline)
        self.jobs.count("connects")
        return connection

    def went_down(self) -> None:
        """Called on the thread that noticed, after `health.is_up` has become False."""
        self.jobs.stop_all(CallOutcome.UNAVAILABLE, node=self)
        self.map_is_old(Doubt.BROKEN)

    def redirected(self, task: StripeTask, error: RedisRedirect) -> bool:
        """Whether somebody sees to a stripe in flight that was answered so."""
        return False

    def map_is_old(self, doubt: Doubt = Doubt.MOVED) -> None:
        if self._look_up is not None:
            self._look_up(doubt)

    def note(self, error: RedisError, operation: Operation) -> None:
        """An operation failed, others may succeed."""
        if isinstance(error, RedisRedirect):
            self.map_is_old()
        elif isinstance(error, (RedisClusterDown, RedisReadOnly)):
            self.map_is_old(Doubt.BROKEN)
        if self._look_up is None and isinstance(error, RedisReadOnly):
            self._renew()
        # In a cluster, redirections are no fault.
        if self._look_up is None or not isinstance(error, RedisRedirect):
            self.health.note(error, operation)

    def _renew(self) -> None:
        """It is a replica. Its name, or what is between, may lead to another server by now."""
        now = time.monotonic()
        if now - self._renewed_at >= _RENEW_EVERY_S:
            self._renewed_at = now
            self.connector.drop()

    @property
    def refusal(self) -> WriteOutcome | None:
        """The outcome of writes now; None: they may be sent."""
        return self._refusal if time.monotonic() < self._refused_until else None

    def refuses_writes(self, error: RedisError) -> WriteOutcome:
        """The server refused a write: pause writes; return the outcome of this one."""
        self.refused(error, Operation.STORE)
        refusal = _REFUSALS.get(type(error))
        if refusal is None:
            # About this write alone, as far as one can tell.
            is_moved = isinstance(error, RedisRedirect)
            return WriteOutcome.UNAVAILABLE if is_moved else WriteOutcome.REJECTED
        now = time.monotonic()
        self._refusal, self._refused_until = refusal, now + jittered(WRITE_PAUSE_S)
        return refusal

    def refused(self, error: RedisError, operation: Operation) -> None:
        """A key was refused in an answer to a question about several."""
        self._count_reply(error)
        self.note(error, operation)

    def _count_reply(self, error: RedisError) -> None:
        if error.refusal:
            self.jobs.count(f"refused {error.refusal}")

    def judge(self, error: RedisError, connection: Connection, operation: Operation) -> None:
        """What an error says of the server and of the connection on which it came."""
        self._count_reply(error)
        is_answer = connection.is_open
        if not is_answer or isinstance(error, RedisProtocolError):
            self.jobs.count("connections_lost")
        if isinstance(error, RedisTimeout):
            if not is_answer:
                self.health.suspect(error, operation)
        elif isinstance(error, RedisUnavailable) and not isinstance(error, RedisClusterDown):
            if not is_answer:
                # The attempt to connect again tells whether the server is there.
                if self.health.is_up:
                    self.health.note(RedisUnavailable(advised(str(error), LOST)), operation)
            else:
                # The server said so itself (LOADING, BUSY): it would refuse any request.
                connection.close()
                self.health.failures.failed(operation, error)
                self.health.down(error, time.monotonic())
        else:
            self.note(error, operation)
            if isinstance(error, RedisAuthError):
                # Credentials were revoked: connecting again shows it.
                connection.close()


def stop_for(error: RedisError) -> CallOutcome:
    """Why a job ends that lost its connection."""
    return CallOutcome.TIMED_OUT if isinstance(error, RedisTimeout) else CallOutcome.UNAVAILABLE
