"""Whether a server is up (the circuit breaker), and the threads that connect to it while it is.

One thread probes. While the server is DOWN, every operation is answered UNAVAILABLE at once, and
the prober tries a new connection and a PING every `probe_interval_s`. A stopped process accepts
connections and answers nothing: the probe waits, and is answered the moment the process continues.
While the server is UP, the prober sends heartbeats, and probes at once after a time-out of a
worker. So a slow operation does not take down a server that answers, and a dead server costs one
time-out. All other threads with connections are `Worker`s.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lmcache_redis.errors import (
    ConfigError,
    RedisAuthError,
    RedisError,
    RedisProtocolError,
    RedisRedirect,
    RedisReplyError,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp.jobs import Job, Jobs, Stop, Task
from lmcache_redis.resp.net.connection import Connection, Connector
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.tiers import PlaneState

logger = logging.getLogger(__name__)

# A server that is up answers a PING within this time.
_HEARTBEAT_TIMEOUT_S = 0.5
# Wrong credentials rarely become right, and servers log every attempt.
_REFUSED_RETRY_S = 1.0
# The same sentence is logged once within this time.
_REPEAT_AFTER_S = 60.0

# A server that is up for less than this is unsteady: it is probed and logged less often.
STEADY_AFTER_S = 5.0
_LONGEST_PAUSE_S = 1.0


@dataclass(slots=True)
class Breaker:
    """DOWN until a probe is answered, UP until a definite failure.

    While DOWN, only probes are sent, at `next_probe_at`. While UP, heartbeats are, and a probe at
    once when `suspected`. Times are monotonic seconds. A method that can change `up` returns
    whether it did, so that a change is logged once. Up and down in quick succession (a probe may
    succeed while workers fail, as when only one more connection is allowed) counts as `unsteady`
    and lengthens the pause, up to a second.
    """

    probe_interval_s: float
    heartbeat_s: float
    up: bool = False
    probed: bool = False
    reason: str = "Redis has not been asked yet"
    since: float = 0.0
    next_probe_at: float = 0.0
    unsteady: int = 0

    def answered(self, now: float) -> bool:
        """A probe was answered."""
        changed = not self.up
        if changed:
            self.since = now
            self.reason = ""
        self.up = True
        self.probed = True
        self.next_probe_at = now + self.heartbeat_s
        return changed

    def failed(self, now: float, reason: str, retry_after_s: float = 0.0) -> bool:
        """A probe failed, or an operation failed definitely: schedule the next probe."""
        changed = self.up or not self.probed
        if self.up:
            self.unsteady = self.unsteady + 1 if now - self.since < STEADY_AFTER_S else 0
            self.since = now
        self.up = False
        self.probed = True
        self.reason = reason
        pause_s = min(self.probe_interval_s * 2 ** min(self.unsteady, 8), _LONGEST_PAUSE_S)
        self.next_probe_at = now + max(self.probe_interval_s, pause_s, retry_after_s)
        return changed

    def suspected(self, now: float) -> None:
        """An operation timed out: the server may only be slow. Probe now."""
        if self.up:
            self.next_probe_at = now


class Health:
    """Owns the prober thread and its connection.

    on_down runs on the thread that noticed, after `is_up` has become False.
    """

    def __init__(
        self, connector: Connector, options: RedisOptions, on_down: Callable[[], None]
    ) -> None:
        self.is_up = False
        self.errors = 0
        self._connector = connector
        self._where = connector.endpoint.where
        self._op_timeout_s = op_timeout_s = options.op_timeout_s
        # A user who grants operations more time grants it to PINGs, too.
        self._heartbeat_timeout_s = min(op_timeout_s, max(_HEARTBEAT_TIMEOUT_S, op_timeout_s / 4))
        self._on_down = on_down
        since = time.monotonic()
        self._breaker = Breaker(options.probe_interval_s, options.heartbeat_s, since=since)
        self._last_error = ""
        self._logged_at: dict[str, float] = {}
        self._logged_down = False
        self._closing = False
        self._changed = threading.Condition(threading.Lock())
        self.thread = threading.Thread(target=self._run, name="lmcr-health", daemon=True)

    # ------------------------------------------------------------ any thread

    @property
    def state(self) -> PlaneState:
        with self._changed:
            breaker = self._breaker
            reason = breaker.reason or self._last_error
            return PlaneState(breaker.up, breaker.probed, reason, breaker.since)

    def wait_up(self) -> bool:
        """Wait until the server is up; False if the plane is closed first."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_up or self._closing)
            return not self._closing

    def wait_probed(self, timeout_s: float) -> PlaneState:
        """Wait for the end of the first probe, at most `timeout_s`; return the state then."""
        with self._changed:
            self._changed.wait_for(lambda: self._breaker.probed or self._closing, timeout_s)
        return self.state

    def suspect(self, error: RedisError) -> None:
        """An operation timed out: have the prober probe."""
        with self._changed:
            self._note(error)
            self._breaker.suspected(time.monotonic())
            self._changed.notify_all()

    def down(self, error: RedisError | ConfigError, tried_at: float) -> None:
        """The server was unusable at `tried_at`: it refused the connection, or said so."""
        if self.state.since <= tried_at or not self.is_up:
            # Otherwise a later probe has found it up.
            self._failed(error)

    def note(self, error: RedisError) -> None:
        """An operation failed; others may succeed. Logged once a minute."""
        with self._changed:
            self._note(error)
            log = self._is_new(str(error))
        if log:
            logger.warning("%s", error)

    def close(self) -> None:
        """Wake all waiting threads. The connector must be aborted for the prober to end."""
        with self._changed:
            self._closing = True
            self.is_up = False
            self._changed.notify_all()

    # ---------------------------------------------------------- prober thread

    def _run(self) -> None:
        connection: Connection | None = None
        try:
            while self._wait_until_due():
                kept = self._probe(connection)
                if connection is not None and connection is not kept:
                    connection.close()
                connection = kept
        finally:
            if connection is not None:
                connection.close()

    def _wait_until_due(self) -> bool:
        with self._changed:
            while not self._closing:
                left = self._breaker.next_probe_at - time.monotonic()
                if left <= 0:
                    return True
                self._changed.wait(left)
            return False

    def _probe(self, connection: Connection | None) -> Connection | None:
        """Probe once; return the connection to keep for the next probe."""
        if connection is not None and connection.is_open and self.is_up:
            try:
                self._ping(connection, self._heartbeat_timeout_s)
                return connection
            except RedisError as error:
                # A lost connection may mean a restart: only a new one can tell.
                lost = isinstance(error, RedisUnavailable) and not connection.is_open
                connection.close()
                if not lost:
                    self._failed(error)
                    return None
        # A server without room for more connections is down for every new connection.
        connection = Connection(self._connector, "lmcache-redis:health")
        try:
            connection.open()
            self._ping(connection, self._op_timeout_s)
        except (RedisError, ConfigError) as error:
            connection.close()
            self._failed(error)
            return None
        return connection

    def _ping(self, connection: Connection, timeout_s: float) -> None:
        try:
            connection.ping(time.monotonic() + timeout_s)
        except RedisReplyError as error:
            # The server answers. A user who may not PING may still GET and SET.
            logger.debug("PING is answered with an error: %s", error)
        self._answered()

    def _answered(self) -> None:
        with self._changed:
            now = time.monotonic()
            since = self._breaker.since
            first = not self._breaker.probed
            changed = self._breaker.answered(now)
            if self._closing or not changed:
                return
            self.is_up = True
            self._changed.notify_all()
        if first:
            logger.info("connected to Redis at %s", self._where)
        elif self._logged_down:
            logger.info("Redis at %s is up again after %.1f s", self._where, now - since)

    def _failed(self, error: RedisError | ConfigError) -> None:
        retry_after_s = _REFUSED_RETRY_S if isinstance(error, (RedisAuthError, ConfigError)) else 0
        with self._changed:
            if self._closing:
                return
            self._note(error)
            was_up = self.is_up
            changed = self._breaker.failed(time.monotonic(), str(error), retry_after_s)
            self.is_up = False
            self._changed.notify_all()
            # If a server changes every second, log the same line once a minute.
            log = self._is_new(str(error)) or (changed and not self._breaker.unsteady)
            self._logged_down = log or (self._logged_down and not changed)
        if log:
            logger.warning("Redis is down, nothing is loaded or stored: %s", error)
        if was_up:
            self._on_down()

    # ---------------------------------------------------------- under the lock

    def _note(self, error: RedisError | ConfigError) -> None:
        self.errors += 1
        self._last_error = str(error)

    def _is_new(self, text: str) -> bool:
        now = time.monotonic()
        if now - self._logged_at.get(text, -_REPEAT_AFTER_S) < _REPEAT_AFTER_S:
            return False
        # Error replies are part of the text: a server that varies them must not fill the memory.
        if len(self._logged_at) >= 64:
            self._logged_at.clear()
        self._logged_at[text] = now
        return True


class Server(Protocol):
    """The interface of `node.Node` for its threads."""

    connector: Connector
    health: Health
    jobs: Jobs
    options: RedisOptions

    def redirect(self, task: Task, redirect: RedisRedirect) -> bool:
        """Queue a redirected stripe at another node; False if there is none."""

    def is_replica(self) -> None:
        """The server is a replica: the map is outdated."""


class Worker(ABC):
    """A thread that connects whenever the server is up, and then calls `serve`.

    It connects before it takes work, so an unreachable server delays no job.
    """

    def __init__(self, name: str, server: Server) -> None:
        self.name = name
        self.connections_lost = 0
        self._server = server
        self._jobs = server.jobs
        self._health = server.health
        self.thread = threading.Thread(target=self._run, name=f"lmcr-{name}", daemon=True)

    @abstractmethod
    def serve(self, connection: Connection) -> bool:
        """Work until the connection is unusable or the queue is closed.

        Returns False if the queue is closed. Otherwise it has closed the connection. Answers each
        job that it takes, whatever happens.
        """

    def _new_connection(self) -> Connection:
        return Connection(self._server.connector, f"lmcache-redis:{self.name}")

    def _run(self) -> None:
        failures = 0
        while self._health.wait_up():
            connection = self._new_connection()
            try:
                failures = self._connect(connection, failures)
                if connection.is_open and not self._serve_safely(connection):
                    return
            finally:
                connection.close()

    def _connect(self, connection: Connection, failures: int) -> int:
        """Try once; return how many attempts in a row have failed."""
        tried_at = time.monotonic()
        try:
            connection.open()
        except (RedisError, ConfigError) as error:
            # A single failure may be a server that has just restarted: try again at once.
            if failures or not isinstance(error, RedisUnavailable):
                self._health.down(error, tried_at)
            return failures + 1
        return 0

    def _serve_safely(self, connection: Connection) -> bool:
        try:
            return self.serve(connection)
        except Exception:
            # A bug of ours: `serve` has answered its job; the thread continues.
            logger.exception("a thread of the Redis plane met a bug")
            return True

    def _may_retry(self, job: Job[Any], connection: Connection) -> bool:
        """Whether to retry a job that lost its connection.

        An idle connection that dies unnoticed when the server restarts is not an outage. There is
        no retry if the connection was opened after the job was created.
        """
        lost = not connection.is_open
        return lost and connection.opened_at < job.created_at and self._health.is_up

    @staticmethod
    def _stop_for(error: RedisError) -> Stop:
        """Why a job ends that lost its connection, and is not retried."""
        return Stop.TIMED_OUT if isinstance(error, RedisTimeout) else Stop.UNAVAILABLE

    def _judge(self, error: RedisError, connection: Connection) -> None:
        """Update connection and health after an operation has failed."""
        if isinstance(error, RedisTimeout):
            if not connection.is_open:
                self.connections_lost += 1
                self._health.suspect(error)
        elif isinstance(error, RedisProtocolError):
            self.connections_lost += 1
            self._health.note(error)
        elif isinstance(error, RedisUnavailable):
            if connection.is_open:
                # The server said so itself (LOADING, BUSY): it would refuse any request.
                connection.close()
                self._health.down(error, time.monotonic())
            else:
                # Lost: the attempt to connect again tells whether the server is there.
                self.connections_lost += 1
        else:
            if isinstance(error, RedisAuthError):
                # Credentials were revoked: connecting again shows it.
                connection.close()
            self._health.note(error)
