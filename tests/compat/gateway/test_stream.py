# SPDX-License-Identifier: Apache-2.0
"""One stream: turns of the loop, cancellations, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine

import pytest

from lmcache_redis.compat.gateway.stream import ClientStream, Gone

MIB = 1 << 20
WAIT_S = 20.0
Work = Callable[[ClientStream, socket.socket], Coroutine[None, None, None]]


def run(work: Work) -> None:
    """work: gets a stream and its client, which blocks."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = socket.create_connection(listener.getsockname(), WAIT_S)
            ours = listener.accept()[0]
        ours.setblocking(False)
        with client, contextlib.closing(ClientStream(ours)) as stream:
            await asyncio.wait_for(work(stream, client), WAIT_S)

    asyncio.run(main())


def test_requests_that_are_there_hold_up_no_other_client() -> None:
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

    run(work)


@pytest.mark.parametrize("sending", [True, False])
@pytest.mark.parametrize("how", ["cancel", "abort"])
def test_after_the_end_the_buffers_are_the_callers(sending: bool, how: str) -> None:
    async def work(stream: ClientStream, client: socket.socket) -> None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        memory = bytearray(160 * MIB if sending else 4 * MIB)
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
            assert memory == b"a" * 1000 + bytes(4 * MIB - 1000)
        memory.append(1)  # no view of it is left

    run(work)
