"""Transfers on threads: both directions, beside slow clients, with an end at any moment."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lmcache_redis.compat.gateway.movers import Channel, Movers, Transfer
from tests.resp.certificates import Authority

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

    def begin(self, buffers: Sequence[memoryview], *, sending: bool) -> None:
        self.transfer = Transfer(Channel(self.ours), buffers, sending=sending)
        self._ended.clear()
        self._movers.begin(self.transfer, self._ended.set)

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> Exception | None:
        """The error of the transfer."""
        assert self._ended.wait(WAIT_S)
        return self.transfer.error

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
        assert pair.wait() is None
        target = bytearray(nbytes)
        pair.begin(cut(target, seed), sending=False)
        pair.client.sendall(payload)
        assert pair.wait() is None
        assert target == payload
        assert pair.transfer.left == 0


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


@pytest.mark.servers
def test_what_tls_has_decrypted_is_received_beyond_the_budget(tmp_path: Path) -> None:
    """No event tells of it."""
    authority = Authority(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.issue("server", "localhost"))
    theirs = ssl.create_default_context(cafile=authority.ca)
    target = bytearray(1000)

    def talk(client: socket.socket) -> None:
        with theirs.wrap_socket(client, server_hostname="localhost") as secure:
            secure.sendall(b"a" * 1000)
            secure.recv(1)

    with contextlib.ExitStack() as stack:
        ours, client = map(stack.enter_context, socket.socketpair())
        thread = threading.Thread(target=talk, args=(client,))
        thread.start()
        secure = stack.enter_context(context.wrap_socket(ours, server_side=True))
        secure.setblocking(False)
        transfer = Transfer(Channel(secure), [memoryview(target)[:5], memoryview(target)[5:]],
                            sending=False)  # fmt: skip
        deadline_s = time.monotonic() + WAIT_S
        while not transfer.turn(1):
            assert transfer.left == 1000, "all or nothing: it is one record"
            assert time.monotonic() < deadline_s
        secure.close()
        thread.join(WAIT_S)
    assert target == b"a" * 1000


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
        assert slow[0].wait() is None
        assert slow[1].wait() is None
        assert targets[0].rstrip(b"\0") == b"not all"
        for each in slow:
            each.client.close()
        assert all(isinstance(each.wait(), ConnectionError) for each in slow[2:])


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
    assert isinstance(pair.wait(), ConnectionError)


@pytest.mark.parametrize("sending", [True, False])
def test_shut_down_at_any_moment(movers: Movers, sending: bool) -> None:
    """The transfer ends at once, has moved what it says, and touches its buffers no more."""
    choose = random.Random(1)
    for number in range(60):
        data = bytearray(4 << 20)
        with pairs(movers, 1) as (pair,):
            pair.begin([memoryview(data)], sending=sending)
            sent = 0 if sending else choose.choice((0, 1, 50_000, 1 << 20))
            pair.client.sendall(bytes([number + 1]) * sent)
            if choose.random() < 0.5:
                time.sleep(choose.random() * 0.002)
            pair.ours.shutdown(socket.SHUT_RDWR)
            assert isinstance(pair.wait(), ConnectionError)
            left, before = pair.transfer.left, bytes(data)
            assert sending or before == bytes([number + 1]) * (len(data) - left) + bytes(left)
            with contextlib.suppress(OSError):
                pair.client.sendall(b"\xff" * 1000)
            assert data == before


def test_what_fails_for_more_room_ends_with_that_error(pair: Pair) -> None:
    def more(left: int) -> Sequence[memoryview]:
        raise MemoryError(left)

    transfer = Transfer(
        Channel(pair.ours), [memoryview(bytearray(5))], sending=False, left=9, more=more
    )
    ended = threading.Event()
    pair._movers.begin(transfer, ended.set)
    pair.client.sendall(b"123456789")
    assert ended.wait(WAIT_S)
    assert (type(transfer.error), transfer.left) == (MemoryError, 4)


def test_a_socket_that_cannot_be_watched(movers: Movers, tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        channel = Channel(file)  # type: ignore[arg-type]
        transfer = Transfer(channel, [memoryview(bytearray(9))], sending=False)
        with pytest.raises(OSError, match="permitted"):
            movers.begin(transfer, lambda: None)
    assert movers._transfers == {}
    with pairs(movers, 1) as (pair,):
        pair.begin([memoryview(b"goes on")], sending=True)
        assert pair.read(7) == b"goes on"
        pair.wait()  # until then the socket is the threads'


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
