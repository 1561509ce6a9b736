# SPDX-License-Identifier: Apache-2.0
"""The native extension by itself: checksums, and what it does not take."""

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
from lmcache_redis.chunks.frame import HEADER_BYTES
from lmcache_redis.resp.bulk import End

# In place of a SET that was sent.
SENT = (b"", bytearray(HEADER_BYTES), memoryview(b""), b"")
pytestmark = pytest.mark.skipif(native.moves is None, reason=native.why_not)


# ------------------------------------------------------------------ checksum


@pytest.fixture(params=["plain", "avx2", "avx512", "neon"])
def vectors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checksums are computed with these, where the processor has them."""
    assert native.moves is not None
    if not native.moves.use_vectors(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield
    assert any(native.moves.use_vectors(each) for each in ("avx512", "avx2", "neon", "plain"))


@pytest.mark.usefixtures("vectors")
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=241, max_size=5000), st.integers(0, 1500))
def test_the_checksum_is_xxh3(data: bytes, step: int) -> None:
    """In whatever pieces the data come."""
    assert native.moves is not None
    assert native.moves.xxh3_64(data, step) == xxh3_64_intdigest(data)


@pytest.mark.usefixtures("vectors")
def test_the_checksum_at_the_ends_of_blocks() -> None:
    assert native.moves is not None
    for nbytes in (241, 1023, 1024, 1025, 2048, 2049, 65_536, 1_048_577):
        data = os.urandom(nbytes)
        for step in (0, 1000, 1024, 4096):
            assert native.moves.xxh3_64(data, step) == xxh3_64_intdigest(data)
    with pytest.raises(ValueError, match="240"):  # short data have another checksum
        native.moves.xxh3_64(bytes(240))
    assert not native.moves.use_vectors("avx1024")


# ----------------------------------------------------------- bounds, buffers


def progress() -> bytearray:
    assert native.moves is not None
    return bytearray(native.moves.PROGRESS_BYTES)


def store(lanes: Any, tasks: Any, in_flight: int = 0, is_sending: bool = False) -> Any:
    assert native.moves is not None
    until = time.monotonic() + 0.05
    return native.moves.store(lanes, tasks, in_flight, is_sending, True, until, True, 5)


def load(lanes: Any, tasks: Any, in_flight: int = 0) -> Any:
    assert native.moves is not None
    until = time.monotonic() + 0.05
    return native.moves.load(lanes, tasks, in_flight, False, True, until, True, 5)


@pytest.mark.parametrize(
    ("lanes", "task", "in_flight", "is_sending"),
    [
        ([], SENT, 0, False),
        ([(3, progress)] * 65, SENT, 0, False),
        ([(-1, progress)], SENT, 0, False),
        ([(3, lambda: bytearray(100))], SENT, 0, False),
        ([(3, progress)], (b"", bytearray(511), bytes(300), b""), 0, False),
        ([(3, progress)], (b"", bytearray(513), bytes(300), b""), 0, False),
        ([(3, progress)], SENT, 2, False),
        ([(3, progress)], SENT, -1, False),
        ([(3, progress)], SENT, 0, True),
    ],
)
def test_what_it_does_not_take(
    lanes: list[Any], task: Any, in_flight: int, is_sending: bool
) -> None:
    made = [(fd, make()) for fd, make in lanes]
    with pytest.raises(ValueError, match=r"lane|descriptor|header|tasks|sent in part"):
        store(made, [task], in_flight, is_sending)


def test_what_is_no_task() -> None:
    lanes = [(3, progress())]
    for tasks in ([None], [()], [(b"", b"", b"")], [(b"", bytes(640), bytes(300), b"")], "no list"):
        with pytest.raises((TypeError, BufferError, SystemError)):
            store(lanes, tasks)
    for other in ([None], [3], [(3,)], [(3, bytes(10_000))], "no list"):
        with pytest.raises((TypeError, BufferError, SystemError)):
            store(other, [SENT])
    with pytest.raises(BufferError):
        load(lanes, [(b"", bytes(520), bytes(300), b"")])


def test_buffers_are_given_back() -> None:
    ours, server = socket.socketpair()
    slot = bytearray(4096)
    task = (b"GET", b"$4736\r\n" + bytes(640), memoryview(slot), b"")
    lane = (ours.fileno(), progress())
    # Not what others have too: small numbers, empty bytes.
    own = [task[1], task[2], lane[1]]
    counts = [sys.getrefcount(each) for each in own]
    with ours, server:
        for _ in range(50):
            server.sendall(b"$-1\r\n")
            assert load([lane], [task])[1] == [(End.NOTHING, 0, b"")]
            assert server.recv(10) == b"GET"
            with pytest.raises(ValueError, match="lanes"):
                load([], [task])
    assert [sys.getrefcount(each) for each in own] == counts
    task[2].release()
    slot.clear()  # raises BufferError while anything exports it
    lane[1].clear()


def test_others_run_meanwhile() -> None:
    """The GIL is free while it waits."""
    ours, server = socket.socketpair()
    ran = []
    with ours, server:
        lane = (ours.fileno(), progress())
        thread = threading.Thread(target=lambda: ran.append(time.monotonic()))
        answer = threading.Timer(0.001, lambda: server.sendall(b"+OK\r\n"))
        thread.start()
        answer.start()
        tries = 0
        while not store([lane], [SENT], min(tries, 1))[1]:
            tries += 1
            assert tries < 1000
        thread.join()
        answer.join()
    assert ran


@pytest.mark.servers
def test_it_can_be_switched_off() -> None:
    code = "from lmcache_redis import native; print(native.moves, native.why_not)"
    environment = {**os.environ, native.SWITCH: "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"None {native.SWITCH}=0 is set\n"
