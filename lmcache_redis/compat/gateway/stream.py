# SPDX-License-Identifier: Apache-2.0
"""One client's socket on the loop, with or without TLS: exact receives and sends with a deadline.

Bytes move between the kernel (or TLS) and the caller's buffers, as many as the socket takes or
gives at once; after `_TURN_BYTES` other clients have their turn. When a receive or send returns or
raises, the buffers belong to the caller again.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
from collections.abc import Callable

# Most bytes of one system call. It keeps the socket locked, and the peer's acknowledgements wait:
# 32 MiB in one call are a quarter slower.
_PIECE_BYTES = 1 << 20
_TURN_BYTES = 4 << 20
# Of a payload, copied behind its header so that both are one call.
_WITH_HEADER_BYTES = 32 << 10
_UNREAD_BYTES = 64 << 10
_WAITS = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Gone(Exception):
    """The client closed its side or was lost, or the stream was aborted."""


class ClientStream:
    """See the module. At most one receive or send at a time; on the loop's thread only.

    sock: non-blocking; the stream closes it. timeout_s: for a header from its first byte, a payload
    or a reply; then the stream is aborted, and on_stall is called. in_message: whether the request
    that is being received has begun. waits_from_s: when the wait for it did, on the loop's clock.
    """

    def __init__(
        self,
        sock: socket.socket,
        timeout_s: float = 60.0,
        on_stall: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._fd = sock.fileno()
        self.in_message = False
        self.waits_from_s = self._loop.time()

    async def start_tls(self, context: ssl.SSLContext) -> None:
        """Performs the handshake, before any other call. Raises OSError."""
        self._sock = sock = context.wrap_socket(
            self._sock, server_side=True, do_handshake_on_connect=False
        )
        stall = self._loop.call_later(self._timeout_s, self.abort)
        try:
            while True:
                try:
                    return sock.do_handshake()
                except _WAITS as wait:
                    events = _events_of(wait, 0)
                await self._ready(events)
        finally:
            stall.cancel()

    async def receive_header(self, header: memoryview) -> None:
        """Receives the next request, whenever it comes, or raises `Gone`."""
        self.in_message, self.waits_from_s = False, self._loop.time()
        if not (isinstance(self._sock, ssl.SSLSocket) and self._sock.pending()):
            # It has rarely arrived yet; if it has, other clients come first.
            await self._ready(select.EPOLLIN)
        await self.receive(header)

    async def receive(self, view: memoryview) -> None:
        """Receives as many bytes of a payload as the view has, or raises `Gone`."""
        await self._move(view, receiving=True)

    async def send(self, header: bytes, payload: memoryview | bytes = b"") -> None:
        """Sends both, or raises `Gone`."""
        payload = memoryview(payload)
        await self._move(memoryview(b"".join((header, payload[:_WITH_HEADER_BYTES]))))
        await self._move(payload[_WITH_HEADER_BYTES:])

    def end_requests(self) -> None:
        """Receives nothing more; replies are still sent."""
        self._shut_down(socket.SHUT_RD)

    def abort(self) -> None:
        """Makes a receive or send in flight, and every later one, raise `Gone`."""
        self._shut_down(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes; sent bytes still arrive. No receive or send may be in flight."""
        with contextlib.suppress(OSError, ValueError):
            if isinstance(self._sock, ssl.SSLSocket):
                self._sock.unwrap()  # sends close_notify and does not wait for the client's
        with contextlib.suppress(OSError):
            # Closing with unread bytes resets the connection, and the client loses replies.
            socket.socket.recv(self._sock, _UNREAD_BYTES)
        self._sock.close()

    async def _move(self, view: memoryview, *, receiving: bool = False) -> None:
        stall: asyncio.TimerHandle | None = None
        try:
            while view:
                moved, events = self._turn(view, receiving)
                view = view[moved:]
                if view and self.in_message:  # small messages need no timer
                    stall = stall or self._loop.call_later(self._timeout_s, self._stalled)
                if view:
                    await (self._ready(events) if events else asyncio.sleep(0))
        except OSError as error:
            raise Gone(f"the connection was lost: {error.strerror or error}") from error
        finally:
            if stall is not None:
                stall.cancel()

    def _stalled(self) -> None:
        self._on_stall()
        self.abort()

    def _turn(self, view: memoryview, receiving: bool) -> tuple[int, int]:
        """The bytes moved, and the events to wait for; 0: none. Raises OSError."""
        call = self._sock.recv_into if receiving else self._sock.send
        moved = 0
        while moved < min(len(view), _TURN_BYTES):
            try:
                nbytes = call(view[moved : moved + _PIECE_BYTES])
            except _WAITS as wait:
                return moved, _events_of(wait, select.EPOLLIN if receiving else select.EPOLLOUT)
            if not nbytes:
                raise Gone("the client closed its side")
            moved += nbytes
            self.in_message = True
        return moved, 0

    async def _ready(self, events: int) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        if events == select.EPOLLOUT:
            add, remove = self._loop.add_writer, self._loop.remove_writer
        else:
            add, remove = self._loop.add_reader, self._loop.remove_reader
        add(self._fd, _tell, ready)
        try:
            await ready
        finally:
            remove(self._fd)

    def _shut_down(self, how: int) -> None:
        # Not the method of SSLSocket: it would continue without TLS.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, how)


def _tell(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _events_of(wait: OSError, own: int) -> int:
    """What a socket that would block must be ready for. own: the answer without TLS."""
    if isinstance(wait, ssl.SSLWantReadError):
        return select.EPOLLIN
    return select.EPOLLOUT if isinstance(wait, ssl.SSLWantWriteError) else own
