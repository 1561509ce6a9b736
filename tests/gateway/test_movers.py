"""Threads that move payloads: both directions, beside slow clients, with an end at any moment."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from lmcache_redis.gateway.movers import Movers, Transfer

WAIT_S = 20.0


class Pair:
    """A socket that the movers use, and its client."""

    def __init__(self, movers: Movers) -> None:
        # Not a pair of Unix sockets: those fill up and end in other ways.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.client = socket.create_connection(listener.getsockname(), WAIT_S)
            self.ours = listener.accept()[0]
        self.ours.setblocking(False)
        self._movers = movers
        self._ended = threading.Event()
        self.errors: list[Exception | None] = []

    def begin(self, buffers: Sequence[memoryview], *, sending: bool) -> Transfer:
        transfer = Transfer(self.ours.fileno(), buffers, sending=sending, ended=self._end)
        self._ended.clear()
        self._movers.begin(transfer)
        return transfer

    def _end(self, error: Exception | None) -> None:
        self.errors.append(error)
        self._ended.set()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        assert self._ended.wait(WAIT_S)

    def read(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            received = self.client.recv_into(view)
            assert received
            view = view[received:]
        return bytes(data)

    def reset(self) -> None:
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.client.close()


@pytest.fixture
def movers() -> Iterator[Movers]:
    movers = Movers(1)
    yield movers
    movers.close()


@pytest.fixture
def pair(movers: Movers) -> Iterator[Pair]:
    with pairs(movers, 1) as (pair,):
        yield pair


@contextlib.contextmanager
def pairs(movers: Movers, count: int) -> Iterator[list[Pair]]:
    made = [Pair(movers) for _ in range(count)]
    try:
        yield made
    finally:
        for pair in made:
            pair.client.close()
            pair.ours.close()


def cut(data: bytearray, seed: int) -> list[memoryview]:
    """All of it, in buffers of sizes from nothing to all at once."""
    choose, views, at = random.Random(seed), [], 0
    while at < len(data):
        nbytes = choose.choice((0, 1, 17, 4096, 100_000, 3 << 20))
        views.append(memoryview(data)[at : at + nbytes])
        at += nbytes
    return views


@pytest.mark.parametrize("nbytes", [1, 300_000, (5 << 20) + 3])
def test_every_byte_in_both_directions(pair: Pair, nbytes: int) -> None:
    for seed in range(4):
        payload = random.Random(seed).randbytes(nbytes)
        pair.begin(cut(bytearray(payload), seed), sending=True)
        assert pair.read(nbytes) == payload
        pair.wait()
        target = bytearray(nbytes)
        transfer = pair.begin(cut(target, seed), sending=False)
        pair.client.sendall(payload)
        pair.wait()
        assert target == payload
        assert transfer.left == 0
    assert pair.errors == [None] * 8


def test_no_byte_more_than_was_asked_for(pair: Pair) -> None:
    target = bytearray(1000)
    pair.begin([memoryview(target)], sending=False)
    pair.client.sendall(b"a" * 1000 + b"the next request")
    pair.wait()
    assert target == b"a" * 1000
    assert pair.ours.recv(100) == b"the next request"


def test_thousands_of_small_buffers(pair: Pair) -> None:
    payload = random.Random(1).randbytes(60_000)
    target = bytearray(60_000)
    pair.begin([memoryview(target)[at : at + 7] for at in range(0, 60_000, 7)], sending=False)
    pair.client.sendall(payload)
    pair.wait()
    assert target == payload


def test_slow_clients_hold_no_thread(movers: Movers) -> None:
    """One thread, forty clients that send or read nothing, and one that does."""
    payload = bytearray(random.Random(1).randbytes(32 << 20))
    targets = [bytearray(1 << 20) for _ in range(20)]
    with pairs(movers, 40) as slow, pairs(movers, 1) as (fast,):
        for number, each in enumerate(slow):
            if number % 2:
                each.begin([memoryview(payload)], sending=True)
            else:
                each.begin([memoryview(targets[number // 2])], sending=False)
                each.client.sendall(b"not all")
        for _ in range(3):
            fast.begin([memoryview(payload)], sending=True)
            assert fast.read(len(payload)) == payload
            fast.wait()
        assert not any(each.has_ended for each in slow)
        assert slow[1].read(len(payload)) == payload
        slow[0].client.sendall(bytes((1 << 20) - 7))
        slow[0].wait()
        slow[1].wait()
        assert targets[0].rstrip(b"\0") == b"not all"
        for each in slow:
            each.client.close()
        for each in slow:
            each.wait()
        assert [type(each.errors[0]) for each in slow[:2]] == [type(None)] * 2
        assert all(isinstance(each.errors[0], ConnectionError) for each in slow[2:])


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("sending", [True, False])
def test_a_client_that_goes_ends_it(pair: Pair, how: str, sending: bool) -> None:
    memory = bytearray(32 << 20)
    pair.begin([memoryview(memory)], sending=sending)
    if sending:
        pair.read(3 << 20)
    else:
        pair.client.sendall(bytes(3 << 20))
    pair.reset() if how == "reset" else pair.client.close()
    pair.wait()
    assert isinstance(pair.errors[0], ConnectionError)


def test_after_a_cancellation_nothing_touches_buffers_and_socket(pair: Pair) -> None:
    target = bytearray(1 << 20)
    transfer = pair.begin([memoryview(target)], sending=False)
    pair.client.sendall(b"a" * 1000)
    deadline_s = time.monotonic() + WAIT_S
    while transfer.left != len(target) - 1000:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    pair._movers.cancel(transfer)
    pair._movers.cancel(transfer)
    pair.client.sendall(b"b" * 1000)
    assert select.select([pair.ours], [], [], WAIT_S)[0]
    time.sleep(0.02)
    assert target == b"a" * 1000 + bytes(len(target) - 1000)
    assert pair.ours.recv(2000) == b"b" * 1000
    assert pair.errors == []
    target.extend(b"no view of it is left")


def test_cancelled_at_any_moment(movers: Movers) -> None:
    """The same socket serves the next transfer at once, and nothing of the one before is in it."""
    choose = random.Random(1)
    with pairs(movers, 1) as (pair,):
        for number in range(300):
            target = bytearray(100_000)
            transfer = pair.begin([memoryview(target)], sending=False)
            sent = choose.choice((0, 1, 50_000, 100_000))
            pair.client.sendall(bytes([number % 255 + 1]) * sent)
            if choose.random() < 0.5:
                time.sleep(choose.random() * 0.001)
            movers.cancel(transfer)
            left, before = transfer.left, bytes(target)
            assert before == bytes([number % 255 + 1]) * (100_000 - left) + bytes(left)
            rest = bytearray(sent - (100_000 - left) + 1)
            pair.begin([memoryview(rest)], sending=False)
            pair.client.sendall(b"\0")
            pair.wait()
            assert rest == bytes([number % 255 + 1]) * (len(rest) - 1) + b"\0"
            assert target == before


def test_a_socket_that_cannot_be_watched(movers: Movers) -> None:
    with socket.socket() as closed:
        fd = closed.fileno()
    transfer = Transfer(fd, [memoryview(bytearray(9))], sending=False, ended=lambda _: None)
    with pytest.raises(OSError, match="descriptor"):
        movers.begin(transfer)
    movers.cancel(transfer)
    with pairs(movers, 1) as (pair,):
        pair.begin([memoryview(b"goes on")], sending=True)
        assert pair.read(7) == b"goes on"


def test_several_threads_share_the_work() -> None:
    movers = Movers(4)
    payload = bytearray(random.Random(1).randbytes(4 << 20))
    with pairs(movers, 16) as several:
        targets = [bytearray(len(payload)) for _ in several]
        for pair, target in zip(several, targets, strict=True):
            pair.begin([memoryview(target)], sending=False)
        threads = [
            threading.Thread(target=pair.client.sendall, args=(payload,)) for pair in several
        ]
        for thread in threads:
            thread.start()
        for pair in several:
            pair.wait()
        for thread in threads:
            thread.join()
        assert all(target == payload for target in targets)
    movers.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("gateway-mover")]
