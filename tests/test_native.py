"""The compiled part by itself, over socket pairs: what goes well, and how it says what does not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from lmcache_redis import native
from lmcache_redis.protocol import MemoryFormat, RemoteMetadata
from lmcache_redis.resp import moving
from lmcache_redis.resp.moving import MOST_TASKS, QUIET_MS, SENT, Moved, Packed, Why, load, store
from lmcache_redis.stripe import HEADER_BYTES, ChunkFrame, Verdict

pytestmark = pytest.mark.skipif(native.moves is None, reason=native.why_not)

PAYLOAD = 4096
STORE_ID = bytes(range(16))
COMMAND = b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n"
FRAME = ChunkFrame(
    bytes(range(32)),
    b"a chunk's hash",
    3 * PAYLOAD,
    PAYLOAD,
    RemoteMetadata(3 * PAYLOAD, [(3 * PAYLOAD,)], ["uint8"], MemoryFormat.PAGES).serialize(),
)


def payload_of(index: int, nbytes: int = PAYLOAD) -> bytes:
    return bytes((n * 7 + index) % 251 for n in range(nbytes))


def value_of(index: int, payload: bytes, store_id: bytes = STORE_ID) -> bytes:
    header = bytearray(HEADER_BYTES)
    FRAME.pack_header_into(header, index, store_id, xxh3_64_intdigest(payload), 1234)
    return bytes(header) + payload


def reply_with(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def to_load(index: int, slot: bytearray) -> Packed:
    expected = b"$%d\r\n" % (HEADER_BYTES + len(slot)) + FRAME.unsealed_header(index)
    return COMMAND, expected, memoryview(slot), b""


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


class Lanes:
    """Socket pairs: `fds` are ours, `servers` the other ends."""

    def __init__(self, count: int) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        self.ours = [ours for ours, _ in pairs]
        self.servers = [server for _, server in pairs]
        self.fds = [ours.fileno() for ours in self.ours]
        for server in self.servers:
            server.settimeout(5)

    def close(self) -> None:
        for sock in (*self.ours, *self.servers):
            sock.close()


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = Lanes(3)
    yield made
    made.close()


# ------------------------------------------------------------------ checksum


@pytest.fixture(params=["plain", "avx2", "avx512"])
def vectors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checksums are computed with these, where the processor has them."""
    assert native.moves is not None
    if not native.moves.use_vectors(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield
    assert any(native.moves.use_vectors(each) for each in ("avx512", "avx2", "plain"))


@pytest.mark.usefixtures("vectors")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=241, max_size=5000), st.integers(0, 1500))
def test_the_checksum_is_xxh3(data: bytes, step: int) -> None:
    """In whatever pieces the data come."""
    assert native.moves is not None
    assert native.moves.xxh3_64(data, step) == xxh3_64_intdigest(data)


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("nbytes", [241, 1023, 1024, 1025, 2048, 2049, 65_536, 1_048_577])
def test_the_checksum_at_the_ends_of_blocks(nbytes: int) -> None:
    assert native.moves is not None
    data = os.urandom(nbytes)
    for step in (0, 1000, 1024, 4096):
        assert native.moves.xxh3_64(data, step) == xxh3_64_intdigest(data)


def test_no_other_vectors() -> None:
    assert native.moves is not None
    assert not native.moves.use_vectors("avx1024")


def test_short_data_have_another_checksum() -> None:
    assert native.moves is not None
    with pytest.raises(ValueError, match="240"):
        native.moves.xxh3_64(bytes(240))


# ---------------------------------------------------------------------- load


def test_loads_more_stripes_than_there_are_lanes(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its servers are threads, which a busy machine may let wait.
    monkeypatch.setattr(moving, "QUIET_MS", 10_000)
    slots = [bytearray(PAYLOAD) for _ in range(3)]

    def serve(server: socket.socket, indexes: list[int]) -> None:
        for index in indexes:
            assert server.recv(len(COMMAND), socket.MSG_WAITALL) == COMMAND
            server.sendall(reply_with(value_of(index, payload_of(index))))

    with lanes.servers[0], lanes.servers[1]:
        threads = [
            threading.Thread(target=serve, args=(lanes.servers[0], [0, 2])),
            threading.Thread(target=serve, args=(lanes.servers[1], [1])),
        ]
        for thread in threads:
            thread.start()
        tasks = [to_load(index, slot) for index, slot in enumerate(slots)]
        result = load(lanes.fds[:2], tasks, 0, True, soon(), True)
        for thread in threads:
            thread.join()
    assert result.why is Why.DONE
    assert result.lanes == [0, 1, 0]
    assert result.done == [STORE_ID] * 3
    assert slots == [bytearray(payload_of(index)) for index in range(3)]


def test_leaves_lanes_busy_where_more_waits(lanes: Lanes) -> None:
    slots = [bytearray(PAYLOAD) for _ in range(3)]
    tasks = [to_load(index, slot) for index, slot in enumerate(slots)]
    for index in (0, 1):
        lanes.servers[index].sendall(reply_with(value_of(index, payload_of(index))))
    result = load(lanes.fds[:2], tasks, 0, False, soon(), True)
    # The first reply made room for the third task; nobody waited for its reply.
    assert (result.why, result.lanes, len(result.done)) == (Why.DONE, [0, 1, 0], 1)
    lanes.servers[0].sendall(reply_with(value_of(2, payload_of(2))))
    # Under way, in the order of asking: the second on lane 1, the third on lane 0.
    result = load([lanes.fds[1], lanes.fds[0]], tasks[1:], 2, True, soon(), True)
    assert (result.why, result.lanes, len(result.done)) == (Why.DONE, [], 2)
    assert slots[2] == payload_of(2)


def test_quiet_where_nothing_comes(lanes: Lanes) -> None:
    slot = bytearray(PAYLOAD)
    began = time.monotonic()
    result = load(lanes.fds[:1], [to_load(0, slot)], 0, True, soon(), True)
    assert (result.why, result.lanes, result.done) == (Why.QUIET, [0], [])
    assert time.monotonic() - began >= QUIET_MS / 1000
    # Past its time it does not wait at all, and yet asks.
    result = load(lanes.fds[1:2], [to_load(1, slot)], 0, True, soon(-1), True)
    assert (result.why, result.lanes) == (Why.QUIET, [0])
    assert lanes.servers[1].recv(100) == COMMAND


@pytest.mark.parametrize("end", ["late", "lost"])
def test_a_reply_that_stops_after_every_byte(end: str) -> None:
    """What has come is handed on, to be continued; or the connection is lost."""
    nbytes = 256
    frame = ChunkFrame(
        bytes(32),
        b"h",
        nbytes,
        nbytes,
        RemoteMetadata(nbytes, [(nbytes,)], ["uint8"], MemoryFormat.PAGES).serialize(),
    )
    payload = payload_of(0, nbytes)
    header = bytearray(HEADER_BYTES)
    frame.pack_header_into(header, 0, STORE_ID, xxh3_64_intdigest(payload), 0)
    reply = reply_with(bytes(header) + payload)
    first_bytes = len(b"$768\r\n") + HEADER_BYTES
    cuts = [*range(1, 8), *range(8, first_bytes, 61), *range(first_bytes - 1, len(reply))]
    for cut in cuts:
        ours, server = socket.socketpair()
        with ours, server:
            server.sendall(reply[:cut])
            if end == "lost":
                server.close()
            slot = bytearray(nbytes)
            expected = b"$768\r\n" + frame.unsealed_header(0)
            task = (COMMAND, expected, memoryview(slot), b"")
            result = load([ours.fileno()], [task], 1, True, soon(), True)
            assert result.done == []
            if end == "lost":
                assert (result.why, result.error) == (Why.LOST, 0)
            elif cut < first_bytes:
                assert (result.why, result.first) == (Why.REPLY, reply[:cut])
            else:
                assert (result.why, result.first) == (Why.PART, reply[:first_bytes])
                assert result.moved == cut - first_bytes
                came = min(result.moved, nbytes)
                assert slot[:came] == payload[:came]
                assert result.tail[: result.moved - came] == b"\r\n"[: result.moved - came]


@pytest.mark.parametrize(
    "reply",
    [b"$-1\r\n", b"_\r\n", b"-ERR no\r\n", b"$10\r\n0123456789\r\n", b":1\r\n", b"\0" * 600],
)
def test_another_reply_is_handed_on(lanes: Lanes, reply: bytes) -> None:
    slot = bytearray(PAYLOAD)
    lanes.servers[0].sendall(reply)
    result = load(lanes.fds[:1], [to_load(0, slot)], 1, True, soon(), True)
    assert result.why is Why.REPLY
    assert reply.startswith(result.first)
    assert result.first
    assert slot == bytes(PAYLOAD)


def test_what_came_of_a_long_other_reply_is_in_the_slot(lanes: Lanes) -> None:
    slot = bytearray(PAYLOAD)
    reply = b"$%d\r\n" % (HEADER_BYTES + PAYLOAD - 1) + os.urandom(HEADER_BYTES + PAYLOAD - 1)
    lanes.servers[0].sendall(reply)
    result = load(lanes.fds[:1], [to_load(0, slot)], 1, True, soon(), True)
    assert (result.why, result.done) == (Why.REPLY, [])
    assert result.moved > 0
    assert result.first + slot[: result.moved] == reply


@settings(max_examples=300)
@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255), st.booleans())
def test_a_header_counts_where_python_says_so(at: int, flip: int, resealed: bool) -> None:
    payload = payload_of(1)
    value = bytearray(value_of(1, payload))
    value[at] ^= flip
    if resealed:
        value[168:176] = bytes(8)
        value[168:176] = xxh3_64_intdigest(value[:HEADER_BYTES]).to_bytes(8, "little")
    check = FRAME.check_header(value, 1)
    good = check.verdict is Verdict.OK and check.checksum == xxh3_64_intdigest(payload)
    ours, server = socket.socketpair()
    with ours, server:
        server.sendall(reply_with(bytes(value)))
        slot = bytearray(PAYLOAD)
        result = load([ours.fileno()], [to_load(1, slot)], 1, True, soon(), True)
    assert result.why is (Why.DONE if good else Why.VALUE)
    assert result.done == ([check.store_id] if good else [])
    if not good:
        assert result.first[-HEADER_BYTES:] == value[:HEADER_BYTES]
        assert slot == payload


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("at", [0, 1, PAYLOAD // 2, PAYLOAD - 1])
def test_a_flipped_bit_in_the_payload(lanes: Lanes, at: int, verify: bool) -> None:
    value = bytearray(value_of(0, payload_of(0)))
    value[HEADER_BYTES + at] ^= 1
    lanes.servers[0].sendall(reply_with(bytes(value)))
    slot = bytearray(PAYLOAD)
    result = load(lanes.fds[:1], [to_load(0, slot)], 1, True, soon(), verify)
    assert result.why is (Why.VALUE if verify else Why.DONE)


def test_what_follows_a_payload_must_be_its_end(lanes: Lanes) -> None:
    reply = reply_with(value_of(0, payload_of(0)))
    lanes.servers[0].sendall(reply[:-2] + b"\r\r")
    result = load(lanes.fds[:1], [to_load(0, bytearray(PAYLOAD))], 1, True, soon(), True)
    assert (result.why, result.tail) == (Why.VALUE, b"\r\r")


def test_no_byte_beside_a_slot_changes(lanes: Lanes) -> None:
    room = bytearray(b"\xaa" * (PAYLOAD + 128))
    slot = memoryview(room)[64:-64]
    lanes.servers[0].sendall(reply_with(value_of(2, payload_of(2))) + b"more that nobody asked for")
    expected = b"$%d\r\n" % (HEADER_BYTES + PAYLOAD) + FRAME.unsealed_header(2)
    result = load(lanes.fds[:1], [(COMMAND, expected, slot, b"")], 1, True, soon(), True)
    assert result.why is Why.DONE
    assert room[:64] == room[-64:] == b"\xaa" * 64


def test_a_large_payload_comes_in_pieces(lanes: Lanes) -> None:
    nbytes = 3 * 128 * 1024 + 777
    frame = ChunkFrame(
        bytes(32),
        b"h",
        nbytes,
        nbytes,
        RemoteMetadata(nbytes, [(nbytes,)], ["uint8"], MemoryFormat.PAGES).serialize(),
    )
    payload = os.urandom(nbytes)
    header = bytearray(HEADER_BYTES)
    frame.pack_header_into(header, 0, STORE_ID, xxh3_64_intdigest(payload), 0)
    reply = reply_with(bytes(header) + payload)
    sender = threading.Thread(target=lanes.servers[0].sendall, args=(reply,))
    sender.start()
    slot = bytearray(nbytes)
    expected = b"$%d\r\n" % (HEADER_BYTES + nbytes) + frame.unsealed_header(0)
    task = (COMMAND, expected, memoryview(slot), b"")
    result = load(lanes.fds[:1], [task], 1, True, soon(), True)
    sender.join()
    assert result.why is Why.DONE
    assert slot == payload


# --------------------------------------------------------------------- store


def to_store(index: int, payload: bytes) -> Packed:
    header = bytearray(FRAME.unsealed_header(index, STORE_ID, 99))
    return b"prefix %d " % index, header, memoryview(payload), b"\r\n"


def received(server: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        data += server.recv(nbytes - len(data))
    return data


def test_stores_what_python_would_send(lanes: Lanes) -> None:
    payload = payload_of(1)
    header = bytearray(HEADER_BYTES)
    FRAME.pack_header_into(header, 1, STORE_ID, xxh3_64_intdigest(payload), 99)
    lanes.servers[0].sendall(b"+OK\r\n")
    result = store(lanes.fds[:1], [to_store(1, payload)], 0, True, soon())
    assert (result.why, result.lanes, result.done) == (Why.DONE, [0], [b""])
    whole = b"prefix 1 " + header + payload + b"\r\n"
    assert received(lanes.servers[0], len(whole)) == whole


@pytest.mark.parametrize("reply", [b"+OK", b"-OOM no\r\n", b"+OKAY\r\n", b"+OK\r\n+OK\r\n", b"$"])
def test_another_reply_to_a_store_is_handed_on(lanes: Lanes, reply: bytes) -> None:
    lanes.servers[0].sendall(reply)
    result = store(lanes.fds[:1], [SENT], 1, True, soon())
    assert (result.why, result.first, result.done) == (Why.REPLY, reply, [])


def test_a_store_that_is_sent_in_part(lanes: Lanes) -> None:
    """A server that does not read: Python goes on from the byte at which it stopped."""
    payload = os.urandom(4 << 20)
    packed = (b"prefix", bytearray(HEADER_BYTES), memoryview(payload), b"\r\n")
    result = store(lanes.fds, [to_store(0, payload_of(0)), packed], 0, True, soon())
    assert (result.why, result.lanes, result.lane) == (Why.SENT_PART, [0], 1)
    assert 0 < result.moved < len(payload)
    sent = received(lanes.servers[1], result.moved)
    assert sent == (b"prefix" + packed[1] + payload)[: result.moved]


def test_a_store_to_nobody(lanes: Lanes) -> None:
    lanes.servers[0].close()
    result = store(lanes.fds[:1], [to_store(0, payload_of(0))], 0, True, soon())
    assert (result.why, result.lanes, result.lane) == (Why.SEND_LOST, [], 0)
    assert result.error


def test_one_of_several_acknowledgements_is_missing(lanes: Lanes) -> None:
    lanes.servers[0].sendall(b"+OK\r\n")
    lanes.servers[2].sendall(b"+OK\r\n")
    tasks = [to_store(index, payload_of(index)) for index in range(3)]
    result = store(lanes.fds, tasks, 0, True, soon())
    # In order: the third is acknowledged, and that is found out later.
    assert (result.why, result.lanes, result.done) == (Why.QUIET, [0, 1, 2], [b""])


# ----------------------------------------------------------- bounds, buffers


@pytest.mark.parametrize(
    ("fds", "task", "under_way"),
    [
        ([], SENT, 0),
        ([3] * 65, SENT, 0),
        ([-1], SENT, 0),
        ([3], (b"", bytearray(511), bytes(300), b""), 0),
        ([3], (b"", bytearray(513), bytes(300), b""), 0),
        ([3], (b"", bytearray(512), bytes(240), b""), 0),
        ([3], SENT, 2),
        ([3], SENT, -1),
    ],
)
def test_what_it_does_not_take(fds: list[int], task: Any, under_way: int) -> None:
    with pytest.raises(ValueError, match=r"lanes|descriptor|header|payload|tasks"):
        store(fds, [task], under_way, True, soon())


def test_what_is_no_task() -> None:
    assert native.moves is not None
    for tasks in ([None], [()], [(b"", b"", b"")], [(b"", bytes(512), bytes(300), b"")], "no list"):
        with pytest.raises((TypeError, BufferError, SystemError)):
            native.moves.store([3], tasks, 0, True, 1, 0.0)
    with pytest.raises(BufferError):
        native.moves.load([3], [(b"", bytes(520), bytes(300), b"")], 0, True, 1, 0.0, True)


def test_buffers_are_given_back(lanes: Lanes) -> None:
    slot = bytearray(PAYLOAD)
    task = to_load(0, slot)
    counts = [sys.getrefcount(each) for each in task]
    for _ in range(50):
        lanes.servers[0].sendall(b"$-1\r\n")
        result: Moved = load(lanes.fds[:1], [task], 1, True, soon(), True)
        assert result.first == b"$-1\r\n"
        with pytest.raises(ValueError, match="lanes"):
            load([], [task], 0, True, soon(), True)
    assert [sys.getrefcount(each) for each in task] == counts
    task[2].release()
    slot.clear()  # raises BufferError while anything exports it


def test_others_run_meanwhile(lanes: Lanes) -> None:
    """The GIL is free while it waits."""
    ran = []
    thread = threading.Thread(target=lambda: ran.append(time.monotonic()))
    answer = threading.Timer(0.001, lambda: lanes.servers[0].sendall(b"+OK\r\n"))
    thread.start()
    answer.start()
    tries = 0
    while store(lanes.fds[:1], [SENT], 1, True, soon()).why is Why.QUIET:
        tries += 1
        assert tries < 1000
    thread.join()
    answer.join()
    assert ran


def test_most_tasks_fit() -> None:
    """What `lanes` hands over at most: a task on each of 64 lanes, and as many as it begins."""
    assert 64 + MOST_TASKS <= 256


def test_it_can_be_switched_off() -> None:
    code = "from lmcache_redis import native; print(native.moves, native.why_not)"
    environment = {**os.environ, native.SWITCH: "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"None {native.SWITCH}=0 is set\n"
