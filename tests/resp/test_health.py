# SPDX-License-Identifier: Apache-2.0
"""Whether a server is up: the decisions, the prober and what workers say of their server."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_redis.errors import (
    RedisAuthError,
    RedisClusterDown,
    RedisError,
    RedisFull,
    RedisProtocolError,
    RedisReadOnly,
    RedisRedirect,
    RedisReplyError,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp import RedisOptions, health
from lmcache_redis.resp.control import Controller
from lmcache_redis.resp.health import DataServer, Health, RepeatedLines
from lmcache_redis.resp.jobs import Jobs, TaskQueue
from lmcache_redis.resp.lanes import BulkWorker
from lmcache_redis.resp.net.advice import SILENT
from lmcache_redis.resp.net.connection import Connection
from lmcache_redis.resp.options import parse_deployment
from lmcache_redis.resp.sources import Doubt
from lmcache_redis.resp.transfers import Gets
from lmcache_redis.tiers import CallOutcome, Operation, PlaneState, WriteOutcome
from tests.resp.helpers import SLOW_S, open_streams
from tests.resp.trickling import LyingServer
from tests.servers import RedisServer


@pytest.fixture(autouse=True)
def _without_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)


class Clock:
    """The health of a server, told what probes have found, and when."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(health.time, "monotonic", lambda: self.now)
        options = RedisOptions("redis://127.0.0.1:1")
        connector = SimpleNamespace(endpoint=parse_deployment(options).server)
        server: Any = SimpleNamespace(
            options=options,
            connector=connector,
            jobs=Jobs(),
            questions=TaskQueue(),
            went_down=lambda: self.went_down_at.append(self.now),
            came_up=lambda: self.came_up_at.append(self.now),
        )
        self.went_down_at: list[float] = []
        self.came_up_at: list[float] = []
        self.health = Health(server)

    def answered(self, now: float) -> None:
        self.now = now
        self.health.answered()

    def failed(self, now: float, error: RedisError | None = None) -> float:
        """How long the next probe is put off."""
        self.now = now
        self.health.failed(error or RedisUnavailable("gone"))
        return round(self.health._next_probe_at - now, 3)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_up_and_down_are_told_once_each(clock: Clock) -> None:
    assert clock.health.state == PlaneState(False, False, "Redis has not been asked yet")
    assert clock.health._since == 0.0
    assert clock.health._next_probe_at <= 0.0
    for now in (10.0, 12.0):
        clock.answered(now)
        assert clock.health.state == PlaneState(True, True, "")
        assert clock.health._since == 10.0
        assert clock.health._next_probe_at == now + 2.0
    for now in (15.0, 15.2):
        clock.failed(now)
        found = clock.health.state
        assert (found.up, found.probed, found.reason) == (False, True, "gone")
        assert clock.health._since == 15.0
    assert clock.went_down_at == [15.0]
    assert len(clock.came_up_at) == 1
    (error,) = clock.health.state.errors
    assert (error.text, error.count, error.at_s) == ("gone", 2, 15.2)
    clock.answered(16.0)
    assert clock.health.state == PlaneState(True, True, "")


def test_a_suspicion_moves_the_heartbeat_only(clock: Clock) -> None:
    clock.failed(0.5)
    clock.health.suspect(RedisTimeout("slow"), Operation.ASK)
    assert clock.health._next_probe_at == 0.7
    clock.answered(1.0)
    clock.now = 1.5
    clock.health.suspect(RedisTimeout("slow"), Operation.ASK)
    assert clock.health.is_up
    assert clock.health._next_probe_at == 1.5


def test_a_refusal_is_not_retried_soon(clock: Clock) -> None:
    assert clock.failed(1.0, RedisAuthError("wrong password")) == 1.0


def test_a_server_that_stays_down_is_asked_less_and_less_often(clock: Clock) -> None:
    assert [clock.failed(now) for now in range(6)] == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_an_unsteady_server_is_asked_less_often(clock: Clock) -> None:
    pauses = []
    for number in range(6):
        clock.answered(3.0 * number)
        pauses.append(clock.failed(3.0 * number + 0.5))
    assert pauses == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    clock.answered(100.0)
    assert clock.failed(110.0) == 0.2


def test_probes_of_many_planes_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pauses = sorted(Clock(monkeypatch).failed(0.0) for _ in range(200))
    assert 0.1 <= pauses[0] < 0.12
    assert 0.18 < pauses[-1] <= 0.2
    assert pauses[50] < pauses[150] - 0.03


@pytest.fixture
def data_server() -> DataServer:
    options = RedisOptions("redis://127.0.0.1:1")
    return DataServer(parse_deployment(options).server, options, Jobs())


def test_refused_writes_are_not_sent_for_a_moment(clock: Clock, data_server: DataServer) -> None:
    server = data_server
    assert server.refusal is None
    assert server.refuses_writes(RedisReplyError("ERR")) is WriteOutcome.REJECTED
    assert server.refusal is None, "that was about one write"
    assert server.refuses_writes(RedisFull("OOM")) is WriteOutcome.FULL
    assert server.refusal is WriteOutcome.FULL
    clock.now += health.WRITE_PAUSE_S + 0.001
    assert server.refusal is None


def test_connections_to_a_replica_are_renewed_every_few_seconds(
    clock: Clock, data_server: DataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[float] = []
    monkeypatch.setattr(data_server.connector, "drop", lambda: dropped.append(clock.now))
    for clock.now in (100.0, 104.0, 105.0):
        assert data_server.refuses_writes(RedisReadOnly("READONLY")) is WriteOutcome.REJECTED
    assert dropped == [100.0, 105.0]


# ------------------------------------------------------------------- a prober


class Prober(DataServer):
    """The health of a server, probed when the test says so. answer: as of a `LyingServer`."""

    def __init__(self, server: LyingServer, **options: Any) -> None:
        times = {"connect_timeout_s": SLOW_S, "op_timeout_s": SLOW_S}
        times |= {"probe_interval_s": 0.01, "heartbeat_s": 0.01}
        settings = RedisOptions(server.url, **times | options)
        self.outages = self.maps_are_old = 0
        super().__init__(parse_deployment(settings).server, settings, Jobs(), self._old)
        self.step = Controller(self)._step

    def went_down(self) -> None:
        assert not self.health.is_up
        self.outages += 1

    def _old(self, doubt: Doubt) -> None:
        self.maps_are_old += 1

    @property
    def connects(self) -> int:
        return self.jobs.counts["connects"]

    @property
    def errors(self) -> int:
        return self.jobs.counts["errors"]

    def down(self, text: str = "gone") -> None:
        self.health.down(RedisUnavailable(text), time.monotonic())


@pytest.fixture
def says() -> dict[bytes, bytes]:
    """What the server of the test says to a command, by its first word."""
    return {}


@pytest.fixture
def probed(says: dict[bytes, bytes], caplog: pytest.LogCaptureFixture) -> Iterator[LyingServer]:
    caplog.set_level(logging.INFO, health.__name__)
    with LyingServer(lambda words: says.get(words[0])) as server:
        yield server


def close(prober: Prober) -> None:
    prober.health.close()
    assert not prober.step()
    assert open_streams(prober.connector) == 0


@pytest.fixture
def prober(probed: LyingServer) -> Iterator[Prober]:
    prober = Prober(probed)
    yield prober
    close(prober)


def pings(server: LyingServer) -> int:
    return sum(words[0] == b"PING" for words in server.commands)


def test_a_server_is_up_once_a_probe_was_answered(
    probed: LyingServer, caplog: pytest.LogCaptureFixture
) -> None:
    prober = Prober(probed)
    assert (prober.health.is_up, prober.health.state.probed) == (False, False)
    assert prober.health.state.reason == "Redis has not been asked yet"
    for number in range(1, 4):
        assert prober.step()
        assert prober.health.is_up
        assert prober.health.wait_up()
        assert (pings(probed), prober.connects) == (number, 1)
    assert caplog.text.count("connected to Redis at") == 1
    prober.connector.drop()
    assert prober.step()
    assert prober.step()
    assert (pings(probed), prober.connects, open_streams(prober.connector)) == (4, 2, 1)
    close(prober)
    assert not prober.health.is_up
    assert not prober.health.wait_up()
    assert prober.outages == 0


def test_threads_wait_until_a_server_is_up(prober: Prober) -> None:
    woken: list[tuple[bool, bool]] = []

    def wait() -> None:
        woken.append((prober.health.wait_up(), prober.health.is_up))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    assert woken == []
    prober.step()
    thread.join(10)
    assert woken == [(True, True)]


@pytest.mark.parametrize("reply", [b"no reply\r\n", b"-NOAUTH Authentication required.\r\n"])
def test_a_heartbeat_that_fails_takes_the_server_down(
    prober: Prober,
    says: dict[bytes, bytes],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    reply: bytes,
) -> None:
    monkeypatch.setattr(health, "_REFUSED_RETRY_S", 0.01)
    prober.step()
    says[b"PING"] = reply
    prober.step()
    assert not prober.health.is_up
    assert (prober.outages, prober.connects) == (1, 1), "it tries no other connection"
    assert open_streams(prober.connector) == 0
    prober.step()
    assert (prober.outages, prober.connects) == (1, 2)
    assert open_streams(prober.connector) == 0
    says.clear()
    prober.step()
    assert prober.health.is_up
    assert "is up again after" in caplog.text


def test_a_heartbeat_has_the_time_that_operations_have(
    probed: LyingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_s: list[float] = []

    def call(connection: Connection, request: bytes, count: int, deadline: float) -> list[bytes]:
        given_s.append(deadline - time.monotonic())
        return [b"PONG"]

    monkeypatch.setattr(Connection, "call", call)
    for op_timeout_s in (0.45, 1.0, 8.0):
        prober = Prober(probed, op_timeout_s=op_timeout_s)
        prober.step()
        prober.step()
        close(prober)
    expected_s = [0.45, 0.45, 1.0, 0.5, 8.0, 2.0]  # of a probe, and of a heartbeat after it
    for given, expected in zip(given_s, expected_s, strict=True):
        assert expected - 0.2 < given <= expected


def test_an_unsteady_server_is_logged_once(
    prober: Prober, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        prober.step()
        prober.down()
        assert not prober.health.is_up
    prober.step()
    assert prober.outages == 3
    assert caplog.text.count("Redis is down, nothing is loaded or stored: gone") == 1
    assert caplog.text.count("is up again after") == 1
    prober.down("another reason")
    prober.step()
    assert caplog.text.count("Redis is down") == 2
    assert caplog.text.count("is up again after") == 2


def test_an_outage_of_one_kind_is_logged_at_both_ends(
    prober: Prober, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if its later failures are not logged."""
    prober.step()
    for _ in range(3):
        prober.health.failed(RedisUnavailable("gone"))
    prober.step()
    assert caplog.text.count("Redis is down") == caplog.text.count("is up again after") == 1
    assert (prober.outages, prober.errors) == (1, 3)


def test_what_was_seen_before_the_last_change_counts_no_more(prober: Prober) -> None:
    before = time.monotonic()
    prober.step()
    prober.health.down(RedisUnavailable("gone"), before)
    assert prober.health.is_up
    prober.health.down(RedisUnavailable("gone"), prober.health._since)
    prober.down("still")
    assert prober.health.state.reason == "gone"
    close(prober)
    prober.down()
    assert prober.outages == 1


def test_a_suspected_server_is_probed_at_once(probed: LyingServer) -> None:
    prober = Prober(probed, heartbeat_s=60.0)
    prober.step()
    prober.health.suspect(RedisTimeout("slow"), Operation.ASK)
    began_s = time.monotonic()
    prober.step()
    assert time.monotonic() - began_s < 10
    assert (pings(probed), prober.health.is_up) == (2, True)
    assert (prober.errors, prober.health.state.reason) == (1, f"slow ({SILENT})")
    close(prober)


def test_a_connection_that_was_lost_is_tried_again(server: RedisServer) -> None:
    prober = Prober(server)  # type: ignore[arg-type]
    prober.step()
    with server.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)
    prober.step()
    assert (prober.connects, prober.jobs.counts["connections_lost"]) == (1, 1)
    prober.step()
    assert prober.health.is_up
    assert (prober.outages, prober.connects) == (0, 2)
    close(prober)


def test_a_sentence_is_logged_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    lines = RepeatedLines()
    assert [lines.is_new("a"), lines.is_new("a"), lines.is_new("b")] == [True, False, True]
    now += 59.9
    assert not lines.is_new("a")
    now = 160.0
    assert [lines.is_new("a"), lines.is_new("a")] == [True, False]


def test_sentences_do_not_fill_the_memory() -> None:
    lines = RepeatedLines()
    assert all(lines.is_new(str(number)) for number in range(64))
    assert not any(lines.is_new(str(number)) for number in range(64))
    assert lines.is_new("one more")
    assert [lines.is_new("one more"), lines.is_new("0")] == [False, True]


# ------------------------------------------------------------------- workers


class Serving(BulkWorker):
    def __init__(self, prober: Prober) -> None:
        self.served: list[Connection] = []
        super().__init__("get-0", prober, TaskQueue(), 1, Gets(prober))

    def serve(self, connection: Connection) -> bool:
        assert connection.is_open
        self.served.append(connection)
        return len(self.served) < 2


# The error, whether the connection is open when it is judged, and after; lost connections, whether
# the server is up, errors noted, maps that are old.
JUDGED = [
    (RedisTimeout("slow"), False, (False, 1, True, 1, 0)),
    (RedisTimeout("a script is slow"), True, (True, 0, True, 0, 0)),
    (RedisUnavailable("LOADING"), True, (False, 0, False, 1, 0)),
    (RedisUnavailable("lost"), False, (False, 1, True, 1, 0)),
    (RedisClusterDown("CLUSTERDOWN"), True, (True, 0, True, 1, 1)),
    (RedisRedirect("MOVED"), True, (True, 0, True, 0, 1)),
    (RedisAuthError("NOAUTH"), True, (False, 0, True, 1, 0)),
    (RedisReplyError("ERR"), True, (True, 0, True, 1, 0)),
    (RedisProtocolError("no reply"), False, (False, 1, True, 1, 0)),
]


@pytest.mark.parametrize(("error", "is_open", "expected"), JUDGED)
def test_what_an_error_says_of_connection_and_server(
    probed: LyingServer, error: RedisError, is_open: bool, expected: tuple[object, ...]
) -> None:
    prober = Prober(probed, heartbeat_s=60.0)
    prober.step()
    connection = prober.open("get-0")
    if not is_open:
        connection.close()
    prober.judge(error, connection, Operation.LOAD)
    lost = prober.jobs.counts["connections_lost"]
    found = (connection.is_open, lost, prober.health.is_up, prober.errors, prober.maps_are_old)
    assert found == expected
    connection.close()
    close(prober)


def test_a_worker_connects_before_it_serves(prober: Prober) -> None:
    prober.step()
    worker = Serving(prober)
    assert worker._step()
    assert not worker._step(), "the queue is closed"
    assert not any(connection.is_open for connection in worker.served)
    close(prober)
    assert not worker._step()
    assert len(worker.served) == 2


def test_a_worker_that_is_refused_takes_the_server_down(
    probed: LyingServer, says: dict[bytes, bytes]
) -> None:
    """At once, also after a success."""
    probed.url = probed.url.replace("//", "//agent:secret@")
    prober = Prober(probed)
    prober.step()
    worker = Serving(prober)
    assert worker._step()
    says.update(dict.fromkeys((b"AUTH", b"HELLO"), b"-WRONGPASS invalid password\r\n"))
    assert worker._step()
    assert not prober.health.is_up
    close(prober)


def test_why_a_job_stops() -> None:
    assert health.stop_for(RedisTimeout("slow")) is CallOutcome.TIMED_OUT
    assert health.stop_for(RedisUnavailable("lost")) is CallOutcome.UNAVAILABLE
