# SPDX-License-Identifier: Apache-2.0
"""A server that trickles, or never ends: every call is over by its deadline, in bounded memory."""

from __future__ import annotations

import contextlib
import socket
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
from lmcache_redis.resp.bulk import PythonMover
from lmcache_redis.resp.net.connection import Connection, Connector
from lmcache_redis.resp.net.wire import get_command, set_prefix, value_head
from lmcache_redis.resp.options import parse_deployment
from lmcache_redis.tiers import CallOutcome, ReadOutcome, WriteOutcome
from tests.resp.helpers import (
    Answers,
    Chunk,
    chunk_key,
    clear,
    describe,
    exists,
    find_servers,
    finish,
    first_key,
    open_streams,
    plane_threads,
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


def only(*names: bytes, answer: Answer) -> Callable[[list[bytes]], Answer]:
    """Says `answer` to these commands, and to others what a good server would."""
    return lambda words: answer if words[0] in names else None


@contextlib.contextmanager
def over_in_time() -> Iterator[None]:
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took < BOUND_S, f"took {took:.2f} s"


def server_side(certificates: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    return context


@pytest.fixture(params=["tcp", "unix", "tls"])
def lying(
    request: pytest.FixtureRequest, tmp_path: Path, certificates: Path
) -> Callable[[Callable[[list[bytes]], Answer]], LyingServer]:
    """Makes a server of each transport from what it is to answer."""

    def make(answer: Callable[[list[bytes]], Answer]) -> LyingServer:
        if request.param == "unix":
            return LyingServer(answer, path=tmp_path / "lying.sock")
        if request.param == "tls":
            server = LyingServer(answer, tls=server_side(certificates))
            server.url += "?ssl_cert_reqs=none"
            return server
        return LyingServer(answer)

    return make


@contextlib.contextmanager
def connected(url: str, op_timeout_s: float = 30.0) -> Iterator[Connection]:
    connector = Connector(parse_deployment(RedisOptions(url)).server, 5.0, op_timeout_s)
    with contextlib.closing(connector.open("lmcache-redis:test")) as connection:
        yield connection


def get(connection: Connection, payload: memoryview, deadline: float) -> None:
    expected = value_head(640 + payload.nbytes) + bytes(640)
    task = (get_command(b"k"), expected, payload, b"")
    finish(PythonMover(), connection, task, deadline, is_load=True)


def put(connection: Connection, payload: memoryview, deadline: float) -> None:
    task = (set_prefix(b"k", 640 + payload.nbytes), bytearray(640), payload, b"\r\n")
    finish(PythonMover(), connection, task, deadline, is_load=False)


Make = Callable[[Callable[[list[bytes]], Answer]], LyingServer]


# ------------------------------------------------------------- one connection


VALUE_HEAD = b"$%d\r\n" % (640 + 600)
# What a trickle is made of, and how many replies are waited for.
REPLIES = [
    (LINE, 1),
    (b":" + b"1" * 15, 1),
    (b"$9999\r\nxx", 1),
    (b"*99\r\n:1\r\n:1\r\n$9", 1),
    (b":1\r\n" * 200, 100),
]
VALUES = [
    b"$11",
    VALUE_HEAD + b"h" * 640,
    b"$1000\r\n" + b"h" * 400,
    b"$9000000\r\n" + b"h" * 400,
    b"-ERR " + b"x" * 200,
    b"-WRONGTYPE " + b"x" * 200,
]
ACKNOWLEDGEMENTS = [b"+O", LINE, b"-ERR " + b"x" * 200]


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


def test_values_and_acknowledgements_that_trickle(lying: Make) -> None:
    trickle = [Trickle(b"")]
    with lying(lambda words: trickle[0] if words[0] in (b"GET", b"SET") else None) as server:
        for reply in (*VALUES, *ACKNOWLEDGEMENTS):
            trickle[0] = Trickle(reply, 0.02)
            with connected(server.url) as connection:
                moves = get if reply in VALUES else put
                with over_in_time(), pytest.raises(RedisTimeout):
                    moves(connection, memoryview(bytearray(600)), time.monotonic() + DEADLINE_S)
                assert not connection.is_open


def test_a_late_head_leaves_the_payload_the_rest() -> None:
    """Not its time-out once more."""

    def answer(words: list[bytes]) -> Answer:
        if words[0] != b"GET":
            return None
        time.sleep(1.6)
        return VALUE_HEAD + b"h" * 640

    with LyingServer(answer) as server, connected(server.url) as connection:
        started = time.monotonic()
        with pytest.raises(RedisTimeout):
            get(connection, memoryview(bytearray(600)), started + 2.0)
        assert time.monotonic() - started < 3.2


def test_a_server_that_reads_slowly(lying: Make) -> None:
    with lying(lambda words: None) as server, connected(server.url) as connection:
        server.reads_slowly = 16 << 10
        with over_in_time(), pytest.raises(RedisTimeout):
            put(connection, memoryview(bytes(32 << 20)), time.monotonic() + DEADLINE_S)
        assert not connection.is_open


# ------------------------------------------------------------------ connecting


def connecting(server: LyingServer) -> Connector:
    url = server.url.replace("//", "//:secret@")
    return Connector(parse_deployment(RedisOptions(url)).server, DEADLINE_S, DEADLINE_S)


@pytest.mark.parametrize("what", [b"AUTH", b"CLIENT", b"TLS"])
def test_a_greeting_that_trickles(what: bytes) -> None:
    with LyingServer(only(what, answer=Trickle(LINE)), trickle_tls=what == b"TLS") as server:
        connector = connecting(server)
        with over_in_time(), pytest.raises(RedisTimeout, match="does not answer"):
            connector.open("x")
        assert open_streams(connector) == 0


def test_an_open_ends_at_the_deadline_of_who_asked() -> None:
    with LyingServer(lambda words: Trickle(LINE)) as server:
        connector = Connector(parse_deployment(RedisOptions(server.url)).server, 30.0, 30.0)
        with over_in_time(), pytest.raises(RedisTimeout):
            connector.open("x", time.monotonic() + DEADLINE_S)


def test_a_name_that_is_looked_up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it beyond a deadline."""
    look_up, known = socket.getaddrinfo, threading.Event()

    def slow(host: str, *args: Any, **kwargs: Any) -> Any:
        if not kwargs["flags"]:
            known.wait(30)
        return look_up(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with LyingServer() as server:
        url = server.url.replace("127.0.0.1", "localhost")
        connector = Connector(parse_deployment(RedisOptions(url)).server, DEADLINE_S, 5.0)
        with over_in_time(), pytest.raises(RedisTimeout, match="does not answer"):
            connector.open("x")
        known.set()
        connector.open("x").close()


# -------------------------------------------------------- servers to be found


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
        assert plane_threads() == []


def test_a_role_that_trickles_is_no_reason_to_doubt() -> None:
    def answer(words: list[bytes]) -> Answer:
        if words[0] == b"SENTINEL":
            return b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%d\r\n" % (len(str(server.port)), server.port)
        return Trickle(LINE) if words[0] == b"ROLE" else None

    with LyingServer(answer) as server:
        url = server.url.replace("redis", "redis+sentinel") + "/main"
        with over_in_time():
            found = find_servers(parse_deployment(RedisOptions(url)), DEADLINE_S)
        assert [each.port for each in found.servers] == [server.port]


# ------------------------------------------------------------------- the plane


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(
    ("name", "reply"),
    [
        (b"GET", b"$4736\r\n" + b"h" * 200),
        (b"GET", b"$4736\r\n" + b"h" * 640),
        (b"GET", b"$46"),
        (b"SET", b"+"),
        (b"EXISTS", LINE),
        (b"SCAN", b"*2\r\n$1\r\n0\r\n*500\r\n" + b"$1\r\nx\r\n" * 50),
        (b"UNLINK", LINE),
        (b"GETRANGE", LINE),
    ],
)
def test_every_call_of_a_plane_is_answered(
    name: bytes, reply: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread gives the connection up in time, and works on."""
    trickles = only(name, answer=Trickle(reply, 0.02))
    with (
        LyingServer(trickles, path=tmp_path / "lying.sock") as server,
        running(server.url, op_timeout_s=0.4, heartbeat_s=3600.0) as plane,
    ):
        for _ in range(2):
            wait_until(lambda: plane.state.up and open_streams(plane) == 3)
            lost = plane.stats().connections_lost
            with over_in_time():
                _check_call(plane, name, caplog)
                wait_until(lambda lost=lost: plane.stats().connections_lost > lost)


def _check_call(plane: RedisPlane, name: bytes, caplog: pytest.LogCaptureFixture) -> None:
    chunk = Chunk(1, SLOT, SLOT, seed=1)
    late = "TIMED_OUT"
    if name == b"EXISTS":
        assert scan(plane, [chunk_key(1)], DEADLINE_S).outcome.name == late
        assert exists(plane, [chunk_key(1)], DEADLINE_S).outcome.name == late
    elif name == b"GET":
        assert [outcome.name for outcome in read(plane, chunk, within_s=DEADLINE_S)] == [late]
    elif name == b"SET":
        assert [outcome.name for outcome in write(plane, chunk, within_s=DEADLINE_S)] == [late]
    elif name == b"SCAN":
        answers = Answers()
        prefix = first_key(1)[:10]
        plane.clear([prefix], time.monotonic() + DEADLINE_S, answers.callback("clear"))
        assert plane.keys(prefix, time.monotonic() + DEADLINE_S).keys == []
        assert [answer.outcome.name for answer in answers.wait(1)] == [late]
        assert "list of chunks is not complete: not answered before its deadline" in caplog.text
    elif name == b"GETRANGE":
        assert describe(plane, [chunk_key(1)], DEADLINE_S).outcome.name == late
    else:
        assert remove(plane, chunk, DEADLINE_S).outcome.name == late
        assert scan(plane, [chunk_key(1)]) == (CallOutcome.DONE, 0)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("name", [b"EXISTS", b"GET", b"SET", b"CLIENT"])
def test_a_plane_is_closed_in_the_middle_of_a_trickle(name: bytes) -> None:
    trickles = only(name, answer=Trickle(b"$4736\r\n" + b"h" * 640))
    with LyingServer(trickles) as server:
        plane = RedisPlane(RedisOptions(server.url, op_timeout_s=60.0, connect_timeout_s=60.0))
        plane.start()
        wait_until(lambda: any(words[0] in (name, b"PING") for words in server.commands))
        answers = Answers()
        if name in (b"EXISTS", b"GET", b"SET"):
            wait_until(lambda: plane.state.up)
            chunk = Chunk(1, SLOT, SLOT, seed=1)
            if name == b"EXISTS":
                plane.scan([chunk_key(1)], time.monotonic() + 60.0, answers.callback("scan"))
            elif name == b"GET":
                plane.load_all((chunk.io(60.0),), answers)
            else:
                plane.store_all((chunk.io(60.0),), answers)
            wait_until(lambda: any(words[0] == name for words in server.commands))
        with over_in_time():
            assert plane.close(0.1)
        assert plane_threads() == []
        assert len(answers) == (name in (b"EXISTS", b"GET", b"SET"))


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


@pytest.mark.parametrize("endless", ENDLESS[::5], ids=range(0, len(ENDLESS), 5))
def test_a_greeting_without_end(endless: Endless) -> None:
    with LyingServer(only(b"CLIENT", answer=endless)) as server:
        connector = Connector(parse_deployment(RedisOptions(server.url)).server, 20.0, 20.0)
        with in_bounded_memory(), pytest.raises(RedisProtocolError, match="does not speak Redis"):
            connector.open("x")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_map_without_end(scheme: str) -> None:
    with LyingServer(only(b"CLUSTER", b"SENTINEL", answer=ENDLESS[6])) as server:
        url = server.url.replace("redis", scheme) + SCHEMES[scheme]
        with in_bounded_memory(), pytest.raises(RedisProtocolError):
            find_servers(parse_deployment(RedisOptions(url)), 20.0)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(
    ("name", "number"),
    [(b"GET", 0), (b"GET", 2), (b"GET", 3), (b"GET", 4), (b"SET", 0), (b"SET", 2), (b"SET", 6)],
)
def test_no_reply_without_end_to_a_mover(name: bytes, number: int) -> None:
    """UNAVAILABLE, or TIMED_OUT where a value of another length is read up to its end."""
    with (
        LyingServer(only(name, answer=ENDLESS[number])) as server,
        running(server.url, heartbeat_s=3600.0, op_timeout_s=1.0) as plane,
        in_bounded_memory(),
    ):
        chunk = Chunk(1, SLOT, SLOT, seed=1)
        if name == b"GET":
            (outcome,) = read(plane, chunk, within_s=1.0)
            assert outcome not in (ReadOutcome.LOADED, ReadOutcome.MISSING)
        else:
            assert write(plane, chunk) != [WriteOutcome.STORED]


def test_no_reply_without_end_to_a_plane() -> None:
    names = (b"EXISTS", b"SCAN", b"UNLINK", b"GETRANGE")
    for name, endless in zip(names, ENDLESS[3:7], strict=True):
        with (
            LyingServer(only(name, answer=endless)) as server,
            running(server.url, heartbeat_s=3600.0, op_timeout_s=2.0) as plane,
            in_bounded_memory(),
        ):
            outcomes = {
                b"EXISTS": lambda plane=plane: scan(plane, [chunk_key(1)]),
                b"SCAN": lambda plane=plane: clear(plane, first_key(1)[:10]),
                b"UNLINK": lambda plane=plane: remove(plane, Chunk(1, SLOT, SLOT)),
                b"GETRANGE": lambda plane=plane: describe(plane, [chunk_key(1)]),
            }
            assert outcomes[name]().outcome is CallOutcome.UNAVAILABLE
