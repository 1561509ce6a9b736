# SPDX-License-Identifier: Apache-2.0
"""Stripes between sockets and slots, by each mover, against a peer that says anything at all."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from lmcache_redis import native
from lmcache_redis.chunks.frame import HEADER_BYTES, SHORT_BYTES, ChunkFrame, Verdict, add_checksums
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.errors import (
    RedisError,
    RedisFull,
    RedisProtocolError,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp.bulk import (
    MOST_LINE_BYTES,
    QUIET_MS,
    End,
    MoveCall,
    Moved,
    PythonMover,
    Request,
    Result,
    StripeFailure,
    error_in,
)
from lmcache_redis.resp.codecs import Plain, StripeIO
from lmcache_redis.resp.lanes import Mover, NativeMover
from lmcache_redis.resp.net.connection import Connection
from lmcache_redis.resp.net.endpoint import Endpoint, Transport
from lmcache_redis.resp.net.wire import PING_COMMAND
from lmcache_redis.tiers import ReadOutcome

# In place of a SET that was sent.
SENT: Request = (b"", bytearray(HEADER_BYTES), memoryview(b""), b"")
ENDPOINT = Endpoint(Transport.TCP, "test", 1)
PAYLOAD = 4096
STORE_ID = bytes(range(16))
COMMAND = b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n"


def frame_of(nbytes: int, stripes: int = 3) -> ChunkFrame:
    metadata = RemoteMetadata(
        stripes * nbytes, [(stripes * nbytes,)], ["uint8"], MemoryFormat.PAGES
    )
    return ChunkFrame(
        bytes(range(32)), b"a chunk's hash", stripes * nbytes, nbytes, metadata.serialize()
    )


FRAME = frame_of(PAYLOAD)


def payload_of(index: int, nbytes: int = PAYLOAD) -> bytes:
    return bytes((n * 7 + index) % 251 for n in range(nbytes))


def value_of(index: int, payload: bytes, frame: ChunkFrame = FRAME) -> bytes:
    header = frame.header(index, STORE_ID, xxh3_64_intdigest(payload), 1234)
    return bytes(header) + payload


def reply_with(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


GOOD = reply_with(value_of(0, payload_of(0)))


def to_load(index: int, slot: bytearray, frame: ChunkFrame = FRAME) -> Request:
    expected = b"$%d\r\n" % (HEADER_BYTES + len(slot)) + frame.bare_header(index)
    return COMMAND, expected, memoryview(slot), b""


def to_store(index: int, payload: bytes, frame: ChunkFrame = FRAME) -> Request:
    header = bytearray(frame.bare_header(index, STORE_ID, 99))
    view = memoryview(payload)
    if len(payload) <= SHORT_BYTES:
        add_checksums(header, xxh3_64_intdigest(payload))
    return b"prefix %d " % index, header, view, b"\r\n"


@pytest.fixture(params=["native", "python"])
def mover(request: pytest.FixtureRequest) -> Mover:
    if request.param == "python":
        return PythonMover()
    if native.moves is None:
        pytest.skip(native.why_not)
    return NativeMover()


class Lanes:
    """Socket pairs: `handles` are ours, `servers` the other ends."""

    def __init__(self, mover: Mover, count: int = 3) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        self.connections = [Connection(ours, ENDPOINT, 10.0) for ours, _ in pairs]
        self.servers = [server for _, server in pairs]
        self.handles = [mover.handle(each) for each in self.connections]
        self._mover = mover
        for server in self.servers:
            server.settimeout(5)

    def move(
        self,
        is_load: bool,
        tasks: list[Request],
        in_flight: int = 0,
        lanes: int | None = None,
        *,
        drain: bool = True,
        verify: bool = True,
        is_sending: bool = False,
    ) -> Moved:
        until = time.monotonic() + 5.0
        call = MoveCall(self.handles[:lanes], tasks, in_flight, is_sending, drain, until, verify)
        return self._mover.move(call, is_load)

    load = functools.partialmethod(move, True)
    store = functools.partialmethod(move, False)

    def one(self, is_load: bool, task: Request, in_flight: int = 0, verify: bool = True) -> Result:
        """The result of a task on the first lane; in_flight: 1 if it was sent."""
        is_sending = False
        until = time.monotonic() + 15.0
        while time.monotonic() < until:
            # A call may end early on a busy machine; the next one continues.
            moved = self.move(is_load, [task], in_flight, 1, verify=verify, is_sending=is_sending)
            if moved.done:
                return moved.done[0]
            in_flight, is_sending = 1, moved.sending == errno.EAGAIN
        raise AssertionError("no result within 15 s")

    load_one = functools.partialmethod(one, True)
    store_one = functools.partialmethod(one, False)

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, *_: object) -> None:
        for end in (*self.connections, *self.servers):
            end.close()


@pytest.fixture
def lanes(mover: Mover) -> Iterator[Lanes]:
    with Lanes(mover) as lanes:
        yield lanes


def failure_of(result: Result) -> StripeFailure:
    assert not isinstance(result, bytes)
    return result


def load_one(mover: Mover, reply: bytes, task: Request, close: bool = False) -> Result:
    """What becomes of a stripe whose reply begins so."""
    with Lanes(mover, 1) as lanes:
        lanes.servers[0].sendall(reply)
        if close:
            lanes.servers[0].shutdown(socket.SHUT_WR)
        return lanes.load_one(task)


# ---------------------------------------------------------------------- load


def test_leaves_lanes_busy_where_more_waits(lanes: Lanes) -> None:
    slots = [bytearray(PAYLOAD) for _ in range(3)]
    tasks = [to_load(index, slot) for index, slot in enumerate(slots)]
    for index in (0, 1):
        lanes.servers[index].sendall(reply_with(value_of(index, payload_of(index))))
    moved = lanes.load(tasks, lanes=2, drain=False)
    # The first reply made room for the third task; nothing waited for its reply.
    assert moved == Moved([0, 1, 0], [STORE_ID], 0)
    lanes.servers[0].sendall(reply_with(value_of(2, payload_of(2))))
    # In flight, in the order of the requests: the second on lane 1, the third on lane 0.
    lanes.handles[:2] = lanes.handles[1::-1]
    assert lanes.load(tasks[1:], 2, 2) == Moved([], [STORE_ID] * 2, 0)
    assert slots[2] == payload_of(2)


def test_quiet_where_nothing_comes(lanes: Lanes) -> None:
    task = to_load(0, bytearray(PAYLOAD))
    began = time.monotonic()
    assert lanes.load([task], lanes=1) == Moved([0], [], 0)
    assert time.monotonic() - began >= QUIET_MS / 1000 - 0.001
    # The reply comes later: the next call goes on.
    lanes.servers[0].sendall(GOOD)
    assert lanes.load_one(task, 1) == STORE_ID


def test_the_rest_of_a_reply_may_go_elsewhere(lanes: Lanes) -> None:
    """A slot is free as soon as the mover is given other memory in its place."""
    slot, scratch = bytearray(PAYLOAD), bytearray(PAYLOAD)
    lanes.servers[0].sendall(GOOD[:1000])
    assert lanes.load([to_load(0, slot)], lanes=1).done == []
    content = bytes(slot)
    lanes.servers[0].sendall(GOOD[1000:])
    result = lanes.load_one(to_load(0, scratch), 1)
    assert slot == content
    assert failure_of(result)[0] == End.MISMATCH
    lanes.servers[0].sendall(GOOD)
    assert lanes.load_one(to_load(0, slot)) == STORE_ID


LINE = b"-ERR " + b"x" * 2000


@pytest.mark.parametrize(
    ("reply", "end", "data"),
    [
        (b"$-1\r\n", End.NOTHING, b""),
        (b"-MOVED 1 h:1\r\n", End.LINE, b"-MOVED 1 h:1"),
        (LINE + b"\r\n", End.LINE, LINE),
        (b"$3\r\nabc\r\n", End.OTHER_LENGTH, b"abc"),
        (b"$0\r\n\r\n", End.OTHER_LENGTH, b""),
        (b"$9000000\r\n" + GOOD[7:700], End.OTHER_LENGTH, GOOD[7:647]),
        (b"$4735\r\n" + GOOD[7:], End.OTHER_LENGTH, GOOD[7:647]),
    ],
)
def test_other_replies(mover: Mover, reply: bytes, end: End, data: bytes) -> None:
    """Each ends its stripe, cut anywhere; after the first three the connection is in step."""
    for cut in {1, 2, 3, len(reply) // 2, len(reply)}:
        with Lanes(mover, 1) as lanes:
            task = to_load(0, bytearray(PAYLOAD))
            lanes.servers[0].sendall(reply[:cut])
            done = lanes.load([task]).done
            if not done:
                lanes.servers[0].sendall(reply[cut:])
                done = lanes.load([task], 1).done
            assert done == [(end, 0, data)]
            if end < End.OTHER_LENGTH:
                lanes.servers[0].sendall(GOOD)
                assert lanes.load_one(task) == STORE_ID


@pytest.mark.parametrize(
    "reply",
    [
        b"+OK\r\n",
        b":1\r\n",
        b"*1\r\n$1\r\na\r\n",
        b"HTTP/1.1 400\r\n",
        b"$abc\r\n",
        b"$-2\r\n",
        b"$007\r\n",
        b"_\r\n",
        b"$-1\r\n$-1\r\n",
        b"$99999999999999999\r\n",
        b"-ERR a\r\n-ERR b\r\n",
        b"$" + b"1" * 70_000,
        b"-ERR " + b"x" * MOST_LINE_BYTES,
        GOOD[:-2] + b"xx",
        b"\r\n",
        b"\0" * 600,
    ],
)
def test_garbage(mover: Mover, reply: bytes) -> None:
    assert failure_of(load_one(mover, reply, to_load(0, bytearray(PAYLOAD))))[0] == End.GARBAGE


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
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
def test_anything_ends_the_stripe(mover: Mover, reply: bytes) -> None:
    slot = bytearray(PAYLOAD)
    result = load_one(mover, reply, to_load(0, slot), close=True)
    if isinstance(result, bytes):
        assert reply.startswith(GOOD)
        assert slot == payload_of(0)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255), st.booleans())
def test_a_header_counts_where_its_frame_says_so(
    mover: Mover, at: int, flip: int, resealed: bool
) -> None:
    payload = payload_of(1)
    value = bytearray(value_of(1, payload))
    value[at] ^= flip
    if resealed:
        value[168:176] = bytes(8)
        value[168:176] = xxh3_64_intdigest(value[:HEADER_BYTES]).to_bytes(8, "little")
    check = FRAME.check_header(value, 1)
    good = check.verdict is Verdict.OK and check.checksum == xxh3_64_intdigest(payload)
    slot = bytearray(PAYLOAD)
    result = load_one(mover, reply_with(bytes(value)), to_load(1, slot))
    assert slot == payload
    if good:
        assert result == check.store_id
    else:
        assert result == (End.MISMATCH, 0, bytes(value[:HEADER_BYTES]))


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("at", [0, 1, PAYLOAD // 2, PAYLOAD - 1])
def test_a_flipped_bit_in_the_payload(lanes: Lanes, at: int, checksums: bool) -> None:
    value = bytearray(value_of(0, payload_of(0)))
    value[HEADER_BYTES + at] ^= 1
    lanes.servers[0].sendall(reply_with(bytes(value)))
    slot = bytearray(PAYLOAD)
    result = lanes.load_one(to_load(0, slot), verify=checksums)
    if not checksums:
        assert result == STORE_ID
        return
    assert failure_of(result)[0] == End.MISMATCH
    stripe = StripeIO(b"", FRAME, 0, memoryview(slot))
    assert Plain().judge(stripe, failure_of(result)) is ReadOutcome.CORRUPT


@pytest.mark.parametrize("nbytes", [1, 3, 16, 240, 241])
def test_short_payloads(lanes: Lanes, nbytes: int) -> None:
    """Their checksums are another kind, which the native extension leaves to Python."""
    frame = frame_of(nbytes)
    payload = payload_of(1, nbytes)
    value = value_of(1, payload, frame)
    lanes.servers[0].sendall(b"+OK\r\n")
    assert lanes.store_one(to_store(1, payload, frame)) == b""
    sent = received(lanes.servers[0], len(b"prefix 1 ") + len(value) + 2)[9:-2]
    assert frame.check_header(sent, 1).checksum == xxh3_64_intdigest(payload)
    lanes.servers[0].sendall(reply_with(value))
    slot = bytearray(nbytes)
    result = lanes.load_one(to_load(1, slot, frame))
    stripe = StripeIO(b"", frame, 1, memoryview(slot))
    found = result if isinstance(result, bytes) else Plain().judge(stripe, result)
    assert found == STORE_ID
    assert slot == payload


# --------------------------------------------------------------------- store


def received(server: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        data += server.recv(nbytes - len(data))
    return data


def test_stores_what_the_frame_says(lanes: Lanes) -> None:
    payload = payload_of(1)
    header = FRAME.header(1, STORE_ID, xxh3_64_intdigest(payload), 99)
    lanes.servers[0].sendall(b"+OK\r\n")
    assert lanes.store([to_store(1, payload)], lanes=1) == Moved([0], [b""], 0)
    whole = b"prefix 1 " + header + payload + b"\r\n"
    assert received(lanes.servers[0], len(whole)) == whole


@pytest.mark.parametrize(
    ("reply", "result"),
    [
        (b"-OOM no\r\n", (End.LINE, 0, b"-OOM no")),
        (b"+OKAY\r\n", (End.LINE, 0, b"+OKAY")),
        (b":1\r\n", (End.LINE, 0, b":1")),
        (b"+OK\r\n+OK\r\n", (End.GARBAGE, 0, b"")),
        (b"$2\r\nOK\r\n", (End.GARBAGE, 0, b"")),
        (b"+" + b"x" * 5000, (End.GARBAGE, 0, b"")),
    ],
)
def test_other_replies_to_a_store(lanes: Lanes, reply: bytes, result: Result) -> None:
    lanes.servers[0].sendall(reply)
    assert lanes.store_one(SENT, 1) == result


def test_an_acknowledgement_in_two_pieces(lanes: Lanes) -> None:
    lanes.servers[0].sendall(b"+O")
    assert lanes.store([to_store(0, payload_of(0))], lanes=1) == Moved([0], [], 0)
    lanes.servers[0].sendall(b"K\r\n")
    assert lanes.store_one(SENT, 1) == b""


def test_a_store_that_is_sent_in_part(lanes: Lanes) -> None:
    """A server that does not read: the next call goes on at the byte where this one stopped."""
    payload = os.urandom(4 << 20)
    task = (b"prefix", bytearray(HEADER_BYTES), memoryview(payload), b"\r\n")
    moved = lanes.store([to_store(0, payload_of(0)), task])
    assert moved == Moved([0, 1], [], errno.EAGAIN)
    got: list[bytes] = []
    nbytes = len(b"prefix") + HEADER_BYTES + len(payload) + 2
    reader = threading.Thread(target=lambda: got.append(received(lanes.servers[1], nbytes)))
    reader.start()
    while moved.sending:
        moved = lanes.store([SENT, task], 2, is_sending=True)
    reader.join()
    assert got == [b"prefix" + task[1] + payload + b"\r\n"]


def test_a_store_to_a_server_that_is_gone(lanes: Lanes) -> None:
    lanes.servers[0].close()
    moved = lanes.store([to_store(0, payload_of(0))], lanes=1)
    assert (moved.lanes, moved.done) == ([0], [])
    assert moved.sending not in (0, errno.EAGAIN)


def test_one_of_several_acknowledgements_is_missing(lanes: Lanes) -> None:
    lanes.servers[0].sendall(b"+OK\r\n")
    lanes.servers[2].sendall(b"+OK\r\n")
    # In order: the third is acknowledged, and that is found out later.
    tasks = [to_store(index, payload_of(index)) for index in range(3)]
    assert lanes.store(tasks) == Moved([0, 1, 2], [b""], 0)


# ------------------------------------------------------------------- one value


@contextlib.contextmanager
def connected() -> Iterator[tuple[Connection, socket.socket]]:
    ours, peer = socket.socketpair()
    connection = Connection(ours, ENDPOINT, 10.0)
    connection.is_open = True
    with contextlib.closing(connection), peer:
        yield connection, peer


@pytest.fixture
def one() -> Iterator[tuple[Connection, socket.socket]]:
    with connected() as one:
        yield one


def test_what_failures_mean(one: tuple[Connection, socket.socket]) -> None:
    connection = one[0]
    assert error_in((End.MISMATCH, 0, b""), connection) is None
    assert error_in((End.NOTHING, 0, b""), connection) is None
    assert isinstance(error_in((End.LINE, 0, b"-OOM x"), connection), RedisError)
    assert isinstance(error_in((End.LINE, 0, b"+OKAY"), connection), RedisProtocolError)
    assert isinstance(error_in((End.GARBAGE, 0, b""), connection), RedisProtocolError)
    assert isinstance(error_in((End.LOST, 0, b""), connection), RedisUnavailable)


def test_calls_take_exactly_their_replies() -> None:
    for replies, kind in (
        (b":1\r\n:2\r\n:3\r\n", RedisProtocolError),
        (b":1\r\n:2\r\n$5\r\nab", RedisProtocolError),
        (b":1\r\n-OOM x\r\n", RedisFull),
        (b":1\r\n", RedisUnavailable),
        (b"what is this\r\n", RedisProtocolError),
        (b"_1\r\n:1\r\n", RedisProtocolError),
        (b":1\r\n?\r\n", RedisProtocolError),
    ):
        with connected() as (connection, peer):
            peer.sendall(replies)
            peer.shutdown(socket.SHUT_WR)
            with pytest.raises(kind):
                connection.call(b"PING\r\n", 2, time.monotonic() + 10)
            # Else what comes next on it would be taken for the next call's.
            assert connection.is_open == (kind is RedisFull)
    with connected() as (connection, peer):
        peer.sendall(b":1\r\n$1\r\na\r\n")
        assert connection.call(b"PING\r\n", 2, time.monotonic() + 10) == [1, b"a"]


def test_a_deadline_in_the_past_costs_no_connection(one: tuple[Connection, socket.socket]) -> None:
    connection, peer = one
    with pytest.raises(RedisTimeout):
        connection.call(b"PING\r\n", 1, time.monotonic() - 1)
    assert connection.is_open
    peer.sendall(b"+PONG\r\n")
    connection.call(PING_COMMAND, 1, time.monotonic() + 5)


def test_a_closed_connection_is_of_no_use(one: tuple[Connection, socket.socket]) -> None:
    connection, _ = one
    connection.close()
    connection.close()
    with pytest.raises(RedisUnavailable):
        connection.call(PING_COMMAND, 1, time.monotonic() + 5)
