"""A server that trickles, or never ends: every call is over by its deadline, in bounded memory."""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_redis.errors import RedisError, RedisProtocolError, RedisTimeout
from lmcache_redis.resp import CallOutcome, ReadOutcome, RedisOptions, WriteOutcome
from lmcache_redis.resp.bulk import BulkConnection
from lmcache_redis.resp.connect import Connector
from lmcache_redis.resp.deployment import parse_deployment
from lmcache_redis.resp.endpoint import parse_endpoint
from lmcache_redis.resp.topology import find_servers
from lmcache_redis.resp.wire import get_command
from tests.resp.certificates import Authority
from tests.resp.helpers import (
    Chunk,
    chunk_key,
    clear,
    exists,
    first_key,
    plane_threads,
    read,
    running,
    scan,
    wait_until,
    write,
)
from tests.resp.trickling import Answer, Endless, LyingServer, Trickle

DEADLINE_S = 0.2
# What a call with this deadline may take on a busy machine; a trickle takes many seconds.
BOUND_S = 1.5
SLOT = 4096
# Bytes of a reply's first line without its end: a byte now and then is an answer that begins.
LINE = b"+" + b"x" * 200


def only(*names: bytes, answer: Answer) -> Callable[[list[bytes]], Answer]:
    """Says `answer` to these commands, and to others what a good server would."""
    return lambda words: answer if words[0] in names else None


@contextlib.contextmanager
def over_in_time() -> Iterator[None]:
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took < BOUND_S, f"took {took:.2f} s"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    authority = Authority(tmp_path_factory.mktemp("tls"))
    authority.issue("server", "localhost")
    return authority.directory


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
def connected(url: str, op_timeout_s: float = 30.0) -> Iterator[BulkConnection]:
    connector = Connector(parse_endpoint(RedisOptions(url)), 5.0, op_timeout_s)
    connection = BulkConnection(connector, "lmcache-redis:test")
    connection.open()
    try:
        yield connection
    finally:
        connection.close()


Make = Callable[[Callable[[list[bytes]], Answer]], LyingServer]


# ------------------------------------------------------------- one connection


@pytest.mark.parametrize(
    "reply", [LINE, b":" + b"1" * 15, b"$9999\r\nxx", b"*99\r\n:1\r\n:1\r\n$9"]
)
def test_a_reply_that_trickles_ends_with_its_call(lying: Make, reply: bytes) -> None:
    with (
        lying(only(b"EXISTS", answer=Trickle(reply, 0.02))) as server,
        connected(server.url) as connection,
    ):
        with over_in_time(), pytest.raises(RedisTimeout):
            connection.call(b"*1\r\n$6\r\nEXISTS\r\n", 1, time.monotonic() + DEADLINE_S)
        assert not connection.is_open


def test_many_replies_that_trickle_end_with_their_call(lying: Make) -> None:
    replies = Trickle(b":1\r\n" * 200, 0.02)
    with lying(only(b"EXISTS", answer=replies)) as server, connected(server.url) as connection:
        with over_in_time(), pytest.raises(RedisTimeout):
            connection.call(b"*1\r\n$6\r\nEXISTS\r\n", 100, time.monotonic() + DEADLINE_S)


def test_the_op_timeout_is_for_the_whole_reply_too(lying: Make) -> None:
    with (
        lying(only(b"EXISTS", answer=Trickle(LINE))) as server,
        connected(server.url, op_timeout_s=DEADLINE_S) as connection,
        over_in_time(),
        pytest.raises(RedisTimeout),
    ):
        connection.call(b"*1\r\n$6\r\nEXISTS\r\n", 1, time.monotonic() + 60.0)


@pytest.mark.parametrize("reply", [b"+O", LINE, b"-ERR " + b"x" * 200])
def test_an_acknowledgement_that_trickles(lying: Make, reply: bytes) -> None:
    with (
        lying(only(b"SET", answer=Trickle(reply))) as server,
        connected(server.url) as connection,
    ):
        deadline = time.monotonic() + DEADLINE_S
        connection.send_stripe(b"k", memoryview(bytes(512)), memoryview(bytes(600)), deadline)
        with over_in_time(), pytest.raises(RedisTimeout):
            connection.receive_reply(deadline)


VALUE_HEAD = b"$%d\r\n" % (512 + 600)


@pytest.mark.parametrize(
    "reply",
    [
        b"$11",
        VALUE_HEAD + b"h" * 512,
        b"$1000\r\n" + b"h" * 900,
        b"$9000000\r\n" + b"h" * 900,
        b"-ERR " + b"x" * 200,
        b"-WRONGTYPE " + b"x" * 200,
    ],
)
def test_a_value_that_trickles(lying: Make, reply: bytes) -> None:
    with (
        lying(only(b"GET", answer=Trickle(reply, 0.02))) as server,
        connected(server.url) as connection,
    ):
        payload = memoryview(bytearray(600))
        with over_in_time(), pytest.raises(RedisTimeout):
            connection.get_stripe(get_command(b"k"), payload, time.monotonic() + DEADLINE_S)
        assert not connection.is_open


def test_a_head_late_by_most_of_the_deadline_leaves_the_payload_the_rest(lying: Make) -> None:
    """Not its time-out once more."""

    def answer(words: list[bytes]) -> Answer:
        if words[0] != b"GET":
            return None
        time.sleep(0.8)
        return VALUE_HEAD + b"h" * 512

    with lying(answer) as server, connected(server.url) as connection:
        started = time.monotonic()
        with pytest.raises(RedisTimeout):
            connection.get_stripe(get_command(b"k"), memoryview(bytearray(600)), started + 1.0)
        assert time.monotonic() - started < 1.6


def test_a_server_that_reads_slowly(lying: Make) -> None:
    with lying(lambda words: None) as server, connected(server.url) as connection:
        server.reads_slowly = 16 << 10
        with over_in_time(), pytest.raises(RedisTimeout):
            deadline = time.monotonic() + DEADLINE_S
            payload = memoryview(bytes(32 << 20))
            connection.send_stripe(b"k", memoryview(bytes(512)), payload, deadline)
        assert not connection.is_open
