# SPDX-License-Identifier: Apache-2.0
"""A server that trickles, or never ends: every call is over by its deadline, in bounded memory."""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.errors import RedisProtocolError, RedisTimeout
from lmcache_redis.resp import RedisOptions, RedisPlane
from lmcache_redis.resp.net.connection import Connection, Connector
from lmcache_redis.resp.options import parse_deployment
from lmcache_redis.tiers import CallOutcome, ReadOutcome, WriteOutcome
from tests.resp.certificates import Authority
from tests.resp.helpers import (
    LEAST_CONNECTIONS,
    Chunk,
    chunk_key,
    clear,
    describe,
    exists,
    find_servers,
    first_key,
    open_streams,
    read,
    remove,
    running,
    scan,
    wait_until,
    write,
)
from tests.resp.trickling import Answer, Endless, LyingServer, Trickle

pytestmark = pytest.mark.servers

DEADLINE_S = 0.2
# What a call with this deadline may take on a busy machine; a trickle takes many seconds.
BOUND_S = 3.0
SLOT = 4096
# Bytes of a reply's first line without its end: a byte now and then is an answer that begins.
LINE = b"+" + b"x" * 200
EXISTS = b"*1\r\n$6\r\nEXISTS\r\n"
VALUE = b"$4736\r\n" + b"h" * 640
PREFIX = first_key(1)[:10]

# Of each call of a plane: the command that is answered wrongly, and how it ends.
CALLS: dict[str, tuple[bytes, Callable[[RedisPlane, float], Any]]] = {
    "load": (b"GET", lambda plane, s: read(plane, Chunk(1, SLOT, SLOT), within_s=s)[0]),
    "store": (b"SET", lambda plane, s: write(plane, Chunk(1, SLOT, SLOT), within_s=s)[0]),
    "scan": (b"EXISTS", lambda plane, s: scan(plane, [chunk_key(1)], s).outcome),
    "exists": (b"EXISTS", lambda plane, s: exists(plane, [chunk_key(1)], s).outcome),
    "clear": (b"SCAN", lambda plane, s: clear(plane, PREFIX, within_s=s).outcome),
    "keys": (b"SCAN", lambda plane, s: plane.keys(PREFIX, time.monotonic() + s).outcome),
    "remove": (b"UNLINK", lambda plane, s: remove(plane, Chunk(1, SLOT, SLOT), s).outcome),
    "describe": (b"GETRANGE", lambda plane, s: describe(plane, [chunk_key(1)], s).outcome),
}


def only(*names: bytes, answer: Answer) -> Callable[[list[bytes]], Answer]:
    """Says `answer` to these commands, and to others what a good server would."""
    return lambda words: answer if words[0] in names else None


@contextlib.contextmanager
def over_in_time() -> Iterator[None]:
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took < BOUND_S, f"took {took:.2f} s"


Make = Callable[[Callable[[list[bytes]], Answer]], LyingServer]


@pytest.fixture(params=["unix", "tls"])
def lying(request: pytest.FixtureRequest, tmp_path: Path, authority: Authority) -> Make:
    """Makes a server from what it is to answer. Over TLS the mover is the one in Python."""

    def make(answer: Callable[[list[bytes]], Answer]) -> LyingServer:
        if request.param == "unix":
            return LyingServer(answer, path=tmp_path / "lying.sock")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*authority.issue("lying", "localhost"))
        server = LyingServer(answer, tls=context)
        server.url += "?ssl_cert_reqs=none&ssl_check_hostname=false"
        return server

    return make


@contextlib.contextmanager
def connected(url: str, op_timeout_s: float = 30.0) -> Iterator[Connection]:
    connector = Connector(parse_deployment(RedisOptions(url)).server, 5.0, op_timeout_s)
    with contextlib.closing(connector.open("lmcache-redis:test")) as connection:
        yield connection


# ------------------------------------------------------------- one connection

# What a trickle is made of, and how many replies are waited for.
REPLIES = [
    (LINE, 1),
    (b":" + b"1" * 15, 1),
    (b"$9999\r\nxx", 1),
    (b"*99\r\n:1\r\n:1\r\n$9", 1),
    (b":1\r\n" * 200, 100),
]


def test_replies_that_trickle_end_with_their_calls(lying: Make) -> None:
    trickle = [Trickle(b"")]
    with lying(lambda words: trickle[0] if words[0] == b"EXISTS" else None) as server:
        for reply, count in REPLIES:
            trickle[0] = Trickle(reply, 0.02)
            with connected(server.url) as connection:
                with over_in_time(), pytest.raises(RedisTimeout):
                    connection.call(EXISTS, count, time.monotonic() + DEADLINE_S)
                assert not connection.is_open


def test_the_op_timeout_is_for_the_whole_reply_too() -> None:
    with (
        LyingServer(only(b"EXISTS", answer=Trickle(LINE))) as server,
        connected(server.url, op_timeout_s=0.5) as connection,
        over_in_time(),
        pytest.raises(RedisTimeout),
    ):
        connection.call(EXISTS, 1, time.monotonic() + 60.0)


# ------------------------------------------------------------------ connecting


@pytest.mark.parametrize("what", [b"AUTH", b"CLIENT", b"TLS"])
def test_a_greeting_that_trickles(what: bytes) -> None:
    with LyingServer(only(what, answer=Trickle(LINE)), trickle_tls=what == b"TLS") as server:
        url = server.url.replace("//", "//:secret@")
        connector = Connector(parse_deployment(RedisOptions(url)).server, DEADLINE_S, DEADLINE_S)
        with over_in_time(), pytest.raises(RedisTimeout, match="does not answer"):
            connector.open("x")
        assert open_streams(connector) == 0


def test_an_open_ends_at_the_deadline_of_who_asked() -> None:
    with LyingServer(lambda words: Trickle(LINE)) as server:
        connector = Connector(parse_deployment(RedisOptions(server.url)).server, 30.0, 30.0)
        with over_in_time(), pytest.raises(RedisTimeout):
            connector.open("x", time.monotonic() + DEADLINE_S)


SCHEMES = {"redis+cluster": "", "redis+sentinel": "/main"}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_map_that_trickles(scheme: str) -> None:
    trickle = Trickle(b"*3\r\n" + b"$5\r\nhello\r\n" * 9)
    with LyingServer(only(b"CLUSTER", b"SENTINEL", answer=trickle)) as server:
        url = server.url.replace("redis", scheme) + SCHEMES[scheme]
        with over_in_time(), pytest.raises(RedisTimeout):
            find_servers(parse_deployment(RedisOptions(url)), DEADLINE_S)
        with running(url, connect_timeout_s=DEADLINE_S):
            wait_until(lambda: len(server.commands) > 1)


# ------------------------------------------------------------------- the plane


def wait_for_connections(plane: RedisPlane) -> None:
    wait_until(lambda: plane.state.up and open_streams(plane) == LEAST_CONNECTIONS)


def test_every_call_of_a_plane_is_answered(lying: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A thread gives the connection up in time, and works on."""
    trickles: dict[bytes, Trickle] = {}
    names = b"*2\r\n$1\r\n0\r\n*500\r\n" + b"$1\r\nx\r\n" * 50
    replies = {"load": [b"$46", VALUE[:200], VALUE], "clear": [names], "keys": [names]}
    with (
        lying(lambda words: trickles.get(words[0])) as server,
        running(server.url, op_timeout_s=0.4, heartbeat_s=3600.0) as plane,
    ):
        for call, (name, ask) in CALLS.items():
            for reply in replies.get(call, [LINE]):
                wait_for_connections(plane)
                lost = plane.stats().connections_lost
                trickles[name] = Trickle(reply, 0.02)
                with over_in_time():
                    assert ask(plane, DEADLINE_S).name == "TIMED_OUT", (call, reply)
                    wait_until(lambda lost=lost: plane.stats().connections_lost > lost)
                trickles.clear()
    assert "list of chunks is not complete: not answered before its deadline" in caplog.text


def test_a_server_that_reads_slowly(lying: Make) -> None:
    chunk = Chunk(1, 32 << 20, 32 << 20)
    with (
        lying(lambda words: None) as server,
        running(server.url, op_timeout_s=30.0, heartbeat_s=3600.0) as plane,
    ):
        wait_for_connections(plane)
        server.reads_slowly = 16 << 10
        with over_in_time():
            assert write(plane, chunk, within_s=DEADLINE_S) == [WriteOutcome.TIMED_OUT]


@pytest.mark.parametrize("call", ["load", "store", "scan"])
def test_a_plane_is_closed_in_the_middle_of_a_trickle(lying: Make, call: str) -> None:
    name, ask = CALLS[call]
    outcomes: list[Any] = []
    reply = VALUE if call == "load" else LINE
    with lying(only(name, answer=Trickle(reply))) as server:
        plane = RedisPlane(RedisOptions(server.url, op_timeout_s=60.0, connect_timeout_s=60.0))
        plane.start()
        wait_until(lambda: plane.state.up)
        asks = threading.Thread(target=lambda: outcomes.append(ask(plane, 60.0)))
        asks.start()
        wait_until(lambda: name in {words[0] for words in server.commands})
        with over_in_time():
            assert plane.close(0.1)
            asks.join()
    (outcome,) = outcomes
    # A store had its time, and what is aborted then may be said first.
    assert outcome.name == "CANCELLED" or outcome is WriteOutcome.UNAVAILABLE


def test_a_plane_is_closed_while_it_is_greeted() -> None:
    with LyingServer(only(b"CLIENT", answer=Trickle(LINE))) as server:
        plane = RedisPlane(RedisOptions(server.url, op_timeout_s=60.0, connect_timeout_s=60.0))
        plane.start()
        wait_until(lambda: server.commands)
        with over_in_time():
            assert plane.close(0.1)


def test_a_server_that_trickles_its_heartbeats_is_down() -> None:
    slow = threading.Event()

    def answer(words: list[bytes]) -> Answer:
        return Trickle(LINE) if words[0] == b"PING" and slow.is_set() else None

    with LyingServer(answer) as server, running(server.url, heartbeat_s=0.05) as plane:
        assert plane.state.up
        slow.set()
        asked_at = time.monotonic()
        wait_until(lambda: not plane.state.up)
        # Half a second for the answer; the server itself would give up after five.
        assert time.monotonic() - asked_at < 3.0
        slow.clear()
        wait_until(lambda: plane.state.up)


# ------------------------------------------------------------- bounded memory

# More than all bounds together, far less than an endless reply.
MOST_BYTES = 48 << 20


@contextlib.contextmanager
def in_bounded_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES, f"{peak:,} bytes"


ENDLESS = [
    Endless(b"+", b"x" * 65536),
    Endless(b":", b"1" * 65536),
    Endless(b"-ERR ", b"x" * 65536),
    Endless(b"$1000000000000\r\n", b"x" * 65536),
    Endless(b"$2000000000\r\n", b"x" * 65536),
    Endless(b"*2147483647\r\n", b":1\r\n" * 16384),
    Endless(b"*65536\r\n", b"$65536\r\n" + b"x" * 65536 + b"\r\n"),
    Endless(b"*65536\r\n", b"*65536\r\n" + b":1\r\n" * 65536),
    Endless(b"%32768\r\n", b"$65536\r\n" + b"x" * 65536 + b"\r\n"),
    Endless(b"", b"*1\r\n" * 16384),
    Endless(b"", b"+OK\r\n" * 16384),
]


def test_a_reply_without_end_is_no_reply() -> None:
    endless = [ENDLESS[0]]
    with LyingServer(lambda words: endless[0] if words[0] == b"EXISTS" else None) as server:
        for endless[0] in ENDLESS:
            with connected(server.url) as connection, in_bounded_memory():
                with pytest.raises(RedisProtocolError):
                    connection.call(EXISTS, 3, time.monotonic() + 20.0)
                assert not connection.is_open


def test_a_greeting_without_end() -> None:
    for endless in ENDLESS[::5]:
        with LyingServer(only(b"CLIENT", answer=endless)) as server, in_bounded_memory():
            connector = Connector(parse_deployment(RedisOptions(server.url)).server, 20.0, 20.0)
            with pytest.raises(RedisProtocolError, match="does not speak Redis"):
                connector.open("x")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_map_without_end(scheme: str) -> None:
    with LyingServer(only(b"CLUSTER", b"SENTINEL", answer=ENDLESS[6])) as server:
        url = server.url.replace("redis", scheme) + SCHEMES[scheme]
        with in_bounded_memory(), pytest.raises(RedisProtocolError):
            find_servers(parse_deployment(RedisOptions(url)), 20.0)


@pytest.mark.usefixtures("both_ways")
def test_no_reply_without_end_to_a_mover() -> None:
    """UNAVAILABLE, or TIMED_OUT where a value of another length is read up to its end."""
    endless: dict[bytes, Endless] = {}
    good = (ReadOutcome.LOADED, ReadOutcome.MISSING, WriteOutcome.STORED)
    with (
        LyingServer(lambda words: endless.get(words[0])) as server,
        running(server.url, heartbeat_s=3600.0, op_timeout_s=1.0) as plane,
        in_bounded_memory(),
    ):
        for call, numbers in (("load", (0, 2, 3, 4)), ("store", (0, 2, 6))):
            name, ask = CALLS[call]
            for number in numbers:
                wait_for_connections(plane)
                endless[name] = ENDLESS[number]
                assert ask(plane, 1.0) not in good, (call, number)
                endless.clear()


def test_no_reply_without_end_to_a_plane() -> None:
    endless: dict[bytes, Endless] = {}
    with (
        LyingServer(lambda words: endless.get(words[0])) as server,
        running(server.url, heartbeat_s=3600.0, op_timeout_s=15.0) as plane,
        in_bounded_memory(),
    ):
        calls = ("scan", "clear", "remove", "describe")
        for call, some in zip(calls, ENDLESS[3:7], strict=True):
            name, ask = CALLS[call]
            wait_for_connections(plane)
            endless[name] = some
            assert ask(plane, 15.0) is CallOutcome.UNAVAILABLE, call
            endless.clear()
