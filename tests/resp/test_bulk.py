"""The reader of GET replies against a peer that says anything at all, cut anywhere."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_redis.errors import (
    RedisAuthError,
    RedisError,
    RedisProtocolError,
    RedisReplyError,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp.bulk import MAX_DRAIN_BYTES, BulkConnection, Found
from lmcache_redis.resp.connection import ConnectionState
from lmcache_redis.resp.stream import PlainStream, Stream
from lmcache_redis.resp.wire import get_command

HEADER = bytes(range(256)) * 2
PAYLOAD = b"p" * 300
VALUE = HEADER + PAYLOAD
COMMAND = get_command(b"key")
GOOD = b"$%d\r\n%b\r\n" % (len(VALUE), VALUE)


class OneSocket:
    """In the place of a Connector: hands out one end of a socket pair."""

    def __init__(self, op_timeout_s: float = 10.0) -> None:
        ours, self.peer = socket.socketpair()
        self._stream = PlainStream(ours, "test", op_timeout_s)

    def open(self, name: str, deadline: float) -> Stream:
        return self._stream

    def discard(self, stream: Stream) -> None:
        stream.close()


class Peer:
    """A connection whose other end replies with given pieces, then closes or stays."""

    def __init__(self, pieces: Iterable[bytes], stay: bool = False, timeout_s: float = 10.0):
        self._one = OneSocket(timeout_s)
        self.connection = BulkConnection(self._one, "test")  # type: ignore[arg-type]
        assert self.connection.state is ConnectionState.NEW
        self.connection.open()
        self.timeout_s = timeout_s
        self._guarded = bytearray(b"\xa5" * (len(PAYLOAD) + 128))
        self.payload = memoryview(self._guarded)[64:-64]
        self._pieces = list(pieces)
        self._stay = stay
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            for piece in self._pieces:
                self._one.peer.sendall(piece)
            if not self._stay:
                self._one.peer.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def get(self) -> Found:
        return self.connection.get_stripe(COMMAND, self.payload, time.monotonic() + self.timeout_s)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self._thread.join()
        self._one.peer.close()
        assert self._guarded[:64] == self._guarded[-64:] == b"\xa5" * 64


def test_a_value() -> None:
    with Peer([GOOD], stay=True) as peer:
        assert peer.get() is Found.VALUE
        assert bytes(peer.connection.header) == HEADER
        assert bytes(peer.payload) == PAYLOAD
        assert peer.connection.is_open
        assert peer._one.peer.recv(1000) == b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n"


@pytest.mark.parametrize("cut", [1, 2, 4, 5, 6, 7, 100, 517, 518, 519, 700, len(GOOD) - 1])
def test_a_value_in_two_pieces_or_cut_short(cut: int) -> None:
    with Peer([GOOD[:cut], GOOD[cut:]], stay=True) as peer:
        assert peer.get() is Found.VALUE
        assert bytes(peer.payload) == PAYLOAD
    with Peer([GOOD[:cut]]) as peer:
        with pytest.raises(RedisUnavailable):
            peer.get()
        assert peer.connection.state is ConnectionState.CLOSED
    with Peer([GOOD[:cut]], stay=True, timeout_s=0.02) as peer:
        with pytest.raises(RedisTimeout):
            peer.get()
        assert not peer.connection.is_open


def test_one_byte_after_the_other() -> None:
    with Peer([GOOD[i : i + 1] for i in range(len(GOOD))], stay=True) as peer:
        assert peer.get() is Found.VALUE
        assert bytes(peer.payload) == PAYLOAD


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        (b"$-1\r\n", Found.NOTHING),
        (b"-WRONGTYPE Operation against a key\r\n", Found.OTHER_TYPE),
        (b"$0\r\n\r\n", Found.OTHER_LENGTH),
        (b"$3\r\nabc\r\n", Found.OTHER_LENGTH),
        (b"$811\r\n" + VALUE[:-1] + b"\r\n", Found.OTHER_LENGTH),
        (b"$813\r\n" + VALUE + b"x\r\n", Found.OTHER_LENGTH),
        (b"$9000\r\n" + VALUE + b"x" * (9000 - len(VALUE)) + b"\r\n", Found.OTHER_LENGTH),
        (b"$8\r\n12345678\r\n", Found.OTHER_LENGTH),
    ],
)
def test_short_replies_are_known_by_their_first_bytes(reply: bytes, found: Found) -> None:
    """The peer stays silent after the reply: waiting for more would time out."""
    for cut in {1, 2, 3, len(reply) // 2, len(reply)}:
        # A good value follows, to show that the connection is still in step.
        with Peer([reply[:cut], reply[cut:]], stay=True) as peer:
            assert peer.get() is found
            if found is Found.OTHER_LENGTH:
                start = reply.index(b"\r\n") + 2
                assert bytes(peer.connection.header) == reply[start:-2][:512]
            assert peer.connection.is_open
            peer._one.peer.sendall(GOOD)
            assert peer.get() is Found.VALUE
            assert bytes(peer.connection.header) == HEADER


def test_a_much_longer_value_costs_the_connection_only() -> None:
    head = b"$%d\r\n" % (MAX_DRAIN_BYTES * 2)
    with Peer([head, VALUE], stay=True) as peer:
        assert peer.get() is Found.OTHER_LENGTH
        assert bytes(peer.connection.header) == HEADER
        assert not peer.connection.is_open


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"-LOADING Redis is loading\r\n", RedisUnavailable),
        (b"-NOAUTH Authentication required.\r\n", RedisAuthError),
        (b"-NOPERM no\r\n", RedisReplyError),
        (b"-ERR " + b"x" * 2000 + b"\r\n", RedisReplyError),
    ],
)
def test_error_replies_leave_the_connection_in_step(reply: bytes, kind: type[Exception]) -> None:
    with Peer([reply], stay=True) as peer:
        with pytest.raises(kind):
            peer.get()
        assert peer.connection.is_open
        peer._one.peer.sendall(GOOD)
        assert peer.get() is Found.VALUE


@pytest.mark.parametrize(
    "reply",
    [
        b"+OK\r\n",
        b":1\r\n",
        b"*1\r\n$1\r\na\r\n",
        b"HTTP/1.1 400\r\n",
        b"$abc\r\n",
        b"$-2\r\n",
        b"$-1\r\n$-1\r\n",
        b"$99999999999999999\r\n",
        b"-ERR a\r\n-ERR b\r\n",
        b"$3\r\nabcdef",
        b"$" + b"1" * 70_000,
        GOOD[:-2] + b"xx",
        b"\r\n",
        b"\0" * 600,
    ],
)
def test_garbage_closes_the_connection(reply: bytes) -> None:
    with Peer([reply], stay=False) as peer:
        try:
            found = peer.get()
        except (RedisProtocolError, RedisUnavailable):
            found = Found.OTHER_LENGTH
        assert found is Found.OTHER_LENGTH
        assert not peer.connection.is_open


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=900),
        st.tuples(st.integers(0, len(GOOD)), st.integers(0, len(GOOD)), st.binary(max_size=8)).map(
            lambda t: GOOD[: min(t[:2])] + t[2] + GOOD[max(t[:2]) :]
        ),
        st.tuples(st.sampled_from([b"$", b"-", b"+", b"*", b":"]), st.binary(max_size=600)).map(
            b"".join
        ),
    )
)
def test_anything_gives_an_answer_or_our_own_error(reply: bytes) -> None:
    with Peer([reply]) as peer:
        try:
            found = peer.get()
        except RedisError:
            return
        if found is Found.VALUE:
            assert reply.startswith(b"$%d\r\n" % len(VALUE))
            assert bytes(peer.connection.header) + bytes(peer.payload) == reply[6:-2][: len(VALUE)]


# ------------------------------------------------------------------ sending


def test_a_set_is_sent_whole_however_the_socket_takes_it() -> None:
    one = OneSocket()
    connection = BulkConnection(one, "test")  # type: ignore[arg-type]
    connection.open()
    payload = memoryview(bytes(range(256)) * 20_000)
    received = bytearray()
    prefix = b"*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$%d\r\n" % (512 + payload.nbytes)
    wanted = len(prefix) + 512 + payload.nbytes + 2

    def drain() -> None:
        while len(received) < wanted:
            received.extend(one.peer.recv(100_000))
        one.peer.sendall(b"+OK\r\n")

    thread = threading.Thread(target=drain)
    thread.start()
    connection.send_stripe(b"key", memoryview(HEADER), payload, time.monotonic() + 10)
    assert connection.receive_replies(time.monotonic() + 10) == [b"OK"]
    thread.join()
    assert received == prefix + HEADER + payload.tobytes() + b"\r\n"
    connection.close()
    one.peer.close()


def test_a_peer_that_does_not_take_a_set_times_out() -> None:
    one = OneSocket()
    connection = BulkConnection(one, "test")  # type: ignore[arg-type]
    connection.open()
    payload = memoryview(bytes(8 << 20))
    with pytest.raises(RedisTimeout):
        connection.send_stripe(b"key", memoryview(HEADER), payload, time.monotonic() + 0.05)
    assert not connection.is_open
    one.peer.close()


def test_a_value_that_drips_does_not_stretch_the_deadline() -> None:
    one = OneSocket()
    connection = BulkConnection(one, "test")  # type: ignore[arg-type]
    connection.open()
    enough = threading.Event()

    def drip() -> None:
        # The other end hangs up when its time is over.
        with contextlib.suppress(OSError):
            for position in range(len(GOOD)):
                one.peer.sendall(GOOD[position : position + 1])
                if enough.wait(0.005):
                    return

    thread = threading.Thread(target=drip)
    thread.start()
    deadline = time.monotonic() + 0.1
    with pytest.raises(RedisTimeout):
        connection.get_stripe(COMMAND, memoryview(bytearray(len(PAYLOAD))), deadline)
    assert time.monotonic() >= deadline - 0.01
    enough.set()
    thread.join()
    one.peer.close()


def test_a_deadline_in_the_past_costs_no_connection() -> None:
    with Peer([GOOD], stay=True) as peer:
        with pytest.raises(RedisTimeout):
            peer.connection.get_stripe(COMMAND, peer.payload, time.monotonic() - 1)
        assert peer.connection.is_open
        assert peer.get() is Found.VALUE


def test_calls_take_exactly_their_replies() -> None:
    for replies, kind in (
        (b":1\r\n:2\r\n:3\r\n", RedisProtocolError),
        (b":1\r\n:2\r\n$5\r\nab", RedisProtocolError),
        (b":1\r\n-OOM x\r\n", RedisError),
        (b":1\r\n", RedisUnavailable),
    ):
        with Peer([replies]) as peer, pytest.raises(kind):
            peer.connection.call(b"PING\r\n", 2, time.monotonic() + 10)
    for garbage in (b"what is this\r\n", b"_1\r\n:1\r\n", b":1\r\n?\r\n"):
        with Peer([garbage], stay=True) as peer:
            with pytest.raises(RedisProtocolError):
                peer.connection.call(b"x", 2, time.monotonic() + 10)
            # What comes next on it would be taken for the next call's.
            assert not peer.connection.is_open
    with Peer([b":1\r\n", b"$1\r\na\r\n"], stay=True) as peer:
        assert peer.connection.call(b"x", 2, time.monotonic() + 10) == [1, b"a"]
    with Peer([b"+PANG\r\n"], stay=True) as peer, pytest.raises(RedisProtocolError):
        peer.connection.ping(time.monotonic() + 10)


def test_a_closed_connection_is_of_no_use() -> None:
    with Peer([], stay=True) as peer:
        peer.connection.close()
        peer.connection.close()
        with pytest.raises(RedisUnavailable):
            peer.get()
