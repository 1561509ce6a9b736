"""One stream on both loops: turns of the loop, cancellations, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lmcache_redis.compat.gateway.stream import MOVED_BYTES, ClientStream, Gone
from tests.compat.gateway.conftest import NewLoop
from tests.resp.certificates import Authority

MIB = 1 << 20
WAIT_S = 20.0
Work = Callable[[ClientStream, socket.socket], Coroutine[None, None, None]]


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[ClientStream, socket.socket]]:
    """A stream with one thread for large transfers, and its client, which blocks."""
    pool = ThreadPoolExecutor(1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), WAIT_S)
        ours = listener.accept()[0]
    ours.setblocking(False)
    try:
        with client, contextlib.closing(ClientStream(ours, pool)) as stream:
            yield stream, client
    finally:
        pool.shutdown()


async def is_free(memory: bytearray) -> None:
    """No view of it is left; a thread of the pool may drop its last one a moment later."""
    for _ in range(2000):
        try:
            memory.append(1)
        except BufferError:  # noqa: PERF203
            await asyncio.sleep(0.005)
        else:
            return
    raise AssertionError("a view is left")


def run(new_loop: NewLoop, work: Work) -> None:
    async def main() -> None:
        async with connected() as (stream, client):
            await asyncio.wait_for(work(stream, client), WAIT_S)

    loop = new_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def test_requests_that_are_there_hold_up_no_other_client(any_loop: NewLoop) -> None:
    """The loop does something else before each of them."""

    async def work(stream: ClientStream, client: socket.socket) -> None:
        header, others = memoryview(bytearray(100)), 0
        client.sendall(bytes(100 * 50))

        async def other() -> None:
            nonlocal others
            while True:
                others += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(other())
        try:
            for number in range(50):
                await stream.receive_header(header)
                assert others >= number
        finally:
            task.cancel()

    run(any_loop, work)


@pytest.mark.parametrize("nbytes", [MOVED_BYTES - 1, 4 * MIB], ids=["on the loop", "on a thread"])
@pytest.mark.parametrize("sending", [True, False])
@pytest.mark.parametrize("how", ["cancel", "abort"])
def test_after_the_end_the_buffers_are_the_callers(
    any_loop: NewLoop, nbytes: int, sending: bool, how: str
) -> None:
    async def work(stream: ClientStream, client: socket.socket) -> None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        memory = bytearray(nbytes * 40 if sending else nbytes)
        if sending:
            task = asyncio.ensure_future(stream.send(b"", memoryview(memory)))
        else:
            client.sendall(b"a" * 1000)
            task = asyncio.ensure_future(stream.receive(memoryview(memory)))
        await asyncio.sleep(0.05)
        assert not task.done()
        task.cancel() if how == "cancel" else stream.abort()
        with pytest.raises(asyncio.CancelledError if how == "cancel" else Gone):
            await task
        del task
        await asyncio.sleep(0)  # the loop has it until then
        with contextlib.suppress(OSError):
            client.sendall(b"b" * 1000)
        if not sending:
            assert memory == b"a" * 1000 + bytes(nbytes - 1000)
        await is_free(memory)

    run(any_loop, work)


@pytest.mark.servers
def test_large_payloads_with_tls_move_on_threads(any_loop: NewLoop, tmp_path: Path) -> None:
    """Headers, small and large payloads share records; nothing waits for more than there is."""
    authority = Authority(tmp_path)
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(*authority.issue("server", "localhost"))
    theirs = ssl.create_default_context(cafile=authority.ca)
    source = random.Random(1)
    payloads = [source.randbytes(n) for n in (MOVED_BYTES, 5, 3 * MIB + 7, 16_000, MIB)]

    async def work(stream: ClientStream, client: socket.socket) -> None:
        def talk() -> None:
            with theirs.wrap_socket(client, server_hostname="localhost") as secure:
                secure.sendall(b"h" * 200)  # two headers in one record, and no more for now
                assert secure.recv(2) == b"ok"
                secure.sendall(b"".join(b"h" * 100 + each for each in payloads))
                for each in payloads:
                    got = bytearray()
                    while len(got) < len(each):
                        got += secure.recv(len(each) - len(got))
                    assert got == each
                assert secure.recv(1) == b"", "the end is said, not a connection that breaks off"

        talking = asyncio.ensure_future(asyncio.to_thread(talk))
        await stream.start_tls(ours)
        header = memoryview(bytearray(100))
        for _ in range(2):
            await stream.receive_header(header)
        await stream.send(b"ok")
        for each in payloads:
            await stream.receive_header(header)
            assert header == b"h" * 100
            memory = bytearray(len(each))
            await stream.receive(memoryview(memory))
            assert memory == each
            await is_free(memory)
        for each in payloads:
            await stream.send(each[:1], memoryview(each)[1:])
        stream.close()
        await talking

    run(any_loop, work)
